"""Follow the leases for one session: send heartbeats, read the leases when they change, acknowledge what is applied.

snapshot = reader.read()          # every BEAT seconds
...                               # judge every change by snapshot.leases until snapshot.expires_at
reader.acknowledge(snapshot)      # once every change that was judged by an earlier snapshot has ended
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime, monotonic
from typing import Any, Final, NamedTuple

from sqlalchemy import select

from bonobofs.errors import BonobofsError
from bonobofs.state import heartbeats
from bonobofs.state.database import Database
from bonobofs.state.heartbeats import BEAT, LAPSE
from bonobofs.state.leases import Lease, living
from bonobofs.state.schema import clock, leases, milliseconds_of

_MARGIN: Final = 0.1
"""Seconds by which a snapshot expires here before other sessions stop waiting: the database counts milliseconds."""

__all__ = ["BEAT", "LAPSE", "LeaseFollower", "LeaseReader", "LeaseSnapshot", "plain"]


class LeaseSnapshot(NamedTuple):
    """The leases as one read has found them."""

    generation: int
    expires_at: float
    """Seconds of CLOCK_BOOTTIME."""
    leases: list[dict[str, Any]] | None
    """Leases in this session's workspace, its own included; None: unchanged since the last acknowledged snapshot."""
    first_end: int | None
    """When the first of them ends, in milliseconds of the database's clock."""


class LeaseReader:
    """Heartbeats and reads of one session. For one thread."""

    def __init__(self, database: Database, session: str, holder: str, source: str) -> None:
        """`session` is the UUID, `holder` the key under which the session holds leases."""
        self._database: Final = database
        self._session: Final = session
        self._holder: Final = holder
        self._source: Final = source
        self._acknowledged = LeaseSnapshot(0, 0.0, [], 0)

    def read(self) -> LeaseSnapshot:
        """Send a heartbeat and read the leases if they have changed. StateError."""
        # CLOCK_BOOTTIME and the database's clock run on while the machine sleeps.
        expires_at = clock_gettime(CLOCK_BOOTTIME) + LAPSE - _MARGIN
        self.heartbeat()
        last = self._acknowledged
        with self._database.read() as connection:
            # The generation first: the leases may then be newer than it, never older.
            generation = heartbeats.generation(connection)
            now = connection.execute(select(clock())).scalar_one()
            if generation == last.generation and (last.first_end is None or now < last.first_end):
                return last._replace(expires_at=expires_at, leases=None)
            here = leases.c.workspace.is_(None) | (leases.c.workspace == self._source)
            found = living(connection, here)
        first_end = min((milliseconds_of(lease.until) for lease in found), default=None)
        return LeaseSnapshot(generation, expires_at, [plain(lease, self._holder) for lease in found], first_end)

    def heartbeat(self) -> None:
        """Send a heartbeat. It does not extend the expiry of a snapshot."""
        heartbeats.write_heartbeat(self._database, self._session, self._acknowledged.generation)

    def acknowledge(self, snapshot: LeaseSnapshot) -> None:
        """Tell the other sessions that no change judged by an earlier snapshot is in flight."""
        is_newer = snapshot.generation > self._acknowledged.generation
        self._acknowledged = snapshot
        if is_newer:
            self.heartbeat()

    def detach(self) -> None:
        """Record that the session has ended."""
        heartbeats.detach(self._database, self._session)


Apply = Callable[[LeaseSnapshot, Callable[[], None]], bool]
"""Called with a snapshot and a function that sends a heartbeat; returns whether every change is judged by it now."""


class LeaseFollower:
    """Reads the leases every BEAT seconds in `run` until `ended` is set."""

    def __init__(
        self, home: Path, session: str, holder: str, source: str, apply: Apply, ended: threading.Event
    ) -> None:
        """`session` and `holder` as for `LeaseReader`. A missing database is an error: it is not created."""
        self._home: Final = home
        self._identity: Final = session, holder, source
        self._apply: Final = apply
        self._ended: Final = ended
        self._database: Database | None = None
        self._reader: LeaseReader | None = None

    def read_first(self) -> None:
        """Apply a first snapshot before `run`. StateError."""
        try:
            self._follow_once()
        except BaseException:
            self._close()
            raise

    def run(self, report: Callable[[Exception], None]) -> None:
        """Follow the leases. `report` gets each error, such as of a database that does not answer."""
        next_read = 0.0 if self._reader is None else monotonic() + BEAT
        while not self._ended.wait(max(0.0, next_read - monotonic())):
            next_read = monotonic() + BEAT
            try:
                self._follow_once()
            except (BonobofsError, OSError) as error:
                # The enforcer refuses changes once the last snapshot expires.
                report(error)
                self._close()
                next_read = monotonic() + BEAT
        if self._reader is not None:
            with suppress(BonobofsError, OSError):  # otherwise the session lapses without heartbeats
                self._reader.detach()
        self._close()

    def _follow_once(self) -> None:
        if self._reader is None:
            self._database = Database(self._home)
            self._reader = LeaseReader(self._database, *self._identity)
        snapshot = self._reader.read()
        if self._apply(snapshot, self._reader.heartbeat):
            self._reader.acknowledge(snapshot)

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
        self._database = self._reader = None


def plain(lease: Lease, holder: str) -> dict[str, Any]:
    """A lease as `policy.lease_set` reads it, for the session of that holder."""
    return {
        "patterns": list(lease.patterns),
        "shared": lease.shared,
        "own": lease.holder.key == holder,
        "holder": lease.holder.agent,
        "holder_id": lease.holder.agent_id,
        "chain": lease.holder.chain,
        "until": lease.until.isoformat(timespec="seconds"),
    }
