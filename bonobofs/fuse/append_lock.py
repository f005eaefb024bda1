"""A lock for appends to a file, among the servers of one source.

The kernel splits an append at the end of a page that it has only in part, and sends two WRITE requests. Between them, a
server of another mount of the same source could append its own line, and tear this one. Therefore a server locks the
file for each append. After a first half it keeps the lock until the second half is written, or for 100 ms: a loaded
machine may run the program that late.

The kernel keeps the locks (fcntl(2), open file description locks), on one byte of one file for each inode number. It
releases those of a killed server.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Final

_LONGEST: Final = 0.1
"""Seconds for which a server keeps the lock after a first half, and for which another one waits for it."""
_MOST_WAITS: Final = 1.0
"""Seconds for which a server may wait in a row. It regains one part in _SHARE of the time that passes, because an agent
could take the lock again and again."""
_SHARE: Final = 20
_SLEEP: Final = 0.0002
"""Seconds between two tries."""
_FLOCK: Final = struct.Struct("hhqqi4x")
_LARGEST: Final = (1 << 62) - 1
PAGE: Final = mmap.PAGESIZE


def may_be_partial(offset: int, size: int) -> bool:
    """Whether this append may be the first half of one that the kernel has split."""
    return (offset + size) % PAGE == 0 and offset % PAGE != 0


class AppendLock:
    """The append locks of one server. Used by one thread."""

    def __init__(self, home: Path) -> None:
        """Open the file of the locks. OSError if that fails."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd: Final = os.open(home / "append-locks", flags, 0o600)
        self._halves: Final[dict[int, float]] = {}
        """By inode number, until when the lock is kept after a first half."""
        self._left = _MOST_WAITS
        """Seconds that this server may still wait, at the time `_counted_at`."""
        self._counted_at = monotonic()

    @contextmanager
    def hold(self, ino: int, *, half: bool) -> Iterator[None]:
        """Hold the lock during an append. `half`: keep it afterwards, because this may be a first half."""
        if self._halves.pop(ino, None) is None:
            self._wait(ino)
        try:
            yield
        except BaseException:
            self._set(ino, fcntl.F_UNLCK)
            raise
        if half:
            self._halves[ino] = monotonic() + _LONGEST
        else:
            self._set(ino, fcntl.F_UNLCK)

    def release_expired(self) -> None:
        """Release the locks whose second half has not come."""
        now = monotonic()
        for ino in [ino for ino, expiry in self._halves.items() if expiry <= now]:
            del self._halves[ino]
            self._set(ino, fcntl.F_UNLCK)

    def _wait(self, ino: int) -> None:
        """Take the lock. If another server keeps it for too long, go on without it."""
        if self._set(ino, fcntl.F_WRLCK):
            return
        began = now = monotonic()
        left = min(_MOST_WAITS, self._left + (began - self._counted_at) / _SHARE)
        until = began + min(left, _LONGEST)
        while now < until and not self._set(ino, fcntl.F_WRLCK):
            time.sleep(_SLEEP)
            now = monotonic()
        self._left, self._counted_at = max(0.0, left - (now - began)), now

    def _set(self, ino: int, kind: int) -> bool:
        """Take or release a lock. False: another server has it, or the kernel has no memory for it."""
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, ino & _LARGEST, 1, 0))
        except OSError:
            return False
        return True
