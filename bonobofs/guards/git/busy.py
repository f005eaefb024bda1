"""One operation of the service at a time on a repository, and when the last one was.

The locks that it takes change `.git`, and have no intent. An operation holds flock on the directory that worktrees
share, and touches a mark in the state directory at its end.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from bonobofs.errors import GitError

_ALONE_WAIT: Final = 60.0
"""Seconds to wait for other operations of the service."""
_PAUSE: Final = 0.01


@contextmanager
def alone(home: Path, common: Path) -> Iterator[None]:
    """Be the only operation on this repository. GitError: others take too long."""
    descriptor = os.open(common, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def taken() -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    try:
        if not waited(taken, _ALONE_WAIT):
            raise GitError("another operation on this repository takes too long", kind="busy")
        try:
            yield
        finally:
            # Without it, what the operation locked may be entered as changed behind the mount.
            with suppress(OSError):
                _leave(home, descriptor)
    finally:
        os.close(descriptor)


def waited(done: Callable[[], bool], seconds: float) -> bool:
    """Whether it was done within so many seconds."""
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE)
    return True


def mark(home: Path, common: int) -> Path:
    """The mark of the repository that this descriptor leads to; its directory is made. OSError."""
    status = os.fstat(common)
    directory = home / "git" / "marks"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory / f"{status.st_dev:x}-{status.st_ino:x}"


def _leave(home: Path, common: int) -> None:
    """The operation that holds this repository is over. OSError."""
    os.close(os.open(path := mark(home, common), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    os.utime(path)


def was_at_work(home: Path, git: Path, since: float) -> bool:
    """Whether an operation on this `.git` goes on, or has ended since that moment. OSError: it is no directory."""
    common = os.open(git, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(common, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        try:
            return mark(home, common).stat().st_mtime >= since
        except FileNotFoundError:
            return False
    finally:
        os.close(common)
