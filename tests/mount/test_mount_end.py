"""The end of a mount: in every way, no data is lost, no process or mount is left, and the bare directory is never
shown.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bonobofs import session
from bonobofs.audit.reader import is_closed, read
from bonobofs.system import mounts
from tests.support.mount_fixtures import MakePlace, Place
from tests.support.users import IS_ROOT, outcome
from tests.support.wait import until
from tests.support.world import bonobofs


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, cwd="/")


ENDS: dict[str, Callable[[Place], object]] = {
    "SIGTERM": lambda world: os.kill(world.pid, signal.SIGTERM),
    "SIGINT": lambda world: os.kill(world.pid, signal.SIGINT),
    "bonobofs umount": lambda world: world.umount(),
    "fusermount3 -u": lambda world: world.does(_run, "fusermount3", "-u", str(world.path)),
    "umount": lambda world: world.does(_run, "umount", str(world.path)),
}
if IS_ROOT:
    ENDS["umount by root"] = lambda world: _run("umount", str(world.path))
    ENDS["umount -l by root"] = lambda world: _run("umount", "-l", str(world.path))


@pytest.mark.parametrize("how", ENDS)
def test_every_way_to_end_the_mount_is_clean(place: MakePlace, how: str) -> None:
    """Mount and server are gone, the source has all writes, and the record is closed and complete."""
    world = place()

    def story() -> None:
        (world.path / "file").write_text("first")
        with (world.path / "file").open("a") as file:
            file.write(", second")
            file.flush()

    world.does(story)
    ENDS[how](world)
    until(lambda: not mounts.at(world.path), "the mount is gone")
    until(lambda: not world.is_alive, "the server is gone")
    assert (world.source / "file").read_text() == "first, second"
    assert world.does(os.listdir, world.path) == []
    entries = list(read(world.trail))
    assert (entries[-1].kind, entries[-1].operation) == ("event", "close")
    assert is_closed(world.trail)
    (head,) = [json.loads(line) for line in world.head.read_text().splitlines()]
    assert (head["seq"], head["hash"]) == (entries[-1].seq, entries[-1].hash)
    intents = {entry.seq for entry in entries if entry.kind == "intent"}
    assert intents == {entry.details["intent"] for entry in entries if entry.kind == "outcome"}


@pytest.mark.parametrize("transport", ["kernel", "portable"])
def test_a_busy_mount_detaches_serves_a_little_and_ends(place: MakePlace, transport: str) -> None:
    """On unmount while in use, the path is free at once. Processes inside are served briefly, then get ENOTCONN."""
    world = place(transport=transport)
    number = signal.SIGTERM if world.user is None else signal.SIGINT

    def story() -> None:
        (world.path / "file").write_text("content")
        os.chdir(world.path)
        with open("file", "r+") as file:
            os.kill(world.pid, number)
            until(lambda: not mounts.at(world.path), "the mount is detached")
            os.pwrite(file.fileno(), b"CONTENT", 0)
            assert os.listdir(".") == ["file"]
            until(
                lambda: outcome(os.pwrite, file.fileno(), b"later", 0) in (errno.ENOTCONN, errno.ECONNABORTED),
                "the connection ends",
            )
            assert outcome(os.stat, "missing") == errno.ENOTCONN

    world.does(story)
    until(lambda: not world.is_alive, "the server is gone")
    assert (world.source / "file").read_text() in ("CONTENT", "laterNT")
    assert is_closed(world.trail)


def test_a_detached_mount_ends_with_its_last_process(place: MakePlace) -> None:
    """After a lazy unmount, processes inside are served until they leave. Then the server ends."""
    world = place()

    def story() -> None:
        os.chdir(world.path)
        _run("fusermount3", "-u", "-z", str(world.path))
        assert not mounts.at(world.path)
        Path("file").write_text("still served")
        os.chdir("/")

    world.does(story)
    until(lambda: not world.is_alive, "the server is gone")
    assert (world.source / "file").read_text() == "still served"
    assert is_closed(world.trail)


def test_unmounting_loses_nothing_that_a_mapping_holds(place: MakePlace) -> None:
    """The source has the pages that a program wrote through a mapping and never synced."""
    world = place()

    def story() -> None:
        path = world.path / "file"
        path.write_bytes(bytes(4096))
        with path.open("r+b") as file:
            view = mmap.mmap(file.fileno(), 4096)
            view[:4] = b"page"
            view.close()

    world.does(story)
    world.umount()
    assert (world.source / "file").read_bytes() == b"page" + bytes(4092)


def test_after_a_kill_the_path_fails_closed(place: MakePlace) -> None:
    """After kill -9, every access fails with ENOTCONN, the bare mountpoint is not shown, and `status` reports a dead
    mount.
    """
    world = place()
    world.does((world.path / "file").write_text, "kept")
    world.kill()

    def story() -> None:
        for call in (
            lambda: os.listdir(world.path),
            (world.path / "file").read_text,
            lambda: (world.path / "new").write_text("x"),
            lambda: os.mkdir(world.path / "dir"),
        ):
            assert outcome(call) == errno.ENOTCONN

    world.does(story)
    (status,) = world.does(session.statuses, world.home)
    assert status.state == "dead"
    assert not is_closed(world.trail)


def test_mounting_again_recovers_after_a_kill(place: MakePlace) -> None:
    """A second mount over the dead one serves, and both records verify."""
    world = place()
    world.does((world.path / "file").write_text, "kept")
    world.kill()
    again = place(mountpoint=world.path)
    again.does((again.path / "more").write_text, "more")
    assert again.does((again.path / "file").read_text) == "kept"
    again.umount()
    assert not mounts.at(world.path)
    verified = bonobofs("audit", "verify", env={"BONOBOFS_HOME": str(world.home)})
    assert verified.returncode == 0, verified.stdout + verified.stderr


@pytest.mark.root
def test_recovery_never_shows_the_bare_directory(own_place: MakePlace, tmp_path: Path) -> None:
    """While a dead mount is replaced, every access gets ENOTCONN or the new mount, and never the directory below."""
    mountpoint = tmp_path / "over"
    mountpoint.mkdir()
    (mountpoint / "bare").touch()
    world = own_place(mountpoint=mountpoint)
    (world.path / "served").touch()
    world.kill()
    reader, writer = os.pipe()
    watcher = os.fork()
    if watcher == 0:
        seen: object = None
        while seen != ["served"]:
            seen = outcome(os.listdir, mountpoint)
            if seen not in (errno.ENOTCONN, ["served"]):
                os.write(writer, repr(seen).encode())
                break
        os._exit(0)
    os.close(writer)
    own_place(mountpoint=mountpoint)
    with open(reader, "rb") as said:
        assert said.read() == b""
    os.waitpid(watcher, 0)


def test_a_source_can_be_mounted_on_itself(place: MakePlace, tmp_path: Path) -> None:
    """The policy applies at the source's own path, changes reach the source, and nothing else is there afterwards."""
    world = place(policy='default = "allow"\n[[protect]]\npaths = ["closed/"]\n')
    source = world.source
    world.umount()
    world = place(policy='default = "allow"\n[[protect]]\npaths = ["closed/"]\n', mountpoint=source)

    def story() -> None:
        assert [mount.source for mount in mounts.at(source)] == [str(source)]
        (source / "file").write_text("through")
        assert outcome((source / "closed").mkdir) == errno.EROFS
        (source / "dir").mkdir()
        (source / "dir/file").write_text("deep")
        assert (source / ".bonobofs/whoami.json").exists()

    world.does(story)
    assert {entry.path for entry in world.entries()} >= {"file", "closed", "dir/file"}
    world.umount()
    assert sorted(os.listdir(source)) == ["dir", "file"]
    assert (source / "dir/file").read_text() == "deep"


