"""Checks before a mount: refuse a source and mountpoint that would hang, or that would bypass the policy.

A server that accesses its own mount hangs. So its program and its state directory must be outside the mountpoint. The
state directory must also be outside the source, where a program in the mount could reach it.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import grp
import os
import pwd
import stat
import sys
from itertools import islice
from pathlib import Path

from bonobofs.errors import MountError
from bonobofs.state.sqlite_file import sqlite_path
from bonobofs.system import mounts, processes
from bonobofs.system.paths import is_within

_FS_IOC_GETFLAGS = 0x80086601
_FS_CASEFOLD_FL = 0x40000000
_NAMES_TO_PROBE = 200
_MOST_LINKS = 40


def check(source: Path, mountpoint: Path, home: Path) -> None:
    """Raise MountError, one line with the remedy, if this pair cannot be served. The paths have no symlinks."""
    check_source(source, home)
    if not mounts.at(mountpoint):
        _check_directory(mountpoint, "mountpoint")
    if mountpoint == Path("/"):
        raise MountError("the root directory cannot be a mountpoint; mount on a directory of its own")
    if mountpoint != source and is_within(mountpoint, source):
        raise MountError(
            f"the mountpoint {mountpoint} lies inside its source; use one outside {source}, or the source itself"
        )
    if mountpoint != source and is_within(source, mountpoint):
        raise MountError(f"the source {source} lies inside the mountpoint {mountpoint}; use a mountpoint outside of it")
    _check_state(home, mountpoint)
    _check_program(mountpoint)
    _check_unguarded(mountpoint.parent, "mountpoint")
    _check_unguarded(home, "state directory")


def resolve(path: Path, name: str, *, allow_writable_parents: bool) -> Path:
    """Return the absolute path of a source or mountpoint without symlinks. MountError.

    A user who can replace a directory on the way could redirect the path between this check and the mount. Such a path
    is refused, unless `allow_writable_parents`. A symlink that such a user can replace is always refused. Root and the
    user of this process are trusted. Existing bonobofs mounts are not accessed, because they could hang.
    """
    covered = {str(mount.mountpoint) for mount in mounts.bonobofs_mounts()}
    here, links = "/", 0
    pending = os.path.join(os.getcwd(), path).split("/")[::-1]
    while pending:
        part = pending.pop()
        if part in ("", "."):
            continue
        if part == "..":
            here = os.path.dirname(here)
            continue
        entry = os.path.join(here, part)
        if entry in covered:
            here = entry
            continue
        try:
            above, st = os.stat(here), os.lstat(entry)
        except OSError:
            return Path(entry, *reversed(pending))  # the caller checks next that the path exists
        is_link = stat.S_ISLNK(st.st_mode)
        if (is_link or not allow_writable_parents) and _is_replaceable(above, st, here):
            remedy = "name the directory itself" if is_link else "or allow it: --allow-writable-parents"
            raise MountError(
                f"another user can replace {entry}, which is on the way to the {name} {path}; use a {name} below "
                f"directories that only root or you can write, {remedy}"
            )
        if not is_link:
            here = entry
            continue
        links += 1
        if links > _MOST_LINKS:
            raise MountError(f"the {name} {path} has too many levels of symlinks; name the directory itself")
        target = os.readlink(entry)
        here = "/" if target.startswith("/") else here
        pending += target.split("/")[::-1]
    return Path(here)


def _is_replaceable(above: os.stat_result, entry: os.stat_result, directory: str) -> bool:
    trusted = (0, os.geteuid())
    if above.st_uid not in trusted:
        return True
    if not above.st_mode & stat.S_IWOTH and not _group_may_write(above, directory):
        return False
    return not (above.st_mode & stat.S_ISVTX and entry.st_uid in trusted)


def _group_may_write(above: os.stat_result, directory: str) -> bool:
    """Return True if the group or the ACL lets a user other than root and this one write in the directory."""
    if not above.st_mode & stat.S_IWGRP:
        return False
    with contextlib.suppress(OSError):
        os.getxattr(directory, "system.posix_acl_access")
        return True
    try:
        members = set(grp.getgrgid(above.st_gid).gr_mem)
    except KeyError:
        return above.st_gid != os.getegid()
    members |= {user.pw_name for user in pwd.getpwall() if user.pw_gid == above.st_gid}
    own = {user.pw_name for user in pwd.getpwall() if user.pw_uid in (0, os.geteuid())}
    return not members <= own


def _check_database(home: Path, path: Path, name: str) -> None:
    file = sqlite_path(home)
    if file is None:
        from bonobofs.state.database import url  # noqa: PLC0415 - loads SQLAlchemy, to check the URL

        url(home)
    elif is_within(Path(file), path):
        raise MountError(
            f"the database {file} lies inside the {name}, where an agent could reach it; "
            "unset BONOBOFS_DATABASE, or set it to a file outside"
        )


def check_source(source: Path, home: Path) -> None:
    """Raise MountError, one line with the remedy, if this source cannot be guarded."""
    _check_directory(source, "source")
    _check_unguarded(source, "source")
    if is_within(home, source):
        raise MountError(
            f"the state directory {home} lies inside the source, where it could be changed; "
            "set BONOBOFS_HOME to a directory outside"
        )
    _check_record(home, source, "source")
    _check_database(home, source, "source")
    try:
        folds = folds_case(source)
    except OSError as error:
        raise MountError(f"the source {source} cannot be read: {error.strerror}") from error
    if folds:
        raise MountError(
            f"{source} ignores case in names, so rules about names cannot be enforced there; "
            "move the source to a directory that is case-sensitive"
        )


def folds_case(directory: Path) -> bool:
    """Return True if names ignore case: by the directory's flag (ext4, f2fs), else by existing names. OSError."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flags = array.array("L", [0])
        try:
            fcntl.ioctl(handle, _FS_IOC_GETFLAGS, flags)
        except OSError as error:
            if error.errno not in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EPERM):
                raise
        if flags[0] & _FS_CASEFOLD_FL:
            return True
        with os.scandir(handle) as entries:
            names = [entry.name for entry in islice(entries, _NAMES_TO_PROBE)]
        return any(_has_twin(handle, name) for name in names)
    finally:
        os.close(handle)


