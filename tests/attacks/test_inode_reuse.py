"""A descriptor from before a removal never reaches the file that gets the same inode number."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attacks.conftest import MakeFileSystem
from tests.support.syscalls import opened
from tests.support.users import outcome
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted

pytestmark = pytest.mark.root
SECRET = b"a secret of another user\n"


def _private(directory: Path, name: str, number: int) -> Path:
    """A private file with this inode number, once the server holds the old file no more."""
    path = directory / name

    def has_the_number() -> bool:
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        return path.stat().st_ino == number

    until(has_the_number, "ext4 uses the inode number again")
    path.write_bytes(SECRET)
    return path


@pytest.mark.parametrize("name", ["f", "private"])
@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
def test_an_old_descriptor_never_reaches_a_new_file(
    file_system: MakeFileSystem, name: str, used: bool, mounted: Mounted
) -> None:
    """Not its content, size, mode or owner, whether the server had the old file open or not; and nothing changes it."""
    source = file_system("ext4") / "source"
    (source / "sub").mkdir(parents=True)
    (source / "sub/f").write_bytes(b"public")
    (source / "sub/f").chmod(0o666)
    world = mounted(policy=ALLOW_ALL, source=source)
    with opened(world.path / "sub/f", os.O_RDWR) as fd:
        if used:
            assert os.read(fd, 3) == b"pub"
        _attack(fd, source, name)
    new = world.path / "sub" / name
    until(lambda: outcome(new.read_bytes) == SECRET, "the mount shows the new file")
    assert stat.S_IMODE(new.stat().st_mode) == 0o600


def _attack(fd: int, source: Path, name: str) -> None:
    number = (source / "sub/f").stat().st_ino
    (source / "sub/f").unlink()
    private = _private(source / "sub", name, number)
    before = private.stat()
    acts: dict[str, Callable[[], object]] = {
        "read": lambda: os.pread(fd, 100, 0),
        "stat": lambda: os.fstat(fd).st_size,
        "write": lambda: os.pwrite(fd, b"EVIL", 0),
        "truncate": lambda: os.ftruncate(fd, 0),
        "chmod": lambda: os.fchmod(fd, 0o666),
        "utime": lambda: os.utime(fd, (1, 1)),
        "chown": lambda: os.fchown(fd, 1, 1),
        "xattr": lambda: os.setxattr(fd, "user.evil", b"1"),
    }
    for what, act in acts.items():
        answer = outcome(act)
        assert answer in (errno.ESTALE, errno.ENOENT, b"public", 6), (what, answer)
    after = private.stat()
    assert (after.st_mode, after.st_uid, after.st_mtime_ns, private.read_bytes(), os.listxattr(private)) == (
        before.st_mode,
        before.st_uid,
        before.st_mtime_ns,
        SECRET,
        [],
    )


def test_an_old_descriptor_of_a_directory_never_reaches_a_new_one(
    file_system: MakeFileSystem, mounted: Mounted
) -> None:
    source = file_system("ext4") / "source"
    (source / "d").mkdir(parents=True)
    (source / "d").chmod(0o777)
    world = mounted(policy=ALLOW_ALL, source=source)
    number = (source / "d").stat().st_ino
    with opened(world.path / "d", os.O_RDONLY) as fd:
        (source / "d").rmdir()

        def has_the_number() -> bool:
            (source / "d").mkdir(mode=0o700)
            if (source / "d").stat().st_ino == number:
                return True
            (source / "d").rmdir()
            return False

        until(has_the_number, "ext4 uses the inode number again")
        (source / "d/secret").touch()
        assert outcome(os.listdir, fd) in ([], errno.ESTALE, errno.ENOENT)
        assert outcome(os.fchmod, fd, 0o777) in (errno.ESTALE, errno.ENOENT)
    assert stat.S_IMODE((source / "d").stat().st_mode) == 0o700
    until(lambda: outcome(os.listdir, world.path / "d") == ["secret"], "the mount shows the new directory")
