"""Messages of any size that an agent causes: the companion lives, and every line of the trail can be read."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from bonobofs.audit.reader import LONGEST_LINE
from bonobofs.audit.verify import TrailStatus, verify_trail
from bonobofs.errors import UsageError
from tests.guard_socket.conftest import Called, answer
from tests.support.git_guards import ENVIRONMENT
from tests.support.observe import companion_of, out_of_band
from tests.support.users import run_in_child
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted, World

DEPTH: Final = 600
NAME: Final = b"d" * 250
FILES: Final = 700
BEGINNING: Final[dict[str, object]] = {"subcommand": "add", "directory": "/", "remote": False}
"""A call of `git.begin`, but for its arguments."""


@contextmanager
def unharmed(world: World) -> Iterator[None]:
    """The companion at the end is the one at the beginning, it serves, and the trail verifies."""
    companion = companion_of(world.pid)
    yield
    assert companion_of(world.pid) == companion
    (world.source / "sign").touch()
    until(lambda: "sign" in out_of_band(world), "the sign is entered")
    assert max(map(len, world.trail.read_bytes().splitlines())) < LONGEST_LINE // 2
    world.umount()
    report = verify_trail(world.trail, world.head, session=world.session.session)
    assert (report.findings, report.status) == ([], TrailStatus.CLOSED)


def below(root: Path, *, make: bool = False) -> int:
    """Open the directory DEPTH levels below, whose path has 150,600 bytes."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(DEPTH):
        if make:
            os.mkdir(NAME, dir_fd=fd)
        above, fd = fd, os.open(NAME, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(above)
    return fd


def test_a_removal_of_many_very_long_paths_is_sent_in_parts(mounted: Mounted, source: Path) -> None:
    """700 paths of 150 KB would be one message of 105 MB to the companion."""
    deep = below(source, make=True)
    for number in range(FILES):
        os.close(os.open(f"{number}", os.O_CREAT | os.O_WRONLY, 0o644, dir_fd=deep))
    world = mounted(policy=ALLOW_ALL)

    def look() -> int:
        fd = below(world.path)
        found = [os.stat(name, dir_fd=fd).st_ino for name in os.listdir(fd)]
        os.close(fd)
        return len(found)

    assert run_in_child(look) == FILES
    with unharmed(world):
        for number in range(FILES):
            os.unlink(f"{number}", dir_fd=deep)
        until(lambda: run_in_child(look) == 0, "the removal shows")
    os.close(deep)


@pytest.fixture
def called(mounted: Mounted, source: Path) -> Called:
    """A mount over a repository, called through its guard socket."""
    for arguments in (["init", "-q", "-b", "topic"], ["commit", "-q", "--allow-empty", "-m", "First"]):
        subprocess.run(["git", *arguments], cwd=source, env=ENVIRONMENT, check=True)
    return Called(mounted(policy=f"{ALLOW_ALL}\n[git]\nmessage_pattern = '.'\n"))


def test_a_call_with_a_long_list_is_refused_before_it_is_parsed(called: Called) -> None:
    """14 MB of paths: 100,000 of 140 characters."""
    with unharmed(called.world):
        with pytest.raises(UsageError, match="at most 4194304 bytes"):
            called("git.preflight", changes=[f"{number:0140}" for number in range(100_000)])
        with called.connected() as end:
            end.sendall(json.dumps({"message": "m" * (2 << 20), "call": "git.begin"}).encode() + b"\n")
            assert "must begin with its name" in answer(end)["error"]["message"]
        called("git.begin", **BEGINNING, arguments=[f"{number:04}-{'é' * 30}" for number in range(5_000)])
