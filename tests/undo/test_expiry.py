"""Old contents are bounded without a daemon: a mount removes them once an hour."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bonobofs.session.undo_service import expire_images
from bonobofs.undo.image_expiry import expire, usage
from bonobofs.undo.images import list_images
from tests.support.commands import bonobofs, environment
from tests.support.mount_fixtures import MakePlace
from tests.support.observe import companion_of, stopped
from tests.support.source_state import undo
from tests.support.users import IS_ROOT, run_in_child
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted


def test_a_mount_expires_old_contents_once_an_hour(mounted: Mounted, source: Path, home: Path) -> None:
    (source / "file").write_bytes(b"x" * 100_000)
    world = mounted(policy=ALLOW_ALL)
    run_in_child(os.unlink, world.path / "file")
    world.umount()
    store = home / "undo"
    assert usage([store]).bytes == 100_000
    (home / "policy.toml").write_text('default = "allow"\n[undo]\nmax_total = "1KB"\n')
    stamp = store / ".expired"
    mounted(policy=ALLOW_ALL).umount()
    assert usage([store]).bytes == 100_000, "the hour is not over"
    two_hours_ago = time.time() - 7200
    os.utime(stamp, (two_hours_ago, two_hours_ago))
    mounted(policy=ALLOW_ALL)
    until(lambda: usage([store]).bytes == 0, "the old content is removed")


def test_a_full_store_makes_room_for_a_live_session(mounted: Mounted, source: Path, home: Path) -> None:
    """The server learns what an expiry has removed, and keeps contents again; `status` shows the size and the limit."""
    policy = f'{ALLOW_ALL}[undo]\nmax_total = "250KB"\n'
    (home / "policy.toml").write_text(policy)
    for name in "abcd":
        (source / name).write_bytes(name.encode() * 100_000)
    world = mounted(policy=policy)

    def shown() -> dict[str, int] | None:
        found: dict[str, int] | None = json.loads(bonobofs("status", "--json").stdout)[0]["old_contents"]
        return found

    until(shown, "the store is measured")
    store = home / "undo" / world.session.session
    for name in "abc":
        run_in_child(os.unlink, world.path / name)
    numbers = list_images(store).files.keys()
    assert len(numbers) == 2, "the third file has no room"
    until(lambda: min(numbers) not in list_images(store).files, "the oldest content is removed")
    until(lambda: shown() == {"bytes": 100_000, "max_total": 250_000}, "the server knows the size")
    run_in_child(os.unlink, world.path / "d")
    assert len(list_images(store).files) == 2


def test_a_live_session_keeps_contents_after_the_expiry(mounted: Mounted, source: Path, home: Path) -> None:
    """The expiry found the session's directory empty, and removed it. The session kept nothing from then on."""
    (source / "file").write_bytes(b"x" * 100_000)
    (source / "small").write_bytes(b"old")
    store = home / "undo"
    store.mkdir()
    stamp = store / ".expired"
    two_hours_ago = time.time() - 7200
    stamp.touch()
    os.utime(stamp, (two_hours_ago, two_hours_ago))
    world = mounted(policy=ALLOW_ALL)
    until(lambda: stamp.stat().st_mtime > two_hours_ago, "the expiry has begun")
    assert expire_images(home) == 0
    with stopped(companion_of(world.pid)):  # it would take the copy out of the pack
        run_in_child(os.unlink, world.path / "file")
        run_in_child((world.path / "small").write_bytes, b"new")
        assert usage([store]).bytes >= 100_003
        (home / "policy.toml").write_text('default = "allow"\n[undo]\nmax_total = "1KB"\n')
        assert expire_images(home) == 1, "the linked content goes, the pack of the session stays"
        assert usage([store]).files == 1


@pytest.mark.root
def test_a_running_or_killed_undo_keeps_the_contents_that_it_needs(own_place: MakePlace, tmp_path: Path) -> None:
    """The store is too large while an undo runs, and after its kill: the next call completes the undo."""
    place = own_place()
    for name in ("a", "b"):
        (place.source / name).write_bytes(name.encode() * 1000)
        run_in_child(os.unlink, place.path / name)
    assert place.umount().closed
    (place.home / "policy.toml").write_text('default = "allow"\n[undo]\nmax_total = "1B"\n')
    stop = ("-e", "trace=renameat2", "-e", "inject=renameat2:signal=STOP:when=1")
    log = tmp_path / "log"
    log.touch()
    program = [sys.executable, "-m", "bonobofs", "undo", "--path", str(place.source / "a")]
    with subprocess.Popen(
        ["strace", "-f", "-qq", "-o", str(log), *stop, *program], cwd="/", env=environment(), stdout=subprocess.DEVNULL
    ):
        until(lambda: "stopped by SIGSTOP" in log.read_text(), "the undo has made its plan")
        removed = expire_images(place.home)
        (place.source / "a").unlink()
        os.kill(int(log.read_text().split()[0]), signal.SIGKILL)
    assert removed == 0, "the undo runs"
    assert expire_images(place.home) == 0, "the next call completes the undo"
    assert undo(place, path="a", agent="alice")["failures"] == []
    assert (place.source / "a").read_bytes() == b"a" * 1000
    (left := place.home / "undo/left.plan").touch()
    assert expire_images(place.home) == 0
    os.utime(left, (time.time() - 100_000,) * 2)
    assert expire_images(place.home) == 2, "no call has completed an undo for a day"
    left.unlink()


def test_an_image_that_cannot_be_removed_still_counts(tmp_path: Path) -> None:
    """Others are removed instead."""
    place = tmp_path / "undo"
    for number, session in enumerate(("first", "second")):
        (place / session).mkdir(parents=True)
        (place / session / "1").write_bytes(b"%d" % number * 1000)
        until(lambda: time.time() > (place / session / "1").stat().st_ctime, "the clock moves on")  # noqa: B023
    with _read_only(place / "first"):
        assert expire([place], 3600, 1000, ()) == 1
    assert [len(os.listdir(place / session)) for session in ("first", "second")] == [1, 0]


@contextmanager
def _read_only(directory: Path) -> Iterator[None]:
    """Let no user remove a name in a directory."""
    if IS_ROOT:
        subprocess.run(["mount", "--bind", "-o", "ro", directory, directory], check=True)
    else:
        directory.chmod(0o500)
    try:
        yield
    finally:
        if IS_ROOT:
            subprocess.run(["umount", directory], check=True)
        else:
            directory.chmod(0o700)
