"""One call of bd at a time for each `.beads`: a lock in the state directory, across threads and processes.

bd has a lock of its own, but waits for it without end, and lets others in between two calls that belong together. Ours
is handed on to each bd that runs under it: when its caller is killed, nobody else comes in before that bd has ended.
When it does not end in its time either, whoever waits ends it.
"""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from bonobofs.errors import BeadsError
from bonobofs.system import processes
from bonobofs.system.locks import lock, never

_LINE: Final = 128


class Lock:
    """A lock that is held."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self.descriptor: Final = descriptor
        """For reading alone: what bd is given of it tells nobody whom to end."""
        self._path: Final = path

    def note(self, pid: int, seconds: float) -> None:
        """Write down, for whoever waits, that this bd runs under the lock, and how long it may."""
        numbers = (os.getpid(), processes.start_time(os.getpid()), pid, processes.start_time(pid), _now() + seconds)
        notes = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.pwrite(notes, " ".join(map(str, numbers)).ljust(_LINE).encode("ascii"), 0)
        finally:
            os.close(notes)


def lock_path(home: Path, beads: Path) -> Path:
    """The file of the lock; its directory is made. It is written when a bd is started, and touched when it is let go.

    OSError: there is no such `.beads`, or the directory cannot be made.
    """
    status = beads.stat()
    directory = home / "beads" / "locks"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory / f"{status.st_dev:x}-{status.st_ino:x}"


@contextmanager
def held(home: Path, beads: Path, seconds: float) -> Iterator[Lock]:
    """Hold the lock of this `.beads`. BeadsError: others have held it for all of these seconds, or there is none."""
    try:
        path = lock_path(home, beads)
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise BeadsError(f"the lock of {beads} cannot be had: {error.strerror}") from error
    try:
        _wait(descriptor, beads, seconds)
        try:
            yield Lock(descriptor, path)
        finally:
            os.utime(descriptor)
            # Said outright, and not left to the closing: what bd may have started must not keep it.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock of this file. OSError: there is none."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        lock(descriptor, shared=True, retry=never)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _wait(descriptor: int, beads: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds

    def retry() -> bool:
        _end_orphan(descriptor)
        return time.monotonic() < deadline

    try:
        lock(descriptor, retry=retry)
    except BlockingIOError:
        raise BeadsError(f"{beads} has been in use by other calls for {seconds:.0f} seconds; try again") from None


def _end_orphan(descriptor: int) -> None:
    """End a bd whose caller is gone and whose time is over."""
    words = os.pread(descriptor, _LINE, 0).decode("ascii", "replace").split()
    try:
        caller, called, pid, started = map(int, words[:4])
        until = float(words[4])
    except (ValueError, IndexError):
        return
    if _now() < until or processes.is_alive(caller, called) or processes.start_time(pid) != started:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
