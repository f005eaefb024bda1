"""Effects in the source: appends, creations and syncs do what they would do without a mount."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mount_fixtures import MakePlace, Traffic
from tests.support.users import outcome
from tests.support.wait import until

CLOSED = 'default = "allow"\nhidden = ["**"]\n[[protect]]\npaths = ["closed/"]\n'


def test_an_append_goes_to_the_real_end(place: MakePlace) -> None:
    """A line that another program appended to the source is not overwritten, and readers see it."""
    world = place()

    def story() -> None:
        path, below = world.path / "log", world.source / "log"
        with path.open("a") as through, below.open("a") as beside:
            for number in range(20):
                through.write(f"through {number}\n")
                through.flush()
                beside.write(f"beside {number}\n")
                beside.flush()
            through.write("last\n")
        expected = "".join(f"through {n}\nbeside {n}\n" for n in range(20)) + "last\n"
        assert below.read_text() == expected
        until(lambda: path.read_text() == expected, "the mount shows all that was appended")

    world.does(story)


def test_appends_through_two_mounts_all_arrive(place: MakePlace) -> None:
    """Two agents append a hundred lines each to one file at the same time. All two hundred are there."""
    one = place()
    two = place(source=one.source)
    program = "import os, sys\nfd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)\n"
    program += "for n in range(100): os.write(fd, b'%s %d\\n' % (sys.argv[2].encode(), n))"

    def story() -> None:
        (one.source / "log").touch()
        command = ["/usr/bin/env", "python3", "-I", "-S", "-c", program]
        both = [subprocess.Popen([*command, world.path / "log", name]) for name, world in (("one", one), ("two", two))]
        assert [writer.wait() for writer in both] == [0, 0]
        lines = (one.source / "log").read_text().splitlines()
        assert sorted(lines) == sorted(f"{name} {n}" for name in ("one", "two") for n in range(100))

    one.does(story)


def test_a_create_of_a_protected_file_does_not_truncate_it(place: MakePlace) -> None:
    """The kernel had cached that the name is free.

    The existing file is judged as a file that exists, and keeps its content.
    """
    world = place(policy=CLOSED)

    def story() -> None:
        (world.source / "closed").mkdir()
        (world.source / "closed/hook").write_text("kept")
        path = world.path / "new"
        assert not path.exists()
        os.link(world.source / "closed/hook", world.source / "new")
        assert outcome(path.write_text, "emptied") == errno.EPERM
        assert (world.source / "closed/hook").read_text() == "kept"
        with path.open("a") as file:
            assert outcome(os.write, file.fileno(), b"more") == errno.EPERM
        assert (world.source / "closed/hook").read_text() == "kept"

    world.does(story)


def test_a_create_of_an_existing_file_follows_the_open_flags(place: MakePlace) -> None:
    """After a stale ENOENT: O_EXCL fails, O_APPEND appends, O_TRUNC truncates, and no old tail is left."""
    world = place()

    def story() -> None:
        for how in ("excl", "plain", "append", "trunc", "mkdir", "symlink", "rename"):
            path, below = world.path / how, world.source / how
            assert not path.exists()
            below.write_text("from elsewhere")
            if how == "excl":
                assert outcome(os.open, path, os.O_CREAT | os.O_EXCL | os.O_WRONLY) == errno.EEXIST
            elif how == "plain":
                fd = os.open(path, os.O_CREAT | os.O_RDWR)
                assert os.pread(fd, 100, 0) == b"from elsewhere"
                os.close(fd)
            elif how == "append":
                with path.open("a") as file:
                    file.write(", and more")
                assert below.read_text() == "from elsewhere, and more"
                continue
            elif how == "trunc":
                path.write_text("new")
                assert below.read_text() == "new"
                continue
            elif how == "mkdir":
                assert outcome(path.mkdir) == errno.EEXIST
            elif how == "symlink":
                assert outcome(path.symlink_to, "nowhere") == errno.EEXIST
            else:
                (world.path / "other").write_text("other")
                os.rename(world.path / "other", path)
                assert below.read_text() == "other"
                continue
            assert below.read_text() == "from elsewhere"

    world.does(story)


def test_a_create_does_not_follow_a_symlink_that_appeared(place: MakePlace) -> None:
    """The kernel had cached that the name is free, and a symlink to an outside file is there: no file is created."""
    world = place()

    def story() -> None:
        outside = world.source.parent / "outside"
        directory = os.open(world.path, os.O_RDONLY)
        assert not (world.path / "new").exists()
        (world.source / "new").symlink_to(outside)
        flags = os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW
        assert outcome(lambda: os.close(os.open("new", flags, dir_fd=directory))) == errno.ELOOP
        os.close(directory)
        assert not outside.exists()

    world.does(story)


def test_fsync_reaches_the_disk_after_the_record(traffic: Traffic) -> None:
    """fsync, fdatasync, O_SYNC and fsync of a directory reach the disk, and the trail is synced before each."""
    fd = os.open(traffic.path / "file", os.O_RDWR | os.O_CREAT)
    synced = os.open(traffic.path / "synced", os.O_RDWR | os.O_CREAT | os.O_SYNC)
    directory = os.open(traffic.path, os.O_RDONLY)
    os.write(fd, b"content")
    calls: list[tuple[Callable[[], object], str, str]] = [
        (lambda: os.fsync(fd), "fsync", "file"),
        (lambda: os.fdatasync(fd), "fdatasync", "file"),
        (lambda: os.write(synced, b"three"), "fsync", "synced"),
        (lambda: os.fsync(directory), "fsync", ""),
    ]
    for sync, expected, below in calls:
        os.pwrite(fd, b"more", 0)
        (traffic.path / f"before-{below}-{expected}").touch()  # an entry that is not yet on the disk
        before = len(traffic.notes())
        sync()
        disk = [(note["disk"], note["path"]) for note in traffic.notes()[before:] if "disk" in note]
        trail = [number for number, (_, path) in enumerate(disk) if path.endswith("/trail")]
        file = [number for number, (_, path) in enumerate(disk) if path == str(traffic.source / below).rstrip("/")]
        assert trail, disk
        assert file, disk
        assert trail[0] < file[-1]
        assert disk[file[-1]][0] == expected or expected == "fsync"
    for each in (fd, synced, directory):
        os.close(each)


def test_a_failing_fsync_fails(place: MakePlace) -> None:
    """The caller gets the error that fsync returns for the source: a removed file cannot be synced."""
    world = place()

    def story() -> None:
        fd = os.open(world.path / "file", os.O_RDWR | os.O_CREAT)
        os.write(fd, b"content")
        os.fsync(fd)
        os.close(fd)
        outside = world.source.parent / "outside"
        fd = os.open(world.path / "file", os.O_RDONLY)
        (world.source / "file").rename(outside)
        until(lambda: outcome(os.fsync, fd) in (errno.ESTALE, errno.ENOENT), "fsync says that the file is gone")
        os.close(fd)

    world.does(story)


def test_times_are_kept_to_the_nanosecond(place: MakePlace) -> None:
    """utimensat sets exactly the given times in the source: before 1970, after 2106, one of the two, and now."""
    world = place()

    def story() -> None:
        path, below = world.path / "file", world.source / "file"
        path.touch()
        for at, mt in ((1, 999_999_999), (-1, -1_000_000_001), (5_000_000_000_123_456_789, 4_300_000_000_000_000_001)):
            os.utime(path, ns=(at, mt))
            assert (below.stat().st_atime_ns, below.stat().st_mtime_ns) == (at, mt)
            assert (path.stat().st_atime_ns, path.stat().st_mtime_ns) == (at, mt)
        before = below.stat().st_atime_ns
        subprocess.run(["touch", "-m", "-d", "2001-02-03 04:05:06.789", path], check=True)
        assert below.stat().st_atime_ns == before
        os.utime(path)
        assert below.stat().st_mtime_ns > 1_700_000_000 * 10**9

    world.does(story)


def test_a_write_shows_its_times_and_size_at_once(place: MakePlace) -> None:
    """stat in the mount right after a change equals stat in the source."""
    world = place()

    def story() -> None:
        path, below = world.path / "file", world.source / "file"
        with path.open("wb", buffering=0) as file:
            for size in (1, 4096, 100_000):
                file.write(b"x" * size)
                here, there = path.stat(), below.stat()
                assert (here.st_size, here.st_blocks) == (there.st_size, there.st_blocks)
                assert (here.st_mtime_ns, here.st_ctime_ns) == (there.st_mtime_ns, there.st_ctime_ns)
            os.ftruncate(file.fileno(), 10)
            assert path.stat().st_size == 10
        path.chmod(0o600)
        os.link(path, world.path / "linked")
        assert path.stat().st_ctime_ns == below.stat().st_ctime_ns
        assert path.stat().st_nlink == 2
        assert world.path.stat().st_mtime_ns == world.source.stat().st_mtime_ns

    world.does(story)


def test_the_umask_is_the_callers(place: MakePlace) -> None:
    """Files, directories and FIFOs get the mode that they would get without a mount, from the first one on."""
    world = place()

    def story(umask: int) -> None:
        for top in (world.source.parent / f"bare-{umask}", world.path / f"{umask}"):
            os.umask(0)
            top.mkdir()
            os.umask(umask)
            os.close(os.open(top / "file", os.O_CREAT | os.O_WRONLY, 0o777))
            (top / "dir").mkdir()
            os.mkfifo(top / "fifo")
        for name in ("file", "dir", "fifo"):
            expected = (world.source.parent / f"bare-{umask}" / name).stat().st_mode
            assert stat.filemode((world.source / f"{umask}" / name).stat().st_mode) == stat.filemode(expected)

    for umask in (0o077, 0o022, 0o027, 0o000):
        world.does(story, umask)


def test_holes_stay_holes(place: MakePlace) -> None:
    """Sparse files, SEEK_HOLE, SEEK_DATA, punched holes and preallocation are those of the source's file system."""
    world = place()
    mebibyte = 1 << 20

    def story() -> None:
        path, below = world.path / "file", world.source / "file"
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, 64 * mebibyte)
        os.pwrite(fd, b"data", 32 * mebibyte)
        with below.open("rb") as beside:
            for whence, offset in ((os.SEEK_DATA, 0), (os.SEEK_HOLE, 32 * mebibyte), (os.SEEK_HOLE, 0)):
                assert os.lseek(fd, offset, whence) == os.lseek(beside.fileno(), offset, whence)
        assert below.stat().st_blocks * 512 < mebibyte
        assert path.stat().st_blocks == below.stat().st_blocks
        assert outcome(os.lseek, fd, 33 * mebibyte, os.SEEK_DATA) == errno.ENXIO
        subprocess.run(["fallocate", "-p", "-o", str(32 * mebibyte), "-l", "65536", path], check=True)
        assert os.pread(fd, 4, 32 * mebibyte) == bytes(4)
        os.posix_fallocate(fd, 0, mebibyte)
        assert below.stat().st_blocks * 512 >= mebibyte
        os.close(fd)

    world.does(story)


