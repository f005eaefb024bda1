"""How one session follows the leases: by saying that it is there, and reading them when they have changed.

    follower = Follower(database, session, holder, source)
    seen = follower.look()            # every BEAT seconds
    ...                               # bind what is admitted from now on by seen.leases, until seen.until
    follower.acknowledge(seen)        # once nothing is under way that was admitted before; until then beat()

What the server of a mount is told is the plain document that `Seen.leases` is; `policy.leases` reads it.
"""

from __future__ import annotations

import time
from typing import Any, Final, NamedTuple

from sqlalchemy import select

from bonobofs.state import heartbeats
from bonobofs.state.database import Database
from bonobofs.state.heartbeats import BEAT, LAPSE
from bonobofs.state.leases import Lease, living
from bonobofs.state.schema import clock, leases, milliseconds_of

_MARGIN: Final = 0.1
"""Seconds by which a session stops relying on its word before others do: a database counts milliseconds."""

__all__ = ["BEAT", "LAPSE", "Follower", "Seen", "plain"]


class Seen(NamedTuple):
    """What a look has shown."""

    generation: int
    until: float
    """Seconds of CLOCK_BOOTTIME: what is known holds until then, unless it is looked again."""
    leases: list[dict[str, Any]] | None
    """The leases that bind this session, or are its own; None: those of before."""
    soonest: int | None
    """When the first of them ends, by the database's clock."""


class Follower:
    """The leases, as one session knows them. Used by one thread."""

    def __init__(self, database: Database, session: str, holder: str, source: str) -> None:
        """`session` is its UUID, `holder` the key under which it holds leases, `source` what it guards."""
        self._database: Final = database
        self._session: Final = session
        self._holder: Final = holder
        self._source: Final = source
        self._known = Seen(0, 0.0, [], 0)
        """What was acknowledged last; nothing at first, as its leases ended long ago."""

    def look(self) -> Seen:
        """Say that the session is there, and read what has changed. StateError: what is known is known no longer."""
        # The clock goes on while the machine sleeps, as the database's does.
        until = time.clock_gettime(time.CLOCK_BOOTTIME) + LAPSE - _MARGIN
        self.beat()
        known = self._known
        with self._database.read() as connection:
            # First the number: leases that are read with it may be newer, never older.
            generation = heartbeats.generation(connection)
            now = connection.execute(select(clock())).scalar_one()
            if generation == known.generation and (known.soonest is None or now < known.soonest):
                return known._replace(until=until, leases=None)
            here = leases.c.workspace.is_(None) | (leases.c.workspace == self._source)
            found = living(connection, here)
        soonest = min((milliseconds_of(lease.until) for lease in found), default=None)
        return Seen(generation, until, [plain(lease, self._holder) for lease in found], soonest)

    def beat(self) -> None:
        """Say only that the session is there: what it is bound by stays what it was, and ends when it was to end."""
        heartbeats.write_heartbeat(self._database, self._session, self._known.generation)

    def acknowledge(self, seen: Seen) -> None:
        """Say that every change of this session is bound by what was seen, none admitted before being under way."""
        behind = seen.generation > self._known.generation
        self._known = seen
        if behind:
            self.beat()


def plain(lease: Lease, holder: str) -> dict[str, Any]:
    """A lease as `policy.leases` reads it, for the session of that holder."""
    return {
        "patterns": list(lease.patterns),
        "shared": lease.shared,
        "own": lease.holder.key == holder,
        "holder": lease.holder.agent,
        "holder_id": lease.holder.agent_id,
        "chain": lease.holder.chain,
        "until": lease.until.isoformat(timespec="seconds"),
    }
