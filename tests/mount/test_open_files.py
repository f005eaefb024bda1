"""Open files stay usable after unlink, rename and chmod, although the kernel sends no RELEASE; and unused descriptors
are closed.
"""

from __future__ import annotations

import errno
import mmap
import os
import resource
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from bonobofs.system import syscalls
from tests.support.mount_fixtures import MakePlace, Place
from tests.support.users import outcome
from tests.support.wait import until


def test_a_file_that_is_removed_while_open_stays_usable(place: MakePlace) -> None:
    """An open, unlinked file can be read, written, measured, truncated and changed in mode.

    No other process finds it.
    """
    world = place()

    def story() -> None:
        for make in ("made here", "found"):
            path = world.path / "file"
            if make == "found":
                (world.source / "file").write_text("content")
            else:
                path.write_text("content")
            fd = os.open(path, os.O_RDWR)
            path.unlink()
            assert not path.exists()
            assert os.pread(fd, 100, 0) == b"content"
            assert os.write(fd, b"CONTENT and more") == 16
            assert os.pread(fd, 100, 0) == b"CONTENT and more"
            assert (os.fstat(fd).st_nlink, os.fstat(fd).st_size) == (0, 16)
            os.ftruncate(fd, 3)
            os.fchmod(fd, 0o640)
            os.fsync(fd)
            assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o640
            assert os.pread(fd, 100, 0) == b"CON"
            os.setxattr(fd, "user.mark", b"here")
            assert os.getxattr(fd, "user.mark") == b"here"
            path.write_text("another")
            assert os.pread(fd, 100, 0) == b"CON"
            os.close(fd)
            assert path.read_text() == "another"
            path.unlink()

    world.does(story)


def test_a_file_that_was_removed_can_be_read_though_it_was_never_read_before(place: MakePlace) -> None:
    """Nothing of the file was cached or open when its last name was removed."""
    world = place()

    def story() -> None:
        (world.source / "file").write_bytes(b"x" * 100_000)
        with (world.path / "file").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
            (world.path / "file").unlink()
            assert view[:] == b"x" * 100_000

    world.does(story)


def test_an_open_file_outlives_the_directories_above_it(place: MakePlace) -> None:
    """After `rm -rf` of the tree above, an open file or a working directory stays usable."""
    world = place()

    def story() -> None:
        deep = world.path / "a/b"
        deep.mkdir(parents=True)
        (deep / "file").write_text("content")
        os.chdir(deep)
        with open("file", "r+") as file:
            shutil.rmtree(world.path / "a")
            assert os.pread(file.fileno(), 100, 0) == b"content"
            os.pwrite(file.fileno(), b"CON", 0)
            assert os.pread(file.fileno(), 100, 0) == b"CONtent"
        assert os.listdir(".") == []
        assert outcome(os.mkdir, "new") == errno.ENOENT
        assert os.stat(".").st_nlink == 0
        assert os.listdir(world.source) == []

    world.does(story)


def test_a_rename_over_an_open_file_leaves_the_old_handle_on_the_old_file(place: MakePlace) -> None:
    """A program that has the replaced file open still reads and writes that file. The new one is unchanged."""
    world = place()

    def story() -> None:
        old, new = world.path / "old", world.path / "new"
        for first in ("read", "not read"):
            old.write_text("the old content")
            new.write_text("the new content")
            with old.open("r+") as handle:
                if first == "read":
                    assert os.pread(handle.fileno(), 100, 0) == b"the old content"
                new.rename(old)
                assert os.pread(handle.fileno(), 100, 0) == b"the old content"
                os.pwrite(handle.fileno(), b"THE", 0)
                assert os.pread(handle.fileno(), 100, 0) == b"THE old content"
                assert os.fstat(handle.fileno()).st_nlink == 0
            assert old.read_text() == (world.source / "old").read_text() == "the new content"
            assert not new.exists()

    world.does(story)


def test_a_handle_follows_its_file_through_renames_and_exchanges(place: MakePlace) -> None:
    """A descriptor belongs to the file, under any name."""
    world = place()

    def story() -> None:
        one, two = world.path / "one", world.path / "two"
        one.write_text("1")
        two.write_text("2")
        with one.open("a") as first, two.open("a") as second:
            syscalls.renameat2(-100, bytes(one), -100, bytes(two), syscalls.RENAME_EXCHANGE)
            os.write(first.fileno(), b"first")
            os.write(second.fileno(), b"second")
            (world.path / "dir").mkdir()
            two.rename(world.path / "dir/three")
            (world.path / "dir").rename(world.path / "moved")
            os.write(first.fileno(), b"still")
        assert (world.source / "one").read_text() == "2second"
        assert (world.source / "moved/three").read_text() == "1firststill"

    world.does(story)


