"""Acquire, extend, release and mirror leases.

The holder of a lease is a chain of work, or else an agent. Only the holder of an exclusive lease may change a path that
its patterns match; with a shared lease, all shared holders may. A holder that acquires again replaces its lease.

Acquiring is one transaction that excludes other changes of leases: all patterns are granted or none. Most comparisons
run before that transaction, because on SQLite it blocks the heartbeats of all sessions. All times are the database's.

A session enforces a lease once it has acknowledged its generation; `wait` returns when all live sessions have. The
caller passes the function that compares two patterns (`Overlap`).
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
from bonobofs.state.session_rows import Holder
from bonobofs.system.terminal import printable

DAY: Final = 86_400
"""Default length of a lease in seconds."""
MOST_PATTERNS: Final = 1000
_MOST_BYTES: Final = 1 << 17
"""Bytes of all patterns of a lease. Every session reads every lease."""
_LONGEST_REASON: Final = 500
_LONGEST_SECONDS: Final = 366 * DAY
_BETWEEN_LOOKS: Final = 0.05
_SECONDS_ALONE: Final = 0.5
"""Limit for comparing leases inside the transaction. A session blocked for LAPSE seconds counts as silent."""

Grant = TypeVar("Grant")
Overlap = Callable[[str, str], bool]
"""Return whether a path could match both patterns."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lease:
    """A lease that was in effect when it was read."""

    id: str
    holder: Holder
    patterns: tuple[str, ...]
    shared: bool
    workspace: str | None
    """Source that it covers; None: every source."""
    reason: str
    origin: str
    """The reservation that it mirrors; "" for a lease acquired here."""
    acquired: datetime
    until: datetime


class LeaseRequest(NamedTuple):
    """A lease to acquire. `seconds`: its length from now."""

    holder: Holder
    patterns: tuple[str, ...]
    shared: bool = False
    seconds: float = DAY
    reason: str = ""
    workspace: str | None = None
    origin: str = ""


class Conflict(NamedTuple):
    """Why a lease is not granted: another holder's lease, and the two patterns that overlap."""

    lease: Lease
    requested: str
    held: str

    def __str__(self) -> str:
        until = self.lease.until.isoformat(timespec="seconds")
        return f"{self.requested} overlaps with {self.held}, held by {self.lease.holder} until {until}"


class LeaseChange(NamedTuple):
    """A changed lease, and the generation of leases that the change began."""

    lease: Lease
    generation: int


def acquire(database: Database, request: LeaseRequest, overlap: Overlap) -> LeaseChange:
    """Grant all patterns, in place of the holder's earlier lease of the same origin.

    Sessions may still change matching paths when this returns; `wait` for the generation.

    Raises ForbiddenError if another holder's lease overlaps (nothing is changed), UsageError for an invalid request.
    """
    check_request(request)

    def grant(connection: Connection) -> LeaseChange:
        name = insert_lease(connection, request, clock() + round(1000 * request.seconds))
        return LeaseChange(_stored(connection, name), heartbeats.generation(connection))

    granted = grant_without_conflict(database, request, overlap, grant)
    if isinstance(granted, Conflict):
        raise ForbiddenError(f"{granted}; wait for it, or ask them to release it")
    return granted


def wait(
    database: Database, generation: int, *, on_wait: Callable[[list[heartbeats.LiveSession]], None] | None = None
) -> None:
    """Return when every live session has acknowledged this generation. A silent session refuses all changes.

    `on_wait` is called with the sessions that have not, before each pause.
    """
    while True:
        with database.read() as connection:
            behind = heartbeats.living(connection, behind=generation)
        if not behind:
            return
        if on_wait is not None:
            on_wait(behind)
        time.sleep(_BETWEEN_LOOKS)


def extend(database: Database, lease: str, seconds: float = DAY, *, by: Holder | None = None) -> LeaseChange:
    """Set the end of a lease to `seconds` from now. `by` is the caller; None: the operator, who may extend any lease.

    Raises ForbiddenError if another holder has it, UsageError if it has ended.
    """
    _check_seconds(seconds)
    with database.change() as connection:
        found = _changeable(connection, lease, by)
        connection.execute(update(leases).where(leases.c.id == found.id).values(until=clock() + round(1000 * seconds)))
        return LeaseChange(_stored(connection, found.id), heartbeats.next_generation(connection))


def release(database: Database, lease: str, *, by: Holder | None = None) -> LeaseChange:
    """End a lease. `by` as for `extend`."""
    with database.change() as connection:
        found = _changeable(connection, lease, by)
        connection.execute(delete(leases).where(leases.c.id == found.id))
        return LeaseChange(found, heartbeats.next_generation(connection))


