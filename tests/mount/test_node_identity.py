"""Names and identity: the mount shows exactly what the source has, also while other processes change it."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from bonobofs.fuse.fd_cache import RECHECK
from bonobofs.system import syscalls
from tests.support.mount_fixtures import MakePlace, Place, Traffic
from tests.support.users import outcome
from tests.support.wait import until


def _identity(path: Path) -> tuple[int, ...]:
    s = path.lstat()
    return s.st_ino, s.st_mode, s.st_nlink, s.st_uid, s.st_gid, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_blocks


def _fill(top: Path) -> list[str]:
    (top / "sub").mkdir(0o711)
    for number in range(5):
        file = top / "sub" / f"file-{number}"
        file.write_text("x" * number)
        file.chmod(0o640 + number)
        os.utime(file, ns=(number, 1_234_567_890_123_456_789 - number * 10**18))
    os.link(top / "sub/file-0", top / "linked")
    (top / "link").symlink_to("nowhere")
    os.mkfifo(top / "fifo", 0o604)
    return [".", "sub", "linked", "link", "fifo", *(f"sub/file-{number}" for number in range(5))]


def test_number_owner_mode_and_times_are_those_of_the_source_also_after_a_remount(place: MakePlace) -> None:
    """git, make and rsync see no difference between the source, the mount and a later mount."""
    world = place()

    def story() -> list[str]:
        names = _fill(world.source)
        assert [_identity(world.path / name) for name in names] == [_identity(world.source / name) for name in names]
        return names

    names = world.does(story)
    before = world.does(lambda: [_identity(world.path / name) for name in names])
    world.umount()
    again = place()
    assert world.does(lambda: [_identity(again.path / name) for name in names]) == before


def test_git_sees_an_unchanged_tree_after_a_remount(own_place: MakePlace) -> None:
    """An index written through one mount is valid through the next: git hashes nothing again."""
    world = own_place()

    def git(top: Path, *command: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", f"safe.directory={top}"]
        # A repository that is called .git is protected.
        places = {"GIT_DIR": str(top / "repository"), "GIT_WORK_TREE": str(top / "tree")}
        environment = {**os.environ, **places, "HOME": str(world.home), "GIT_CONFIG_NOSYSTEM": "1"}
        return subprocess.check_output(["git", *identity, *command], cwd=top / "tree", env=environment, text=True)

    def story() -> None:
        (world.path / "tree").mkdir()
        git(world.path, "init", "-q")
        for number in range(20):
            (world.path / f"tree/file-{number}").write_text(str(number))
        git(world.path, "add", "-A")
        git(world.path, "commit", "-qm", "all")

    world.does(story)
    world.umount()
    again = own_place()

    def look() -> str:
        return git(again.path, "diff-files", "--name-only") + git(again.path, "ls-files", "--others")

    assert again.does(look) == ""


def test_node_ids_are_never_used_again(traffic: Traffic) -> None:
    """Files that come and go under one name and one inode number are separate nodes."""
    path = traffic.path / "file"
    seen = []
    for _ in range(30):
        path.touch()
        (sent,) = [one for one in traffic.during(path.chmod, 0o600) if one.opcode == "SETATTR"]
        seen.append(sent.node)
        path.unlink()
    assert len(set(seen)) == 30


def test_an_inode_number_that_is_used_again_serves_the_new_file(own_place: MakePlace) -> None:
    """After `rm a; create b` externally, b has its own content, even with a's inode number."""
    world = own_place()

    def story() -> None:
        for number in range(30):
            old, new = f"a-{number}", f"b-{number}"
            (world.source / old).write_text("the old content")
            assert (world.path / old).read_text() == "the old content"
            (world.source / old).unlink()
            (world.source / new).write_text("another, new one")
            assert (world.path / new).read_text() == "another, new one"
            with (world.path / new).open("a") as file:
                file.write(", and more")
            assert (world.source / new).read_text() == "another, new one, and more"

    world.does(story)


