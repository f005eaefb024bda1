"""One program of the mixed load: `python -m benchmarks.load ERRAND PLACE COUNT`, until it is terminated.

It works on a bounded set of names, so that whatever grows in the server is the server's own doing, and keeps the
number of operations it has done in the file COUNT.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

NAMES = 150
BURST = 200
"""Operations between two looks at the clock and the counter."""

chance = random.Random(os.getpid())


def write(place: Path) -> None:
    """A burst of changes by one writer, refused ones and failures among them."""
    place.mkdir(exist_ok=True)
    for _ in range(BURST):
        one, other = (place / f"f{chance.randrange(NAMES)}" for _ in range(2))
        with contextlib.suppress(OSError):
            chance.choice(_CHANGES)(one, other)


def _create(one: Path, other: Path) -> None:
    one.write_bytes(b"x" * chance.randrange(20_000))


def _append(one: Path, other: Path) -> None:
    with one.open("ab", buffering=0) as stream:
        for _ in range(8):
            stream.write(b"a line of text\n")


def _replace(one: Path, other: Path) -> None:
    os.replace(one, other)


def _remove(one: Path, other: Path) -> None:
    one.unlink()


def _link(one: Path, other: Path) -> None:
    os.link(one, other)


def _symlink(one: Path, other: Path) -> None:
    os.symlink(one.name, other)


def _attributes(one: Path, other: Path) -> None:
    one.chmod(chance.choice((0o600, 0o644)))
    os.utime(one, (1, 1))
    os.setxattr(one, "user.note", b"n")


def _directory(one: Path, other: Path) -> None:
    below = one.with_suffix(".d")
    below.mkdir()
    (below / "file").write_text("text")
    os.rename(below, other.with_suffix(".d"))
    (other.with_suffix(".d") / "file").unlink()
    other.with_suffix(".d").rmdir()


def _held_open(one: Path, other: Path) -> None:
    with one.open("r+b") as stream:
        one.unlink()
        stream.write(b"after its name is gone")


def _denied(one: Path, other: Path) -> None:
    (one.parent.parent.parent / "sealed" / one.name).write_text("no")


def _edited(one: Path, other: Path) -> None:
    subprocess.run(["sed", "-i", "s/text/word/", str(one)], stderr=subprocess.DEVNULL, check=False)


_CHANGES: tuple[Callable[[Path, Path], None], ...] = (
    *(_create,) * 6,
    *(_append,) * 4,
    *(_replace,) * 4,
    *(_remove,) * 2,
    _link,
    _symlink,
    _attributes,
    _directory,
    _held_open,
    _denied,
    _edited,
)


def walk(place: Path) -> None:
    """Read everything, as agents do."""
    for command in ("find . -size +0", "grep -rq no-such-words tree", "git status --short"):
        subprocess.run(command.split(), cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def behind(place: Path) -> None:
    """Changes that nobody admitted, in the source."""
    write(place)


def policy(place: Path) -> None:
    """The same policy, written anew."""
    fresh = place.with_suffix(".new")
    fresh.write_bytes(place.read_bytes())
    os.replace(fresh, place)


PACE = {"write": 0.1, "walk": 1.0, "behind": 2.0, "policy": 20.0}
"""Seconds between two turns of an errand: the load is a steady one, nothing is waited for."""
ERRANDS: dict[str, Callable[[Path], None]] = {"write": write, "walk": walk, "behind": behind, "policy": policy}


def main(errand: str, place: Path, count: Path) -> None:
    """Do one errand over and over."""
    done = 0
    while True:
        ERRANDS[errand](place)
        done += BURST if errand in ("write", "behind") else 1
        count.write_text(str(done))
        time.sleep(PACE[errand])


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
