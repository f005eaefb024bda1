"""Observe a session: its companion, its status, its audit entries; stop a process; exhaust inotify watches."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bonobofs import session
from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.reader import read
from tests.support.world import World

LIMITS: Final = Path("/proc/sys/fs/inotify")


def companion_of(pid: int) -> int:
    """The process beside a server."""
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does nothing meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def too_few_watches(source: Path) -> Iterator[None]:
    """More directories in the source than the kernel lets anybody watch from now on; root's to do."""
    for number in range(40):
        (source / f"{number}").mkdir()
    limit = LIMITS / "max_user_watches"
    before = limit.read_text()
    limit.write_text("10")
    try:
        yield
    finally:
        limit.write_text(before)


def recorded(world: World, operation: str, kind: str = "event") -> list[AuditEntry]:
    """The entries of one operation, as far as they are written."""
    return [entry for entry in read(world.trail) if (entry.operation, entry.kind) == (operation, kind)]


def out_of_band(world: World) -> dict[str, dict[str, Any]]:
    """What was entered as out of band, by path."""
    return {entry.path: entry.details for entry in recorded(world, "out_of_band")}


def status(world: World) -> session.Status:
    """How the mount's session stands."""
    return next(one for one in session.statuses(world.home) if one.session.session == world.session.session)


def text(path: Path) -> str | None:
    """What a file holds; None where it cannot be read just now."""
    try:
        return path.read_text()
    except OSError:
        return None
