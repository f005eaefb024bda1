"""The calls of the guard socket, by name. Every caller acts as the session's agent.

A call is a function of the session and of its arguments, whose annotations are checked. It returns what JSON can hold.
Refused, BonobofsError and OSError go to the caller; UsageError means invalid arguments.

The agent can call the socket too. So the calls of egress need the key of the session, which the sandbox does not show,
and what a caller of `mark` or `call.begin` names is a claim, which the trail keeps apart from what bonobofs observes.
"""

from __future__ import annotations

import errno
import hmac
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from bonobofs.audit.entry import CALL_BEGIN, CALL_END
from bonobofs.beads.bd_command_line import OPERATIONS
from bonobofs.companion.git_calls import GIT_COMMANDS, PUBLISHING_CALLS, WITH_DESCRIPTORS
from bonobofs.companion.mail_calls import MAIL_CALLS
from bonobofs.companion.session_context import Content, SessionContext, check_arguments, kinds_of
from bonobofs.companion.undo_calls import UNDO_CALLS
from bonobofs.enforcement.authorizer import Caller
from bonobofs.errors import ForbiddenError, PolicyError, UsageError, reason
from bonobofs.files.file_guard import operation_of
from bonobofs.files.results import is_session_agent, with_claimed_agent, wrong_agent
from bonobofs.files.workspace import MAKER
from bonobofs.policy.decision import Denied
from bonobofs.policy.denials import NETWORK
from bonobofs.policy.engine import callable_words
from bonobofs.policy.lease_limits import DEFAULT_MAX, check_lease, longest_lease
from bonobofs.policy.request import Context, Operation, PlannedChange, Request, WorkspacePath
from bonobofs.sandbox.network_list import operator_list
from bonobofs.state.home import EGRESS_KEY, GUARD_SOCKET, inside_directory, session_directory
from bonobofs.state.session_rows import Holder
from bonobofs.state.sessions import read_live
from bonobofs.undo.changes import ID

_MARKS: Final = ("mark", "hook")
_MOST_OPEN: Final = 256
"""Tool calls whose begin is kept. A client that was killed ends none of its calls."""
_LONGEST: Final = 200
"""Maximum characters of a claimed name or id."""


def _mark(session: SessionContext, name: str, by: str = "mark") -> Any:
    """Begin a turn; return its id. UsageError: no command could select the name."""
    if by not in _MARKS:
        raise UsageError(f"by is {' or '.join(_MARKS)}")
    if not 0 < len(name) <= _LONGEST or name == "last" or ID.fullmatch(name):
        raise UsageError(f"a turn's name has 1 to {_LONGEST} characters and is not `last` or an id; choose another")
    return {"turn": f"{session.session.session[:8]}:{session.guard.begin_turn(name, by)}"}


def _begin_call(
    session: SessionContext,
    tool_call: str,
    tool: str,
    agent_session: str,
    turn: str | None = None,
    subagent: str | None = None,
) -> None:
    """Record that a tool call of the client begins."""
    claims = {"tool_call": tool_call, "tool": tool, "agent_session": agent_session, "turn": turn, "subagent": subagent}
    named = {name: text[:_LONGEST] for name, text in claims.items() if text is not None}
    session.tool_calls[named["tool_call"]] = datetime.now(UTC).isoformat(timespec="milliseconds")
    if len(session.tool_calls) > _MOST_OPEN:
        session.tool_calls.pop(next(iter(session.tool_calls)), None)
    session.guard.event(CALL_BEGIN, named)


def _end_call(session: SessionContext, tool_call: str) -> Any:
    """Record that a tool call of the client has ended. Return {"begun": its begin, or "" if that is unknown}."""
    session.guard.event(CALL_END, {"tool_call": tool_call[:_LONGEST]})
    return {"begun": session.tool_calls.pop(tool_call[:_LONGEST], "")}


_GUARD: Final = "network"
_TOOL: Final = "egress"
_CONNECT: Final = Request(Operation.CONNECT, WorkspacePath(""))


