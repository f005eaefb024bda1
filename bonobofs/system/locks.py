"""Advisory locks on files (flock(2)): the kernel releases a lock when its holder closes the file or ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

_SHORTEST: Final = 0.002
_LONGEST: Final = 0.05
"""Seconds between two tries."""


def try_once() -> bool:
    """Pass as `retry`: try once."""
    return False


def lock(fd: int, *, shared: bool = False, retry: Callable[[], bool] | None = None) -> None:
    """Lock an open file. Without `retry` the kernel waits until the lock is free.

    `retry` is called after each failed try; False ends the tries.

    Raises BlockingIOError if another process holds the lock when the tries end.
    """
    mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if retry is None:
        fcntl.flock(fd, mode)
        return
    pause = _SHORTEST
    while True:
        try:
            fcntl.flock(fd, mode | fcntl.LOCK_NB)
        except BlockingIOError:
            if not retry():
                raise
        else:
            return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)


@contextlib.contextmanager
def locked(path: Path | str, *, shared: bool = False, retry: Callable[[], bool] | None = None) -> Iterator[int]:
    """Hold the lock of a file for a `with` block. Gives the file's descriptor. The file is created (0600) if missing.

    Raises BlockingIOError as `lock` does, and OSError if the file cannot be opened.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        lock(fd, shared=shared, retry=retry)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked_if_free(path: Path | str, *, retry: Callable[[], bool] | None) -> Iterator[bool]:
    """As `locked`, and give True. Give False, without the lock, if another process holds it when the tries end."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(path, retry=retry))
        except BlockingIOError:
            yield False
        else:
            yield True
