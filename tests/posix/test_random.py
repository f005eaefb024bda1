"""Random calls on names and on open files: every outcome must be the same in every world."""

from __future__ import annotations

import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.posix.harness import ANY, See, attempt, case
from tests.support.syscalls import (
    FALLOC_KEEP_SIZE,
    FALLOC_PUNCH_HOLE,
    FALLOC_ZERO_RANGE,
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    entries,
    fallocate,
    link_open,
    renameat2,
    reread,
)

NAMES = [f"{directory}{letter}.md" for directory in ("", "d.md/", "e.md/", "d.md/f.md/") for letter in "abc"]
DIRECTORIES = ["d.md", "e.md", "d.md/f.md", "e.md/g.md"]
WAYS = (
    os.O_RDONLY,
    os.O_RDWR,
    os.O_WRONLY | os.O_APPEND,
    os.O_RDWR | os.O_CREAT,
    os.O_RDWR | os.O_CREAT | os.O_EXCL,
    os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    os.O_WRONLY | os.O_TRUNC,
    os.O_RDWR | os.O_CREAT | os.O_APPEND,
    os.O_RDONLY | os.O_DIRECTORY,
    os.O_RDONLY | os.O_NOFOLLOW,
)


class Wanderer:
    """Makes random calls below the working directory and notes what comes out."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._open: list[int] = []
        self.outcomes: list[object] = []
        self._calls: list[tuple[int, Callable[[], object]]] = [
            (8, self._open_one),
            (3, self._close_one),
            (8, self._write),
            (6, self._read),
            (2, self._cut),
            (2, self._allocate),
            (2, self._copy),
            (6, self._about_open),
            (6, self._about_name),
            (5, self._rename),
            (4, self._unlink),
            (4, self._link),
            (2, self._symlink),
            (3, self._directory),
            (2, self._list),
            (2, self._attribute),
            (2, self._mode),
        ]

    def wander(self, steps: int) -> None:
        """Make so many calls, then close what is open."""
        weights, calls = zip(*self._calls, strict=True)
        for _ in range(steps):
            call: Callable[[], object] = self._dice.choices(calls, weights)[0]
            self.outcomes.append((call.__name__, attempt(call)))
        for fd in self._open:
            os.close(fd)

    def _name(self) -> str:
        return self._dice.choice(NAMES)

    def _fd(self) -> int:
        return self._dice.choice(self._open) if self._open else -1

    def _range(self) -> tuple[int, int]:
        return self._dice.randrange(20_000), self._dice.randrange(1, 9000)

    def _open_one(self) -> None:
        way, name = self._dice.choice(WAYS), self._dice.choice(NAMES + DIRECTORIES)
        fd = os.open(name, way, self._dice.choice((0o644, 0o600, 0o444)))
        self._open.append(fd)
        if len(self._open) > 12:
            os.close(self._open.pop(0))

    def _close_one(self) -> None:
        if self._open:
            os.close(self._open.pop(self._dice.randrange(len(self._open))))

    def _write(self) -> int:
        offset, length = self._range()
        data = self._dice.randbytes(length)
        return os.pwrite(self._fd(), data, offset)

    def _read(self) -> bytes:
        offset, length = self._range()
        return self._dice.choice((os.pread, reread))(self._fd(), length, offset)

    def _cut(self) -> None:
        offset, _ = self._range()
        if self._dice.random() < 0.5:
            os.ftruncate(self._fd(), offset)
        else:
            os.truncate(self._name(), offset)

    def _allocate(self) -> None:
        mode = self._dice.choice((0, FALLOC_KEEP_SIZE, FALLOC_KEEP_SIZE | FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE))
        fallocate(self._fd(), mode, *self._range())

    def _copy(self) -> int:
        source, target = self._fd(), self._fd()
        (at, length), (there, _) = self._range(), self._range()
        return os.copy_file_range(source, target, length, at, there)

    def _about(self, s: os.stat_result) -> list[Any]:
        told: list[Any] = [oct(s.st_mode), s.st_nlink, s.st_uid, s.st_gid]
        return told if stat.S_ISDIR(s.st_mode) else [*told, s.st_size]

    def _about_open(self) -> list[Any]:
        fd, name = self._fd(), self._name()
        found = os.fstat(fd)
        try:
            same = os.path.samestat(found, os.stat(name))
        except OSError as error:
            return [*self._about(found), error.errno]
        return [*self._about(found), same]

    def _about_name(self) -> list[Any]:
        return self._about(os.lstat(self._dice.choice(NAMES + DIRECTORIES)))

    def _rename(self) -> None:
        names = self._dice.choice((NAMES, NAMES, DIRECTORIES))
        old, new = self._dice.choice(names), self._dice.choice(names)
        renameat2(old, new, self._dice.choice((0, 0, RENAME_NOREPLACE, RENAME_EXCHANGE)))

    def _unlink(self) -> None:
        os.unlink(self._name())

    def _link(self) -> None:
        if self._dice.random() < 0.3:
            link_open(self._fd(), self._name())
        else:
            os.link(self._name(), self._name(), follow_symlinks=False)

    def _symlink(self) -> None:
        os.symlink(self._dice.choice(("a.md", "b.md", "nowhere.md", "f.md/a.md")), self._name())

    def _directory(self) -> None:
        self._dice.choice((os.mkdir, os.mkdir, os.rmdir))(self._dice.choice(DIRECTORIES))

    def _list(self) -> list[str]:
        if self._dice.random() < 0.5:
            return sorted(os.listdir(self._dice.choice([".", *DIRECTORIES])))
        fd = self._fd()
        os.lseek(fd, 0, os.SEEK_SET)
        return entries(fd, 4096)

    def _attribute(self) -> object:
        target = self._dice.choice((self._fd(), self._name()))
        key = self._dice.choice(("user.a", "user.b"))
        value = self._dice.randbytes(20)
        calls: list[Callable[[], object]] = [
            lambda: os.setxattr(target, key, value),
            lambda: os.getxattr(target, key),
            lambda: os.removexattr(target, key),
        ]
        return self._dice.choice(calls)()

    def _mode(self) -> None:
        target = self._dice.choice((self._fd(), self._dice.choice(NAMES + DIRECTORIES)))
        closing, opening = (
            self._dice.choice((0o644, 0o600, 0o444, 0o000, 0o664)),
            self._dice.choice((0o755, 0o700, 0o500)),
        )
        os.chmod(target, opening if stat.S_ISDIR(os.stat(target).st_mode) else closing)


def _tree(top: Path) -> list[Any]:
    """Names, kinds, modes and link counts below a directory; what cannot be looked at comes out as its error."""
    found: list[Any] = []
    for name in sorted(os.listdir(top)):
        s = os.lstat(top / name)
        found.append((str(top / name), stat.filemode(s.st_mode), s.st_nlink))
        if stat.S_ISDIR(s.st_mode):
            found.append(attempt(_tree, top / name))
    return found


@case()
def test_calls(see: See) -> None:
    """Three times six hundred random calls on twelve names and up to twelve open files."""
    for seed in range(3):
        os.mkdir(str(seed))
        os.chdir(str(seed))
        wanderer = Wanderer(seed)
        wanderer.wander(600)
        see(f"outcomes {seed}", ANY, lambda wanderer=wanderer: wanderer.outcomes)
        see(f"kinds of outcomes {seed}", True, lambda wanderer=wanderer: len(set(map(str, wanderer.outcomes))) > 100)
        see(f"tree {seed}", ANY, _tree, Path())
        os.chdir("..")