def list_leases(database: Database) -> list[Lease]:
    """Return the leases in effect, oldest first."""
    with database.read() as connection:
        return living(connection)


def living(connection: Connection, *where: ColumnElement[bool]) -> list[Lease]:
    """Return the leases that have not expired, oldest first."""
    return _select(connection, leases.c.until > clock(), *where)


def _select(connection: Connection, *where: ColumnElement[bool]) -> list[Lease]:
    """Return leases, expired ones too, oldest first."""
    rows = connection.execute(select(leases).where(*where).order_by(leases.c.acquired, leases.c.id)).all()
    patterns: dict[str, list[str]] = {row.id: [] for row in rows}
    request = select(lease_patterns.c.lease, lease_patterns.c.pattern).join_from(lease_patterns, leases).where(*where)
    for lease, pattern in connection.execute(request.order_by(lease_patterns.c.pattern)):
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
    """Delete the rows of expired leases and return their number. Expired rows have no effect."""
    with database.change() as connection:
        return connection.execute(delete(leases).where(leases.c.until <= clock())).rowcount


def check_request(request: LeaseRequest) -> None:
    """Raise UsageError for an invalid request."""
    if not request.patterns:
        raise UsageError("a lease needs a pattern; give one, such as docs/**")
    if len(request.patterns) > MOST_PATTERNS:
        raise UsageError(f"a lease has at most {MOST_PATTERNS} patterns; use wider ones")
    if sum(len(pattern.encode(errors="surrogateescape")) for pattern in request.patterns) > _MOST_BYTES:
        raise UsageError(f"the patterns of a lease have at most {_MOST_BYTES} bytes together; use wider ones")
    _check_seconds(request.seconds)


def _check_seconds(seconds: float) -> None:
    if not 0 < seconds <= _LONGEST_SECONDS:
        raise UsageError("a lease lasts more than 0 seconds and at most 366 days; give another length")


def one_line(text: str) -> str:
    """Return untrusted text as one printable line of limited length."""
    return printable(" ".join(text.split()))[:_LONGEST_REASON]


class _TimeLimitError(Exception):
    """The comparison takes longer than the transaction may."""


class _Compared:
    """Compare a request with other leases, each once: the patterns of a lease never change."""

    def __init__(self, request: LeaseRequest, overlap: Overlap) -> None:
        self._request: Final = request
        self._overlap: Final = overlap
        self._compatible: Final[set[str]] = set()
        """Ids of leases without a conflict."""

    def first_conflict(self, candidates: Iterable[Lease], deadline: float = math.inf) -> Conflict | None:
        """Return the first conflict. _TimeLimitError: the deadline has passed; the comparisons so far are kept."""
        for lease in candidates:
            if lease.id in self._compatible:
                continue
            if self._may_meet(lease):
                for mine, theirs in itertools.product(self._request.patterns, lease.patterns):
                    if time.monotonic() > deadline:
                        raise _TimeLimitError
                    if self._overlap(mine, theirs):
                        return Conflict(lease, mine, theirs)
            self._compatible.add(lease.id)
        return None

    def _may_meet(self, lease: Lease) -> bool:
        request = self._request
        if lease.holder.key == request.holder.key or (lease.shared and request.shared):
            return False
        if lease.origin and request.origin and lease.holder.agent_id == request.holder.agent_id is not None:
            return False  # the same agent, possibly for another chain when it was mirrored
        return lease.workspace is None or request.workspace in (None, lease.workspace)


def grant_without_conflict(
    database: Database, request: LeaseRequest, overlap: Overlap, grant: Callable[[Connection], Grant]
) -> Grant | Conflict:
    """Run `grant` in a transaction in which no other lease conflicts; else return the conflict."""
    compared = _Compared(request, overlap)
    while True:
        with database.read() as connection:
            found = living(connection)
        conflict = compared.first_conflict(found)
        if conflict is not None:
            return conflict
        with database.change() as connection:
            try:
                conflict = compared.first_conflict(living(connection), time.monotonic() + _SECONDS_ALONE)
            except _TimeLimitError:
                continue
            return grant(connection) if conflict is None else conflict


