"""Acts that take space in scratch: `act(directory, number)`, each time with another number."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path

from tests.support.syscalls import opened
from tests.support.users import outcome

PIECE = 64 * 1024
MOST = 20_000
"""More of anything than the disk, and than `max_total`, have room for."""
Act = Callable[[Path, int], object]


def write(top: Path, number: int) -> None:
    with (top / "f").open("ab", buffering=0) as file:
        file.write(bytes(PIECE))


def allocate(top: Path, number: int) -> None:
    with opened(top / "f", os.O_RDWR | os.O_CREAT) as fd:
        os.posix_fallocate(fd, number * PIECE, PIECE)


def map_pages(top: Path, number: int) -> None:
    with opened(top / "f", os.O_RDWR | os.O_CREAT) as fd:
        os.ftruncate(fd, (number + 1) * PIECE)
        with mmap.mmap(fd, PIECE, offset=number * PIECE) as pages:
            pages[:] = b"x" * PIECE
            pages.flush()


def copy(top: Path, number: int) -> None:
    with opened(top / "f", os.O_RDWR | os.O_CREAT) as fd:
        os.pwrite(fd, b"x" * PIECE, 0)
        os.copy_file_range(fd, fd, PIECE, 0, (number + 1) * PIECE)


def append_page(top: Path, number: int) -> None:
    with (top / "page").open("ab", buffering=0) as file:
        file.write(bytes(4096))


def make_file(top: Path, number: int) -> None:
    (top / str(number)).touch()


def make_symlink(top: Path, number: int) -> None:
    (top / str(number)).symlink_to("x" * 900)


def make_directory(top: Path, number: int) -> None:
    (top / str(number)).mkdir()


def make_fifo(top: Path, number: int) -> None:
    os.mkfifo(top / str(number))


def link(top: Path, number: int) -> None:
    (top / "f").touch()
    os.link(top / "f", top / f"{number:0200}")


def set_attribute(top: Path, number: int) -> None:
    (top / str(number)).touch()
    os.setxattr(top / str(number), "user.x", b"x" * 800)


def copy_up(top: Path, number: int) -> None:
    os.truncate(top.parent / f"old-{number}", PIECE + 1)


def copy_up_empty(top: Path, number: int) -> None:
    (top.parent / f"old-{number}").chmod(0o600)


def repeat(act: Act, top: Path) -> object:
    """The error of the first act that fails."""
    for number in range(MOST):
        if error := outcome(act, top, number):
            return error
    return None


def why(path: Path) -> str | None:
    code: str | None = json.loads(os.getxattr(path, "user.bonobofs.why.another"))["code"]
    return code
