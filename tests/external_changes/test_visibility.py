"""External changes show in the mount at once, although the kernel may cache entries for a day."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bonobofs.system import syscalls
from tests.support.observe import text
from tests.support.wait import seconds_until, until
from tests.support.world import ALLOW_ALL, Mounted, World

MEDIAN = 0.05
"""Seconds within which a change shows, as the median of many."""
LOADED = 5
"""How much slower a machine may be that runs the tests and other things at once."""


@pytest.fixture
def world(mounted: Mounted, source: Path) -> World:
    """A mount that knows all of a small tree, and that some names do not exist."""
    for name in ("sub/deep", "other", ".git"):
        (source / name).mkdir(parents=True)
    for name in ("file", "twin", "sub/file", "sub/deep/file", ".git/HEAD"):
        (source / name).write_text("as it was")
    (source / "link").symlink_to("file")
    world = mounted(policy=ALLOW_ALL)
    _know(world.path)
    return world


def _know(path: Path) -> None:
    for above, _, names in os.walk(path):
        for name in names:
            Path(above, name).read_bytes()
    for name in ("new", "sub/new", "sub/deep/new", "moved"):
        assert not (path / name).exists()


def _exchange(one: Path, other: Path) -> None:
    syscalls.renameat2(-100, bytes(one), -100, bytes(other), syscalls.RENAME_EXCHANGE)


def _exchange_directories(at: Path) -> None:
    (at / "other/low").mkdir()
    _exchange(at / "sub", at / "other")
    _exchange(at / "other/deep", at / "sub/low")
    _exchange(at / "other/deep", at / "sub/low")
    (at / "sub/low").rename(at / "sub/deeper")
    (at / "sub/deeper/new").write_text("new")


CHANGES: dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]] = {
    "a file appears where there was none": (
        lambda at: (at / "new").write_text("new"),
        lambda at: text(at / "new") == "new" and "new" in os.listdir(at),
    ),
    "a file appears far below": (
        lambda at: (at / "sub/deep/new").write_text("new"),
        lambda at: text(at / "sub/deep/new") == "new" and "new" in os.listdir(at / "sub/deep"),
    ),
    "a file is written": (
        lambda at: (at / "file").write_text("other bytes"),
        lambda at: text(at / "file") == "other bytes",
    ),
    "a file is written in place, with as many bytes": (
        lambda at: _overwrite(at / "sub/file", b"AS IT WAS"),
        lambda at: text(at / "sub/file") == "AS IT WAS",
    ),
    "a file grows": (
        lambda at: _append(at / "file", b", and more"),
        lambda at: text(at / "file") == "as it was, and more",
    ),
    "a file is cut off": (lambda at: os.truncate(at / "file", 2), lambda at: text(at / "file") == "as"),
    "a file is removed": (
        lambda at: (at / "sub/file").unlink(),
        lambda at: not (at / "sub/file").exists() and "file" not in os.listdir(at / "sub"),
    ),
    "a file is replaced by a rename": (
        lambda at: _replace(at / "sub/file", "replaced"),
        lambda at: text(at / "sub/file") == "replaced",
    ),
    "a file is moved to another directory": (
        lambda at: (at / "file").rename(at / "other/moved"),
        lambda at: not (at / "file").exists() and text(at / "other/moved") == "as it was",
    ),
    "two files are exchanged": (
        lambda at: _exchange(at / "link", at / "twin"),
        lambda at: (at / "twin").is_symlink() and not (at / "link").is_symlink(),
    ),
    "a file gets another mode": (
        lambda at: (at / "file").chmod(0o600),
        lambda at: (at / "file").stat().st_mode & 0o777 == 0o600,
    ),
    "a file gets other times": (
        lambda at: os.utime(at / "file", (1, 2)),
        lambda at: (at / "file").stat().st_mtime == 2,
    ),
    "a file gets an attribute": (
        lambda at: os.setxattr(at / "file", "user.color", b"red"),
        lambda at: os.listxattr(at / "file") == ["user.color"],
    ),
    "a file gets another name": (
        lambda at: os.link(at / "file", at / "sub/new"),
        lambda at: text(at / "sub/new") == "as it was" and (at / "file").stat().st_nlink == 2,
    ),
    "a symlink leads elsewhere": (
        lambda at: _instead(at / "link", lambda link: link.symlink_to("sub/file")),
        lambda at: os.readlink(at / "link") == "sub/file",
    ),
    "a directory appears with all that is in it": (
        lambda at: _tree(at / "new"),
        lambda at: text(at / "new/a/b/c") == "deep",
    ),
    "a directory is moved": (
        lambda at: (at / "sub").rename(at / "moved"),
        lambda at: not (at / "sub").exists() and text(at / "moved/deep/file") == "as it was",
    ),
    "two directories are exchanged, and moved on": (
        _exchange_directories,
        lambda at: text(at / "other/deep/file") == "as it was" and text(at / "sub/deeper/new") == "new",
    ),
    "a directory is removed with all that is in it": (
        lambda at: _remove(at / "sub"),
        lambda at: not (at / "sub").exists() and "sub" not in os.listdir(at),
    ),
    "a directory gets another mode": (
        lambda at: (at / "sub").chmod(0o700),
        lambda at: (at / "sub").stat().st_mode & 0o777 == 0o700,
    ),
    "the root gets another mode": (lambda at: at.chmod(0o711), lambda at: at.stat().st_mode & 0o777 == 0o711),
    "a file becomes a directory": (
        lambda at: _instead(at / "file", Path.mkdir),
        lambda at: (at / "file").is_dir(),
    ),
    "something appears in a repository": (
        lambda at: _replace(at / ".git/HEAD", "ref"),
        lambda at: text(at / ".git/HEAD") == "ref",
    ),
}


def _instead(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


def _overwrite(path: Path, content: bytes) -> None:
    fd = os.open(path, os.O_WRONLY)
    os.pwrite(fd, content, 0)
    os.close(fd)


def _append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def _replace(path: Path, text: str) -> None:
    beside = path.with_name("beside")
    beside.write_text(text)
    beside.rename(path)


def _tree(path: Path) -> None:
    (path / "a/b").mkdir(parents=True)
    (path / "a/b/c").write_text("deep")


def _remove(path: Path) -> None:
    for above, directories, names in os.walk(path, topdown=False):
        for name in names:
            os.unlink(Path(above, name))
        for name in directories:
            os.rmdir(Path(above, name))
    path.rmdir()


@pytest.mark.parametrize("what", CHANGES)
def test_an_external_change_shows(world: World, what: str) -> None:
    """Also if the kernel has cached the earlier state."""
    change, shows = CHANGES[what]
    change(world.source)
    until(lambda: shows(world.path), what)


@pytest.mark.alone
def test_half_of_the_changes_show_within_50_ms(world: World) -> None:
    """Changes of all kinds to cached names; none shows by a cache timeout alone."""
    took = []
    for turn in range(30):
        (world.source / "file").write_text(f"turn {turn}")
        took.append(seconds_until(lambda wanted=f"turn {turn}": text(world.path / "file") == wanted, "the text shows"))  # type: ignore[misc]
        assert not (world.path / f"new-{turn}").exists()
        (world.source / f"new-{turn}").touch()
        took.append(seconds_until((world.path / f"new-{turn}").exists, "it shows"))
        (world.source / f"new-{turn}").unlink()
        took.append(seconds_until(lambda turn=turn: not (world.path / f"new-{turn}").exists(), "it is gone"))  # type: ignore[misc]
    assert statistics.median(took) < MEDIAN * LOADED


def test_a_reader_of_an_open_file_sees_appended_lines(world: World) -> None:
    """It follows a log file through the mount, and the lines are written behind it."""
    with (world.path / "file").open() as reader:
        assert reader.read() == "as it was"
        _append(world.source / "file", b"\nnext")
        until(lambda: reader.read() == "\nnext", "the next line comes")


def test_an_external_change_right_after_an_own_write_shows(world: World) -> None:
    """The external write has the same size as the mount's own write before it."""
    for turn in range(50):
        ours, theirs = f"ours {turn:03}", f"them {turn:03}"
        (world.path / "file").write_text(ours)
        assert text(world.path / "file") == ours
        _overwrite(world.source / "file", theirs.encode())
        until(lambda theirs=theirs: text(world.path / "file") == theirs, "the last text shows")  # type: ignore[misc]


def test_thousands_of_external_changes_show_in_the_end(world: World) -> None:
    """They are read meanwhile; once it is quiet, mount and source are equal."""
    began = time.monotonic()
    for turn in range(4):
        for number in range(400):
            path = world.source / "sub/deep" / f"{number % 200}"
            if (number + turn) % 3:
                path.write_text(f"{turn} {number}")
            else:
                path.unlink(missing_ok=True)
        (world.source / "sub/deep").rename(world.source / "other/deep")
        list((world.path / "other").iterdir())
        (world.source / "other/deep").rename(world.source / "sub/deep")
        [text(path) for path in (world.path / "sub").iterdir() if path.is_file()]

    def content(at: Path) -> dict[str, str | None]:
        return {str(path.relative_to(at)): text(path) for path in sorted(at.rglob("*"))}

    until(lambda: content(world.path) == content(world.source), "both are alike")
    assert time.monotonic() - began < 60


def test_a_file_that_gets_a_second_name_outside_can_be_written(world: World) -> None:
    """The kernel knows the first name, and looks only the second one up again."""
    os.link(world.source / "file", world.source / "second")
    until((world.path / "second").exists, "the second name shows")
    (world.path / "file").write_text("written")
    assert (world.source / "second").read_text() == "written"