def test_a_copy_within_the_mount_is_made_below(traffic: Traffic) -> None:
    """copy_file_range is one request; the bytes do not pass through the server."""
    (traffic.path / "one").write_bytes(os.urandom(100_000))
    with (traffic.path / "one").open("rb") as source, (traffic.path / "two").open("wb") as target:
        sent = traffic.during(os.copy_file_range, source.fileno(), target.fileno(), 100_000)
    assert {one.opcode for one in sent} & {"COPY_FILE_RANGE", "COPY_FILE_RANGE_64"}
    assert {"READ", "WRITE"}.isdisjoint(one.opcode for one in sent)
    assert (traffic.source / "two").read_bytes() == (traffic.source / "one").read_bytes()


def test_errors_of_the_source_are_returned_unchanged(place: MakePlace) -> None:
    """Each error keeps its number, and no change is half done."""
    world = place()

    def story() -> None:
        at = world.path
        (at / "dir/sub").mkdir(parents=True)
        (at / "file").touch()
        (at / "link").symlink_to("link")
        for call, code in (
            (lambda: os.rmdir(at / "dir"), errno.ENOTEMPTY),
            (lambda: os.mkdir(at / "dir"), errno.EEXIST),
            (lambda: os.rename(at / "dir", at / "dir/sub/below"), errno.EINVAL),
            (lambda: os.rename(at / "file", at / "dir"), errno.EISDIR),
            (lambda: os.rename(at / "dir", at / "file"), errno.ENOTDIR),
            (lambda: os.unlink(at / "dir"), errno.EISDIR),
            (lambda: os.rmdir(at / "file"), errno.ENOTDIR),
            (lambda: os.open(at / "link", os.O_RDONLY), errno.ELOOP),
            (lambda: os.truncate(at / "file", 1 << 62), errno.EFBIG),
            (lambda: os.getxattr(at / "file", "user.none"), errno.ENODATA),
            (lambda: os.setxattr(at / "file", "user.x", b"", os.XATTR_REPLACE), errno.ENODATA),
        ):
            assert outcome(call) == code
        assert sorted(os.listdir(world.source)) == ["dir", "file", "link"]

    world.does(story)