def test_a_removed_hard_link_leaves_the_other_name_and_the_handle(place: MakePlace) -> None:
    """A file whose opened name is removed is the same file under its other name."""
    world = place()

    def story() -> None:
        (world.path / "one").write_text("content")
        os.link(world.path / "one", world.path / "two")
        with (world.path / "one").open("r+") as handle:
            (world.path / "one").unlink()
            os.pwrite(handle.fileno(), b"CON", 0)
            assert (world.path / "two").read_text() == "CONtent"
            (world.path / "two").unlink()
            assert os.pread(handle.fileno(), 10, 0) == b"CONtent"

    world.does(story)


def test_the_creator_writes_a_file_that_its_mode_protects(place: MakePlace) -> None:
    """CREATE with mode 0444 or 0 returns a descriptor for writing, which `cp` of a read-only file and
    `git add` need.
    """
    world = place()

    def story() -> None:
        for mode in (0o444, 0o400, 0o000, 0o200):
            path = world.path / f"file-{mode:o}"
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode)
            for _ in range(3):
                os.write(fd, b"content")
            os.pwrite(fd, b"CON", 0)
            assert os.pread(fd, 100, 0) == b"CONtentcontentcontent"
            os.ftruncate(fd, 7)
            os.fsync(fd)
            os.fchmod(fd, mode | 0o400)
            assert path.read_bytes() == b"CONtent"
            os.close(fd)

    world.does(story)


@pytest.mark.parametrize("how", ["fchmod", "chmod", "directory"])
def test_a_handle_outlives_the_right_to_open(place: MakePlace, how: str) -> None:
    """After fchmod 0, or chmod 0 of the file or its directory, open descriptors still read and write."""
    world = place()

    def story() -> None:
        (world.source / how).mkdir()
        (world.source / how / "file").write_text("content")
        path = world.path / how / "file"
        with path.open("r+") as handle:
            if how == "fchmod":
                os.fchmod(handle.fileno(), 0)
            elif how == "chmod":
                path.chmod(0)
            else:
                path.parent.chmod(0)
            os.pwrite(handle.fileno(), b"CON", 0)
            assert os.pread(handle.fileno(), 100, 0) == b"CONtent"
            os.ftruncate(handle.fileno(), 5)
        path.parent.chmod(0o755)
        (world.source / how / "file").chmod(0o644)
        assert (world.source / how / "file").read_text() == "CONte"

    world.does(story)


def test_a_file_without_rights_that_is_removed_stays_usable(place: MakePlace) -> None:
    """Mode 0 and unlink, in either order, while the file is open."""
    world = place()

    def story() -> None:
        for order in ("chmod first", "unlink first"):
            (world.source / "file").write_text("content")
            with (world.path / "file").open("r+") as handle:
                if order == "chmod first":
                    os.fchmod(handle.fileno(), 0)
                    (world.path / "file").unlink()
                else:
                    (world.path / "file").unlink()
                    os.fchmod(handle.fileno(), 0)
                os.pwrite(handle.fileno(), b"CON", 0)
                assert os.pread(handle.fileno(), 100, 0) == b"CONtent"
                os.ftruncate(handle.fileno(), 1)
                assert os.fstat(handle.fileno()).st_size == 1

    world.does(story)


