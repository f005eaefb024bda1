"""A lock for appends to a file, among the servers of one source.

The kernel splits an append at the end of a page that it has only in part, and sends two WRITE requests. Between them, a
server of another mount of the same source could append its own line, and tear this one. Therefore a server takes the
lock with the first half and keeps it until the second half is written, or for 3 ms.

The locks are slots in one file of the state directory that all servers map. A slot has the time at which the lock
expires, in nanoseconds of CLOCK_MONOTONIC. The lock of a killed server expires.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from time import monotonic_ns
from typing import Final

_SLOTS: Final = 512
_LONGEST: Final = 3_000_000
"""Nanoseconds after which a lock expires."""
_GRACE: Final = 10_000
"""Nanoseconds that a server waits after it took a slot: another server may have seen the slot free just before."""


PAGE: Final = mmap.PAGESIZE


def may_be_partial(offset: int, size: int) -> bool:
    """Whether this append may be the first half of one that the kernel has split."""
    return (offset + size) % PAGE == 0 and offset % PAGE != 0


class AppendLock:
    """The append lock of one server. Used by one thread."""

    def __init__(self, home: Path) -> None:
        """Map the file of the locks. OSError if that fails."""
        fd = os.open(home / "turns", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(fd).st_size < _SLOTS * 8:
                # no hole: writing to one through the mapping would kill this process on a full disk
                os.pwrite(fd, bytes(_SLOTS * 8), 0)
            self._slots: Final = memoryview(mmap.mmap(fd, _SLOTS * 8)).cast("Q")
        finally:
            os.close(fd)
        self._own = 0
        self._slot = -1
        self._half = False

    def acquire(self, ino: int, *, half: bool) -> None:
        """Wait for the lock before an append. `half`: take it, because this append may be a first half."""
        self._half = half
        if half:
            self._take(ino % _SLOTS)
        else:
            self._wait(ino % _SLOTS)

    def release(self) -> None:
        """Release the lock after an append, unless that may be a first half."""
        if not self._half and self._slot >= 0:
            if self._slots[self._slot] == self._own:
                self._slots[self._slot] = 0
            self._slot = -1

    def _wait(self, slot: int) -> None:
        """Wait until no other server is between two halves."""
        if self._slot == slot and self._slots[slot] == self._own:
            return
        until = monotonic_ns() + _LONGEST
        while (ends := self._slots[slot]) and monotonic_ns() < min(ends, until):
            os.sched_yield()

    def _take(self, slot: int) -> None:
        while True:
            self._wait(slot)
            self._slot = slot
            own = self._own = self._slots[slot] = monotonic_ns() + _LONGEST
            while monotonic_ns() < own - _LONGEST + _GRACE:
                pass
            if self._slots[slot] == own:
                return
