"""Files with several names, externally moved directories, and their audit entries."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Final

import pytest

from bonobofs.audit.reader import read
from tests.support.syscalls import RENAME_EXCHANGE, renameat2
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted, World

TWO_RULES = """
default = "deny"
[[rule]]
name = "docs"
paths = ["docs/"]
max_size = "1KB"
executable = false
[[rule]]
name = "any"
paths = ["any/"]
"""

COPIED_IN_THREAD: Final = 60_000_000
"""Size of a file whose old content a thread copies for some 50 ms before the first change."""


def refusal(act: object, *arguments: object) -> int:
    """The errno with which a call fails; 0 when it does not."""
    try:
        act(*arguments)  # type: ignore[operator]
    except OSError as error:
        return error.errno or -1
    return 0


def write(path: Path, content: bytes, offset: int = 0) -> int:
    fd = os.open(path, os.O_WRONLY)
    try:
        return refusal(os.pwrite, fd, content, offset)
    finally:
        os.close(fd)


@pytest.fixture
def aliased(source: Path, mounted: Mounted) -> World:
    """A mount under the default policy in which `.git/config` has a further, allowed name."""
    (source / ".git").mkdir()
    (source / ".git/config").write_text("[core]\n")
    (source / "aidlc-docs/sub").mkdir(parents=True)
    os.link(source / ".git/config", source / "aidlc-docs/sub/x.md")
    return mounted()


@pytest.mark.root
def test_a_name_counts_once_however_often_its_directory_was_forgotten(aliased: World) -> None:
    """A protected file stays protected under its other name, however often the kernel looks that up."""
    path = aliased.path / "aidlc-docs/sub/x.md"
    for _ in range(3):
        assert write(path, b"EVIL") == errno.EPERM
        aliased.forget()
    assert (aliased.source / ".git/config").read_text() == "[core]\n"


def test_the_times_of_a_file_with_a_foreign_name_stay(aliased: World) -> None:
    """Times are visible under every name, so an allowed name does not permit setting them."""
    before = (aliased.source / ".git/config").stat().st_mtime_ns
    assert refusal(os.utime, aliased.path / "aidlc-docs/sub/x.md", (1, 1)) == errno.EPERM
    assert (aliased.source / ".git/config").stat().st_mtime_ns == before


def test_one_inode_under_two_rules_obeys_both(source: Path, mounted: Mounted) -> None:
    """Content that one name of a file may not have is not written under another."""
    for directory in ("docs", "any"):
        (source / directory).mkdir()
    (source / "docs/a").write_text("small")
    os.link(source / "docs/a", source / "any/a")
    world = mounted(policy=TWO_RULES)
    for name in ("any/a", "docs/a"):
        assert (world.path / name).read_text() == "small"
    assert write(world.path / "any/a", b"fine!") == 0
    assert write(world.path / "any/a", bytes(5000)) == errno.EPERM
    assert write(world.path / "any/a", b"#!/bin/sh\n") == errno.EPERM
    assert refusal(os.chmod, world.path / "any/a", 0o755) == errno.EPERM
    assert (source / "docs/a").read_text() == "fine!"
    assert stat.S_IMODE((source / "docs/a").stat().st_mode) & 0o111 == 0


def _move_directory(any_dir: Path, docs: Path) -> None:
    (any_dir / "d").rename(docs / "d")


def _move_file(any_dir: Path, docs: Path) -> None:
    (docs / "d").mkdir(exist_ok=True)
    (any_dir / "d/b").rename(docs / "d/b")


def _exchange_directories(any_dir: Path, docs: Path) -> None:
    (docs / "d").mkdir(exist_ok=True)
    renameat2(any_dir / "d", docs / "d", RENAME_EXCHANGE)


def _link_file(any_dir: Path, docs: Path) -> None:
    (docs / "d").mkdir(exist_ok=True)
    os.link(any_dir / "d/b", docs / "d/b")


@pytest.mark.parametrize("move", [_move_directory, _move_file, _exchange_directories, _link_file])
def test_a_name_of_a_file_that_a_thread_changes_is_judged_with_its_new_content(
    source: Path, mounted: Mounted, move: Callable[[Path, Path], None]
) -> None:
    """A long copy changes the content of a file. Meanwhile no other name of the file moves under another rule."""
    for directory in ("docs", "any"):
        (source / directory).mkdir()
    (source / "any/a").write_bytes(b"-" * COPIED_IN_THREAD)
    (source / "any/script").write_bytes(b"#!/bin/sh\n")
    world = mounted(policy=TWO_RULES.replace('max_size = "1KB"\n', ""))
    (world.path / "any/d").mkdir()
    os.link(world.path / "any/a", world.path / "any/d/b")
    target, script = (os.open(world.path / name, os.O_RDWR) for name in ("any/a", "any/script"))
    copy = Thread(target=os.copy_file_range, args=(script, target, 10, 0, 0))
    copy.start()
    until(lambda: any(entry.operation == "copy_range" for entry in read(world.trail)), "the copy begins")
    result = refusal(move, world.path / "any", world.path / "docs")
    copy.join()
    os.close(target)
    os.close(script)
    assert (source / "any/a").read_bytes()[:10] == b"#!/bin/sh\n"
    assert not (source / "docs/d/b").exists()
    assert result == errno.EACCES


def test_a_default_acl_does_not_make_executables(source: Path, mounted: Mounted) -> None:
    """The umask does not apply under a default ACL, and the mode is judged without it."""
    (source / "aidlc-docs").mkdir()
    subprocess.run(["setfacl", "-d", "-m", "u::rwx,g::rwx,o::rwx", source / "aidlc-docs"], check=True)
    world = mounted()
    old = os.umask(0o111)
    try:
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
        assert refusal(os.open, world.path / "aidlc-docs/exe.md", flags, 0o777) == errno.EACCES
    finally:
        os.umask(old)
    assert os.listdir(source / "aidlc-docs") == []


def test_no_file_is_created_under_the_old_path_of_a_directory(source: Path, mounted: Mounted) -> None:
    """A directory that was moved externally and found at its new path is not changed under the old one."""
    (source / "A").mkdir()
    (source / "A/file").write_text("old")
    world = mounted(policy=ALLOW_ALL)
    inside = os.open(world.path / "A", os.O_RDONLY | os.O_DIRECTORY)
    (source / "A").rename(source / "B")
    assert os.listdir(world.path / "B") == ["file"]

    def make() -> None:
        os.close(os.open("new.md", os.O_CREAT | os.O_WRONLY, dir_fd=inside))

    assert refusal(make) in (errno.ESTALE, errno.ENOENT)
    os.close(inside)
    assert os.listdir(source / "B") == ["file"]
    until(lambda: not (world.path / "A").exists(), "the old name is gone")


def test_a_file_that_was_removed_behind_the_mount_can_be_made_again(source: Path, mounted: Mounted) -> None:
    """The kernel looks the name up again when its cached file is gone."""
    (source / "a").write_text("old")
    world = mounted(policy=ALLOW_ALL)
    assert (world.path / "a").read_text() == "old"
    (source / "a").unlink()
    until(lambda: refusal((world.path / "a").write_text, "new") == 0, "the file can be made")
    assert (source / "a").read_text() == "new"


def test_a_range_is_copied_within_one_file(mounted: Mounted) -> None:
    """Source and target may be the same file, even if the server had not opened it before."""
    world = mounted(policy=ALLOW_ALL)
    (world.source / "f").write_bytes(b"0123456789abcdef")
    fd = os.open(world.path / "f", os.O_RDWR)
    assert os.copy_file_range(fd, fd, 4, 0, 12) == 4
    os.close(fd)
    assert (world.source / "f").read_bytes() == b"0123456789ab0123"


def test_a_program_that_was_linked_into_place_can_be_run_below(mounted: Mounted) -> None:
    """`ln tmp final; rm tmp` leaves no descriptor open for writing."""
    world = mounted(policy=ALLOW_ALL)
    (world.path / "tmp").write_text("#!/bin/sh\nexit 7\n")
    (world.path / "tmp").chmod(0o755)
    os.link(world.path / "tmp", world.path / "final")
    (world.path / "tmp").unlink()
    assert (world.path / "final").read_text().startswith("#!")

    def runs() -> bool:
        ran = subprocess.run(["sh", "-c", 'exec "$0"', world.source / "final"], capture_output=True, check=False)
        return ran.returncode == 7

    until(runs, "the program runs")


@pytest.mark.root
def test_a_file_with_two_names_is_found_by_the_remaining_one(mounted: Mounted) -> None:
    """One name moved while the kernel had forgotten it: the other still leads to the file."""
    world = mounted(policy=ALLOW_ALL)
    for directory in ("A", "B"):
        (world.source / directory).mkdir()
    (world.source / "A/x").write_text("content")
    os.link(world.source / "A/x", world.source / "B/x")
    assert (world.path / "A/x").read_text() == "content"
    fd = os.open(world.path / "B/x", os.O_RDWR)
    world.forget()
    (world.path / "A").rename(world.path / "C")
    assert (world.path / "B/x").read_text() == "content"
    assert os.pwrite(fd, b"CON", 0) == 3
    os.close(fd)
    assert (world.path / "C/x").read_text() == "CONtent"


def test_copying_a_virtual_file_is_no_denial(mounted: Mounted, tmp_path: Path) -> None:
    """`.bonobofs/policy.md` can be copied out of the mount and within it, and the record holds no refusal for it."""
    world = mounted(policy=ALLOW_ALL)
    for target in (tmp_path / "copy.md", world.path / "copy.md"):
        subprocess.run(["cp", world.path / ".bonobofs/policy.md", target], check=True)
        assert target.read_text() == (world.path / ".bonobofs/policy.md").read_text()
    assert [entry for entry in world.entries() if entry.result == "denied"] == []


def test_the_record_has_the_attributes_that_were_set(mounted: Mounted) -> None:
    """Mode, owner and size are in the details of the intent."""
    world = mounted(policy=ALLOW_ALL)
    (world.source / "f").write_text("content")  # the write batch that creates a file would cover its mode
    (world.path / "f").chmod(0o640)
    os.truncate(world.path / "f", 3)
    (world.source / "g").touch()  # the open write batch of `f` would count its owner
    os.chown(world.path / "g", os.getuid(), os.getgid())
    said = {entry.operation: entry.details for entry in world.entries() if entry.kind == "intent"}
    assert said["set_mode"]["mode"] == "0640"
    assert said["truncate"]["size"] == 3
    assert (said["set_owner"]["owner"], said["set_owner"]["group"]) == (os.getuid(), os.getgid())
