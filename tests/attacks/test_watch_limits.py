"""Directories that use up watches, cannot be watched, or lie too deep: the rest of the source stays watched."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from bonobofs import session
from tests.external_changes.few_watches_companion import BUDGET
from tests.support import proc
from tests.support.observe import companion_of, out_of_band, recorded, status, text
from tests.support.users import run_in_child
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted, OrdinaryUser, World, bonobofs

DEPTH: Final = 6000
NAME: Final = "n" * 30


def chain(root: Path, depth: int, name: str = NAME) -> int:
    """Make directories in each other, and return the last, open."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=fd)
        above, fd = fd, os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(above)
    return fd


def watches(world: World) -> int:
    """How many inotify watches the companion has, as the kernel counts them."""
    return sum(info.count("inotify wd:") for info in proc.descriptor_infos(companion_of(world.pid)))


def is_partial(world: World) -> bool:
    """Whether `status` says so."""
    return str(status(world).watch).startswith(session.PARTLY)


def is_seen(world: World, path: str) -> None:
    """An external change shows, and is entered."""
    (world.source / path).write_text("behind")
    until(lambda: text(world.path / path) == "behind", f"{path} shows")
    until(lambda: path in out_of_band(world), f"{path} is entered")


def test_new_directories_take_only_a_share_of_the_watches(mounted: Mounted, source: Path) -> None:
    """At most the budget. The rest stays watched, shows within a second, and the new ones are watched when watches are
    free.
    """
    (source / "early").mkdir()
    world = mounted(policy=ALLOW_ALL, companion="tests.external_changes.few_watches_companion")
    assert status(world).watch == session.WATCHING
    for number in range(100):
        (world.path / f"many-{number:03}").mkdir()
    until(lambda: is_partial(world), "status says that a part is not watched")
    assert watches(world) == BUDGET
    assert f"{BUDGET} directories are watched, and not all below '.'" in (status(world).watch or "")
    assert "sysctl fs.inotify.max_user_watches=" in (status(world).watch or "")
    (check,) = [
        each for each in json.loads(bonobofs("doctor", "--json").stdout)["checks"] if each["name"] == "watching"
    ]
    assert check["found"] == f"{world.path}: its source is watched only in part"
    assert check["remedy"].endswith(str(status(world).watch))
    is_seen(world, "early/file")
    (world.source / "many-099/file").write_text("behind")
    until(lambda: text(world.path / "many-099/file") == "behind", "a change in what is not watched shows")
    assert len(recorded(world, "watch", "alert")) == 1
    for number in range(90):
        os.rmdir(world.source / f"many-{number:03}")
    until(lambda: status(world).watch == session.WATCHING, "all is watched again", seconds=40)
    is_seen(world, "many-099/late")


def test_only_the_unreadable_directory_is_not_watched(ordinary_user: OrdinaryUser) -> None:
    """It has mode 0111. Until it can be read, `status` names it."""
    source, mountpoint = ordinary_user.directory / "source", ordinary_user.directory / "mount"
    assert ordinary_user.run("mkdir", "-p", source / "closed", source / "other", mountpoint).returncode == 0
    policy = ordinary_user.directory / "policy.toml"
    policy.write_text(ALLOW_ALL)
    made = ordinary_user.bonobofs("mount", source, mountpoint, "--policy", policy)
    assert made.returncode == 0, made.stderr

    def says() -> str:
        return ordinary_user.bonobofs("status").stdout + ordinary_user.bonobofs("status").stderr

    try:
        ordinary_user.run("chmod", "0111", mountpoint / "closed")
        ordinary_user.run("mkdir", mountpoint / "new")
        ordinary_user.run("mkdir", "-m", "0111", mountpoint / "second")
        until(lambda: "is watched only in part" in says(), "status says so", seconds=30)
        assert "may be entered and not read" in says()
        ordinary_user.run("sh", "-c", f"echo behind > {source}/other/file")
        until(lambda: "other/file" in ordinary_user.bonobofs("audit", "tail").stdout, "the rest is watched", seconds=30)
        ordinary_user.run("chmod", "0755", mountpoint / "second")
        until(lambda: "only in part" not in says(), "all is watched again", seconds=60)
    finally:
        assert ordinary_user.bonobofs("umount", mountpoint).returncode == 0


@pytest.fixture
def _removed(source: Path) -> Iterator[None]:
    """Pytest cannot remove a tree that is so deep."""
    yield
    subprocess.run(["rm", "-rf", source], check=True)


@pytest.mark.alone
@pytest.mark.usefixtures("_removed")
def test_a_very_deep_tree_is_read_once(mounted: Mounted, source: Path) -> None:
    """6,000 nested directories made each mount take 13 s without a watch."""
    os.close(chain(source, DEPTH))
    began = time.monotonic()
    world = mounted(policy=ALLOW_ALL)
    assert time.monotonic() - began < 6
    assert is_partial(world)
    is_seen(world, "file")
    is_seen(world, f"{NAME}/{NAME}/{NAME}/file")


@pytest.mark.usefixtures("_removed")
def test_a_move_of_a_deep_tree_by_the_agent_is_not_out_of_band(mounted: Mounted, source: Path) -> None:
    """Also if paths below are longer than a system call accepts."""
    world = mounted(policy=ALLOW_ALL)

    def move() -> None:
        (world.path / "a").mkdir()
        deep = chain(world.path / "a", 300)
        for number in range(50):
            os.close(os.open(f"{number}", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=deep))
        for turn in range(4):
            (world.path / f"b{turn}").mkdir()
            (world.path / ("a" if turn == 0 else f"b{turn - 1}/a")).rename(world.path / f"b{turn}/a")
            os.close(os.open(f"more-{turn}", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=deep))
        os.close(deep)

    run_in_child(move)
    (world.source / "sign").touch()
    until(lambda: "sign" in out_of_band(world), "the sign is entered")
    assert set(out_of_band(world)) == {"sign"}
