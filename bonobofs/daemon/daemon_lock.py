"""That there is one daemon for each state directory: a lock that the kernel lets go when the process is gone.

The process that serves takes it itself; a lock that was handed over from a parent would be two processes' for a moment.
The PID file tells people and `--stop` which process it is. It decides nothing, and the same
stands in the locked file, so that it may be missing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.errors import StateError
from bonobofs.system.processes import is_alive, start_time

_LOCK: Final = "serve.lock"
_PID_FILE: Final = "serve.pid"


class Daemon(NamedTuple):
    """A daemon that runs."""

    pid: int
    starttime: int
    """Clock ticks since the boot, as numbers are used again."""


@contextlib.contextmanager
def alone(home: Path) -> Iterator[Callable[[], bool]]:
    """Be the daemon of this state directory; StateError where there is one already.

    What is given tells whether it still is: a state directory that was removed and made anew is another's to serve.
    """
    handle = os.open(home / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = running(home)
            which = f", pid {other.pid}" if other is not None else ""
            raise StateError(f"bonobofs serves {home} already{which}; end that first: bonobofs serve --stop") from None
        this = f"{os.getpid()} {start_time(os.getpid())}\n"
        os.ftruncate(handle, 0)
        os.pwrite(handle, this.encode(), 0)
        path = home / _PID_FILE
        path.write_text(this, encoding="ascii")
        try:
            yield lambda: _is_there(home / _LOCK, handle)
        finally:
            if _is_there(home / _LOCK, handle):
                path.unlink(missing_ok=True)
            os.ftruncate(handle, 0)
    finally:
        os.close(handle)


def running(home: Path) -> Daemon | None:
    """The daemon of this state directory; None where there is none."""
    for name in (_PID_FILE, _LOCK):
        try:
            pid, starttime = map(int, (home / name).read_text(encoding="ascii").split())
        except (FileNotFoundError, ValueError):
            continue
        if is_alive(pid, starttime):
            return Daemon(pid, starttime)
    return None


def _is_there(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except OSError:
        return False
