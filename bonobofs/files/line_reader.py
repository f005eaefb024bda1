"""Lines of a text file from one number on, of files of any size and with lines of any length."""

from __future__ import annotations

from time import monotonic
from typing import BinaryIO, Final, NamedTuple

from bonobofs.errors import UsageError

MOST_BYTES: Final = 1_000_000
"""Of the lines that are given at once, newlines too."""
_CHUNK: Final = 1 << 20
_HEAD: Final = 8192
"""Bytes in which a NUL makes a file binary."""
_SECONDS_TO_COUNT: Final = 1.0


class Lines(NamedTuple):
    """Lines of a file, without their newlines."""

    lines: list[bytes]
    total: int | None
    """How many lines the whole file has; None where counting them would have taken too long."""
    whole: bool
    """These are all that was asked for. Else there are more; one that stands alone may be a part of its line."""


def lines_of(file: BinaryIO, first: int, limit: int | None, deadline: float) -> Lines:
    """Read `limit` lines, or all, from the line `first` on. A newline ends a line; the last one may have none.

    `deadline` is of the monotonic clock. UsageError: a binary file. TimeoutError: `first` was not reached.
    """
    reading = _Reading(file)
    held = bytearray(reading.skip_to(first, deadline))
    count = held.count(b"\n")
    while len(held) <= MOST_BYTES and (limit is None or count < limit):
        chunk = reading.more()
        if not chunk:
            break
        held += chunk
        count += chunk.count(b"\n")
    asked = bytes(held).split(b"\n")
    if not asked[-1]:
        asked.pop()
    asked = asked[:limit]
    given = _that_fit(asked)
    total = reading.count(min(deadline, monotonic() + _SECONDS_TO_COUNT))
    return Lines(given, total, whole=given == asked)


def _that_fit(asked: list[bytes]) -> list[bytes]:
    room = MOST_BYTES
    for index, line in enumerate(asked):
        room -= len(line) + 1
        if room < 0:
            return asked[:index] or [line[: MOST_BYTES - 1]]
    return asked


class _Reading:
    """A file that is read on, and how many lines that was."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: Final = file
        self._ended = 0
        """Newlines in what was read."""
        self._last = b"\n"
        self._head = file.read(_HEAD)
        if b"\0" in self._head:
            raise UsageError("this is a binary file; read_file gives lines of text")

    def more(self) -> bytes:
        """The next of the file; empty at its end."""
        chunk, self._head = self._head or self._file.read(_CHUNK), b""
        self._ended += chunk.count(b"\n")
        self._last = chunk[-1:] or self._last
        return chunk

    def skip_to(self, first: int, deadline: float) -> bytes:
        """The beginning of what follows where a line begins; empty where there is none."""
        before = 0
        while chunk := self.more():
            if self._ended >= first - 1:
                at = 0
                for _ in range(first - 1 - before):
                    at = chunk.index(b"\n", at) + 1
                return chunk[at:]
            before = self._ended
            if monotonic() > deadline:
                raise TimeoutError("the line lies too far into the file to be reached in time")
        return b""

    def count(self, deadline: float) -> int | None:
        """How many lines the file has."""
        while self.more():
            if monotonic() > deadline:
                return None
        return self._ended + (self._last != b"\n")
