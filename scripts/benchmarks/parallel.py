"""Loads that run at the same time in one mount: their time, divided by the time of the same work done one by one."""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from benchmarks.plan import Plan
from benchmarks.worlds import bonobofs

PASSES = 3
TREES = 4
SOURCES = 24
TESTS = 8
Commands = list[list[str]]


def tar(plan: Plan) -> float:
    """Four trees unpacked at once."""

    def prepare(directory: Path) -> None:
        for number in range(TREES):
            (directory / str(number)).mkdir()

    def commands(out: Path) -> Commands:
        return [["tar", "-xf", str(plan.archive), "-C", str(out / str(number))] for number in range(TREES)]

    return _ratio(plan, prepare, lambda out: _one_by_one(commands(out)), lambda out: _at_once(commands(out)))


def make(plan: Plan) -> float:
    """Make -j2 of a C project."""

    def prepare(directory: Path) -> None:
        for number in range(SOURCES):
            body = "".join(f"int f{number}_{line}(int x) {{ return x * {line} + {number}; }}\n" for line in range(200))
            (directory / f"part{number}.c").write_text(body)
        objects = " ".join(f"part{number}.o" for number in range(SOURCES))
        (directory / "Makefile").write_text(f"lib.a: {objects}\n\tar rcs $@ $^\n%.o: %.c\n\tcc -O1 -c $< -o $@\n")

    def build(out: Path, jobs: int) -> float:
        return _at_once([["make", "-C", str(out), "--silent", f"-j{jobs}"]])

    return _ratio(plan, prepare, lambda out: build(out, 1), lambda out: build(out, 2))


def pytest(plan: Plan) -> float:
    """Two workers of pytest."""
    text = "import pytest\n@pytest.mark.parametrize('n', range(100))\ndef test_file(n, tmp_path):\n"
    text += "    (tmp_path / 'file').write_text('x' * n)\n    assert len((tmp_path / 'file').read_text()) == n\n"

    def prepare(directory: Path) -> None:
        for number in range(TESTS):
            (directory / f"test_{number}.py").write_text(text)

    def run(out: Path, workers: int) -> float:
        arguments = ["-q", "-n", str(workers), "--rootdir", str(out), "--basetemp", str(out / "tmp"), str(out)]
        return _at_once([[plan.python, "-m", "pytest", "-p", "no:cacheprovider", *arguments]])

    return _ratio(plan, prepare, lambda out: run(out, 1), lambda out: run(out, 2))


def readers(plan: Plan) -> float:
    """Two programs that read small files for the first time."""

    def prepare(directory: Path) -> None:
        for name in ("first", "second"):
            shutil.copytree(plan.source / "tree", directory / name, symlinks=True)

    def commands(out: Path) -> Commands:
        return [["grep", "-rF", "no-such-words-in-any-file", str(out / name)] for name in ("first", "second")]

    return _ratio(plan, prepare, lambda out: _one_by_one(commands(out)), lambda out: _at_once(commands(out)))


def _ratio(
    plan: Plan, prepare: Callable[[Path], None], serial: Callable[[Path], float], parallel: Callable[[Path], float]
) -> float:
    """Return the median of parallel divided by serial seconds, each in a directory of its own in one mount.

    `prepare` fills a directory before the mount.
    """
    place, ratios = plan.source / "out", []
    loads = {"serial": serial, "parallel": parallel}
    for _ in range(PASSES):
        shutil.rmtree(place, ignore_errors=True)
        for name in loads:
            (place / name).mkdir(parents=True)
            prepare(place / name)
        with bonobofs(plan) as root:
            seconds = {name: load(root / "out" / name) for name, load in loads.items()}
        ratios.append(seconds["parallel"] / seconds["serial"])
    shutil.rmtree(place, ignore_errors=True)
    return statistics.median(ratios)


def _one_by_one(commands: Commands) -> float:
    return sum(_at_once([command]) for command in commands)


def _at_once(commands: Commands) -> float:
    """Return the seconds until the last of the programs has ended."""
    started = perf_counter()
    running = [subprocess.Popen(each, stdout=subprocess.DEVNULL, cwd=os.sep) for each in commands]
    for program in running:
        program.wait()
    return perf_counter() - started
