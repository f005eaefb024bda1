"""The rows of the table. A workload runs in a new mount and returns the seconds of one or more rows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from types import FrameType
from typing import NamedTuple

from benchmarks.plan import FILES, OPENS, WRITES, BenchError, Plan
from benchmarks.trees import GIT

LIMIT = 300
"""Seconds after which a program that hangs on a mount is killed."""
WARM = 5
"""A warm row is the median of this many runs in one visit; the run before them, the cold one, fills the caches."""
ABSENT = "no-such-words-in-any-file"

Seconds = dict[str, float]


class Workload(NamedTuple):
    """One thing that is done in every world.

    `rows`: what it measures, by name and by the words for people. `fills`: megabytes of page cache that a visit takes
    anew in one world or another. `writes`: it fills `out`.
    """

    rows: dict[str, str]
    visit: Callable[[Plan, Path], Seconds]
    fills: int = 32
    writes: bool = False


def _timed(plan: Plan, command: list[str], *, ends_with: int = 0) -> float:
    """Seconds from starting COMMAND to its end. Waiting is one wait4: a timeout would make Popen poll with naps."""
    with plan.complaints.open("ab") as complaints:
        started = perf_counter()
        program = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=complaints)
        _wait(program)
        seconds = perf_counter() - started
    if program.returncode != ends_with:
        raise BenchError(f"{' '.join(command[:4])} ended with {program.returncode}")
    return seconds


def _wait(program: subprocess.Popen[bytes]) -> None:
    def give_up(number: int, frame: FrameType | None) -> None:
        program.kill()

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(LIMIT)
    try:
        program.wait()
    except BaseException:
        program.kill()
        raise
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _client(plan: Plan, directory: Path, *arguments: str) -> Seconds:
    """Run `client.py` in DIRECTORY; it takes its own times."""
    program = Path(__file__).with_name("client.py")
    with plan.complaints.open("ab") as complaints:
        done = subprocess.run(
            [plan.python, "-I", "-S", str(program), *arguments],
            cwd=directory,
            stdout=subprocess.PIPE,
            stderr=complaints,
            timeout=LIMIT,
        )
    if done.returncode:
        raise BenchError(f"client.py {arguments[0]} ended with {done.returncode}")
    seconds: Seconds = json.loads(done.stdout)
    return seconds


def _cold_and_warm(plan: Plan, name: str, command: list[str], *, ends_with: int = 0) -> Seconds:
    cold = _timed(plan, command, ends_with=ends_with)
    warm = [_timed(plan, command, ends_with=ends_with) for _ in range(WARM)]
    return {f"{name}-cold": cold, f"{name}-warm": statistics.median(warm)}


def _find(plan: Plan, root: Path) -> Seconds:
    return _cold_and_warm(plan, "find", ["find", str(root / "tree"), "-size", "+0"])


def _grep(plan: Plan, root: Path) -> Seconds:
    return _cold_and_warm(plan, "grep", ["grep", "-rF", ABSENT, str(root / "tree")], ends_with=1)


def _rg(plan: Plan, root: Path) -> Seconds:
    seconds = _cold_and_warm(plan, "rg", ["rg", "--no-config", "-j2", "-F", ABSENT, str(root / "tree")], ends_with=1)
    return {"rg": seconds["rg-warm"]}


def _status(plan: Plan, root: Path) -> Seconds:
    seconds = _cold_and_warm(plan, "status", ["git", "-C", str(root / "tree"), "status", "--porcelain"])
    return {"status": seconds["status-warm"]}


def _open(plan: Plan, root: Path) -> Seconds:
    names = []
    for directory, directories, files in os.walk(plan.source / "tree"):
        directories.sort()
        names += [os.path.relpath(os.path.join(directory, name), plan.source) for name in sorted(files)]
    names = [name for name in names if not os.path.islink(plan.source / name)]
    return _client(plan, root, "open", str(plan.count(OPENS)), *names[:: max(1, len(names) // 100)])


def _read(plan: Plan, root: Path) -> Seconds:
    return _client(plan, root, "read", "big")


def _write(plan: Plan, root: Path) -> Seconds:
    return _client(plan, root / "out", "write", str(plan.count(WRITES)))


def _files(plan: Plan, root: Path) -> Seconds:
    return _client(plan, root / "out", "files", str(plan.count(FILES)))


def _untar(plan: Plan, root: Path) -> Seconds:
    unpacked = _timed(plan, ["tar", "-xf", str(plan.archive), "-C", str(root / "out")])
    return {"untar": unpacked, "rm": _timed(plan, ["rm", "-rf", str(root / "out" / "tree")])}


def _compileall(plan: Plan, root: Path) -> Seconds:
    """The modules are put there before the mount, by `prepare_out`."""
    return {"compileall": _timed(plan, [plan.python, "-I", "-m", "compileall", "-q", str(root / "out" / "modules")])}


WORKLOADS: dict[str, Workload] = {
    "find": Workload({"find-warm": "find, warm", "find-cold": "find, cold"}, _find),
    "grep": Workload({"grep-warm": "grep -r, warm", "grep-cold": "grep -r, cold"}, _grep, fills=128),
    "rg": Workload({"rg": "rg -j2, warm"}, _rg, fills=128),
    "status": Workload({"status": "git status, warm"}, _status),
    "open": Workload({"open": "open(ro)+close p50"}, _open),
    "read": Workload({"read-cold": "read 1 GiB, cold", "read-warm": "read 1 GiB, warm"}, _read, fills=1100),
    "write": Workload({"write": "4 KiB writes x 20,000"}, _write, fills=192, writes=True),
    "files": Workload(
        {"create": "create+write+close 5,000", "rename": "rename 5,000", "unlink": "unlink 5,000"}, _files, writes=True
    ),
    "untar": Workload({"untar": "tar -x of the tree", "rm": "rm -rf of it"}, _untar, fills=256, writes=True),
    "compileall": Workload({"compileall": "compileall, 1.5 MB"}, _compileall, writes=True),
}

ROWS: dict[str, str] = {row: title for workload in WORKLOADS.values() for row, title in workload.rows.items()}
"""Every row in the order of the table; the geometric mean is over all of them."""


def environment() -> dict[str, str]:
    """What every program that is timed sees: no locale, nobody's git configuration."""
    return {"LC_ALL": "C", **GIT}


def applicable(plan: Plan) -> list[Workload]:
    """The workloads that have a row asked for, and something to work on in this tree."""
    chosen = [workload for workload in WORKLOADS.values() if set(workload.rows) & set(plan.rows)]
    if any(plan.modules.iterdir()):
        return chosen
    return [workload for workload in chosen if "compileall" not in workload.rows]


def prepare_out(plan: Plan, workload: Workload) -> None:
    """Make `out` empty by the bare directory; what was written before reaches the disk: no trial pays for another."""
    out = plan.source / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    if "compileall" in workload.rows:
        shutil.copytree(plan.modules, out / "modules")
    if workload.writes:
        subprocess.run(["sync", "--file-system", str(out)], check=True)


def warm_memory(plan: Plan, workload: Workload) -> None:
    """Touch twice the memory that the visit may fill, and free it.

    A virtual machine gives free memory back to its host, after two seconds where it reports free pages; the first
    touch then costs 3 s a GiB instead of 0.2, and falls on the worlds that fill a second page cache.
    """
    piece = b"\1" * (2 * plan.count(workload.fills << 20))
    del piece