def _check_key(session: SessionContext, key: str) -> None:
    """Raises ForbiddenError if the caller is not the egress process of this session."""
    try:
        expected = (session_directory(session.home, session.session.session) / EGRESS_KEY).read_text(encoding="ascii")
    except FileNotFoundError:
        expected = ""
    if not expected or not hmac.compare_digest(expected.encode(), key.encode()):
        raise ForbiddenError("this call is for the egress process of the session alone")


def _lists(session: SessionContext, key: str) -> Any:
    """Return the entries of the policy in force and of the operator's list. `error`: that list cannot be read."""
    _check_key(session, key)
    policy = session.guard.policy.document.get("network", {}).get("allow", [])
    try:
        operator, error = operator_list(session.home, Path(session.session.source)), ""
    except (PolicyError, OSError) as failure:
        operator, error = [], reason(failure)
    if error != session.network_error:
        session.network_error = error
        session.guard.event("network_list", {"error": error or None})
    return {"policy": policy, "operator": operator, "error": error}


def _allowed(session: SessionContext, key: str, host: str, port: int, via: str) -> Any:
    """Record a connection before egress makes it. Refused: the policy in force denies it, or it cannot be recorded."""
    _check_key(session, key)
    details = {"host": host, "port": port, "via": via}
    session.guard.record_call(_CONNECT, Context(endpoint=(host, port)), guard=_GUARD, caller=Caller(_TOOL, details))


def _failed(session: SessionContext, key: str, host: str, port: int, via: str, reason: str) -> Any:
    """Record an admitted connection that egress could not make."""
    _check_key(session, key)
    caller = Caller(_TOOL, {"host": host, "port": port, "via": via})
    session.guard.record_call(_CONNECT, guard=_GUARD, caller=caller, error=errno.EHOSTUNREACH, reason=reason[:_LONGEST])


def _refused(session: SessionContext, key: str, refusals: list[Any]) -> Any:
    """Record refused connections: [host, port, via, word, count] each."""
    _check_key(session, key)
    for refusal in refusals:
        try:
            host, port, via, word, count = refusal
            text = NETWORK[word]
        except (ValueError, TypeError, KeyError):
            raise UsageError("a refusal is [host, port, via, word, count]") from None
        endpoint = f"{host}:{port}" if host else "several hosts or ports"
        denied = Denied(*text, _CONNECT.path, _CONNECT.operation, about=f"The connection was to {endpoint}.")
        details = {"host": host, "port": port, "via": via}
        session.guard.deny(denied, Caller(_TOOL, details), guard=_GUARD, count=count)


if TYPE_CHECKING:
    from bonobofs.state.leases import Lease

_MAX_CLAIM: Final = 200
_MAX_PATH: Final = 4096
"""Bytes: PATH_MAX of Linux. The server keeps and shows refused paths."""
_WHOAMI: Final = ("agent", "agent_id", "team", "role", "chain", "issue", "session", "source")
_LEASE_FIELDS: Final = ("patterns", "shared", "workspace", "until", "reason")


def handle_call(
    session: SessionContext,
    name: str,
    arguments: dict[str, Any],
    impersonate: Callable[[], AbstractContextManager[object]] = nullcontext,
    fds: Sequence[int] = (),
) -> Any:
    """Make a call and return its result. A call that names another agent or chain is refused, with an alert.

    `impersonate` is entered while a file or directory is made. `fds` are the descriptors that came with the call.
    """
    call = CALLS.get(name)
    if call is None:
        raise UsageError(f"there is no call {name!r}; there are {', '.join(CALLS)}")
    agent, chain = arguments.pop("agent", None), arguments.pop("chain", None)
    claimed = agent if agent is not None and not is_session_agent(agent, session.guard.agent) else None
    if chain is not None and chain != session.session.chain:
        claimed = f"chain {chain}"
    if claimed is not None:
        word, path = name.rpartition(".")[2], arguments.get("path")
        operation = Operation(word) if word in list(Operation) else Operation.CALL
        shown = path if isinstance(path, str) and len(os.fsencode(path)) <= _MAX_PATH else ""
        denied = wrong_agent(WorkspacePath(shown), operation)
        raise session.guard.deny(denied, with_claimed_agent(Caller(name), str(claimed)[:_MAX_CLAIM]))
    MAKER.set(impersonate)  # of this thread, until its next call
    checked = check_arguments(arguments, kinds_of(call))
    if name in WITH_DESCRIPTORS:
        checked["descriptors"] = fds
    return call(session, **checked)


