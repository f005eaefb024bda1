"""Append the hash-chained trail of one session.

The file is authoritative: `seq` and `prev` advance only after a write(2) has taken the whole line. The intent of a
change is written before the change. Its outcome is queued and written with the next entry, so that a change costs one
system call.

`intent` and `outcome` are on the hot path. Text that is constant for a session, or for an operation and a rule, is
formatted once and cached. An outcome gets its number and its hash when it is queued.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import sha256
from json.encoder import encode_basestring_ascii as quoted
from math import inf
from pathlib import Path
from time import time_ns
from typing import Any, Final, NamedTuple

from bonobofs.audit.entry import TURN, ZERO, AuditEntry, body_of, object_of, with_path, within_bounds
from bonobofs.audit.trail_storage import sync_directory
from bonobofs.errors import TrailError, error_text, os_error
from bonobofs.policy.decision import Denied

HEAD_SIZE: Final = 192
"""Size in bytes of a head file. It is constant, so that a rewrite in place needs no new block of a full disk."""

LONGEST_OF_REFUSAL: Final = 1024
"""Maximum bytes of a path, or of a text in the details, in the entry of a denial. A denied path can have 150 KB."""
_END_OF_REFUSAL: Final = 255
"""Characters of a text that always fit into LONGEST_OF_REFUSAL bytes. A text that does not fit keeps this many bytes
of its beginning and of its end."""

CLOSE: Final = "close"
"""Operation of the last event of a trail that was closed cleanly."""

_DISPLACED: Final = (
    "another program removed or replaced this file or its head; end this session, start a new one, and run "
    "bonobofs audit verify"
)
_FILE_FLAGS: Final = os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW

PAUSE: Final = 10
"""Seconds without an entry of a change after which the next change begins a turn."""
_LONGEST_NAME: Final = 200
"""Maximum characters of a turn's name."""


class TrailIdentity(NamedTuple):
    """The session and the agent of a trail."""

    session: str
    """UUID of the session."""
    agent: str
    """Label of the agent."""
    agent_id: str
    """UUID of the agent."""


End = tuple[int, str, int]
"""End of a trail on the disk: number and hash of the last entry, and the size of the file in bytes."""


def _write_head(descriptor: int, seq: int, link: str, moment: int = 0) -> None:
    settled = datetime.fromtimestamp(moment / 1e9, UTC).isoformat(timespec="microseconds") if moment else ""
    text = f'{{"seq":{seq},"hash":"{link}","settled":"{settled}"}}'
    if os.pwrite(descriptor, f"{text:<{HEAD_SIZE - 1}}\n".encode(), 0) != HEAD_SIZE:
        raise os_error(errno.ENOSPC)


