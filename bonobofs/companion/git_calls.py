"""What the session's `git` asks through the guard socket: leave to begin, and then what the git gate does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, NoReturn

from bonobofs.companion.session import CalledSession
from bonobofs.decision import Code, Denied
from bonobofs.errors import GitError, UsageError
from bonobofs.guard import Caller
from bonobofs.policy import words
from bonobofs.policy.engine import decide
from bonobofs.policy.families import GIT
from bonobofs.request import Operation, Request, WorkspacePath
from bonobofs.sandbox.boundary import ISOLATION_ENV_KEYS, evaluate_isolation_boundary
from bonobofs.sandbox.git.reading import is_of_git

Arguments = dict[str, Any]

_OPERATIONS: Final = {
    **{word: Operation(word) for word in GIT if word in list(Operation)},
    "branch": Operation.CREATE_BRANCH,
    "checkout": Operation.CHECKOUT_BRANCH,
    "switch": Operation.CHECKOUT_BRANCH,
}
"""By which operation the role is asked for a subcommand."""
_MOST_SHOWN: Final = 20
_LONGEST_SHOWN: Final = 200
"""How many words of a command line the record has, and how many characters of each."""


class _Words(NamedTuple):
    """What a rule of the shim says when it refuses."""

    code: Code
    reason: str
    instead: str


_RULES: Final = {
    "git.isolation": _Words(
        Code.OUTSIDE,
        "A worker changes nothing from outside its worktree.",
        "Go into the worktree, and run it there.",
    ),
    "git.repository": _Words(
        Code.GIT,
        "The gate answers for the repository of this session alone.",
        "Run it at the session's own work tree, without naming another repository.",
    ),
    "git.path": _Words(
        Code.OUTSIDE,
        "A path that is named leads out of the work tree.",
        "Name files that lie in the work tree.",
    ),
    "git.form": _Words(
        Code.GIT,
        "The gate does not answer this form of the subcommand.",
        "Use the everyday form, with fewer options.",
    ),
    "git.alias": _Words(
        Code.GIT,
        "What this alias stands for is not a subcommand of git.",
        "Write the subcommand out.",
    ),
    "git.option": _Words(
        Code.GIT,
        "Before the subcommand stands an option that is not known.",
        "Leave it out.",
    ),
}


def _text(value: object) -> bool:
    return isinstance(value, str)


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _pairs(value: object) -> bool:
    return isinstance(value, list) and all(_texts(pair) and len(pair) == 2 for pair in value)


def _or_none(kind: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or kind(value)


Kinds = Mapping[str, Callable[[object], bool]]

_GATE: Final[dict[str, tuple[str, Kinds]]] = {
    "add": ("paths", {"paths": _texts, "update_only": _flag}),
    "restore": ("paths", {"paths": _texts, "source": _or_none(_text), "staged": _flag, "worktree": _flag}),
    "remove": ("paths", {"paths": _texts, "cached": _flag, "force": _flag}),
    "move": ("pairs", {"pairs": _pairs, "force": _flag}),
    "commit": (
        "message",
        {
            "message": _or_none(_text),
            "files": _or_none(_texts),
            "only": _flag,
            "amend": _flag,
            "allow_empty": _flag,
            "issue": _or_none(_text),
        },
    ),
    "create_branch": ("name", {"name": _text, "base": _text}),
    "delete_branch": ("name", {"name": _text, "force": _flag}),
    "rename_branch": ("old new", {"old": _text, "new": _text, "force": _flag}),
    "switch": (
        "",
        {
            "branch": _or_none(_text),
            "commit": _or_none(_text),
            "create": _flag,
            "base": _or_none(_text),
            "force": _flag,
            "clean": _flag,
        },
    ),
    "merge": (
        "source",
        {
            "source": _text,
            "target": _or_none(_text),
            "strategy": _text,
            "message": _or_none(_text),
            "fast_forward": _text,
            "commit": _flag,
        },
    ),
    "reset": ("", {"commit": _text, "mode": _text}),
    "stash_push": (
        "",
        {"message": _or_none(_text), "include_untracked": _flag, "paths": _or_none(_texts), "keep_index": _flag},
    ),
    "stash_apply": ("", {"index": _number, "drop": _flag, "restore_index": _flag}),
    "stash_drop": ("", {"index": _number}),
    "stash_clear": ("", {}),
    "tag": ("name", {"name": _text, "target": _text, "message": _or_none(_text), "force": _flag}),
    "delete_tag": ("name", {"name": _text}),
}
"""Each operation of the gate: what it needs, and what every argument must be."""


def _of_gate(name: str) -> Callable[[CalledSession, Arguments], Any]:
    needed, kinds = _GATE[name]

    def call(session: CalledSession, arguments: Arguments) -> Any:
        _check(arguments, needed, kinds)
        try:
            answer = getattr(session.git, name)(**arguments)
        except GitError as error:
            return {"failed": {"kind": error.kind, "message": str(error), "paths": list(error.paths)}}
        session.note_index(session.git.index)
        session.show_repository()
        return answer._asdict() if hasattr(answer, "_asdict") else answer

    return call


def _check(arguments: Arguments, needed: str, kinds: Kinds) -> None:
    """UsageError: an argument is missing, not known, or not of its kind."""
    for name in needed.split():
        if name not in arguments:
            raise UsageError(f"the call needs {name}")
    for name, value in arguments.items():
        if name not in kinds:
            raise UsageError(f"the call takes no {name}")
        if not kinds[name](value):
            raise UsageError(f"{name} is not what the call takes there")


def _begin(session: CalledSession, arguments: Arguments) -> Any:
    """CLEO's order: the isolation, then what the role does not have, then the fence around the repository."""
    kinds = {"subcommand": _text, "arguments": _texts, "directory": _text, "top": _text, "elsewhere": _flag}
    _check(arguments, " ".join(kinds), kinds)
    subcommand = arguments["subcommand"]
    root = session.who.mountpoint or session.who.source
    standing = {ISOLATION_ENV_KEYS[0]: root, ISOLATION_ENV_KEYS[1]: session.who.role}
    if evaluate_isolation_boundary(subcommand, env=standing, cwd=arguments["directory"]) is not None:
        _refuse_by(session, "git.isolation", arguments)
    _hold_to_role(session, arguments)
    if arguments["elsewhere"] or arguments["top"] not in ("", root):
        _refuse_by(session, "git.repository", arguments)
    return {"root": root}


