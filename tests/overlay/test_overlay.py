"""Scratch paths: any change is permitted, shown over the source, never written to it, and dropped with the session."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.support.mount_fixtures import MakePlace, Place
from tests.support.syscalls import FALLOC_KEEP_SIZE, RENAME_EXCHANGE, RENAME_NOREPLACE, fallocate, renameat2
from tests.support.trees import snapshot
from tests.support.users import outcome
from tests.support.wait import until
from tests.support.world import Mounted

POLICY: Final = """
default = "deny"
[[protect]]
paths = ["closed/", "build/closed/"]
[[scratch]]
paths = ["build/", "**/cache/", "**/*.pyc", "new"]
max_total = "1MB"
[[scratch]]
paths = ["free/"]
[[rule]]
name = "notes"
paths = ["notes/", "more/"]
"""


def _fill(source: Path) -> None:
    (source / "build/deep").mkdir(parents=True)
    (source / "build/old").write_text("old")
    (source / "build/deep/file").write_text("deep")
    (source / "build/link").symlink_to("old")
    (source / "notes/cache").mkdir(parents=True)
    (source / "notes/cache/a").write_text("a")
    (source / "notes/a.md").write_text("text")
    (source / "closed").mkdir()


FOR_BOTH: Final = pytest.mark.parametrize("world", ["own_place", "ordinary_place"], indirect=True)
"""The user of the server decides what it may copy."""


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Place:
    make: MakePlace = request.getfixturevalue(getattr(request, "param", "own_place"))
    made = make(policy=POLICY)
    made.does(_fill, made.source)
    return made


ExpectUnchanged = Callable[[Callable[[], None]], None]


@pytest.fixture
def expect_unchanged(world: Place) -> ExpectUnchanged:
    """Run a story, and verify that the source is unchanged."""

    def run(story: Callable[[], None]) -> None:
        before = snapshot(world.source)
        world.does(story)
        assert snapshot(world.source) == before

    return run


def _held(world: Place) -> set[tuple[str, str]]:
    lines = (world.path / ".bonobofs/scratch").read_text().splitlines()
    return {(kind, path) for kind, _, path in (line.split("\t") for line in lines)}


@FOR_BOTH
def test_new_scratch_files_are_created_and_changed(world: Place, expect_unchanged: ExpectUnchanged) -> None:
    """Files, directories, symlinks, FIFOs and hard links work as on any file system."""

    def story() -> None:
        top = world.path / "build"
        (top / "d/e").mkdir(parents=True)
        (top / "d/e/file").write_text("text")
        os.link(top / "d/e/file", top / "linked")
        assert (top / "linked").stat().st_nlink == 2
        (top / "linked").write_text("more text")
        assert (top / "d/e/file").read_text() == "more text"
        (top / "s").symlink_to("d/e/file")
        assert (top / "s").read_text() == "more text"
        os.mkfifo(top / "fifo")
        assert stat.S_ISFIFO((top / "fifo").stat().st_mode)
        os.chmod(top / "d/e/file", 0o4755)
        os.utime(top / "d", ns=(1_000_000_001, 2_000_000_002))
        os.setxattr(top / "d/e/file", "user.mark", b"1")
        assert (top / "d").stat().st_mtime_ns == 2_000_000_002
        assert stat.S_IMODE((top / "linked").stat().st_mode) == 0o4755
        assert os.getxattr(top / "linked", "user.mark") == b"1"
        assert sorted(os.listdir(top)) == ["d", "deep", "fifo", "link", "linked", "old", "s"]
        assert {entry.name for entry in os.scandir(top) if entry.is_dir()} == {"d", "deep"}
        (world.path / "new").write_text("n")
        assert sorted(os.listdir(world.path)) == ["build", "closed", "new", "notes"]
        assert ("scratch", "build/d/e/file") in _held(world)
        shutil.rmtree(top / "d")
        assert (top / "linked").read_text() == "more text"
        assert sorted(os.listdir(top)) == ["deep", "fifo", "link", "linked", "old", "s"]

    expect_unchanged(story)


@FOR_BOTH
def test_a_file_of_the_source_is_copied_up_before_a_change(world: Place, expect_unchanged: ExpectUnchanged) -> None:
    """Writes, truncations, appends and attributes: the mount shows the change, and the source does not have it."""

    def story() -> None:
        old = world.path / "build/old"
        with old.open("r+") as file:
            assert file.read() == "old"
            file.seek(0)
            file.write("new")
            file.flush()
            assert os.pread(file.fileno(), 10, 0) == b"new"
        assert old.read_text() == "new"
        with old.open("a") as file:
            file.write(" and more")
        assert old.read_text() == "new and more"
        deep = world.path / "build/deep/file"
        deep.write_text("x")
        assert deep.read_text() == "x"
        os.chmod(world.path / "notes/cache/a", 0o700)
        os.setxattr(world.path / "notes/cache/a", "user.mark", b"1")
        os.utime(world.path / "notes/cache/a", ns=(1, 2_000_000_002))
        st = (world.path / "notes/cache/a").stat()
        assert (stat.S_IMODE(st.st_mode), st.st_mtime_ns, st.st_size) == (0o700, 2_000_000_002, 1)
        ino = (world.path / "build/deep").stat().st_ino
        os.chmod(world.path / "build/deep", 0o700)
        os.setxattr(world.path / "build/deep", "user.mark", b"1")
        assert stat.S_IMODE((world.path / "build/deep").stat().st_mode) == 0o700
        assert (world.path / "build/deep").stat().st_ino == ino
        assert os.getxattr(world.path / "build/deep", "user.mark") == b"1"
        assert os.listdir(world.path / "build/deep") == ["file"]
        os.utime(world.path / "build/link", ns=(1, 2_000_000_002), follow_symlinks=False)
        assert (world.path / "build/link").lstat().st_mtime_ns == 2_000_000_002
        assert (world.path / "build/link").read_text() == "new and more"

    expect_unchanged(story)


@FOR_BOTH
def test_a_name_of_the_source_can_be_removed_and_created_again(world: Place, expect_unchanged: ExpectUnchanged) -> None:
    """A removed name is hidden, also in listings. A new directory in its place shows nothing of the old one."""

    def story() -> None:
        top = world.path / "build"
        with (top / "old").open() as file:
            (top / "old").unlink()
            assert not (top / "old").exists()
            assert sorted(os.listdir(top)) == ["deep", "link"]
            assert file.read() == "old"
        (top / "old").mkdir()
        (top / "old/inner").write_text("x")
        assert sorted(os.listdir(top)) == ["deep", "link", "old"]
        shutil.rmtree(top / "old")
        assert outcome((top / "old").stat) == errno.ENOENT
        assert outcome(os.rmdir, top / "deep") == errno.ENOTEMPTY
        shutil.rmtree(top / "deep")
        assert outcome(os.rmdir, top / "deep") == errno.ENOENT
        assert os.listdir(top) == ["link"]
        (top / "deep").mkdir()
        assert os.listdir(top / "deep") == []
        (top / "deep/file").write_text("another")
        assert (top / "deep/file").read_text() == "another"
        assert _held(world) >= {("removed", "build/old"), ("scratch", "build/deep"), ("scratch", "build/deep/file")}
        shutil.rmtree(world.path / "notes/cache")
        assert os.listdir(world.path / "notes") == ["a.md"]
        assert outcome(os.rmdir, world.path / "notes") == errno.ENOTEMPTY

    expect_unchanged(story)


def test_a_removed_file_that_is_open_can_still_be_written(world: Place, expect_unchanged: ExpectUnchanged) -> None:
    """The open file is written on its own: the source is unchanged, and no name reappears."""

    def story() -> None:
        path = world.path / "build/old"
        with path.open("r+b", buffering=0) as file:
            path.unlink()
            assert file.write(b"NEW") == 3
            assert os.pread(file.fileno(), 10, 0) == b"NEW"
            assert not path.exists()
            path.write_text("another")
            file.write(b" and more")
            assert os.pread(file.fileno(), 20, 0) == b"NEW and more"
        assert path.read_text() == "another"

    expect_unchanged(story)


@FOR_BOTH
def test_renames_within_scratch(world: Place, expect_unchanged: ExpectUnchanged) -> None:
    """Files of both layers over files of both layers; upper directories; RENAME_EXCHANGE and RENAME_NOREPLACE."""

    def story() -> None:
        top = world.path / "build"
        (top / "x").write_text("x")
        (top / "x").rename(top / "old")
        assert (top / "old").read_text() == "x"
        (top / "old").rename(top / "deep/file")
        assert ((top / "deep/file").read_text(), (top / "old").exists()) == ("x", False)
        (world.path / "notes/cache/a").rename(top / "a")
        assert ((top / "a").read_text(), os.listdir(world.path / "notes/cache")) == ("a", [])
        (top / "b").write_text("b")
        assert outcome(renameat2, top / "a", top / "b", RENAME_NOREPLACE) == errno.EEXIST
        renameat2(top / "a", top / "b", RENAME_EXCHANGE)
        assert ((top / "a").read_text(), (top / "b").read_text()) == ("b", "a")
        (top / "d").mkdir()
        (top / "d/f").write_text("f")
        with (top / "d/f").open("a") as file:
            (top / "d").rename(top / "e")
            file.write("g")
        assert (top / "e/f").read_text() == "fg"
        (top / "empty").mkdir()
        (top / "e").rename(top / "empty")
        assert (top / "empty/f").read_text() == "fg"
        assert outcome(os.rename, top / "empty", top / "deep") == errno.ENOTEMPTY
        (top / "deep/file").unlink()
        (top / "empty").rename(top / "deep")
        assert os.listdir(top / "deep") == ["f"]
        (top / "link").rename(top / "moved")
        assert os.readlink(top / "moved") == "old"
        assert sorted(os.listdir(top)) == ["a", "b", "deep", "moved"]

    expect_unchanged(story)


def test_a_large_source_file_and_a_scratch_directory_are_exchanged(
    world: Place, expect_unchanged: ExpectUnchanged
) -> None:
    content = os.urandom(3 << 20)

    def prepare(source: Path) -> None:
        (source / "free").mkdir()
        (source / "free/large").write_bytes(content)

    def story() -> None:
        top = world.path / "free"
        (top / "directory").mkdir()
        renameat2(top / "large", top / "directory", RENAME_EXCHANGE)
        assert (top / "large").is_dir()
        assert (top / "directory").read_bytes() == content

    world.does(prepare, world.source)
    expect_unchanged(story)


def test_no_rename_crosses_the_layers(world: Place, expect_unchanged: ExpectUnchanged) -> None:
    """Rename, link and exchange between source and scratch fail with EXDEV; so does a move of a directory of the
    source.
    """

    def story() -> None:
        note, built = world.path / "notes/a.md", world.path / "build/x"
        built.write_text("x")
        for make in (os.rename, os.link):
            assert outcome(make, note, world.path / "build/y") == errno.EXDEV
            assert outcome(make, built, world.path / "notes/y") == errno.EXDEV
            assert outcome(make, world.path / "build/old", world.path / "notes/y") == errno.EXDEV
        assert outcome(renameat2, note, built, RENAME_EXCHANGE) == errno.EXDEV
        assert outcome(os.rename, world.path / "build/deep", world.path / "build/deeper") == errno.EXDEV
        assert outcome(os.rename, world.path / "notes", world.path / "build/notes") in (errno.EXDEV, errno.EACCES)
        shutil.move(built, world.path / "build/deep/x")
        assert (world.path / "build/deep/x").read_text() == "x"
        assert note.read_text() == "text"

    expect_unchanged(story)


def test_protection_precedes_scratch(world: Place, expect_unchanged: ExpectUnchanged) -> None:
    """Protection holds below a scratch path, and no symlink or device bypasses it."""

    def story() -> None:
        top = world.path / "build"
        assert outcome(os.mkdir, top / "closed") == errno.EROFS
        (top / "d").mkdir()
        (top / "d/f").write_text("f")
        assert outcome(os.rename, top / "d", top / "closed") == errno.EROFS
        assert outcome(os.symlink, "../closed/x", top / "l") == errno.EPERM
        assert outcome(os.symlink, "closed/x", top / "l") == errno.EPERM
        (top / "d/l").symlink_to("../../f")
        assert outcome(os.rename, top / "d/l", world.path / "notes/l") == errno.EPERM
        assert outcome(os.mknod, top / "dev", 0o600 | stat.S_IFCHR, os.makedev(1, 3)) == errno.EPERM

    expect_unchanged(story)


def _link_itself(old: Path, new: Path) -> None:
    os.link(old, new, follow_symlinks=False)


def test_a_scratch_symlink_may_lead_anywhere_and_is_judged_when_it_leaves(
    world: Place, expect_unchanged: ExpectUnchanged
) -> None:
    """A virtual environment links to the interpreter. No such link reaches the source in any way."""

    def story() -> None:
        top = world.path / "build"
        for name, target in (("sh", "/bin/sh"), ("up", "../../../x"), ("back", "deep/../old")):
            (top / name).symlink_to(target)
            assert os.readlink(top / name) == target
            assert outcome(os.rename, top / name, world.path / "notes/l") == errno.EPERM
            assert outcome(_link_itself, top / name, world.path / "notes/l") == errno.EPERM
            assert outcome(shutil.move, top / name, world.path / "notes/l") == errno.EPERM
        assert subprocess.run([top / "sh", "-c", ":"], check=False).returncode == 0
        (top / "tree/deep").mkdir(parents=True)
        (top / "tree/deep/l").symlink_to("../../../../x")
        assert outcome(os.rename, top / "tree", world.path / "notes/tree") == errno.EPERM
        assert not os.path.lexists(world.path / "notes/tree")

    expect_unchanged(story)


def test_a_symlink_in_scratch_moves_with_its_directory(world: Place) -> None:
    """It stays scratch, so it may lead anywhere except to protected paths."""

    def story() -> None:
        below = world.path / "notes/a/b"
        (below / "cache").mkdir(parents=True)
        (below / "cache/l").symlink_to("../../../../outside")
        os.rename(below, world.path / "notes/b")
        assert os.readlink(world.path / "notes/b/cache/l") == "../../../../outside"
        (world.path / "notes/b/cache/m").symlink_to("../../../x/closed")
        (world.path / "more").mkdir()
        assert outcome(os.rename, world.path / "notes/b", world.path / "more/b") is None
        (world.path / "more/b/cache/n").symlink_to("../../../../closed")
        assert outcome(os.rename, world.path / "more/b", world.path / "notes/x/b") == errno.ENOENT
        (world.path / "notes/x").mkdir()
        assert outcome(os.rename, world.path / "more/b", world.path / "notes/x/b") == errno.EPERM

    world.does(story)
    assert not list(world.source.rglob("l"))


def test_a_move_lets_no_symlink_of_the_source_lead_out(world: Place) -> None:
    def prepare(source: Path) -> None:
        (source / "notes/a/b/cache").mkdir(parents=True)
        (source / "notes/a/b/cache/python").symlink_to("/bin/sh")
        (source / "notes/a/c/cache").mkdir(parents=True)
        (source / "notes/a/c/cache/l").symlink_to("../../../../new")

    def story() -> None:
        os.rename(world.path / "notes/a/b", world.path / "notes/b")
        assert outcome(os.rename, world.path / "notes/a/c", world.path / "notes/c") == errno.EPERM

    world.does(prepare, world.source)
    world.does(story)


def test_the_scratch_quota_is_enforced(world: Place, expect_unchanged: ExpectUnchanged) -> None:
    """The quota covers writes, sparse files, allocation, copies, copy-up and renames."""

    def story() -> None:
        top = world.path / "build"
        (top / "half").write_bytes(b"x" * 500_000)
        (top / "file").write_bytes(b"x" * 491_808)  # each name takes 4 KiB
        with (top / "file").open("r+b", buffering=0) as file:
            fd = file.fileno()
            assert outcome(os.pwrite, fd, b"x", 491_808) == errno.EFBIG
            assert outcome(os.ftruncate, fd, 491_809) == errno.EFBIG
            assert outcome(os.posix_fallocate, fd, 0, 491_809) == errno.EFBIG
            assert outcome(fallocate, fd, FALLOC_KEEP_SIZE, 0, 600_000) == errno.EFBIG
            with (top / "half").open("rb") as half:
                assert outcome(os.copy_file_range, half.fileno(), fd, 10, 0, 491_808) == errno.EFBIG
            assert os.pwrite(fd, b"y" * 1000, 0) == 1000
            (top / "half").unlink()
            file.truncate(0)
            assert outcome(os.ftruncate, fd, 995_905) == errno.EFBIG
            assert outcome(fallocate, fd, FALLOC_KEEP_SIZE, 0, 1_000) == errno.EOPNOTSUPP
            until(lambda: outcome(os.ftruncate, fd, 995_904) is None, "what was removed is forgotten")
            assert outcome((top / "other").write_bytes, b"x") == errno.EFBIG
            assert outcome((top / "old").write_bytes, b"x") == errno.EFBIG
            (top / "file").unlink()
            assert outcome((top / "other").write_bytes, b"x") == errno.EFBIG
        # A removed file counts until the kernel reports that no program has it open.
        until(lambda: outcome((top / "other").write_bytes, b"x" * 995_000) == 995_000, "there is room again")
        (world.path / "free").mkdir()
        (world.path / "free/large").write_bytes(b"x" * 2_000_000)
        assert outcome(os.rename, world.path / "free/large", top / "large") == errno.EFBIG
        (top / "other").rename(world.path / "free/other")
        (top / "another").write_bytes(b"x" * 995_000)

    expect_unchanged(story)


def test_upper_directories_move_with_their_directory(world: Place) -> None:
    """After the rename, the scratch files appear at the new path, if that is scratch too."""

    def story() -> None:
        (world.path / "notes/d").mkdir()
        (world.path / "notes/d/x.pyc").write_text("x")
        (world.path / "notes/d/cache").mkdir()
        (world.path / "notes/d/cache/y").write_text("y")
        os.rename(world.path / "notes/d", world.path / "notes/e")
        assert (world.path / "notes/e/x.pyc").read_text() == "x"
        assert sorted(os.listdir(world.path / "notes/e")) == ["cache", "x.pyc"]
        (world.path / "notes/d").mkdir()
        assert os.listdir(world.path / "notes/d") == []
        assert outcome(os.rmdir, world.path / "notes/e") == errno.ENOTEMPTY
        assert outcome(os.rename, world.path / "notes/d", world.path / "notes/e") == errno.ENOTEMPTY
        os.rename(world.path / "notes/e", world.path / "notes/d")
        assert (world.path / "notes/d/cache/y").read_text() == "y"
        shutil.rmtree(world.path / "notes/d")
        (world.path / "notes/d").mkdir()
        assert os.listdir(world.path / "notes/d") == []
        assert sorted(os.listdir(world.source / "notes")) == ["a.md", "cache", "d"]

    world.does(story)


NESTED: Final = """
default = "deny"
[[scratch]]
paths = ["nested/cache/", "**/own/"]
[[rule]]
name = "nested"
paths = ["nested/", "other/"]
suffixes = [".md"]
[[rule]]
name = "work"
paths = ["work/"]
"""


def test_no_directory_brings_a_file_of_the_source_to_a_scratch_path(own_place: MakePlace) -> None:
    """There the rules would not judge it. `mv` copies it into scratch. What the source has in scratch moves along."""
    world = own_place(policy=NESTED)

    def story() -> None:
        for name in ("work/n/cache", "work/e/cache", "work/s/cache", "nested/dir/own", "other"):
            (world.source / name).mkdir(parents=True)
        (world.source / "work/n/cache/evil.sh").write_text("#!/bin/sh")
        (world.source / "work/s/cache/link").symlink_to("../file")
        (world.source / "nested/dir/own/run.sh").write_text("of the source")
        for name in ("work/n", "work/e", "work/s"):
            os.rename(world.path / name, world.path / "work/moved")
            os.rename(world.path / "work/moved", world.path / name)
            (world.path / "nested").rename(world.path / "other/nested")
            assert outcome(os.rename, world.path / name, world.path / "nested") == errno.EXDEV, name
            os.mkdir(world.path / "nested")
            assert outcome(renameat2, world.path / "nested", world.path / name, RENAME_EXCHANGE) == errno.EXDEV, name
            os.rmdir(world.path / "nested")
            (world.path / "other/nested").rename(world.path / "nested")
        assert (world.source / "nested/dir/own/run.sh").read_text() == "of the source"
        shutil.rmtree(world.path / "nested/dir/own")
        (world.path / "work/n/a.md").write_text("text")
        subprocess.run(["mv", world.path / "work/n/cache", world.path / "nested/cache"], check=True)
        assert (world.path / "nested/cache/evil.sh").read_text() == "#!/bin/sh"
        assert sorted(os.listdir(world.source / "nested")) == ["dir"]
        assert os.listdir(world.source / "work/n") == ["a.md"]

    world.does(story)


def test_directories_that_are_removed_behind_the_mount(world: Place) -> None:
    """Their upper directories do not affect new directories in their place."""

    def story() -> None:
        top = world.path / "build"
        (top / "deep/mine").write_text("mine")
        (world.path / "notes/cache/mine").write_text("mine")
        shutil.rmtree(world.source / "build/deep")
        shutil.rmtree(world.source / "notes/cache")
        until(lambda: not (top / "deep").exists() and not (world.path / "notes/cache").exists(), "it is seen")
        (top / "deep").mkdir()
        assert os.listdir(top / "deep") == []
        (top / "other").mkdir()
        (top / "other/file").write_text("x")
        (top / "other").rename(world.path / "notes/cache")
        assert os.listdir(world.path / "notes/cache") == ["file"]
        assert sorted(os.listdir(top)) == ["deep", "link", "old"]
        assert os.listdir(world.source / "notes") == ["a.md"]

    world.does(story)


def test_listings_of_both_layers_show_each_name_once(world: Place) -> None:
    """For any number of names, and while they change."""

    def story() -> None:
        top = world.path / "free/many"
        (world.source / "free/many").mkdir(parents=True)
        below = {f"{number:04}-{'x' * 80}" for number in range(1000)}
        for name in below:
            (world.source / "free/many" / name).touch()
        gone = {name for name in below if int(name[:4]) % 3 == 0}
        changed = {name for name in below if int(name[:4]) % 3 == 1}
        above = {f"{number:04}-{'y' * 80}" for number in range(1000)}
        for name in gone:
            (top / name).unlink()
        for name in changed:
            (top / name).write_text("changed")
        for name in above:
            (top / name).touch()
        shown = (below - gone) | above
        assert sorted(os.listdir(top)) == sorted(shown)
        with os.scandir(top) as entries:
            sizes = {entry.name: entry.stat().st_size for entry in entries}
        assert {name for name, size in sizes.items() if size} == changed
        seen = []
        with os.scandir(top) as entries:
            for number, entry in enumerate(entries):
                seen.append(entry.name)
                if number % 10 == 0:
                    (top / f"new-{number}").touch()
                if number % 10 == 5:
                    (top / f"new-{number - 5}").unlink()
                if number % 10 == 7 and entry.name in below - changed:
                    (top / entry.name).write_text("now")
        stayed = [name for name in seen if not name.startswith("new-")]
        assert sorted(stayed) == sorted(shown)
        shutil.rmtree(top)
        assert not top.exists()
        assert len(os.listdir(world.source / "free/many")) == 1000

    world.does(story)


def test_scratch_files_end_with_the_session_unless_kept(place: MakePlace) -> None:
    """The layer is removed with the session, for any modes of its files; that of a killed session with the
    next mount.
    """
    world = place(policy=POLICY)

    def story(top: Path) -> None:
        (top / "build/d/e").mkdir(parents=True)
        (top / "build/d/e/f").write_text("f")
        os.chmod(top / "build/d/e", 0)
        os.chmod(top / "build/d", 0)

    sessions = world.home / "sessions"
    world.does(story, world.path)
    world.umount()
    assert not (sessions / world.session.session / "scratch").exists()
    killed = place(policy=POLICY)
    killed.does(story, killed.path)
    killed.kill()
    left = sessions / killed.session.session / "scratch"
    assert left.exists()
    again = place(policy=POLICY)
    assert not left.exists()
    assert os.listdir(again.source) == []


def test_a_new_policy_counts_and_judges_existing_scratch_files(mounted: Mounted, source: Path, tmp_path: Path) -> None:
    """A new quota counts existing files. A file that is no longer scratch stays, and cannot be changed."""
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY)
    world = mounted(policy=policy)
    free = world.path / "free"
    free.mkdir()
    (free / "file").write_bytes(b"x" * 600_000)
    policy.write_text(POLICY.replace('paths = ["free/"]', 'paths = ["free/"]\nmax_total = "1MB"'))
    until(lambda: outcome((free / "more").write_bytes, b"x" * 600_000) == errno.EFBIG, "the bound is known")
    (free / "file").write_bytes(b"")
    assert outcome((free / "more").write_bytes, b"x" * 600_000) == 600_000
    policy.write_text(POLICY.replace('paths = ["free/"]', 'paths = ["other/"]'))
    until(lambda: outcome(os.utime, free / "more") == errno.EACCES, "it is scratch no more")
    assert outcome((free / "more").write_bytes, b"") == errno.EACCES
    assert (free / "more").stat().st_size == 600_000
    assert outcome((free / "another").touch) == errno.EACCES
    assert os.listdir(source) == []


def test_a_new_policy_counts_files_in_unreadable_directories(place: MakePlace) -> None:
    """Their modes stay, and `.bonobofs/scratch` lists their contents for the user of the server."""
    world = place(policy=POLICY)
    free, policy = world.path / "free", next(world.home.parent.glob("policy-*.toml"))

    def fill() -> None:
        (free / "closed/below/closed").mkdir(parents=True)
        (free / "closed/below/closed/file").write_bytes(b"x" * 600_000)
        (free / "closed/file").write_bytes(b"x" * 300_000)
        for name, mode in (("closed/below/closed", 0o000), ("closed", 0o300)):
            (free / name).chmod(mode)

    world.does(fill)
    listed = {("scratch", path) for path in ("free/closed/file", "free/closed/below/closed/file")}
    assert listed < world.does(_held, world)
    policy.write_text(POLICY.replace('paths = ["free/"]', 'paths = ["free/"]\nmax_total = "1MB"'))

    answers: list[object] = []

    def is_bound() -> bool:
        answers.append(world.does(outcome, (free / "more").write_bytes, b"x" * 200_000))
        return answers[-1] != 200_000

    until(is_bound, "the bound is known")
    assert set(answers) <= {200_000, errno.EFBIG}
    layer = world.home / "sessions" / world.session.session / "scratch/free"
    assert [stat.S_IMODE((layer / name).stat().st_mode) for name in ("closed/below/closed", "closed")] == [0, 0o300]
