"""A lock for appends to a file, among the servers of one source.

The kernel splits an append at the end of a page that it has only in part, and sends two WRITE requests. Between them, a
server of another mount of the same source could append its own line, and tear this one. Therefore a server takes the
lock with the first half and keeps it until the second half is written, or for 50 ms. A loaded machine may run the
program that late.

The locks are slots in one file of the state directory that all servers map. A slot has the time at which the lock
expires, in nanoseconds of CLOCK_MONOTONIC, and the inode number of the file. The lock of a killed server expires.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic_ns
from typing import Final

_SLOTS: Final = 512
_LONGEST: Final = 50_000_000
"""Nanoseconds after which a lock expires."""
_GRACE: Final = 10_000
"""Nanoseconds that a server waits after it took a slot: another server may have seen the slot free just before."""
_SHARE: Final = 20
"""A server waits for at most _LONGEST at once, and for one part in _SHARE of its time: an agent could take the lock
again and again."""
_SPIN: Final = 200_000
"""Nanoseconds after which a waiting server sleeps."""
_SLEEP: Final = 0.0002
"""Seconds."""
PAGE: Final = mmap.PAGESIZE


def may_be_partial(offset: int, size: int) -> bool:
    """Whether this append may be the first half of one that the kernel has split."""
    return (offset + size) % PAGE == 0 and offset % PAGE != 0


class AppendLock:
    """The append lock of one server. Used by one thread."""

    def __init__(self, home: Path) -> None:
        """Map the file of the locks. OSError if that fails."""
        size = _SLOTS * 16
        fd = os.open(home / "append-locks", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(fd).st_size < size:
                # no hole: writing to one through the mapping would kill this process on a full disk
                os.pwrite(fd, bytes(size), 0)
            words = memoryview(mmap.mmap(fd, size)).cast("Q")
        finally:
            os.close(fd)
        self._expiries: Final = words[:_SLOTS]
        self._inodes: Final = words[_SLOTS:]
        self._own: Final[dict[int, int]] = {}
        """By slot, the expiry of the lock that this server has taken."""
        self._left = _LONGEST
        """Nanoseconds that this server may still wait, at the time `_counted_at`."""
        self._counted_at = monotonic_ns()

    @contextmanager
    def hold(self, ino: int, *, half: bool) -> Iterator[None]:
        """Wait for the lock before an append. `half`: keep it after the append, because this may be a first half."""
        if half:
            self._take(ino)
        else:
            self._wait(ino)
        try:
            yield
        except BaseException:
            self._release(ino % _SLOTS)
            raise
        if not half:
            self._release(ino % _SLOTS)

    def _release(self, slot: int) -> None:
        own = self._own.pop(slot, None)
        if own is not None and self._expiries[slot] == own:
            self._expiries[slot] = 0

    def _wait(self, ino: int) -> None:
        """Wait until no other server is between two halves of an append to the file."""
        slot = ino % _SLOTS
        if not self._is_taken(slot, ino):
            return
        began = now = monotonic_ns()
        left = min(_LONGEST, self._left + (began - self._counted_at) // _SHARE)
        while now < min(self._expiries[slot], began + left) and self._is_taken(slot, ino):
            if now - began < _SPIN:
                os.sched_yield()
            else:
                time.sleep(_SLEEP)
            now = monotonic_ns()
        self._left, self._counted_at = max(0, left - (now - began)), now

    def _is_taken(self, slot: int, ino: int) -> bool:
        """Whether another server has taken the lock; it may have expired."""
        expiry = self._expiries[slot]
        return expiry > 0 and self._inodes[slot] == ino and expiry != self._own.get(slot)

    def _take(self, ino: int) -> None:
        slot = ino % _SLOTS
        while True:
            self._wait(ino)
            self._inodes[slot] = ino
            own = self._own[slot] = self._expiries[slot] = monotonic_ns() + _LONGEST
            while monotonic_ns() < own - _LONGEST + _GRACE:
                pass
            if self._expiries[slot] == own:
                return
