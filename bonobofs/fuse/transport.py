"""Protocol of a transport: it brings requests to the handlers and sends their replies."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from bonobofs.fuse.mount_context import Handler, Notifications


class Hooks(NamedTuple):
    """Functions that a transport calls between requests, in the serving thread."""

    before: Callable[[float], None]
    """Called with the time before each request."""
    after: Callable[[], None]
    """Called after each reply."""
    rest: Callable[[], bool]
    """Called while no request waits: does one part of the work that was put off. True: there is more."""
    idle: Callable[[float], float | None]
    """Called when it is due; returns the seconds until the next call, or None to end the loop."""
    failed: Callable[[int, Exception], None]
    """Called with the opcode and an unexpected exception of its handler."""


class Transport(Protocol):
    """The transport of one mount. It owns the connection's descriptor until `close`."""

    @property
    def waker(self) -> int:
        """A descriptor that wakes the loop when it is written to (signal.set_wakeup_fd)."""

    @property
    def notices(self) -> Notifications:
        """The notifications of this connection."""

    @property
    def blocked_notifications(self) -> int:
        """Number of notifications that the kernel has not taken within a second."""

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` between requests, in the serving thread, whenever `fd` is readable."""

    def remove_reader(self, fd: int) -> None:
        """Call no callback for `fd` any more."""

    def handshake(self, *, watched: bool) -> None:
        """Answer INIT. ProtocolError: the kernel is too old.

        `watched`: the server sends invalidations for external changes; otherwise the kernel compares attributes.
        """

    def serve(self, handlers: dict[int, Handler], hooks: Hooks) -> None:
        """Serve until the mount ends. An unexpected exception in a handler fails that request with EIO."""

    def close(self) -> None:
        """End the connection: every further access to the mount fails with ENOTCONN."""
