"""The programs of a session's `bin`: small shells that know the session by the directory in which they are made.

What surely only reads, the shell hands to the real git at once. Python asks the session about the rest (`git.shim`).
bd is answered beside the mount, reading too (`beads.bd_command_line`).
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Final

from bonobofs.git.command_line import READING
from bonobofs.state.home import INSIDE

_ROOT: Final = str(Path(__file__).resolve().parent.parent.parent)
_RUN: Final = "import sys; sys.path.insert(0, sys.argv.pop(1)); from bonobofs.{} import main; sys.exit(main())"
_GIT: Final = """\
#!/bin/sh
# The git of one bonobofs session: reading commands are the real git's; the session is asked about the others.
case ${{1-}} in
-C) name=${{3-}} ;;
-P|--no-pager) name=${{2-}} ;;
*) name=${{1-}} ;;
esac
case $name in
{reading}|--version) exec {real} "$@" ;;
esac
exec {python} {session} {real} "$@"
"""
_BD: Final = """\
#!/bin/sh
# The bd of one bonobofs session: every command line is asked of the session's gate.
exec {python} {session} "$@"
"""


def make(directory: Path, home: Path) -> Path:
    """Make `bin` in a session's `inside` directory and give it. A git is in it where one is on PATH, a bd always."""
    place = directory / "bin"
    directory.mkdir(mode=0o700, exist_ok=True)
    place.mkdir(mode=0o700, exist_ok=True)
    real = find("git", home)
    if real is not None:
        text = _GIT.format(
            reading="|".join(sorted(READING)),
            real=shlex.quote(real),
            session=shlex.quote(str(directory)),
            python=_python("git.git_shim"),
        )
        _write(place / "git", text)
    _write(place / "bd", _BD.format(python=_python("beads.bd_shim"), session=shlex.quote(str(directory))))
    return place


def _python(module: str) -> str:
    """The beginning of a command line that runs `main` of that module."""
    return shlex.join([sys.executable, "-I", "-S", "-X", "utf8", "-c", _RUN.format(module), _ROOT])


def find(name: str, home: Path) -> str | None:
    """The program of that name on PATH that is none of our shims; None where there is none."""
    parts = os.environ.get("PATH", os.defpath).split(os.pathsep)
    path = [part for part in parts if part and not is_ours(part, home)]
    found = shutil.which(name, path=os.pathsep.join(path))
    return None if found is None else os.path.abspath(found)


def is_ours(directory: str, home: Path) -> bool:
    """Whether a directory of PATH is the `bin` of a session, of this state directory or another."""
    real = Path(os.path.realpath(directory))
    of_another = real.parent.name == INSIDE and real.parent.parent.parent.name == "sessions"
    return of_another or Path(os.path.realpath(home / "sessions")) in real.parents


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogateescape", opener=_executable) as file:
        file.write(text)


def _executable(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o700)
