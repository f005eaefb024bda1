"""Leases: who may change what matches some patterns, until when.

A lease is held by a chain of work where there is one, else by an agent. Exclusive: only the holder changes what
matches. Shared: any of its shared holders does, nobody else. A holder that acquires again replaces its lease. Acquiring
is one transaction in which nobody else changes leases: all of it is granted or none, and of several who ask for the
same at once one gets it. What can be compared before it, is: on SQLite no session can say that it is there meanwhile.
Time is the database's.

A lease that is granted binds whoever is told of it; `wait` returns when all are. Whether two patterns meet is not this
module's to know: who calls says how to tell (`Overlap`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
import uuid
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Final, NamedTuple, TypeVar

from sqlalchemy import ColumnElement, Connection, delete, insert, literal, select, update

from bonobofs.errors import ForbiddenError, UsageError
from bonobofs.state import heartbeats
from bonobofs.state.database import Database
from bonobofs.state.schema import agents, clock, lease_patterns, leases, milliseconds_of, moment

DAY: Final = 86_400
"""Seconds that a lease lasts unless it is said otherwise."""
MOST_PATTERNS: Final = 1000
_MOST_BYTES: Final = 1 << 17
"""Of all patterns of a lease: every session is told of every lease."""
_LONGEST_REASON: Final = 500
_LONGEST_SECONDS: Final = 366 * DAY
_BETWEEN_LOOKS: Final = 0.05
_SECONDS_ALONE: Final = 0.5
"""For which leases may be compared while everybody else waits; a session that waits for two is taken for silent."""

Grant = TypeVar("Grant")
Overlap = Callable[[str, str], bool]
"""Whether some path could match both patterns."""


class Holder(NamedTuple):
    """Who holds a lease. The chain does where there is one; the agent is then who acquired it."""

    agent: str
    """Label."""
    agent_id: str | None
    """None: known to Agent Mail only."""
    chain: str | None = None

    @property
    def key(self) -> str:
        """What tells one holder from another."""
        if self.chain is not None:
            return f"chain:{self.chain}"
        return f"agent:{self.agent_id}" if self.agent_id is not None else f"mail:{self.agent}"

    def __str__(self) -> str:
        return f"chain {self.chain} ({self.agent})" if self.chain is not None else self.agent


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """A lease that counts, or did when it was read."""

    id: str
    holder: Holder
    patterns: tuple[str, ...]
    shared: bool
    workspace: str | None
    """The one source that it covers; None: every source."""
    reason: str
    origin: str
    """Empty; else where it is mirrored from."""
    acquired: datetime
    until: datetime


class LeaseRequest(NamedTuple):
    """What is asked for. `seconds` is how long from now."""

    holder: Holder
    patterns: tuple[str, ...]
    shared: bool = False
    seconds: float = DAY
    reason: str = ""
    workspace: str | None = None
    origin: str = ""


class Conflict(NamedTuple):
    """Why it is not granted: somebody else's lease, and the two patterns that meet."""

    lease: Lease
    wanted: str
    held: str

    def __str__(self) -> str:
        until = self.lease.until.isoformat(timespec="seconds")
        return f"{self.wanted} overlaps with {self.held}, held by {self.lease.holder} until {until}"


class LeaseChange(NamedTuple):
    """A change of the leases, and the generation that it began."""

    lease: Lease
    generation: int


def acquire(database: Database, wanted: LeaseRequest, overlap: Overlap) -> LeaseChange:
    """Grant all that is wanted, in place of what this holder held before from the same origin.

    ForbiddenError, and nothing is changed, where somebody else's lease overlaps. UsageError for what cannot be meant.
    Others may still be changing what matches when this returns: `wait` for the generation.
    """
    check(wanted)

    def grant(connection: Connection) -> LeaseChange:
        name = enter(connection, wanted, clock() + round(1000 * wanted.seconds))
        return LeaseChange(_stored(connection, name), heartbeats.generation(connection))

    granted = unless_others_hold_it(database, wanted, overlap, grant)
    if isinstance(granted, Conflict):
        raise ForbiddenError(f"{granted}; wait for it, or ask them to release it")
    return granted


def wait(
    database: Database, generation: int, *, told: Callable[[list[heartbeats.LiveSession]], None] | None = None
) -> None:
    """Return when every live session has acknowledged this generation, or is silent and so refuses all changes.

    `told` is called with those that are waited for, each time it is looked.
    """
    while True:
        with database.read() as connection:
            behind = heartbeats.living(connection, behind=generation)
        if not behind:
            return
        if told is not None:
            told(behind)
        time.sleep(_BETWEEN_LOOKS)


def extend(database: Database, lease: str, seconds: float = DAY, *, by: Holder | None = None) -> LeaseChange:
    """Let a lease last for this long from now. `by` is who asks; None: the operator, who may extend everybody's.

    ForbiddenError for somebody else's; UsageError for one that has ended: what it covered may be another's by now.
    """
    _check_seconds(seconds)
    with database.change() as connection:
        found = _theirs(connection, lease, by)
        connection.execute(update(leases).where(leases.c.id == found.id).values(until=clock() + round(1000 * seconds)))
        return LeaseChange(_stored(connection, found.id), heartbeats.next_generation(connection))