def _path(session: SessionContext, path: str) -> str:
    """Return a path of the workspace. The argument is relative to its root, or absolute in the mount or the source."""
    if len(os.fsencode(path)) > _MAX_PATH:
        raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
    pure = PurePosixPath(path)
    for root in (session.session.mountpoint, session.session.source):
        if pure.is_absolute() and pure.is_relative_to(root):
            path = str(pure.relative_to(root)) + ("/" if path.endswith("/") else "")
            break
    return "" if path in (".", "./") else path


# -- identity and policy


def _whoami(session: SessionContext) -> Any:
    policy = session.guard.policy
    live = read_live(session_directory(session.home, session.session.session))
    in_force = {"policy": policy.digest, "policy_origin": "" if live is None else live.policy.origin}
    socket = str(inside_directory(session.home, session.session.session) / GUARD_SOCKET)
    identity = {name: getattr(session.session, name) for name in _WHOAMI}
    return {**identity, **in_force, "socket": socket, **callable_words(policy, session.session.role)}


def _why(
    session: SessionContext,
    path: str,
    operation: str | None = None,
    size: int | None = None,
    to: str | None = None,
    role: str | None = None,
) -> Any:
    new_path = None if to is None else _path(session, to)
    parsed = None if operation is None else operation_of(operation)
    change = PlannedChange(_path(session, path), parsed, size, new_path, role)
    from bonobofs.session.files_explanation import explain_in  # noqa: PLC0415 - most sessions need no explanation

    root = Path(session.session.mountpoint or session.session.source)
    return explain_in(root, root, change, session.guard.explain)


def _repositories(session: SessionContext) -> Any:
    """Return the source, and the worktrees of its repository that are not removed."""
    from bonobofs.session import worktrees  # noqa: PLC0415 - few sessions list worktrees

    source = session.session.source
    found: list[dict[str, Any]] = [
        {"kind": "source", "path": source, "branch": None, "issue": None, "agent": None, "mounted": True}
    ]
    for record, work, mounted in worktrees.statuses(session.home):
        if source in (record.repository, str(work.with_name("tree"))):
            about = {"branch": record.branch, "issue": record.issue, "agent": record.agent, "mounted": mounted}
            found.append({"kind": "worktree", "path": str(work), **about})
    return found


def _show(session: SessionContext) -> Any:
    """Return when the mount shows every earlier change."""
    session.guard.show()


def _ask_wait(session: SessionContext, question: str, seconds: int = 600) -> Any:
    """Return the state of a question once the operator answers it, or after `seconds`."""
    return session.questions.wait(question, seconds)


# -- files


def _read_file(session: SessionContext, path: str, offset: int = 1, limit: int | None = None) -> Any:
    return asdict(session.tools.guarded_read_file(_path(session, path), offset, limit))


def _write_file(
    session: SessionContext,
    path: str,
    content: Content,
    createOnly: bool = False,  # noqa: N803 - the published name of the argument
) -> Any:
    written = session.tools.guarded_write_file(_path(session, path), content, createOnly)
    return {"path": str(written.relative_to(session.session.source))}


def _list_files(session: SessionContext, path: str = "", pattern: str | None = None, recursive: bool = False) -> Any:
    listing = session.tools.guarded_list_files(_path(session, path), pattern, recursive)
    entries = [{**entry._asdict(), "kind": entry.kind.value} for entry in listing.entries]
    return {"path": listing.path, "entries": entries, "cut": listing.cut}


def _search_files(
    session: SessionContext, query: str, path: str = "", include: str | None = None, exclude: str | None = None
) -> Any:
    result = session.tools.guarded_search_files(query, _path(session, path), include, exclude)
    return {**asdict(result), "matches": [match._asdict() for match in result.matches]}


def _delete_file(session: SessionContext, path: str) -> Any:
    session.files.guarded_delete_file(_path(session, path), session.session.agent_id)


# -- leases


