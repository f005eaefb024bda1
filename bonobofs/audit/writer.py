"""The trail of one session.

What is on the disk decides: `seq` and `prev` advance only over what a write(2) has taken whole. An intent is there
before its effect; an outcome waits and rides in the next write, so that a change costs one system call.

Cost of a change is the reason for the shape of `intent` and `outcome`: whatever stays the same for a session, or for
an operation and a rule, is written out once, and nothing between is looked up or copied that need not be. An outcome
gets its place and its hash when it is queued, while the caller goes on already, and not before the next change.
"""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from datetime import UTC, datetime
from hashlib import sha256
from json.encoder import encode_basestring_ascii as quoted
from pathlib import Path
from time import time_ns
from typing import Any, Final, NamedTuple

from bonobofs.audit.entry import ZERO, AuditEntry, body_of, object_of, with_path, within_bounds
from bonobofs.audit.trail_file import sync_directory
from bonobofs.errors import TrailError
from bonobofs.policy.decision import Denied

HEAD_SIZE: Final = 192
"""Bytes of a head file. Always the same, so that rewriting it in place needs no new block on a full disk."""

LONGEST_OF_REFUSAL: Final = 1024
"""Bytes of a path, or of a text in the details, that the entry of a refusal holds. A refused path can have 150 KB."""
_END_OF_REFUSAL: Final = 255
"""Characters below which a text has at most that many bytes; bytes that are kept of each end of a longer one."""

CLOSE: Final = "close"
"""Operation of the event that ends a trail which was ended cleanly."""


class Identity(NamedTuple):
    """Whose trail it is."""

    session: str
    """UUID of the session."""
    agent: str
    """Label of the agent."""
    agent_id: str
    """UUID of the agent."""


End = tuple[int, str, int]
"""Where a trail ends on the disk: number and hash of the last entry, and the file's size in bytes."""


