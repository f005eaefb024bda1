"""Calls of the session's `git`: check the role's list, grant published files, and publish."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from bonobofs.companion.session_context import GrantedCheckout, SessionContext
from bonobofs.enforcement.authorizer import Caller
from bonobofs.errors import GitError, UsageError
from bonobofs.files.results import bounded
from bonobofs.policy import denials
from bonobofs.policy.decision import Code, Denied
from bonobofs.policy.description import callable_words
from bonobofs.policy.isolation import ISOLATION_ENV_KEYS, evaluate_isolation_boundary
from bonobofs.policy.request import Context, Kind, Operation, Request, WorkspacePath
from bonobofs.policy.role_lists import EVERY, FAMILIES, GIT
from bonobofs.state.home import session_directory

GONE: Final = 0
KEPT: Final = 1
"""Same values as in `fuse.git_grants`."""
_SYMLINK: Final = 0o120000
_MOST_SHOWN: Final = 20
"""Paths that an entry or a denial lists."""
_MOST_FILES: Final = 100_000
_OPERATIONS: Final = {
    **{word: Operation(word) for word in GIT if word in list(Operation)},
    "branch": Operation.CREATE_BRANCH,
    "checkout": Operation.CHECKOUT_BRANCH,
    "switch": Operation.CHECKOUT_BRANCH,
}
"""Operation in the recorded denial of a subcommand."""
_ISOLATION: Final = "A worker changes nothing from outside its worktree.", "Go into the worktree, and run it there."


def _begin(session: SessionContext, subcommand: str, arguments: list[str], directory: str, remote: bool) -> Any:
    """Check isolation, then the role's list of subcommands, which is CLEO's order."""
    root = session.workspace
    caller = _caller(subcommand, arguments, directory)
    environment = {ISOLATION_ENV_KEYS[0]: root, ISOLATION_ENV_KEYS[1]: session.session.role}
    operation = _OPERATIONS.get(subcommand, Operation.CALL)
    if evaluate_isolation_boundary(subcommand, env=environment, cwd=directory) is not None:
        denied = Denied(Code.OUTSIDE, "git.isolation", *_ISOLATION, WorkspacePath(""), operation)
        raise session.guard.deny(denied, caller, guard="git")
    policy = session.guard.policy
    own = callable_words(policy, session.session.role)["git"]
    if subcommand not in own and (EVERY not in own or remote):
        others = sorted(role for role in policy.roles if subcommand in callable_words(policy, role)["git"])
        # Any other word is a program on the agent's PATH. It stays out of the message, so that messages are few.
        name = subcommand if subcommand in FAMILIES["git"] else "subcommands of others"
        refusal = denials.role_lacks(session.session.role, "git", name, own, others)
        raise session.guard.deny(Denied(*refusal, WorkspacePath(""), operation), caller, guard="git")
    return {"root": root, "reads_content": policy.judges_content}


def _preflight(
    session: SessionContext,
    subcommand: str,
    arguments: list[str],
    commit: str,
    head: str,
    files: list[Any],
    descriptors: Sequence[int] = (),
) -> Any:
    """Grant those of `files` ([path, mode, blob id, size, first bytes]) that the mount refuses, if all are published.

    Returns {"grant": number}, with 0 if the mount refuses none. Raises Refused if a refused path is not published. The
    call comes with one end of a pipe. The grant ends when the caller, which holds the other end, closes it or ends.
    """
    caller, blobs = _caller(subcommand, arguments), _files(files)
    denied = _refusals(session, blobs)
    if not denied:
        return {"grant": 0}
    requested = []
    for path, (denial, is_create) in denied.items():
        if denial.code in (Code.LEASED, Code.OUTSIDE, Code.UNRECORDED):
            raise session.guard.deny(denial, caller)
        mode, oid = blobs[path][:2]
        kept = denial.code is Code.KEEP and mode != GONE and not is_create
        requested.append([path, KEPT if kept else mode, oid])
    commands = session.commands
    replaced = {path: commands.replaced.get(path) for path in denied}
    returns = {path: before[1] for path, before in replaced.items() if before and before[0] == commit}
    directory = session_directory(session.home, session.session.session)
    buffer = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        answer = session.git_worker.call("prepare", [buffer], files=requested, returns=returns)
        if "refused" not in answer:
            raise GitError(f"published files cannot be read: {answer.get('line')}", kind="unreadable")
        if answer["refused"]:
            raise _explained(session, denied, answer["refused"], caller)
        number = session.guard.grant(buffer, answer["at"], answer["size"])
    finally:
        os.close(buffer)
    command = [subcommand, *arguments][:_MOST_SHOWN]
    commands.open[number] = GrantedCheckout(commit, head, command, answer["before"])
    for descriptor in descriptors[:1]:
        watch = threading.Thread(target=_watch, args=(session, number, os.dup(descriptor)), daemon=True)
        watch.start()
    return {"grant": number}


def _watch(session: SessionContext, number: int, descriptor: int) -> None:
    """End the grant when the caller closes its end of the pipe."""
    poll = select.poll()
    poll.register(descriptor, 0)
    poll.poll()
    os.close(descriptor)
    with suppress(OSError):
        finish(session, number)


def _files(documents: list[Any]) -> dict[str, tuple[int, str, int, str]]:
    """Return {path: (mode, blob id, size, first bytes)} of the call. Raises UsageError."""
    if len(documents) > _MOST_FILES:
        raise UsageError(f"a command takes in at most {_MOST_FILES} files; take them in by several commands")
    kinds = (str, int, str, int, str)
    for each in documents:
        if not isinstance(each, list) or len(each) != 5 or not all(map(isinstance, each, kinds)):
            raise UsageError("files are lists of path, mode, blob id, size and first bytes")
    return {path: (mode, oid, size, head) for path, mode, oid, size, head in documents}


def _refusals(session: SessionContext, files: dict[str, tuple[int, str, int, str]]) -> dict[str, tuple[Denied, bool]]:
    """Return {path: (denial, is_create)} of the refused changes. `is_create`: even creation is refused."""
    questions: list[tuple[Request, Context]] = []
    for path, (mode, _, size, head) in files.items():
        workspace_path = WorkspacePath(path)
        if mode == _SYMLINK:
            questions.append((Request(Operation.SYMLINK, workspace_path, Kind.SYMLINK), Context(target=head)))
        elif mode != GONE:
            context = Context(size=size, mode=mode & 0o777, head=head.encode("latin-1", "replace"))
            questions.append((Request(Operation.CREATE_FILE, workspace_path), context))
        questions.append((Request(Operation.DELETE_FILE, workspace_path), Context(leaves=True, in_source=True)))
    refused: dict[str, tuple[Denied, bool]] = {}
    for number, denial in sorted(session.guard.decide_each(questions).items()):
        request = questions[number][0]
        refused.setdefault(request.path, (denial, request.operation is not Operation.DELETE_FILE))
    return refused


def _explained(
    session: SessionContext, denied: dict[str, tuple[Denied, bool]], refused: dict[str, str], caller: Caller
) -> Exception:
    """Record and return the refusal of the first path. Its text lists the refused paths."""
    first = next(iter(refused))
    shown = "; ".join(f"{path}: {reason}" for path, reason in list(refused.items())[:_MOST_SHOWN])
    more = f"; and {len(refused) - _MOST_SHOWN} more" if len(refused) > _MOST_SHOWN else ""
    return session.guard.deny(denied[first][0]._replace(about=f"The command would change {shown}{more}."), caller)


def _finish(session: SessionContext, grant: int) -> Any:
    """End a grant, and record the files that the command has written."""
    return {"taken": finish(session, grant)}


def finish(session: SessionContext, number: int) -> int:
    """End the grant `number` if it is open. Return the number of paths that the command has written."""
    command = session.commands.open.pop(number, None)
    if command is None:
        return 0
    paths = session.guard.withdraw(number)
    for path in paths:
        session.commands.replaced[path] = command.head, list(command.before[path])
    if paths:
        details = {"commit": command.commit, "command": command.command, "files": len(paths)}
        session.guard.event("checkout", {**details, "paths": paths[:_MOST_SHOWN]})
    return len(paths)


def _caller(subcommand: str, arguments: list[str], directory: str | None = None) -> Caller:
    """Return the caller for the trail: the command line, shortened, and its directory."""
    return Caller("git", bounded({"command": [subcommand, *arguments], "directory": directory}))


def _receive(session: SessionContext, descriptors: Sequence[int]) -> Any:
    return session.git_worker.call("receive", descriptors)


def _upload(session: SessionContext, descriptors: Sequence[int]) -> Any:
    return session.git_worker.call("upload", descriptors)


def _publish(session: SessionContext, head: str, descriptors: Sequence[int], is_linked: bool = False) -> Any:
    """Publish the branch at HEAD, and move HEAD of the source unless `head` is that of a linked worktree."""
    _check_line(head)
    own: dict[str, Any] = {} if is_linked else {"head": head}
    if head.startswith("ref: refs/heads/"):
        return session.git_worker.call("receive", descriptors, ref=head.removeprefix("ref: "), **own)
    return {"status": 0, "line": ""} if is_linked else session.git_worker.call("head", head=head)


def _head(session: SessionContext, head: str, check: bool = False) -> Any:
    """Move HEAD of the source's checkout. `check` only judges the move."""
    _check_line(head)
    return session.git_worker.call("head", head=head, check=check)


def _check_line(head: str) -> None:
    if "\n" in head or "\0" in head:
        raise UsageError("the call needs head, a text of one line")


GIT_COMMANDS: Final[dict[str, Callable[..., Any]]] = {
    "git.begin": _begin,
    "git.preflight": _preflight,
    "git.finish": _finish,
}
PUBLISHING_CALLS: Final[dict[str, Callable[..., Any]]] = {
    "git.receive-pack": _receive,
    "git.upload-pack": _upload,
    "git.publish": _publish,
    "git.head": _head,
}
WITH_DESCRIPTORS: Final = ("git.receive-pack", "git.upload-pack", "git.publish", "git.preflight")
