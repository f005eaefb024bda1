"""Staged temporary files: shown in the mount, and in the source only once they get a name that the rules permit."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from bonobofs.audit.entry import AuditEntry
from tests.support.mount_fixtures import MakePlace, Place
from tests.support.syscalls import RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2
from tests.support.users import outcome
from tests.support.wait import until

POLICY: Final = """
default = "deny"
temporary = ["**/*.tmp", "**/.#*", "**/sed??????"]
[[protect]]
paths = ["closed/"]
[[keep]]
paths = ["notes/keep.md"]
[[rule]]
name = "notes"
paths = ["notes/", "more/"]
suffixes = [".md"]
max_size = "1kB"
executable = false
"""


@pytest.fixture
def world(place: MakePlace) -> Place:
    made = place(policy=POLICY)
    made.does(_fill, made.source)
    return made


def _fill(source: Path) -> None:
    (source / "notes").mkdir()
    (source / "notes/a.md").write_text("the old text")
    (source / "notes/keep.md").write_text("kept")
    (source / "closed").mkdir()
    (source / "closed/a.md").write_text("closed")
    (source / "notes/found.tmp").write_text("of the source")


def _listed(world: Place) -> list[list[str]]:
    return [line.split("\t") for line in (world.path / ".bonobofs/scratch").read_text().splitlines()]


def test_a_staged_file_works_like_any_other_and_is_not_in_the_source(world: Place) -> None:
    """A staged file is created, written, read, changed, found, listed and measured. The source has nothing of it."""

    def story() -> None:
        path = world.path / "notes/x.tmp"
        with path.open("x") as file:
            file.write("some text")
        assert path.read_text() == "some text"
        with path.open("a") as file:
            file.write(" and more")
        os.chmod(path, 0o755)
        os.utime(path, ns=(1_000_000_001, 2_000_000_002))
        os.setxattr(path, "user.mark", b"here")
        st = path.stat()
        assert (st.st_size, stat.S_IMODE(st.st_mode), st.st_nlink) == (18, 0o755, 1)
        assert (st.st_atime_ns, st.st_mtime_ns) == (1_000_000_001, 2_000_000_002)
        assert os.getxattr(path, "user.mark") == b"here"
        assert sorted(os.listdir(path.parent)) == ["a.md", "found.tmp", "keep.md", "x.tmp"]
        with os.scandir(path.parent) as entries:
            assert {entry.name for entry in entries if entry.is_file() and entry.stat().st_size == 18} == {"x.tmp"}
        os.truncate(path, 4)
        assert path.read_text() == "some"
        with path.open("r+") as file:
            os.fsync(file.fileno())
            os.posix_fallocate(file.fileno(), 0, 100)
        assert path.stat().st_size == 100
        assert sorted(os.listdir(world.source / "notes")) == ["a.md", "found.tmp", "keep.md"]
        assert _listed(world) == [["temporary", "100", "notes/x.tmp"]]
        path.unlink()
        assert not path.exists()
        assert outcome(path.unlink) == errno.ENOENT
        assert _listed(world) == []
        assert sorted(os.listdir(path.parent)) == ["a.md", "found.tmp", "keep.md"]

    world.does(story)


def test_a_rename_to_an_allowed_name_publishes_the_staged_file(world: Place) -> None:
    """For a new or an existing target: the same inode, bytes, mode and times appear in the source, and no
    other name.
    """

    def story() -> None:
        for target in ("notes/new.md", "notes/a.md"):
            path = world.path / "notes/x.tmp"
            path.write_text("whole")
            os.chmod(path, 0o640)
            os.utime(path, ns=(1_000_000_001, 2_000_000_002))
            before = path.stat()
            path.rename(world.path / target)
            after, below = (world.path / target).stat(), (world.source / target).stat()
            for st in (after, below):
                assert (st.st_ino, st.st_mtime_ns, st.st_nlink) == (before.st_ino, before.st_mtime_ns, 1)
                assert (stat.S_IMODE(st.st_mode), st.st_size) == (0o640, 5)
            assert (world.source / target).read_text() == (world.path / target).read_text() == "whole"
            assert not path.exists()
        assert sorted(os.listdir(world.source / "notes")) == ["a.md", "found.tmp", "keep.md", "new.md"]
        assert sorted(os.listdir(world.path / "notes")) == ["a.md", "found.tmp", "keep.md", "new.md"]

    world.does(story)


def test_a_staged_file_is_judged_at_its_target(world: Place) -> None:
    """Suffix, size, mode, content and protection: a refused target leaves the staged file in place."""

    def story() -> None:
        path = world.path / "notes/x.tmp"
        path.write_text("text")
        assert outcome(os.rename, path, world.path / "notes/x.txt") == errno.EACCES
        assert outcome(os.rename, path, world.path / "x.md") == errno.EACCES
        assert outcome(os.rename, path, world.path / "closed/x.md") == errno.EROFS
        assert outcome(os.rename, path, world.path / "closed/a.md") == errno.EROFS
        assert outcome(os.link, path, world.path / "notes/x.txt") == errno.EACCES
        path.write_bytes(b"#!/bin/sh\n")
        assert outcome(os.rename, path, world.path / "notes/x.md") == errno.EACCES
        assert outcome(os.link, path, world.path / "notes/x.md") == errno.EACCES
        path.write_text("text")
        os.chmod(path, 0o700)
        assert outcome(os.rename, path, world.path / "notes/a.md") == errno.EACCES
        os.chmod(path, 0o4600)
        os.chmod(path, 0o600)
        os.truncate(path, 1001)
        assert outcome(os.rename, path, world.path / "notes/a.md") == errno.EFBIG
        assert outcome(os.link, path, world.path / "notes/b.md") == errno.EFBIG
        os.truncate(path, 1000)
        assert (world.source / "notes/a.md").read_text() == "the old text"
        assert os.listdir(world.source / "closed") == ["a.md"]
        os.rename(path, world.path / "notes/a.md")
        assert (world.source / "notes/a.md").stat().st_size == 1000

    world.does(story)


def test_open_descriptors_of_a_published_file_are_judged_by_its_new_name(world: Place) -> None:
    """A descriptor from before the rename writes to the file in the source, under the rules of its new name."""

    def story() -> None:
        for enter in (os.rename, os.link):
            enters(enter)

    def enters(enter: Callable[[Path, Path], object]) -> None:
        path, target = world.path / "notes/x.tmp", world.path / "notes/open.md"
        with path.open("w+b", buffering=0) as file:
            file.write(b"text")
            enter(path, target)
            assert os.pwrite(file.fileno(), b"TEXT and more", 0) == 13
            assert (world.source / "notes/open.md").read_bytes() == target.read_bytes() == b"TEXT and more"
            assert outcome(os.pwrite, file.fileno(), b"#!", 0) == errno.EACCES
            assert outcome(os.pwrite, file.fileno(), b"x", 1000) == errno.EFBIG
            assert outcome(os.ftruncate, file.fileno(), 1001) == errno.EFBIG
            assert outcome(os.fchmod, file.fileno(), 0o755) == errno.EACCES
            assert os.fstat(file.fileno()).st_nlink == (1 if enter is os.rename else 2)
            target.unlink()
            assert os.pread(file.fileno(), 100, 0) == b"TEXT and more"

    world.does(story)


def test_a_denied_name_that_is_not_on_the_list_fails_at_once(world: Place) -> None:
    """Only names listed as temporary are staged, and never a file of the source. A denied create fails at once."""

    def story() -> None:
        (world.source / "notes/c.md").write_text("precious")
        assert outcome((world.path / "notes/x.txt").touch) == errno.EACCES
        assert outcome(os.rename, world.path / "notes/c.md", world.path / "notes/c.tmp") == errno.EACCES
        assert outcome(os.link, world.path / "notes/c.md", world.path / "notes/c.tmp") == errno.EACCES
        assert outcome((world.path / "notes/found.tmp").write_text, "x") == errno.EACCES
        assert outcome((world.path / "notes/found.tmp").unlink) == errno.EACCES
        assert outcome(os.mkdir, world.path / "d.tmp") == errno.EACCES
        assert outcome(os.mkfifo, world.path / "f.tmp") == errno.EACCES
        assert (world.source / "notes/found.tmp").read_text() == "of the source"
        held = world.path / "notes/x.tmp"
        held.write_text("x")
        assert outcome(os.rename, world.path / "notes/c.md", held) == errno.EACCES
        assert outcome(renameat2, world.path / "notes/c.md", held, RENAME_EXCHANGE) == errno.EXDEV
        assert outcome(renameat2, held, world.path / "notes/c.md", RENAME_EXCHANGE) == errno.EXDEV
        assert outcome(os.rename, held, world.path / "notes/found.tmp") == errno.EACCES
        assert (world.path / "notes/c.md").read_text() == (world.source / "notes/c.md").read_text() == "precious"

    world.does(story)


def test_staged_names_are_renamed_and_linked_among_themselves(world: Place) -> None:
    """Renames over one another, exchanges, across directories, and with RENAME_NOREPLACE."""

    def story() -> None:
        one, two, far = world.path / "notes/1.tmp", world.path / "notes/2.tmp", world.path / "3.tmp"
        one.write_text("1")
        two.write_text("2")
        assert outcome(renameat2, one, two, RENAME_NOREPLACE) == errno.EEXIST
        assert outcome(renameat2, one, world.path / "notes/a.md", RENAME_NOREPLACE) == errno.EEXIST
        renameat2(one, two, RENAME_EXCHANGE)
        assert (one.read_text(), two.read_text()) == ("2", "1")
        with two.open() as file:
            one.rename(two)
            assert file.read() == "1"
        assert (two.read_text(), one.exists()) == ("2", False)
        two.rename(far)
        assert (far.read_text(), two.exists()) == ("2", False)
        os.link(far, one)
        assert (one.stat().st_ino, one.stat().st_nlink) == (far.stat().st_ino, 2)
        far.unlink()
        assert (one.read_text(), one.stat().st_nlink) == ("2", 1)
        assert outcome(os.link, one, world.path / "notes/a.md") == errno.EEXIST
        renameat2(one, world.path / "notes/new.md", RENAME_NOREPLACE)
        assert (world.source / "notes/new.md").read_text() == "2"
        assert _listed(world) == []

    world.does(story)


def test_a_link_keeps_the_staged_name(world: Place) -> None:
    """Both names lead to one file, which is in the source. Unlinking the staged name leaves the other."""

    def story() -> None:
        held, target, again = (world.path / f"notes/{name}" for name in ("x.tmp", "new.md", "again.md"))
        held.write_text("text")
        os.link(held, target)
        assert held.stat().st_ino == target.stat().st_ino == (world.source / "notes/new.md").stat().st_ino
        assert held.stat().st_nlink == target.stat().st_nlink == 2
        held.write_text("more text")
        assert (world.source / "notes/new.md").read_text() == "more text"
        assert outcome(os.chmod, held, 0o755) == errno.EACCES
        assert outcome(os.truncate, held, 2000) == errno.EFBIG
        held.rename(again)
        assert (world.source / "notes/again.md").read_text() == "more text"
        assert (world.source / "notes/again.md").stat().st_nlink == again.stat().st_nlink == 2
        held.write_text("another")
        os.link(held, world.path / "notes/third.md")
        held.unlink()
        assert (world.path / "notes/third.md").stat().st_nlink == 1
        assert (world.source / "notes/third.md").read_text() == "another"

    world.does(story)


def test_a_symlink_can_be_staged(world: Place) -> None:
    """A lock of emacs: it is read, renamed and removed, and published only if it may lead there."""

    def story() -> None:
        lock = world.path / "notes/.#a.md"
        lock.symlink_to("anna@host.1234:5678")
        assert os.readlink(lock) == "anna@host.1234:5678"
        assert stat.S_ISLNK(lock.lstat().st_mode)
        assert lock.lstat().st_nlink == 1
        assert lock.name in os.listdir(lock.parent)
        assert outcome(lock.symlink_to, "again") == errno.EEXIST
        lock.unlink()
        assert outcome(lock.lstat) == errno.ENOENT
        assert outcome(lock.symlink_to, "/etc/passwd") == errno.EPERM
        assert outcome(lock.symlink_to, "../../outside") == errno.EPERM
        assert outcome(lock.symlink_to, "../closed/a.md") == errno.EPERM
        (world.path / "notes/x.tmp").symlink_to("a.md")
        os.utime(world.path / "notes/x.tmp", ns=(1_000_000_001, 2_000_000_002), follow_symlinks=False)
        assert outcome(os.rename, world.path / "notes/x.tmp", world.path / "closed/l") == errno.EROFS
        for _ in range(2):
            os.rename(world.path / "notes/x.tmp", world.path / "notes/l.md")
            for root in (world.source, world.path):
                assert os.readlink(root / "notes/l.md") == "a.md"
                assert (root / "notes/l.md").lstat().st_mtime_ns == 2_000_000_002
            assert (world.source / "notes/l.md").lstat().st_ino == (world.path / "notes/l.md").lstat().st_ino
            (world.path / "notes/x.tmp").symlink_to("a.md")
            os.utime(world.path / "notes/x.tmp", ns=(1_000_000_001, 2_000_000_002), follow_symlinks=False)
        (world.path / "notes/x.tmp").unlink()
        (world.path / "notes/deep.tmp").symlink_to("../more")
        assert outcome(os.rename, world.path / "notes/deep.tmp", world.path / "deep.tmp") == errno.EPERM
        (world.path / "notes/deep.tmp").unlink()
        assert sorted(os.listdir(world.source / "notes")) == ["a.md", "found.tmp", "keep.md", "l.md"]

    world.does(story)


def test_an_unlinked_staged_file_stays_usable_while_open(world: Place) -> None:
    """As tempfile does: create, remove, then write."""

    def story() -> None:
        path = world.path / "notes/x.tmp"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        path.unlink()
        assert os.write(fd, b"text") == 4
        assert os.pread(fd, 10, 0) == b"text"
        assert os.fstat(fd).st_nlink == 0
        path.write_text("another")
        assert os.pread(fd, 10, 0) == b"text"
        os.close(fd)
        assert path.read_text() == "another"
        path.unlink()

    world.does(story)


def test_staged_files_move_with_their_directory(world: Place) -> None:
    """A directory with staged names is not empty and moves with them. It cannot be replaced or removed."""

    def story() -> None:
        (world.path / "notes/d/e").mkdir(parents=True)
        held = world.path / "notes/d/e/x.tmp"
        held.write_text("text")
        assert outcome(os.rmdir, held.parent) == errno.ENOTEMPTY
        os.mkdir(world.path / "notes/other")
        assert outcome(os.rename, world.path / "notes/other", held.parent) == errno.ENOTEMPTY
        with held.open("a") as file:
            os.rename(world.path / "notes/d", world.path / "notes/f")
            assert not held.exists()
            moved = world.path / "notes/f/e/x.tmp"
            file.write(" and more")
            file.flush()
            assert moved.read_text() == "text and more"
            assert os.listdir(moved.parent) == ["x.tmp"]
        assert _listed(world) == [["temporary", "13", "notes/f/e/x.tmp"]]
        renameat2(world.path / "notes/f", world.path / "notes/other", RENAME_EXCHANGE)
        moved = world.path / "notes/other/e/x.tmp"
        assert moved.read_text() == "text and more"
        assert os.listdir(world.path / "notes/f") == []
        shutil.rmtree(world.path / "notes/other")
        assert _listed(world) == []
        assert sorted(os.listdir(world.source / "notes")) == ["a.md", "f", "found.tmp", "keep.md"]

    world.does(story)


def test_sed_edits_in_place(world: Place) -> None:
    """`sed -i` writes a staged file and renames it over the old one. Owner and mode are as on a bare directory."""

    def story() -> None:
        subprocess.run(["sed", "-i", "s/old/new/", world.path / "notes/a.md"], check=True)
        assert (world.source / "notes/a.md").read_text() == "the new text"
        assert sorted(os.listdir(world.source / "notes")) == ["a.md", "found.tmp", "keep.md"]
        renamed = subprocess.run(
            ["sed", "-i.bak", "s/new/old/", world.path / "notes/a.md"], check=False, capture_output=True
        )
        assert renamed.returncode != 0
        assert (world.source / "notes/a.md").read_text() == "the new text"

    world.does(story)


def test_a_kept_file_may_be_replaced_and_not_removed(world: Place) -> None:
    """A rename over the file is a change of it."""

    def story() -> None:
        held = world.path / "notes/x.tmp"
        held.write_text("new")
        held.rename(world.path / "notes/keep.md")
        assert (world.source / "notes/keep.md").read_text() == "new"
        assert outcome(os.unlink, world.path / "notes/keep.md") == errno.EACCES

    world.does(story)


def test_staged_files_end_with_the_session(place: MakePlace) -> None:
    """After unmount or kill, no staged file is left in the source or the state directory."""
    for end in ("umount", "kill"):
        world = place(policy=POLICY)

        def story(world: Place = world) -> None:
            (world.path / "x.tmp").write_text("text")
            (world.path / ".#lock").symlink_to("me")

        world.does(story)
        if end == "umount":
            world.umount()
        else:
            world.kill()
        assert os.listdir(world.source) == []
        left = {path.name for path in (world.home / "sessions" / world.session.session).iterdir()}
        assert not {name for name in left if name.startswith(".")}


def test_a_listing_shows_each_staged_name_once(world: Place) -> None:
    """While names come and go, the others are listed exactly once, in the source and staged."""

    def story() -> None:
        directory = world.path / "notes/many"
        directory.mkdir()
        below = {f"{number:04}-{'x' * 80}.md" for number in range(1000)}
        held = {f"{number:04}-{'y' * 80}.tmp" for number in range(1000)}
        for name in below:
            (world.source / "notes/many" / name).touch()
        for name in held:
            (directory / name).touch()
        assert sorted(os.listdir(directory)) == sorted(below | held)
        seen = []
        with os.scandir(directory) as entries:
            for number, entry in enumerate(entries):
                seen.append(entry.name)
                if number % 10 == 0:
                    (directory / f"new-{number}.tmp").touch()
                if number % 10 == 5:
                    (directory / f"new-{number - 5}.tmp").unlink()
        stayed = [name for name in seen if not name.startswith("new-")]
        assert len(stayed) == len(set(stayed))
        assert set(stayed) == below | held
        assert len(os.listdir(world.source / "notes/many")) == 1000
        for name in held:
            (directory / name).unlink()

    world.does(story)


def test_staged_files_beyond_the_maximum_are_refused(place: MakePlace) -> None:
    """Each staged file takes a descriptor.

    When half are used, the next create gets EFBIG; files of the source still open.
    """
    world = place(policy=POLICY, limit=256)

    def story() -> int:
        (world.source / "notes").mkdir()
        made = 0
        while (said := outcome((world.path / f"{made}.tmp").write_text, "text")) == 4:
            made += 1
        assert said == errno.EFBIG
        for number in range(100):
            (world.path / f"notes/{number}.md").write_text("text")
        assert all((world.path / f"{number}.tmp").read_text() == "text" for number in range(made))
        os.unlink(world.path / "0.tmp")
        # The descriptor is free after FORGET, which the kernel may send after the next request.
        until(lambda: outcome((world.path / "again.tmp").write_text, "text") == 4, "there is room again")
        return made

    assert world.does(story) == 128


@pytest.mark.root
def test_staged_files_survive_forget(own_place: MakePlace) -> None:
    """A staged file and a scratch file are found by name with the same identity after the kernel has forgotten all
    nodes.
    """
    world = own_place(policy=POLICY + '[[scratch]]\npaths = ["build/"]\n')
    world.does(_fill, world.source)

    def story() -> None:
        held, built = world.path / "notes/d/x.tmp", world.path / "build/e/x"
        held.parent.mkdir()
        built.parent.mkdir(parents=True)
        held.write_text("text")
        built.write_text("built")
        held.with_name("l.tmp").symlink_to("a")
        before = held.stat().st_ino, built.stat().st_ino
        for _ in range(2):
            world.forget()
            assert sorted(os.listdir(held.parent)) == ["l.tmp", "x.tmp"]
            assert (held.read_text(), os.readlink(held.with_name("l.tmp"))) == ("text", "a")
            assert built.read_text() == "built"
            assert (held.stat().st_ino, built.stat().st_ino) == before
            assert held.stat().st_nlink == 1
        world.forget()
        held.rename(world.path / "notes/a.md")
        assert (world.source / "notes/a.md").stat().st_ino == before[0]
        held.with_name("l.tmp").unlink()
        assert _listed(world) == [
            ["scratch", "4096", "build"],
            ["scratch", "4096", "build/e"],
            ["scratch", "5", "build/e/x"],
        ]

    world.does(story)


def test_thousands_of_names_are_staged_at_once(own_place: MakePlace) -> None:
    """Half of the descriptors in one directory: names are listed, found, published and removed."""
    world = own_place(policy=POLICY)
    world.does(_fill, world.source)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = min(3_000, hard // 2 if hard > 0 else 3_000)

    def story() -> None:
        names = [f"{index}.tmp" for index in range(number)]
        for name in names:
            os.close(os.open(world.path / "notes" / name, os.O_CREAT | os.O_WRONLY, 0o644))
        assert set(os.listdir(world.path / "notes")) == {*names, "a.md", "keep.md", "found.tmp"}
        with os.scandir(world.path / "notes") as entries:
            assert sum(entry.stat().st_nlink for entry in entries) == number + 3
        for index in range(0, number, number // 100):
            os.rename(world.path / f"notes/{index}.tmp", world.path / f"notes/{index}.md")
        for index in set(range(number)) - set(range(0, number, number // 100)):
            os.unlink(world.path / f"notes/{index}.tmp")
        assert len(os.listdir(world.source / "notes")) == 103
        assert _listed(world) == []

    world.does(story)


def test_every_step_is_on_record(world: Place) -> None:
    """Entries of staged files say so. A publication names the old path, and a refusal the target."""

    def story() -> None:
        path = world.path / "notes/x.tmp"
        path.write_text("text")
        os.chmod(path, 0o640)
        path.rename(world.path / "notes/y.tmp")
        (world.path / "notes/y.tmp").rename(world.path / "notes/a.md")
        path.write_text("text")
        outcome(path.rename, world.path / "notes/x.txt")
        os.link(path, world.path / "notes/l.md")
        path.unlink()

    world.does(story)
    intents = [entry for entry in world.entries() if entry.kind == "intent"]

    def told(entry: AuditEntry) -> tuple[str, ...]:
        details = entry.details
        return entry.operation, entry.path, entry.result, details.get("layer", ""), details.get("from", "")

    assert [told(entry) for entry in intents] == [
        ("create_file", "notes/x.tmp", "allowed", "staged", ""),
        ("set_mode", "notes/x.tmp", "allowed", "staged", ""),
        ("rename", "notes/x.tmp", "allowed", "staged", ""),
        ("rename", "notes/a.md", "allowed", "", "notes/y.tmp"),
        ("create_file", "notes/x.tmp", "allowed", "staged", ""),
        ("rename", "notes/x.txt", "denied", "", ""),
        ("link", "notes/l.md", "allowed", "", "notes/x.tmp"),
        ("delete_file", "notes/x.tmp", "allowed", "staged", ""),
    ]
    entered = intents[3]
    assert entered.details["by"].startswith(".bonobofs-")
    assert entered.action == "modify"
    outcomes = {entry.details["intent"]: entry for entry in world.entries() if entry.kind == "outcome"}
    assert all(outcomes[entry.seq].result == "allowed" for entry in intents if entry.result == "allowed")
