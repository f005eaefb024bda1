"""Scratch files of every kind count towards `max_total`."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from tests.attacks.overlay_growth import (
    Act,
    copy_up_empty,
    link,
    make_directory,
    make_fifo,
    make_file,
    make_symlink,
    repeat,
    set_attribute,
    why,
)
from tests.support.users import outcome, run_in_child
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted

POLICY = f'{ALLOW_ALL}[[scratch]]\npaths = ["build/", "old-*"]\n'


@pytest.mark.parametrize(
    "act", [make_file, make_symlink, make_directory, make_fifo, link, set_attribute, copy_up_empty]
)
def test_empty_files_count_towards_the_quota(act: Act, mounted: Mounted, source: Path) -> None:
    """Names count 4 KiB, and extended attributes their bytes. Removed files do not count."""
    for number in range(300):
        (source / f"old-{number}").touch()
    world = mounted(policy=f'{POLICY}max_total = "1MB"\n')
    top = world.path / "build"
    top.mkdir()

    assert run_in_child(repeat, act, top) == errno.EFBIG
    assert 180 < len((world.path / ".bonobofs/scratch").read_text().splitlines()) <= 245
    assert run_in_child(why, top) == "SIZE"

    def clear() -> None:
        for path in (*top.iterdir(), *world.path.glob("old-*")):
            (path.rmdir if stat.S_ISDIR(path.lstat().st_mode) else path.unlink)()

    run_in_child(clear)
    until(lambda: run_in_child(outcome, (top / "large").write_bytes, bytes(980_000)) == 980_000, "there is room again")


def test_attributes_of_one_file_are_bounded(mounted: Mounted) -> None:
    """A replaced value counts once, and a removed one not at all."""
    world = mounted(policy=f'{POLICY}max_total = "10KB"\n')
    top = world.path / "build"
    top.mkdir()
    (top / "f").touch()
    for _ in range(10):
        os.setxattr(top / "f", "user.x", b"x" * 1500)
    assert outcome(os.setxattr, top / "f", "user.y", b"y" * 500) == errno.EFBIG
    os.removexattr(top / "f", "user.x")
    os.setxattr(top / "f", "user.y", b"y" * 500)
    os.setxattr(top, "user.z", b"z" * 800)
    assert outcome((top / "f").write_bytes, b"x" * 1000) == errno.EFBIG
    os.removexattr(top, "user.z")
    assert outcome((top / "f").write_bytes, b"x" * 1000) == 1000
