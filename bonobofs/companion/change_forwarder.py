"""Changes behind the mount, told to the server: at once when it was quiet, else a few at a time."""

from __future__ import annotations

import select
from time import monotonic
from typing import Final

from bonobofs.ipc.channel import Kind, Line
from bonobofs.system.inotify import Changes, UnwatchableError, Watcher
from bonobofs.system.watcher_events import CLOSED, MODIFIED, Names, encode

_APART: Final = 0.02
"""Seconds between two readings: while changes keep coming, more of them become one."""


_QUIET: Final = 0.2
"""Seconds without a change after which it is told which files were closed."""
_LONGEST: Final = 5.0
"""Seconds after which it is told in any case: the server remembers what it did for twice as long."""
_MOST_READS: Final = 100
"""Readings in a row after which those who keep changing things are waited for no longer."""
_MOST_CLOSED: Final = 20_000
_FIRST_WAIT: Final = 1.0
_LONGEST_WAIT: Final = 60.0
"""Seconds until what is not watched is tried again: the first, then twice as long each time, up to the longest."""


class Watching:
    """One service of the companion. What cannot be watched is tried again, after 1 s and then ever later.

    That a file was closed means something only where it was written through a mapping, and the server closes every file
    that was written through the mount: this waits until nobody is busy.
    """

    def __init__(self, line: Line, budget: int | None = None) -> None:
        """`budget` as for `Watcher`."""
        self._line: Final = line
        self._budget: Final = budget
        self._watcher: Watcher | None = None
        self.reason = ""
        """Why the source, or a part of it, is not watched; "" while all is."""
        try:
            self._watcher = Watcher(budget)
            self.reason = self._watcher.gap
        except UnwatchableError as error:
            self.reason = str(error)
        self._wait = _FIRST_WAIT
        self._retry_at = monotonic() + self._wait if self.reason else float("inf")
        self._not_before = 0.0
        self._last = 0.0
        self._closed: dict[tuple[int, bytes, bytes], None] = {}
        self._closed_since = 0
        self._closed_first = 0.0

    def fileno(self) -> int:
        """What can be read when something has changed; -1: nothing is watched any more."""
        return self._watcher.fileno() if self._watcher is not None else -1

    def may_read(self, now: float) -> float:
        """Seconds until changes may be read."""
        return max(0.0, self._not_before - now)

    def due(self, now: float) -> float:
        """Seconds until it is told which files were closed, or until what is not watched is tried again."""
        retry = max(0.0, self._retry_at - now)
        if not self._closed:
            return retry
        return min(retry, self._due_closed(now))

    def _due_closed(self, now: float) -> float:
        return max(0.0, min(self._last + _QUIET, self._closed_first + _LONGEST) - now)

    @property
    def is_partial(self) -> bool:
        """Whether a part of the source is watched and another is not."""
        return self._watcher is not None and bool(self.reason)

    def retry(self, now: float) -> None:
        """Try to watch what is not watched, if it is time."""
        if now < self._retry_at:
            return
        try:
            if self._watcher is None:
                self._watcher = Watcher(self._budget)
            else:
                self._watcher.fill_gaps()
        except UnwatchableError as error:
            self._lose(str(error))
        self._wait = min(2 * self._wait, _LONGEST_WAIT)
        self._retry_at = now + self._wait
        if self._watcher is not None:
            self._tell_gap(self._watcher.gap, now)

    def _tell_gap(self, reason: str, now: float) -> None:
        """Tell the server, if what is not watched is another thing than it knows."""
        if bool(reason) != bool(self.reason) or (reason and self._wait == _LONGEST_WAIT and reason != self.reason):
            self._line.tell(Kind.UNWATCHED, {"reason": reason, "part": bool(reason)})
        if reason and not self.reason:
            self._retry_at = now + self._wait
        elif not reason:
            self._retry_at = float("inf")
        self.reason = reason

    def _lose(self, reason: str) -> None:
        if self._watcher is not None or reason != self.reason:
            self._line.tell(Kind.UNWATCHED, {"reason": reason, "part": False})
        self._watcher, self.reason = None, reason
        self._retry_at = monotonic() + self._wait

    def read_rest(self, now: float) -> None:
        """Tell the server all that has changed by now."""
        for _ in range(_MOST_READS):
            if not self.read(now):
                break
        self.tell_closed()

    def read(self, now: float) -> bool:
        """Tell the server what has changed; whether anything has.

        Who polled may find nothing any more: another service of the same round has had all of it told.
        """
        if self._watcher is None or not _is_ready(self._watcher.fileno()):
            return False
        self._not_before = now + _APART
        self._last = now
        try:
            changes = self._watcher.read()
            self._tell(changes)
            if self._watcher.gap and not self.reason:
                self._tell_gap(self._watcher.gap, now)
            if changes.lost:
                self._line.tell(Kind.LOST)
                self._watcher.begin_anew()
                # What changed between the two is below directories that were not watched yet.
                self._line.tell(Kind.LOST)
        except UnwatchableError as error:
            self._lose(str(error))
        return True

    def act(self, now: float) -> None:
        """Do what is due."""
        self.retry(now)
        if self._closed and self._due_closed(now) <= 0:
            self.tell_closed()

    def tell_closed(self) -> None:
        """Tell the server which files were closed."""
        if self._closed:
            found = [Names(ino, path, {name: MODIFIED}) for ino, path, name in self._closed]
            self._send(self._closed_since, found)
            self._closed.clear()

    def _tell(self, changes: Changes) -> None:
        found = []
        for ino, path, names in changes.names:
            closed = [name for name, kinds in names.items() if kinds == CLOSED]
            if closed:
                if not self._closed:
                    self._closed_since = changes.since
                    self._closed_first = self._last
                for name in closed:
                    del names[name]
                    self._closed[ino, path, name] = None
            if names:
                found.append(Names(ino, path, names))
        if found:
            self._send(changes.since, found)
        if len(self._closed) > _MOST_CLOSED:
            self.tell_closed()

    def _send(self, since: int, found: list[Names]) -> None:
        for message in encode(since, found):
            self._line.send(Kind.CHANGED, message)


def _is_ready(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))
