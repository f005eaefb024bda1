"""An externally replaced file is read as the old or the new one, and no read fails."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from tests.support.observe import text
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted

SIZE = 3 * 4096


def _replace(path: Path, content: bytes) -> None:
    by = path.with_name("by")
    by.write_bytes(content)
    by.rename(path)


def _version(number: int) -> bytes:
    return bytes([number % 256]) * SIZE


def test_an_open_replaced_file_keeps_its_content(mounted: Mounted, source: Path) -> None:
    """Opened before the file is replaced, and read afterwards."""
    world = mounted(policy=ALLOW_ALL)
    ours, theirs = world.path / "index", source / "index"
    for number in range(20):
        _replace(theirs, _version(number))
        until(lambda: ours.exists() and ours.stat().st_ino == theirs.stat().st_ino, "the new file shows")
        with ours.open("rb") as reader:
            _replace(theirs, _version(number + 1))
            assert os.fstat(reader.fileno()).st_size == SIZE
            assert reader.read() == _version(number)
        until(lambda number=number: ours.read_bytes() == _version(number + 1), "the new content shows")  # type: ignore[misc]


def test_readers_of_a_replaced_name_get_one_version_and_no_error(mounted: Mounted, source: Path) -> None:
    """500 reads of a name that is replaced continuously."""
    world = mounted(policy=ALLOW_ALL)
    ours, theirs = world.path / "index", source / "index"
    _replace(theirs, _version(0))
    until(ours.exists, "the file shows")
    is_over = threading.Event()

    def replace() -> None:
        number = 0
        while not is_over.is_set():
            _replace(theirs, _version(number := number + 1))

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(500):
            with ours.open("rb") as reader:
                assert os.fstat(reader.fileno()).st_size == SIZE
                content = reader.read()
            assert content == content[:1] * SIZE
    finally:
        is_over.set()
        thread.join()


def test_an_open_file_moved_behind_the_mount_is_not_written(mounted: Mounted, source: Path) -> None:
    """Only a file without a name stays usable: other rules may apply to the new path of a moved one."""
    world = mounted(policy=ALLOW_ALL)
    (source / "index").write_text("old")
    with (world.path / "index").open("r+") as file:
        (source / "index").rename(source / "moved")
        (source / "index").write_text("new")
        until(lambda: text(world.path / "index") == "new", "the new file shows")
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            os.write(file.fileno(), b"x")
    assert ((source / "moved").read_text(), (source / "index").read_text()) == ("old", "new")