def test_a_mountpoint_inside_the_source_is_refused(place: MakePlace) -> None:
    """The mount would contain itself."""
    world = place()
    world.does((world.source / "inside").mkdir)
    with pytest.raises(Exception, match="lies inside its source"):
        place(source=world.source, mountpoint=world.source / "inside")


def test_findmnt_shows_what_is_mounted(place: MakePlace) -> None:
    """The type is fuse.bonobofs, and the source is the source's path, for any name. `mount` and /etc/mtab agree."""
    first = place()
    said = subprocess.check_output(["findmnt", "-n", "-o", "FSTYPE,SOURCE", str(first.path)], text=True)
    assert said.split() == ["fuse.bonobofs", str(first.source)]
    for name in ("with space", "a,b\\c", "naïve", "tab\there", "new\nline", "#=:%"):
        source = first.source.parent / name
        world = place(source=source)
        told = json.loads(subprocess.check_output(["findmnt", "-J", "-o", "FSTYPE,SOURCE,TARGET", str(world.path)]))
        assert told["filesystems"][0]["fstype"] == "fuse.bonobofs"
        assert [(mount.fstype, mount.source) for mount in mounts.at(world.path)] == [("fuse.bonobofs", str(source))]


def test_two_signals_end_the_mount_once(place: MakePlace) -> None:
    world = place()

    def story() -> None:
        (world.path / "file").write_text("content")
        for _ in range(3):
            outcome(os.kill, world.pid, signal.SIGTERM)
            outcome(os.kill, world.pid, signal.SIGINT)

    world.does(story)
    until(lambda: not world.is_alive, "the server is gone")
    assert not mounts.at(world.path)
    assert is_closed(world.trail)


def test_ending_under_load_records_every_change(place: MakePlace) -> None:
    """If a mount is ended while a program creates files, its record has all of them."""
    world = place()

    def load() -> int:
        made = 0
        while outcome((world.path / f"file-{made}").touch) is None:
            made += 1
            if made == 200:
                os.kill(world.pid, signal.SIGTERM)
            if made > 200 and not mounts.at(world.path):
                break
        return made

    assert world.does(load) > 200
    until(lambda: not world.is_alive, "the server is gone")
    recorded = {entry.path for entry in read(world.trail) if entry.kind == "intent"}
    assert {path.name for path in world.source.iterdir()} <= recorded
    assert is_closed(world.trail)
