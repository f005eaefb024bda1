"""Random sequences of changes by several agents, taken back in whole."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from bonobofs.system import syscalls
from tests.support.mount_fixtures import MakePlace
from tests.support.source_state import state_of, undo

_NAMES = ("a", "b", "c", "d/a", "d/b", "e/f/a", "e/f/b")
_DIRECTORIES = ("d", "e", "e/f", "g")


def _tree(source: Path) -> None:
    (source / "e/f").mkdir(parents=True)
    (source / "d").mkdir()
    for number, name in enumerate(_NAMES[:-1]):
        (source / name).write_bytes(bytes([65 + number]) * (number * 1700))
        os.utime(source / name, ns=(10**18, 10**18 + number))
    (source / "d/b").chmod(0o600)
    os.symlink("a", source / "s")


def _change(root: Path, rng: random.Random) -> None:
    """Make one random change; one that the file system refuses changes nothing."""
    path, other = root / rng.choice(_NAMES), root / rng.choice(_NAMES)
    directory, another = root / rng.choice(_DIRECTORIES), root / rng.choice(_DIRECTORIES)
    data = rng.randbytes(rng.choice((0, 1, 40, 5000)))

    def save_atomically() -> None:
        temporary = path.with_name(f"{path.name}.new")
        temporary.write_bytes(data)
        temporary.rename(path)

    def write_in_place() -> None:
        with path.open("r+b") as file:
            file.seek(rng.randrange(100))
            file.write(data)

    def append() -> None:
        with path.open("ab") as file:
            file.write(data)

    def exchange() -> None:
        syscalls.renameat2(-100, os.fsencode(path), -100, os.fsencode(other), syscalls.RENAME_EXCHANGE)

    changes: list[Callable[[], object]] = [
        lambda: path.write_bytes(data),
        lambda: path.write_bytes(data),
        save_atomically,
        write_in_place,
        append,
        path.unlink,
        path.unlink,
        lambda: path.rename(other),
        lambda: directory.rename(another),
        exchange,
        lambda: os.link(path, other),
        lambda: os.symlink(rng.choice(("a", "d")), path),
        directory.mkdir,
        directory.rmdir,
        lambda: os.truncate(path, rng.randrange(3000)),
        lambda: path.chmod(rng.choice((0o600, 0o644, 0o755))),
        lambda: os.utime(path, ns=(10**18, rng.randrange(10**18))),
        lambda: os.setxattr(path, "user.note", data[:20]),
        lambda: os.removexattr(path, "user.note"),
    ]
    with suppress(OSError):
        rng.choice(changes)()


@pytest.mark.parametrize("seed", range(4))
def test_everything_is_taken_back(own_place: MakePlace, tmp_path: Path, seed: int) -> None:
    """Two agents change the same files in turns; the undo of both, and the undo of that, restore every file."""
    rng = random.Random(seed)
    source = tmp_path / "source"
    source.mkdir()
    _tree(source)
    before = state_of(source)
    places = [own_place(), own_place()]
    for _ in range(60):
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
    source = tmp_path / "source"
    source.mkdir()
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