def release(database: Database, lease: str, *, by: Holder | None = None) -> LeaseChange:
    """End a lease. `by` as for `extend`."""
    with database.change() as connection:
        found = _theirs(connection, lease, by)
        connection.execute(delete(leases).where(leases.c.id == found.id))
        return LeaseChange(found, heartbeats.next_generation(connection))


def list_leases(database: Database) -> list[Lease]:
    """The leases that count now, the oldest first."""
    with database.read() as connection:
        return living(connection)


def living(connection: Connection, *where: ColumnElement[bool]) -> list[Lease]:
    """The leases that have not expired, the oldest first."""
    return _select(connection, leases.c.until > clock(), *where)


def _select(connection: Connection, *where: ColumnElement[bool]) -> list[Lease]:
    """Leases of any expiry, the oldest first."""
    rows = connection.execute(select(leases).where(*where).order_by(leases.c.acquired, leases.c.id)).all()
    patterns: dict[str, list[str]] = {row.id: [] for row in rows}
    wanted = select(lease_patterns.c.lease, lease_patterns.c.pattern).join_from(lease_patterns, leases).where(*where)
    for lease, pattern in connection.execute(wanted.order_by(lease_patterns.c.pattern)):
        if lease in patterns:
            patterns[lease].append(pattern)
    return [
        Lease(
            id=row.id,
            holder=Holder(row.agent_name, row.agent, row.chain),
            patterns=tuple(patterns[row.id]),
            shared=row.shared,
            workspace=row.workspace,
            reason=row.reason,
            origin=row.origin,
            acquired=moment(row.acquired),
            until=moment(row.until),
        )
        for row in rows
    ]


def expire(database: Database) -> int:
    """Take away the rows of leases that have ended, and say how many. Nothing hangs on it but their number."""
    with database.change() as connection:
        return connection.execute(delete(leases).where(leases.c.until <= clock())).rowcount


def check(wanted: LeaseRequest) -> None:
    """UsageError for what cannot be meant."""
    if not wanted.patterns:
        raise UsageError("a lease needs a pattern; name what it is to cover, such as docs/**")
    if len(wanted.patterns) > MOST_PATTERNS:
        raise UsageError(f"a lease has at most {MOST_PATTERNS} patterns; use wider ones")
    if sum(len(pattern.encode(errors="surrogateescape")) for pattern in wanted.patterns) > _MOST_BYTES:
        raise UsageError(f"the patterns of a lease have at most {_MOST_BYTES} bytes together; use wider ones")
    _check_seconds(wanted.seconds)


def _check_seconds(seconds: float) -> None:
    if not 0 < seconds <= _LONGEST_SECONDS:
        raise UsageError("a lease lasts more than nothing and at most a year")


def line(text: str) -> str:
    """A text of somebody else's as one line that can be kept and shown."""
    printable = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in " ".join(text.split()))
    return printable[:_LONGEST_REASON]


class _LateError(Exception):
    """What is to be compared takes too long for others to wait."""


class _Compared:
    """Others' leases beside what is wanted, each compared with it once: the patterns of a lease never change."""

    def __init__(self, wanted: LeaseRequest, overlap: Overlap) -> None:
        self._wanted: Final = wanted
        self._overlap: Final = overlap
        self._beside: Final[set[str]] = set()
        """Those that do not stand in the way."""

    def first_conflict(self, found: Iterable[Lease], deadline: float = math.inf) -> Conflict | None:
        """The first that stands in the way. _LateError, and what was compared is not in vain, at the deadline."""
        for lease in found:
            if lease.id in self._beside:
                continue
            if self._may_meet(lease):
                for mine, theirs in itertools.product(self._wanted.patterns, lease.patterns):
                    if time.monotonic() > deadline:
                        raise _LateError
                    if self._overlap(mine, theirs):
                        return Conflict(lease, mine, theirs)
            self._beside.add(lease.id)
        return None

    def _may_meet(self, lease: Lease) -> bool:
        wanted = self._wanted
        if lease.holder.key == wanted.holder.key or (lease.shared and wanted.shared):
            return False
        if lease.origin and wanted.origin and lease.holder.agent_id == wanted.holder.agent_id is not None:
            return False  # the same agent's: it may have worked for another chain when that was mirrored
        return lease.workspace is None or wanted.workspace in (None, lease.workspace)


def unless_others_hold_it(
    database: Database, wanted: LeaseRequest, overlap: Overlap, grant: Callable[[Connection], Grant]
) -> Grant | Conflict:
    """Grant it in a transaction in which nobody else holds any of it; else the conflict, nothing changed."""
    compared = _Compared(wanted, overlap)
    while True:
        with database.read() as connection:
            found = living(connection)
        conflict = compared.first_conflict(found)
        if conflict is not None:
            return conflict
        with database.change() as connection:
            try:
                conflict = compared.first_conflict(living(connection), time.monotonic() + _SECONDS_ALONE)
            except _LateError:
                continue
            return grant(connection) if conflict is None else conflict


