"""Turns at appending to a file, among the servers that show one source.

The kernel splits an append where it crosses a page of which it has only a part, and asks for the two halves one after
the other. Between them a server of another mount of the same source could append a line of its own, and tear this one.
So whoever has appended a first half has the turn until its second half is there, and for no longer than a moment.

The turns are numbers in one file of the state directory that all servers map: when the turn ends, in nanoseconds of the
machine's monotonic clock. What a killed server leaves there is soon over.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from time import monotonic_ns
from typing import Final

_SLOTS: Final = 512
_LONGEST: Final = 3_000_000
"""Nanoseconds after which a turn is over, whatever has become of it."""
_GRACE: Final = 10_000
"""Nanoseconds in which whoever has looked just before, and found nobody, appends."""


PAGE: Final = mmap.PAGESIZE


def may_be_half(offset: int, size: int) -> bool:
    """Whether an append, as the kernel asks for it, may be the first half of one that it has split."""
    return (offset + size) % PAGE == 0 and offset % PAGE != 0


class AppendLock:
    """The turns of one server. Used by one thread."""

    def __init__(self, home: Path) -> None:
        """OSError: the file cannot be had."""
        fd = os.open(home / "turns", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if os.fstat(fd).st_size < _SLOTS * 8:
                os.pwrite(fd, bytes(_SLOTS * 8), 0)  # not a hole: on a full disk a mapping of one would kill us
            self._slots: Final = memoryview(mmap.mmap(fd, _SLOTS * 8)).cast("Q")
        finally:
            os.close(fd)
        self._own = 0
        self._slot = -1
        self._half = False

    def begin(self, ino: int, *, half: bool) -> None:
        """An append to this inode is about to be made; `half`: it may be a first half, and then the turn is taken."""
        self._half = half
        if half:
            self._take(ino % _SLOTS)
        else:
            self._wait(ino % _SLOTS)

    def end(self) -> None:
        """It is made: unless it may be a first half, others may append."""
        if not self._half and self._slot >= 0:
            if self._slots[self._slot] == self._own:
                self._slots[self._slot] = 0
            self._slot = -1

    def _wait(self, slot: int) -> None:
        """Until nobody else is between two halves."""
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
