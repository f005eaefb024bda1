"""Threads that send notifications to the kernel.

A notification may wait for a lock that the kernel holds during a request, so the serving thread sends none. A program
can hold such a lock: getdents64 into a buffer that is mapped from a FUSE file of the program holds the directory's lock
until that file is read. A notification that takes longer than LATE_SECONDS keeps its thread; a new thread continues.
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

QUIET_SECONDS: Final = 1.0
"""Seconds without a notification after which `on_quiet` is called."""
LATE_SECONDS: Final = 1.0
"""Seconds after which a notification counts as blocked."""
MAX_BLOCKED: Final = 8
"""Blocked threads. With so many, no more names are invalidated: only these wait for the lock of a directory."""
GONE: Final = (errno.ENODEV, errno.ECONNABORTED)

Callback = Callable[[bool], None]
"""Called after the notifications before it; False: one of them is blocked."""


class NotificationQueue:
    """A queue of notifications for one connection, and the threads that send them."""

    def __init__(self, fd: int, on_quiet: Callable[[], None]) -> None:
        self._fd: Final = fd
        self._on_quiet: Final = on_quiet
        self._queue: Final[queue.SimpleQueue[bytes | Callback]] = queue.SimpleQueue()
        self._lock: Final = threading.Lock()
        self._sender: threading.Thread | None = None
        """The thread that takes from the queue."""
        self._sending: tuple[float, bytes] | None = None
        """The notification that this thread sends, and when it began."""
        self._blocked: Final[dict[threading.Thread, int]] = {}
        """By thread, the directory of the name that it invalidates; 0 for other notifications."""
        self._closed = False

    def start(self) -> None:
        self._sender = threading.Thread(target=self._run, daemon=True)
        self._sender.start()

    @property
    def blocked(self) -> int:
        """Number of notifications that have not returned within LATE_SECONDS."""
        return len(self._blocked)

    def put(self, notice: bytes) -> None:
        self._queue.put(notice)

    def after_pending(self, callback: Callback) -> None:
        """Call `callback`, in any thread, after every notification that is already queued."""
        if self._closed:
            callback(True)
        else:
            self._queue.put(callback)

    def replace_late_thread(self, now: float) -> None:
        """Start a new thread if the present one is blocked. Called about once a second by the serving thread."""
        with self._lock:
            if self._sending is None or self._sender is None or now - self._sending[0] < LATE_SECONDS:
                return
            self._blocked[self._sender] = _directory(self._sending[1])
            self._sending = None
            self.start()

    def close(self) -> None:
        self._closed = True
        self._queue.put(b"")
        if self._sender is not None:
            self._sender.join(1.0)

    def _run(self) -> None:
        gone = False
        while True:
            try:
                notice = self._queue.get(timeout=QUIET_SECONDS)
            except queue.Empty:
                self._on_quiet()
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
            return directory > 0 and (directory in self._blocked.values() or len(self._blocked) >= MAX_BLOCKED)

    def _send(self, notice: bytes) -> bool:
        """Send a notification; True: the connection has ended."""
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
            if this is self._sender:
                self._sending = None
                return False
            with suppress(KeyError):
                del self._blocked[this]
            return True


def _directory(notice: bytes) -> int:
    """The node whose lock the notification takes: the directory of a name; 0: none."""
    _, kind, _ = p.OUT_HEADER.unpack_from(notice)
    return int(p.INVAL_ENTRY_OUT.unpack_from(notice, p.OUT_SIZE)[0]) if kind == p.NOTIFY_INVAL_ENTRY else 0
