"""The program `git` of a session: what reads, the real git does; the rest the gate answers, or it is refused.

Nothing in its environment says who asks: the session is the one in whose directory the program lies.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from bonobofs.sandbox.git.line import Line, NotUnderstood, resolve, split
from bonobofs.sandbox.git.reading import is_of_git, only_reads
from bonobofs.sandbox.git.starting import LOCKING, become, names_repository
from bonobofs.sandbox.git.telling import complain

# What only the gate needs is read where it is needed: reading must begin at once.
if TYPE_CHECKING:
    from bonobofs.sandbox.git.real import RealGit
    from bonobofs.sandbox.git.work import Work


def main() -> int:
    """`git`, with the session's directory and the real git before its own arguments; the exit status."""
    session, real, *given = sys.argv[1:]
    try:
        line = _understood(real, split(tuple(given)))
    except NotUnderstood as reason:
        return _refused(session, str(reason), given)
    if not line.name or only_reads(line.name, line.arguments) or _is_nothing(real, line):
        return _read(real, line)
    return _answered(session, real, line)


def _understood(real: str, line: Line) -> Line:
    def meaning(named: Line) -> str:
        from bonobofs.sandbox.git.real import RealGit  # noqa: PLC0415

        ran = RealGit(real, named.options).run("config", "--get", f"alias.{named.name}")
        return ran.out.removesuffix("\n") if ran.status == 0 else ""

    line = resolve(line, is_of_git, meaning)
    return line._replace(name="add") if line.name == "stage" else line


def _read(real: str, line: Line) -> int:
    if line.name in LOCKING and not line.elsewhere and not names_repository():
        from bonobofs.sandbox.git.real import RealGit  # noqa: PLC0415

        with suppress(OSError):  # without room for an index of its own it tries the lock, in vain
            return RealGit(real, line.options).read(line.name, *line.arguments)
    return become(real, (*line.options, *([line.name] if line.name else []), *line.arguments))


def _is_nothing(real: str, line: Line) -> bool:
    """Whether it is neither a subcommand nor a program: then git says so."""
    if is_of_git(line.name):
        return False
    from bonobofs.sandbox.git.real import RealGit  # noqa: PLC0415

    git = RealGit(real, ())
    if line.name in git.run("--list-cmds=builtins").lines:
        return False
    programs = [git.run("--exec-path").out.strip(), *os.environ.get("PATH", os.defpath).split(os.pathsep)]
    return not any(os.path.lexists(os.path.join(one or ".", f"git-{line.name}")) for one in programs)


def _answered(session: str, real: str, line: Line) -> int:
    from bonobofs.decision import Refused  # noqa: PLC0415
    from bonobofs.errors import BonobofsError  # noqa: PLC0415
    from bonobofs.sandbox.git import refusing  # noqa: PLC0415
    from bonobofs.sandbox.git.gate import Failure, Gate  # noqa: PLC0415
    from bonobofs.sandbox.git.options import Unsupported  # noqa: PLC0415
    from bonobofs.sandbox.git.real import RealGit  # noqa: PLC0415
    from bonobofs.sandbox.git.work import Work, inside, told  # noqa: PLC0415

    git = RealGit(real, line.options)
    gate = Gate(session)
    try:
        elsewhere = line.elsewhere or names_repository()
        root = gate.begin(line.name, line.arguments, _directory(git), _top(git), elsewhere=elsewhere)
        if not git.top:
            return become(real, (*line.options, "rev-parse", "--show-toplevel"))
        work = Work(git, gate, line.name, line.arguments, root)
        try:
            if line.name == "add" and not inside(work, _paths(line.arguments)):
                gate.refuse("git.path", line.name, line.arguments)
            return _handler(line.name)(work)
        except Unsupported:
            gate.refuse("git.form", line.name, line.arguments)
    except Refused as refused:
        return refusing.show(refused.decision, line.name)
    except Failure as failure:
        return told(failure, line.name)
    except (BonobofsError, OSError) as error:
        complain(f"git: {error}\n")
    return 1


def _refused(session: str, rule: str, words: list[str]) -> int:
    """Refuse what is not understood."""
    from bonobofs.decision import Refused  # noqa: PLC0415
    from bonobofs.errors import BonobofsError  # noqa: PLC0415
    from bonobofs.sandbox.git import refusing  # noqa: PLC0415
    from bonobofs.sandbox.git.gate import Gate  # noqa: PLC0415

    try:
        Gate(session).refuse(rule, "", words)
    except Refused as refused:
        return refusing.show(refused.decision, "")
    except (BonobofsError, OSError) as error:
        complain(f"git: {error}\n")
    return 1


def _directory(git: RealGit) -> str:
    """Where git stands, without symlinks; "" where that is gone or nowhere."""
    try:
        return str(git.base.resolve(strict=True))
    except OSError:
        return ""


def _top(git: RealGit) -> str:
    """The top of the work tree of the repository that git finds from there, without symlinks; "" for none."""
    return os.path.realpath(git.top) if git.top else ""


def _handler(name: str) -> Callable[[Work], int]:
    from bonobofs.sandbox.git import branches, commits, index, states  # noqa: PLC0415 - as above

    return {
        "add": index.add,
        "rm": index.remove,
        "mv": index.move,
        "restore": index.restore,
        "commit": commits.commit,
        "merge": commits.merge,
        "tag": commits.tag,
        "branch": branches.branch,
        "checkout": branches.checkout,
        "switch": branches.switch,
        "reset": states.reset,
        "stash": states.stash,
    }[name]


def _paths(arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The words of `add` that name files."""
    at = arguments.index("--") if "--" in arguments else len(arguments)
    return (*(word for word in arguments[:at] if not word.startswith("-")), *arguments[at + 1 :])
