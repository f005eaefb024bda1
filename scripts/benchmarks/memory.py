"""The resident memory of a server: after a walk, and after the kernel has forgotten what was walked.

The kernel forgets a tree when it is moved out of the source behind the mount: the watcher reports the move, the server
invalidates the name, and the kernel drops what was below it.

Source: issue 15 asks for 75 MB after a walk over 100,000 files, and for 70 MB once 1,000,000 names are forgotten.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from benchmarks.plan import WALKED_FILES, BenchError, Plan
from benchmarks.worlds import bonobofs, server_of

BATCHES: Final = 10
IN_DIRECTORY: Final = 100
STILL: Final = 1.5
"""Seconds of an idle server after which it counts as having dropped all nodes: longer than its housekeeping waits."""
LIMIT: Final = 120.0
"""Seconds that this may take."""

Row = list[float]
"""Names walked so far, megabytes after the walk, megabytes after the kernel has forgotten them."""


def walked(plan: Plan) -> float:
    """Resident megabytes of the server after a walk over 100,000 files."""
    with _many(plan, plan.count(WALKED_FILES)) as many, bonobofs(plan) as root:
        many.rename(plan.source / many.name)
        _walk(root / many.name)
        return _resident(server_of(root, plan))


def by_names(plan: Plan) -> list[Row]:
    """Rows of ten walks over 100,000 files, each under a new name, and each forgotten before the next walk."""
    names = plan.count(WALKED_FILES)
    with _many(plan, names) as many, bonobofs(plan) as root:
        server = server_of(root, plan)
        rows = [[0.0, _resident(server), _resident(server)]]
        rows += [
            [names * (number + 1), *_walk_and_forget(plan, many, root / f"many{number}", server)]
            for number in range(BATCHES)
        ]
        return rows


def million(plan: Plan) -> list[Row]:
    """One row of 1,000,000 files that the kernel knows at the same time."""
    names = BATCHES * plan.count(WALKED_FILES)
    with _many(plan, names) as many, bonobofs(plan) as root:
        server = server_of(root, plan)
        return [
            [0.0, _resident(server), _resident(server)],
            [names, *_walk_and_forget(plan, many, root / "many", server)],
        ]


@contextlib.contextmanager
def _many(plan: Plan, count: int) -> Iterator[Path]:
    """A tree of empty files outside of what is mounted."""
    many = Path(plan.base, "many")
    try:
        for first in range(0, count, IN_DIRECTORY):
            directory = many / f"d{first // IN_DIRECTORY}"
            directory.mkdir(parents=True)
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            for number in range(first, min(count, first + IN_DIRECTORY)):
                os.mknod(f"file_{number}", 0o644, dir_fd=fd)
            os.close(fd)
        yield many
    finally:
        for left in (many, *plan.source.glob("many*")):
            shutil.rmtree(left, ignore_errors=True)


def _walk_and_forget(plan: Plan, many: Path, seen: Path, server: int) -> tuple[float, float]:
    """Show the tree at `seen` in the mount, walk it, and move it away; megabytes after the walk and at the end."""
    shown = plan.source / seen.name
    many.rename(shown)
    _walk(seen)
    after_walk = _resident(server)
    shown.rename(many)
    _await_idle(server)
    forgotten = _resident(server)
    print(f"    {seen.name}: walked {after_walk:.1f} MB, forgotten {forgotten:.1f} MB", file=sys.stderr, flush=True)
    return after_walk, forgotten


def _walk(directory: Path) -> None:
    subprocess.run(["find", str(directory), "-size", "+0"], check=True, stdout=subprocess.DEVNULL)


def _await_idle(server: int) -> None:
    """Return when the server has used at most one clock tick for STILL seconds."""
    end = monotonic() + LIMIT
    ticks, since = _ticks(server), monotonic()
    while monotonic() < since + STILL:
        sleep(0.1)
        if (now := _ticks(server)) > ticks + 1:
            ticks, since = now, monotonic()
        if monotonic() > end:
            raise BenchError(f"the server is still busy {LIMIT:.0f} s after a tree was moved away")


def _ticks(server: int) -> int:
    fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def _resident(server: int) -> float:
    """Megabytes of memory of a process, shared libraries included."""
    pages = int(Path(f"/proc/{server}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
