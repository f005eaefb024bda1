"""Calls of the session's `git` before and after a command: check the role's list, and grant published files."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from bonobofs.companion.session_context import GrantedCheckout, SessionContext
from bonobofs.enforcement.authorizer import Caller
from bonobofs.errors import GitError, UsageError
from bonobofs.policy import denials
from bonobofs.policy.decision import Code, Denied
from bonobofs.policy.description import callable_words
from bonobofs.policy.grants import EVERY, FAMILIES, GIT
from bonobofs.policy.isolation import ISOLATION_ENV_KEYS, evaluate_isolation_boundary
from bonobofs.policy.request import Context, Kind, Operation, Request, WorkspacePath
from bonobofs.state.home import session_directory

Arguments = dict[str, Any]

GONE: Final = 0
KEPT: Final = 1
"""Same values as in `fuse.git_grants`."""
_SYMLINK: Final = 0o120000
_MOST_SHOWN: Final = 20
_LONGEST_SHOWN: Final = 200
"""Words or paths that an entry lists at most, and characters of each word."""
_MOST_FILES: Final = 100_000
_OPERATIONS: Final = {
    **{word: Operation(word) for word in GIT if word in list(Operation)},
    "branch": Operation.CREATE_BRANCH,
    "checkout": Operation.CHECKOUT_BRANCH,
    "switch": Operation.CHECKOUT_BRANCH,
}
"""Operation in the recorded denial of a subcommand."""
_ISOLATION: Final = "A worker changes nothing from outside its worktree.", "Go into the worktree, and run it there."


def _check(arguments: Arguments, /, **kinds: type) -> None:
    for name, kind in kinds.items():
        if not isinstance(arguments.get(name), kind):
            raise UsageError(f"the call needs {name}, a {kind.__name__}")
    if unknown := arguments.keys() - kinds.keys():
        raise UsageError(f"the call takes no {', '.join(sorted(unknown))}")


def _begin(session: SessionContext, arguments: Arguments) -> Any:
    """Check isolation, then the role's list of subcommands, which is CLEO's order."""
    _check(arguments, subcommand=str, arguments=list, directory=str, remote=bool)
    root = session.who.mountpoint or session.who.source
    subcommand, caller = arguments["subcommand"], _caller(arguments)
    standing = {ISOLATION_ENV_KEYS[0]: root, ISOLATION_ENV_KEYS[1]: session.who.role}
    operation = _OPERATIONS.get(subcommand, Operation.CALL)
    if evaluate_isolation_boundary(subcommand, env=standing, cwd=arguments["directory"]) is not None:
        denied = Denied(Code.OUTSIDE, "git.isolation", *_ISOLATION, WorkspacePath(""), operation)
        raise session.guard.deny(denied, caller, guard="git")
    policy = session.guard.policy
    own = callable_words(policy, session.who.role)["git"]
    if subcommand not in own and (EVERY not in own or arguments["remote"]):
        others = sorted(role for role in policy.roles if subcommand in callable_words(policy, role)["git"])
        # Any other word is a program on the agent's PATH. It stays out of the message, so that messages are few.
        named = subcommand if subcommand in FAMILIES["git"] else "subcommands of others"
        refusal = denials.role_lacks(session.who.role, "git", named, own, others)
        raise session.guard.deny(Denied(*refusal, WorkspacePath(""), operation), caller, guard="git")
    return {"root": root, "reads_content": policy.judges_content}


def _preflight(session: SessionContext, arguments: Arguments) -> Any:
    """Grant those of `files` ([path, mode, blob id, size, first bytes]) that the mount refuses, if all are published.

    Returns {"grant": number}, with 0 if the mount refuses none. Raises Refused if a refused path is not published. The
    call comes with one end of a pipe. The grant ends when the caller, which holds the other end, closes it or ends.
    """
    descriptors = arguments.pop("descriptors", ())
    _check(arguments, subcommand=str, arguments=list, commit=str, head=str, files=list)
    caller, files = _caller(arguments), _files(arguments["files"])
    denied = _refusals(session, files)
    if not denied:
        return {"grant": 0}
    number, head = 0, arguments["head"]
    wanted = []
    for path, (denial, made) in denied.items():
        if denial.code in (Code.LEASED, Code.OUTSIDE, Code.UNRECORDED):
            raise session.guard.deny(denial, caller)
        mode, oid = files[path][:2]
        kept = denial.code is Code.KEEP and mode != GONE and not made
        wanted.append([path, KEPT if kept else mode, oid])
    commands = session.commands
    known = {path: commands.replaced.get(path) for path in denied}
    returns = {path: told[1] for path, told in known.items() if told and told[0] == arguments["commit"]}
    directory = session_directory(session.home, session.who.session)
    stage = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        answer = session.git_worker.call("prepare", [stage], files=wanted, returns=returns)
        if "refused" not in answer:
            raise GitError(f"published files cannot be read: {answer.get('line')}", kind="unreadable")
        if answer["refused"]:
            raise _explained(session, denied, answer["refused"], caller)
        number = session.guard.grant(stage, answer["at"], answer["size"])
    finally:
        os.close(stage)
    command = [arguments["subcommand"], *arguments["arguments"]][:_MOST_SHOWN]
    commands.open[number] = GrantedCheckout(arguments["commit"], head, command, answer["before"])
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


def _files(plain: list[Any]) -> dict[str, tuple[int, str, int, str]]:
    """Return {path: (mode, blob id, size, first bytes)} of the call. Raises UsageError."""
    if len(plain) > _MOST_FILES:
        raise UsageError(f"a command takes in at most {_MOST_FILES} files; take them in by several commands")
    kinds = (str, int, str, int, str)
    for each in plain:
        if not isinstance(each, list) or len(each) != 5 or not all(map(isinstance, each, kinds)):
            raise UsageError("files are lists of path, mode, blob id, size and first bytes")
    return {path: (mode, oid, size, head) for path, mode, oid, size, head in plain}


def _refusals(session: SessionContext, files: dict[str, tuple[int, str, int, str]]) -> dict[str, tuple[Denied, bool]]:
    """Return {path: (denial, is_create)} of the refused changes. `is_create`: even creation is refused."""
    questions: list[tuple[Request, Context]] = []
    for path, (mode, _, size, head) in files.items():
        place = WorkspacePath(path)
        if mode == _SYMLINK:
            questions.append((Request(Operation.SYMLINK, place, Kind.SYMLINK), Context(target=head)))
        elif mode != GONE:
            context = Context(size=size, mode=mode & 0o777, head=head.encode("latin-1", "replace"))
            questions.append((Request(Operation.CREATE_FILE, place), context))
        questions.append((Request(Operation.DELETE_FILE, place), Context(leaves=True, in_source=True)))
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
    shown = "; ".join(f"{path}: {why}" for path, why in list(refused.items())[:_MOST_SHOWN])
    more = f"; and {len(refused) - _MOST_SHOWN} more" if len(refused) > _MOST_SHOWN else ""
    return session.guard.deny(denied[first][0]._replace(about=f"The command would change {shown}{more}."), caller)


def _finish(session: SessionContext, arguments: Arguments) -> Any:
    """End a grant, and record the files that the command has written."""
    _check(arguments, grant=int)
    return {"taken": finish(session, arguments["grant"])}


def finish(session: SessionContext, number: int) -> int:
    """End the grant `number` if it is open. Return the number of paths that the command has written."""
    command = session.commands.open.pop(number, None)
    if command is None:
        return 0
    taken = session.guard.withdraw(number)
    for path in taken:
        session.commands.replaced[path] = command.head, list(command.before[path])
    if taken:
        details = {"commit": command.commit, "command": command.command, "files": len(taken)}
        session.guard.event("checkout", {**details, "paths": taken[:_MOST_SHOWN]})
    return len(taken)


def _caller(arguments: Arguments) -> Caller:
    """Return the caller for the trail: the command line, truncated, and its directory."""
    shown = [arguments["subcommand"], *arguments["arguments"][:_MOST_SHOWN]]
    details: dict[str, Any] = {"command": [str(word)[:_LONGEST_SHOWN] for word in shown]}
    with suppress(KeyError):
        details["directory"] = arguments["directory"][:_LONGEST_SHOWN]
    return Caller("git", details)


GIT_COMMANDS: Final[dict[str, Callable[[SessionContext, Arguments], Any]]] = {
    "git.begin": _begin,
    "git.preflight": _preflight,
    "git.finish": _finish,
}
