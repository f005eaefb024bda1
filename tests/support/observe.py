"""Observe a session: its companion, its status, its audit entries; stop a process; exhaust inotify watches."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bonobofs import session
from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.reader import read
from tests.support import proc
from tests.support.world import World

LIMITS: Final = Path("/proc/sys/fs/inotify")


def companion_of(pid: int) -> int:
    """The companion of a server."""
    return proc.child(pid)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def fill_queue(source: Path) -> None:
    """Make more changes than the kernel keeps for a watcher that does not read."""
    paths = source / "flood-0", source / "flood-1"
    for path in paths:
        path.touch()
    for number in range(int((LIMITS / "max_queued_events").read_text()) + 100):
        os.utime(paths[number % 2], (number, number))  # two in a row of one file would be kept as one


_USE_ALL_WATCHES: Final = """
import ctypes, os, sys
directory, spared, each = sys.argv[1], *map(int, sys.argv[2:])
libc = ctypes.CDLL(None, use_errno=True)
names = [os.path.join(directory, str(number)).encode() for number in range(each)]
for name in names:
    os.mkdir(name)
full = False
while not full and (fd := libc.inotify_init()) >= 0:
    for count, name in enumerate(names):
        if libc.inotify_add_watch(fd, name, 2) < 0:
            full = True
            for watch in range(max(1, count - spared + 1), count + 1):
                libc.inotify_rm_watch(fd, watch)
            break
print("full" if full else "too few instances", flush=True)
sys.stdin.read()
"""
"""A program that leaves its user `spared` inotify watches. Each of its instances watches the same directories."""


@contextmanager
def too_few_watches(source: Path) -> Iterator[None]:
    """Make 40 directories in the source while the user has at most 10 inotify watches left."""
    for number in range(40):
        (source / f"{number}").mkdir()
    watches, instances = (int((LIMITS / f"max_user_{name}").read_text()) for name in ("watches", "instances"))
    each = watches // (instances // 2) + 100  # half of the instances suffice
    with (
        tempfile.TemporaryDirectory() as directory,
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _USE_ALL_WATCHES, directory, "10", str(each)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "full\n"
        yield
        process.stdin.close()


def recorded(world: World, operation: str, kind: str = "event") -> list[AuditEntry]:
    """The entries of one operation, as far as they are written."""
    return [entry for entry in read(world.trail) if (entry.operation, entry.kind) == (operation, kind)]


def out_of_band(world: World) -> dict[str, dict[str, Any]]:
    """What was entered as out of band, by path."""
    return {entry.path: entry.details for entry in recorded(world, "out_of_band")}


def status(world: World) -> session.SessionStatus:
    """How the mount's session stands."""
    return next(one for one in session.statuses(world.home) if one.session.session == world.session.session)


def text(path: Path) -> str | None:
    """What a file holds; None where it cannot be read just now."""
    try:
        return path.read_text()
    except OSError:
        return None
