"""`mount --user NAME`: one other user may call the session, and reaches `inside` alone of the state directory.

POSIX ACLs name that user alone on the directories that lead to `inside`. Everything else in the state directory stays
closed to all users but the operator.
"""

from __future__ import annotations

import errno
import functools
import operator
import os
import pwd
import struct
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.errors import MountError, UsageError

_ACL: Final = "system.posix_acl_access"
_HEAD: Final = struct.pack("<I", 2)
_ENTRY: Final = struct.Struct("<HHI")
_NO_ID: Final = 0xFFFFFFFF
_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 1, 2, 4, 8, 0x10, 0x20
_SEARCH: Final = 1
_READ_AND_SEARCH: Final = 5
_PACKAGE: Final = Path(__file__).resolve().parent.parent
_PROBE: Final = "import os, sys; p = sys.argv[1]; sys.exit(not os.access(p, os.X_OK if os.path.isdir(p) else os.R_OK))"


class Guest(NamedTuple):
    """A user who is not the operator."""

    name: str
    uid: int
    gid: int


def find_guest(name: str) -> Guest:
    """The user of that name or number. UsageError: there is none, or this process is not root."""
    if os.geteuid() != 0:
        raise UsageError("--user needs root: an ordinary user cannot let another user into a mount; leave it out")
    try:
        found = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
    except (KeyError, OverflowError):
        raise UsageError(f"--user {name}: there is no such user; name one of /etc/passwd") from None
    if found.pw_uid == 0:
        raise UsageError("--user names root, who may call every session; leave it out")
    return Guest(found.pw_name, found.pw_uid, found.pw_gid)


def open_way(home: Path, guest: Guest) -> None:
    """Let the guest search the state directory and its `sessions`, and close to it all else there.

    Raises MountError where the guest cannot come so far, or cannot run the programs of `bin`.
    """
    _close_to_others(home)
    _allow(home, guest, _SEARCH)
    _allow(home / "sessions", guest, _SEARCH)
    if not _reaches(guest, _PACKAGE / "__init__.py"):
        raise MountError(
            f"{guest.name} cannot run {sys.executable} or read {_PACKAGE}, which the programs in its PATH need; "
            "install bonobofs where it can, such as /opt/bonobofs"
        )
    if not _reaches(guest, home / "sessions"):
        raise MountError(
            f"{guest.name} cannot reach the state directory {home}; set BONOBOFS_HOME to a directory that it can "
            "search down to, such as /var/lib/bonobofs"
        )


def let_inside(home: Path, inside: Path, guest: Guest) -> None:
    """Let the guest read and search `inside` and the programs there. The session's directory is only searched."""
    _close_to_others(home)
    _allow(inside.parent, guest, _SEARCH)
    _allow(inside, guest, _READ_AND_SEARCH)
    for path in (inside / "bin", *(inside / "bin").iterdir()):
        path.chmod(0o755)


def _close_to_others(home: Path) -> None:
    for entry in os.scandir(home):
        mode = entry.stat(follow_symlinks=False).st_mode
        if mode & 0o007 and not entry.is_symlink():
            os.chmod(entry.path, mode & 0o7770)


def _reaches(guest: Guest, path: Path) -> bool:
    try:
        ran = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _PROBE, path],
            user=guest.uid,
            group=guest.gid,
            extra_groups=os.getgrouplist(guest.name, guest.gid),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            check=False,
        )
    except PermissionError:
        return False
    return ran.returncode == 0


def _allow(path: Path, guest: Guest, permissions: int) -> None:
    """Add the guest to the ACL of a directory. MountError: the file system has none."""
    entries = _entries(path)
    entries[_USER, guest.uid] = entries.get((_USER, guest.uid), 0) | permissions
    named = (bits for (tag, _), bits in entries.items() if tag in (_USER, _GROUP_OBJ, _GROUP))
    entries[_MASK, _NO_ID] = functools.reduce(operator.or_, named)
    acl = _HEAD + b"".join(_ENTRY.pack(tag, bits, number) for (tag, number), bits in sorted(entries.items()))
    try:
        os.setxattr(path, _ACL, acl)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        raise MountError(
            f"the file system of {path} has no POSIX ACLs, which --user needs; set BONOBOFS_HOME to a directory of "
            "a file system that has them, such as ext4, xfs or btrfs"
        ) from error


def _entries(path: Path) -> dict[tuple[int, int], int]:
    try:
        acl = os.getxattr(path, _ACL)
    except OSError as error:
        if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
            raise
        mode = path.stat().st_mode
        return {
            (_USER_OBJ, _NO_ID): mode >> 6 & 7,
            (_GROUP_OBJ, _NO_ID): mode >> 3 & 7,
            (_OTHER, _NO_ID): mode & 7,
        }
    return {(tag, number): bits for tag, bits, number in _ENTRY.iter_unpack(acl[len(_HEAD) :])}
