"""`scripts/bench` from its arguments to its table, at a hundredth of its size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent.parent / "scripts" / "bench"


def bench(*arguments: str, work: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH), "--rounds", "1", "--scale", "0.01", "--work", str(work), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    directory = tmp_path / "work"
    directory.mkdir()
    return directory


def test_bench_measures_the_worlds_and_leaves_no_mount(work: Path, tmp_path: Path) -> None:
    """One round of a reading and a writing row gives a table and every single time."""
    kept = tmp_path / "figures.json"
    done = bench("--rows", "open,create", "--worlds", "native,bonobofs,floor", "--json", str(kept), work=work)
    assert done.returncode == 0, done.stderr
    assert "| open(ro)+close p50 |" in done.stdout
    (run,) = json.loads(kept.read_text())["runs"]
    assert set(run["times"]) == {"open", "create"}
    for times in run["times"].values():
        assert set(times) == {"native", "bonobofs", "floor"}
        assert all(len(rounds) == 1 and rounds[0] > 0 for rounds in times.values())
    assert not list(work.iterdir())
    assert str(work) not in Path("/proc/self/mountinfo").read_text()


def test_bench_refuses_an_unknown_row_or_world(work: Path) -> None:
    """One line, before it creates any file."""
    for arguments in (("--rows", "opne"), ("--worlds", "native,zfs")):
        done = bench(*arguments, work=work)
        assert done.returncode == 1
        assert done.stderr.startswith("bench: no ")
        assert done.stderr.count("\n") == 1
    assert not list(work.iterdir())
