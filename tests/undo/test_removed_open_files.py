"""A file that is removed while it is open, and then written: its old content is copied, or the record says why not."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from bonobofs.session.undo_service import expire_images
from tests.support.mount_fixtures import MakePlace
from tests.support.source_state import state_of, undo
from tests.support.tracing import traced
from tests.support.users import outcome
from tests.support.wait import until

pytestmark = pytest.mark.root
_LARGE = 40 << 20


@contextmanager
def _small_disk(path: Path, megabytes: int) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


@contextmanager
def _xfs(path: Path) -> Iterator[Path]:
    """A file system that shares blocks between files."""
    path.mkdir()
    disk = path.with_suffix(".xfs")
    with disk.open("wb") as file:
        file.truncate(1 << 30)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", disk], check=True)
    subprocess.run(["mount", "-o", "loop", disk, path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def _threads_of(log: Path, call: str) -> set[int]:
    return {int(line.split()[0]) for line in log.read_text().splitlines() if call in line}


def test_a_large_removed_file_is_copied_by_a_thread(own_place: MakePlace, tmp_path: Path) -> None:
    """The server thread serves other requests meanwhile. A write then does not reach the pre-image."""
    place = own_place()
    (place.source / "large").write_bytes(b"x" * _LARGE)
    before, log = state_of(place.source), tmp_path / "log"
    with (place.path / "large").open("r+b") as file, traced(place, log, "-e", "trace=sendfile,ioctl"):
        (place.path / "large").unlink()
        file.write(b"new")
        file.flush()
        assert os.fstat(file.fileno()).st_nlink == 0
    assert _threads_of(log, "sendfile") | _threads_of(log, "FICLONE")
    assert place.session.pid not in _threads_of(log, "sendfile") | _threads_of(log, "FICLONE")
    assert undo(place, agent="alice")["conflicts"] == []
    assert state_of(place.source) == before


def test_the_first_large_overwrite_is_cloned_by_a_thread(own_place: MakePlace, tmp_path: Path) -> None:
    """A clone first writes the file's dirty pages to the disk, so that it may take as long as a copy."""
    place = own_place()
    (place.source / "large").write_bytes(b"x" * _LARGE)
    before, log = state_of(place.source), tmp_path / "log"
    with traced(place, log, "-e", "trace=sendfile,ioctl"), (place.path / "large").open("r+b") as file:
        file.write(b"new")
    assert _threads_of(log, "FICLONE")
    assert place.session.pid not in _threads_of(log, "sendfile") | _threads_of(log, "FICLONE")
    assert undo(place, agent="alice")["conflicts"] == []
    assert state_of(place.source) == before


def test_the_first_large_overwrite_shares_its_blocks(own_place: MakePlace, tmp_path: Path) -> None:
    """On XFS the clone succeeds, and nothing is copied."""
    with _xfs(tmp_path / "source") as source:
        (source / ".bonobofs").mkdir(mode=0o700)
        (source / "large").write_bytes(b"x" * _LARGE)
        place = own_place(source=source)
        before, log = state_of(source)["large"], tmp_path / "log"
        with traced(place, log, "-e", "trace=sendfile,ioctl"), (place.path / "large").open("r+b") as file:
            file.write(b"new")
        (clone,) = [line for line in log.read_text().splitlines() if "FICLONE" in line]
        assert clone.endswith("= 0")
        assert not _threads_of(log, "sendfile")
        assert undo(place, agent="alice")["conflicts"] == []
        assert state_of(source)["large"] == before
        assert place.umount().closed


def test_old_content_is_on_the_disk_before_the_new_content(own_place: MakePlace, tmp_path: Path) -> None:
    """The fsync of a program writes the pre-image, its name and the trail first."""
    place = own_place()
    (place.source / "file").write_bytes(b"x" * 500_000)
    log = tmp_path / "log"
    with traced(place, log, "-y", "-e", "trace=fsync,fdatasync"), (place.path / "file").open("r+b") as file:
        file.write(b"new")
        file.flush()
        os.fsync(file.fileno())
    synced = [line.partition("<")[2].partition(">")[0] for line in log.read_text().splitlines()]
    store = str(place.home / "undo" / place.session.session)
    before = synced[: synced.index(str(place.source / "file"))]
    assert {str(place.trail), store} <= set(before)
    assert any(path.startswith(f"{store}/") for path in before)


def test_a_removal_during_an_fsync_is_on_the_disk_after_the_next(own_place: MakePlace, tmp_path: Path) -> None:
    """The second removed file is moved into the store after its fsync began, and before it ends."""
    place = own_place()
    for name in ("first", "second", "file"):
        (place.source / name).write_text("text")
    store = place.home / "undo" / place.session.session
    (place.path / "first").unlink()
    log = tmp_path / "log"
    options = ("-P", str(store), "-e", "trace=fsync", "-e", "inject=fsync:delay_exit=2000000")
    with (place.path / "file").open("r+b") as file, ThreadPoolExecutor() as pool, traced(place, log, *options):
        synced = pool.submit(os.fsync, file.fileno())
        until(lambda: "fsync" in log.read_text(), "the server syncs the store")
        (place.path / "second").unlink()
        assert not synced.done()
        synced.result()
        for count in (2, 2):
            os.fsync(file.fileno())
            assert log.read_text().count("fsync") == count


