"""The calls of the guard socket, by name. Every caller acts as the session's agent.

A call takes the session and its arguments, and returns what JSON can hold. Refused, BonobofsError and OSError go to the
caller; UsageError means invalid arguments.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from bonobofs.companion.call_arguments import Arguments, check_empty, optional, required, required_texts
from bonobofs.companion.git_calls import GIT_COMMANDS
from bonobofs.companion.git_worker import PUBLISHING_CALLS, WITH_DESCRIPTORS
from bonobofs.companion.session_context import SessionContext
from bonobofs.enforcement.authorizer import Caller
from bonobofs.errors import ForbiddenError, UsageError
from bonobofs.files.file_guard import operation_of
from bonobofs.files.results import is_session_agent, with_claimed_agent, wrong_agent
from bonobofs.files.workspace import MAKER
from bonobofs.policy.decision import Denied
from bonobofs.policy.engine import callable_words
from bonobofs.policy.lease_limits import DEFAULT_MAX, check_lease, longest_lease
from bonobofs.policy.request import Operation, PlannedChange, WorkspacePath
from bonobofs.state.home import GUARD_SOCKET, inside_directory, session_directory
from bonobofs.state.sessions import read_live

if TYPE_CHECKING:
    from bonobofs.state.leases import Holder, Lease

Call = Callable[[SessionContext, Arguments], Any]

_MAX_SHOWN: Final = 200
_MAX_PATH: Final = 4096
"""Bytes: PATH_MAX of Linux. The server keeps and shows refused paths."""
_LEASE_FIELDS: Final = ("patterns", "shared", "workspace", "until", "reason")


def handle_call(
    session: SessionContext,
    name: str,
    arguments: Arguments,
    impersonate: Callable[[], AbstractContextManager[object]] = nullcontext,
    fds: Sequence[int] = (),
) -> Any:
    """The result of a call. A call that names another agent or chain is refused, with an alert.

    `impersonate` is entered while a file or directory is made. `fds` came with the call.
    """
    call = CALLS.get(name)
    if call is None:
        raise UsageError(f"there is no call {name!r}; there are {', '.join(CALLS)}")
    agent, chain = arguments.pop("agent", None), arguments.pop("chain", None)
    claimed = agent if agent is not None and not is_session_agent(agent, session.guard.agent) else None
    if chain is not None and chain != session.who.chain:
        claimed = f"chain {chain}"
    if claimed is not None:
        word, path = name.rpartition(".")[2], arguments.get("path")
        operation = Operation(word) if word in list(Operation) else Operation.CALL
        shown = path if isinstance(path, str) and len(os.fsencode(path)) <= _MAX_PATH else ""
        denied = wrong_agent(WorkspacePath(shown), operation)
        raise session.guard.deny(denied, with_claimed_agent(Caller(name), str(claimed)[:_MAX_SHOWN]))
    MAKER.set(impersonate)  # of this thread, until its next call
    if name in WITH_DESCRIPTORS:
        arguments["descriptors"] = fds
    return call(session, arguments)


def _path(session: SessionContext, arguments: Arguments, default: str | None = None) -> str:
    """A path of the workspace: relative to its root, or absolute in the mount or the source."""
    path = required(arguments, "path", str) if default is None else optional(arguments, "path", str) or default
    if len(os.fsencode(path)) > _MAX_PATH:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
    pure = PurePosixPath(path)
    for root in (session.who.mountpoint, session.who.source):
        if root is not None and pure.is_absolute() and pure.is_relative_to(root):
            path = str(pure.relative_to(root)) + ("/" if path.endswith("/") else "")
            break
    return "" if path in (".", "./") else path


# -- identity and policy


def _whoami(session: SessionContext, arguments: Arguments) -> Any:
    check_empty(arguments)
    policy = session.guard.policy
    live = read_live(session_directory(session.home, session.who.session))
    in_force = {"policy": policy.digest, "policy_origin": "" if live is None else live.policy.origin}
    socket = str(inside_directory(session.home, session.who.session) / GUARD_SOCKET)
    return {**session.who.plain(), **in_force, "socket": socket, **callable_words(policy, session.who.role)}


def _why(session: SessionContext, arguments: Arguments) -> Any:
    path = _path(session, arguments)
    word, size = optional(arguments, "operation", str), optional(arguments, "size", int)
    new_path, role = optional(arguments, "to", str), optional(arguments, "role", str)
    to = None if new_path is None else _path(session, {"path": new_path})
    check_empty(arguments)
    change = PlannedChange(path, None if word is None else operation_of(word), size, to, role)
    from bonobofs.session.explanation import explain_in  # noqa: PLC0415 - most sessions need no explanation

    root = Path(session.who.mountpoint or session.who.source)
    return explain_in(root, root, change, session.guard.explain)


def _show(session: SessionContext, arguments: Arguments) -> Any:
    """Return when the mount shows every earlier change."""
    check_empty(arguments)
    session.guard.show()


# -- files


def _read_file(session: SessionContext, arguments: Arguments) -> Any:
    path = _path(session, arguments)
    offset, limit = optional(arguments, "offset", int), optional(arguments, "limit", int)
    check_empty(arguments)
    return asdict(session.tools.guarded_read_file(path, 1 if offset is None else offset, limit))


def _write_file(session: SessionContext, arguments: Arguments) -> Any:
    path, content = _path(session, arguments), required(arguments, "content", str, sys.maxsize)
    create_only = optional(arguments, "createOnly", bool) or False
    check_empty(arguments)
    written = session.tools.guarded_write_file(path, content, create_only)
    return {"path": str(written.relative_to(session.who.source))}


def _list_files(session: SessionContext, arguments: Arguments) -> Any:
    path, pattern = _path(session, arguments, ""), optional(arguments, "pattern", str)
    recursive = optional(arguments, "recursive", bool) or False
    check_empty(arguments)
    listing = session.tools.guarded_list_files(path, pattern, recursive)
    entries = [{**entry._asdict(), "kind": entry.kind.value} for entry in listing.entries]
    return {"path": listing.path, "entries": entries, "cut": listing.cut}


def _search_files(session: SessionContext, arguments: Arguments) -> Any:
    query, path = required(arguments, "query", str), _path(session, arguments, "")
    include, exclude = optional(arguments, "include", str), optional(arguments, "exclude", str)
    check_empty(arguments)
    found = session.tools.guarded_search_files(query, path, include, exclude)
    return {**asdict(found), "matches": [match._asdict() for match in found.matches]}


def _delete_file(session: SessionContext, arguments: Arguments) -> Any:
    path = _path(session, arguments)
    check_empty(arguments)
    session.files.guarded_delete_file(path, session.who.agent_id)
    return None


# -- leases


def _check_lease_terms(session: SessionContext, name: str, seconds: int) -> None:
    """Raises Refused if the role may not acquire leases, or not for that long."""
    refusal = check_lease(session.guard.policy, session.guard.agent.role, seconds)
    if refusal is not None:
        raise session.guard.deny(Denied(*refusal, WorkspacePath(""), Operation.CALL), Caller(name))


def _acquire(session: SessionContext, arguments: Arguments) -> Any:
    from bonobofs.session import lease_service  # noqa: PLC0415 - loading the database takes longer than most calls

    patterns = required_texts(arguments, "patterns")
    workspace = optional(arguments, "workspace", str)
    if workspace not in (None, session.who.source, session.who.mountpoint):
        raise ForbiddenError(f"a session acquires leases in its own workspace, {session.who.source}, alone")
    terms = lease_service.LeaseTerms(
        shared=optional(arguments, "shared", bool) or False,
        seconds=_seconds(session, arguments),
        reason=optional(arguments, "reason", str) or "",
        workspace=Path(session.who.source),
    )
    check_empty(arguments)
    _check_lease_terms(session, "lease.acquire", int(terms.seconds))
    acquired = lease_service.acquire(session.home, _holder(session), patterns, terms)
    return _record_lease(session, "acquire_lease", acquired)


def _extend(session: SessionContext, arguments: Arguments) -> Any:
    from bonobofs.session import lease_service  # noqa: PLC0415 - loading the database takes longer than most calls

    lease, seconds = optional(arguments, "lease", str), _seconds(session, arguments)
    check_empty(arguments)
    _check_lease_terms(session, "lease.extend", seconds)
    return _record_lease(session, "extend_lease", lease_service.extend(session.home, _holder(session), lease, seconds))


def _release(session: SessionContext, arguments: Arguments) -> Any:
    from bonobofs.session import lease_service  # noqa: PLC0415 - loading the database takes longer than most calls

    lease = optional(arguments, "lease", str)
    check_empty(arguments)
    return _record_lease(session, "release_lease", lease_service.release(session.home, _holder(session), lease))


def _list(session: SessionContext, arguments: Arguments) -> Any:
    from bonobofs.session import lease_service  # noqa: PLC0415 - loading the database takes longer than most calls

    check_empty(arguments)
    return [lease_service.as_document(lease) for lease in lease_service.list_leases(session.home)]


def _seconds(session: SessionContext, arguments: Arguments) -> int:
    seconds = optional(arguments, "seconds", int)
    return min(DEFAULT_MAX, longest_lease(session.guard.policy)) if seconds is None else seconds


def _record_lease(session: SessionContext, operation: str, lease: Lease) -> Any:
    """Record what the agent did to its lease; the lease as JSON."""
    from bonobofs.session import lease_service  # noqa: PLC0415 - loading the database takes longer than most calls

    document = lease_service.as_document(lease)
    session.guard.event(operation, {"lease": document["id"], **{name: document[name] for name in _LEASE_FIELDS}})
    return document


def _holder(session: SessionContext) -> Holder:
    from bonobofs.session import lease_service  # noqa: PLC0415 - as above

    return lease_service.Holder(session.who.agent, session.who.agent_id, session.who.chain)


def _issue_call(name: str) -> Call:
    """A call about issues. Its module is imported by the first of them: most sessions make none."""

    def call(session: SessionContext, arguments: Arguments) -> Any:
        from bonobofs.companion.beads_calls import BEADS_CALLS  # noqa: PLC0415 - as the docstring says

        return BEADS_CALLS[name](session, arguments)

    return call


_ISSUE_CALLS: Final = ("bd", "create", "update", "close", "reopen", "tie", "untie", "label", "comment")

CALLS: Final[dict[str, Call]] = {
    "whoami": _whoami,
    "why": _why,
    "show": _show,
    "lease.acquire": _acquire,
    "lease.extend": _extend,
    "lease.release": _release,
    "lease.list": _list,
    "read_file": _read_file,
    "write_file": _write_file,
    "list_files": _list_files,
    "search_files": _search_files,
    "delete_file": _delete_file,
    **GIT_COMMANDS,
    **PUBLISHING_CALLS,
    **{f"beads.{word}": _issue_call(f"beads.{word}") for word in _ISSUE_CALLS},
}

CONCURRENCY: Final = {"search_files": 2, "list_files": 2, "lease.acquire": 2, **dict.fromkeys(PUBLISHING_CALLS, 1)}
"""How many calls of a slow kind run at once; each search has a process with much memory."""
