"""A plain loopback over mfusepy: each call goes to the source by path, without policy and log.

Run by the interpreter of the peers' environment: loopback.py SOURCE MOUNTPOINT (it stays in the foreground).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from mfusepy import FUSE, Operations  # type: ignore[import-untyped,import-not-found,unused-ignore]

ATTRIBUTES = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks", "st_rdev")
CAPACITY = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail", "f_namemax")
TUNED = {
    "attr_timeout": 3600,
    "entry_timeout": 3600,
    "negative_timeout": 3600,
    "kernel_cache": True,
    "noatime": True,
    "nothreads": True,
    "use_ino": True,
}
"""Settings under which this loopback is fastest on the rows of the table; one thread, because of the interpreter."""


class Loopback(Operations):  # type: ignore[misc]  # mfusepy carries no types
    """Paths arrive with a leading slash and are joined to SOURCE."""

    use_ns = True

    def __init__(self, source: str) -> None:
        self._source = source

    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        found = os.lstat(self._source + path) if fh is None else os.fstat(fh)
        attributes = {name: getattr(found, name) for name in ATTRIBUTES}
        return attributes | {
            "st_atime": found.st_atime_ns,
            "st_mtime": found.st_mtime_ns,
            "st_ctime": found.st_ctime_ns,
        }

    def statfs(self, path: str) -> dict[str, int]:
        capacity = os.statvfs(self._source + path)
        return {name: getattr(capacity, name) for name in CAPACITY}

    def readdir(self, path: str, fh: int) -> Iterable[tuple[str, dict[str, int], int]]:
        yield ".", {"st_mode": 0o040755}, 0
        yield "..", {"st_mode": 0o040755}, 0
        with os.scandir(self._source + path) as entries:
            for entry in entries:
                kind = 0o120000 if entry.is_symlink() else 0o040000 if entry.is_dir() else 0o100000
                yield entry.name, {"st_mode": kind, "st_ino": entry.inode()}, 0

    def readlink(self, path: str) -> str:
        return os.readlink(self._source + path)

    def open(self, path: str, flags: int) -> int:
        return os.open(self._source + path, flags)

    def create(self, path: str, mode: int, flags: int) -> int:
        return os.open(self._source + path, flags | os.O_CREAT, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._source + path if fh is None else fh, length)

    def release(self, path: str, fh: int) -> None:
        os.close(fh)

    def fsync(self, path: str, datasync: int, fh: int) -> None:
        os.fdatasync(fh) if datasync else os.fsync(fh)

    def mkdir(self, path: str, mode: int) -> None:
        os.mkdir(self._source + path, mode)

    def rmdir(self, path: str) -> None:
        os.rmdir(self._source + path)

    def unlink(self, path: str) -> None:
        os.unlink(self._source + path)

    def rename(self, old: str, new: str) -> None:
        os.rename(self._source + old, self._source + new)

    def symlink(self, target: str, source: str) -> None:
        os.symlink(source, self._source + target)

    def link(self, target: str, source: str) -> None:
        os.link(self._source + source, self._source + target)

    def chmod(self, path: str, mode: int) -> None:
        os.chmod(self._source + path, mode)

    def chown(self, path: str, uid: int, gid: int) -> None:
        os.lchown(self._source + path, uid, gid)

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> None:
        if times is None:
            os.utime(self._source + path, follow_symlinks=False)
        else:
            os.utime(self._source + path, ns=times, follow_symlinks=False)


if __name__ == "__main__":
    source, mountpoint = sys.argv[1:]
    FUSE(Loopback(source), mountpoint, foreground=True, fsname=source, **TUNED)
