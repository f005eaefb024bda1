"""Many changes under one intent: batches of writes to one file, and counters of changes in scratch layers.

A program writes a file in many requests, and the trail has one intent and one outcome for all of them. A build makes
tens of thousands of changes in scratch paths, and none of them reaches the source. The trail has their numbers, by
program and scratch path.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any, Final

from bonobofs.audit.entry import AFTER, COUNTS, DIR_TIMES, LAYER, NOT_KEPT, state_text
from bonobofs.audit.writer import Trail
from bonobofs.enforcement.authorizer import ACTIONS, Caller, Outcome
from bonobofs.policy.decision import Layer, Permit
from bonobofs.policy.request import Operation, Request, WorkspacePath

QUIET: Final = 1.0
"""Seconds without a change after which a batch or a counter is closed."""
LONGEST: Final = 10.0
"""Seconds after which a counter is closed even if changes continue."""
MOST: Final = 64
"""Maximum number of open counters. Further programs and paths share one counter with an empty program and path."""

_COUNT_OF: Final = {"create": "created", "modify": "modified", "delete": "deleted"}


class ScratchCounter:
    """The changes of one program at and below one scratch path since the intent `seq`."""

    __slots__ = ("batches", "began", "bytes", "counts", "last", "path", "seq")

    def __init__(self, path: WorkspacePath, seq: int) -> None:
        self.path: Final = path
        self.seq: Final = seq
        self.began: Final = monotonic()
        self.last = self.began
        self.counts = dict.fromkeys(("created", "modified", "deleted", "failed"), 0)
        self.bytes = 0
        self.batches = 0
        """Number of open write batches. Each counts as one change when it closes."""

    def add(self, action: str, error: int, written: int) -> None:
        """Count one change: `action` is create, modify or delete; `error` is an errno, or 0 if the change was made."""
        self.last = monotonic()
        self.counts["failed" if error else _COUNT_OF[action]] += 1
        self.bytes += written

    def count(self, outcome: Outcome) -> None:
        """Count the outcome of one change."""
        self.add(outcome.action, outcome.error, outcome.written)


class ScratchCounters:
    """The open counters of one session."""

    def __init__(self, trail: Trail) -> None:
        self._trail: Final = trail
        self._open: dict[tuple[str, str], ScratchCounter] = {}

    def find(self, tool: str, path: WorkspacePath, rule: str, caller: str) -> ScratchCounter:
        """Return the open counter of this program and scratch path; open one if there is none.

        `caller` is the caller's details as JSON. TrailError: the trail cannot record the intent.
        """
        counter = self._open.get((tool, path))
        if counter is not None:
            return counter
        if len(self._open) >= MOST:
            tool, path = "", WorkspacePath("")
            if (tool, path) in self._open:
                return self._open[tool, path]
        details = {LAYER: Layer.SCRATCH.value, COUNTS: {}}
        seq = self._trail.intent(Operation.WRITE_FILE, path, "modify", rule, tool=tool, details=details, caller=caller)
        counter = self._open[tool, path] = ScratchCounter(path, seq)
        return counter

    def due(self, now: float) -> list[ScratchCounter]:
        """Return the counters that had no change for QUIET seconds and no open batch, or are LONGEST seconds old."""
        return [
            counter
            for counter in self._open.values()
            if now - counter.began >= LONGEST or (not counter.batches and now - counter.last >= QUIET)
        ]

    def __iter__(self) -> Iterator[ScratchCounter]:
        return iter(list(self._open.values()))

    def close(self, counter: ScratchCounter) -> Outcome:
        """Remove a counter; return its outcome."""
        self._open = {key: other for key, other in self._open.items() if other is not counter}
        request = Request(Operation.WRITE_FILE, counter.path)
        return Outcome(counter.seq, request, "modify", 0, counter.bytes, {COUNTS: counter.counts})


class WriteBatch:
    """Writes of one process to one file under one intent.

    The intent is recorded before the first write, the outcome at the close.

    `attributes` is the number of SETATTR requests in the batch: times, an unchanged owner or mode, or the mode of a
    file that the batch created. `mode` is the mode that they set; -1: none. `rule` is the rule that the intent names.
    """

    __slots__ = (
        "attributes",
        "caller",
        "count",
        "counter",
        "dir_times",
        "generation",
        "judged_as",
        "last",
        "limit",
        "mode",
        "not_kept",
        "permit",
        "request",
        "rule",
        "seq",
        "size",
        "state",
        "written",
    )

    def __init__(
        self,
        request: Request,
        permit: Permit,
        generation: int,
        seq: int,
        now: float,
        caller: Caller,
        counter: ScratchCounter | None = None,
    ) -> None:
        self.request = request
        self.caller = caller
        self.counter = counter
        self.rule = permit.rule
        self.extend(permit)
        self.generation = generation
        self.judged_as = request.operation
        """Operation by which its writes are judged. Writes of other programs to a file that is new create it too."""
        self.seq = seq
        self.last = now
        self.count = 0
        self.written = 0
        self.size = 0
        self.attributes = 0
        self.mode = -1
        self.state: os.stat_result | None = None
        """Stat after the last write, for the outcome."""
        self.dir_times = ""
        """Times of the directory in which the file was created, as DIR_TIMES; "" for an existing file."""
        self.not_kept = ""
        """Why the old content is not in the store of pre-images; "" if it is, or there was none."""

    @property
    def creates(self) -> bool:
        """Whether the batch began with the creation of the file."""
        return self.request.operation is Operation.CREATE_FILE

    def extend(self, permit: Permit) -> None:
        """Continue the batch under a new permit."""
        self.permit = permit
        self.limit = permit.max_size if permit.max_size is not None else 1 << 63


class WriteBatches:
    """The open batches of one session, by the caller's key of a file."""

    def __init__(self, end: Callable[[Outcome], None]) -> None:
        """`end` takes the outcome of each batch that closes."""
        self._end: Final = end
        self._open: dict[int, WriteBatch] = {}

    def add(self, key: int, batch: WriteBatch) -> WriteBatch:
        """Add a new batch; no batch of this key is open."""
        if batch.counter is not None:
            batch.counter.batches += 1
        self._open[key] = batch
        return batch

    def rename(self, key: int, new: int) -> None:
        """Change the key of a batch. An open batch of the new key is closed."""
        self.close(new)
        self._open[new] = self._open.pop(key)

    def close(self, key: int, error: int = 0) -> None:
        """Close the batch of a key, if there is one."""
        batch = self._open.pop(key, None)
        if batch is None:
            return
        batch.generation = -1  # a reference to this batch is no longer current
        action = ACTIONS.get(batch.request.operation, "modify")
        if batch.counter is not None:
            batch.counter.batches -= 1
            batch.counter.add(action, error, batch.written)
            return
        details: dict[str, Any] = {"writes": batch.count, "size": batch.size}
        if batch.attributes:
            details["attributes"] = batch.attributes
        if batch.mode >= 0:
            details["mode"] = f"{batch.mode:04o}"
        if batch.state is not None:
            details[AFTER] = state_text(batch.state)
        if batch.dir_times:
            details[DIR_TIMES] = batch.dir_times
        if batch.not_kept:
            details[NOT_KEPT] = batch.not_kept
        self._end(Outcome(batch.seq, batch.request, action, error, batch.written, details))

    def close_all(self) -> None:
        """Close every batch."""
        for key in list(self._open):
            self.close(key)

    def idle(self, now: float) -> list[int]:
        """Return the keys of the batches without a write for QUIET seconds."""
        return [key for key, batch in self._open.items() if now - batch.last >= QUIET]

    def close_counted(self, counter: ScratchCounter) -> None:
        """Close the batches that count in this counter."""
        if counter.batches:
            for key in [key for key, batch in self._open.items() if batch.counter is counter]:
                self.close(key)
