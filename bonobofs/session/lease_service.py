"""Acquire, extend, release and import leases, and wait until every live session enforces them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bonobofs.errors import BonobofsError, InterruptedWaitError, PolicyError, StateError, UsageError
from bonobofs.policy.lease_set import UNKNOWN, Leases, compile_leases
from bonobofs.policy.overlap import patterns_meet
from bonobofs.policy.pattern import parse
from bonobofs.session.registration import default_agent
from bonobofs.state import agent_registry, leases
from bonobofs.state.agent_registry import check_label
from bonobofs.state.database import Database
from bonobofs.state.heartbeats import LiveSession
from bonobofs.state.lease_follower import leases_in_effect
from bonobofs.state.leases import DAY, Holder, Lease, LeaseChange, LeaseRequest
from bonobofs.state.sessions import Session, lives, load_all

__all__ = [
    "DAY",
    "Holder",
    "HolderOption",
    "LeaseTerms",
    "acquire",
    "as_document",
    "extend",
    "import_locks",
    "leases_of",
    "list_leases",
    "release",
    "workspace_around",
]


class HolderOption(NamedTuple):
    """Holder options of a command: the chain, else the agent, else the user's own agent."""

    agent: str | None = None
    chain: str | None = None


class LeaseTerms(NamedTuple):
    """Terms of a requested lease."""

    shared: bool = False
    seconds: float = DAY
    reason: str = ""
    workspace: Path | None = None


def acquire(home: Path, whose: HolderOption | Holder, patterns: list[str], terms: LeaseTerms) -> Lease:
    """Acquire a lease and return when every live session enforces it. A new agent is registered.

    Raises UsageError, ForbiddenError, StateError. After an interrupt or a database error during the wait, the lease
    stays granted and the message says so.
    """
    for pattern in patterns:
        try:
            parse(pattern)
        except PolicyError as error:
            raise UsageError(f"{pattern!r} cannot be leased: {error}") from error
    with Database.open(home) as database:
        if not isinstance(whose, Holder):
            agent_registry.register(database, _label(whose))
        workspace = None if terms.workspace is None else _source(home, terms.workspace)
        holder = _holder(database, whose)
        wanted = LeaseRequest(holder, tuple(patterns), terms.shared, terms.seconds, terms.reason, workspace)
        granted = leases.acquire(database, wanted, patterns_meet)
        return _followed(database, granted, "granted")


def workspace_around(home: Path, directory: Path) -> Path:
    """Return the source of the session whose mount or source a directory lies in, the innermost one. UsageError."""
    roots = {
        Path(root): Path(one.source)
        for one in load_all(home)
        for root in (one.source, one.mountpoint if lives(one) else None)
        if root is not None
    }
    for place in (directory, *directory.parents):
        if place in roots:
            return roots[place]
    raise UsageError(f"{directory} is in no workspace that was mounted before; give --workspace DIR")


def _followed(database: Database, granted: LeaseChange, done: str) -> Lease:
    """Return the lease when every live session has acknowledged the change."""
    waited_for: list[LiveSession] = []

    def keep(present: list[LiveSession]) -> None:
        waited_for[:] = present

    try:
        leases.wait(database, granted.generation, on_wait=keep)
    except (StateError, KeyboardInterrupt) as error:
        those = ", ".join(f"{one.agent} on {one.host} in {one.source}" for one in waited_for)
        stands = (
            f"the lease {granted.lease.id} is {done}, but these may not follow that yet: {those or 'not known'}; "
            "bonobofs status shows which of them do not know the leases"
        )
        if isinstance(error, KeyboardInterrupt):
            raise InterruptedWaitError(stands) from None
        raise StateError(f"{error}; {stands}") from error
    return granted.lease


def _source(home: Path, named: Path) -> str:
    """Return the source of a directory; a mountpoint stands for its source.

    UsageError for a directory inside a source: patterns begin at the source's root.
    """
    for session in load_all(home):
        if lives(session):
            roots = {Path(root) for root in (session.source, session.mountpoint) if root is not None}
            if named in roots:
                return session.source
            if not roots.isdisjoint(named.parents):
                raise UsageError(
                    f"{named} lies inside {session.source}; name that, with patterns that begin there, such as "
                    f"{named.relative_to(next(iter(roots.intersection(named.parents))))}/**"
                )
    return str(named)