def test_read_only_files_are_copied_and_committed(place: MakePlace) -> None:
    """`cp` of a 0444 file, `cp -a`, `tar`, and `git add` of read-only objects work for every user."""
    world = place()

    def story() -> None:
        (world.source / "file").write_text("content")
        (world.source / "file").chmod(0o444)
        at = world.path
        # A repository that is called .git is protected.
        places = {"GIT_DIR": str(at / "repository"), "GIT_WORK_TREE": str(at / "repo")}
        environment = {**os.environ, **places, "HOME": str(world.source), "GIT_CONFIG_NOSYSTEM": "1"}

        def run(*command: str) -> None:
            subprocess.run(command, cwd=at, check=True, env=environment, capture_output=True)

        run("cp", "file", "copied")
        run("cp", "-a", "file", "archived")
        run("install", "-m", "0444", "file", "installed")
        run("tar", "-cf", "all.tar", "file", "copied")
        (at / "unpacked").mkdir()
        run("tar", "-xf", "all.tar", "-C", "unpacked")
        (at / "repo").mkdir()
        run("git", "init", "-q")
        shutil.copy(at / "file", at / "repo/file")
        run("git", "add", "-A")
        run("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "it")
        run("git", "fsck", "--strict")
        for name in ("copied", "archived", "installed", "unpacked/file"):
            assert (world.source / name).read_text() == "content"
            assert stat.S_IMODE((world.source / name).stat().st_mode) == 0o444

    world.does(story)


def test_a_script_written_through_the_mount_can_be_run_by_its_source_path_soon(place: MakePlace) -> None:
    """An idle descriptor for writing is closed: ETXTBSY by the source's path ends soon, and never occurs in
    the mount.
    """
    world = place()

    def story() -> None:
        program = shutil.which("true")
        assert program
        path = world.path / "program"
        path.write_bytes(Path(program).read_bytes())
        path.chmod(0o755)
        assert subprocess.run([path], check=False).returncode == 0

        def runs() -> bool:
            code = outcome(lambda: subprocess.run([world.source / "program"], check=True).returncode)
            assert code in (0, errno.ETXTBSY)
            return code == 0

        until(runs, "the program can be run below", seconds=10)

    world.does(story)


def _descriptors(world: Place) -> int:
    return len(os.listdir(f"/proc/{world.pid}/fd"))


@pytest.mark.root
@pytest.mark.parametrize("make", ["own_place", "ordinary_place"])
def test_idle_descriptors_are_closed(make: str, request: pytest.FixtureRequest) -> None:
    """After many files and directories were used, the server has as many open descriptors as before."""
    world: Place = request.getfixturevalue(make)()
    before = _descriptors(world)

    def story() -> None:
        for number in range(60):
            directory = world.path / f"dir-{number}"
            directory.mkdir()
            (directory / "file").write_text("content")
            (directory / "file").read_text()
            (directory / "private").write_text("content")
            (directory / "private").chmod(0o600)
            os.listdir(directory)
        for number in range(30):
            shutil.rmtree(world.path / f"dir-{number}")

    world.does(story)
    assert _descriptors(world) > before
    until(lambda: _descriptors(world) <= before, "all descriptors are closed")


def test_more_files_can_be_open_than_the_server_may_open(place: MakePlace) -> None:
    """Twice as many open files as the server may have descriptors are read and written, repeatedly."""
    limit, count = 128, 256
    world = place(limit=limit)

    def story() -> None:
        own = len(os.listdir("/proc/self/fd"))  # inherited from the tests before
        resource.setrlimit(resource.RLIMIT_NOFILE, (own + 2 * count, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        (world.path / "dir").mkdir()
        made = [os.open(world.path / "dir" / str(n), os.O_RDWR | os.O_CREAT, 0o644) for n in range(count)]
        for _ in range(2):
            for number, fd in enumerate(made):
                assert os.write(fd, b"%06d" % number) == 6
        for number, fd in enumerate(made):
            assert os.pread(fd, 100, 0) == b"%06d" % number * 2
            os.fsync(fd)
            os.close(fd)
            assert (world.source / "dir" / str(number)).read_bytes() == b"%06d" % number * 2

    world.does(story)


@pytest.mark.parametrize("mode", [0o644, 0o444], ids=oct)
def test_created_and_closed_files_keep_no_descriptors(place: MakePlace, mode: int) -> None:
    """Many times as many files as the server may have descriptors are created in turn, read-only ones too."""
    world = place(limit=128)

    def story() -> None:
        for number in range(600):
            fd = os.open(world.path / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            os.write(fd, b"content")
            os.close(fd)
        assert len(os.listdir(world.source)) == 600

    world.does(story)


def test_files_removed_while_open_keep_no_descriptors(place: MakePlace) -> None:
    """Many files are unlinked while open, in turn. The descriptor is closed with the file."""
    world = place(limit=128)

    def story() -> None:
        for number in range(600):
            path = world.path / str(number)
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            path.unlink()
            os.write(fd, b"content")
            assert os.pread(fd, 10, 0) == b"content"
            os.close(fd)

    world.does(story)


def test_a_wide_and_deep_tree_needs_no_more_descriptors_than_there_are(place: MakePlace) -> None:
    """400 directories in one, and 300 nested, with 128 descriptors."""
    world = place(limit=128)

    def story() -> None:
        for number in range(400):
            (world.path / f"dir-{number}").mkdir()
        for number in range(400):
            (world.path / f"dir-{number}/file").write_text("content")
        assert sum(len(files) for _, _, files in os.walk(world.path)) == 400
        deep = world.path / "/".join(["d"] * 300)
        deep.mkdir(parents=True)
        (deep / "file").write_text("deep")
        assert (deep / "file").read_text() == "deep"
        os.rename(world.path / "d", world.path / "e")
        subprocess.run(["rm", "-rf", world.path / "e"], check=True)
        os.rename(world.path / "dir-0", world.path / "moved")

    world.does(story)


def test_a_program_runs_from_the_mount_while_its_file_is_replaced(place: MakePlace) -> None:
    """A program that runs from the mount continues after a rename over its file, as installers do it."""
    world = place()

    def story() -> None:
        program = shutil.which("cat")
        assert program
        shutil.copy(program, world.path / "program")
        with subprocess.Popen([world.path / "program"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
            (world.path / "new").write_bytes(b"replaced")
            (world.path / "new").rename(world.path / "program")
            said, _ = running.communicate(b"said to what was replaced")
        assert said == b"said to what was replaced"
        assert (world.source / "program").read_bytes() == b"replaced"

    world.does(story)