def enter(connection: Connection, wanted: LeaseRequest, until: ColumnElement[int]) -> str:
    """Enter a lease in place of the holder's own of that origin, and give its UUID. UsageError: its agent is gone."""
    holder = wanted.holder
    if holder.agent_id is not None and not heartbeats.agent_lives(connection, holder.agent_id):
        raise UsageError(f"there is no agent {holder.agent} any more; bonobofs agent list shows who there is")
    # Those that have ended go first: the holder's own last one may be among them.
    connection.execute(delete(leases).where(leases.c.until <= clock()))
    connection.execute(delete(leases).where(leases.c.holder == holder.key, leases.c.origin == wanted.origin))
    name = str(uuid.uuid4())
    connection.execute(
        insert(leases).values(
            id=name,
            holder=holder.key,
            agent=holder.agent_id,
            agent_name=holder.agent,
            chain=holder.chain,
            origin=wanted.origin,
            shared=wanted.shared,
            workspace=wanted.workspace,
            reason=line(wanted.reason),
            acquired=clock(),
            until=until,
        )
    )
    rows = [{"lease": name, "pattern": pattern} for pattern in dict.fromkeys(wanted.patterns)]
    connection.execute(insert(lease_patterns), rows)
    heartbeats.next_generation(connection)
    return name


def _stored(connection: Connection, lease: str) -> Lease:
    """A lease that this transaction has written. A lease of a millisecond can expire before this reads it."""
    return _select(connection, leases.c.id == lease)[0]


def _living_one(connection: Connection, lease: str) -> Lease:
    found = living(connection, leases.c.id == lease)
    if not found:
        raise UsageError(f"there is no lease {lease}, or it has ended; bonobofs lease list shows which there are")
    return found[0]


def _theirs(connection: Connection, lease: str, by: Holder | None) -> Lease:
    found = _living_one(connection, lease)
    if by is not None and found.holder.key != by.key:
        raise ForbiddenError(f"the lease {lease} is held by {found.holder}; they and the operator end it")
    return found


def mirror(database: Database, wanted: LeaseRequest, overlap: Overlap, *, until: datetime) -> Conflict | None:
    """Grant what was reserved elsewhere, until its end there, under its `origin`; else the conflict, nothing changed.

    Done again with the same content it changes nothing, nor where that end is over by the database's clock.
    """
    if not wanted.origin:
        raise UsageError("what is mirrored has an origin")
    check(wanted)
    ends = milliseconds_of(until)
    with database.read() as connection:
        known = next(iter(living(connection, leases.c.origin == wanted.origin)), None)
    if known is not None and _is_the_same(known, wanted):
        if milliseconds_of(known.until) != ends:
            with database.change() as connection:
                connection.execute(update(leases).where(leases.c.id == known.id).values(until=ends))
                heartbeats.next_generation(connection)
        return None

    def grant(connection: Connection) -> None:
        if ends <= connection.execute(select(clock())).scalar_one():
            return
        connection.execute(delete(leases).where(leases.c.origin == wanted.origin))
        enter(connection, wanted, literal(ends))

    return unless_others_hold_it(database, wanted, overlap, grant)


def unmirror(database: Database, origin: str) -> bool:
    """End what was mirrored from there; whether there was anything."""
    with database.change() as connection:
        gone = connection.execute(delete(leases).where(leases.c.origin == origin, leases.c.origin != "")).rowcount
        if gone:
            heartbeats.next_generation(connection)
        return gone > 0


def mirrored(database: Database, prefix: str) -> dict[str, Lease]:
    """What is mirrored from origins that begin so, by origin."""
    with database.read() as connection:
        found = living(connection, leases.c.origin != "", leases.c.origin.startswith(prefix, autoescape=True))
    return {lease.origin: lease for lease in found}


def holder_of_mail(database: Database, name: str, source: str) -> Holder:
    """Who an agent of Agent Mail is here: the living agent whose label it is, as it is written there, else nobody's.

    Agent Mail keeps letters and digits only, or a few signs more, and case does not count. An agent that works in the
    source for a chain holds by the chain: what it has reserved must not keep itself out.
    """
    with database.read() as connection:
        rows = connection.execute(select(agents.c.name, agents.c.id).where(agents.c.removed.is_(None))).all()
        found = [(label, identity) for label, identity in rows if label == name]
        found = found or [(label, identity) for label, identity in rows if _as_mailed(label) == _as_mailed(name)]
        if len(found) != 1:
            return Holder(line(name), None)
        ((label, identity),) = found
        chains = heartbeats.chains(connection, identity, source)
    return Holder(label, identity, chains[0] if len(chains) == 1 else None)


def _as_mailed(label: str) -> str:
    return "".join(character for character in label.casefold() if character.isalnum())


def _is_the_same(lease: Lease, wanted: LeaseRequest) -> bool:
    as_wanted = (wanted.holder.key, set(wanted.patterns), wanted.shared, wanted.workspace)
    return (lease.holder.key, set(lease.patterns), lease.shared, lease.workspace) == as_wanted
