"""Hash the pre-images of a store, and let equal contents lie once (`undo.images`).

A kill between any two system calls loses no image. The next call of `hash_images` with `again` completes the work.
Each content is on the disk before its file is renamed, because the server does not sync a renamed copy.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
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

Rest = Callable[[], None]


def hash_images(
    directory: Path, names: Collection[str], in_use: Collection[int], rest: Rest, *, again: bool = False
) -> None:
    """Hash images of a session's directory, and share their contents. OSError, such as a full disk.

    `names`: its files. No process writes to them, except to the images with a number `in_use`. `rest` is called after
    each MiB. `again`: include hashed images whose content is not shared, because an earlier call was killed.
    """
    files = [file for name in names if (file := ImageFile.parse(name)) is not None]
    for file in files:
        if file.number not in in_use and (again or not file.hash):
            _hash_image(directory, file, rest)
    known = {file.number for file in files}
    for name in names:
        if name.startswith(PACK):
            with suppress(FileNotFoundError):  # another companion was faster
                _unpack(directory, name, known, rest)


def _hash_image(directory: Path, file: ImageFile, rest: Rest) -> None:
    path = directory / file.name
    with suppress(FileNotFoundError, PermissionError):  # it has expired, or the user may not read it
        if path.stat(follow_symlinks=False).st_nlink != 1:
            return  # its change was not made, or its content is shared
        with io.FileIO(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)) as content:
            before = os.fstat(content.fileno())
            os.fdatasync(content.fileno())
            digest = _hash(content, rest)
            os.posix_fadvise(content.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            after = os.fstat(content.fileno())
        if (before.st_mtime_ns, before.st_ctime_ns) != (after.st_mtime_ns, after.st_ctime_ns):
            return  # a program that opened it in the source still writes to it
        if file.hash not in ("", digest):
            return  # it is damaged
        hashed = ImageFile(file.number, file.kept_at or int(before.st_ctime), digest)
        with locked(directory.parent / f"{OBJECTS}.lock"):
            path.rename(directory / hashed.name)
            _share(directory, hashed)
    rest()


def _share(directory: Path, file: ImageFile) -> None:
    """Make an image and the object with its content one file. OSError."""
    path, shared = directory / file.name, object_path(directory.parent, file.hash)
    temporary = path.with_suffix(".link")
    shared.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with suppress(FileExistsError):
            os.link(path, shared)
        if shared.samefile(path) or not _have_equal_xattrs(path, shared):
            return
        temporary.unlink(missing_ok=True)
        with io.FileIO(shared) as content:
            is_intact = _hash(content) == file.hash
        ends = (shared, path) if is_intact else (path, shared)
        os.link(ends[0], temporary)
        os.rename(temporary, ends[1])
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise


def _have_equal_xattrs(*paths: Path) -> bool:
    first, second = (xattrs_of(os.fsencode(path), _LONGEST_XATTR) for path in paths)
    return first == second


def _unpack(directory: Path, pack: str, known: Collection[int], rest: Rest) -> None:
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
                _hash_image(directory, ImageFile(copy.number, int(st.st_ctime)), rest)
        os.fsync(fd)
        os.unlink(pack, dir_fd=fd)
    finally:
        os.close(fd)


def _write(directory: int, name: str, data: bytes) -> None:
    """Create a file; its name appears when it is complete. OSError."""
    with io.FileIO(os.open(".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600, dir_fd=directory), "w") as file:
        if file.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.link(f"/proc/self/fd/{file.fileno()}", name, dst_dir_fd=directory, follow_symlinks=True)


def _hash(content: io.FileIO, rest: Rest = lambda: None) -> str:
    found = hashlib.sha256()
    while block := content.read(_BLOCK):
        found.update(block)
        rest()
    return found.hexdigest()
