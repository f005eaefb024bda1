r"""What may have happened to names of a source, as the watcher tells it to the serving process.

A message is, with NUL between its parts, a time in nanoseconds since 1970, all before which was told earlier; then for
each directory `/INODE/PATH`, followed by its names, each after one character that says what happened to it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

MODIFIED: Final = 1
MADE: Final = 2
GONE: Final = 4
BEGAN: Final = 8
"""The first that happened to the name was that it was made: it led to nothing before."""
DIRECTORY: Final = 16
CLOSED: Final = 32
"""A file that was open for writing was closed: what was written through a mapping says so in no other way."""
_PLAIN: Final = 64
"""Added to a sum of these, so that it is a character, and not a slash."""
_SLASH: Final = 47
_LONGEST: Final = 1 << 16


LONGEST_PATH: Final = 4095
"""Bytes of the longest path that a system call takes."""


def reachable(path: str) -> str:
    """Return `path`, or its deepest ancestor that a system call takes; one that ends in `/` stands for all below it."""
    if len(path) <= LONGEST_PATH // 4 or len(raw := os.fsencode(path)) <= LONGEST_PATH:
        return path
    return os.fsdecode(raw[: raw.rfind(b"/", 0, LONGEST_PATH + 1)])


class Names(NamedTuple):
    """Names in one directory, with what happened to each: a sum of the constants above."""

    ino: int
    path: bytes
    """Of the directory, below the source, as far as the watcher knows; the source itself is empty."""
    names: dict[bytes, int]


def encode(since: int, found: Iterable[Names]) -> Iterator[bytes]:
    """The messages: each of at most 64 KiB and one part, so that the server serves requests between them."""
    first = b"%d" % since
    parts, size = [first], 0
    for ino, path, names in found:
        directory = b"/%d/%s" % (ino, path)
        parts.append(directory)
        size += len(directory)
        for name, kinds in names.items():
            if size >= _LONGEST:
                yield b"\0".join(parts)
                parts, size = [first, directory], 0
            parts.append(b"%c%s" % (_PLAIN + kinds, name))
            size += len(name) + 2
    if len(parts) > 1:
        yield b"\0".join(parts)


def since(message: bytes) -> int:
    """The time of a message."""
    return int(message.partition(b"\0")[0])


def decode(message: bytes) -> Iterator[tuple[int, bytes, bytes, int]]:
    """Each name of a message: its directory's inode number and path, the name, what happened to it."""
    ino, path = 0, b""
    for part in message.split(b"\0")[1:]:
        if part[0] == _SLASH:
            number, _, path = part[1:].partition(b"/")
            ino = int(number)
        else:
            yield ino, path, part[1:], part[0] - _PLAIN
