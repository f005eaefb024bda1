"""kill -9 of the serving process at any moment, under a mixed load: no change without its record, and no wreck.

`BONOBOFS_KILLS` is how many times; hundreds, where there is the time.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from bonobofs.audit.reader import read
from tests.crash.conftest import Examine
from tests.support.syscalls import RENAME_EXCHANGE, make, opened, renameat2
from tests.support.trees import snapshot
from tests.support.users import run_in_child
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted, World

KILLS: Final = int(os.environ.get("BONOBOFS_KILLS", "20"))
_ROUNDS: Final = 10
"""Kills of one source, each with a mount over the dead one before it."""
_OF_PORTABLE: Final = 5
"""How many of them are of a server of the portable transport."""
_WORKERS: Final = 2
_BYTES: Final = 60_000
"""The kill comes after at most so many bytes of record."""
_TURNS: Final = 3000
"""And then at most so many turns of an empty loop later."""


@pytest.fixture
def source(source: Path) -> Path:
    (source / "keep.md").write_text("kept")
    for worker in range(_WORKERS):
        (source / f"w{worker}").mkdir()
    return source


def _append(path: Path, chance: random.Random) -> None:
    with opened(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK) as fd:
        for _ in range(chance.randrange(4)):
            os.write(fd, bytes(chance.randrange(3000)))


_MODES = (0o700, 0o744, 0o755)


def _change(top: Path, chance: random.Random) -> tuple[str, str]:
    """Make one change somewhere in a directory; its operation and path, or an OSError."""
    path, other = (top / chance.choice(("a.md", "b.md", "c.md", "d/e.md", "d/f.md", "d", "g")) for _ in range(2))
    changes: dict[str, Callable[[], object]] = {
        "create_file": lambda: make(path, b"text"),
        "write_file": lambda: _append(path, chance),
        "truncate": lambda: os.truncate(path, chance.randrange(5000)),
        "rename": lambda: os.rename(path, other),
        "exchange": lambda: renameat2(path, other, RENAME_EXCHANGE),
        "delete_file": lambda: os.unlink(path),
        "mkdir": lambda: os.mkdir(path),
        "rmdir": lambda: os.rmdir(path),
        "symlink": lambda: os.symlink("nowhere", path),
        "mknod": lambda: os.mkfifo(path),
        "set_mode": lambda: os.chmod(
            path, chance.choice([mode for mode in _MODES if mode != path.stat().st_mode & 0o777])
        ),
        "set_times": lambda: os.utime(path, ns=(1, chance.randrange(10**18)), follow_symlinks=False),
        "set_xattr": lambda: os.setxattr(path, "user.mark", bytes([chance.randrange(256)]), follow_symlinks=False),
        "remove_xattr": lambda: os.removexattr(path, "user.mark", follow_symlinks=False),
    }
    operation = chance.choice(list(changes))
    if path == other and operation in ("rename", "exchange"):
        raise FileExistsError
    changes[operation]()
    return operation.replace("exchange", "rename"), str(path)


def _is_in_creation(operation: str, path: str, modes: dict[int, int]) -> bool:
    """Whether the entry of a creation covers the change. It has room for one mode.

    `modes`: by inode number of a file that this process created, the mode that it set first; 0: none.
    """
    if operation not in ("create_file", "set_mode"):
        return False
    st = os.stat(path)
    if operation == "create_file":
        modes[st.st_ino] = 0
    elif modes.get(st.st_ino) == 0:
        modes[st.st_ino] = st.st_mode
    return operation == "set_mode" and modes.get(st.st_ino) == st.st_mode


def _work(top: Path, seed: int, done: int) -> None:
    """Make changes until it is killed, and note each that was answered as made."""
    chance = random.Random(seed)
    modes: dict[int, int] = {}
    while True:
        with contextlib.suppress(OSError):
            operation, path = _change(top, chance)
            # A run of writes, with times that are set in it, has one intent.
            if not _is_in_creation(operation, path, modes) and operation not in ("write_file", "set_times"):
                os.write(done, f"{operation} {os.path.relpath(path, top)}\n".encode())


@contextlib.contextmanager
def _load(world: World, seed: int, notes: Path) -> Iterator[None]:
    children = []
    for worker in range(_WORKERS):
        done = os.open(notes / str(worker), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        child = os.fork()
        if child == 0:
            try:
                _work(world.path / f"w{worker}", seed * _WORKERS + worker, done)
            finally:
                os._exit(0)
        os.close(done)
        children.append(child)
    try:
        yield
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _wait(world: World, chance: random.Random) -> None:
    """Until some moment that is no moment in particular."""
    enough = world.trail.stat().st_size + chance.randrange(_BYTES)
    until(lambda: world.trail.stat().st_size >= enough, "the record grew")
    for _ in range(chance.randrange(_TURNS)):
        pass


def _is_part_of(part: list[tuple[str, str]], whole: list[tuple[str, str]]) -> bool:
    """Whether `part` stands in `whole` in its order, with others between."""
    at = iter(whole)
    return all(each in at for each in part)


@pytest.mark.parametrize(
    ("seed", "transport"),
    [*((seed, "kernel") for seed in range(0, KILLS, _ROUNDS)), (KILLS - _OF_PORTABLE, "portable")],
)
def test_a_killed_server_leaves_no_change_without_a_record(
    mounted: Mounted, source: Path, tmp_path: Path, examine: Examine, seed: int, transport: str
) -> None:
    """Every difference of the tree has an intent, every answered change is recorded, and a new mount works."""
    chance = random.Random(seed)
    mountpoint, notes = tmp_path / "mount", tmp_path / "notes"
    mountpoint.mkdir()
    notes.mkdir()
    for number in range(seed, min(seed + _ROUNDS, KILLS)):
        before = snapshot(source)
        world = mounted(policy=ALLOW_ALL, mountpoint=mountpoint, transport=transport)
        with _load(world, number, notes):
            _wait(world, chance)
            world.kill()
        entries = examine(world, before)
        for worker in range(_WORKERS):
            lines = (line.partition(" ") for line in (notes / str(worker)).read_text().splitlines())
            answered = [(operation, path) for operation, _, path in lines]
            recorded = [
                (entry.operation, entry.path.removeprefix(f"w{worker}/"))
                for entry in entries
                if entry.kind == "intent" and entry.path.startswith(f"w{worker}/")
            ]
            assert _is_part_of(answered, recorded)
    world = mounted(policy=ALLOW_ALL, mountpoint=mountpoint, transport=transport)
    before = snapshot(source)
    run_in_child(make, world.path / "after.md", b"text")
    assert (source / "after.md").read_bytes() == b"text"
    assert snapshot(source, without=("after.md",)) == before
    assert world.umount().closed
    assert list(read(world.trail))[-1].operation == "close"
