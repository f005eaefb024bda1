"""Watcher failures: lost events are recovered by a comparison; without a watcher the mount serves and reports it."""

from __future__ import annotations

import json
import os
import select
import signal
from pathlib import Path

import pytest

from bonobofs import session
from bonobofs.system.inotify import Watcher
from tests.support import proc
from tests.support.mount_fixtures import Traffic
from tests.support.observe import companion_of, fill_queue, out_of_band, status, stopped, text, too_few_watches
from tests.support.syscalls import RENAME_EXCHANGE, renameat2
from tests.support.users import run_in_child
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted, OrdinaryUser


def test_after_lost_events_everything_is_compared(source: Path, mounted: Mounted) -> None:
    """The watcher is stopped until the kernel's queue overflows: the mount then shows every change."""
    for name in ("a/b/c", "d"):
        (source / name).mkdir(parents=True)
    for number in range(300):
        (source / f"a/{number}").write_text("as it was")
    world = mounted(policy=ALLOW_ALL)
    for number in range(300):
        assert (world.path / f"a/{number}").read_text() == "as it was"
        assert not (world.path / f"a/b/c/{number}").exists()
        assert not (world.path / f"{number}").exists()
    with stopped(companion_of(world.pid)):
        fill_queue(source)
        for number in range(300):
            (source / f"a/{number}").write_text("now")
            (source / f"a/b/c/{number}").write_text("new")
            (source / f"{number}").write_text("new")
        (source / "e/f").mkdir(parents=True)
        (source / "d").rename(source / "g")
    for number in range(300):
        until(lambda n=number: text(world.path / f"a/{n}") == "now", f"a/{number} is as it is now")  # type: ignore[misc]
        until((world.path / f"a/b/c/{number}").exists, f"a/b/c/{number} shows")
        until((world.path / f"{number}").exists, f"{number} shows")
    until(lambda: not (world.path / "d").exists() and (world.path / "g").exists(), "the directory shows as moved")
    until(lambda: {f"a/{number}" for number in range(300)} & set(out_of_band(world)), "what is known of it is entered")
    assert not (world.path / "e/f/new").exists()
    (source / "e/f/new").write_text("made in a directory that was not watched before")
    until((world.path / "e/f/new").exists, "what is new is watched")
    assert status(world).watch == session.WATCHING
    assert proc.descriptors(companion_of(world.pid)).count("anon_inode:inotify") == 1  # a user may have 128


def _reads_of_split_move(source: Path) -> list[dict[bytes, list[bytes]]]:
    """Names by directory of three reads: the first ends between the events of a move, the last follows a creation."""
    os.chdir(source)
    watcher = Watcher()
    for number in range((1 << 18) // 32 - 1):  # a read has 256 KiB, an event with a short name 32 bytes
        os.chmod("ab"[number % 2], 0o600 + number // 2 % 2)
    os.rename("d/e", "moved")
    reads = [watcher.read(), watcher.read()]
    (source / "moved/new").touch()
    if select.select([watcher], [], [], 10)[0]:
        reads.append(watcher.read())
    return [{found.path: sorted(found.names) for found in read.names} for read in reads]


def test_a_moved_directory_stays_watched_if_a_read_ends_within_its_move(source: Path) -> None:
    """The next read reports the new name, and the read after it a new file below."""
    (source / "d/e").mkdir(parents=True)
    for name in "ab":
        (source / name).touch()
    reads = run_in_child(_reads_of_split_move, source)
    assert reads == [{b"": [b"a", b"b"], b"d": [b"e"]}, {b"": [b"moved"]}, {b"moved": [b"new"]}]


def test_a_new_directory_that_is_exchanged_at_once_is_watched(source: Path, mounted: Mounted) -> None:
    """The watcher reads of its creation when another directory has its name."""
    (source / "old").mkdir()
    world = mounted(policy=ALLOW_ALL)
    assert not (world.path / "old/file").exists()
    with stopped(companion_of(world.pid)):
        (source / "new").mkdir()
        renameat2(source / "new", source / "old", RENAME_EXCHANGE)
    until(lambda: (world.path / "old").stat().st_ino == (source / "old").stat().st_ino, "the exchange shows")
    assert not (world.path / "old/file").exists()
    (source / "old/file").touch()
    until((world.path / "old/file").exists, "the new file shows")


def test_a_companion_ends_with_its_server(mounted: Mounted) -> None:
    """By an unmount, SIGKILL or SIGTERM of the server; no process is left."""
    for how in ("umount", "kill", "terminate"):
        world = mounted(policy=ALLOW_ALL)
        companion = companion_of(world.pid)
        if how == "umount":
            world.umount()
        else:
            world.kill(signal.SIGKILL if how == "kill" else signal.SIGTERM)
        until(lambda pid=companion: not Path(f"/proc/{pid}").exists(), f"the companion ended with {how}")  # type: ignore[misc]


def test_a_source_that_cannot_be_watched_is_mounted(ordinary_user: OrdinaryUser) -> None:
    """A directory cannot be read: the cache timeout is a second, and `status` says why and what to do."""
    source, mountpoint = ordinary_user.directory / "source", ordinary_user.directory / "mount"
    (source / "closed").mkdir(parents=True)
    mountpoint.mkdir()
    (source / "closed/file").write_text("as it was")
    policy = ordinary_user.directory / "policy.toml"
    policy.write_text(ALLOW_ALL)
    ordinary_user.run("chown", "-R", "nobody", source, mountpoint)
    ordinary_user.run("chmod", "0311", source / "closed")
    for path in (source, source / "closed", mountpoint):
        if os.geteuid() == 0:
            os.chown(path, 65534, 65534)
    (source / "closed").chmod(0o311)
    made = ordinary_user.bonobofs("mount", source, mountpoint, "--policy", policy)
    assert made.returncode == 0, made.stderr
    try:
        shown = ordinary_user.run("cat", mountpoint / "closed/file")
        assert shown.stdout == "as it was", shown.stderr
        (source / "closed/file").write_text("changed")
        until(lambda: ordinary_user.run("cat", mountpoint / "closed/file").stdout == "changed", "the change shows")
        (one,) = json.loads(ordinary_user.bonobofs("status", "--json").stdout)
        assert "'closed' may be entered and not read" in one["watch"]
        assert "chmod u+r" in one["note"]
    finally:
        assert ordinary_user.bonobofs("umount", mountpoint).returncode == 0


@pytest.mark.alone
@pytest.mark.root
def test_at_the_limit_of_watches_the_mount_says_what_to_do(source: Path, mounted: Mounted, tmp_path: Path) -> None:
    """With more directories, the cache timeout is short, and `status` has reason and remedy."""
    (source / "file").write_text("as it was")
    with too_few_watches(source):
        world = mounted(policy=ALLOW_ALL)
        watch = status(world).watch or ""
        assert "the limit of watched directories is reached" in watch
        assert "sysctl fs.inotify.max_user_watches=" in watch
        assert text(world.path / "file") == "as it was"
        (source / "file").write_text("changed")
        until(lambda: text(world.path / "file") == "changed", "the change shows")
        with (world.path / "file").open() as reader:
            assert reader.read() == "changed"
            with (source / "file").open("a") as file:
                file.write(", and more")
            until(lambda: reader.read() == ", and more", "a reader that has it open sees it")


def test_a_watched_mount_does_not_negotiate_auto_inval_data(traffic: Traffic) -> None:
    """The kernel then keeps its pages until an invalidation."""
    assert traffic.flags & (1 << 25)
    assert not traffic.flags & (1 << 12)
