"""Replace whole files atomically: readers, and sessions after a crash, see the old content or the new content.

New content is written to an unnamed file (O_TMPFILE) and synced before the file gets a name. A new name is created by
one link(2), which fails if the name exists. An existing file is replaced by rename(2). The rename needs a source name:
a hidden one of 32 random digits, which the audit log records first. If the process is killed between link and rename,
the next session removes that name. On a file system without O_TMPFILE (NFS, FUSE), the content is written to the
hidden name directly.

Other hard links of the old file keep the old content.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Final

from bonobofs.files.workspace import MAKER, Place
from bonobofs.policy.decision import Permit

MODE: Final = 0o644
"""Of new files, less the umask."""

_ACL: Final = "system.posix_acl_access"
_OF_THE_CONTENT: Final = frozenset({"security.capability", "security.ima", "security.evm"})
"""Attributes that are granted to a content or seal it; the kernel takes them away too when a file is written."""
_NAMELESS_UNKNOWN: Final = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


def put(
    place: Place, data: bytes, temporary: str, *, overwrite: bool, ready: Callable[[], None], permit: Permit
) -> None:
    """Give the name to a new file that holds `data`, and bring both to the disk.

    `ready` is called when nothing but the name is left to be changed. A file that was there keeps its mode and, as far
    as this user may give them, its owner, ACL and attributes; set-id bits go, as with any write. FileExistsError: what
    is there is no regular file, or must not be overwritten. On any error what was there still is; only where bringing
    the directory to the disk failed it may be the old or the new.
    """
    if place.found is not None:
        _check_replaceable(place, place.found, overwrite=overwrite)
    descriptor = -1
    directory, name = place.directory, place.name
    try:
        with MAKER.get()() if place.found is None else nullcontext():
            descriptor, source = _fresh(directory, temporary, permit)
        _fill(descriptor, data)
        if place.found is not None:
            _dress(descriptor, place)
        os.fsync(descriptor)
        ready()
        place.check()
        if not overwrite:
            os.link(source, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=True)
        else:
            if source != temporary:
                os.link(source, temporary, dst_dir_fd=directory, follow_symlinks=True)
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    finally:
        try:
            _take_away(directory, temporary)
        except BaseException:
            _take_away(directory, temporary)  # an interrupt came just here
            raise
        finally:
            if descriptor >= 0:
                os.close(descriptor)
    os.fsync(directory)


def _take_away(directory: int, temporary: str) -> None:
    """Remove the name, made or not: an interrupt may come between a call and any note that it was done."""
    with suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=directory)


def _fresh(directory: int, temporary: str, permit: Permit) -> tuple[int, str]:  # noqa: ARG001 - no change without one
    """A new file, open for writing, and the name by which it can be linked."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        descriptor = os.open(".", flags | os.O_TMPFILE, MODE, dir_fd=directory)
    except OSError as error:
        if error.errno not in _NAMELESS_UNKNOWN:
            raise
        return os.open(temporary, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, MODE, dir_fd=directory), temporary
    return descriptor, f"/proc/self/fd/{descriptor}"


def _fill(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _check_replaceable(place: Place, status: os.stat_result, *, overwrite: bool) -> None:
    if overwrite and stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), place.path)
    if not overwrite or not stat.S_ISREG(status.st_mode):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), place.path)


def _dress(descriptor: int, place: Place) -> None:
    """Make the new file like the old one."""
    old = os.open(place.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place.directory)
    try:
        status = os.fstat(old)
        _check_replaceable(place, status, overwrite=True)
        through = f"/proc/self/fd/{old}"
        # A rename asks the directory alone; whoever may not write the file must not replace it either.
        if not os.access(through, os.W_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), place.path)
        _keep_owner(descriptor, status)
        _keep_attributes(descriptor, through)
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~(stat.S_ISUID | stat.S_ISGID))
    finally:
        os.close(old)


def _keep_owner(descriptor: int, status: os.stat_result) -> None:
    try:
        os.fchown(descriptor, status.st_uid, status.st_gid)
    except OSError:
        with suppress(OSError):
            os.fchown(descriptor, -1, status.st_gid)


def _keep_attributes(descriptor: int, old: str) -> None:
    try:
        names, inherited = os.listxattr(old), os.listxattr(descriptor)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return
        raise
    # The mode of a file with an ACL is its mask: without the ACL it would grant the group what the mask grants.
    if _ACL in names:
        os.setxattr(descriptor, _ACL, os.getxattr(old, _ACL))
    elif _ACL in inherited:
        os.removexattr(descriptor, _ACL)
    for name in names:
        if name != _ACL and name not in _OF_THE_CONTENT:
            with suppress(OSError):
                os.setxattr(descriptor, name, os.getxattr(old, name))