def insert_lease(connection: Connection, request: LeaseRequest, until: ColumnElement[int]) -> str:
    """Replace the holder's lease of this origin and return the UUID. UsageError: its agent was removed."""
    holder = request.holder
    if holder.agent_id is not None and not heartbeats.agent_lives(connection, holder.agent_id):
        raise UsageError(f"there is no agent {holder.agent} any more; see bonobofs agent list")
    # Expired leases are deleted first: the holder's own may be among them.
    connection.execute(delete(leases).where(leases.c.until <= clock()))
    connection.execute(delete(leases).where(leases.c.holder == holder.key, leases.c.origin == request.origin))
    name = str(uuid.uuid4())
    connection.execute(
        insert(leases).values(
            id=name,
            holder=holder.key,
            agent=holder.agent_id,
            agent_name=holder.agent,
            chain=holder.chain,
            origin=request.origin,
            shared=request.shared,
            workspace=request.workspace,
            reason=one_line(request.reason),
            acquired=clock(),
            until=until,
        )
    )
    rows = [{"lease": name, "pattern": pattern} for pattern in dict.fromkeys(request.patterns)]
    connection.execute(insert(lease_patterns), rows)
    heartbeats.next_generation(connection)
    return name


def _stored(connection: Connection, lease: str) -> Lease:
    """Return a lease that this transaction wrote, even if it has expired meanwhile."""
    return _select(connection, leases.c.id == lease)[0]


def _changeable(connection: Connection, lease: str, by: Holder | None) -> Lease:
    """Return a lease that the caller may change."""
    living_leases = living(connection, leases.c.id == lease)
    if not living_leases:
        raise UsageError(f"there is no lease {lease}, or it has ended; see bonobofs lease list")
    holder = living_leases[0].holder
    if by is not None and holder.key != by.key:
        raise ForbiddenError(f"the lease {lease} is held by {holder}; ask the holder or the operator")
    return living_leases[0]


def mirror(database: Database, request: LeaseRequest, overlap: Overlap, *, until: datetime) -> Conflict | None:
    """Grant a reservation of another system under its `origin` until its end there; else return the conflict.

    Idempotent. A reservation that has ended by the database's clock changes nothing.
    """
    if not request.origin:
        raise UsageError("a mirrored lease needs an origin")
    check_request(request)
    ends = milliseconds_of(until)
    with database.read() as connection:
        known = next(iter(living(connection, leases.c.origin == request.origin)), None)
    if known is not None and _is_the_same(known, request):
        if milliseconds_of(known.until) != ends:
            with database.change() as connection:
                connection.execute(update(leases).where(leases.c.id == known.id).values(until=ends))
                heartbeats.next_generation(connection)
        return None

    def grant(connection: Connection) -> None:
        if ends <= connection.execute(select(clock())).scalar_one():
            return
        connection.execute(delete(leases).where(leases.c.origin == request.origin))
        insert_lease(connection, request, literal(ends))

    return grant_without_conflict(database, request, overlap, grant)


def unmirror(database: Database, origin: str) -> bool:
    """End the lease that is mirrored under this origin. Return False if there is none."""
    with database.change() as connection:
        gone = connection.execute(delete(leases).where(leases.c.origin == origin, leases.c.origin != "")).rowcount
        if gone:
            heartbeats.next_generation(connection)
        return gone > 0


def mirrored(database: Database, prefix: str) -> dict[str, Lease]:
    """Return the mirrored leases whose origin begins with `prefix`, by origin."""
    with database.read() as connection:
        found = living(connection, leases.c.origin != "", leases.c.origin.startswith(prefix, autoescape=True))
    return {lease.origin: lease for lease in found}


def holder_of_mail(database: Database, name: str, source: str) -> Holder:
    """Return the holder for a name of Agent Mail: the one living agent of that label, else the name without an agent.

    Agent Mail keeps only letters, digits and a few signs, and ignores case. If the agent works in the source for one
    chain, the chain is the holder: an agent's own reservation must not block it.
    """
    with database.read() as connection:
        rows = connection.execute(select(agents.c.name, agents.c.id).where(agents.c.removed.is_(None))).all()
        found = [(label, identity) for label, identity in rows if label == name]
        found = found or [(label, identity) for label, identity in rows if _as_mailed(label) == _as_mailed(name)]
        if len(found) != 1:
            return Holder(one_line(name), None)
        ((label, identity),) = found
        chains = heartbeats.chains(connection, identity, source)
    return Holder(label, identity, chains[0] if len(chains) == 1 else None)


def _as_mailed(label: str) -> str:
    return "".join(character for character in label.casefold() if character.isalnum())


def _is_the_same(lease: Lease, request: LeaseRequest) -> bool:
    requested = (request.holder.key, set(request.patterns), request.shared, request.workspace)
    return (lease.holder.key, set(lease.patterns), lease.shared, lease.workspace) == requested