def test_special_files_keep_their_kind(place: MakePlace) -> None:
    """FIFOs and sockets made through the mount are FIFOs and sockets, and work."""
    world = place()

    def story() -> None:
        os.mkfifo(world.path / "fifo", 0o600)
        assert stat.S_ISFIFO((world.source / "fifo").stat().st_mode)
        reader = os.open(world.path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
        writer = os.open(world.path / "fifo", os.O_WRONLY)
        os.write(writer, b"through")
        assert os.read(reader, 100) == b"through"
        os.close(reader)
        os.close(writer)

    world.does(story)


@pytest.mark.root
def test_the_source_on_another_file_system_is_served_alike(own_place: MakePlace, tmp_path: Path) -> None:
    """A tmpfs, with its own numbers and cookies and no generations, works as a source."""
    source = tmp_path / "ram"
    source.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", source], check=True)
    try:
        world = own_place(source=source)
        for number in range(500):
            (world.path / f"file-{number:04}").write_text(str(number))
        assert sorted(os.listdir(world.path)) == [f"file-{number:04}" for number in range(500)]
        fd = os.open(world.path / "file-0000", os.O_RDWR)
        (world.path / "file-0000").unlink()
        os.write(fd, b"still")
        assert os.pread(fd, 10, 0) == b"still"
        os.close(fd)
        os.setxattr(world.path / "file-0001", "trusted.mark", b"here")
        assert os.getxattr(source / "file-0001", "trusted.mark") == b"here"
        world.umount()
    finally:
        subprocess.run(["umount", source], check=True)


def test_a_write_that_the_source_cannot_take_fails_alone(place: MakePlace) -> None:
    """The error is the file system's own. Later writes succeed when there is space."""
    world = place()

    def story() -> None:
        fd = os.open(world.path / "file", os.O_RDWR | os.O_CREAT)
        os.write(fd, b"start")
        assert outcome(os.pwrite, fd, b"far", (1 << 63) - 10) in (errno.EFBIG, errno.EINVAL)
        assert os.write(fd, b"more") == 4
        os.close(fd)
        assert (world.source / "file").read_bytes() == b"startmore"

    world.does(story)


def test_a_listing_after_a_change_is_fresh(place: MakePlace) -> None:
    """A change in a directory invalidates its cached listing, including files of other programs."""
    world = place()

    def story() -> None:
        (world.path / "one").touch()
        os.listdir(world.path)
        (world.source / "beside").touch()
        (world.path / "two").touch()
        assert set(os.listdir(world.path)) == {"one", "two", "beside"}

    world.does(story)
