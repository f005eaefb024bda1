"""What can be called through the guard socket, by name. Whoever calls acts as the session's agent.

A call takes the session and its arguments and gives what can be written as JSON. Refused, BonobofsError and OSError are
told to the caller; UsageError is for arguments that cannot be meant.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, Final, TypeVar

from bonobofs.companion.git_calls import GIT_COMMANDS
from bonobofs.companion.git_worker import PUBLISHING_CALLS, WITH_DESCRIPTORS
from bonobofs.companion.session_context import CalledSession
from bonobofs.enforcement.enforcer import Caller
from bonobofs.errors import ForbiddenError, UsageError
from bonobofs.files.file_guard import operation_of
from bonobofs.files.results import claiming, is_of_the_session, not_the_agent
from bonobofs.files.workspace import MAKER
from bonobofs.policy.decision import Denied
from bonobofs.policy.engine import callable_words
from bonobofs.policy.lease_limits import DEFAULT_MAX, check_lease, longest_lease
from bonobofs.policy.request import Operation, WorkspacePath
from bonobofs.state.home import GUARD_SOCKET, inside_directory, session_directory
from bonobofs.state.sessions import read_live

Arguments = dict[str, Any]
Call = Callable[[CalledSession, Arguments], Any]

_T = TypeVar("_T")
_MOST_TOLD: Final = 200
_LONGEST_TEXT: Final = 1 << 16
"""Characters of a text; of a file's content a call may hold more."""
_LONGEST_PATH: Final = 4096
"""Bytes, as everywhere in Linux. Refused paths are kept, and shown, by the process that serves."""
_OF_A_LEASE: Final = ("patterns", "shared", "workspace", "until", "reason")


def called(
    session: CalledSession,
    name: str,
    arguments: Arguments,
    maker: Callable[[], AbstractContextManager[object]] = nullcontext,
    descriptors: Sequence[int] = (),
) -> Any:
    """What the call of that name gives; a call that names another agent or chain is refused, with an alert.

    `maker` is entered while a file or directory is made. `descriptors` came with the call.
    """
    call = CALLS.get(name)
    if call is None:
        raise UsageError(f"there is no call {name!r}; there are {', '.join(CALLS)}")
    agent, chain = arguments.pop("agent", None), arguments.pop("chain", None)
    claimed = agent if agent is not None and not is_of_the_session(agent, session.guard.agent) else None
    if chain is not None and chain != session.who.chain:
        claimed = f"chain {chain}"
    if claimed is not None:
        word, path = name.rpartition(".")[2], arguments.get("path")
        operation = Operation(word) if word in list(Operation) else Operation.CALL
        named = path if isinstance(path, str) and len(os.fsencode(path)) <= _LONGEST_PATH else ""
        denied = not_the_agent(WorkspacePath(named), operation)
        raise session.guard.refuse(denied, claiming(Caller(name), str(claimed)[:_MOST_TOLD]))
    MAKER.set(maker)  # for the thread, which sets it anew for its next call
    if name in WITH_DESCRIPTORS:
        arguments["descriptors"] = descriptors
    return call(session, arguments)


def _may(arguments: Arguments, name: str, kind: type[_T], longest: int = _LONGEST_TEXT) -> _T | None:
    """One argument, which is of that type; None where it is not given. UsageError."""
    value = arguments.pop(name, None)
    if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
        raise UsageError(f"{name} is not of the type {kind.__name__}")
    if isinstance(value, int) and abs(value) > sys.maxsize:
        raise UsageError(f"{name} is too large a number")
    if isinstance(value, str) and len(value) > longest:
        raise UsageError(f"{name} has more than {longest} characters")
    return value


def _must(arguments: Arguments, name: str, kind: type[_T], longest: int = _LONGEST_TEXT) -> _T:
    """As `_may`, for one that is needed."""
    value = _may(arguments, name, kind, longest)
    if value is None:
        raise UsageError(f"the call needs {name}")
    return value


def _done(arguments: Arguments) -> None:
    """No argument is left over, which would not have been heeded. UsageError."""
    if arguments:
        raise UsageError(f"the call takes no {', '.join(arguments)}")


def _path(session: CalledSession, arguments: Arguments, default: str | None = None) -> str:
    """A path of the workspace: relative to its root, or absolute in the mount or the source."""
    path = _must(arguments, "path", str) if default is None else _may(arguments, "path", str) or default
    if len(os.fsencode(path)) > _LONGEST_PATH:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
    pure = PurePosixPath(path)
    for root in (session.who.mountpoint, session.who.source):
        if root is not None and pure.is_absolute() and pure.is_relative_to(root):
            path = str(pure.relative_to(root)) + ("/" if path.endswith("/") else "")
            break
    return "" if path in (".", "./") else path


# -- who one is, and what one may


def _whoami(session: CalledSession, arguments: Arguments) -> Any:
    _done(arguments)
    policy = session.guard.policy
    live = read_live(session_directory(session.home, session.who.session))
    in_force = {"policy": policy.digest, "policy_origin": "" if live is None else live.policy.origin}
    socket = str(inside_directory(session.home, session.who.session) / GUARD_SOCKET)
    return {**session.who.plain(), **in_force, "socket": socket, **callable_words(policy, session.who.role)}


def _why(session: CalledSession, arguments: Arguments) -> Any:
    path = _path(session, arguments)
    word, size = _may(arguments, "operation", str), _may(arguments, "size", int)
    new_path = _may(arguments, "to", str)
    to = None if new_path is None else _path(session, {"path": new_path})
    _done(arguments)
    root = Path(session.who.mountpoint or session.who.source)
    operation = None if word is None else operation_of(word)
    asking = import_module("bonobofs.session.explanation")
    return asking.ask_in(root, path, operation, to, size, session.guard.decide_in_mount)


