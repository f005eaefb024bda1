"""Counters of changes in scratch layers: one intent and one outcome for many changes.

A build makes tens of thousands of changes in scratch paths, and the source sees none of them. The guard counts them by
program and scratch path. The first change of a counter enters its intent; the outcome carries the counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from typing import Any, Final

from bonobofs.audit.entry import COUNTS, LAYER
from bonobofs.audit.writer import Trail
from bonobofs.policy.decision import Layer
from bonobofs.policy.request import Operation, WorkspacePath

QUIET: Final = 1.0
"""Seconds without a change after which a counter is entered."""
LONGEST: Final = 10.0
"""Seconds after which a counter is entered although changes go on."""
MOST: Final = 64
"""Open counters. Further programs and paths share one counter, whose program and path are empty."""

_COUNT_OF: Final = {"create": "created", "modify": "modified", "delete": "deleted"}


class ScratchCounter:
    """The changes of one program at and below one scratch path since the intent `seq`."""

    __slots__ = ("began", "bytes", "counts", "last", "path", "runs", "seq")

    def __init__(self, path: WorkspacePath, seq: int) -> None:
        self.path: Final = path
        self.seq: Final = seq
        self.began: Final = monotonic()
        self.last = self.began
        self.counts = dict.fromkeys(("created", "modified", "deleted", "failed"), 0)
        self.bytes = 0
        self.runs = 0
        """Runs of writes that are still open; each is counted when it ends."""

    def add(self, action: str, error: int, written: int) -> None:
        """Count one change: `action` is create, modify or delete; `error` is an errno, 0 where it was made."""
        self.last = monotonic()
        self.counts["failed" if error else _COUNT_OF[action]] += 1
        self.bytes += written


class ScratchCounters:
    """The open counters of one session."""

    def __init__(self, trail: Trail) -> None:
        self._trail: Final = trail
        self._open: dict[tuple[str, str], ScratchCounter] = {}

    def find(self, tool: str, path: WorkspacePath, rule: str, caller: str) -> ScratchCounter:
        """Return the open counter of this program and scratch path; open it where there is none.

        `caller` is the caller of the first change, as the trail takes it. TrailError: the intent cannot be entered.
        """
        counter = self._open.get((tool, path))
        if counter is not None:
            return counter
        if len(self._open) >= MOST:
            tool, path = "", WorkspacePath("")
            if (tool, path) in self._open:
                return self._open[tool, path]
        details = {LAYER: Layer.SCRATCH.value, COUNTS: {}}
        seq = self._trail.intent(Operation.WRITE_FILE, path, "modify", rule, tool=tool, details=details, asked=caller)
        counter = self._open[tool, path] = ScratchCounter(path, seq)
        return counter

    def due(self, now: float) -> list[ScratchCounter]:
        """Return the counters that are quiet, and those that have been open for too long."""
        return [
            counter
            for counter in self._open.values()
            if now - counter.began >= LONGEST or (not counter.runs and now - counter.last >= QUIET)
        ]

    def __iter__(self) -> Iterator[ScratchCounter]:
        return iter(list(self._open.values()))

    def close(self, counter: ScratchCounter) -> dict[str, Any]:
        """Forget a counter; return the details of its outcome."""
        self._open = {key: other for key, other in self._open.items() if other is not counter}
        return {COUNTS: counter.counts}
