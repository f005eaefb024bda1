"""Changes through the mount cause no notification to the kernel and no out-of-band entry."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bonobofs.system import syscalls
from tests.support.mount_fixtures import Traffic
from tests.support.observe import companion_of, out_of_band, stopped
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted


def _with(path: Path, flags: int, act: Callable[[int], object]) -> None:
    fd = os.open(path, flags, 0o644)
    try:
        act(fd)
    finally:
        os.close(fd)


def _write_often(at: Path) -> None:
    _with(at / "file", os.O_RDWR, lambda fd: [os.pwrite(fd, b"x" * 100, offset * 100) for offset in range(500)])


def _append_often(at: Path) -> None:
    for _ in range(100):
        _with(at / "file", os.O_WRONLY | os.O_APPEND, lambda fd: os.write(fd, b"a line\n"))


def _save_as_editors_do(at: Path) -> None:
    for turn in range(20):
        (at / "file~").write_text(f"turn {turn}")
        (at / "file~").rename(at / "file")


def _make_and_remove(at: Path) -> None:
    for turn in range(100):
        (at / f"new-{turn}").write_text("content")
        if turn % 2:
            (at / f"new-{turn}").unlink()


def _tree(at: Path) -> None:
    for turn in range(10):
        (at / f"d-{turn}/e/f").mkdir(parents=True)
        for name in ("a", "b"):
            (at / f"d-{turn}/e/f/{name}").write_text("content")
        (at / f"d-{turn}/e").chmod(0o700)
        (at / f"d-{turn}/e/f/c").write_text("more")
        os.utime(at / f"d-{turn}", (1, 1))
        (at / f"d-{turn}/e").rename(at / f"e-{turn}")
    subprocess.run(["rm", "-r", at / "d-0", at / "e-1"], check=True)


def _attributes(at: Path) -> None:
    for mode in (0o600, 0o640, 0o644):
        (at / "file").chmod(mode)
        os.utime(at / "file", (mode, mode))
        os.setxattr(at / "file", "user.color", b"%d" % mode)
    os.removexattr(at / "file", "user.color")
    os.truncate(at / "file", 3)
    (at / "sub").chmod(0o711)
    os.setxattr(at / "sub", "user.color", b"red")


def _names(at: Path) -> None:
    os.link(at / "file", at / "second")
    (at / "second").write_text("by the second name")
    (at / "file").unlink()
    (at / "second").rename(at / "sub/file")
    os.symlink("sub/file", at / "link")
    os.mkfifo(at / "fifo")
    (at / "file").write_text("new")
    syscalls.renameat2(-100, bytes(at / "file"), -100, bytes(at / "sub/file"), syscalls.RENAME_EXCHANGE)
    (at / "sub/file").write_text("again")


def _open_and_removed(at: Path) -> None:
    def act(fd: int) -> None:
        (at / "gone").unlink()
        os.write(fd, b"still there")
        os.fchmod(fd, 0o600)

    _with(at / "gone", os.O_RDWR | os.O_CREAT, act)


def _space(at: Path) -> None:
    _with(at / "file", os.O_RDWR, lambda fd: os.posix_fallocate(fd, 0, 10_000))
    _with(at / "other", os.O_RDWR | os.O_CREAT, lambda fd: _copy(at / "file", fd))


def _copy(path: Path, target: int) -> None:
    os.write(target, b"12345")
    _with(path, os.O_RDONLY, lambda fd: os.copy_file_range(fd, target, 1000))


STORIES: dict[str, Callable[[Path], object]] = {
    "writes in a row": _write_often,
    "appends": _append_often,
    "saves as editors make them": _save_as_editors_do,
    "files that come and go": _make_and_remove,
    "a tree that is made, changed and moved": _tree,
    "attributes": _attributes,
    "names of one file": _names,
    "a file that is written after its removal": _open_and_removed,
    "space and copies": _space,
}


@pytest.mark.parametrize("what", STORIES)
def test_own_changes_cause_no_notification(traffic: Traffic, what: str) -> None:
    """The watcher reports each change of the mount, and the server sends no notification for it."""
    (traffic.path / "sub").mkdir()
    (traffic.path / "file").write_text("content")
    STORIES[what](traffic.path)
    for path in (traffic.path, *traffic.path.rglob("*")):
        path.lstat()
    # Notices are given in the order of the changes: once this one has come, all others would have.
    (traffic.source / "behind").touch()
    until(lambda: any(note.get("name") == "behind" for note in traffic.notes()), "the external change is reported")
    until((traffic.path / "behind").exists, "it shows")
    told = [note for note in traffic.notes() if "notice" in note]
    assert [note for note in told if note.get("name") != "behind" and note["node"] != 1] == []
    assert len(told) <= 4, told


def test_own_changes_are_not_out_of_band(mounted: Mounted) -> None:
    """Ten programs at once; the only out-of-band entry is the external change that ends the test."""
    world = mounted(policy=ALLOW_ALL)
    for number, story in enumerate(STORIES.values()):
        below = world.path / str(number)
        (below / "sub").mkdir(parents=True)
        (below / "file").write_text("content")
        story(below)
    (world.source / "behind").touch()
    until(lambda: out_of_band(world), "the external change is recorded")
    assert set(out_of_band(world)) == {"behind"}


def _make_directory_and_move_back(at: Path) -> str:
    (at / "old").rename(at / "moved")
    (at / "moved/new").mkdir()
    (at / "moved").rename(at / "old")
    return "old"


def _move_onto_new_directory(at: Path) -> str:
    (at / "new").mkdir()
    (at / "old").rename(at / "new")
    return "new"


@pytest.mark.parametrize("story", [_make_directory_and_move_back, _move_onto_new_directory])
def test_old_files_in_a_moved_directory_are_not_out_of_band(
    source: Path, mounted: Mounted, story: Callable[[Path], str]
) -> None:
    """The watcher reads the events when the path of the new directory leads elsewhere. External changes are entered."""
    (source / "old/below").mkdir(parents=True)
    for name in ("old/file", "old/below/file", "old/below/changed"):
        (source / name).write_text("content")
    world = mounted(policy=ALLOW_ALL)
    with stopped(companion_of(world.pid)):
        now = story(world.path)
        changes = {f"{now}/below/changed", f"{now}/created"}
        for path in changes:
            (source / path).write_text("external")
    world.umount()
    assert set(out_of_band(world)) == changes


def test_a_number_of_a_removed_directory_is_reused(source: Path, mounted: Mounted) -> None:
    """A report that comes late names a removed directory by its inode number and its path. Meanwhile a file has the
    number, and another directory has the path.
    """
    (source / "old").mkdir()
    number = (source / "old").stat().st_ino
    world = mounted(policy=ALLOW_ALL)
    with stopped(companion_of(world.pid)):
        (world.path / "old/file").write_text("content")
        subprocess.run(["rm", "-r", world.path / "old"], check=True)
        for turn in range(1000):  # ext4 and XFS soon use the number again, tmpfs does not
            (world.path / f"new-{turn}").write_text("content")
            if (source / f"new-{turn}").stat().st_ino == number:
                break
        (world.path / "old").mkdir()
        (world.path / "old/file").write_text("content")
    world.umount()
    assert out_of_band(world) == {}


def test_own_writes_stay_in_the_page_cache(traffic: Traffic) -> None:
    """The watcher's event for an own write does not drop the pages that the kernel holds."""
    (traffic.path / "file").write_text("content" * 1000)
    assert (traffic.path / "file").read_text() == "content" * 1000
    (traffic.source / "behind").touch()
    until((traffic.path / "behind").exists, "the watcher has reported")
    assert "READ" not in traffic.opcodes((traffic.path / "file").read_text)
