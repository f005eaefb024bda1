"""Random changes of a small tree, as programs make them."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bonobofs.system import syscalls
from tests.support.users import IS_ROOT

NAMES = ("a", "b", "c", "d/a", "d/b", "e/f/a", "e/f/b")
DIRECTORIES = ("d", "e", "e/f", "g")


def make_tree(source: Path) -> Path:
    """Make files, directories and a symlink in an empty directory; return it."""
    (source / "e/f").mkdir(parents=True)
    (source / "d").mkdir()
    for number, name in enumerate(NAMES[:-1]):
        (source / name).write_bytes(bytes([65 + number]) * (number * 1700))
        os.utime(source / name, ns=(10**18, 10**18 + number))
    (source / "d/b").chmod(0o600)
    os.symlink("a", source / "s")
    os.setxattr(source / "d", "user.note", b"of a directory")
    os.utime(source / "d", ns=(10**18, 10**18 + 77))
    return source


def _of_names(root: Path, rng: random.Random) -> list[Callable[[], object]]:
    path, other = root / rng.choice(NAMES), root / rng.choice(NAMES)
    directory, another = root / rng.choice(DIRECTORIES), root / rng.choice(DIRECTORIES)
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
    path, other, at = root / rng.choice(NAMES), root / rng.choice(NAMES), rng.randrange(3000)
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
    path = root / rng.choice((*NAMES, *DIRECTORIES, "s"))
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


def change_at_random(root: Path, rng: random.Random) -> None:
    """Make one random change; one that the file system or the policy refuses changes nothing."""
    group = rng.choice((_of_names, _of_names, _of_content, _of_attributes))
    with suppress(OSError):
        rng.choice(group(root, rng))()
