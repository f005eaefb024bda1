"""Measure one plan as the current user: JSON on standard input and output, progress on standard error.

In each round every workload visits every world in turn, and the order of the worlds moves on by one each round, so
that noise of the machine falls on all of them alike.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, Final

from benchmarks.plan import BenchError, Plan
from benchmarks.table import figure_of, title_of
from benchmarks.trees import measure_of
from benchmarks.workloads import ROWS, Workload, applicable, environment, prepare_out, warm_memory
from benchmarks.worlds import WORLDS, import_path, tail, unmount

PART_LIMIT: Final = 900.0
"""Seconds that one part may take."""
CLEANUP: Final = 60.0
"""Seconds that a part may take to unmount after SIGTERM."""

Times = dict[str, dict[str, list[float]]]
"""Seconds by row, by world, one for each round."""


def measure(plan: Plan) -> dict[str, Any]:
    """Return the times and figures of the plan, and under `failures` the rows that could not be measured, with why."""
    times: Times = {}
    failures: dict[str, str] = {}
    parts: dict[str, Any] = {}
    try:
        for workload in applicable(plan):
            _try(plan, workload, ("native",), failures)
        for turn in range(plan.rounds):
            for workload in applicable(plan):
                _keep(times, plan, _try(plan, workload, _in_turn(plan.worlds, turn), failures))
                _report(times, workload, plan, turn)
        for name in plan.parts:
            _measure_part(plan, name, parts, failures)
    finally:
        unmount(Path(plan.base))
    files, size = measure_of(plan.source / "tree")
    times = {row: worlds for row, worlds in times.items() if row not in failures}
    python = sys.version.split()[0]
    return {"files": files, "bytes": size, "python": python, "times": times, "parts": parts, "failures": failures}


def _try(
    plan: Plan, workload: Workload, worlds: tuple[str, ...], failures: dict[str, str]
) -> dict[str, dict[str, float]]:
    """Visit each world; return the seconds by world and row. A workload that has failed is not visited again."""
    if set(workload.rows) & set(failures):
        return {}
    try:
        return {world: _visit(plan, workload, world) for world in worlds}
    except (BenchError, OSError, subprocess.SubprocessError) as error:
        print(f"failed: {error}", file=sys.stderr, flush=True)
        failures.update(dict.fromkeys(workload.rows, str(error)))
        unmount(plan.mountpoint)
        return {}


def _measure_part(plan: Plan, name: str, parts: dict[str, Any], failures: dict[str, str]) -> None:
    """Measure one of `parts`, in a process of its own, which is ended with all that it started after PART_LIMIT."""
    print(f"{name}: {title_of(name)}", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "benchmarks.parts", name]
    started = monotonic()
    program = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=import_path(plan.compiled) if name == "breakdown-compiled" else None,
        start_new_session=True,
    )
    try:
        output, _ = program.communicate(plan.to_json(), timeout=PART_LIMIT)
        answer = json.loads(output) if program.returncode == 0 else {"failure": f"ended with {program.returncode}"}
    except subprocess.TimeoutExpired:
        answer = {"failure": f"took more than {PART_LIMIT:.0f} s"}
    finally:
        _end_group(program)
        unmount(Path(plan.base))
    if "failure" in answer:
        failures[name] = answer["failure"]
        print(f"failed: {name}: {failures[name]}: {tail(plan)}", file=sys.stderr, flush=True)
    else:
        parts[name] = answer["figure"]
        print(f"    {figure_of(name, parts[name])} ({monotonic() - started:.0f} s)", file=sys.stderr, flush=True)


def _end_group(program: subprocess.Popen[str]) -> None:
    """End the program, so that it can clean up, and then what it has started and left."""
    if program.poll() is None:
        program.terminate()
        try:
            program.wait(CLEANUP)
        except subprocess.TimeoutExpired:
            print("the part does not end; it is killed", file=sys.stderr)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()


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


def _keep(times: Times, plan: Plan, visits: dict[str, dict[str, float]]) -> None:
    for world, seconds in visits.items():
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