class Trail:
    """The append-only, hash-chained trail of one session: one JSON object a line, one write(2) a change.

    Several threads may append entries and call `sync`.
    """

    def __init__(
        self,
        descriptor: int,
        head_descriptor: int,
        identity: TrailIdentity,
        path: Path,
        end: End = (0, ZERO, 0),
        *,
        clock: Callable[[], int] = time_ns,
    ) -> None:
        """Append through two open descriptors. The trail ends at `end`; by default both files are empty.

        `clock` returns the time since 1970 in nanoseconds.
        """
        self._time_ns: Final = clock
        self.path: Final = path
        self.identity: Final = identity
        self._descriptor = descriptor
        self._head_descriptor = head_descriptor
        self._files: dict[Path, os.stat_result] = {}
        """The head and the trail, by the names that must lead to them. Empty: the names are not checked."""
        self._end: End = end
        self._synced = -1
        self._failing = False
        self._refusal = ""
        """Why the trail accepts no more entries; "" if it does."""
        self._queued: Final[list[str]] = []
        self._last: tuple[int, str] = end[:2]
        """Number and hash of the last entry, written or queued."""
        # Lock order: _syncing, then _writing. fdatasync runs under _syncing alone, so that a change never waits for it.
        self._syncing: Final = threading.Lock()
        self._writing: Final = threading.Lock()
        self._clock = (-1, "")
        self.turn = 0
        """`seq` of the newest turn entry; 0 before the first."""
        self._begins_turn_after = float(PAUSE)
        self._agent: Final = f',"agent":{quoted(identity.agent)},"details":'
        session = f',"session":{quoted(identity.session)},"agent_id":{quoted(identity.agent_id)},"tool":'
        self._intent: Final = f',"result":"allowed","reason":null,"kind":"intent"{session}'
        self._done: Final = f',"result":"allowed","reason":null,"kind":"outcome"{session}"","path":'
        self._failed: Final = f',"kind":"outcome"{session}"","path":'
        # Caches. Their sizes are bounded by the number of operations, and of operations times rules.
        self._begins: Final[dict[tuple[str, str], str]] = {}
        self._ends: Final[dict[tuple[str, str, str], str]] = {}

    @classmethod
    def create(
        cls, path: Path, head_path: Path, identity: TrailIdentity, *, clock: Callable[[], int] = time_ns
    ) -> Trail:
        """Create the trail and its head file with mode 0600. TrailError: one exists, or cannot be created."""
        flags = _FILE_FLAGS | os.O_EXCL
        created: dict[Path, int] = {}
        try:
            created[head_path] = os.open(head_path, flags, 0o600)
            _write_head(created[head_path], 0, ZERO)
            os.fsync(created[head_path])
            created[path] = os.open(path, flags | os.O_APPEND, 0o600)  # an empty head of an existing trail is damage
            trail = cls(created[path], created[head_path], identity, path, clock=clock)
            trail._synced = 0
            trail._files = {name: os.fstat(descriptor) for name, descriptor in created.items()}
            for directory in {path.parent, head_path.parent}:
                sync_directory(directory)
        except OSError as error:
            for name, descriptor in created.items():
                os.close(descriptor)
                name.unlink()
            raise TrailError(f"the trail {path} cannot be created: {error_text(error)}") from error
        return trail

    @property
    def head(self) -> tuple[int, str]:
        """Number and hash of the last entry on the disk; (0, 64 zeros) for an empty trail."""
        seq, link, _ = self._end
        return seq, link

    @property
    def is_synced(self) -> bool:
        """True if all entries are on the disk under the trail's name, or if `sync` has reported that they are not.

        An idle session then leaves the disk asleep.
        """
        return not self._queued and self._end[0] == self._synced and (bool(self._refusal) or not self._is_displaced)

    def intent(  # noqa: PLR0913 - the fields of a record
        self,
        operation: str,
        path: str,
        action: str,
        rule: str,
        *,
        guard: str = "file",
        tool: str = "",
        bytes: int = 0,  # noqa: A002 - the record's name for it
        lock: str = "none",
        details: dict[str, Any] | None = None,
        caller: str = "{}",
    ) -> int:
        """Record that a permitted change is about to be made; return its `seq`.

        `caller` is the constant first part of the details, as `object_of` writes it. When this returns, the kernel has
        this entry and all queued outcomes, so they survive a kill of the process.
        TrailError: nothing was recorded, and the caller must not make the change. The next call retries the outcomes.
        """
        micros = self._time_ns() // 1000
        second = micros // 1000000
        known, clock = self._clock
        if second != known:
            clock = self._new_second(second)
        begin = self._begins.get((guard, operation)) or self._begin(guard, operation)
        end = self._ends.get((action, lock, rule)) or self._ending(action, lock, rule)
        if details:
            more = object_of(details)
            caller = more if caller == "{}" else f"{caller[:-1]},{more[1:]}"
        before = f'{clock}{micros % 1000000:06d}{begin}{caller}{self._intent}{quoted(tool)},"path":'
        body = with_path(before, path, f'{end}{bytes},"seq":')
        with self._writing:
            if 0 <= known < second - self._begins_turn_after:
                return self._write_turn("", "pause", (body,))
            return self._write((body,))

    def begin_turn(self, name: str, by: str) -> int:
        """Begin a turn: record its entry, whose `seq` is the turn's number and is returned. TrailError.

        `by` is `mark` or `hook`. A pause of PAUSE seconds also begins a turn, until a hook has begun one.
        """
        with self._writing:
            self._write_turn(name[:_LONGEST_NAME], by, ())
            self._clock = (-1, "")  # a pause before the first change of the turn begins no other one
            if by == "hook":
                self._begins_turn_after = inf
            return self.turn

    def _write_turn(self, name: str, by: str, bodies: tuple[str, ...]) -> int:
        """Write a turn entry and `bodies`; return the last `seq`. The caller holds _writing."""
        turn = body_of(self._entry("event", TURN, "file", {"name": name, "by": by}))
        seq = self._write((turn, *bodies))
        self.turn = seq - len(bodies)
        return seq

    def outcome(  # noqa: PLR0913 - the fields of a record
        self,
        seq: int,
        operation: str,
        path: str,
        *,
        guard: str = "file",
        action: str = "",
        error: int = 0,
        reason: str = "",
        bytes: int = 0,  # noqa: A002 - the record's name for it
        details: dict[str, Any] | None = None,
    ) -> None:
        """Queue the outcome of the intent `seq`; `error` is an errno, or 0 if the change was made. Never raises.

        `reason` says why it failed; "" means the name and the text of the errno.
        """
        micros = self._time_ns() // 1000
        second = micros // 1000000
        known, clock = self._clock
        if second != known:
            clock = self._new_second(second)
        begin = self._begins.get((guard, operation)) or self._begin(guard, operation)
        end = self._ends.get((action, "none", "")) or self._ending(action, "none", "")
        more = f",{object_of(details)[1:]}" if details else "}"
        ended = (
            f',"result":"error","reason":{quoted(reason or reason_of(error))}{self._failed}' if error else self._done
        )
        before = f'{clock}{micros % 1000000:06d}{begin}{{"intent":{seq}{more}{ended}'
        body = with_path(before, path, f'{end}{bytes},"seq":')
        with self._writing:
            self._queue(body)

    def call(  # noqa: PLR0913 - the fields of a record
        self,
        operation: str,
        path: str,
        rule: str,
        *,
        guard: str = "file",
        tool: str = "",
        bytes: int = 0,  # noqa: A002 - the record's name for it
        lock: str = "none",
        details: dict[str, Any] | None = None,
        error: int = 0,
        reason: str = "",
    ) -> int:
        """Record a call that changed nothing; return its `seq`. `error` and `reason` as for `outcome`. TrailError."""
        entry = self._entry("event", operation, guard, details, path=path, tool=tool)
        entry = entry._replace(rule=rule, lock=lock, bytes=bytes)
        if error:
            entry = entry._replace(result="error", reason=reason or reason_of(error))
        return self._append_body(body_of(entry))

    def denial(
        self,
        denied: Denied,
        action: str,
        *,
        guard: str = "file",
        tool: str = "",
        lock: str = "none",
        details: dict[str, Any] | None = None,
    ) -> int:
        """Record a denial; return its `seq`. TrailError."""
        path, details = _cut(denied.path, details)
        entry = self._entry("intent", denied.operation, guard, details, path=path, tool=tool, action=action)
        return self._append_body(body_of(_refused(entry._replace(lock=lock), denied)))

    def denial_repeats(self, seq: int, denied: Denied, count: int, *, guard: str = "file") -> int:
        """Record that the denial `seq` was repeated `count` times; return the `seq` of this entry. TrailError."""
        return self._count(denied, denied.path, {"intent": seq, "count": count}, guard)

    def denial_count(self, denied: Denied, directory: str, count: int, *, guard: str = "file") -> int:
        """Record `count` denials like `denied`, which have no entries of their own; return the `seq`. TrailError.

        `directory` is the directory of most of these denials.
        """
        return self._count(denied, directory, {"count": count}, guard)

    def _count(self, denied: Denied, path: str, details: dict[str, Any], guard: str) -> int:
        path, details = _cut(path, details)
        entry = self._entry("outcome", denied.operation, guard, details, path=path)
        return self._append_body(body_of(_refused(entry, denied)))

    def alert(
        self,
        reason: str,
        *,
        operation: str = "alert",
        guard: str = "file",
        path: str = "",
        code: str = "",
        details: dict[str, Any] | None = None,
    ) -> int:
        """Record an alert for the operator; return its `seq`. An alert with a `code` is about a denial. TrailError."""
        if code:
            path, details = _cut(path, details)
        entry = self._entry("alert", operation, guard, details, path=path)
        result, governance = ("denied", "deny") if code else ("error", "pass")
        entry = entry._replace(reason=reason, code=code or None, result=result, governance=governance)
        return self._append_body(body_of(entry))

    def event(
        self, operation: str, details: dict[str, Any] | None = None, *, guard: str = "file", path: str = ""
    ) -> int:
        """Record an event of the session itself; return its `seq`. TrailError."""
        return self._append_body(body_of(self._entry("event", operation, guard, details, path=path)))

    def queue_event(self, operation: str, details: dict[str, Any], *, tool: str = "") -> int:
        """Queue an event, which is written with the next entry; return its `seq`. Never raises."""
        body = body_of(self._entry("event", operation, "file", details, tool=tool))
        with self._writing:
            self._queue(body)
            return self._last[0]

    def append(self, entry: AuditEntry) -> int:
        """Append an entry; return its `seq`. TrailError.

        The trail sets the session, `seq` and hashes, and an empty `agent_id`.
        """
        session, _, agent_id = self.identity
        return self._append_body(body_of(entry._replace(session=session, agent_id=entry.agent_id or agent_id)))

    def flush(self) -> None:
        """Write the queued outcomes. TrailError: they stay queued."""
        with self._writing:
            self._write(())

    def sync(self) -> None:
        """Write the queued outcomes, sync the trail to the disk, and then rewrite the head.

        The head is rewritten even if the trail has no new entry. TrailError: the trail may not be on the disk. After a
        failed fdatasync the trail accepts no more entries: the kernel may have dropped pages and reports that once. It
        accepts none either if another program removed or replaced the trail or the head.
        """
        with self._syncing:
            self._settle(())

    def close(self, *, final: bool = True) -> None:
        """Append the closing entry if `final`, sync, and close the files. A second call does nothing. TrailError."""
        with self._syncing:
            if self._descriptor < 0:
                return
            try:
                self._settle((body_of(self._entry("event", CLOSE, "file", None)),) if final else ())
            finally:
                with self._writing:
                    self._refusal = self._refusal or "it is closed"
                    os.close(self._descriptor)
                    os.close(self._head_descriptor)
                    self._descriptor = self._head_descriptor = -1

    def _settle(self, closing: tuple[str, ...]) -> None:
        """Write the queued outcomes and `closing`, sync, rewrite the head. The caller holds _syncing."""
        # Not after the closing entry: another process may then compress the trail.
        is_displaced = self._is_displaced
        with self._writing:
            moment = self._time_ns()
            self._write(() if is_displaced else closing)
            end = self._end
            if is_displaced or closing:
                self._refusal = _DISPLACED if is_displaced else "it is closed"
        if end[0] != self._synced:
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                self._refusal = f"it could not be synced to the disk: {error_text(error)}"
                raise self._unwritten() from error
        self._write_head(end, moment, reopen=is_displaced)
        if is_displaced:
            raise self._unwritten()

    @property
    def _is_displaced(self) -> bool:
        """Whether the name of the trail or of its head leads to another file or to none."""
        try:
            return not all(os.path.samestat(os.lstat(name), st) for name, st in self._files.items())
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # the names cannot be read now
            return False

    def _entry(
        self,
        kind: str,
        operation: str,
        guard: str,
        details: dict[str, Any] | None,
        *,
        path: str = "",
        tool: str = "",
        action: str = "",
    ) -> AuditEntry:
        session, agent, agent_id = self.identity
        return AuditEntry(
            timestamp=datetime.now(UTC),
            guard=guard,
            operation=operation,
            agent=agent,
            details=details or {},
            result="allowed",
            reason=None,
            kind=kind,
            session=session,
            agent_id=agent_id,
            tool=tool,
            path=path,
            action=action,
        )

    def _new_second(self, second: int) -> str:
        """Format and cache a timestamp up to its seconds. The cache is one tuple, so threads see a matching pair."""
        clock = f'{{"timestamp":"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}.'
        self._clock = (second, clock)
        return clock

    def _begin(self, guard: str, operation: str) -> str:
        """Format the part of a line between its timestamp and its details."""
        text = f'+00:00","guard":{quoted(guard)},"operation":{quoted(operation)}{self._agent}'
        self._begins[guard, operation] = text
        return text

    def _ending(self, action: str, lock: str, rule: str) -> str:
        """Format the part of a permitted change's line between its path and its bytes."""
        text = (
            f',"action":{quoted(action)},"governance":"pass","lock":{quoted(lock)},"code":null,"rule":{quoted(rule)}'
            ',"bytes":'
        )
        self._ends[action, lock, rule] = text
        return text

    def _queue(self, body: str) -> None:
        """Append an entry to the queue. The caller holds _writing."""
        seq, link = self._last
        text = f'{within_bounds(body)}{seq + 1},"prev":"{link}"'
        link = sha256(text.encode()).hexdigest()
        line = f'{text},"hash":"{link}"}}\n'
        # No call is between the two statements, so no signal handler can run between them.
        self._last = seq + 1, link
        self._queued.append(line)

    def _append_body(self, body: str) -> int:
        with self._writing:
            return self._write((body,))

    def _write(self, bodies: tuple[str, ...]) -> int:
        """Write the queued outcomes and `bodies` by one write(2); return the last `seq`. The caller holds _writing."""
        if self._refusal:
            raise self._unwritten()
        queued = self._queued
        waiting = len(queued)
        size = self._end[2]
        seq, link = self._last
        lines = queued[:]
        for body in bodies:
            seq += 1
            text = f'{within_bounds(body)}{seq},"prev":"{link}"'
            link = sha256(text.encode()).hexdigest()
            lines.append(f'{text},"hash":"{link}"}}\n')
        if not lines:
            return seq
        data = "".join(lines).encode()
        written = 0
        try:
            written = os.write(self._descriptor, data)
            if written != len(data):
                raise os_error(errno.ENOSPC)
            end = (seq, link, size + written)
        except BaseException as error:
            # A signal handler may raise after the write. Remove the bytes, because `_end` does not count them.
            self._cut_back(size, always=written > 0)
            if isinstance(error, OSError):
                self._note_failure(error)
                raise TrailError(f"the trail {self.path} cannot be written: {error_text(error)}") from error
            raise
        # No call is between these statements, so no signal handler can run between them.
        self._end = end
        self._last = seq, link
        del queued[:waiting]
        self._failing = False
        return seq

    def _cut_back(self, size: int, *, always: bool) -> None:
        try:
            if always or os.fstat(self._descriptor).st_size > size:
                os.ftruncate(self._descriptor, size)
        except OSError as error:
            self._refusal = f"an incomplete entry could not be cut off: {error_text(error)}"

    def _note_failure(self, error: OSError) -> None:
        """Queue one alert at the first failed write. The first successful write records it."""
        if not self._failing:
            self._failing = True
            entry = self._entry("alert", "alert", "file", {"error": error_text(error)})
            entry = entry._replace(result="error", reason="The trail could not be written.")
            self._queue(body_of(entry))

    def _write_head(self, end: End, moment: int, *, reopen: bool) -> None:
        """Write the head. With `reopen`, write the file that has its name now, so that `verify` misses the entries."""
        seq, link, _ = end
        try:
            if reopen:
                head = os.open(next(iter(self._files)), _FILE_FLAGS | os.O_NONBLOCK, 0o600)
                os.dup2(head, self._head_descriptor, inheritable=False)
                os.close(head)
            _write_head(self._head_descriptor, seq, link, moment)
        except OSError as error:
            raise TrailError(f"the head of the trail {self.path} cannot be written: {error_text(error)}") from error
        self._synced = seq

    def _unwritten(self) -> TrailError:
        return TrailError(f"the trail {self.path} cannot be written: {self._refusal}")


