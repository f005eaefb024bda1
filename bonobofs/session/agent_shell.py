"""A shell in a mount, with the session's own programs before all others."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from bonobofs.errors import MountError
from bonobofs.ipc.client import SOCKET_VARIABLE
from bonobofs.policy.isolation import IsolatedShell, provision_isolated_shell
from bonobofs.session import shim_files
from bonobofs.session.session_list import lies_in
from bonobofs.session.socket_lookup import CallableSession, callable_around
from bonobofs.state.home import GUARD_SOCKET
from bonobofs.system import mounts

POLICY_VARIABLE: Final = "BONOBOFS_POLICY"
"""Names the description of the policy in force, `.bonobofs/policy.md` of the mount."""
_HASH_LENGTH: Final = 16
_SECONDS: Final = 10.0


def enter_shell(home: Path, mountpoint: Path, command: Sequence[str]) -> NoReturn:
    """Become the user's shell, or a command, in the mount. MountError: nothing is mounted there, or it does not answer.

    Who stands in the mount already stays where they are; others begin at its root.
    """
    resolved = mounts.resolve(mountpoint)
    session = callable_around(home, resolved)
    if session is None or session.mountpoint != resolved:
        raise MountError(_nothing_to_call(mountpoint, resolved))
    provisioned = provision(home, session)
    place = session.directory / "bin"
    path = [part for part in os.environ.get("PATH", os.defpath).split(os.pathsep) if not shim_files.is_ours(part, home)]
    environment = {**os.environ, **provisioned.env, "PATH": os.pathsep.join([str(place), *path])}
    environment[SOCKET_VARIABLE] = str(session.directory / GUARD_SOCKET)
    environment[POLICY_VARIABLE] = str(session.mountpoint / ".bonobofs/policy.md")
    if not command and sys.stdin.isatty():
        sys.stderr.write(
            "bonobofs: git and bd here ask the session; rules: .bonobofs/policy.md; of one path: bonobofs why PATH\n"
        )
    words = list(command) or [os.environ.get("SHELL") or "/bin/sh"]
    if not lies_in(_here(), str(session.mountpoint)):
        os.chdir(provisioned.cwd)
    environment["PWD"] = os.getcwd()
    try:
        os.execvpe(words[0], words, environment)
    except OSError as error:
        raise MountError(f"{words[0]} cannot be run: {error.strerror}") from error


def _nothing_to_call(mountpoint: Path, resolved: Path) -> str:
    if mounts.at(resolved):
        return (
            f"the session of {mountpoint} does not let this user call it; ask the operator to mount with --user, "
            "or work in the mount without a shell of its own"
        )
    return f"nothing is mounted on {mountpoint}; bonobofs status lists the mounts of this state directory"


def provision(home: Path, session: CallableSession) -> IsolatedShell:
    """What a shell of a session is given, in CLEO's words."""
    mountpoint = str(session.mountpoint)
    return provision_isolated_shell(
        worktree_path=mountpoint,
        branch=_branch(home, mountpoint),
        role=session.role,
        project_hash=hashlib.sha256(os.fsencode(session.source)).hexdigest()[:_HASH_LENGTH],
        session_id=session.session,
        agent_id=session.agent_id,
    )


def _branch(home: Path, mountpoint: str) -> str:
    """The branch that is checked out; "" for none, also where there is no git or no repository."""
    git = shim_files.find("git", home)
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