def extend(home: Path, whose: HolderOption | Holder, lease: str | None, seconds: float) -> Lease:
    """Set the end of a lease to `seconds` from now: the operator's choice `lease`, else the holder's own.

    Like `acquire`, it waits for every live session.
    """

    def change(database: Database, one: str, by: Holder | None) -> LeaseChange:
        return leases.extend(database, one, seconds, by=by)

    return _change(home, whose, lease, change, "extended")


def release(home: Path, whose: HolderOption | Holder, lease: str | None) -> Lease:
    """Release a lease: the operator's choice `lease`, else the holder's own.

    Like `acquire`, it waits for every live session.
    """

    def change(database: Database, one: str, by: Holder | None) -> LeaseChange:
        return leases.release(database, one, by=by)

    return _change(home, whose, lease, change, "released")


def list_leases(home: Path) -> list[Lease]:
    """Return the leases in effect, oldest first."""
    with Database.open(home) as database:
        return leases.list_leases(database)


def leases_of(home: Path, session: Session) -> Leases:
    """Return the leases as a session enforces them; UNKNOWN if they cannot be read."""
    key = Holder(session.agent, session.agent_id, session.chain).key
    try:
        with Database.open(home) as database, database.queries() as execute:
            return compile_leases(leases_in_effect(execute, key, session.source)[0])
    except StateError:
        return UNKNOWN


class ImportedLock(NamedTuple):
    """The locks of one chain in a file of Choragen. `seconds` is the time until they expire."""

    line: int
    chain: str
    agent: str | None
    patterns: list[str]
    seconds: float
    reason: str


def import_locks(home: Path, locks: list[ImportedLock], workspace: Path | None) -> tuple[list[Lease], list[str]]:
    """Acquire locks of Choragen, each by its chain. Return the leases, and why others failed."""
    made, lost = [], []
    before = {one.holder.chain: one.patterns for one in list_leases(home) if not one.origin}
    for lock in locks:
        terms = LeaseTerms(seconds=lock.seconds, reason=lock.reason, workspace=workspace)
        try:
            made.append(acquire(home, HolderOption(lock.agent, lock.chain), lock.patterns, terms))
        except BonobofsError as error:
            lost.append(f"line {lock.line}: {lock.chain}: {error}")
            continue
        given_up = sorted(set(before.get(lock.chain, ())) - set(lock.patterns))
        if given_up:
            lost.append(f"line {lock.line}: {lock.chain} no longer holds {', '.join(given_up)} here")
    return made, lost


def _change(
    home: Path,
    whose: HolderOption | Holder,
    lease: str | None,
    change: Callable[[Database, str, Holder | None], LeaseChange],
    done: str,
) -> Lease:
    with Database.open(home) as database:
        if lease is not None:
            by = None if whose == HolderOption() else _holder(database, whose)
            return _followed(database, change(database, lease, by), done)
        holder = _holder(database, whose)
        own = [one for one in leases.list_leases(database) if one.holder.key == holder.key and not one.origin]
        if not own:
            raise UsageError(f"{holder} holds no lease; see bonobofs lease list")
        return _followed(database, change(database, own[0].id, holder), done)


def as_document(one: Lease) -> dict[str, Any]:
    """Return a lease as JSON data."""
    return {
        "id": one.id,
        "holder": one.holder.key,
        "agent": one.holder.agent,
        "agent_id": one.holder.agent_id,
        "chain": one.holder.chain,
        "patterns": list(one.patterns),
        "shared": one.shared,
        "workspace": one.workspace,
        "reason": one.reason,
        "origin": one.origin,
        "acquired": one.acquired.isoformat(),
        "until": one.until.isoformat(),
    }


def _holder(database: Database, whose: HolderOption | Holder) -> Holder:
    if isinstance(whose, Holder):
        return whose
    label, chain = _label(whose), _chain(whose)
    found = agent_registry.find(database, label)
    return Holder(label, None, chain) if found is None else Holder(found.label, found.id, chain)


def _label(whose: HolderOption) -> str:
    return default_agent() if whose.agent is None else whose.agent


def _chain(whose: HolderOption) -> str | None:
    return None if whose.chain is None else check_label(whose.chain, "a chain")