def _hold_to_role(session: CalledSession, arguments: Arguments) -> None:
    """Refuse a subcommand that the role does not have."""
    guard, subcommand = session.guard, arguments["subcommand"]
    operation = _OPERATIONS.get(subcommand)
    if operation is not None:
        decision = guard.decide(Request(operation, WorkspacePath("")))
        if isinstance(decision, Denied):
            raise guard.refuse(decision, _caller(arguments), guard="git")
        return
    own = [word for word in GIT if _has(session, word)]
    # Whatever else is sent is a program on somebody's PATH: the sentence stays one of a few.
    named = subcommand if is_of_git(subcommand) else "programs of others"
    refusal = words.role_lacks(session.who.role, "git", named, own, [])
    raise guard.refuse(Denied(*refusal, WorkspacePath(""), Operation.CALL), _caller(arguments), guard="git")


def _has(session: CalledSession, word: str) -> bool:
    request = Request(_OPERATIONS[word], WorkspacePath(""))
    return not isinstance(decide(session.guard.policy, session.guard.agent, request), Denied)


def _refuse(session: CalledSession, arguments: Arguments) -> Any:
    """Enter a refusal of the shim's own, and give it."""
    kinds = {"rule": _text, "subcommand": _text, "arguments": _texts}
    _check(arguments, " ".join(kinds), kinds)
    if arguments["rule"] not in _RULES:
        raise UsageError(f"there is no rule {arguments['rule']!r}")
    _refuse_by(session, arguments["rule"], arguments)


def _refuse_by(session: CalledSession, rule: str, arguments: Arguments) -> NoReturn:
    code, reason, instead = _RULES[rule]
    operation = _OPERATIONS.get(arguments["subcommand"], Operation.CALL)
    denied = Denied(code, rule, reason, instead, WorkspacePath(""), operation)
    raise session.guard.refuse(denied, _caller(arguments), guard="git")


def _caller(arguments: Arguments) -> Caller:
    """What was asked for, for the record: as much of it as tells what it was."""
    shown = [arguments["subcommand"], *arguments["arguments"][:_MOST_SHOWN]]
    details: dict[str, Any] = {"command": [word[:_LONGEST_SHOWN] for word in shown]}
    details.update((name, arguments[name][:_LONGEST_SHOWN]) for name in ("directory", "top") if name in arguments)
    return Caller("git", details)


GIT_CALLS: Final[dict[str, Callable[[CalledSession, Arguments], Any]]] = {
    "git.begin": _begin,
    "git.refuse": _refuse,
    **{f"git.{name}": _of_gate(name) for name in _GATE},
}
