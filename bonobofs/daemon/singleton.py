"""That there is one daemon for each state directory: a lock that the kernel lets go when the process is gone.

The process that serves takes it itself; a lock that was handed over from a parent would be two processes' for a moment.
The PID file tells people and `--stop` which process it is. It decides nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bonobofs.errors import StateError
from bonobofs.state.processes import is_alive, start_time


class Daemon(NamedTuple):
    """A daemon that runs."""

    pid: int
    starttime: int
    """Clock ticks since the boot, as numbers are used again."""


@contextlib.contextmanager
def alone(home: Path) -> Iterator[None]:
    """Be the daemon of this state directory; StateError where there is one already."""
    handle = os.open(home / "serve.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = running(home)
            which = f", pid {other.pid}" if other is not None else ""
            raise StateError(f"bonobofs serves {home} already{which}; end that first: bonobofs serve --stop") from None
        path = _pid_file(home)
        path.write_text(f"{os.getpid()} {start_time(os.getpid())}\n", encoding="ascii")
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
    finally:
        os.close(handle)


def running(home: Path) -> Daemon | None:
    """The daemon of this state directory; None where there is none."""
    try:
        pid, starttime = map(int, _pid_file(home).read_text(encoding="ascii").split())
    except (FileNotFoundError, ValueError):
        return None
    return Daemon(pid, starttime) if is_alive(pid, starttime) else None


def _pid_file(home: Path) -> Path:
    return home / "serve.pid"