def _cut(path: str, details: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """Limit the path and the texts of the details of a denial to LONGEST_OF_REFUSAL bytes.

    If the path is cut, the details get its length in bytes and its SHA-256.
    """
    details = dict(details or {})
    for key, value in details.items():
        if type(value) is str and len(value) > _END_OF_REFUSAL:
            details[key] = _shortened(os.fsencode(value))
    if len(path) <= _END_OF_REFUSAL or len(data := os.fsencode(path)) <= LONGEST_OF_REFUSAL:
        return path, details
    details |= {"path_bytes": len(data), "path_sha256": sha256(data).hexdigest()}
    return _shortened(data), details


def _shortened(data: bytes) -> str:
    if len(data) <= LONGEST_OF_REFUSAL:
        return os.fsdecode(data)
    return f"{os.fsdecode(data[:_END_OF_REFUSAL])}...{os.fsdecode(data[-_END_OF_REFUSAL:])}"


def reason_of(error: int) -> str:
    """Return the name and the text of an errno."""
    return f"{errno.errorcode.get(error, error)}: {os.strerror(error)}"


def _refused(entry: AuditEntry, denied: Denied) -> AuditEntry:
    details = {**entry.details, "instead": denied.instead} if denied.instead else entry.details
    return entry._replace(
        details=details,
        result="denied",
        governance="deny",
        reason=denied.reason,
        code=denied.code,
        rule=denied.rule,
    )
