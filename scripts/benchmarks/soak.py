"""Mixed load on one mount for an hour: compare memory and descriptors of the servers with the early values."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pwd
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from benchmarks import peers, trees
from benchmarks.command import CHECKOUT, SCRATCH
from benchmarks.plan import BenchError, Plan
from benchmarks.worlds import bonobofs, unmount

GROWTH = 1.05
"""How much more of anything there may be at the end than after the first minutes."""
SCALE = 0.2
"""Of the benchmarks' tree."""
PERIOD = 60.0
"""Seconds between two samples. For each the load rests, so that what is in use at that moment is not counted."""
REST = 30.0
"""Seconds after which a sample is taken although the numbers have not come to rest."""
STILL = 3.0
"""Seconds without a change that count as rest: longer than the server keeps what is not in use."""
TOGETHER = 3
"""Samples whose median is compared."""
WRITERS = 2

Held = dict[str, int]


class Sample(NamedTuple):
    """What the processes of the session held at one moment."""

    seconds: float
    held: Held
    """"server memory" in KiB, "server descriptors", "server threads", and the same of "companion"."""
    done: int
    """Operations of the load so far."""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        samples = list(_soak(options))
        if options.json:
            options.json.write_text(json.dumps([sample._asdict() for sample in samples], indent=1) + "\n")
        return _verdict(samples, options.compare_after)
    except BenchError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("soak: interrupted; the mount and its directory are removed", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, metavar="M", help="how long (60)")
    add(
        "--compare-after", type=float, default=5.0, metavar="M", help="the minute that the last one is held against (5)"
    )
    add("--json", type=Path, metavar="FILE", help="keep every sample in FILE")
    add("--work", type=Path, default=SCRATCH, metavar="DIR", help=f"work in a new directory in DIR ({SCRATCH})")
    return parser


def _soak(options: argparse.Namespace) -> Iterator[Sample]:
    """Mount, load, sample; afterwards the log must verify."""
    python = peers.for_bonobofs(sys.executable, CHECKOUT, [pwd.getpwuid(os.geteuid())])
    os.environ["PYTHONPATH"] = f"{CHECKOUT / 'scripts'}:{CHECKOUT}"
    with _directory(options.work) as base:
        plan = Plan(str(base), 1, SCALE, (), (), (), python, "")
        trees.prepare("generated", base, SCALE)
        os.environ["BONOBOFS_HOME"] = str(plan.home)
        with bonobofs(plan) as root, _load(plan, root) as loads:
            server = _server(plan)
            yield from _samples(options.minutes * 60, server, loads)
        found = subprocess.run([python, "-m", "bonobofs", "audit", "verify"], capture_output=True, text=True)
        if found.returncode:
            raise BenchError(f"the log does not verify: {found.stdout.strip()} {found.stderr.strip()}")


@contextlib.contextmanager
def _directory(parent: Path) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="bonobofs-soak-", dir=parent))
    try:
        yield place
    finally:
        unmount(place)
        shutil.rmtree(place, ignore_errors=True)


@contextlib.contextmanager
def _load(plan: Plan, root: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The programs at work in the mount, behind it and on its policy; each counts what it did in a file."""
    errands: list[tuple[str, Path]] = [("write", root / "out" / f"w{number}") for number in range(WRITERS)]
    errands += [("walk", root), ("behind", plan.source / "out" / "behind"), ("policy", plan.policy)]
    (root / "out").mkdir(exist_ok=True)
    loads = []
    try:
        for number, (errand, place) in enumerate(errands):
            count = plan.base + f"/count{number}"
            command = [plan.python, "-m", "benchmarks.load", errand, str(place), count]
            loads.append(subprocess.Popen(command, start_new_session=True))
        yield loads
    finally:
        for load in loads:
            os.killpg(load.pid, signal.SIGTERM)
        for load in loads:
            load.wait()


def _server(plan: Plan) -> int:
    status = subprocess.run([plan.python, "-m", "bonobofs", "status", "--json"], capture_output=True, check=True)
    return next(int(mount["pid"]) for mount in json.loads(status.stdout) if mount["mountpoint"] == str(plan.mountpoint))


def _samples(seconds: float, server: int, loads: list[subprocess.Popen[bytes]]) -> Iterator[Sample]:
    began = time.monotonic()
    while (now := time.monotonic() - began) < seconds:
        time.sleep(min(PERIOD, seconds - now))
        for load in loads:
            if load.poll() is not None:
                raise BenchError(f"{' '.join(map(str, load.args[2:4]))} ended with {load.returncode}")  # type: ignore[index]
        with _resting(loads):
            sample = Sample(time.monotonic() - began, _at_rest(server), _done(loads))
        words = ", ".join(f"{what} {value}" for what, value in sample.held.items())
        print(f"{sample.seconds / 60:5.1f} min  {sample.done} operations  {words}", flush=True)
        yield sample


@contextlib.contextmanager
def _resting(loads: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Let the programs stand still, and what they have started with them."""
    for load in loads:
        os.killpg(load.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for load in loads:
            os.killpg(load.pid, signal.SIGCONT)


def _at_rest(server: int) -> Held:
    """What is held once descriptors are not let go of any more."""
    held, since = _held(server), time.monotonic()
    end = since + REST
    while time.monotonic() < min(end, since + STILL):
        time.sleep(0.2)
        now = _held(server)
        if any(now[what] != held.get(what) for what in now if not what.endswith("memory")):
            since = time.monotonic()
        held = now
    return held


def _done(loads: list[subprocess.Popen[bytes]]) -> int:
    counts = [Path(load.args[5]) for load in loads]  # type: ignore[index]
    return sum(int(count.read_text() or 0) for count in counts if count.exists())


def _held(server: int) -> Held:
    """What each process of the session holds; the companion is the server's child."""
    processes = {"server": server}
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    if children:
        processes["companion"] = int(children[0])
    held: Held = {}
    for name, pid in processes.items():
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        held[f"{name} memory"] = int(status["VmRSS"].split()[0])
        held[f"{name} descriptors"] = len(os.listdir(f"/proc/{pid}/fd"))
        held[f"{name} threads"] = int(status["Threads"])
    return held


def _verdict(samples: list[Sample], minute: float) -> int:
    """Compare the medians of some early samples with those of the last; 1 when anything has grown."""
    early = [sample.held for sample in samples if sample.seconds >= minute * 60 - PERIOD / 2][:TOGETHER]
    late = [sample.held for sample in samples][-TOGETHER:]
    if len(samples) < 2 * TOGETHER or len(early) < TOGETHER:
        raise BenchError(f"{samples[-1].seconds / 60:.0f} minutes are too short to compare with minute {minute:g}")
    grown = 0
    for what in early[0]:
        before, after = (statistics.median(held.get(what, 0) for held in part) for part in (early, late))
        grew = after > before * GROWTH
        grown += grew
        ratio = after / before if before else 1.0
        print(f"{what:24} {before:10.0f} -> {after:10.0f}  {ratio:.3f}{'  GREW' if grew else ''}")
    print(f"{samples[-1].done} operations in {samples[-1].seconds / 60:.0f} minutes")
    return 1 if grown else 0