def _has_twin(directory: int, name: str) -> bool:
    """Return True if the case-swapped name opens the same file and is not an entry of its own."""
    twin = name.swapcase()
    if twin == name:
        return False
    try:
        here = os.stat(name, dir_fd=directory, follow_symlinks=False)
        there = os.stat(twin, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    # Two hard links `a` and `A` are the same file too, but the listing has both.
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino) and twin not in os.listdir(directory)


def _check_directory(path: Path, name: str) -> None:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            raise MountError(f"the {name} {path} is a dead mount; unmount it first: fusermount3 -u {path}") from error
        remedy = f"; create it: mkdir -p {path}" if error.errno == errno.ENOENT and name == "mountpoint" else ""
        raise MountError(f"the {name} {path} cannot be used: {error.strerror}{remedy}") from error
    if not stat.S_ISDIR(mode):
        raise MountError(f"the {name} {path} is not a directory; name one")


def _check_state(home: Path, mountpoint: Path) -> None:
    if is_within(home, mountpoint):
        raise MountError(
            f"the state directory {home} lies inside the mountpoint, which would hang; "
            "set BONOBOFS_HOME to a directory outside"
        )
    _check_record(home, mountpoint, "mountpoint")
    _check_database(home, mountpoint, "mountpoint")


def _check_record(home: Path, path: Path, name: str) -> None:
    for entry, content in (("sessions", "the record"), ("trails", "the record"), ("policies", "the policies")):
        if is_within(path, home / entry):
            raise MountError(
                f"the {name} {path} lies inside {home / entry}, which holds {content}; use another directory"
            )


def _check_unguarded(path: Path, name: str) -> None:
    around = mounts.mount_around(path)
    if around is not None:
        raise MountError(
            f"the {name} lies in a mount of bonobofs, {around.mountpoint}; use a directory that is not guarded"
        )


def _check_program(mountpoint: Path) -> None:
    package = Path(__file__).resolve().parent.parent
    prefixes = (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.executable, os.__file__, str(package))
    for path in (*prefixes, *sorted(processes.mapped_files(os.getpid()))):
        if is_within(Path(os.path.realpath(path)), mountpoint):
            raise MountError(
                f"bonobofs itself runs from {path}, inside the mountpoint, which would hang; "
                "install it elsewhere, for instance with pipx"
            )


def has_nameless_files(directory: Path) -> bool:
    """Return True if the directory's file system supports O_TMPFILE, or if that cannot be determined."""
    try:
        os.close(os.open(directory, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600))
    except OSError as error:
        return error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
    return True
