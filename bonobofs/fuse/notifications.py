"""The threads that send notifications to the kernel.

The kernel may hold a lock that a notification waits for, so the thread that serves sends none. A program can keep such
a lock: getdents64 into a buffer that is mapped from a FUSE file of the program holds the lock of the directory until
that file is read. A notification that does not return within LATE seconds keeps its thread; the next thread goes on.
"""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import Final

from bonobofs.fuse import abi as p

LOOK: Final = 1.0
"""Seconds without a notification after which `quiet` is called."""
LATE: Final = 1.0
"""Seconds after which a notification counts as blocked."""
MOST_BLOCKED: Final = 8
"""Threads that may be blocked. From then on no name is invalidated: only that waits for a lock of a directory."""
GONE: Final = (errno.ENODEV, errno.ECONNABORTED)

Then = Callable[[bool], None]
"""Called after the notifications before it; False: one of them is blocked."""


class Notifier:
    """A queue of notifications for one connection, and the threads that send them."""

    def __init__(self, fd: int, quiet: Callable[[], None]) -> None:
        self._fd: Final = fd
        self._quiet: Final = quiet
        self._queue: Final[queue.SimpleQueue[bytes | Then]] = queue.SimpleQueue()
        self._lock: Final = threading.Lock()
        self._thread: threading.Thread | None = None
        """The thread that takes from the queue."""
        self._sending: tuple[float, bytes] | None = None
        """What that thread sends, and since when."""
        self._blocked: Final[dict[threading.Thread, int]] = {}
        """By thread, the directory whose name is being invalidated; 0 for another notification."""
        self._closed = False

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def blocked(self) -> int:
        """How many notifications have not returned in time."""
        return len(self._blocked)

    def put(self, notice: bytes) -> None:
        self._queue.put(notice)

    def then(self, call: Then) -> None:
        """Call `call` in some thread, after all that was put before."""
        if self._closed:
            call(True)
        else:
            self._queue.put(call)

    def look(self, now: float) -> None:
        """Replace the thread if its notification is late. Called about once a second by the thread that serves."""
        with self._lock:
            if self._sending is None or self._thread is None or now - self._sending[0] < LATE:
                return
            self._blocked[self._thread] = _directory(self._sending[1])
            self._sending = None
            self.start()

    def close(self) -> None:
        self._closed = True
        self._queue.put(b"")
        if self._thread is not None:
            self._thread.join(1.0)

    def _run(self) -> None:
        gone = False
        while True:
            try:
                notice = self._queue.get(timeout=LOOK)
            except queue.Empty:
                self._quiet()
                continue
            if callable(notice):
                notice(not self._blocked)
            elif not notice:
                return
            elif not gone and not self._would_block(notice):
                gone = self._send(notice)
                if self._is_replaced():
                    return

    def _would_block(self, notice: bytes) -> bool:
        directory = _directory(notice)
        with self._lock:
            return directory > 0 and (directory in self._blocked.values() or len(self._blocked) >= MOST_BLOCKED)

    def _send(self, notice: bytes) -> bool:
        """Send one; True: the connection has ended."""
        with self._lock:
            self._sending = monotonic(), notice
        try:
            os.write(self._fd, notice)
        except OSError as error:
            return error.errno in GONE or error.errno == errno.EBADF
            # ENOENT: the kernel has not cached the node
        return False

    def _is_replaced(self) -> bool:
        with self._lock:
            this = threading.current_thread()
            if this is self._thread:
                self._sending = None
                return False
            with suppress(KeyError):
                del self._blocked[this]
            return True


def _directory(notice: bytes) -> int:
    """The node whose lock the notification takes: the directory of a name; 0 where it takes none."""
    _, kind, _ = p.OUT_HEADER.unpack_from(notice)
    return int(p.INVAL_ENTRY_OUT.unpack_from(notice, p.OUT_SIZE)[0]) if kind == p.NOTIFY_INVAL_ENTRY else 0
