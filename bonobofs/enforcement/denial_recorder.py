"""Denials in the trail: repetitions are counted, floods are limited, and repeated or serious denials raise an alert.

A program can cause thousands of different denials a second, and each entry takes some hundred bytes of the disk that
all sessions share. The log records up to RATE denials a second one by one. It counts the others by guard, operation,
code and rule.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from contextlib import suppress
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime, monotonic
from typing import Any, Final

from bonobofs.audit.entry import object_of
from bonobofs.audit.writer import Trail
from bonobofs.enforcement.authorizer import ACTIONS, Caller
from bonobofs.enforcement.caller_processes import details_of
from bonobofs.errors import TrailError
from bonobofs.policy.compiled import is_never_staged
from bonobofs.policy.decision import Code, Denied, Holding, Refused, as_document
from bonobofs.policy.request import Operation
from bonobofs.system.locks import locked

ALERT_DENIALS: Final = 3
ALERT_WINDOW: Final = 300.0
"""The third denial of one agent within this many seconds raises an alert, at most once in this many seconds."""
RATE: Final = 100
"""Denials a second that the log records one by one."""
BURST: Final = 1000
"""Capacity of the token bucket: the log records a burst of this many denials one by one."""
QUIET: Final = 1.0
"""The log records a count after this many seconds without a further denial."""
LONGEST: Final = 5.0
"""The log records a count after this many seconds even if denials continue."""
BETWEEN_ALERTS: Final = 300.0
"""Minimum number of seconds between two alerts about a flood of denials."""
SHOWN_DENIALS: Final = 100
"""Number of denials in `denials.jsonl`: the last ones."""

_FORM: Final = struct.Struct(f"={ALERT_DENIALS + 1}d")
"""The shared file: time of the last alert, then of the last denials, oldest first; CLOCK_BOOTTIME, 0 for none."""
_NONE: Final = (0.0,) * (ALERT_DENIALS + 1)
_RETRIES: Final = (True, True, True, False)
"""Results of the callback `retry` of `locked`: four tries. A process holds the lock for microseconds, and a stopped
process must not block a mount."""
_MOST_DIRECTORIES: Final = 64
_OPTIONAL_LOCKS: Final = frozenset(
    ("index.lock", "gc.pid.lock", "maintenance.lock", "commit-graph.lock", "commit-graph-chain.lock")
)
"""Lock files of git for optional work. If git cannot create them, it continues."""

_Mark = tuple[Operation, str, Code, str, str]
"""Key of equal denials: operation, path, code, guard, and the caller's details unless the guard is `file`."""


class _Repeat:
    """A recorded denial, and the number of its repetitions since."""

    __slots__ = ("count", "denied", "guard", "last", "seq")

    def __init__(self, denied: Denied, guard: str, seq: int, now: float) -> None:
        self.denied = denied
        self.guard = guard
        self.seq = seq
        self.last = now
        self.count = 0


class DenialRecorder:
    """The denials of one session, in its trail and in `denials.jsonl`."""

    def __init__(self, trail: Trail, shared: Path | None = None) -> None:
        """`shared` is the file in which all sessions of the agent count denials (`denials_path`)."""
        self._trail: Final = trail
        self.last: Final[deque[tuple[object, dict[str, Any]]]] = deque(maxlen=SHOWN_DENIALS)
        """Content of `denials.jsonl`: the uid of the caller, if known, and the denial."""
        self.number = 0
        """Denials since the session began, repetitions included."""
        self._repeats: dict[_Mark, _Repeat] = {}
        self._window: Final = DenialWindow(shared)
        self._limit: Final = DenialLimit(trail)

    def deny(self, denied: Denied, caller: Caller, *, guard: str, count: int = 1) -> Refused:
        """Record a denial, or count it if it repeats or exceeds the limit. Return the exception to raise.

        It occurred `count` times.

        The denial of an optional lock of git appears in `denials.jsonl` only, because each `git status` causes one.
        """
        if denied.operation is Operation.CREATE_FILE and _is_optional_lock(denied.path):
            self.show(denied, caller)
            return Refused(denied)
        now = monotonic()
        # All calls of a gate have one path. The details tell them apart.
        call = "" if guard == "file" else object_of(caller.details)
        mark = (denied.operation, denied.path, denied.code, guard, call)
        repeat = self._repeats.get(mark)
        try:
            if repeat is not None:
                repeat.count += count
                repeat.last = now
            elif not self._limit.take_token(now):
                self._limit.count(denied, guard, now, count)
            else:
                seq = self._record(denied, caller, guard)
                self._repeats[mark] = _Repeat(denied, guard, seq, now)
                self._repeats[mark].count = count - 1
            if not _is_probe(denied) and self._window.add():
                self._alert(denied, guard, "three denials of one agent within five minutes")
        except TrailError:
            pass  # the denial is raised without an entry; the trail queued an alert about the failed write
        self.show(denied, caller)
        return Refused(denied)

    def show(self, denied: Denied, caller: Caller) -> None:
        """Add a denial to `denials.jsonl` only."""
        timestamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        document = {"timestamp": timestamp, **as_document(denied, denied.path, denied.operation)}
        self.last.append((caller.details.get("uid"), document))
        self.number += 1

    def flush_idle(self, now: float) -> None:
        """Record the counts of denials that were last repeated at least QUIET seconds before `now`. TrailError."""
        for mark in [mark for mark, repeat in self._repeats.items() if now - repeat.last >= QUIET]:
            self._flush(mark)
        self._limit.record_counts(now)

    def flush_all(self) -> None:
        """Record all counts. TrailError."""
        for mark in list(self._repeats):
            self._flush(mark)
        self._limit.record_counts()

    def _record(self, denied: Denied, caller: Caller, guard: str) -> int:
        action = ACTIONS.get(denied.operation, "modify")
        details = details_of(caller, self._trail)
        if denied.holding is not None:
            details = {**details, **denied.holding._asdict()}
        if denied.about:
            details = {**details, "about": denied.about}
        if denied.question:
            details = {**details, "question": denied.question}
        lock = lock_of(denied.holding)
        seq = self._trail.denial(denied, action, guard=guard, tool=caller.tool, lock=lock, details=details)
        if denied.code is Code.OUTSIDE:
            self._alert(denied, guard, "an attempt to leave the workspace")
        elif denied.code is Code.IDENTITY:
            self._alert(denied, guard, denied.reason)
        return seq

    def _flush(self, mark: _Mark) -> None:
        repeat = self._repeats.pop(mark)
        if repeat.count:
            try:
                self._trail.denial_repeats(repeat.seq, repeat.denied, repeat.count, guard=repeat.guard)
            except TrailError:
                self._repeats[mark] = repeat
                raise

    def _alert(self, denied: Denied, guard: str, reason: str) -> None:
        self._trail.alert(reason, operation=denied.operation, guard=guard, path=denied.path, code=denied.code)


