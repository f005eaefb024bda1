"""Programs that keep the server's descriptors in use: their own requests are refused, and all others go on."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from pathlib import Path
from typing import Final

from tests.support.mount_fixtures import MakePlace
from tests.support.users import outcome
from tests.support.world import ALLOW_ALL

LIMIT: Final = 256
MANY: Final = 4 * LIMIT
POLICY: Final = """
[[rule]]
name = "notes"
paths = ["notes/**"]
suffixes = [".md"]
"""
STAGING: Final = f'temporary = ["**/*.tmp"]\n{POLICY}'


def _raise_limit() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * MANY, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def _works(mount: Path) -> bool:
    """Whether another program can list, make, write, read, move and remove, many times what a cache holds."""
    for number in range(LIMIT):
        directory = mount / f"notes/d{number}"
        directory.mkdir()
        (directory / "a.md").write_text("text")
        (directory / "a.md").rename(directory / "b.md")
        assert os.listdir(directory) == ["b.md"]
        assert (directory / "b.md").read_text() == "text"
    (mount / "notes/d0/b.md").unlink()
    (mount / "notes/d1").rename(mount / "notes/moved")
    return True


def test_more_staged_files_than_descriptors_are_refused(own_place: MakePlace) -> None:
    """Beyond the budget a create fails with EFBIG. The record has rule and remedy."""
    world = own_place(policy=STAGING, limit=LIMIT)
    (world.source / "notes").mkdir()

    def attack() -> tuple[int, set[object]]:
        _raise_limit()
        said = [outcome((world.path / f"notes/{n}.tmp").write_text, "t") for n in range(MANY)]
        return said.count(1), set(said) - {1}

    made, said = world.does(attack)
    assert made == LIMIT // 2
    assert said == {errno.EFBIG}
    assert world.does(_works, world.path)
    denied = [entry for entry in world.entries() if entry.code == "SIZE" and entry.kind == "intent"]
    assert {(entry.rule, entry.operation) for entry in denied} == {("temporary", "create_file")}
    assert {os.path.basename(entry.path) for entry in denied} == {f"{n}.tmp" for n in range(made, MANY)}


def test_removed_open_staged_files_count_too(own_place: MakePlace) -> None:
    """An open staged file keeps its descriptor after the removal of its name."""
    world = own_place(policy=STAGING, limit=LIMIT)
    (world.source / "notes").mkdir()

    def attack() -> set[object]:
        _raise_limit()
        said: set[object] = set()
        for number in range(MANY):
            path = world.path / f"notes/{number}.tmp"
            fd = outcome(os.open, path, os.O_RDWR | os.O_CREAT, 0o600)
            if not path.exists():
                said.add(fd)
                continue
            path.unlink()
        assert _works(world.path)
        return said

    assert world.does(attack) == {errno.EFBIG}


def test_more_removed_open_files_than_descriptors_are_refused(own_place: MakePlace) -> None:
    """A removal beyond the budget fails with ENFILE and is recorded; the file stays, and open files keep their
    content.
    """
    world = own_place(policy=ALLOW_ALL, limit=LIMIT)
    (world.source / "notes").mkdir()

    def attack() -> list[object]:
        _raise_limit()
        said, opened = [], []
        for number in range(MANY):
            path = world.path / f"{number}.md"
            opened.append(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            os.write(opened[-1], b"%d" % number)
            said.append(outcome(path.unlink))
        assert _works_but_for_removals(world.path)
        assert all(os.pread(fd, 9, 0) == b"%d" % number for number, fd in enumerate(opened))
        return said

    said = world.does(attack)
    assert set(said) == {None, errno.ENFILE}
    assert said.count(None) >= LIMIT // 2
    failed = [e for e in world.entries() if e.result == "error" and e.operation == "delete_file"]
    assert len(failed) == said.count(errno.ENFILE)
    (world.path / "0.md").write_text("again")
    (world.path / "0.md").unlink()


def _works_but_for_removals(mount: Path) -> bool:
    for number in range(LIMIT):
        directory = mount / f"notes/d{number}"
        directory.mkdir()
        (directory / "a.md").write_text("text")
        (directory / "a.md").rename(directory / "b.md")
        assert os.listdir(directory) == ["b.md"]
    return True


def test_a_move_of_many_directories_takes_few_descriptors(own_place: MakePlace) -> None:
    """Four times as many subdirectories as descriptors in one directory, and as many levels: both are moved."""
    world = own_place(policy=ALLOW_ALL, limit=LIMIT)

    def story() -> None:
        for number in range(MANY):
            (world.source / f"wide/{number}").mkdir(parents=True)
        (world.source / "deep").mkdir()
        fd = os.open(world.source / "deep", os.O_RDONLY)
        for _ in range(MANY):
            os.mkdir("d", dir_fd=fd)
            below = os.open("d", os.O_RDONLY, dir_fd=fd)
            os.close(fd)
            fd = below
        os.close(fd)
        os.rename(world.path / "wide", world.path / "broad")
        os.rename(world.path / "deep", world.path / "low")
        assert len(os.listdir(world.source / "broad")) == MANY
        assert os.listdir(world.source / "low") == ["d"]

    try:
        world.does(story)
    finally:  # shutil.rmtree recurses, and would fail when pytest clears the directory
        subprocess.run(["rm", "-rf", world.source / "deep", world.source / "low"], check=True)
