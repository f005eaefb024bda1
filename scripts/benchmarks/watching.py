"""Measure the delay of external changes, and the cost of the watcher: `scripts/watching [TURNS] [FILES] [PAIRS]`.

The delay is from a change in the source to the moment at which a reader of the mount sees it. The cost is that of
changes through the mount, with the watcher and without, in pairs of one run each, one after the other: the wall clock,
and the processor's time of the server and the process beside it.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs import session
from bonobofs.ipc.session_config import CompanionProgram
from bonobofs.session import launcher

POLICY: Final = 'default = "allow"\nhidden = ["**"]\n'
BLIND: Final = """
import json, socket, struct

def main(fd):
    channel = socket.socket(fileno=fd)
    channel.recv(1 << 16)
    status = json.dumps({"watch": ""}).encode()
    channel.sendall(struct.pack("=IB", len(status), 2) + status)
    while channel.recv(1 << 16):
        pass
    return 0
"""
"""A companion that says that it watches, and does not: the kernel believes as much, and nothing is watched."""


class Cost(NamedTuple):
    """Seconds."""

    wall: float
    server: float
    companion: float


class Mount(NamedTuple):
    """What is measured."""

    source: Path
    path: Path
    processes: list[int]
    """The server and what works beside it."""


@contextmanager
def mounted(directory: Path, *, watched: bool = True) -> Iterator[Mount]:
    """A mount of an empty directory."""
    source, mountpoint = directory / "source", directory / "mount"
    for path in (source, mountpoint):
        path.mkdir(exist_ok=True)
    policy = directory / "policy.toml"
    policy.write_text(POLICY)
    beside = launcher.companion_program
    if not watched:
        (directory / "blind.py").write_text(BLIND)
        vars(launcher)["companion_program"] = lambda *_: CompanionProgram("blind", [str(directory)])
    try:
        home = session.home()
        made = session.start(home, session.MountRequest(source, mountpoint, agent="bench", policy=policy)).session
    finally:
        vars(launcher)["companion_program"] = beside
    assert made.pid is not None
    children = Path(f"/proc/{made.pid}/task/{made.pid}/children").read_text().split()
    try:
        yield Mount(source, mountpoint, [made.pid, *map(int, children)])
    finally:
        session.unmount_session(home, mountpoint)


def delays(turns: int) -> dict[str, list[float]]:
    """Seconds that changes of each kind take to show."""
    took: dict[str, list[float]] = {"written": [], "made": [], "moved": [], "removed": []}
    with tempfile.TemporaryDirectory(prefix="watching-", dir=Path.home()) as name, mounted(Path(name)) as at:
        (at.source / "file").write_text("before")
        for turn in range(turns):
            _text(at.path / "file")
            took["written"].append(_written(at, f"turn {turn:06}"))
            new, moved = f"new-{turn}", f"moved-{turn}"
            for one in (new, moved):
                assert not (at.path / one).exists()
            took["made"].append(_until((at.source / new).touch, (at.path / new).exists))
            took["moved"].append(_moved(at, new, moved))
            took["removed"].append(_removed(at, moved))
    return took


def _written(at: Mount, text: str) -> float:
    return _until(lambda: (at.source / "file").write_text(text), lambda: _text(at.path / "file") == text)


def _moved(at: Mount, old: str, new: str) -> float:
    return _until(lambda: (at.source / old).rename(at.source / new), (at.path / new).exists)


def _removed(at: Mount, name: str) -> float:
    return _until((at.source / name).unlink, lambda: not (at.path / name).exists())


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _until(change: Callable[[], object], shows: Callable[[], bool]) -> float:
    time.sleep(0.03)  # quiet before, as changes by people and programs mostly come
    change()
    began = time.perf_counter()
    while not shows():
        time.sleep(0.0002)
    return time.perf_counter() - began


def _create(at: Path, files: int) -> None:
    for number in range(files):
        with open(at / str(number), "wb", buffering=0) as file:
            file.write(b"content")


def _rename(at: Path, files: int) -> None:
    for number in range(files):
        os.rename(at / str(number), at / f"r{number}")


def _unlink(at: Path, files: int) -> None:
    for number in range(files):
        os.unlink(at / f"r{number}")


def _write(at: Path, files: int) -> None:
    block = bytes(4096)
    with open(at / "big", "wb", buffering=0) as file:
        file.writelines(block for _ in range(files * 4))


WORK: Final[dict[str, Callable[[Path, int], None]]] = {
    "create+write+close": _create,
    "rename": _rename,
    "unlink": _unlink,
    "4 KiB writes": _write,
}


def costs(files: int, *, watched: bool) -> dict[str, Cost]:
    """What each kind of change costs."""
    found = {}
    with (
        tempfile.TemporaryDirectory(prefix="watching-", dir=Path.home()) as name,
        mounted(Path(name), watched=watched) as at,
    ):
        for what, work in WORK.items():
            before, began = [_cpu(pid) for pid in at.processes], time.perf_counter()
            work(at.path, files)
            wall = time.perf_counter() - began
            time.sleep(0.5)  # what the watcher does afterwards
            server, companion = (_cpu(pid) - spent for pid, spent in zip(at.processes, before, strict=True))
            found[what] = Cost(wall, server, companion)
    return found


def _cpu(pid: int) -> float:
    with open(f"/proc/{pid}/schedstat", encoding="ascii") as file:
        main = int(file.read().split()[0])
    return main / 1e9


def main(turns: int = 100, files: int = 4000, pairs: int = 7) -> None:
    """Measure both, and print them."""
    print(f"{'delay':20} {'median':>9} {'95 of 100':>9} {'most':>9}")
    for what, took in delays(turns).items():
        took.sort()
        print(
            f"{what:20} {statistics.median(took) * 1000:6.1f} ms {took[len(took) * 95 // 100] * 1000:6.1f} ms "
            f"{took[-1] * 1000:6.1f} ms"
        )
    runs = []
    for number in range(pairs):
        order = (True, False) if number % 2 else (False, True)
        pair = {watched: costs(files, watched=watched) for watched in order}
        runs.append(pair)
    print(f"{'cost':20} {'without':>9} {'with':>9} {'more':>7} {'server':>7} {'beside':>9}   medians of {pairs} pairs")
    for what in WORK:
        count = files * (4 if what == "4 KiB writes" else 1)
        without = statistics.median(run[False][what].wall for run in runs) / count
        wall = statistics.median(run[True][what].wall for run in runs) / count
        more = statistics.median(run[True][what].wall / run[False][what].wall for run in runs) - 1
        server = statistics.median(run[True][what].server / run[False][what].server for run in runs) - 1
        beside = statistics.median(run[True][what].companion for run in runs) / count
        print(
            f"{what:20} {without * 1e6:6.1f} us {wall * 1e6:6.1f} us {more:+7.1%} {server:+7.1%} {beside * 1e6:6.2f} us"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