class DenialWindow:
    """The times of an agent's last denials. All its sessions share them through one file. Never raises.

    Without a usable file, the window has the denials of this process only.
    """

    def __init__(self, path: Path | None = None) -> None:
        """`path` is the shared file; the first denial creates it. None: no file."""
        self._path: Final = path
        self._times = _NONE

    def add(self) -> bool:
        """Add a denial at the present time. True: the caller must record an alert, which the window already counts."""
        if self._path is None:
            return self._count()
        alert: bool | None = None
        with suppress(OSError):
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            with locked(self._path, retry=iter(_RETRIES).__next__) as file:
                self._read(file)
                alert = self._count()
                os.pwrite(file, _FORM.pack(*self._times), 0)
        return self._count() if alert is None else alert

    def _read(self, file: int) -> None:
        data = os.pread(file, _FORM.size, 0)
        if len(data) == _FORM.size:
            now = clock_gettime(CLOCK_BOOTTIME)
            # A time after now is from an earlier boot.
            self._times = tuple(time if 0.0 < time <= now else 0.0 for time in _FORM.unpack(data))

    def _count(self) -> bool:
        now = clock_gettime(CLOCK_BOOTTIME)
        alerted, *denials = self._times
        denials = [*denials[1:], now]
        alert = denials[0] > 0.0 and now - denials[0] <= ALERT_WINDOW
        alert = alert and (alerted == 0.0 or now - alerted >= ALERT_WINDOW)
        self._times = (now if alert else alerted, *denials)
        return alert


class _Group:
    """Denials of one guard, operation, code and rule."""

    __slots__ = ("count", "denied", "directories")

    def __init__(self, denied: Denied) -> None:
        self.denied: Final = denied
        self.count = 0
        self.directories: Final[dict[str, int]] = {}
        """Denials by the first directory of the path."""

    def add(self, path: str, count: int) -> None:
        self.count += count
        directory = path.partition("/")[0] if "/" in path else ""
        if directory in self.directories or len(self.directories) < _MOST_DIRECTORIES:
            self.directories[directory] = self.directories.get(directory, 0) + count

    @property
    def top(self) -> str:
        """The directory with the most denials."""
        return max(self.directories, key=self.directories.__getitem__)


class DenialLimit:
    """A token bucket, and the counts of the denials that found the bucket empty."""

    def __init__(self, trail: Trail) -> None:
        self._trail: Final = trail
        self._tokens = float(BURST)
        self._filled = 0.0
        self._groups: Final[dict[tuple[str, ...], _Group]] = {}
        self._began = 0.0
        self._last = 0.0
        self._alerted = -inf

    def take_token(self, now: float) -> bool:
        """Take a token. False: the bucket is empty, and the caller counts the denial."""
        self._tokens = min(BURST, self._tokens + (now - self._filled) * RATE)
        self._filled = now
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def count(self, denied: Denied, guard: str, now: float, count: int = 1) -> None:
        """Count a denial that occurred `count` times."""
        if not self._groups:
            self._began = now
        self._last = now
        key = (guard, denied.operation, denied.code, denied.rule)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(denied)
        group.add(denied.path, count)

    def record_counts(self, now: float = inf) -> None:
        """Record the counts due at `now`; at most every BETWEEN_ALERTS seconds also an alert. TrailError: retry."""
        if not self._groups or (now - self._last < QUIET and now - self._began < LONGEST):
            return
        if self._last - self._alerted >= BETWEEN_ALERTS:
            count = sum(group.count for group in self._groups.values())
            top = max(self._groups.values(), key=lambda group: group.count).top
            reason = f"Refusals came faster than {RATE} a second; the rest is counted by operation and rule."
            self._trail.alert(reason, operation="refusals", path=top, details={"count": count})
            self._alerted = self._last
        while self._groups:
            key, group = next(iter(self._groups.items()))
            self._trail.denial_count(group.denied, group.top, group.count, guard=key[0])
            del self._groups[key]


def lock_of(holding: Holding | None) -> str:
    """Return the holder of a lease as entries name it in `lock`."""
    return "none" if holding is None else holding.chain or holding.holder


def _is_probe(denied: Denied) -> bool:
    """True if programs cause the denial in ordinary work: git at each `git status`, an editor at each save, a library
    that looks for `.env`.
    """
    if denied.code is Code.SECRET and denied.operation is Operation.READ_FILE:
        return True
    return is_never_staged(denied.path.rpartition("/")[2]) or _is_optional_lock(denied.path)


def _is_optional_lock(path: str) -> bool:
    return f"/{path}".rpartition("/")[2] in _OPTIONAL_LOCKS and "/.git/" in f"/{path}"
