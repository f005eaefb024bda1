r"""The messages in which the watcher reports changed names of a source to the server.

NUL separates the parts of a message. The first is a time in nanoseconds since 1970: earlier messages reported all older
changes. Then each directory follows as `/INODE/PATH`, then its names, each with a one-character prefix for its events.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

MODIFIED: Final = 1
MADE: Final = 2
GONE: Final = 4
BEGAN: Final = 8
"""The name's first event was its creation, so it did not exist before."""
DIRECTORY: Final = 16
CLOSED: Final = 32
"""A file that was open for writing was closed: the only event of writes through mmap."""
_PLAIN: Final = 64
"""Added to the events, so that the prefix is neither NUL nor a slash."""
_SLASH: Final = 47
_LONGEST: Final = 1 << 16


LONGEST_PATH: Final = 4095
"""Maximum bytes of a path in a system call (PATH_MAX without the NUL)."""


def reachable(path: str) -> str:
    """Return `path`, or its deepest ancestor that is short enough for a system call. `PATH/` means all below PATH."""
    if len(path) <= LONGEST_PATH // 4 or len(raw := os.fsencode(path)) <= LONGEST_PATH:
        return path
    return os.fsdecode(raw[: raw.rfind(b"/", 0, LONGEST_PATH + 1)])


class NameEvents(NamedTuple):
    """Names in one directory and the events of each, as a bit set of the constants above."""

    ino: int
    path: bytes
    """The directory's path below the source as the watcher knows it; empty for the source."""
    names: dict[bytes, int]


def encode(since: int, found: Iterable[NameEvents]) -> Iterator[bytes]:
    """Yield the messages: each of at most 64 KiB plus one part, so that the server handles requests between them."""
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
    """Return the time of a message, in nanoseconds since 1970."""
    return int(message.partition(b"\0")[0])


def decode(message: bytes) -> Iterator[NameEvents]:
    """Yield the directories of a message."""
    directory: NameEvents | None = None
    for part in message.split(b"\0")[1:]:
        if part[0] == _SLASH:
            if directory is not None:
                yield directory
            number, _, path = part[1:].partition(b"/")
            directory = NameEvents(int(number), path, {})
        elif directory is not None:
            directory.names[part[1:]] = part[0] - _PLAIN
    if directory is not None:
        yield directory
