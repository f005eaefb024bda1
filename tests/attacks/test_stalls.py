"""Requests that take long: those of other programs are served meanwhile."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.decision import Code
from tests.fuse.people import outcome, tell
from tests.worlds import ALLOW_ALL, Mounted

NAMES: Final = 4000
PATIENT: Final = 0.25
"""Seconds that a request of another program takes at most: 50 ms are promised on an idle machine."""


class Beside(NamedTuple):
    """What another program saw while one request was served."""

    seconds: float
    """How long that request took."""
    slowest: float
    """Seconds of the other program's slowest request."""
    served: int
    """How many of its requests were answered."""


def beside(mount: Path, act: Callable[[], object]) -> Beside:
    """Do it in one thread, and look for names that do not exist in another until it is done."""
    took = []

    def run() -> None:
        began = time.monotonic()
        act()
        took.append(time.monotonic() - began)

    thread = threading.Thread(target=run)
    slowest, served = 0.0, 0
    thread.start()
    while thread.is_alive():
        began = time.monotonic()
        assert not os.path.lexists(mount / f"beside/missing-{served}")
        slowest = max(slowest, time.monotonic() - began)
        served += 1
    return Beside(took[0], slowest, served)


def test_a_file_with_very_many_names_costs_no_more_than_others(mounted: Mounted, source: Path) -> None:
    """Its content and attributes cannot be changed, `why` says so at once, and it can be copied and removed."""
    (source / "file").write_text("x")
    for number in range(NAMES):
        os.link(source / "file", source / f"name-{number}")
    (source / "beside").mkdir()
    world = mounted(policy=ALLOW_ALL)

    def story() -> tuple[float, bytes, object]:
        for name in os.listdir(source):
            os.stat(world.path / name)  # each name is known to the server
        began = time.thread_time(), time.monotonic()
        for _ in range(20):
            why = os.getxattr(world.path / "file", "user.bonobofs.why")
        took = (time.monotonic() - began[1]) / 20
        said = outcome((world.path / "file").write_text, "y")
        (world.path / "name-0").unlink()
        return took, why, said

    took, why, said = tell(story)
    assert said == errno.EPERM
    assert Code.HARDLINK.value.encode() in why
    assert took < 0.01  # 4,000 names took 60 ms
    assert (source / "file").read_text() == "x"
    assert not (source / "name-0").exists()


def test_a_large_copy_within_the_mount_goes_in_pieces(mounted: Mounted, source: Path) -> None:
    """One COPY_FILE_RANGE copies at most 8 MiB, the whole is copied, and others are served between."""
    size = 200 << 20
    with open(source / "large", "wb") as file:
        file.writelines(os.urandom(64) * (1 << 14) for _ in range(size >> 20))
    (source / "beside").mkdir()
    world = mounted(policy=ALLOW_ALL)

    def copy() -> None:
        with open(world.path / "large", "rb") as old, open(world.path / "copy", "wb") as new:
            left = size
            while left:
                left -= (copied := os.copy_file_range(old.fileno(), new.fileno(), left))
                assert 0 < copied <= 2 << 20

    seen: Beside = tell(beside, world.path, copy)
    assert (source / "copy").read_bytes() == (source / "large").read_bytes()
    assert seen.slowest < PATIENT


def test_others_are_served_while_a_large_directory_is_moved(mounted: Mounted, source: Path) -> None:
    """20,000 files are judged in slices; a write below waits. (The kernel locks the two directories of a rename.)"""
    for number in range(20_000):
        if number % 1000 == 0:
            (source / f"old/{number // 1000}").mkdir(parents=True)
        (source / f"old/{number // 1000}/{number}").touch()
    (source / "beside").mkdir()
    world = mounted(policy=ALLOW_ALL)
    (world.path / "old/0/0").read_bytes()

    def story() -> Beside:
        writes = threading.Thread(target=(world.path / "old/0/0").write_text, args=("written",))
        found = world.path / "old/19/19999"
        found.read_bytes()

        def move() -> None:
            writes.start()
            os.rename(world.path / "old", world.path / "new")

        seen = beside(world.path, move)
        writes.join()
        return seen

    seen = tell(story)
    assert seen.seconds > 10 * seen.slowest
    assert seen.served > 50
    assert seen.slowest < PATIENT
    assert (source / "new/0/0").read_text() == "written"
    assert not (source / "old").exists()


def test_others_are_served_while_many_empty_directories_are_moved(mounted: Mounted, source: Path) -> None:
    """The walk lets others be served at each directory that it enters, also if that has no entry."""
    for number in range(8000):
        (source / f"old/{number}").mkdir(parents=True)
    (source / "beside").mkdir()
    world = mounted(policy=ALLOW_ALL)

    seen: Beside = tell(beside, world.path, lambda: os.rename(world.path / "old", world.path / "new"))
    assert seen.seconds > 5 * seen.slowest
    assert len(os.listdir(source / "new")) == 8000


def test_others_are_served_while_a_file_is_synced(mounted: Mounted, source: Path) -> None:
    """fsync(2) of 100 MB, eight at a time: threads make it, and the other program is served."""
    (source / "beside").mkdir()
    world = mounted(policy=ALLOW_ALL)

    def sync(number: int) -> None:
        fd = os.open(world.path / str(number), os.O_WRONLY | os.O_CREAT)
        for _ in range(12):
            os.write(fd, bytes(1 << 20))
        os.fsync(fd)
        os.close(fd)

    def sync_all() -> None:
        threads = [threading.Thread(target=sync, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    seen = tell(beside, world.path, sync_all)
    assert seen.served > 10
    assert sum((source / str(number)).stat().st_size for number in range(8)) == 96 << 20