@pytest.mark.parametrize("when", ["at once", "later"])
@pytest.mark.parametrize("how", ["removed and made", "renamed over", "renamed away and made"])
def test_a_write_to_a_replaced_file_fails(own_place: MakePlace, how: str, when: str) -> None:
    """When another program replaces an open file, a write fails instead of being lost, and the new file is found."""
    world = own_place()

    def replace(below: Path) -> None:
        if how == "removed and made":
            below.unlink()
            below.write_text("second")
        elif how == "renamed over":
            (world.source / "new").write_text("second")
            (world.source / "new").rename(below)
        else:
            below.rename(world.source / "old")
            below.write_text("second")

    def story() -> None:
        path, below = world.path / "file", world.source / "file"
        path.write_text("first")
        with path.open("r+") as opened:
            os.pwrite(opened.fileno(), b"FIRST", 0)
            replace(below)
            replaced = time.monotonic()
            if when == "later":
                until(lambda: time.monotonic() > replaced + 2 * RECHECK, "the mount would look again")
            until(lambda: outcome(os.pwrite, opened.fileno(), b"FIRST", 0) == errno.ESTALE, "it is seen", seconds=1)
        assert below.read_text() == "second"
        until(lambda: outcome(path.read_text) == "second", "the mount shows the file that is there", seconds=3)
        with path.open("a") as opened:
            opened.write(" and third")
        assert below.read_text() == "second and third"

    world.does(story)


MAKING: Final[dict[str, Callable[[int], object]]] = {
    "create": lambda at: os.close(os.open("new", os.O_CREAT | os.O_WRONLY, dir_fd=at)),
    "mkdir": lambda at: os.mkdir("new", dir_fd=at),
    "mknod": lambda at: os.mkfifo("new", dir_fd=at),
    "symlink": lambda at: os.symlink("target", "new", dir_fd=at),
    "link": lambda at: os.link("file", "new", src_dir_fd=at, dst_dir_fd=at),
    "rename": lambda at: os.rename("file", "new", src_dir_fd=at, dst_dir_fd=at),
    "unlink": lambda at: os.unlink("file", dir_fd=at),
    "rmdir": lambda at: os.rmdir("empty", dir_fd=at),
    "chmod of it": lambda at: os.chmod(at, 0o777),
    "utimens of it": lambda at: os.utime(at, (1, 1)),
    "setxattr of it": lambda at: os.setxattr(at, "user.x", b"x"),
}
"""Changes of an open directory and its entries."""
CHANGING: Final[dict[str, Callable[[int], object]]] = {
    "write": lambda fd: os.pwrite(fd, b"changed", 0),
    "truncate": lambda fd: os.ftruncate(fd, 0),
    "allocate": lambda fd: os.posix_fallocate(fd, 0, 100),
    "chmod": lambda fd: os.chmod(fd, 0o777),
    "utimens": lambda fd: os.utime(fd, (1, 1)),
    "setxattr": lambda fd: os.setxattr(fd, "user.x", b"x"),
}
"""Changes of an open file."""


def _away(world: Place, name: str = "dir") -> tuple[Path, Path]:
    """Return a directory of the source that the mount knows, and a place outside."""
    outside = world.source.parent / "outside"
    outside.mkdir(exist_ok=True)
    inside = world.source / name
    for path in (inside, inside / "empty"):
        path.mkdir()
    (inside / "file").write_text("content")
    for path in (world.path / name / "file", world.path / name / "empty"):
        path.stat()
    os.listdir(world.path / name)
    assert not (world.path / name / "new").exists()
    return inside, outside