def _show(session: CalledSession, arguments: Arguments) -> Any:
    """What has changed by now is shown by the mount."""
    _done(arguments)
    session.guard.show()


# -- files


def _read_file(session: CalledSession, arguments: Arguments) -> Any:
    path = _path(session, arguments)
    offset, limit = _may(arguments, "offset", int), _may(arguments, "limit", int)
    _done(arguments)
    return asdict(session.tools.guarded_read_file(path, 1 if offset is None else offset, limit))


def _write_file(session: CalledSession, arguments: Arguments) -> Any:
    path, content = _path(session, arguments), _must(arguments, "content", str, sys.maxsize)
    create_only = _may(arguments, "createOnly", bool) or False
    _done(arguments)
    written = session.tools.guarded_write_file(path, content, create_only)
    return {"path": str(written.relative_to(session.who.source))}


def _list_files(session: CalledSession, arguments: Arguments) -> Any:
    path, pattern = _path(session, arguments, ""), _may(arguments, "pattern", str)
    recursive = _may(arguments, "recursive", bool) or False
    _done(arguments)
    found = session.tools.guarded_list_files(path, pattern, recursive)
    entries = [{**one._asdict(), "kind": one.kind.value} for one in found.entries]
    return {"path": found.path, "entries": entries, "cut": found.cut}


def _search_files(session: CalledSession, arguments: Arguments) -> Any:
    query, path = _must(arguments, "query", str), _path(session, arguments, "")
    include, exclude = _may(arguments, "include", str), _may(arguments, "exclude", str)
    _done(arguments)
    found = session.tools.guarded_search_files(query, path, include, exclude)
    return {**asdict(found), "matches": [one._asdict() for one in found.matches]}


def _delete_file(session: CalledSession, arguments: Arguments) -> Any:
    path = _path(session, arguments)
    _done(arguments)
    session.files.guarded_delete_file(path, session.who.agent_id)
    return None


# -- leases


def _check_terms(session: CalledSession, name: str, seconds: int) -> None:
    """Refuse a role that may not acquire leases, and a lease that lasts too long. Refused."""
    refusal = check_lease(session.guard.policy, session.guard.agent.role, seconds)
    if refusal is not None:
        raise session.guard.refuse(Denied(*refusal, WorkspacePath(""), Operation.CALL), Caller(name))


def _acquire(session: CalledSession, arguments: Arguments) -> Any:
    patterns = _must(arguments, "patterns", list)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise UsageError("patterns are text")
    leasing = _leasing()
    workspace = _may(arguments, "workspace", str)
    if workspace not in (None, session.who.source, session.who.mountpoint):
        raise ForbiddenError(f"a session acquires leases in its own workspace, {session.who.source}, alone")
    terms = leasing.Terms(
        shared=_may(arguments, "shared", bool) or False,
        seconds=_seconds(session, arguments),
        reason=_may(arguments, "reason", str) or "",
        workspace=Path(session.who.source),
    )
    _done(arguments)
    _check_terms(session, "lease.acquire", terms.seconds)
    return _leased(session, "acquire_lease", leasing.acquire(session.home, _holder(session), patterns, terms))


def _extend(session: CalledSession, arguments: Arguments) -> Any:
    lease, seconds = _may(arguments, "lease", str), _seconds(session, arguments)
    _done(arguments)
    _check_terms(session, "lease.extend", seconds)
    return _leased(session, "extend_lease", _leasing().extend(session.home, _holder(session), lease, seconds))


def _release(session: CalledSession, arguments: Arguments) -> Any:
    lease = _may(arguments, "lease", str)
    _done(arguments)
    return _leased(session, "release_lease", _leasing().release(session.home, _holder(session), lease))


def _list(session: CalledSession, arguments: Arguments) -> Any:
    _done(arguments)
    leasing = _leasing()
    return [leasing.as_document(lease) for lease in leasing.list_leases(session.home)]


def _seconds(session: CalledSession, arguments: Arguments) -> int:
    seconds = _may(arguments, "seconds", int)
    return min(DEFAULT_MAX, longest_lease(session.guard.policy)) if seconds is None else seconds


def _leased(session: CalledSession, operation: str, lease: Any) -> Any:
    """What became of the agent's own lease; the session's record has an entry of it."""
    document = _leasing().as_document(lease)
    session.guard.event(operation, {"lease": document["id"], **{name: document[name] for name in _OF_A_LEASE}})
    return document


def _holder(session: CalledSession) -> Any:
    return _leasing().Holder(session.who.agent, session.who.agent_id, session.who.chain)


def _leasing() -> Any:
    """Loading it takes longer than most calls do."""
    return import_module("bonobofs.session.lease_service")


def _of_issues(name: str) -> Call:
    """A call about issues. What they are made of is read when one is made: most sessions make none."""

    def call(session: CalledSession, arguments: Arguments) -> Any:
        return import_module("bonobofs.companion.beads_calls").BEADS_CALLS[name](session, arguments)

    return call


_OF_ISSUES: Final = ("bd", "create", "update", "close", "reopen", "tie", "untie", "label", "comment")

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
    **{f"beads.{word}": _of_issues(f"beads.{word}") for word in _OF_ISSUES},
}

AT_ONCE: Final = {"search_files": 2, "list_files": 2, "lease.acquire": 2, **dict.fromkeys(PUBLISHING_CALLS, 1)}
"""How many are answered at once of those that take long; each search has a process with much memory."""
