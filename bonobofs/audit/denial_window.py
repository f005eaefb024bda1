"""The times of an agent's last denials, which all of its sessions share through one file of the state directory."""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime
from typing import Final

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
