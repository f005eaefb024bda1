"""The resident memory of a server: after a walk, and after the kernel has forgotten what was walked.

The kernel forgets a tree when it is moved out of the source behind the mount: the watcher reports the move, the server
invalidates the name, and the kernel drops what was below it.

Source: issue 15 asks for 75 MB after a walk over 100,000 files, and for 70 MB once 1,000,000 names are forgotten.
"""

from __future__ import annotations

import contextlib
import itertools
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

TREES: Final = 10
IN_DIRECTORY: Final = 100
STILL: Final = 3.0
"""Seconds of an idle server after which it counts as having dropped all nodes: its housekeeping needs two."""
BUSY: Final = 0.03
"""Part of this time that an idle server may run."""
LIMIT: Final = 120.0
"""Seconds that this may take."""

Row = list[float]
"""Names walked so far, megabytes after the walk, megabytes after the kernel has forgotten them."""


def walked(plan: Plan) -> float:
    """Resident megabytes of the server after a walk over 100,000 files."""
    with _trees(plan, 1, WALKED_FILES) as (tree,), bonobofs(plan) as root:
        _walk(root / tree.name)
        return _resident(server_of(root, plan))


def by_names(plan: Plan) -> list[Row]:
    """Rows of ten walks over 100,000 files, each forgotten before the next."""
    return _rows(plan, TREES, WALKED_FILES)


def million(plan: Plan) -> list[Row]:
    """Rows of one walk over 1,000,000 files, which the kernel knows at the same time."""
    return _rows(plan, 1, TREES * WALKED_FILES)


def _rows(plan: Plan, trees: int, files: int) -> list[Row]:
    """Walk each tree, and move it out of the source."""
    with _trees(plan, trees, files) as places, bonobofs(plan) as root:
        server = server_of(root, plan)
        rows = [[0.0, _resident(server), _resident(server)]]
        for number, tree in enumerate(places, 1):
            _walk(root / tree.name)
            after_walk = _resident(server)
            tree.rename(Path(plan.base, tree.name))
            _await_idle(server)
            rows.append([number * plan.count(files), after_walk, _resident(server)])
            print(
                "    {:,.0f} names: walked {:.1f} MB, forgotten {:.1f} MB".format(*rows[-1]),
                file=sys.stderr,
                flush=True,
            )
        return rows


@contextlib.contextmanager
def _trees(plan: Plan, trees: int, files: int) -> Iterator[list[Path]]:
    """Trees of empty files in the source."""
    places = [plan.source / f"many{number}" for number in range(trees)]
    try:
        for tree, first in itertools.product(places, range(0, plan.count(files), IN_DIRECTORY)):
            directory = tree / f"d{first // IN_DIRECTORY}"
            directory.mkdir(parents=True)
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            for number in range(first, min(plan.count(files), first + IN_DIRECTORY)):
                os.mknod(f"file_{number}", 0o644, dir_fd=fd)
            os.close(fd)
        yield places
    finally:
        for tree in places:
            shutil.rmtree(tree, ignore_errors=True)
            shutil.rmtree(Path(plan.base, tree.name), ignore_errors=True)


def _walk(directory: Path) -> None:
    subprocess.run(["find", str(directory), "-size", "+0"], check=True, stdout=subprocess.DEVNULL)


def _await_idle(server: int) -> None:
    """Return when the server and its companion have slept for nearly all of STILL seconds."""
    end = monotonic() + LIMIT
    while True:
        before = _runnable(server)
        sleep(STILL)
        if _runnable(server) - before < STILL * BUSY:
            return
        if monotonic() > end:
            raise BenchError(f"the server is still busy {LIMIT:.0f} s after a tree was moved away")


def _runnable(server: int) -> float:
    """Seconds for which the server's main thread and its companion's have run, or have waited for a processor."""
    main = f"/proc/{server}/task/{server}"
    pids = [str(server), *Path(f"{main}/children").read_text().split()]
    times = [Path(f"/proc/{pid}/schedstat").read_text().split() for pid in pids]
    return sum(int(run) + int(waited) for run, waited, _ in times) / 1e9


def _resident(server: int) -> float:
    """Megabytes of memory of a process, shared libraries included."""
    pages = int(Path(f"/proc/{server}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
