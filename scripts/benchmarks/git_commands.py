"""Compare git in a mount with git on the bare directory: ratios of wall time, each pair in the same round.

Source: issue 13 asks for status at 1.1 times native, add and commit of one file at 2 times plus 80 ms, a switch of
10,000 files at 8 times, a commit of 10,000 files at 3 times, and no write of another that waits over 50 ms for 600 MB.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter, sleep
from typing import Final

from benchmarks.plan import BenchError, Plan

FILES: Final = 50_000
CHANGED: Final = 10_000
BLOB: Final = 600_000_000
"""Bytes of the file that one agent adds while another writes."""
PASSES: Final = 5
POLICY: Final = 'default = "allow"\nhidden = ["**"]\n[git]\nbranch_prefix = ""\nmessage_pattern = "."\n'


class _Pair:
    """One repository twice: mounted, and as a plain clone."""

    def __init__(self, base: Path, plan: Plan) -> None:
        self.mount, self.plain = base / "mount", base / "plain"
        self._environment = {
            **os.environ,
            "BONOBOFS_HOME": str(base / "home"),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
        }
        self._plan = plan

    def bonobofs(self, *words: str | Path) -> None:
        command = [self._plan.python, "-m", "bonobofs", *map(str, words)]
        subprocess.run(command, env=self._environment, check=True, stdout=subprocess.DEVNULL)

    def git(self, root: Path, *words: str) -> float:
        """Run git and return its wall time in seconds. BenchError, with what git wrote: it failed."""
        started = perf_counter()
        completed = subprocess.run(
            ["git", *words],
            cwd=root,
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        seconds = perf_counter() - started
        if completed.returncode:
            command = " ".join(("git", *words[:2]))
            raise BenchError(f"{command} in {root} ended with {completed.returncode}: {completed.stderr.strip()}")
        return seconds

    def both(self, action: Callable[[Path], float]) -> tuple[float, float]:
        """Seconds of an action in the mount and in the plain clone."""
        return action(self.mount), action(self.plain)


@contextlib.contextmanager
def _pair(plan: Plan) -> Iterator[_Pair]:
    base = Path(plan.base, "git")
    shutil.rmtree(base, ignore_errors=True)
    source = base / "source"
    pair = _Pair(base, plan)
    for number in range(plan.count(FILES)):
        path = source / f"d{number % 250}" / f"f{number}.txt"
        if number < 250:
            path.parent.mkdir(parents=True)
        path.write_text(f"{number}\n" * 20)
    pair.git(source, "init", "--quiet", "-b", "main")
    for key, value in (("user.name", "bench"), ("user.email", "bench@example.org"), ("gc.auto", "0")):
        pair.git(source, "config", key, value)
    pair.git(source, "add", "--all")
    pair.git(source, "commit", "--quiet", "-m", "All")
    pair.git(source, "gc", "--quiet")
    subprocess.run(["cp", "-a", source, pair.plain], check=True)
    pair.mount.mkdir()
    (base / "policy.toml").write_text(POLICY)
    pair.bonobofs("mount", source, pair.mount, "--agent", "bench", "--new", "--policy", base / "policy.toml")
    try:
        for root in (pair.mount, pair.plain):
            pair.git(root, "switch", "--quiet", "-c", "work")
        yield pair
    finally:
        pair.bonobofs("umount", pair.mount)
        shutil.rmtree(base)


def _ratio(rounds: list[tuple[float, float]]) -> float:
    return statistics.median(ours / native for ours, native in rounds[1:])


def status(plan: Plan) -> float:
    """`git status`: time in the mount by native time. The first round warms the caches of both."""
    with _pair(plan) as pair:
        return _ratio([pair.both(lambda root: pair.git(root, "status")) for _ in range(PASSES + 1)])


def commit(plan: Plan) -> float:
    """Milliseconds by which `git add` and `git commit` of one file exceed twice the native time."""

    def once(root: Path) -> float:
        with open(root / "d1" / "f1.txt", "a", encoding="ascii") as file:
            file.write("more\n")
        return pair.git(root, "add", "d1/f1.txt") + pair.git(root, "commit", "--quiet", "-m", "One")

    with _pair(plan) as pair:
        rounds = [pair.both(once) for _ in range(2 * PASSES + 1)]
        return statistics.median(ours - 2 * native for ours, native in rounds[1:]) * 1e3


def commit_many(plan: Plan) -> float:
    """`git commit -a` of 10,000 changed files: time in the mount by native time."""
    names = [f"d{number % 250}/f{number}.txt" for number in range(plan.count(CHANGED))]

    def once(root: Path) -> float:
        for name in names:
            with open(root / name, "a", encoding="ascii") as file:
                file.write("more\n")
        return pair.git(root, "commit", "--quiet", "-a", "-m", "Many")

    with _pair(plan) as pair:
        return _ratio([pair.both(once) for _ in range(3)])


def switch(plan: Plan) -> float:
    """`git switch` to a branch with 10,000 other files, and back: time in the mount by native time."""
    names = [f"d{number % 250}/f{number}.txt" for number in range(plan.count(CHANGED))]

    def prepare(root: Path) -> float:
        for name in names:
            (root / name).write_text("changed\n")
        return pair.git(root, "commit", "--quiet", "-a", "-m", "Many")

    def once(root: Path) -> float:
        return pair.git(root, "switch", "--quiet", "--detach", "work~1") + pair.git(root, "switch", "--quiet", "work")

    with _pair(plan) as pair:
        pair.both(prepare)
        return _ratio([pair.both(once) for _ in range(3)])


def delay(plan: Plan) -> float:
    """Milliseconds that a write of another waits longer than its median, while 600 MB are added and published."""

    def write() -> float:
        started = perf_counter()
        with open(pair.mount / "d2" / "other.txt", "a", encoding="ascii") as file:
            file.write("x\n")
        return perf_counter() - started

    with _pair(plan) as pair:
        quiet = statistics.median(write() for _ in range(200))
        with open(pair.mount / "d1" / "blob", "wb") as file:
            file.writelines(os.urandom(1_000_000) for _ in range(plan.count(BLOB) // 1_000_000 + 1))
        adding = threading.Thread(
            target=lambda: (pair.git(pair.mount, "add", "d1/blob"), pair.git(pair.mount, "commit", "-qm", "Blob"))
        )
        adding.start()
        waits = []
        while adding.is_alive():
            waits.append(write())
            sleep(0.005)
        adding.join()
        return (max(waits, default=0.0) - quiet) * 1e3
