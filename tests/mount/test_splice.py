"""Long READ replies through splice(2)."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from bonobofs.fuse.splice import FileRange, SplicePipe
from tests.support.mount_fixtures import MakePlace

CONTENT = random.Random(3).randbytes(3_000_001)


@pytest.fixture
def pipe() -> Iterator[SplicePipe]:
    pipe = SplicePipe()
    yield pipe
    pipe.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(CONTENT)
    opened = os.open(tmp_path / "file", os.O_RDWR)
    yield opened
    os.close(opened)


def _sent(pipe: SplicePipe, content: FileRange, directory: Path) -> tuple[bool, bytes]:
    """Whether the pipe sent the reply, and the bytes that arrived."""
    target = os.open(directory, os.O_TMPFILE | os.O_RDWR)
    try:
        moved = pipe.send(b"head", content, target)
        return moved, os.pread(target, 1 << 22, 0)
    finally:
        os.close(target)


@pytest.mark.parametrize(("offset", "length"), [(0, 65536), (1, 70_001), (4095, 524_288), (2_900_000, 100_001)])
def test_header_and_content_arrive_as_one_reply(
    pipe: SplicePipe, fd: int, tmp_path: Path, offset: int, length: int
) -> None:
    expected = CONTENT[offset : offset + length]
    assert _sent(pipe, FileRange(fd, offset, length), tmp_path) == (True, b"head" + expected)
    assert b"".join(FileRange(fd, offset, length)) == expected


def test_a_truncated_file_sends_nothing(pipe: SplicePipe, fd: int, tmp_path: Path) -> None:
    """The header states the old length. The pipe is emptied, and the next reply is complete."""
    os.ftruncate(fd, 50_000)
    assert _sent(pipe, FileRange(fd, 0, 65536), tmp_path) == (False, b"")
    assert _sent(pipe, FileRange(fd, 0, 50_000), tmp_path) == (True, b"head" + CONTENT[:50_000])


def test_a_reply_larger_than_the_pipe_is_not_begun(pipe: SplicePipe, fd: int, tmp_path: Path) -> None:
    assert _sent(pipe, FileRange(fd, 0, 1 << 20), tmp_path) == (False, b"")
    assert _sent(pipe, FileRange(fd, 0, 100), tmp_path) == (True, b"head" + CONTENT[:100])


def test_a_reply_that_the_connection_refuses_leaves_the_pipe_empty(pipe: SplicePipe, fd: int, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"), open("/dev/null") as refusing:
        pipe.send(b"head", FileRange(fd, 0, 70_000), refusing.fileno())
    assert _sent(pipe, FileRange(fd, 5, 100), tmp_path) == (True, b"head" + CONTENT[5:105])


def test_a_long_file_has_the_same_content_through_the_mount(place: MakePlace) -> None:
    """In one read, in pieces of any size, backwards, past the end, and after a truncation."""
    world = place()
    for name in ("long", "again"):
        (world.source / name).write_bytes(CONTENT)
        (world.source / name).chmod(0o666)
    world.does(_reads, world.path)


def _reads(directory: Path) -> None:
    assert (directory / "long").read_bytes() == CONTENT
    chance = random.Random(4)
    fd = os.open(directory / "again", os.O_RDONLY)
    try:
        for offset in sorted((chance.randrange(len(CONTENT)) for _ in range(20)), reverse=True):
            length = chance.randrange(1, 600_000)
            assert os.pread(fd, length, offset) == CONTENT[offset : offset + length]
        os.truncate(directory / "again", 200_000)
        assert os.pread(fd, 1 << 20, 0) == CONTENT[:200_000]
    finally:
        os.close(fd)
