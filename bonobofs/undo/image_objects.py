"""Hash the pre-images of a store, and let equal contents lie once (`undo.images`).

A kill between any two system calls loses no image, and the next call completes the work. Each content is on the disk
before its file is renamed, because the server does not sync a renamed copy.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import io
import os
import signal
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

from bonobofs.system.locks import locked
from bonobofs.undo.images import OBJECTS, ImageFile, object_path, packed_copies
from bonobofs.undo.preimages import PACK, free_room, xattrs_of

_BLOCK: Final = 1 << 20
_LONGEST_XATTR: Final = 1 << 16
_CANNOT_LINK: Final = (errno.EPERM, errno.EMLINK)
"""The file belongs to another user (fs.protected_hardlinks), or has too many names. Its content is not shared."""

Throttle = Callable[[], None]


def hash_images(directory: Path, names: Collection[str], in_use: Collection[int], throttle: Throttle) -> None:
    """Hash images of a session's directory, and share their contents. OSError, such as a full disk.

    `names`: its files. No process writes to them, except to the images with a number `in_use`. `throttle` is called
    after each MiB.
    """
    files = [file for name in names if (file := ImageFile.parse(name)) is not None]
    for file in files:
        if not file.hash and file.number not in in_use:
            _hash_image(directory, file, throttle)
    known = {file.number for file in files}
    for name in names:
        if name.startswith(PACK):
            with suppress(FileNotFoundError):  # another companion was faster
                _unpack(directory, name, known, throttle)


def _hash_image(directory: Path, file: ImageFile, throttle: Throttle) -> None:
    path = directory / file.name
    with suppress(FileNotFoundError, PermissionError):  # it has expired, or the user may not read it
        with io.FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as content:
            if _is_written(content.fileno()):
                return
            before = os.fstat(content.fileno())
            os.fdatasync(content.fileno())
            digest = _hash(content, throttle)
            os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            after = os.fstat(content.fileno())
        if (before.st_mtime_ns, before.st_ctime_ns) == (after.st_mtime_ns, after.st_ctime_ns):
            hashed = ImageFile(file.number, file.kept_at or int(before.st_ctime), digest)
            with locked(directory.parent / f"{OBJECTS}.lock"):
                _share(path, directory / hashed.name, object_path(directory.parent, digest), before.st_nlink)
    throttle()


def _is_written(fd: int) -> bool:
    """Return whether a process may have a file open for writing: its content is not final.

    A program outside of mounts may still write to a removed file, such as its log. The kernel then refuses a lease.
    """
    fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # ends no process, if the kernel revokes the lease at once
    try:
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError:  # EAGAIN; or the file system has no leases, or the file belongs to another user: it is unknown
        return True
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def _share(path: Path, hashed: Path, shared: Path, links: int) -> None:
    """Give an image its name with the hash, and make it one file with the object of that content. OSError.

    An image with another name than the object is the link for a change that was not made, or not yet.
    """
    is_new = not shared.exists()
    if links > 1 and (is_new or not shared.samefile(path)):
        return
    if not is_new and not _is_intact(shared):
        shared.unlink()
        is_new = True
    try:
        if is_new:
            shared.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.link(path, shared)
        elif not shared.samefile(path) and _xattrs(shared) == _xattrs(path):
            with suppress(FileExistsError):
                os.link(shared, hashed)
            path.unlink()
            return
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
    path.rename(hashed)


def _is_intact(shared: Path) -> bool:
    with io.FileIO(shared) as content:
        return _hash(content) == shared.name


def _xattrs(path: Path) -> dict[str, str]:
    return xattrs_of(os.fsencode(path), _LONGEST_XATTR)


def _unpack(directory: Path, pack: str, known: Collection[int], throttle: Throttle) -> None:
    """Replace a pack by files, and hash them. Without room for the files, the pack stays. OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        st = os.stat(pack, dir_fd=fd, follow_symlinks=False)
        if free_room(fd) < st.st_size:
            return
        for copy in packed_copies(directory, pack):
            if copy.number not in known and (data := copy.read(directory)) is not None:
                with suppress(FileExistsError):
                    _write(fd, str(copy.number), data)
                _hash_image(directory, ImageFile(copy.number, int(st.st_ctime)), throttle)
        os.fsync(fd)
        os.unlink(pack, dir_fd=fd)
    finally:
        os.close(fd)


def _write(directory: int, name: str, data: bytes) -> None:
    """Create a file; its name appears when it is complete. OSError."""
    with io.FileIO(os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=directory), "w") as file:
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fdatasync(file.fileno())  # after a power loss, a name without its content would replace the copy in the pack
        os.link(f"/proc/self/fd/{file.fileno()}", name, dst_dir_fd=directory, follow_symlinks=True)


def _hash(content: io.FileIO, throttle: Throttle = lambda: None) -> str:
    found = hashlib.sha256()
    while block := content.read(_BLOCK):
        found.update(block)
        throttle()
    return found.hexdigest()
