"""Long replies that the kernel moves from the source to the caller."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from bonobofs.fuse.splice import Pipe, Stretch
from tests.fuse.conftest import MakePlace

CONTENT = random.Random(3).randbytes(3_000_001)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    made.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "file").write_bytes(CONTENT)
    opened = os.open(tmp_path / "file", os.O_RDWR)
    yield opened
    os.close(opened)


def _sent(pipe: Pipe, stretch: Stretch, directory: Path) -> tuple[bool, bytes]:
    """Whether it was moved, and what arrived."""
    target = os.open(directory, os.O_TMPFILE | os.O_RDWR)
    try:
        moved = pipe.move(b"head", stretch, target)
        return moved, os.pread(target, 1 << 22, 0)
    finally:
        os.close(target)


@pytest.mark.parametrize(("offset", "length"), [(0, 65536), (1, 70_001), (4095, 524_288), (2_900_000, 100_001)])
def test_head_and_bytes_arrive_in_one(pipe: Pipe, fd: int, tmp_path: Path, offset: int, length: int) -> None:
    expected = CONTENT[offset : offset + length]
    assert _sent(pipe, Stretch(fd, offset, length), tmp_path) == (True, b"head" + expected)
    assert b"".join(Stretch(fd, offset, length)) == expected


def test_of_a_file_that_was_cut_short_nothing_is_sent(pipe: Pipe, fd: int, tmp_path: Path) -> None:
    """The head has promised a length already; what is in the pipe is thrown away, and the next reply is whole."""
    os.ftruncate(fd, 50_000)
    assert _sent(pipe, Stretch(fd, 0, 65536), tmp_path) == (False, b"")
    assert _sent(pipe, Stretch(fd, 0, 50_000), tmp_path) == (True, b"head" + CONTENT[:50_000])


def test_what_the_pipe_cannot_hold_is_not_begun(pipe: Pipe, fd: int, tmp_path: Path) -> None:
    assert _sent(pipe, Stretch(fd, 0, 1 << 20), tmp_path) == (False, b"")
    assert _sent(pipe, Stretch(fd, 0, 100), tmp_path) == (True, b"head" + CONTENT[:100])


def test_a_reply_that_is_not_taken_leaves_nothing_behind(pipe: Pipe, fd: int, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Bad file descriptor"), open("/dev/null") as refusing:
        pipe.move(b"head", Stretch(fd, 0, 70_000), refusing.fileno())
    assert _sent(pipe, Stretch(fd, 5, 100), tmp_path) == (True, b"head" + CONTENT[5:105])


def test_a_long_file_reads_the_same_through_the_mount(place: MakePlace) -> None:
    """From end to end, in pieces of any size, backwards, past the end, and after it has become shorter."""
    made = place()
    for name in ("long", "again"):
        (made.source / name).write_bytes(CONTENT)
        (made.source / name).chmod(0o666)
    made.does(_reads, made.path)


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
