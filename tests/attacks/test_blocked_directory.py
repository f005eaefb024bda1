"""A program keeps the lock of a directory, so the kernel cannot take notifications about it."""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from bonobofs.fuse.notifications import LATE_SECONDS, MAX_BLOCKED
from bonobofs.ipc.client import call
from bonobofs.state.home import inside_directory
from tests.attacks.directory_lock import locked_directory
from tests.support import proc
from tests.support.syscalls import opened
from tests.support.users import NOBODY, outcome, run_in_child
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted, World, bonobofs

pytestmark = pytest.mark.root


def _caches(world: World) -> str | None:
    (one,) = json.loads(bonobofs("status", "--json").stdout)
    assert one["session"] == world.session.session
    found: str | None = one["caches"]
    return found


def _read(directory: int) -> object:
    os.fchdir(directory)
    return outcome(Path("secret").read_text)


def test_a_locked_directory_delays_no_other_invalidation(mounted: Mounted, source: Path, tmp_path: Path) -> None:
    """Other directories show changes at once, no entry is cached, calls fail in time, and `status` has the reason."""
    for name in ("locked", "free"):
        (source / name).mkdir()
        for file in ("a", "b", "secret"):
            (source / name / file).write_text("old")
    world = mounted(policy=ALLOW_ALL, allow_other=True)
    directory = inside_directory(world.home, world.session.session)
    for name in ("locked", "free"):
        for file in ("a", "b", "secret"):
            assert (world.path / name / file).read_text() == "old"
    assert _caches(world) is None
    place = tmp_path / "place"
    place.mkdir()
    with locked_directory(world.path / "locked", place):
        (source / "locked" / "b").unlink()  # the kernel invalidates the name, which needs the directory's lock
        until(lambda: _caches(world), "status says that an invalidation is blocked", seconds=10 * LATE_SECONDS)
        assert "does not take an invalidation" in bonobofs("status").stdout
        (source / "free" / "secret").chmod(0o600)
        (source / "free" / "secret").write_text("new")
        with opened(world.path / "free", os.O_RDONLY | os.O_DIRECTORY) as free:
            until(lambda: run_in_child(_read, free, user=NOBODY) == errno.EACCES, "it is closed to others")
        (source / "free" / "a").write_text("newer")
        until(lambda: (world.path / "free" / "a").read_text() == "newer", "the change is shown")
        (source / "free" / "c").write_text("c")
        until((world.path / "free" / "c").exists, "the new name is shown")
        began = time.monotonic()
        failed = outcome(lambda: call(directory, "write_file", path="free/d", content="d"))
        assert (failed, time.monotonic() - began < 20) == (errno.ETIMEDOUT, True)
        assert (source / "free" / "d").read_text() == "d"
        assert call(directory, "whoami")["agent"] == "alice"
    until(lambda: _caches(world) is None, "caches are trusted again")
    assert not (world.path / "locked" / "b").exists()
    call(directory, "write_file", path="free/e", content="e")
    assert (world.path / "free" / "e").read_text() == "e"
    assert [entry.kind for entry in world.entries() if entry.operation == "caches"] == ["alert", "event"]
    assert bonobofs("audit", "verify").returncode == 0


def test_more_locked_directories_than_threads_delay_no_other_invalidation(
    mounted: Mounted, source: Path, tmp_path: Path
) -> None:
    """MOST_BLOCKED threads wait. Content and names of another directory still show, and calls fail in time."""
    names = [f"locked-{number}" for number in range(MAX_BLOCKED + 2)]
    for name in (*names, "free"):
        (source / name).mkdir()
        (source / name / "a").write_text("old")
    world = mounted(policy=ALLOW_ALL)
    directory = inside_directory(world.home, world.session.session)
    assert [(world.path / name / "a").read_text() for name in (*names, "free")] == ["old"] * (len(names) + 1)
    assert not (world.path / "free/new").exists()
    with ExitStack() as stack:
        for name in names:
            (tmp_path / f"place-{name}").mkdir()
            stack.enter_context(locked_directory(world.path / name, tmp_path / f"place-{name}"))
        for name in names:
            (source / name / "a").unlink()
        until(
            lambda: proc.blocked_threads(world.pid) == MAX_BLOCKED,
            "as many threads wait as may",
            seconds=30 * LATE_SECONDS,
        )
        assert _caches(world) is not None
        (source / "free/a").write_text("newer")
        until(lambda: (world.path / "free/a").read_text() == "newer", "the change is shown")
        (source / "free/new").write_text("new")
        until((world.path / "free/new").exists, "the new name is shown")
        (source / "free/a").unlink()
        until(lambda: not (world.path / "free/a").exists(), "the removal is shown")
        began = time.monotonic()
        failed = outcome(lambda: call(directory, "write_file", path="free/d", content="d"))
        assert (failed, time.monotonic() - began < 20) == (errno.ETIMEDOUT, True)
        assert call(directory, "whoami")["agent"] == "alice"
        assert proc.blocked_threads(world.pid) == MAX_BLOCKED
    until(lambda: _caches(world) is None, "caches are trusted again")
    assert [name for name in names if (world.path / name / "a").exists()] == []
    call(directory, "write_file", path="free/e", content="e")
    assert bonobofs("audit", "verify").returncode == 0
