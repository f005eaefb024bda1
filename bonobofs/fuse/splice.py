"""Long replies to READ, moved by the kernel from the source's pages to the caller's without passing through here.

Read into a buffer and written out again, each byte is copied twice, by the one thread that serves everybody. Through a
pipe (splice(2)) it is copied once: 1 GiB is read in three quarters of the time.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

_WANTED: Final = 1 << 20
"""Bytes that the pipe should hold: what an ordinary user may ask for."""
_AROUND: Final = 2 * 4096
"""What a piece may take in the pipe beyond its length: a page for the head, and one where its ends lie within pages."""


class Stretch:
    """Part of a file that is the whole of a reply: `length` bytes from `offset` on, which were all there just now."""

    __slots__ = ("fd", "length", "offset")

    SHORTEST: Final = 64 * 1024
    """Bytes. Shorter ones are read and written at less cost than moved."""

    def __init__(self, fd: int, offset: int, length: int) -> None:
        self.fd = fd
        self.offset = offset
        self.length = length

    def __iter__(self) -> Iterator[bytes]:
        """The same by reading, for a transport that cannot move."""
        yield os.pread(self.fd, self.length, self.offset)


class Pipe:
    """The way from a file to the connection. It is empty between two replies."""

    def __init__(self) -> None:
        self._open()

    def _open(self) -> None:
        self._out, self._in = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with suppress(OSError):
            fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, _WANTED)
        self._room = fcntl.fcntl(self._in, fcntl.F_GETPIPE_SZ) - _AROUND

    def move(self, head: bytes, stretch: Stretch, connection: int) -> bool:
        """Send `head` and the stretch in one; False, with nothing sent, where they must be read and written instead.

        Raises OSError where the connection does not take the reply.
        """
        length = stretch.length
        if length > self._room:
            return False
        got = 0
        try:
            os.write(self._in, head)
            while got < length:
                moved = os.splice(stretch.fd, self._in, length - got, offset_src=stretch.offset + got)
                if moved == 0:
                    break  # it was cut short meanwhile
                got += moved
        except OSError:
            got = -1
        if got < length:
            self._renew()
            return False
        try:
            os.splice(self._out, connection, len(head) + length)
        except OSError:
            self._renew()
            raise
        return True

    def _renew(self) -> None:
        """Begin with an empty one."""
        self.close()
        self._open()

    def close(self) -> None:
        """Close both ends."""
        os.close(self._out)
        os.close(self._in)
