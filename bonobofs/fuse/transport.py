"""What the server needs of a transport: something that brings requests to the handlers and replies to the callers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from bonobofs.fuse.mount_context import Handler, Notifications


class Hooks(NamedTuple):
    """What a transport calls between requests, in the thread that serves."""

    before: Callable[[float], None]
    """Told the time, before each request."""
    after: Callable[[], None]
    """After each reply, while the caller goes on already."""
    idle: Callable[[float], float | None]
    """Time to tidy up: gives the seconds until it wants to be called again, None to end the loop."""
    failed: Callable[[int, Exception], None]
    """Told of an unforeseen exception, with the opcode."""


class Transport(Protocol):
    """One mount's way to the kernel. It is given the connection's descriptor, and ends with `close`."""

    @property
    def waker(self) -> int:
        """A descriptor to write to when the loop should look up (signal.set_wakeup_fd)."""

    @property
    def notices(self) -> Notifications:
        """What the kernel can be told of its own accord."""

    @property
    def blocked_notices(self) -> int:
        """How many notifications the kernel has not taken in time."""

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        """Have `callback` run between requests, in the thread that serves, whenever `fd` can be read."""

    def remove_reader(self, fd: int) -> None:
        """Listen to `fd` no more."""

    def handshake(self, *, watched: bool) -> None:
        """Agree with the kernel. ProtocolError: it cannot do what the mount needs.

        `watched`: it will be told what changes behind the mount; else it must look for itself.
        """

    def serve(self, handlers: dict[int, Handler], hooks: Hooks) -> None:
        """Serve until the mount ends. An unforeseen exception in a handler refuses that request (EIO)."""

    def close(self) -> None:
        """End the connection: whoever still stands in the mount gets ENOTCONN."""
