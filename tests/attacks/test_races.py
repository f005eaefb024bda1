"""Races: one path is exchanged for another between check and use, repeatedly."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Final

import pytest

from bonobofs.audit.reader import read
from bonobofs.policy.engine import EXECUTABLE_HEADS
from tests.attacks.attack import CONTENT
from tests.attacks.ground import build
from tests.support.syscalls import RENAME_EXCHANGE, append, make, opened, renameat2, tick
from tests.support.trees import snapshot
from tests.support.users import run_in_child
from tests.support.wait import until
from tests.support.world import Mounted, World, bonobofs

SECONDS: Final = 1.2
"""How long one race runs."""
NO_PROGRAMS: Final = """
default = "deny"
[[rule]]
name = "docs"
paths = ["aidlc-docs/"]
executable = false
[[rule]]
name = "tests"
paths = ["tests/"]
"""

Story = Callable[[Path, Path], None]
"""Done over and over, with the mount and the source; what fails is tried again."""


@pytest.fixture
def source(source: Path) -> Path:
    build(source)
    (source / "aidlc-docs/d").mkdir()
    (source / "aidlc-docs/d/plan.md").write_bytes(CONTENT)
    (source / "tests/d").mkdir()
    return source


@contextlib.contextmanager
def _going(*stories: Story, world: World) -> Iterator[None]:
    """Each story in a process of its own, until the end of the block."""
    children = []
    for story in stories:
        child = os.fork()
        if child == 0:
            while True:
                with contextlib.suppress(OSError):
                    story(world.path, world.source)
        children.append(child)
    try:
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)


def _race(world: World, *stories: Story, watch: Callable[[], None] | None = None) -> None:
    with _going(*stories, world=world):
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if watch is not None:
                watch()
            os.sched_yield()
    assert world.is_alive
    assert bonobofs("audit", "verify").returncode == 0


def _write_in(directory: str) -> Story:
    """Make, write, append and remove files in a directory of the mount."""

    def story(mount: Path, _: Path) -> None:
        path = mount / directory / "plan.md"
        with opened(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) as fd:
            os.write(fd, b"EVIL")
            os.pwrite(fd, b"EVIL", 100)
        os.truncate(path, 7)
        os.rename(path, mount / directory / "other.md")
        os.mkdir(mount / directory / "made")
        os.rmdir(mount / directory / "made")
        os.unlink(mount / directory / "other.md")

    return story


# -- within the mount


def _swap_for_symlink(mount: Path, _: Path) -> None:
    os.rename(mount / "aidlc-docs/d", mount / "aidlc-docs/aside")
    try:
        os.symlink("../src", mount / "aidlc-docs/d")
        os.unlink(mount / "aidlc-docs/d")
    finally:
        os.rename(mount / "aidlc-docs/aside", mount / "aidlc-docs/d")


def test_a_directory_swapped_for_a_symlink_in_the_mount_redirects_no_change(mounted: Mounted, source: Path) -> None:
    """The path of the changed file is judged, however the kernel resolved it."""
    world = mounted()
    before = snapshot(source, without=("aidlc-docs",))
    _race(world, _swap_for_symlink, _write_in("aidlc-docs/d"), _write_in("aidlc-docs/d"))
    assert snapshot(source, without=("aidlc-docs",)) == before


def _exchange_directories(mount: Path, _: Path) -> None:
    renameat2(mount / "aidlc-docs/d", mount / "tests/d", RENAME_EXCHANGE)


def _fill(mount: Path, _: Path) -> None:
    for directory in ("aidlc-docs/d", "tests/d"):
        for name in ("plan.md", "module.py"):
            with contextlib.suppress(OSError):
                with opened(mount / directory / name, os.O_RDWR | os.O_CREAT, 0o777) as fd:
                    os.write(fd, b"#!")
                os.unlink(mount / directory / name)


def _broken(source: Path) -> list[str]:
    """Files that lie where the default policy would not have let them come."""
    wrong = []
    for top, suffix, may_run in (("aidlc-docs", ".md", False), ("tests", ".py", True)):
        for above, _, names in os.walk(source / top):
            for name in names:
                with contextlib.suppress(FileNotFoundError), open(os.path.join(above, name), "rb") as file:
                    runs = os.fstat(file.fileno()).st_mode & 0o111 or file.read(8).startswith(EXECUTABLE_HEADS)
                    gone = os.fstat(file.fileno()).st_nlink == 0
                    if not gone and (not name.endswith(suffix) or (runs and not may_run)):
                        wrong.append(os.path.join(above, name))
    return wrong


def test_directories_exchanged_while_files_are_created_are_judged_by_their_path(mounted: Mounted, source: Path) -> None:
    """A new file is judged by the path of its directory, and the directory when it moves with the file."""
    (source / "aidlc-docs/d/plan.md").unlink()
    world = mounted()
    _race(world, _exchange_directories, _fill, _fill)
    assert _broken(source) == []


def _link_and_unlink(mount: Path, _: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(mount / "aidlc-docs/alias.md")
    os.link(mount / "tests/d/module.py", mount / "aidlc-docs/alias.md")


def _turn_into_a_script(mount: Path, _: Path) -> None:
    with opened(mount / "tests/d/module.py", os.O_RDWR | os.O_CREAT) as fd:
        for byte, at in ((b"#", 0), (b"!", 1), (b"x", 0)):
            with contextlib.suppress(OSError):
                os.pwrite(fd, byte, at)
        with contextlib.suppress(OSError):
            os.fchmod(fd, 0o755)
        with contextlib.suppress(OSError):
            os.fchmod(fd, 0o644)


def test_an_alias_created_during_a_write_makes_no_document_executable(mounted: Mounted, source: Path) -> None:
    """At no moment is there a document that runs."""
    world = mounted()

    def watch() -> None:
        # The name may lead to another file by the time it is read; the same file twice under one name is what counts.
        with contextlib.suppress(FileNotFoundError), opened(source / "aidlc-docs/alias.md", os.O_RDONLY) as fd:
            before = os.fstat(fd)
            head = os.pread(fd, 2, 0)
            after, named = os.fstat(fd), os.stat(source / "aidlc-docs/alias.md")
            if (named.st_ino, named.st_nlink, before.st_nlink, after.st_ctime_ns) == (
                before.st_ino,
                2,
                2,
                before.st_ctime_ns,
            ):
                assert (head, before.st_mode & 0o111) != (b"#!", 0)
                assert not before.st_mode & 0o111

    _race(world, _link_and_unlink, _turn_into_a_script, watch=watch)
    assert _broken(source) == []


@pytest.mark.parametrize("place", ["mount", "source"])
def test_a_copy_writes_the_first_bytes_that_were_judged(mounted: Mounted, source: Path, place: str) -> None:
    """A program changes the file to be copied while the server keeps the old content of the target."""
    harmless, script = b"harmless text\n", b"#!/bin/sh\nid #"
    (source / "aidlc-docs/large.md").write_bytes(b"-" * 60_000_000)
    (source / "tests/text").write_bytes(harmless)
    world = mounted(policy=NO_PROGRAMS)
    changed = (world.path if place == "mount" else source) / "tests/text"
    with (
        opened(world.path / "aidlc-docs/large.md", os.O_RDWR) as target,
        opened(world.path / "tests/text", os.O_RDONLY) as origin,
        opened(changed, os.O_RDWR) as fd,
    ):
        copy = Thread(target=os.copy_file_range, args=(origin, target, len(script), 0, 0))
        copy.start()
        until(lambda: any(entry.operation == "copy_range" for entry in read(world.trail)), "the copy begins")
        assert os.pwrite(fd, script, 0) == len(script)
        copy.join()
    assert (source / "aidlc-docs/large.md").read_bytes()[:15] == harmless + b"-"
    assert (source / "tests/text").read_bytes() == script


# -- external changes


def _swap_for_a_symlink_behind(_: Path, source: Path) -> None:
    """The runc class: the directory is a symlink for the length of one system call."""
    os.symlink("../../outside", source / "aidlc-docs/link")
    try:
        renameat2(source / "aidlc-docs/d", source / "aidlc-docs/link", RENAME_EXCHANGE)
        renameat2(source / "aidlc-docs/d", source / "aidlc-docs/link", RENAME_EXCHANGE)
    finally:
        os.unlink(source / "aidlc-docs/link")


def _swap_for_a_hook_behind(_: Path, source: Path) -> None:
    """The file is a symlink to a hook, then a hard link of it, then a pipe."""
    path, aside = source / "aidlc-docs/d/plan.md", source / "aidlc-docs/aside"
    puts: tuple[tuple[Callable[..., None], tuple[Path, ...]], ...] = (
        (os.symlink, (Path("../../.git/config"), aside)),  # in the mount it leads to what is protected
        (os.link, (source / ".git/config", aside)),
        (os.mkfifo, (aside,)),
    )
    for put, names in puts:
        put(*names)
        try:
            renameat2(path, aside, RENAME_EXCHANGE)
            renameat2(path, aside, RENAME_EXCHANGE)
        finally:
            os.unlink(aside)


def _far_from(source: Path) -> Path:
    """A mountpoint from which `../../outside` does not exist: only the server could lead there."""
    mountpoint = source.parent / "elsewhere/mount"
    mountpoint.mkdir(parents=True)
    return mountpoint


@pytest.mark.parametrize("swap", [_swap_for_a_symlink_behind, _swap_for_a_hook_behind], ids=["directory", "file"])
def test_swaps_behind_the_mount_do_not_redirect_changes(mounted: Mounted, source: Path, swap: Story) -> None:
    """A directory becomes a symlink, a file becomes a link: no outside and no protected file changes."""
    outside = source.parent / "outside"
    outside.mkdir()
    (outside / "plan.md").write_bytes(CONTENT)
    world = mounted(mountpoint=_far_from(source))
    before = snapshot(source, without=("aidlc-docs",)), snapshot(outside)
    _race(world, swap, _write_in("aidlc-docs/d"), _write_in("aidlc-docs/d"))
    assert (snapshot(source, without=("aidlc-docs",)), snapshot(outside)) == before


def _try_everything_in(top: Path) -> None:
    for call, *arguments in (
        (make, top / "new.md", b"EVIL"),
        (append, top / "plan.md", b"EVIL"),
        (os.truncate, top / "plan.md", 1),
        (os.chmod, top / "plan.md", 0o600),
        (os.mkdir, top / "made"),
        (os.rename, top / "plan.md", top / "other.md"),
        (os.unlink, top / "plan.md"),
    ):
        with contextlib.suppress(OSError):
            call(*arguments)


def test_a_parent_that_was_moved_out_and_linked_back_is_outside(mounted: Mounted, source: Path) -> None:
    """A directory moved out of the source, and linked back by a symlink, is not written."""
    outside = source.parent / "outside"
    (source / "aidlc-docs/d/deep").mkdir()
    (source / "aidlc-docs/d/deep/plan.md").write_bytes(CONTENT)
    world = mounted(mountpoint=_far_from(source))
    deep = world.path / "aidlc-docs/d/deep"
    run_in_child(append, deep / "plan.md", b"seen by the server, which keeps a descriptor")
    os.rename(source / "aidlc-docs/d", outside)
    os.symlink("../../outside", source / "aidlc-docs/d")
    before = snapshot(outside)
    run_in_child(_try_everything_in, deep)
    _race(world, _write_in("aidlc-docs/d/deep"))
    assert snapshot(outside) == before


def _hold_and_move(top: Path, source: Path, outside: Path) -> None:
    with opened(top / "aidlc-docs/d/deep/plan.md") as fd:
        os.write(fd, b"seen")
        os.rename(source / "aidlc-docs/d", outside)
        os.symlink("../../outside", source / "aidlc-docs/d")
        for _ in range(3):
            tick()  # longer than a name is trusted
        for call, *arguments in ((os.pwrite, b"EVIL", 50), (os.ftruncate, 3), (os.fchmod, 0o600)):
            with contextlib.suppress(OSError):
                call(fd, *arguments)


def test_a_descriptor_of_a_file_moved_out_cannot_write(mounted: Mounted, source: Path) -> None:
    """The descriptor was opened before the move."""
    outside = source.parent / "outside"
    (source / "aidlc-docs/d/deep").mkdir()
    (source / "aidlc-docs/d/deep/plan.md").write_bytes(CONTENT)
    world = mounted(mountpoint=_far_from(source))
    run_in_child(_hold_and_move, world.path, source, outside)
    assert (outside / "deep/plan.md").read_bytes() == b"seen" + CONTENT[4:]
    assert (outside / "deep/plan.md").stat().st_mode & 0o777 == 0o644
