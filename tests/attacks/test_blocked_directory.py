"""A directory whose lock a program holds for good: what the kernel cannot be told about it."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import pytest

from bonobofs.fuse.notifier import LATE
from bonobofs.state.calling import call
from bonobofs.state.home import inside_directory
from tests.attacks.blocker import held
from tests.fuse.people import NOBODY, outcome, tell
from tests.fuse.waiting import until
from tests.posix.calls import opened
from tests.worlds import ALLOW_ALL, Mounted, World, bonobofs

pytestmark = pytest.mark.root


def _caches(world: World) -> str | None:
    (one,) = json.loads(bonobofs("status", "--json").stdout)
    assert one["session"] == world.session.session
    found: str | None = one["caches"]
    return found


def _read(directory: int) -> object:
    os.fchdir(directory)
    return outcome(Path("secret").read_text)


def test_a_held_directory_stops_no_other_invalidation(mounted: Mounted, source: Path, tmp_path: Path) -> None:
    """Other directories show changes at once, nothing is cached, calls fail in time, and `status` says why."""
    for name in ("held", "free"):
        (source / name).mkdir()
        for file in ("a", "b", "secret"):
            (source / name / file).write_text("old")
    world = mounted(policy=ALLOW_ALL, allow_other=True)
    directory = inside_directory(world.home, world.session.session)
    for name in ("held", "free"):
        for file in ("a", "b", "secret"):
            assert (world.path / name / file).read_text() == "old"
    assert _caches(world) is None
    place = tmp_path / "place"
    place.mkdir()
    with held(world.path / "held", place):
        (source / "held" / "b").unlink()  # the kernel is told of the name, which needs the directory's lock
        until(lambda: _caches(world), "status says that an invalidation is blocked", seconds=10 * LATE)
        assert "does not take an invalidation" in bonobofs("status").stdout
        (source / "free" / "secret").chmod(0o600)
        (source / "free" / "secret").write_text("new")
        with opened(world.path / "free", os.O_RDONLY | os.O_DIRECTORY) as free:
            until(lambda: tell(_read, free, user=NOBODY) == errno.EACCES, "it is closed to others")
        (source / "free" / "a").write_text("newer")
        until(lambda: (world.path / "free" / "a").read_text() == "newer", "the change is shown")
        (source / "free" / "c").write_text("c")
        until((world.path / "free" / "c").exists, "the new name is shown")
        began = time.monotonic()
        failed = outcome(lambda: call(directory, "write_file", path="free/d", content="d"))
        assert (failed, time.monotonic() - began < 5) == (errno.ETIMEDOUT, True)
        assert (source / "free" / "d").read_text() == "d"
        assert call(directory, "whoami")["agent"] == "alice"
    until(lambda: _caches(world) is None, "caches are trusted again")
    assert not (world.path / "held" / "b").exists()
    call(directory, "write_file", path="free/e", content="e")
    assert (world.path / "free" / "e").read_text() == "e"
    assert [entry.kind for entry in world.entries() if entry.operation == "caches"] == ["alert", "event"]
    assert bonobofs("audit", "verify").returncode == 0