class Trail:
    """The append-only, hash-chained trail of one session: one JSON object a line, one write(2) a change.

    Entries may be made in one thread while another calls `sync`; entries from several threads are taken one by one.
    """

    def __init__(
        self, descriptor: int, head_descriptor: int, identity: Identity, path: Path, end: End = (0, ZERO, 0)
    ) -> None:
        """Take two descriptors, both new and empty unless `end` says where the trail ends; `create` makes them."""
        self.path: Final = path
        self.identity: Final = identity
        self._descriptor = descriptor
        self._head_descriptor = head_descriptor
        self._end: End = end
        self._synced = -1
        self._failing = False
        self._refusal = ""
        """Why nothing can be entered any more; "" while all is well."""
        self._queued: Final[list[str]] = []
        self._last: tuple[int, str] = end[:2]
        """Number and hash of the last entry that is on the disk or queued."""
        # Lock order: _syncing, then _writing. fdatasync runs under _syncing alone, so that nobody who changes a file
        # waits for a disk that another asked to be synced.
        self._syncing: Final = threading.Lock()
        self._writing: Final = threading.Lock()
        self._clock = (-1, "")
        self._agent: Final = f',"agent":{quoted(identity.agent)},"details":'
        session = f',"session":{quoted(identity.session)},"agent_id":{quoted(identity.agent_id)},"tool":'
        self._intent: Final = f',"result":"allowed","reason":null,"kind":"intent"{session}'
        self._done: Final = f',"result":"allowed","reason":null,"kind":"outcome"{session}"","path":'
        self._failed: Final = f',"kind":"outcome"{session}"","path":'
        # Filled as they are met. Each has as many members as there are operations, or operations by rules.
        self._begins: Final[dict[tuple[str, str], str]] = {}
        self._ends: Final[dict[tuple[str, str, str], str]] = {}

    @classmethod
    def create(cls, path: Path, head_path: Path, identity: Identity) -> Trail:
        """Make the trail and its head file, both 0600 and neither there before; TrailError when that cannot be."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        made: dict[Path, int] = {}
        try:
            made[path] = os.open(path, flags | os.O_APPEND, 0o600)
            made[head_path] = os.open(head_path, flags, 0o600)
            trail = cls(made[path], made[head_path], identity, path)
            trail._write_head(trail._end)
            os.fsync(made[head_path])
            for directory in {path.parent, head_path.parent}:
                sync_directory(directory)
        except (OSError, TrailError) as error:
            for name, descriptor in made.items():
                os.close(descriptor)
                name.unlink()
            raise TrailError(f"the trail {path} cannot be made: {_said(error)}") from error
        return trail

    @property
    def head(self) -> tuple[int, str]:
        """Number and hash of the last entry on the disk; (0, 64 zeros) when there is none."""
        seq, link, _ = self._end
        return seq, link

    @property
    def is_synced(self) -> bool:
        """Whether all that was entered is on the disk, so that an idle session need not wake it each second."""
        return not self._queued and self._end[0] == self._synced

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
        asked: str = "{}",
    ) -> int:
        """Enter that an allowed change is about to be made, and give its `seq`.

        `asked` is the beginning of the details, as `object_of` writes it: what stays the same for a caller. When this
        returns, this entry and all queued outcomes are in the kernel: a killed process loses none of them.
        TrailError: nothing was entered, and the change must not be made; the next call tries anew.
        """
        micros = time_ns() // 1000
        second = micros // 1000000
        known, clock = self._clock
        if second != known:
            clock = self._turn(second)
        begin = self._begins.get((guard, operation)) or self._begin(guard, operation)
        end = self._ends.get((action, lock, rule)) or self._ending(action, lock, rule)
        if details:
            more = object_of(details)
            asked = more if asked == "{}" else f"{asked[:-1]},{more[1:]}"
        before = f'{clock}{micros - second * 1000000:06d}{begin}{asked}{self._intent}{quoted(tool)},"path":'
        body = with_path(before, path, f'{end}{bytes},"seq":')
        with self._writing:
            return self._write((body,))

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
        """Queue how the intent `seq` ended; `error` is an errno, 0 when it succeeded. Never raises.

        `reason` says why it failed; "": the name and the meaning of the errno.
        """
        micros = time_ns() // 1000
        second = micros // 1000000
        known, clock = self._clock
        if second != known:
            clock = self._turn(second)
        begin = self._begins.get((guard, operation)) or self._begin(guard, operation)
        end = self._ends.get((action, "none", "")) or self._ending(action, "none", "")
        more = f",{object_of(details)[1:]}" if details else "}"
        ended = (
            f',"result":"error","reason":{quoted(reason or reason_of(error))}{self._failed}' if error else self._done
        )
        before = f'{clock}{micros - second * 1000000:06d}{begin}{{"intent":{seq}{more}{ended}'
        body = with_path(before, path, f'{end}{bytes},"seq":')
        with self._writing:
            self._queue(body)

    def called(  # noqa: PLR0913 - the fields of a record
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
        """Enter a call that changed nothing, and give its `seq`; `error` and `reason` as for `outcome`.

        TrailError: it could not be entered.
        """
        entry = self._entry("event", operation, guard, details, path=path, tool=tool)
        entry.rule, entry.lock, entry.bytes = rule, lock, bytes
        if error:
            entry.result, entry.reason = "error", reason or reason_of(error)
        return self._append(body_of(entry))

    def denied(
        self,
        denied: Denied,
        action: str,
        *,
        guard: str = "file",
        tool: str = "",
        lock: str = "none",
        details: dict[str, Any] | None = None,
    ) -> int:
        """Enter that a change was refused, and give its `seq`. TrailError: it could not be entered."""
        path, details = _cut(denied.path, details)
        entry = self._entry("intent", denied.operation, guard, details, path=path, tool=tool, action=action)
        entry.lock = lock
        return self._append(body_of(_refused(entry, denied)))

    def repeated(self, seq: int, denied: Denied, count: int, *, guard: str = "file") -> int:
        """Enter that the denial `seq` came `count` times more since it was entered, and give this entry's `seq`."""
        path, details = _cut(denied.path, {"intent": seq, "count": count})
        entry = self._entry("outcome", denied.operation, guard, details, path=path)
        return self._append(body_of(_refused(entry, denied)))

    def counted(self, denied: Denied, directory: str, count: int, *, guard: str = "file") -> int:
        """Enter `count` refusals like this one, none of which was entered, and give this entry's `seq`.

        `directory` is where most of the refusals of that time were.
        """
        path, details = _cut(directory, {"count": count})
        entry = self._entry("outcome", denied.operation, guard, details, path=path)
        return self._append(body_of(_refused(entry, denied)))

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
        """Enter what a person should look at, and give its `seq`. With a `code` it is about a refusal."""
        if code:
            path, details = _cut(path, details)
        entry = self._entry("alert", operation, guard, details, path=path)
        entry.reason, entry.code = reason, code or None
        entry.result, entry.governance = ("denied", "deny") if code else ("error", "pass")
        return self._append(body_of(entry))

    def event(
        self, operation: str, details: dict[str, Any] | None = None, *, guard: str = "file", path: str = ""
    ) -> int:
        """Enter what happened to the session itself, and give its `seq`."""
        return self._append(body_of(self._entry("event", operation, guard, details, path=path)))

    def enter(self, entry: AuditEntry) -> int:
        """Enter a record made elsewhere, and give its `seq`.

        Session, place and hashes are the trail's own; an `agent_id` that is not given is the session's agent's.
        """
        session, _, agent_id = self.identity
        return self._append(body_of(replace(entry, session=session, agent_id=entry.agent_id or agent_id)))

    def flush(self) -> None:
        """Write the queued outcomes. TrailError: they stay queued."""
        with self._writing:
            self._write(())

    def sync(self) -> None:
        """Write the queued outcomes, bring the trail to the disk and then renew the head.

        The head is renewed also where nothing was entered: whoever asked can wait for that. TrailError: the trail is
        not known to be on the disk; after a failed fdatasync nothing can be entered any more, because the kernel may
        have dropped what it could not write and would not say so again.
        """
        with self._syncing:
            self._settle(())

    def close(self, *, final: bool = True) -> None:
        """Enter the clean end if it is `final`, sync, and close the files. A second call does nothing."""
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
        """Write what is queued and `closing`, sync, renew the head; _syncing is held."""
        with self._writing:
            moment = time_ns()
            self._write(closing)
            end = self._end
            if closing:
                self._refusal = "it is closed"
        if end[0] != self._synced:
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                self._refusal = f"it could not be brought to the disk: {_said(error)}"
                raise self._unwritten() from error
        self._write_head(end, moment)

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

    def _turn(self, second: int) -> str:
        """Begin a new second: all of a line's timestamp that is before the point. One pair, so that threads agree."""
        clock = f'{{"timestamp":"{datetime.fromtimestamp(second, UTC):%Y-%m-%dT%H:%M:%S}.'
        self._clock = (second, clock)
        return clock

    def _begin(self, guard: str, operation: str) -> str:
        """What follows a line's timestamp, up to its details."""
        text = f'+00:00","guard":{quoted(guard)},"operation":{quoted(operation)}{self._agent}'
        self._begins[guard, operation] = text
        return text

    def _ending(self, action: str, lock: str, rule: str) -> str:
        """What follows the path of a change that is allowed, up to its bytes."""
        text = (
            f',"action":{quoted(action)},"governance":"pass","lock":{quoted(lock)},"code":null,"rule":{quoted(rule)}'
            ',"bytes":'
        )
        self._ends[action, lock, rule] = text
        return text

    def _queue(self, body: str) -> None:
        """Give an entry its place behind what waits; _writing is held."""
        seq, link = self._last
        text = f'{within_bounds(body)}{seq + 1},"prev":"{link}"'
        link = sha256(text.encode()).hexdigest()
        line = f'{text},"hash":"{link}"}}\n'
        # In this order no call stands between the two, so no signal handler can part them.
        self._last = seq + 1, link
        self._queued.append(line)

    def _append(self, body: str) -> int:
        with self._writing:
            return self._write((body,))

    def _write(self, bodies: tuple[str, ...]) -> int:
        """Write the queued outcomes and `bodies` by one write(2), and give the last `seq`; _writing is held."""
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
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            end = (seq, link, size + written)
        except BaseException as error:
            # A signal handler may raise after the write: what was not counted must not stay.
            self._cut_back(size, must=written > 0)
            if isinstance(error, OSError):
                self._note_failure(error)
                raise TrailError(f"the trail {self.path} cannot be written: {_said(error)}") from error
            raise
        # No call stands between these, so no signal handler can part them.
        self._end = end
        self._last = seq, link
        del queued[:waiting]
        self._failing = False
        return seq

    def _cut_back(self, size: int, *, must: bool) -> None:
        try:
            if must or os.fstat(self._descriptor).st_size > size:
                os.ftruncate(self._descriptor, size)
        except OSError as error:
            self._refusal = f"half an entry could not be cut off: {_said(error)}"

    def _note_failure(self, error: OSError) -> None:
        """Queue one alert for as long as writing fails; it is entered by the first write that succeeds."""
        if not self._failing:
            self._failing = True
            entry = self._entry("alert", "alert", "file", {"error": _said(error)})
            entry.result, entry.reason = "error", "The trail could not be written."
            self._queue(body_of(entry))

    def _write_head(self, end: End, moment: int = 0) -> None:
        settled = datetime.fromtimestamp(moment / 1e9, UTC).isoformat(timespec="microseconds") if moment else ""
        seq, link, _ = end
        text = f'{{"seq":{seq},"hash":"{link}","settled":"{settled}"}}'
        try:
            written = os.pwrite(self._head_descriptor, f"{text:<{HEAD_SIZE - 1}}\n".encode(), 0)
            if written != HEAD_SIZE:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise TrailError(f"the head of the trail {self.path} cannot be written: {_said(error)}") from error
        self._synced = seq

    def _unwritten(self) -> TrailError:
        return TrailError(f"the trail {self.path} cannot be written: {self._refusal}")


def _cut(path: str, details: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """Cut the path and the texts of the details of a refusal to LONGEST_OF_REFUSAL bytes; name what was cut.

    The details then hold length in bytes and SHA-256 of the whole path.
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
    """Say an errno: its name and its meaning."""
    return f"{errno.errorcode.get(error, error)}: {os.strerror(error)}"


def _refused(entry: AuditEntry, denied: Denied) -> AuditEntry:
    entry.result, entry.governance = "denied", "deny"
    entry.reason, entry.code, entry.rule = denied.reason, denied.code, denied.rule
    if denied.instead:
        entry.details = {**entry.details, "instead": denied.instead}
    return entry


def _said(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