def _check_lease_terms(session: SessionContext, name: str, seconds: int) -> None:
    """Raises Refused if the role may not acquire leases, or only for a shorter time."""
    refusal = check_lease(session.guard.policy, session.guard.agent.role, seconds)
    if refusal is not None:
        raise session.guard.deny(Denied(*refusal, WorkspacePath(""), Operation.CALL), Caller(name))


def _acquire(
    session: SessionContext,
    patterns: list[str],
    shared: bool = False,
    seconds: int | None = None,
    reason: str = "",
    workspace: str | None = None,
) -> Any:
    from bonobofs.session import lease_service  # noqa: PLC0415 - loading the database takes longer than most calls

    if workspace not in (None, session.session.source, session.session.mountpoint):
        raise ForbiddenError(f"a session acquires leases in its own workspace, {session.session.source}, alone")
    seconds = _seconds(session, seconds)
    _check_lease_terms(session, "lease.acquire", seconds)
    terms = lease_service.LeaseTerms(
        shared=shared, seconds=seconds, reason=reason, workspace=Path(session.session.source)
    )
    return _record_lease(
        session, "acquire_lease", lease_service.acquire(session.home, _holder(session), patterns, terms)
    )


def _extend(session: SessionContext, lease: str | None = None, seconds: int | None = None) -> Any:
    from bonobofs.session import lease_service  # noqa: PLC0415 - loading the database takes longer than most calls

    seconds = _seconds(session, seconds)
    _check_lease_terms(session, "lease.extend", seconds)
    return _record_lease(session, "extend_lease", lease_service.extend(session.home, _holder(session), lease, seconds))


def _release(session: SessionContext, lease: str | None = None) -> Any:
    from bonobofs.session import lease_service  # noqa: PLC0415 - loading the database takes longer than most calls

    return _record_lease(session, "release_lease", lease_service.release(session.home, _holder(session), lease))


def _list(session: SessionContext) -> Any:
    from bonobofs.session import lease_service  # noqa: PLC0415 - loading the database takes longer than most calls

    return [lease_service.as_document(lease) for lease in lease_service.list_leases(session.home)]


def _seconds(session: SessionContext, seconds: int | None) -> int:
    return min(DEFAULT_MAX, longest_lease(session.guard.policy)) if seconds is None else seconds


def _record_lease(session: SessionContext, operation: str, lease: Lease) -> Any:
    """Record an operation of the agent on its lease, and return the lease as JSON."""
    from bonobofs.session import lease_service  # noqa: PLC0415 - loading the database takes longer than most calls

    document = lease_service.as_document(lease)
    session.guard.event(operation, {"lease": document["id"], **{name: document[name] for name in _LEASE_FIELDS}})
    return document


def _holder(session: SessionContext) -> Holder:
    return Holder(session.session.agent, session.session.agent_id, session.session.chain)


def _issue_call(name: str) -> Callable[..., Any]:
    """Return a call about issues. The first such call imports its module, because most sessions make none."""

    def call(session: SessionContext, **arguments: Any) -> Any:
        from bonobofs.companion.beads_calls import BEADS_CALLS  # noqa: PLC0415 - as the docstring says

        return BEADS_CALLS[name](session, arguments)

    return call


CALLS: Final[dict[str, Callable[..., Any]]] = {
    "whoami": _whoami,
    "why": _why,
    "show": _show,
    "ask.wait": _ask_wait,
    "repo.list": _repositories,
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
    "network.lists": _lists,
    "network.allowed": _allowed,
    "network.failed": _failed,
    "network.refused": _refused,
    **UNDO_CALLS,
    **PUBLISHING_CALLS,
    "mark": _mark,
    "call.begin": _begin_call,
    "call.end": _end_call,
    **MAIL_CALLS,
    **{f"beads.{word}": _issue_call(word) for word in ("bd", "list", "show", "attach", "detach", *OPERATIONS)},
}

LIMITS: Final = {
    **dict.fromkeys(CALLS, (4, 64)),
    **dict.fromkeys(("search_files", "list_files", "lease.acquire"), (2, 32)),
    **dict.fromkeys(PUBLISHING_CALLS, (1, 32)),
    "ask.wait": (16, 16),
}
"""Limits for each name: calls that run, and calls that wait. Each search has a process with much memory."""
