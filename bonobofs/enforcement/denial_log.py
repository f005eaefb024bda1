"""A limit to the refusals that a session enters one by one.

A program can cause thousands of different refusals a second, and each entry takes some hundred bytes of the disk that
all sessions share. Beyond the limit refusals are counted by guard, operation and rule.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from math import inf
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime
from typing import Final

from bonobofs.audit.writer import Trail
from bonobofs.policy.decision import Denied

ALERT_DENIALS: Final = 3
ALERT_WINDOW: Final = 300.0
"""The third denial of one agent within this many seconds is an alert, once per as many."""
_FORM: Final = struct.Struct(f"={ALERT_DENIALS + 1}d")
"""The file: the last alert, then the last denials, the oldest first; CLOCK_BOOTTIME, 0 for none."""
_NONE: Final = (0.0,) * (ALERT_DENIALS + 1)
_TRIES: Final = 100
"""Attempts at the lock, which its holders keep for microseconds. A stopped holder must not stop a mount."""


class DenialWindow:
    """Counts the denials of one agent. Never raises: without its file it counts those of this process."""

    def __init__(self, path: Path | None = None) -> None:
        """`path`: the file of the agent, made at the first denial; None: there is none."""
        self._path: Final = path
        self._times = _NONE

    def add(self) -> bool:
        """Count a denial of this moment; True: it is due for an alert, which is counted as given."""
        if self._path is None:
            return self._count()
        try:
            file = _opened(self._path)
        except OSError:
            return self._count()
        try:
            if not _is_locked(file):
                return self._count()
            self._read(file)
            alert = self._count()
            with suppress(OSError):
                os.pwrite(file, _FORM.pack(*self._times), 0)
            return alert
        finally:
            os.close(file)

    def _read(self, file: int) -> None:
        data = os.pread(file, _FORM.size, 0)
        if len(data) == _FORM.size:
            now = clock_gettime(CLOCK_BOOTTIME)
            # A time after now is of an earlier boot.
            self._times = tuple(time if 0.0 < time <= now else 0.0 for time in _FORM.unpack(data))

    def _count(self) -> bool:
        now = clock_gettime(CLOCK_BOOTTIME)
        alerted, *denials = self._times
        denials = [*denials[1:], now]
        alert = denials[0] > 0.0 and now - denials[0] <= ALERT_WINDOW
        alert = alert and (alerted == 0.0 or now - alerted >= ALERT_WINDOW)
        self._times = (now if alert else alerted, *denials)
        return alert


def _opened(path: Path) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        return os.open(path, flags, 0o600)


def _is_locked(file: int) -> bool:
    for _ in range(_TRIES):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.sched_yield()
        else:
            return True
    return False


RATE: Final = 100
"""Refusals a second that are entered one by one."""
BURST: Final = 1000
"""Refusals that are entered at once after a quiet time."""
QUIET: Final = 1.0
"""Seconds without a counted refusal after which the counts are entered."""
LONGEST: Final = 5.0
"""Seconds after which the counts are entered although refusals go on."""
BETWEEN_ALERTS: Final = 300.0
"""Seconds."""
_MOST_DIRECTORIES: Final = 64


class _Group:
    """Refusals of one guard, operation and rule."""

    __slots__ = ("count", "denied", "directories")

    def __init__(self, denied: Denied) -> None:
        self.denied: Final = denied
        self.count = 0
        self.directories: Final[dict[str, int]] = {}
        """Refusals by the first directory of the path."""

    def add(self, path: str) -> None:
        self.count += 1
        directory = path.partition("/")[0] if "/" in path else ""
        if directory in self.directories or len(self.directories) < _MOST_DIRECTORIES:
            self.directories[directory] = self.directories.get(directory, 0) + 1

    @property
    def top(self) -> str:
        """The directory of most of the refusals."""
        return max(self.directories, key=self.directories.__getitem__)


class RefusalLimit:
    """A token bucket, and the counts of what found it empty."""

    def __init__(self, trail: Trail) -> None:
        self._trail: Final = trail
        self._tokens = float(BURST)
        self._filled = 0.0
        self._groups: Final[dict[tuple[str, ...], _Group]] = {}
        self._began = 0.0
        self._last = 0.0
        self._alerted = -inf

    def admits(self, now: float) -> bool:
        """Take a token; False: there is none, so the refusal is to be counted."""
        self._tokens = min(BURST, self._tokens + (now - self._filled) * RATE)
        self._filled = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def count(self, denied: Denied, guard: str, now: float) -> None:
        """Count a refusal."""
        if not self._groups:
            self._began = now
        self._last = now
        key = (guard, denied.operation, denied.code, denied.rule)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(denied)
        group.add(denied.path)

    def settle(self, now: float = inf) -> None:
        """Enter the counts if they are due by `now`, with an alert if the last is old. TrailError: they stay."""
        if not self._groups or (now - self._last < QUIET and now - self._began < LONGEST):
            return
        if self._last - self._alerted >= BETWEEN_ALERTS:
            count = sum(group.count for group in self._groups.values())
            top = max(self._groups.values(), key=lambda group: group.count).top
            reason = f"Refusals came faster than {RATE} a second; the rest is counted by operation and rule."
            self._trail.alert(reason, operation="refusals", path=top, details={"count": count})
            self._alerted = self._last
        while self._groups:
            key, group = next(iter(self._groups.items()))
            self._trail.counted(group.denied, group.top, group.count, guard=key[0])
            del self._groups[key]
