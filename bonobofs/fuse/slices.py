"""Long requests, served in slices between others; their slow system calls run in threads.

A handler of a long request returns a generator instead of a reply. It yields None where other requests may be served,
or a `LongCall` for a thread. Its return value is the reply. Any other request may be served between two slices, so each
slice relies only on what it has checked itself. A request that conflicts with a long one raises `Busy`, and is served
again when a long request has ended.

Threads run no Python code except the call: one busy thread makes every request a thousand times slower.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, Final, Generic, NamedTuple, TypeVar

THREADS: Final = 4
"""Maximum of system calls in threads at a time."""
SLICE: Final = 0.002
"""Seconds after which a long request lets others be served."""
MOST_DEFERRED: Final = 16 << 20
"""Maximum of bytes of deferred requests."""

Result = TypeVar("Result")


class LongCall(Generic[Result]):
    """A system call that releases the interpreter lock."""

    def __init__(self, call: Callable[[], Result]) -> None:
        self._call: Final = call
        self._result: list[Result] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call. Never raises."""
        try:
            self._result.append(self._call())
        except BaseException as error:  # noqa: BLE001 - raised by `check` in the serving thread
            self._error = error

    def check(self) -> Result:
        """Return the result of the call, or raise its exception."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result[0]


Steps = Generator[LongCall[Any] | None, None, bytes]
Run = Callable[[Callable[[], int]], Generator[LongCall[Any], None, int]]
"""Makes a system call that may take long, and returns its result."""


class Busy(Exception):  # noqa: N818 - never an answer: the request is served again
    """The request would change what a long one is checking or changing."""

    def __init__(self, first: Steps | None = None) -> None:
        """`first` is work without a reply. The transport starts it at once, and serves the request after it."""
        super().__init__()
        self.first: Final = first


def finished(steps: Steps) -> bytes:
    """Run all slices at once and return the reply."""
    try:
        while True:
            job = next(steps)
            if job is not None:
                job.run()
    except StopIteration as end:
        reply: bytes = end.value
        return reply


class LongRequest(NamedTuple):
    """A long request."""

    unique: int
    opcode: int
    steps: Steps


class LongRequests:
    """The long requests of one connection, and the requests deferred by them. Used by the serving thread."""

    def __init__(self) -> None:
        self.ready: Final[deque[LongRequest]] = deque()
        """Long requests that are ready for their next slice."""
        self.deferred: Final[deque[bytes]] = deque()
        """Requests that wait for a long one to end."""
        self.again: Final[deque[bytes]] = deque()
        """Requests that have waited and must be served again."""
        self._deferred_bytes = 0
        self._jobs: Final[queue.SimpleQueue[tuple[LongCall[Any], LongRequest]]] = queue.SimpleQueue()
        self._done: Final[queue.SimpleQueue[LongRequest]] = queue.SimpleQueue()
        self._threads = 0
        self._under_way = 0
        self.bell: Final = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Readable when a system call has ended."""

    @property
    def has_jobs(self) -> bool:
        """Whether a thread is in a system call."""
        return self._under_way > 0

    @property
    def is_occupied(self) -> bool:
        """Whether no thread is free."""
        return self._under_way >= THREADS

    def start(self, job: LongCall[Any], long: LongRequest) -> None:
        """Run the call in a thread; the request continues afterwards."""
        self._under_way += 1
        if self._threads < self._under_way:
            self._threads += 1
            threading.Thread(target=self._work, daemon=True).start()
        self._jobs.put((job, long))

    def _work(self) -> None:
        while True:
            job, long = self._jobs.get()
            job.run()
            self._done.put(long)
            os.eventfd_write(self.bell, 1)

    def collect(self) -> None:
        """Make the requests ready whose system calls have ended."""
        os.eventfd_read(self.bell)
        while not self._done.empty():
            self._under_way -= 1
            self.ready.append(self._done.get())

    def defer(self, message: bytes) -> bool:
        """Defer a request until a long one has ended.

        False: the limit is exceeded, and long requests must be aborted.
        """
        self.deferred.append(message)
        self._deferred_bytes += len(message)
        return self._deferred_bytes <= MOST_DEFERRED

    def ended(self) -> None:
        """A long request has ended: serve the deferred requests again."""
        self.again.extend(self.deferred)
        self.deferred.clear()
        self._deferred_bytes = 0
