"""A shell in a mount, with the session's git and bd first on PATH."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from bonobofs.errors import MountError
from bonobofs.git.command_line import READING
from bonobofs.ipc.client import SOCKET_VARIABLE
from bonobofs.session.launcher import ROOT
from bonobofs.session.session_list import CallableSession, callable_session
from bonobofs.state.home import GUARD_SOCKET, INSIDE
from bonobofs.system import mounts
from bonobofs.system.paths import is_within

if TYPE_CHECKING:
    from bonobofs.policy.isolation import IsolatedShell

POLICY_VARIABLE: Final = "BONOBOFS_POLICY"
"""Variable with the path of the policy's description, `.bonobofs/policy.md` in the mount."""
_HASH_LENGTH: Final = 16
_SECONDS: Final = 10.0


def enter_shell(home: Path, mountpoint: Path, command: Sequence[str]) -> NoReturn:
    """Replace this process with the user's shell, or with `command`, in the mount.

    A working directory outside the mount becomes its root. MountError: no mount, no access, no answer or no program.
    """
    resolved = mounts.resolve(mountpoint)
    session = callable_session(home, resolved)
    if session is None or session.mountpoint != resolved:
        raise MountError(_nothing_to_call(mountpoint, resolved))
    provisioned = provision(home, session)
    bin_dir = session.directory / "bin"
    path = [part for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if not is_session_bin(part, home)]
    environment = {**os.environ, **provisioned.env, "PATH": os.pathsep.join([str(bin_dir), *path])}
    environment[SOCKET_VARIABLE] = str(session.directory / GUARD_SOCKET)
    environment[POLICY_VARIABLE] = str(session.mountpoint / ".bonobofs/policy.md")
    if not command and sys.stdin.isatty():
        sys.stderr.write(
            "bonobofs: git and bd here run under the policy; rules: .bonobofs/policy.md; "
            "for one path: bonobofs why PATH\n"
        )
    words = list(command) or [os.environ.get("SHELL") or "/bin/sh"]
    if not is_within(_here(), str(session.mountpoint)):
        os.chdir(provisioned.cwd)
    environment["PWD"] = os.getcwd()
    try:
        os.execvpe(words[0], words, environment)
    except OSError as error:
        raise MountError(f"{words[0]} cannot be run: {error.strerror}; name a program on PATH") from error


def _nothing_to_call(mountpoint: Path, resolved: Path) -> str:
    if mounts.at(resolved):
        return (
            f"the session of {mountpoint} does not let this user call it; ask the operator to mount with --user, "
            "or work in the mount without a shell of its own"
        )
    return f"nothing is mounted on {mountpoint}; bonobofs status lists the mounts of this state directory"


def provision(home: Path, session: CallableSession, shown_as: str | None = None) -> IsolatedShell:
    """Return working directory and environment for a session's shell, with CLEO's variable names. MountError.

    `shown_as` is the path under which the shell sees the mount, by default the mountpoint.
    """
    from bonobofs.policy.isolation import provision_isolated_shell  # noqa: PLC0415 - a mount does not need it

    mountpoint = str(session.mountpoint)
    return provision_isolated_shell(
        worktree_path=shown_as or mountpoint,
        branch=_branch(home, mountpoint),
        role=session.role,
        project_hash=hashlib.sha256(os.fsencode(session.source)).hexdigest()[:_HASH_LENGTH],
        session_id=session.session,
        agent_id=session.agent_id,
    )


def _branch(home: Path, mountpoint: str) -> str:
    """Return the checked-out branch; "" without a branch, a repository or git. MountError: the mount hangs."""
    git = find_program("git", home)
    if git is None:
        return ""
    command = [git, "-C", mountpoint, "symbolic-ref", "--quiet", "--short", "HEAD"]
    try:
        ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise MountError(f"the mount on {mountpoint} does not answer; run bonobofs status") from None
    return os.fsdecode(ran.stdout).removesuffix("\n") if ran.returncode == 0 else ""


def _here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path("/")


_RUN: Final = "import sys; sys.path.insert(0, sys.argv.pop(1)); from bonobofs.{} import main; sys.exit(main())"
_GIT: Final = """\
#!/bin/sh
# git of one bonobofs session. Commands that only read run the real git. The session decides about all others.
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
# bd of one bonobofs session. The session decides about every command.
exec {python} {session} "$@"
"""


def make_programs(directory: Path, home: Path) -> Path:
    """Create `bin` in a session's `inside` directory; return its path. It has a bd, and a git if PATH has one."""
    bin_dir = directory / "bin"
    directory.mkdir(mode=0o700, exist_ok=True)
    bin_dir.mkdir(mode=0o700, exist_ok=True)
    real = find_program("git", home)
    if real is not None:
        text = _GIT.format(
            reading="|".join(sorted(READING)),
            real=shlex.quote(real),
            session=shlex.quote(str(directory)),
            python=_python("git.git_shim"),
        )
        _write(bin_dir / "git", text)
    _write(bin_dir / "bd", _BD.format(python=_python("beads.bd_shim"), session=shlex.quote(str(directory))))
    return bin_dir


def _python(module: str) -> str:
    """Return the start of a shell command that runs `main` of that module."""
    return shlex.join([sys.executable, "-I", "-S", "-X", "utf8", "-c", _RUN.format(module), ROOT])


def find_program(name: str, home: Path) -> str | None:
    """Return the absolute path of a program on PATH, ignoring the shims of sessions; None if absent."""
    parts = os.environ.get("PATH", os.defpath).split(os.pathsep)
    path = [part for part in parts if part and not is_session_bin(part, home)]
    found = shutil.which(name, path=os.pathsep.join(path))
    return None if found is None else os.path.abspath(found)


def is_session_bin(directory: str, home: Path) -> bool:
    """Return True if a directory of PATH is the `bin` of a session, of this state directory or another."""
    real = Path(os.path.realpath(directory))
    of_another = real.parent.name == INSIDE and real.parent.parent.parent.name == "sessions"
    return of_another or Path(os.path.realpath(home / "sessions")) in real.parents


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8", errors="surrogateescape", opener=_executable) as file:
        file.write(text)


def _executable(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o700)
