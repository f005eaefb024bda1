"""The worlds: a bare directory, and mounts of the same source under an allow-all and under the default policy.

bare      the source itself
kernel    root mounts for everybody, under an allow-all policy; the server may hold few descriptors
portable  as kernel, or as the user of the tests; through libfuse
scratch   as kernel, in a directory of the scratch layer, of which the source has none
guarded   as kernel, or as the user of the tests; in aidlc-docs/ under the default policy
user      an ordinary user mounts for itself, and runs the cases that an ordinary user can run
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from bonobofs import session
from tests.posix import differences
from tests.posix.harness import Case, Seen, World
from tests.posix.runner import Runner
from tests.posix.test_directory import CROWD
from tests.support.world import ALLOW_ALL, NOBODY, OrdinaryUser
from tests.support.world import ROOT as CHECKOUT
from tests.support.world import World as Mount

ROOT: Final = os.geteuid() == 0
WORLDS: Final = (
    ("bare", "kernel", "portable", "scratch", "guarded", "user")
    if ROOT
    else ("bare", "portable", "scratch", "guarded", "user")
)
SCRATCH: Final = '[[scratch]]\npaths = ["scratch/"]\n'
FEW: Final = 400
"""Descriptors that the servers of the worlds `kernel` and `portable` may open."""


class Ground(NamedTuple):
    """Directories of one run, which every user may enter."""

    directory: Path
    source: Path
    home: Path
    ordinary: Path
    """Belongs to the ordinary user."""


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    """Without root, the cases that need root are no tests."""
    case = getattr(obj, "case", None)
    return [] if isinstance(case, Case) and case.root and not ROOT else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Each case runs in every world that has the users it needs."""
    case: Case | None = getattr(metafunc.function, "case", None)
    if case is not None:
        worlds = [world for world in WORLDS if not case.root or world != "user"]
        metafunc.parametrize("world", worlds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def ground() -> Iterator[Ground]:
    """A source with a crowded directory. Not in tmp_path, which none but the user of the tests may enter."""
    with tempfile.TemporaryDirectory(prefix="bonobofs-posix-") as name:
        ground = Ground(Path(name), Path(name, "source"), Path(name, "home"), Path(name, "ordinary"))
        ground.directory.chmod(0o755)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("BONOBOFS_HOME", str(ground.home))
            session.home()
        for path in (ground.source, ground.ordinary, ground.source / "aidlc-docs", ground.source / "crowd"):
            path.mkdir()
        _crowd(ground.source / "crowd")
        yield ground


def _crowd(directory: Path) -> None:
    """Many entries, fifty names for each file: ext4 is slow to make again as many files as were just removed."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    for number in range(CROWD):
        name, first = f"entry-{number:06}.md", f"entry-{number // 50 * 50:06}.md"
        if name == first:
            os.close(os.open(name, os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=fd))
        else:
            os.link(first, name, src_dir_fd=fd, dst_dir_fd=fd)
    os.close(fd)


@pytest.fixture(scope="session")
def bare(ground: Ground) -> Iterator[Callable[[int], Callable[[Case], Seen]]]:
    """What a case sees on the source itself, under a user; each case runs once."""
    runners: dict[int, Runner] = {}
    seen: dict[tuple[int, str], Seen] = {}

    def of(uid: int) -> Callable[[Case], Seen]:
        def run(case: Case) -> Seen:
            if uid not in runners:
                at = _directory(ground.source / f"bare-{uid}", uid)
                runners[uid] = Runner(ground.source, at, None, uid)
            if (uid, case.name) not in seen:
                seen[uid, case.name] = runners[uid].run(case)
            return seen[uid, case.name]

        return run

    yield of
    for runner in runners.values():
        runner.close()


@pytest.fixture(scope="session")
def world(
    request: pytest.FixtureRequest, ground: Ground, bare: Callable[[int], Callable[[Case], Seen]]
) -> Iterator[World]:
    """One of the worlds; its mount ends with the last case."""
    name = request.param
    if name == "bare":
        run = bare(os.geteuid())
        yield World(name, run, run, {})
    elif name == "user":
        yield from _ordinary(ground, bare(NOBODY if ROOT else os.geteuid()))
    else:
        yield from _mounted(name, ground, bare(os.geteuid()))


def _directory(path: Path, uid: int) -> Path:
    path.mkdir(exist_ok=True)  # a worker that steals tests may return to a world
    if uid != os.geteuid():
        os.chown(path, uid, uid)
    return path


def _mounted(name: str, ground: Ground, bare: Callable[[Case], Seen]) -> Iterator[World]:
    """A mount by the user of the tests."""
    mountpoint = _directory(ground.directory / name, os.geteuid())
    at, policy, listed = name, ground.directory / "allow-all.toml", differences.KERNEL
    policy.write_text(ALLOW_ALL)
    transport = "kernel"
    if name == "portable":
        transport, listed = name, differences.PORTABLE
    elif name == "guarded":
        at, policy, listed = "aidlc-docs", CHECKOUT / "policy.toml", differences.GUARDED
    elif name == "scratch":
        policy = ground.directory / "scratch.toml"
        listed = differences.SCRATCH
        policy.write_text(ALLOW_ALL + SCRATCH)
    below = ground.source / at
    below.mkdir(exist_ok=True)
    mounting = [sys.executable, "-m", "bonobofs", "mount", str(ground.source), str(mountpoint)]
    few = ["sh", "-c", f'ulimit -n {FEW} && exec "$@"', "sh"] if name in ("kernel", "portable") else []
    allow_other = ["--allow-other"] if ROOT else []
    env = {**os.environ, "PYTHONPATH": str(CHECKOUT), "BONOBOFS_HOME": str(ground.home)}
    subprocess.run(
        [*few, *mounting, "--transport", transport, "--policy", policy, *allow_other], cwd="/", env=env, check=True
    )
    made = session.live_at(ground.home, mountpoint)
    assert made is not None
    mount = Mount(ground.home, made)
    if name == "scratch":
        below = ground.home / "sessions" / made.session / "scratch" / at
    runner = Runner(mountpoint, mountpoint / at, below, os.geteuid())
    yield World(name, runner.run, bare, listed if ROOT else {**listed, **differences.ORDINARY})
    runner.close()
    assert mount.clear() == []


def _ordinary(ground: Ground, bare: Callable[[Case], Seen]) -> Iterator[World]:
    """A mount by an ordinary user."""
    uid = NOBODY if ROOT else os.geteuid()
    user = OrdinaryUser(ground.ordinary)
    mountpoint = _directory(ground.ordinary / "mount", uid)
    below = _directory(ground.source / "user", uid)
    policy = ground.directory / "allow-all.toml"
    policy.write_text(ALLOW_ALL)
    made = user.bonobofs("mount", ground.source, mountpoint, "--policy", policy)
    assert made.returncode == 0, made.stderr
    runner = Runner(mountpoint, mountpoint / "user", below, uid)
    yield World("user", runner.run, bare, {**differences.KERNEL, **differences.ORDINARY})
    runner.close()
    ended = user.bonobofs("umount", mountpoint)
    assert ended.returncode == 0, ended.stderr
