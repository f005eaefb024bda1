"""Replace whole files atomically: readers, and sessions after a crash, see the old content or the new content.

New content is written to an unnamed file (O_TMPFILE) and synced before the file gets a name. Without `overwrite`, one
link(2) creates the name, and fails if the name exists. With `overwrite`, rename(2) creates or replaces it. The rename
needs a source name: a hidden one of 32 random digits, which the audit log records first. If the process is killed
between link and rename, the next session removes that name. On a file system without O_TMPFILE (NFS, FUSE), the
content is written to the hidden name directly.

Other hard links of the old file keep the old content.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import nullcontext, suppress
from typing import Final

from bonobofs.files.workspace import MAKER, Location
from bonobofs.policy.decision import Permit

MODE: Final = 0o644
"""Mode of new files, before the umask applies."""

_ACL: Final = "system.posix_acl_access"
_OF_THE_CONTENT: Final = frozenset({"security.capability", "security.ima", "security.evm"})
"""Attributes that belong to the old content. They are not copied, as the kernel drops them when a file is written."""
_NAMELESS_UNKNOWN: Final = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)


def put(location: Location, data: bytes, temporary: str, *, overwrite: bool, permit: Permit) -> None:
    """Create or replace the file of `location` with `data`, and sync the file. The caller syncs its directory.

    A replaced file keeps its mode and ACL and, as far as this user may set them, its owner and attributes. Set-id bits
    are cleared, as by any write. Raises FileExistsError if the name exists and `overwrite` is false or it is no regular
    file, IsADirectoryError, OSError. After an error the old file is in place.
    """
    if location.status is not None:
        _check_replaceable(location, location.status, overwrite=overwrite)
    descriptor = -1
    directory, name = location.directory, location.name
    try:
        with MAKER.get()() if location.status is None else nullcontext():
            descriptor, source = _create(directory, temporary, permit)
        _fill(descriptor, data)
        if location.status is not None:
            _copy_metadata(descriptor, location)
        os.fsync(descriptor)
        location.check()
        if not overwrite:
            os.link(source, name, src_dir_fd=directory, dst_dir_fd=directory, follow_symlinks=True)
        else:
            if source != temporary:
                os.link(source, temporary, dst_dir_fd=directory, follow_symlinks=True)
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
    finally:
        try:
            _remove(directory, temporary)
        except BaseException:
            _remove(directory, temporary)  # an interrupt can stop the first removal
            raise
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def _remove(directory: int, temporary: str) -> None:
    """Remove the name if it exists. An interrupt can prevent the caller from knowing whether it was created."""
    with suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=directory)


def _create(directory: int, temporary: str, permit: Permit) -> tuple[int, str]:  # noqa: ARG001 - a change requires one
    """Create a file. Return its descriptor, open for writing, and the path to link it from."""
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


def _check_replaceable(location: Location, status: os.stat_result, *, overwrite: bool) -> None:
    if overwrite and stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), location.path)
    if not overwrite or not stat.S_ISREG(status.st_mode):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), location.path)


def _copy_metadata(descriptor: int, location: Location) -> None:
    """Copy owner, attributes and mode of the old file to the new file."""
    old = os.open(location.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=location.directory)
    try:
        status = os.fstat(old)
        _check_replaceable(location, status, overwrite=True)
        through = f"/proc/self/fd/{old}"
        # rename(2) checks the directory only. A user without write permission on the file must not replace it.
        if not os.access(through, os.W_OK, effective_ids=True):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), location.path)
        _copy_owner(descriptor, status)
        _copy_attributes(descriptor, through)
        os.fchmod(descriptor, stat.S_IMODE(status.st_mode) & ~(stat.S_ISUID | stat.S_ISGID))
    finally:
        os.close(old)


def _copy_owner(descriptor: int, status: os.stat_result) -> None:
    try:
        os.fchown(descriptor, status.st_uid, status.st_gid)
    except OSError:
        with suppress(OSError):
            os.fchown(descriptor, -1, status.st_gid)


def _copy_attributes(descriptor: int, old: str) -> None:
    try:
        names, inherited = os.listxattr(old), os.listxattr(descriptor)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return
        raise
    # With an ACL, the group bits of the mode are its mask. Without the ACL, they would grant the mask to the group.
    if _ACL in names:
        os.setxattr(descriptor, _ACL, os.getxattr(old, _ACL))
    elif _ACL in inherited:
        os.removexattr(descriptor, _ACL)
    for name in names:
        if name != _ACL and name not in _OF_THE_CONTENT:
            with suppress(OSError):
                os.setxattr(descriptor, name, os.getxattr(old, name))