def _snapshot(top: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Return the state of a tree without change times, which a move alters too."""
    found = []
    for path in [top, *sorted(top.rglob("*"))]:
        s = path.lstat()
        xattrs = tuple(len(os.getxattr(path, name)) for name in os.listxattr(path))
        found.append((str(path), (s.st_ino, s.st_mode, s.st_nlink, s.st_size, s.st_mtime_ns, *xattrs)))
    return found


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize(
    "how",
    [
        "moved away",
        "replaced by a symlink",
        "replaced by a directory",
        "moved with what is above it",
        "moved by the agent, then with what is above it",
        "exchanged with what is above it",
    ],
)
def test_a_removed_directory_leads_no_change_outside(own_place: MakePlace, how: str, *, changed: bool) -> None:
    """A directory that another program moved out of the source is not changed there through any open descriptor.

    `changed`: the server has verified the directory for changes just before.
    """
    world = own_place()

    def story() -> None:
        (world.source / "above").mkdir()
        inside, outside = _away(world, "above/dir")
        at = os.open(world.path / "above/dir", os.O_RDONLY | os.O_DIRECTORY)
        if how.startswith("moved by"):
            (world.path / "other").mkdir()
            (world.path / "above/dir").rename(world.path / "other/dir")
            inside = world.source / "other/dir"
        if changed:
            for name in ("first", "second"):
                os.close(os.open(name, os.O_CREAT, dir_fd=at))
        if how.startswith("exchanged"):
            (outside / "above").mkdir()
            syscalls.renameat2(
                -100, os.fsencode(inside.parent), -100, os.fsencode(outside / "above"), syscalls.RENAME_EXCHANGE
            )
        elif how.endswith("with what is above it"):
            inside.parent.rename(outside / "above")
            inside.parent.symlink_to(outside / "above")
        else:
            inside.rename(outside / "dir")
        if how == "replaced by a symlink":
            inside.symlink_to(outside / "dir")
        if how == "replaced by a directory":
            inside.mkdir()
        before = _snapshot(outside)
        for what, make in MAKING.items():
            assert (what, outcome(make, at)) == (what, errno.ESTALE) or outcome(make, at) == errno.ENOENT, what
            assert _snapshot(outside) == before, what
        os.close(at)

    world.does(story)


def test_no_change_follows_a_planted_symlink(own_place: MakePlace) -> None:
    """If a file is replaced by a symlink out of the source, no change reaches the symlink's target."""
    world = own_place()

    def story(what: str) -> object:
        inside, outside = _away(world, f"dir-{what}")
        (outside / "victim").write_text("the victim's content")
        fd = os.open(world.path / inside.name / "file", os.O_RDWR)
        (inside / "file").unlink()
        (inside / "file").symlink_to(outside / "victim")
        before = _snapshot(outside)
        code = outcome(CHANGING[what], fd)
        assert _snapshot(outside) == before, what
        shutil.rmtree(outside)
        shutil.rmtree(inside)
        return code

    found = {what: world.does(story, what) for what in CHANGING}
    assert {what: code for what, code in found.items() if code not in (errno.ESTALE, errno.ENOENT)} == {}


def test_no_write_reaches_a_file_whose_directory_was_moved_out(own_place: MakePlace) -> None:
    """A file whose directory was moved out of the source is no longer changed, as soon as the move is detectable."""
    world = own_place()

    def story(what: str) -> None:
        inside, outside = _away(world, f"dir-{what}")
        fd = os.open(world.path / inside.name / "file", os.O_RDWR)
        os.pread(fd, 10, 0)
        inside.rename(outside / "dir")
        moved = time.monotonic()
        # Names are trusted for two milliseconds, so the first changes may reach a file that was there just before.
        until(lambda: time.monotonic() > moved + 4 * RECHECK, "no name is believed any more")
        before = _snapshot(outside)
        for change in (CHANGING[what], *CHANGING.values()):
            assert outcome(change, fd) in (errno.ESTALE, errno.ENOENT)
        assert _snapshot(outside) == before
        shutil.rmtree(outside)

    for what in CHANGING:
        world.does(story, what)


def test_reads_and_writes_do_not_follow_a_planted_symlink(own_place: MakePlace) -> None:
    """No content comes in from outside the source, and none goes out."""
    world = own_place()

    def story() -> None:
        victim = world.source.parent / "victim"
        victim.write_text("outside")
        (world.source / "file").write_text("inside")
        (world.path / "file").stat()
        opened = os.open(world.path / "file", os.O_RDWR)
        (world.source / "file").unlink()
        (world.source / "file").symlink_to(victim)
        # The server may have the removed file open; then it is read and written as on a bare directory.
        assert outcome(os.pread, opened, 100, 0) in (b"inside", errno.ESTALE)
        assert outcome(os.write, opened, b"changed") in (7, errno.ESTALE)
        os.close(opened)
        assert victim.read_text() == "outside"

    world.does(story)


def test_a_fifo_in_place_of_a_file_blocks_no_request(place: MakePlace) -> None:
    """Opens in the source never wait. A file replaced by a FIFO is an error, and the mount serves on."""
    world = place()

    def story() -> None:
        for name in ("file", "other"):
            (world.source / name).write_text("content")
        reading, writing = (os.open(world.path / "file", flags) for flags in (os.O_RDONLY, os.O_WRONLY))
        (world.source / "file").unlink()
        os.mkfifo(world.source / "file")
        assert outcome(os.pread, reading, 10, 0) in (b"content", errno.ESTALE)
        assert outcome(os.pwrite, writing, b"new", 0) in (3, errno.ESTALE)
        assert (world.path / "other").read_text() == "content"
        for fd in (reading, writing):
            os.close(fd)

    world.does(story)


def test_a_directory_that_moves_within_the_source_is_found_again(own_place: MakePlace) -> None:
    """After a move of a directory inside the source by another program, its new name works and its old one is gone."""
    world = own_place()

    def story() -> None:
        (world.source / "dir").mkdir()
        (world.source / "dir/file").write_text("content")
        (world.path / "dir/file").read_text()
        (world.source / "dir").rename(world.source / "moved")
        assert (world.path / "moved/file").read_text() == "content"
        (world.path / "moved/new").write_text("new")
        assert (world.source / "moved/new").read_text() == "new"

    world.does(story)


def test_a_source_that_is_itself_moved_is_still_served(own_place: MakePlace) -> None:
    """The mount shows a directory, not its path. Moved as a whole, it still serves, and changes reach it."""
    world = own_place()

    def story() -> None:
        (world.path / "dir").mkdir()
        (world.path / "dir/file").write_text("content")
        moved = world.source.parent / "moved"
        world.source.rename(moved)
        (world.path / "dir/new").write_text("new")
        (world.path / "dir/file").rename(world.path / "file")
        assert sorted(os.listdir(moved)) == ["dir", "file"]
        assert (moved / "dir/new").read_text() == "new"
        moved.rename(world.source)

    world.does(story)


def test_all_names_of_a_hard_link_are_one_file(own_place: MakePlace) -> None:
    """Hard links are one node: a write under one name is read under the other, cached pages included."""
    world = own_place()

    def story() -> None:
        (world.source / "one").write_text("first")
        os.link(world.source / "one", world.source / "two")
        one, two = world.path / "one", world.path / "two"
        assert one.read_text() == two.read_text() == "first"
        assert one.stat().st_ino == two.stat().st_ino
        one.write_text("second")
        assert two.read_text() == "second"
        two.chmod(0o600)
        assert one.stat().st_mode & 0o777 == 0o600
        one.unlink()
        assert two.read_text() == "second"
        assert two.stat().st_nlink == 1

    world.does(story)


def test_a_tree_deeper_than_path_max_can_be_used(own_place: MakePlace) -> None:
    """Directories whose paths exceed PATH_MAX are created, filled, listed, renamed in and removed from inside."""
    world = own_place()
    name, depth = "d" * 200, 40

    def story() -> None:
        os.chdir(world.path)
        for _ in range(depth):
            os.mkdir(name)
            os.chdir(name)
        with open("file", "w") as file:
            file.write("deep")
        os.rename("file", "moved")
        os.symlink("moved", "link")
        os.link("moved", "linked")
        os.setxattr("moved", "user.mark", b"here")
        os.chmod("moved", 0o600)
        assert sorted(os.listdir(".")) == ["link", "linked", "moved"]
        with open("moved", "a") as file:
            file.write(" down")
        os.chdir(world.source)
        for _ in range(depth):
            os.chdir(name)
        with open("moved") as file:
            assert file.read() == "deep down"
        assert os.readlink("link") == "moved"
        os.chdir(world.path)
        subprocess.run(["rm", "-rf", name], check=True)
        assert os.listdir(world.source) == []

    world.does(story)


def test_names_of_255_bytes_and_any_bytes_are_names(own_place: MakePlace) -> None:
    """The mount accepts exactly the names that the file system below accepts."""
    world = own_place()
    names = [b"n" * 255, bytes(range(1, 47)), bytes(range(48, 256)), b"\xff" * 255, b"-", b"a..b", b" ", b"\\040"]

    def story() -> None:
        for name in names:
            path = os.path.join(bytes(world.path), name)
            with open(path, "wb") as file:
                file.write(name)
            with open(os.path.join(bytes(world.source), name), "rb") as file:
                assert file.read() == name
            os.rename(path, path[:-1] + b"r" if len(path) > 1 else path)
            os.rename(path[:-1] + b"r", path)
        assert sorted(os.listdir(bytes(world.path))) == sorted(names)
        assert outcome((world.path / ("n" * 256)).touch) == errno.ENAMETOOLONG

    world.does(story)


@pytest.fixture
def covering(source: Path) -> Iterator[Callable[[Path, str], None]]:
    """covering(path, how) mounts a tmpfs, or the directory next to the source, on a directory of the source."""
    covered: list[Path] = []
    beside = source.parent / "beside"
    beside.mkdir()
    (beside / "secret").write_text("of another place")

    def cover(path: Path, how: str) -> None:
        what = ["-t", "tmpfs", "none"] if how == "tmpfs" else ["--bind", str(beside)]
        subprocess.run(["mount", *what, path], check=True)
        covered.append(path)
        if how == "tmpfs":
            (path / "secret").write_text("of another file system")

    yield cover
    for path in reversed(covered):
        subprocess.run(["umount", path], check=True)


@pytest.mark.root
@pytest.mark.parametrize("how", ["tmpfs", "bind"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_mount_below_the_source_is_shown_empty(
    own_place: MakePlace, source: Path, covering: Callable[[Path, str], None], how: str, when: str
) -> None:
    """Neither another file system nor a bind mount is reached or changed through the mount."""
    (source / "covered").mkdir()
    (source / "covered" / "own").write_text("covered by what is mounted on it")
    if when == "before":
        covering(source / "covered", how)
    world = own_place()
    if when == "after":
        os.stat(world.path / "covered")
        covering(source / "covered", how)
    covered = world.path / "covered"
    seen: dict[str, Any] = {
        "listed": outcome(os.listdir, covered),
        "read": outcome((covered / "secret").read_text),
        "created": outcome((covered / "new").touch),
        "made": outcome((covered / "dir").mkdir),
        "removed": outcome((covered / "secret").unlink),
        "written": outcome((covered / "secret").write_text, "changed"),
        "chmod": outcome((covered / "secret").chmod, 0o600),
    }
    assert seen["listed"] == [] or (when == "after" and seen["listed"] == errno.ESTALE)
    assert os.listdir(world.path) == ["covered"]
    errors = {what: code for what, code in seen.items() if what != "listed"}
    assert {what: code for what, code in errors.items() if not isinstance(code, int)} == {}
    assert os.listdir(source / "covered") == ["secret"]
    assert (source / "covered" / "secret").read_text().startswith("of another")


@pytest.mark.parametrize("how", ["removed and made again", "moved and moved back"])
def test_a_directory_below_a_moved_one_is_not_changed(own_place: MakePlace, how: str) -> None:
    """The directory above was replaced, or was elsewhere, just before the last change below it."""
    world = own_place()

    def story() -> None:
        above, other = world.source / "above", world.source / "other"
        (above / "dir").mkdir(parents=True)
        other.mkdir()
        descriptors = [os.open(world.path / path, os.O_RDONLY | os.O_DIRECTORY) for path in ("above", "above/dir")]
        if how == "removed and made again":
            os.close(os.open("first", os.O_CREAT, dir_fd=descriptors[0]))
            (above / "dir").rename(other / "dir")
            shutil.rmtree(above)
            above.mkdir()
            (other / "dir").rename(above / "dir")
        else:
            above.rename(other / "above")
            assert (world.path / "other/above").is_dir()
            (other / "above").rename(above)
        assert outcome(lambda: os.close(os.open("second", os.O_CREAT, dir_fd=descriptors[1]))) in (None, errno.ESTALE)
        above.rename(other / "above")
        assert outcome(lambda: os.open("third", os.O_CREAT, dir_fd=descriptors[1])) == errno.ESTALE
        assert "third" not in os.listdir(other / "above/dir")
        for descriptor in descriptors:
            os.close(descriptor)

    world.does(story)


@pytest.mark.root
@pytest.mark.parametrize("how", ["tmpfs", "bind"])
def test_a_mount_above_a_changed_directory_ends_its_changes(
    own_place: MakePlace, source: Path, covering: Callable[[Path, str], None], how: str
) -> None:
    """The server has verified the directory for changes just before."""
    (source / "covered/dir").mkdir(parents=True)
    below = os.open(source / "covered/dir", os.O_RDONLY)
    world = own_place()
    at = os.open(world.path / "covered/dir", os.O_RDONLY)
    for name in ("first", "second"):
        os.close(os.open(name, os.O_CREAT, dir_fd=at))
    covering(source / "covered", how)
    assert outcome(lambda: os.open("third", os.O_CREAT, dir_fd=at)) in (errno.ESTALE, errno.EXDEV, errno.ENOENT)
    assert sorted(os.listdir(below)) == ["first", "second"]
    os.close(at)
    os.close(below)


@pytest.mark.root
def test_a_file_that_is_a_mountpoint_below_is_refused(own_place: MakePlace, source: Path, tmp_path: Path) -> None:
    """A file bound over a file of the source is neither read nor written through the mount."""
    (tmp_path / "secret").write_text("of another place")
    (source / "file").write_text("own")
    subprocess.run(["mount", "--bind", tmp_path / "secret", source / "file"], check=True)
    try:
        world = own_place()
        assert isinstance(outcome((world.path / "file").write_text, "changed"), int)
        assert isinstance(outcome((world.path / "file").chmod, 0o600), int)
        assert outcome((world.path / "file").read_text) != "of another place"
        assert (tmp_path / "secret").read_text() == "of another place"
    finally:
        subprocess.run(["umount", source / "file"], check=True)


def test_statfs_shows_the_source(own_place: MakePlace) -> None:
    """df of the mount is df of the source."""
    world = own_place()

    def story() -> None:
        here, there = os.statvfs(world.path), os.statvfs(world.source)
        for name in ("f_blocks", "f_files", "f_bsize", "f_frsize", "f_namemax"):
            assert getattr(here, name) == getattr(there, name), name

    world.does(story)


def test_two_mounts_of_one_source_show_each_others_new_files(own_place: MakePlace) -> None:
    """One agent finds what the other creates."""
    one = own_place()
    two = own_place(source=one.source)

    def story() -> None:
        for number in itertools.islice(itertools.count(), 5):
            (one.path / f"file-{number}").write_text(str(number))
            assert (two.path / f"file-{number}").read_text() == str(number)

    one.does(story)
