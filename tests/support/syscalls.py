"""System calls that the standard library lacks, and short words for what cases do often.

Every regular file of the suite is called *.md, so that the same cases run where the policy admits only that.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from tests.posix.harness import User

ANNA: Final = User(12345, 12345)
BERT: Final = User(23456, 23456)
CLUB: Final = 34567
"""A group that is no user's primary group."""
MEMBER: Final = User(12345, 12345, (CLUB,))

RENAME_NOREPLACE: Final = 1
RENAME_EXCHANGE: Final = 2

FALLOC_KEEP_SIZE: Final = 1
FALLOC_PUNCH_HOLE: Final = 2
FALLOC_COLLAPSE_RANGE: Final = 8
FALLOC_ZERO_RANGE: Final = 16
FALLOC_INSERT_RANGE: Final = 32

UTIME_NOW: Final = (1 << 30) - 1
UTIME_OMIT: Final = (1 << 30) - 2

AT_SYMLINK_FOLLOW: Final = 0x400

_AT_FDCWD: Final = -100
_CLOCK_REALTIME_COARSE: Final = 5

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_libc.opendir.restype = ctypes.c_void_p
_libc.readdir.argtypes = _libc.closedir.argtypes = _libc.rewinddir.argtypes = [ctypes.c_void_p]
_libc.readdir.restype = ctypes.c_void_p
_libc.telldir.argtypes = [ctypes.c_void_p]
_libc.telldir.restype = ctypes.c_long
_libc.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]


def _checked(result: int) -> int:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def renameat2(old: Path | str, new: Path | str, flags: int) -> None:
    """renameat2(2) with flags."""
    _checked(_libc.renameat2(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags))


def linkat(old: str, new: str, flags: int) -> None:
    """linkat(2); os.link forgets AT_SYMLINK_FOLLOW."""
    _checked(_libc.linkat(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags))


def link_open(fd: int, new: str) -> None:
    """Give a file that is open another name."""
    linkat(f"/proc/self/fd/{fd}", new, AT_SYMLINK_FOLLOW)


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2), which os.posix_fallocate offers without its mode."""
    _checked(_libc.fallocate(fd, mode, offset, length))


def utimensat(path: Path, access: tuple[int, int], change: tuple[int, int]) -> None:
    """utimensat(2) with (seconds, nanoseconds), where nanoseconds may be UTIME_NOW or UTIME_OMIT."""
    times = struct.pack("qqqq", *access, *change)
    _checked(_libc.utimensat(_AT_FDCWD, os.fsencode(path), times, 0))


class Entry(NamedTuple):
    """One directory entry as readdir(3) gives it."""

    name: str
    inode: int
    kind: int


def entries(fd: int, room: int) -> list[str]:
    """Names in a directory, read with getdents64(2) into a buffer of `room` bytes again and again."""
    buffer, found = ctypes.create_string_buffer(room), []
    while length := _checked(_libc.getdents64(fd, buffer, ctypes.c_size_t(room))):
        at = 0
        while at < length:
            size = struct.unpack_from("QqH", buffer, at)[2]
            found.append(os.fsdecode(buffer.raw[at + 19 : at + size].split(b"\0", 1)[0]))
            at += size
    return sorted(found)


class Stream:
    """A directory stream with readdir, telldir, seekdir and rewinddir."""

    def __init__(self, path: Path) -> None:
        self._handle = _libc.opendir(os.fsencode(path))
        if not self._handle:
            _checked(-1)

    def read(self) -> Entry | None:
        """The next entry, `.` and `..` included, or None at the end."""
        ctypes.set_errno(0)
        address = _libc.readdir(self._handle)
        if not address:
            if ctypes.get_errno():
                _checked(-1)
            return None
        inode, _, _, kind = struct.unpack("QqHB", ctypes.string_at(address, 19))
        return Entry(os.fsdecode(ctypes.string_at(address + 19)), inode, kind)

    def __iter__(self) -> Iterator[Entry]:
        while (entry := self.read()) is not None:
            if entry.name not in (".", ".."):
                yield entry

    def tell(self) -> int:
        return int(_libc.telldir(self._handle))

    def seek(self, position: int) -> None:
        _libc.seekdir(self._handle, position)

    def rewind(self) -> None:
        _libc.rewinddir(self._handle)

    def close(self) -> None:
        _libc.closedir(self._handle)


@contextmanager
def opened(path: Path | str | bytes, flags: int = os.O_RDWR, mode: int = 0o644) -> Iterator[int]:
    """A descriptor that is closed at the end."""
    fd = os.open(path, flags, mode)
    try:
        yield fd
    finally:
        os.close(fd)


def make(path: Path | str | bytes, content: bytes = b"", mode: int = 0o644) -> None:
    """Make a new file."""
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode) as fd:
        if content:
            os.write(fd, content)


def opening(path: Path | str | bytes, flags: int = os.O_RDONLY, mode: int = 0o644) -> None:
    """Open and close."""
    with opened(path, flags, mode):
        pass


def read(path: Path | str | bytes) -> bytes:
    """All that a file holds."""
    with open(path, "rb", buffering=0) as stream:
        return stream.readall()


def reread(fd: int, length: int, offset: int) -> bytes:
    """pread(2) of what the kernel had to fetch again, and not of its cache."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return os.pread(fd, length, offset)


def write(path: Path | str | bytes, content: bytes) -> int:
    """Write at the start of a file that exists; bytes written."""
    with opened(path, os.O_WRONLY) as fd:
        return os.write(fd, content)


def append(path: Path | str | bytes, content: bytes) -> int:
    """Write at the end of a file that exists; bytes written."""
    with opened(path, os.O_WRONLY | os.O_APPEND) as fd:
        return os.write(fd, content)


def names(path: Path | int) -> list[str]:
    """What a directory lists, sorted."""
    return sorted(os.listdir(path))


def mode(path: Path | str | int) -> str:
    """Permission bits with set-id and sticky, in octal."""
    return f"{stat.S_IMODE(os.stat(path, follow_symlinks=isinstance(path, int)).st_mode):04o}"


def kind(path: Path | str | bytes) -> str:
    """First letter of `ls -l`: d, l, p, s, c, b or - for a file."""
    return stat.filemode(os.lstat(path).st_mode)[0]


def links(path: Path | str | int) -> int:
    """Link count."""
    return os.stat(path, follow_symlinks=isinstance(path, int)).st_nlink


def size(path: Path | str | int) -> int:
    """Size in bytes."""
    return os.stat(path, follow_symlinks=isinstance(path, int)).st_size


def inode(path: Path | str | int) -> int:
    """Inode number."""
    return os.stat(path, follow_symlinks=isinstance(path, int)).st_ino


def owner(path: Path | str | int) -> tuple[int, int]:
    """User and group."""
    s = os.stat(path, follow_symlinks=isinstance(path, int))
    return s.st_uid, s.st_gid


def times(path: Path | str | int) -> tuple[int, int]:
    """Times of modification and of change, in nanoseconds."""
    s = os.stat(path, follow_symlinks=isinstance(path, int))
    return s.st_mtime_ns, s.st_ctime_ns


def changed_since(path: Path | str | int, before: int) -> bool:
    """Whether the change is stamped later than `before`."""
    return times(path)[1] > before


def tick() -> None:
    """Wait until the clock that stamps files has moved on (at most some milliseconds)."""
    before = time.clock_gettime_ns(_CLOCK_REALTIME_COARSE)
    while time.clock_gettime_ns(_CLOCK_REALTIME_COARSE) == before:
        os.sched_yield()
