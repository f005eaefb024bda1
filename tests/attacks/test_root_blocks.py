"""A server that runs as root does not give other users the blocks that a file system reserves for root."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable

import pytest

from tests.attacks.conftest import MakeFileSystem
from tests.support.syscalls import opened
from tests.support.users import NOBODY, outcome, run_in_child
from tests.support.world import ALLOW_ALL, Mounted

pytestmark = pytest.mark.root
PIECE = 64 * 1024
RESERVED = 20
"""Percent."""


def _write(fd: int, free: int) -> None:
    for _ in range(free // PIECE + 1):
        os.write(fd, bytes(PIECE))


def _write_backwards(fd: int, free: int) -> None:
    """Into holes: the size says nothing of what is allocated."""
    os.ftruncate(fd, 2 * free)
    for at in range(2 * free - PIECE, 0, -PIECE):
        os.pwrite(fd, bytes(PIECE), at)


def _allocate(fd: int, free: int) -> None:
    for at in range(0, free + PIECE, PIECE):
        os.posix_fallocate(fd, at, PIECE)


def _map(fd: int, free: int) -> None:
    os.ftruncate(fd, 2 * free)
    with mmap.mmap(fd, 2 * free) as pages:
        for at in range(0, 2 * free, PIECE):
            pages[at : at + PIECE] = b"x" * PIECE
            pages.flush(at, PIECE)


def _copy(fd: int, free: int) -> None:
    os.write(fd, b"x" * PIECE)
    for at in range(PIECE, free + PIECE, PIECE):
        assert os.copy_file_range(fd, fd, PIECE, 0, at) == PIECE


@pytest.mark.parametrize("act", [_write, _write_backwards, _allocate, _map, _copy])
def test_no_other_user_fills_the_blocks_of_root(
    file_system: MakeFileSystem, act: Callable[[int, int], None], mounted: Mounted
) -> None:
    """Another user gets ENOSPC as on the file system itself. Root continues, and existing blocks can be overwritten."""
    place = file_system("ext4", reserved=RESERVED)
    source = place / "source"
    source.mkdir()
    source.chmod(0o777)
    world = mounted(policy=ALLOW_ALL, source=source, allow_other=True)
    vfs = os.statvfs(place)
    reserved = (vfs.f_bfree - vfs.f_bavail) * vfs.f_frsize
    with opened(world.path, os.O_RDONLY | os.O_DIRECTORY) as top:

        def story() -> object:
            os.fchdir(top)
            with (
                opened("small", os.O_RDWR | os.O_CREAT, 0o666) as other,
                opened("f", os.O_RDWR | os.O_CREAT, 0o666) as fd,
            ):
                return outcome(act, fd, vfs.f_bfree * vfs.f_frsize), outcome(os.write, other, bytes(4 * PIECE))

        # An mmap that is full fails by msync with EIO or ENOSPC.
        assert run_in_child(story, user=NOBODY) in [(errno.ENOSPC, errno.ENOSPC), (errno.EIO, errno.ENOSPC)]
    vfs = os.statvfs(place)
    assert reserved * 0.95 < vfs.f_bfree * vfs.f_frsize < reserved + 8 * PIECE
    (world.path / "of-root").write_bytes(bytes(PIECE))
    (world.path / "f").open("r+b").close()


def test_a_full_disk_accepts_changes_without_new_blocks(file_system: MakeFileSystem, mounted: Mounted) -> None:
    """No block is allocated for them."""
    source = file_system("ext4", reserved=RESERVED) / "source"
    source.mkdir()
    source.chmod(0o777)
    (source / "notes").write_bytes(b"a" * 5000)
    (source / "notes").chmod(0o666)
    world = mounted(policy=ALLOW_ALL, source=source, allow_other=True)
    with opened(world.path, os.O_RDONLY | os.O_DIRECTORY) as top:

        def story() -> object:
            os.fchdir(top)
            with opened("f", os.O_RDWR | os.O_CREAT, 0o666) as fd:
                assert outcome(_write, fd, 16 << 20) == errno.ENOSPC
            with opened("notes", os.O_RDWR) as fd:
                return os.pwrite(fd, b"b" * 5000, 0), os.pwrite(fd, b"c" * 100, 5000)

        assert run_in_child(story, user=NOBODY) == (5000, 100)
    assert (source / "notes").read_bytes() == b"b" * 5000 + b"c" * 100


def test_names_and_attributes_take_no_blocks_of_root(file_system: MakeFileSystem, mounted: Mounted) -> None:
    """Directories, symlinks, temporary files and extended attributes of another user take blocks too."""
    source = file_system("ext4", reserved=RESERVED) / "source"
    source.mkdir()
    source.chmod(0o777)
    world = mounted(policy=f'{ALLOW_ALL}temporary = ["**/*.tmp"]\n', source=source, allow_other=True)
    vfs = os.statvfs(source)
    reserved = vfs.f_bfree - vfs.f_bavail
    acts: list[Callable[[str], None]] = [
        os.mkdir,
        lambda name: os.symlink("x" * 500, name),
        lambda name: os.close(os.open(f"{name:0>200}", os.O_CREAT | os.O_WRONLY)),
        lambda name: os.close(os.open(f"{name}.tmp", os.O_CREAT | os.O_WRONLY)),
        lambda name: os.setxattr("small", f"user.{name}", bytes(400)),
    ]
    with opened(world.path, os.O_RDONLY | os.O_DIRECTORY) as top:

        def story() -> list[set[object]]:
            os.fchdir(top)
            with opened("small", os.O_RDWR | os.O_CREAT, 0o666), opened("f", os.O_RDWR | os.O_CREAT, 0o666) as fd:
                assert outcome(_write, fd, 16 << 20) == errno.ENOSPC
                return [{outcome(act, f"{kind}-{number}") for number in range(50)} for kind, act in enumerate(acts)]

        # What is smaller than a piece was still free.
        assert all(found in ({errno.ENOSPC}, {None, errno.ENOSPC}) for found in run_in_child(story, user=NOBODY))
    assert os.statvfs(source).f_bfree > reserved * 0.95
    (world.path / "of-root").mkdir()
