"""Forward changes of the source from the watcher to the server: the first at once, a stream of them in batches."""

from __future__ import annotations

import select
from time import monotonic
from typing import Final

from bonobofs.ipc.channel import Channel, MessageKind
from bonobofs.system.inotify import Changes, UnwatchableError, Watcher
from bonobofs.system.watcher_events import CLOSED, MODIFIED, NameEvents, encode

_MIN_INTERVAL: Final = 0.02
"""Seconds between two reads. Changes between them go into one batch."""
_QUIET: Final = 0.2
"""Seconds without a change after which closed files are reported."""
_MAX_DELAY: Final = 5.0
"""Seconds after which closed files are reported in any case. The server remembers its own changes twice as long."""
_MAX_READS: Final = 100
"""Maximum of reads in `read_all`: a process may change files without end."""
_MAX_CLOSED: Final = 20_000
_FIRST_RETRY: Final = 1.0
_MAX_RETRY: Final = 60.0
"""Seconds until the watcher tries again to watch the rest: doubled each time, up to the maximum."""


class ChangeForwarder:
    """Reads the watcher and sends its changes. Retries directories that cannot be watched.

    The close of a file matters only if the file was written through a mapping. The server itself closes every file that
    was written through the mount. So the forwarder delays closes until the source is quiet.
    """

    def __init__(self, channel: Channel, budget: int | None = None) -> None:
        """`budget` as for `Watcher`."""
        self._channel: Final = channel
        self._budget: Final = budget
        self._watcher: Watcher | None = None
        self.gap = ""
        """Why the source, or a part of it, is not watched; "" if all is watched."""
        try:
            self._watcher = Watcher(budget)
            self.gap = self._watcher.gap
        except UnwatchableError as error:
            self.gap = str(error)
        self._retry_delay = _FIRST_RETRY
        self._retry_at = monotonic() + self._retry_delay if self.gap else float("inf")
        self._next_read = 0.0
        self._last_read = 0.0
        self._closed: dict[tuple[int, bytes, bytes], None] = {}
        self._closed_since = 0
        self._first_closed = 0.0

    def fileno(self) -> int:
        """A descriptor that is readable after a change; -1 without a watcher."""
        return self._watcher.fileno() if self._watcher is not None else -1

    def seconds_until_read(self, now: float) -> float:
        """Seconds until `read` may be called again."""
        return max(0.0, self._next_read - now)

    def due(self, now: float) -> float:
        """Seconds until `run_due` must be called."""
        retry = max(0.0, self._retry_at - now)
        if not self._closed:
            return retry
        return min(retry, self._closed_due(now))

    def _closed_due(self, now: float) -> float:
        return max(0.0, min(self._last_read + _QUIET, self._first_closed + _MAX_DELAY) - now)

    @property
    def is_partial(self) -> bool:
        """Whether a part of the source is watched and another part is not."""
        return self._watcher is not None and bool(self.gap)

    def retry(self, now: float) -> None:
        """Try again to watch the unwatched directories, if the delay has passed."""
        if now < self._retry_at:
            return
        try:
            if self._watcher is None:
                self._watcher = Watcher(self._budget)
            else:
                self._watcher.fill_gaps()
        except UnwatchableError as error:
            self._drop_watcher(str(error))
        self._retry_delay = min(2 * self._retry_delay, _MAX_RETRY)
        self._retry_at = now + self._retry_delay
        if self._watcher is not None:
            self._set_gap(self._watcher.gap, now)

    def _set_gap(self, gap: str, now: float) -> None:
        """Store the gap, and send it to the server if it is another one."""
        if bool(gap) != bool(self.gap) or (gap and self._retry_delay == _MAX_RETRY and gap != self.gap):
            self._channel.send(MessageKind.WATCH, {"reason": gap, "part": bool(gap)})
        if gap and not self.gap:
            self._retry_at = now + self._retry_delay
        elif not gap:
            self._retry_at = float("inf")
        self.gap = gap

    def _drop_watcher(self, reason: str) -> None:
        if self._watcher is not None or reason != self.gap:
            self._channel.send(MessageKind.WATCH, {"reason": reason, "part": False})
        self._watcher, self.gap = None, reason
        self._retry_at = monotonic() + self._retry_delay

    def read_all(self, now: float) -> None:
        """Send every change until now."""
        for _ in range(_MAX_READS):
            if not self.read(now):
                break
        self._send_closed()

    def read(self, now: float) -> bool:
        """Send the changes since the last read. Return whether there were any.

        The watcher may be empty although it was readable: `read_all` may have run since the poll.
        """
        if self._watcher is None or not _is_readable(self._watcher.fileno()):
            return False
        self._next_read = now + _MIN_INTERVAL
        self._last_read = now
        try:
            changes = self._watcher.read()
            self._send_changes(changes)
            if self._watcher.gap and not self.gap:
                self._set_gap(self._watcher.gap, now)
            if changes.lost:
                self._channel.send(MessageKind.CHANGES_LOST)
                self._watcher.restart()
                # Until then, new directories were not watched.
                self._channel.send(MessageKind.CHANGES_LOST)
        except UnwatchableError as error:
            self._drop_watcher(str(error))
        return True

    def run_due(self, now: float) -> None:
        """Retry unwatched directories and send closed files, each when it is due."""
        self.retry(now)
        if self._closed and self._closed_due(now) <= 0:
            self._send_closed()

    def _send_closed(self) -> None:
        if self._closed:
            self._send(
                self._closed_since, [NameEvents(ino, path, {name: MODIFIED}) for ino, path, name in self._closed]
            )
            self._closed.clear()

    def _send_changes(self, changes: Changes) -> None:
        found = []
        for ino, path, names in changes.names:
            closed = [name for name, kinds in names.items() if kinds == CLOSED]
            if closed:
                if not self._closed:
                    self._closed_since = changes.since
                    self._first_closed = self._last_read
                for name in closed:
                    del names[name]
                    self._closed[ino, path, name] = None
            if names:
                found.append(NameEvents(ino, path, names))
        if found:
            self._send(changes.since, found)
        if len(self._closed) > _MAX_CLOSED:
            self._send_closed()

    def _send(self, since: int, names: list[NameEvents]) -> None:
        for message in encode(since, names):
            self._channel.send_bytes(MessageKind.CHANGED, message)


def _is_readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))
