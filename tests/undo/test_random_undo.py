"""Random sequences of changes by several agents, taken back in whole, in parts and in any order without a conflict."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from bonobofs.ipc.client import call
from bonobofs.state.home import inside_directory
from bonobofs.system import syscalls
from tests.support.commands import bonobofs, environment
from tests.support.mount_fixtures import MakePlace, Place
from tests.support.source_state import State, state_of, undo
from tests.support.users import IS_ROOT

_NAMES = ("a", "b", "c", "d/a", "d/b", "e/f/a", "e/f/b")
_DIRECTORIES = ("d", "e", "e/f", "g")
_STAGING = """
default = "deny"
temporary = ["*.tmp"]
[[rule]]
name = "short names"
paths = ["?", "?/?", "?/?/?"]
executable = true
"""
"""A policy under which a new name that ends in .tmp is staged, and published when it is renamed or linked."""


def _tree(source: Path) -> Path:
    (source / "e/f").mkdir(parents=True)
    (source / "d").mkdir()
    for number, name in enumerate(_NAMES[:-1]):
        (source / name).write_bytes(bytes([65 + number]) * (number * 1700))
        os.utime(source / name, ns=(10**18, 10**18 + number))
    (source / "d/b").chmod(0o600)
    os.symlink("a", source / "s")
    os.setxattr(source / "d", "user.note", b"of a directory")
    os.utime(source / "d", ns=(10**18, 10**18 + 77))
    return source


def _of_names(root: Path, rng: random.Random) -> list[Callable[[], object]]:
    path, other = root / rng.choice(_NAMES), root / rng.choice(_NAMES)
    directory, another = root / rng.choice(_DIRECTORIES), root / rng.choice(_DIRECTORIES)
    data = rng.randbytes(rng.choice((0, 1, 40, 5000)))

    def save_atomically() -> None:
        temporary = path.with_name(rng.choice(("t", f"{path.name}.tmp")))  # the second one is staged
        temporary.write_bytes(data)
        temporary.chmod(0o640)
        temporary.rename(path)

    def publish_by_link() -> None:
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_bytes(data)
        try:
            os.link(temporary, path)
        finally:
            temporary.unlink()

    def put_symlink() -> None:
        temporary = path.with_name("l")
        os.symlink(rng.choice(("a", "d")), temporary)
        temporary.rename(path)

    def exchange() -> None:
        syscalls.renameat2(-100, os.fsencode(path), -100, os.fsencode(other), syscalls.RENAME_EXCHANGE)

    return [
        lambda: path.write_bytes(data),
        save_atomically,
        save_atomically,
        publish_by_link,
        path.unlink,
        path.unlink,
        lambda: path.rename(other),
        lambda: directory.rename(another),
        exchange,
        lambda: os.link(path, other),
        put_symlink,
        directory.mkdir,
        directory.rmdir,
    ]


def _of_content(root: Path, rng: random.Random) -> list[Callable[[], object]]:
    path, other, at = root / rng.choice(_NAMES), root / rng.choice(_NAMES), rng.randrange(3000)
    data = rng.randbytes(rng.choice((1, 40, 5000)))

    def write_in_place() -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(data)

    def append() -> None:
        with path.open("ab") as file:
            file.write(data)

    def allocate() -> None:
        with path.open("r+b") as file:
            syscalls.fallocate(file.fileno(), rng.choice((0, 1, 3)), at, 1000)  # 1: keep the size, 3: punch a hole

    def copy_range() -> None:
        with other.open("rb") as source, path.open("r+b") as target:
            os.copy_file_range(source.fileno(), target.fileno(), 1000, 0, at)

    return [lambda: path.write_bytes(data), write_in_place, append, allocate, copy_range, lambda: os.truncate(path, at)]


def _of_attributes(root: Path, rng: random.Random) -> list[Callable[[], object]]:
    path = root / rng.choice((*_NAMES, *_DIRECTORIES, "s"))
    time, owner = rng.randrange(10**18), rng.choice((0, 1, 65534))

    def set_mode() -> None:
        path.chmod(rng.choice((0o700, 0o644 | 0o100 * path.is_dir(), 0o755)), follow_symlinks=path.is_symlink())

    return [
        set_mode,
        lambda: os.utime(path, ns=(10**18, time), follow_symlinks=False),
        lambda: os.setxattr(path, "user.note", rng.randbytes(20), follow_symlinks=False),
        lambda: os.removexattr(path, "user.note", follow_symlinks=False),
        lambda: os.chown(path, owner, owner, follow_symlinks=False) if IS_ROOT else None,
    ]


def _change(root: Path, rng: random.Random) -> None:
    """Make one random change; one that the file system or the policy refuses changes nothing."""
    group = rng.choice((_of_names, _of_names, _of_content, _of_attributes))
    with suppress(OSError):
        rng.choice(group(root, rng))()


def _without_dir_times(state: State) -> State:
    """Without the times of directories: these return only if every later change of their names is taken back."""
    return {path: (*about[:3], *about[4:]) if len(about) < 6 else about for path, about in state.items()}


@pytest.mark.parametrize("seed", range(6))
def test_everything_is_taken_back(own_place: MakePlace, tmp_path: Path, seed: int) -> None:
    """Two agents change the same files in turns; the undo of both, and the undo of that, restore every file."""
    rng = random.Random(seed)
    (source := tmp_path / "source").mkdir()
    before = state_of(_tree(source))
    places = [own_place(policy=_STAGING), own_place(policy=_STAGING)]
    for _ in range(80):
        _change(rng.choice(places).path, rng)
    changed = state_of(source)
    first = undo(places[0], since="1d")
    assert (first["conflicts"], first["failures"]) == ([], [])
    assert state_of(source) == before
    second = undo(places[0], of_session=first["session"])
    assert (second["conflicts"], second["failures"]) == ([], [])
    assert state_of(source) == changed


@pytest.mark.parametrize("seed", range(4))
def test_parts_are_taken_back_newest_first(own_place: MakePlace, tmp_path: Path, seed: int) -> None:
    """Sessions that follow each other are taken back one by one; each leaves the state before it."""
    rng = random.Random(seed)
    (source := tmp_path / "source").mkdir()
    _tree(source)
    places = [own_place() for _ in range(3)]
    states = []
    for place in places:
        states.append(state_of(source))
        for _ in range(25):
            _change(place.path, rng)
    for place, state in zip(reversed(places), reversed(states), strict=True):
        result = undo(place, of_session=place.session.session)
        assert (result["conflicts"], result["failures"]) == ([], [])
        assert state_of(source) == state


@pytest.mark.parametrize("seed", range(4))
def test_turns_are_taken_back_in_any_order_without_a_conflict(own_place: MakePlace, tmp_path: Path, seed: int) -> None:
    """A turn without a conflict is chosen at random until none is left. One with a conflict changes nothing of it."""
    rng = random.Random(seed)
    (source := tmp_path / "source").mkdir()
    before = state_of(_tree(source))
    places = [own_place(), own_place()]
    turns: list[tuple[Place, str]] = []
    for number in range(10):
        place = rng.choice(places)
        answer = call(inside_directory(place.home, place.session.session), "mark", name=f"turn {number}")
        turns.append((place, answer["turn"]))
        for _ in range(5):
            _change(place.path, rng)
    out_of_order = 0
    while turns:
        free = [turn for turn in turns if not undo(turn[0], turn=turn[1], dry_run=True)["conflicts"]]
        place, name = rng.choice(free)
        out_of_order += (place, name) != turns[-1]
        result = undo(place, turn=name)
        assert (result["conflicts"], result["failures"]) == ([], [])
        turns.remove((place, name))
    assert _without_dir_times(state_of(source)) == _without_dir_times(before)
    assert out_of_order


@pytest.mark.root
@pytest.mark.parametrize("when", [9, 17, 26, 36, 47, 61])
def test_a_killed_undo_of_a_random_sequence_is_completed(own_place: MakePlace, tmp_path: Path, when: int) -> None:
    """kill -9 at one of the calls that change a file: the next undo leaves every file and directory as it was."""
    rng = random.Random(when)
    (source := tmp_path / "source").mkdir()
    before = state_of(_tree(source))
    place = own_place(policy=_STAGING)
    for _ in range(60):
        _change(place.path, rng)
    calls = "renameat,renameat2,linkat,unlinkat,symlinkat,mkdirat,pwrite64,?fchmodat,fchmod,utimensat,sendfile,write"
    inject = f"inject={calls}:signal=KILL:when={when}"
    program = [sys.executable, "-m", "bonobofs", "undo", "--session", place.session.session]
    killed = subprocess.run(
        ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={calls}", "-e", inject, *program],
        cwd="/", env=environment(), capture_output=True, check=False,
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    result = undo(place, of_session=place.session.session)
    assert (result["conflicts"], result["failures"]) == ([], [])
    assert state_of(source) == before
    assert bonobofs("audit", "verify").returncode == 0
