"""Changes behind the mount, told to the server: at once when it was quiet, else a few at a time."""

from __future__ import annotations

import select
from typing import Final

from bonobofs.fuse.control import Kind, Line
from bonobofs.integrity.watch import UnwatchableError, Watcher
from bonobofs.state.changes import encode

_APART: Final = 0.02
"""Seconds between two readings: while changes keep coming, more of them become one."""


class Watching:
    """One service of the companion. UnwatchableError from its making: the source cannot be watched."""

    def __init__(self, line: Line) -> None:
        self._line: Final = line
        self._watcher: Watcher | None = Watcher()
        self._not_before = 0.0

    def fileno(self) -> int:
        """What can be read when something has changed; -1: nothing is watched any more."""
        return self._watcher.fileno() if self._watcher is not None else -1

    def due(self, now: float) -> float:
        """Seconds until changes may be read."""
        return max(0.0, self._not_before - now)

    def read_rest(self, now: float) -> None:
        """Tell the server what has changed by now, if anything has."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        if self._watcher is not None and poll.poll(0):
            self.read(now)

    def read(self, now: float) -> None:
        """Tell the server what has changed. Blocks while nothing has."""
        if self._watcher is None:
            return
        self._not_before = now + _APART
        try:
            changes = self._watcher.read()
            if changes.names:
                self._line.send(Kind.CHANGED, encode(changes.since, changes.names))
            if changes.lost:
                self._line.tell(Kind.LOST)
                self._watcher.begin_anew()
                # What changed between the two is below directories that were not watched yet.
                self._line.tell(Kind.LOST)
        except UnwatchableError as error:
            self._watcher = None
            self._line.tell(Kind.UNWATCHED, {"reason": str(error)})
