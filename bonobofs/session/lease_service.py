"""Acquire, extend, release and import leases, and wait until every live session enforces them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Final, NamedTuple

from bonobofs.errors import BonobofsError, InterruptedWaitError, PolicyError, StateError, UsageError
from bonobofs.policy.lease_set import UNKNOWN, LeaseSet, compile_leases
from bonobofs.policy.overlap import patterns_meet
from bonobofs.policy.pattern import parse
from bonobofs.session.registration import default_agent
from bonobofs.session.session_list import check_workspace
from bonobofs.state import agent_registry, leases, session_rows
from bonobofs.state.database import Database
from bonobofs.state.heartbeats import LiveSession
from bonobofs.state.lease_follower import leases_in_effect
from bonobofs.state.leases import DAY, Lease, LeaseChange, LeaseRequest
from bonobofs.state.session_rows import Holder
from bonobofs.state.sessions import Session, lives, load, load_all
from bonobofs.system.processes import is_stopped


class HolderOption(NamedTuple):
    """The holder that a command's options name: the chain, else the agent, else the user's own agent."""

    agent: str | None = None
    chain: str | None = None


class LeaseTerms(NamedTuple):
    """Terms of a requested lease."""

    shared: bool = False
    seconds: float = DAY
    reason: str = ""
    workspace: Path | None = None


_PATIENCE: Final = 5.0

OnLate = Callable[[str], None]
"""Called once with a message if live sessions have not acknowledged a change of leases after _PATIENCE seconds."""


def acquire(
    home: Path,
    holder: HolderOption | Holder,
    patterns: list[str],
    terms: LeaseTerms,
    on_late: OnLate | None = None,
) -> Lease:
    """Acquire a lease and return when every live session enforces it.

    A new agent is registered. Raises UsageError, ForbiddenError, StateError. After an interrupt or a database error
    during the wait, the lease stays granted, and the message states that.
    """
    for pattern in patterns:
        try:
            parse(pattern)
        except PolicyError as error:
            raise UsageError(f"{pattern!r} cannot be leased: {error}") from error
    with Database.open(home) as database:
        if isinstance(holder, HolderOption):
            session_rows.register(database, default_agent() if holder.agent is None else holder.agent)
        workspace = None if terms.workspace is None else _source(home, terms.workspace)
        request = LeaseRequest(
            _holder(database, holder), tuple(patterns), terms.shared, terms.seconds, terms.reason, workspace
        )
        return _await_sessions(home, database, leases.acquire(database, request, patterns_meet), "granted", on_late)


def workspace_around(home: Path, directory: Path) -> Path:
    """Return the source of the session whose mount or source a directory lies in, the innermost one. UsageError."""
    roots = {
        Path(root): Path(one.source)
        for one in load_all(home)
        for root in (one.source, one.mountpoint if lives(one) else None)
        if root is not None
    }
    for above in (directory, *directory.parents):
        if above in roots:
            return roots[above]
    raise UsageError(f"{directory} is in no workspace that was mounted before; give --workspace DIR")


def _await_sessions(home: Path, database: Database, change: LeaseChange, result: str, on_late: OnLate | None) -> Lease:
    """Return the lease when every live session has acknowledged the change."""
    late: list[LiveSession] = []
    reporters, report_at = [on_late] if on_late is not None else [], monotonic() + _PATIENCE

    def note_late(present: list[LiveSession]) -> None:
        late[:] = present
        if reporters and monotonic() > report_at:
            names = ", ".join(_late_name(home, session) for session in late)
            reporters.pop()(f"the lease {change.lease.id} is {result}, and this command waits for {names}")

    try:
        leases.wait(database, change.generation, on_wait=note_late)
    except (StateError, KeyboardInterrupt) as error:
        names = ", ".join(_late_name(home, session) for session in late)
        message = (
            f"the lease {change.lease.id} is {result}, but these sessions may not enforce it yet: "
            f"{names or 'not known'}; bonobofs status shows the sessions that cannot read the leases"
        )
        if isinstance(error, KeyboardInterrupt):
            raise InterruptedWaitError(message) from None
        raise StateError(f"{error}; {message}") from error
    return change.lease


def _late_name(home: Path, late: LiveSession) -> str:
    """Return agent, host and source of a session, and the remedy if a signal has stopped its server."""
    made = load(home, late.id)
    pid = made.pid if made is not None and lives(made) else None
    stopped = f" (its server is stopped; let it continue: kill -CONT {pid})" if pid and is_stopped(pid) else ""
    return f"{late.agent} on {late.host} in {late.source}{stopped}"


def _source(home: Path, directory: Path) -> str:
    """Return the source of a directory. For a mountpoint this is the source of its mount.

    UsageError for a directory inside a source, as patterns begin at the source's root, and for what is no directory.
    """
    for session in load_all(home):
        if lives(session):
            roots = {Path(root) for root in (session.source, session.mountpoint) if root is not None}
            if directory in roots:
                return session.source
            if not roots.isdisjoint(directory.parents):
                raise UsageError(
                    f"{directory} lies inside {session.source}; name that, with patterns that begin there, such as "
                    f"{directory.relative_to(next(iter(roots.intersection(directory.parents))))}/**"
                )
    return str(check_workspace(directory))


def extend(
    home: Path, holder: HolderOption | Holder, lease: str | None, seconds: float, on_late: OnLate | None = None
) -> Lease:
    """Set the end of a lease to `seconds` from now. `lease` is its UUID; None: the lease of the holder.

    Like `acquire`, it waits for every live session.
    """
    return _change(home, holder, lease, partial(leases.extend, seconds=seconds), "extended", on_late)


def release(home: Path, holder: HolderOption | Holder, lease: str | None, on_late: OnLate | None = None) -> Lease:
    """Release a lease. `lease` is its UUID; None: the lease of the holder.

    Like `acquire`, it waits for every live session.
    """
    return _change(home, holder, lease, leases.release, "released", on_late)


def list_leases(home: Path) -> list[Lease]:
    """Return the leases in effect, oldest first."""
    with Database.open(home) as database:
        return leases.list_leases(database)


def leases_of(home: Path, session: Session) -> LeaseSet:
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


def import_locks(
    home: Path, locks: list[ImportedLock], workspace: Path | None, on_late: OnLate | None = None
) -> tuple[list[Lease], list[str]]:
    """Acquire locks of Choragen, each by its chain. Return the leases, and why others failed."""
    acquired, problems = [], []
    before = {lease.holder.chain: lease.patterns for lease in list_leases(home) if not lease.origin}
    for lock in locks:
        terms = LeaseTerms(seconds=lock.seconds, reason=lock.reason, workspace=workspace)
        try:
            acquired.append(acquire(home, HolderOption(lock.agent, lock.chain), lock.patterns, terms, on_late))
        except BonobofsError as error:
            problems.append(f"line {lock.line}: {lock.chain}: {error}")
            continue
        released = sorted(set(before.get(lock.chain, ())) - set(lock.patterns))
        if released:
            problems.append(f"line {lock.line}: {lock.chain} no longer holds {', '.join(released)} here")
    return acquired, problems


def _change(
    home: Path,
    option: HolderOption | Holder,
    lease: str | None,
    change: Callable[..., LeaseChange],
    result: str,
    on_late: OnLate | None,
) -> Lease:
    with Database.open(home) as database:
        if lease is not None:
            by = None if option == HolderOption() else _holder(database, option)
            return _await_sessions(home, database, change(database, lease, by=by), result, on_late)
        holder = _holder(database, option)
        own = [each for each in leases.list_leases(database) if each.holder.key == holder.key and not each.origin]
        if not own:
            raise UsageError(f"{holder} holds no lease; see bonobofs lease list")
        return _await_sessions(home, database, change(database, own[0].id, by=holder), result, on_late)


def as_document(lease: Lease) -> dict[str, Any]:
    """Return a lease as JSON data."""
    plain = dataclasses.asdict(lease)
    holder: Holder = plain.pop("holder")
    plain |= {"acquired": lease.acquired.isoformat(), "until": lease.until.isoformat()}
    return {**plain, **holder._asdict(), "holder": holder.key}


def _holder(database: Database, option: HolderOption | Holder) -> Holder:
    if isinstance(option, Holder):
        return option
    label = default_agent() if option.agent is None else option.agent
    chain = None if option.chain is None else session_rows.check_label(option.chain, "a chain")
    agent = agent_registry.find(database, label)
    return Holder(label, None, chain) if agent is None else Holder(agent.label, agent.id, chain)
