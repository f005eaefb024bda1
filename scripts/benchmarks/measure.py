"""Measure one plan as the current user: JSON on standard input and output, progress on standard error.

In each round every workload visits every world in turn, and the order of the worlds moves on by one each round, so
that noise of the machine falls on all of them alike.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.plan import BenchError, Plan
from benchmarks.trees import measure_of
from benchmarks.workloads import ROWS, Workload, applicable, environment, prepare_out, warm_memory
from benchmarks.worlds import WORLDS, tail, unmount

Times = dict[str, dict[str, list[float]]]
"""Seconds by row, by world, one for each round."""


def measure(plan: Plan) -> dict[str, Any]:
    times: Times = {}
    try:
        for workload in applicable(plan):
            _visit(plan, workload, "native")
        for turn in range(plan.rounds):
            for workload in applicable(plan):
                for world in _in_turn(plan.worlds, turn):
                    _keep(times, plan, world, _visit(plan, workload, world))
                _report(times, workload, plan, turn)
        singles = {name: _single(plan, name) for name in plan.parts}
    finally:
        unmount(Path(plan.base))
    files, size = measure_of(plan.source / "tree")
    return {"files": files, "bytes": size, "python": sys.version.split()[0], "times": times, "parts": singles}


def _single(plan: Plan, name: str) -> float:
    """One of `parts`, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.parts", name]
    with plan.complaints.open("ab") as complaints:
        done = subprocess.run(command, input=plan.to_json().encode(), stdout=subprocess.PIPE, stderr=complaints)
    if done.returncode:
        raise BenchError(f"{name}: {tail(plan)}")
    return float(done.stdout)


def _in_turn(worlds: tuple[str, ...], turn: int) -> tuple[str, ...]:
    begin = turn % len(worlds)
    return worlds[begin:] + worlds[:begin]


def _visit(plan: Plan, workload: Workload, world: str) -> dict[str, float]:
    prepare_out(plan, workload)
    with WORLDS[world](plan) as root:
        warm_memory(plan, workload)
        try:
            return workload.visit(plan, root)
        except BenchError as error:
            raise BenchError(f"{world}, {next(iter(workload.rows))}: {error}: {tail(plan)}") from error


def _keep(times: Times, plan: Plan, world: str, seconds: dict[str, float]) -> None:
    for row, value in seconds.items():
        if row in plan.rows:
            times.setdefault(row, {}).setdefault(world, []).append(value)


def _report(times: Times, workload: Workload, plan: Plan, turn: int) -> None:
    for row in workload.rows:
        if row in times:
            spent = " ".join(f"{world} {times[row][world][-1] * 1e3:.4g}" for world in plan.worlds)
            print(f"round {turn + 1}/{plan.rounds}  {ROWS[row]} (ms): {spent}", file=sys.stderr, flush=True)


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    signal.signal(signal.SIGTERM, _interrupted)
    plan = Plan.from_json(sys.stdin.read())
    os.environ.update(environment() | {"BONOBOFS_HOME": str(plan.home), "HOME": plan.base})
    os.chdir(plan.base)
    try:
        json.dump(measure(plan), sys.stdout)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