def test_a_copy_without_room_is_recorded(own_place: MakePlace, tmp_path: Path) -> None:
    """The disk is nearly full when the removed file is written. The write succeeds, and the undo repeats the reason."""
    with _small_disk(tmp_path / "source", 64) as source:
        (source / ".bonobofs").mkdir(mode=0o700)
        (source / "large").write_bytes(b"x" * (8 << 20))
        place = own_place(source=source)
        with (place.path / "large").open("r+b") as file:
            (place.path / "large").unlink()
            free = os.statvfs(source)
            (source / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize - (4 << 20)))
            began = time.monotonic()
            until(lambda: time.monotonic() - began > 1.1, "the store reads the free space again")
            file.write(b"new")
            file.flush()
            assert os.pread(file.fileno(), 4, 0) == b"newx"
        (loss,) = [entry for entry in place.entries() if entry.operation == "content_lost"]
        assert loss.details["not_kept"] == "the disk of the store is nearly full"
        (conflict,) = undo(place, path="large")["conflicts"]
        assert conflict["reason"] == "the disk of the store is nearly full"
        assert place.umount().closed


def test_an_expired_file_that_is_open_has_no_name(own_place: MakePlace) -> None:
    """The expiry has removed its link in the store: the file has 0 links, and a write does not fill the store again."""
    place = own_place()
    (place.source / "file").write_bytes(b"x" * 1000)
    (place.home / "policy.toml").write_text('default = "allow"\n[undo]\nmax_total = "1B"\n')
    with (place.path / "file").open("r+b") as file:
        (place.path / "file").unlink()
        store = place.home / "undo" / place.session.session
        assert len(os.listdir(store)) == 1
        expire_images(place.home)
        assert os.listdir(store) == []
        os.utime(file.fileno(), ns=(1, 1))  # the kernel asks for the attributes again
        assert os.fstat(file.fileno()).st_nlink == 0
        file.write(b"new")
        file.flush()
        assert os.fstat(file.fileno()).st_nlink == 0
    assert os.listdir(store) == []
    assert not [entry for entry in place.entries() if " -1 " in entry.details.get("before", "")]


def test_a_write_waits_for_the_copy_of_a_removed_file(own_place: MakePlace, tmp_path: Path) -> None:
    """The store is on another disk, and a thread copies the file after its removal."""
    with _small_disk(tmp_path / "source", 64) as source:
        (source / "large").write_bytes(b"x" * (8 << 20))
        before, place = state_of(source), own_place(source=source)
        slow = ("-e", "trace=sendfile", "-e", "inject=sendfile:delay_enter=500000")
        with (place.path / "large").open("r+b") as file, traced(place, tmp_path / "log", *slow):
            (place.path / "large").unlink()
            file.write(b"new")
            file.flush()
        assert undo(place, agent="alice")["conflicts"] == []
        assert state_of(source) == before
        assert place.umount().closed


def test_the_end_of_a_mount_waits_for_the_copy_of_a_removed_file(own_place: MakePlace, tmp_path: Path) -> None:
    """The content is in the store when `umount` returns."""
    with _small_disk(tmp_path / "source", 64) as source:
        (source / "large").write_bytes(b"x" * (8 << 20))
        before, place = state_of(source), own_place(source=source)
        slow = ("-e", "trace=sendfile", "-e", "inject=sendfile:delay_enter=500000")
        with traced(place, tmp_path / "log", *slow):
            (place.path / "large").unlink()
            assert place.umount().closed
        assert undo(place, agent="alice")["conflicts"] == []
        assert state_of(source) == before


@pytest.mark.parametrize("change", [Path.unlink, lambda path: (path.parent / "new").rename(path)])
def test_another_mount_reads_a_removed_file_to_its_end(
    own_place: MakePlace, tmp_path: Path, change: Callable[[Path], object]
) -> None:
    """The store of one mount has the file. A program in another mount cannot change it there.

    When that mount has read of the removal, it fails the change as that of a removed file (ESTALE, ENOENT).
    """
    (source := tmp_path / "source").mkdir()
    for name in ("file", "new"):
        (source / name).write_bytes(name.encode() * 100_000)
    before, one, other = state_of(source), own_place(), own_place()
    with (other.path / "file").open("r+b", buffering=0) as file:
        found = file.read(1000)
        change(one.path / "file")
        while data := file.read(1 << 16):
            found += data
        errors = {outcome(file.write, b"more"), outcome(file.truncate, 1)}
    assert errors <= {errno.EPERM, errno.EACCES, errno.ESTALE, errno.ENOENT}
    assert found == b"file" * 100_000
    assert undo(one, agent="alice")["conflicts"] == []
    assert state_of(source) == before
