"""Scratch files leave a reserve on the disk of the state directory, so that each session can write its trail."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from bonobofs import session
from tests.attacks.conftest import MakeFileSystem
from tests.attacks.overlay_growth import (
    PIECE,
    Act,
    allocate,
    append_page,
    copy,
    copy_up,
    make_directory,
    make_file,
    make_symlink,
    map_pages,
    repeat,
    set_attribute,
    why,
    write,
)
from tests.support.users import outcome, run_in_child
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted, World, bonobofs

pytestmark = pytest.mark.root
POLICY = f'{ALLOW_ALL}[[scratch]]\npaths = ["build/", "old-*"]\n'


def _codes(world: World) -> set[str | None]:
    return {entry.code for entry in world.entries() if entry.result == "denied"}


@pytest.fixture
def home(file_system: MakeFileSystem, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory on a disk of its own."""
    monkeypatch.setenv("BONOBOFS_HOME", str(file_system("ext4") / "home"))
    return session.home()


@pytest.mark.parametrize(
    "act",
    [write, allocate, map_pages, copy, make_file, make_symlink, make_directory, set_attribute, copy_up],
)
def test_scratch_leaves_space_for_every_trail(act: Act, mounted: Mounted, source: Path, home: Path) -> None:
    """The agent gets ENOSPC as SPACE; another session's change succeeds, is recorded, and all trails verify."""
    for number in range(300):
        (source / f"old-{number}").write_bytes(b"x" * PIECE)
    (source / "other").mkdir()
    hostile, other = mounted(policy=POLICY), mounted(policy=POLICY, source=source / "other", agent="bob")
    top = hostile.path / "build"
    top.mkdir()
    # An msync that is refused fails with EIO or ENOSPC.
    assert run_in_child(repeat, act, top) in ({errno.ENOSPC, errno.EIO} if act is map_pages else {errno.ENOSPC})
    assert run_in_child(repeat, append_page, top) == errno.ENOSPC
    vfs = os.statvfs(home)
    assert vfs.f_bavail > vfs.f_blocks / 10
    assert vfs.f_favail > vfs.f_files / 10
    assert run_in_child(why, top) == "SPACE"
    assert bonobofs("why", top / "another").returncode == 77
    for number in range(300):
        (other.path / f"{number}.md").write_text("text")
    assert len([entry for entry in other.entries() if entry.kind == "outcome" and entry.path.endswith(".md")]) == 300
    assert _codes(other) == set()
    assert _codes(hostile) == {"SPACE"}
    assert run_in_child(outcome, os.mkdir, hostile.path / "in-source") is None
    assert bonobofs("audit", "verify").returncode == 0


def test_space_taken_by_other_processes_is_seen(mounted: Mounted, home: Path) -> None:
    """While a program fills the disk, scratch has no space; afterwards it has."""
    world = mounted(policy=POLICY)
    top = world.path / "build"
    run_in_child(top.mkdir)
    run_in_child(write, top, 0)
    filler = home.parent / "filler"
    with filler.open("wb") as file:
        vfs = os.statvfs(home)
        os.posix_fallocate(file.fileno(), 0, (vfs.f_bavail - vfs.f_blocks // 16) * vfs.f_frsize)
    until(lambda: run_in_child(outcome, write, top, 0) == errno.ENOSPC, "the disk is seen to be full")
    run_in_child((world.path / "in-source").touch)
    filler.unlink()
    until(lambda: run_in_child(outcome, write, top, 0) is None, "the space is seen")
