"""The search index of the trails: update it from a durable cursor, search it and count with it.

The index is derived from the trails and can be rebuilt. One process at a time reads the trails, under `index.lock` of
the state directory. The transaction that inserts entries also moves the cursor, so that a killed process neither loses
nor duplicates an entry.
"""

from __future__ import annotations

import enum
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

from bonobofs.audit.entry import CALL_BEGIN, PROCESS, TURN, UNKNOWN, AuditEntry, other_paths
from bonobofs.audit.reader import EPOCH, RecordedChange, entries_of, trails_in
from bonobofs.audit.trail_storage import open_trail, size_of, stat_trail
from bonobofs.system.locks import locked, locked_if_free

if TYPE_CHECKING:
    from bonobofs.audit.index_store import IndexTables


class GroupBy(enum.StrEnum):
    """The field by which changes are counted."""

    AGENT = "agent"
    SESSION = "session"
    PATH = "path"
    OPERATION = "operation"
    RULE = "rule"
    CODE = "code"
    RESULT = "result"


class Cursor(NamedTuple):
    """The position up to which a trail is in the index."""

    trail: int
    """Number of the trail in the index."""
    session: str
    offset: int
    """Offset in bytes."""
    mark: str
    """Digest of the last bytes before `offset`."""
    moment: int
    """Greatest time so far, in microseconds since 1970."""


class IndexedChange(NamedTuple):
    """One change as its lines in the trail; `outcome` is None if it has none."""

    line: str
    outcome: str | None


class Count(NamedTuple):
    """The number of changes with one value."""

    value: str
    changes: int
    """Number of entries. A repeated denial has one, and one more that counts the repetitions."""
    times: int
    """Number of requests."""
    label: str = ""
    """If counted by agent, the label of the UUID."""


class Turn(NamedTuple):
    """A turn of a session."""

    session: str
    seq: int
    """Number of its entry; 0 for the first turn of the session, which has none."""
    name: str
    by: str
    """What began it: `mark`, `hook` or `pause`."""
    end: int = 0
    """Number of the entry of the next turn; 0 if there is none."""

    @property
    def id(self) -> str:
        return f"{self.session[:8]}:{self.seq}"


class ToolCall(NamedTuple):
    """A tool call, as the hooks of a client claim it. Several calls of a session may run at once."""

    session: str
    seq: int
    """Number of the entry of its begin."""
    id: str
    tool: str
    agent_session: str
    """The client's id of its session; "" if it gave none."""
    subagent: str
    end: int = 0
    """Number of the entry of its end, else of the next turn that a hook began; 0 if there is none."""


class Claim(NamedTuple):
    """What a client claims of its changes: their tool calls, or a text of their processes' environment."""

    calls: tuple[ToolCall, ...]
    variables: str
    """A regular expression that matches a variable NAME=VALUE of CLAIMS."""


def call_variables(call: str) -> str:
    """Return the expression for a tool call: the trace or the span of TRACEPARENT, or its whole value."""
    return rf"TRACEPARENT=(?:[^ ]*-)?{re.escape(encode_text(call))}(?:-[^ ]*)?"


def session_variables(session: str) -> str:
    """Return the expression for a session or thread of a client."""
    return rf"(?:CLAUDE_CODE_SESSION_ID|CODEX_THREAD_ID)={re.escape(encode_text(session))}"


def paired_calls(events: Iterable[tuple[str, AuditEntry]]) -> list[ToolCall]:
    """Return the tool calls with an id. `events` are the events of calls and turns of each session, in their order."""
    found: list[ToolCall] = []
    running: dict[str, int] = {}
    for session, entry in events:
        if found and found[-1].session != session:
            running.clear()
        details = {key: str(value or "") for key, value in entry.details.items()}
        call = details.get("tool_call", "")
        ended = list(running) if entry.operation == TURN and details.get("by") == "hook" else [call]
        for place in (running.pop(each) for each in ended if each in running):
            found[place] = found[place]._replace(end=entry.seq)
        if entry.operation == CALL_BEGIN and call not in ("", UNKNOWN):
            tool, agent_session, subagent = (details.get(key, "") for key in ("tool", "agent_session", "subagent"))
            running[call] = len(found)
            found.append(ToolCall(session, entry.seq, call, tool, agent_session, subagent))
    return found


@dataclass(frozen=True, slots=True)
class IndexQuery:
    """Conditions of a search. None: no condition."""

    agent: str | None = None
    """A UUID or a label."""
    agent_id: str | None = None
    """UUID of the living agent with the label. None: all agents that ever had the label."""
    session: str | None = None
    sessions: tuple[str, ...] | None = None
    """Sessions of which each change is one."""
    path: str | None = None
    """A path with its subtree, or a pattern: `*` and `?` within a name, `**` across names."""
    operation: str | None = None
    rule: str | None = None
    result: str | None = None
    command: str | None = None
    """Text of the command line of the process that made the change, or of one of its parents."""
    turns: tuple[Turn, ...] | None = None
    claims: tuple[Claim, ...] = ()
    since: int | None = None
    """Microseconds since 1970, like all times of the index."""
    until: int | None = None


def encode_text(text: str) -> str:
    """Encode a text for the tables: the inside of a JSON string in ASCII, which has no NUL."""
    return encode_basestring_ascii(text)[1:-1]


def decode_text(stored: str) -> str:
    """Decode a text of the tables."""
    return str(json.loads(f'"{stored}"')) if "\\" in stored else stored


VERSION: Final = 3
"""Version of the tables, incremented with each change of them. An index of another version is rebuilt."""

ENTRIES_AT_ONCE: Final = 4000
BYTES_AT_ONCE: Final = 16 * 1024 * 1024
"""Maximum number of entries and bytes of one transaction. The last entry can exceed the number of bytes."""

_MARKED: Final = 128
"""Number of bytes before the cursor whose digest identifies the trail. They contain the hash of the last line."""
_MICROSECOND: Final = timedelta(microseconds=1)


class Progress(NamedTuple):
    """The result of one update."""

    entries: int
    """Number of entries that were read."""
    redone: tuple[str, ...] = ()
    """Sessions whose trail was replaced. The update read it again from its beginning."""
    unread: tuple[str, ...] = ()
    """One message for each trail that cannot be read."""


class AuditIndex:
    """The index of one state directory. Several processes may use it; one at a time reads the trails."""

    def __init__(self, home: Path, name: str, tables: IndexTables, *, batch: int = ENTRIES_AT_ONCE) -> None:
        """`name` identifies the state directory in the tables, which other state directories may share.

        `batch`: the largest number of entries in one transaction.
        """
        self._home: Final = home
        self._name: Final = name
        self._tables: Final = tables
        self._batch: Final = batch
        self._indexed: dict[str, tuple[_FileState, Cursor]] = {}
        """State of each completely indexed trail, by session. `catch_up` does not open an unchanged trail."""

    def catch_up(self, may_continue: Callable[[], bool] = lambda: True) -> Progress:
        """Read the new entries of each trail up to its present end. StateError.

        `may_continue` is called after each transaction and while the lock is not free. False ends the update early.
        """
        entries, redone, gone, unread = 0, [], [], []
        with locked_if_free(self._home / "index.lock", retry=may_continue) as is_locked:
            if not is_locked:
                return Progress(0)
            known = self._tables.cursors(self._name)
            for path in trails_in(self._home / "trails"):
                cursor = known.pop(path.stem, None)
                if entries and not may_continue():
                    continue
                try:
                    look = _file_state(path)
                    if cursor is not None and self._indexed.get(path.stem) == (look, cursor):
                        continue
                    if cursor is not None and not is_same_trail(path, cursor):
                        redone.append(path.stem)
                        cursor = None
                    cursor = cursor or self._tables.enter_trail(self._name, path.stem)
                    count, cursor = self._follow(path, cursor, size_of(path), may_continue)
                except FileNotFoundError:
                    gone.append(path.stem)  # removed during this update
                except OSError as error:
                    unread.append(f"the trail {path} cannot be read: {error.strerror}")
                else:
                    entries += count
                    if may_continue():
                        self._indexed[path.stem] = look, cursor
            for session in (*known, *gone):
                self._tables.forget_trail(session)
                self._indexed.pop(session, None)
        return Progress(entries, tuple(redone), tuple(unread))

    def rebuild(self) -> Progress:
        """Delete the rows of this state directory, and read all its trails again."""
        with locked(self._home / "index.lock"):
            for session in self._tables.cursors(self._name):
                self._tables.forget_trail(session)
        return self.catch_up()

    def changes(self, query: IndexQuery) -> Iterator[RecordedChange]:
        """Return the matching changes by time; each trail keeps its order. A path finds a rename by both names."""
        for found in self._tables.find(query):
            outcome = AuditEntry.from_line(found.outcome) if found.outcome is not None else None
            yield RecordedChange(AuditEntry.from_line(found.line), outcome)

    def sessions(self) -> list[str]:
        """Return the sessions of all trails."""
        return self._tables.sessions()

    def turns(self) -> list[Turn]:
        """Return the turns of all trails."""
        return self._tables.turns()

    def find_turns(self, name: str) -> tuple[Turn, ...]:
        """Return the turns with the id or the name."""
        session, _, seq = name.partition(":")
        return tuple(
            turn
            for turn in self.turns()
            if (name and turn.name == name) or (session and str(turn.seq) == seq and turn.session.startswith(session))
        )

    def calls(self) -> list[ToolCall]:
        """Return the tool calls of all trails."""
        return self._tables.calls()

    def command(self, session: str, process: int) -> str:
        """Return the command line of a process, or the name of its program; "" if it is unknown."""
        return self._tables.command(session, process)

    def count(self, query: IndexQuery, group_by: GroupBy, most: int | None = None) -> list[Count]:
        """Count the matching changes by a field, the most frequent value first. Alerts and events do not count."""
        return self._tables.count(query, group_by, most)

    def _follow(self, path: Path, cursor: Cursor, end: int, may_continue: Callable[[], bool]) -> tuple[int, Cursor]:
        """Insert the entries from the cursor to `end`; return their number and the new cursor. OSError.

        The next update reads entries that are added meanwhile, so that a busy writer does not delay the other trails.
        """
        entries = 0
        while cursor.offset < end:
            count, cursor = self._read(path, cursor)
            entries += count
            if not count or not may_continue():
                break
        return entries, cursor

    def _read(self, path: Path, cursor: Cursor) -> tuple[int, Cursor]:
        """Insert the next batch of entries; return their number and the new cursor."""
        with open_trail(path) as stream:
            batch = _Batch(cursor, self._batch)
            count = batch.take(stream)
            after = cursor._replace(offset=batch.offset, mark=_mark(stream, batch.offset), moment=batch.moment)
        if count:
            self._tables.advance(cursor.offset, after, batch.rows, batch.late, batch.processes)
        return count, after


class _Batch:
    """Entries of one trail, combined to changes."""

    def __init__(self, cursor: Cursor, most: int) -> None:
        self.offset = cursor.offset
        self._until = cursor.offset + BYTES_AT_ONCE
        self._most = most
        self.moment = cursor.moment
        self.rows: list[dict[str, Any]] = []
        self.late: dict[int, dict[str, Any]] = {}
        """Rows of outcomes whose intent is not in this batch, by the number of the intent."""
        self.processes: list[dict[str, Any]] = []
        self._trail = cursor.trail
        self._session = cursor.session
        self._open: dict[int, dict[str, Any]] = {}

    def take(self, stream: BinaryIO) -> int:
        stream.seek(self.offset)
        count = 0
        for line, entry in entries_of(stream, self._session, EPOCH + self.moment * _MICROSECOND):
            self._add_entry(entry, line)
            self.offset += len(line)
            count += 1
            if count == self._most or self.offset >= self._until:
                break
        return count

    def _add_entry(self, entry: AuditEntry, line: bytes) -> None:
        moment = microseconds(entry.timestamp)
        self.moment = max(self.moment, moment)
        seq = _number(entry.seq)
        text = line[:-1].decode("ascii") if seq and line.isascii() else entry.to_json()
        details, result = entry.details, entry.result
        # An outcome with the result `denied` counts denials. Its intent is not open.
        intent = _number(details.get("intent")) if entry.kind == "outcome" and result != "denied" else 0
        if intent:
            change = self._open.pop(intent, None)
            if change is not None:
                change["outcome"], change["result"] = text, result
                change["ended"] = max(change["ended"], moment)
                return
        row = {
            "trail": self._trail,
            "seq": seq,
            "began": self.moment,
            "ended": moment,
            "agent_id": encode_text(entry.agent_id),
            "agent": encode_text(entry.agent),
            "kind": encode_text(entry.kind),
            "operation": encode_text(entry.operation),
            "path": encode_text(entry.path),
            "other": next(map(encode_text, other_paths(details)), ""),
            "result": encode_text(result),
            "code": encode_text(entry.code or ""),
            "rule": encode_text(entry.rule),
            "times": min(_number(details.get("count")) or 1, 2**31 - 1),
            "process": _number(details.get(PROCESS)),
            "line": text,
            "outcome": None,
        }
        if intent and intent not in self.late:
            self.late[intent] = row
            return
        self.rows.append(row)
        if entry.operation == PROCESS and entry.kind == "event" and seq:
            self._add_process(seq, details)
        if entry.kind == "intent" and result == "allowed":
            self._open[seq] = row

    def _add_process(self, seq: int, details: dict[str, Any]) -> None:
        observed = details.get("observed")
        if isinstance(observed, dict):
            command = observed.get("command") or observed.get("name") or ""
            claimed = details.get("claimed")
            pairs = claimed.items() if isinstance(claimed, dict) else ()
            self.processes.append(
                {
                    "trail": self._trail,
                    "seq": seq,
                    "parent": _number(observed.get("parent")),
                    "command": encode_text(str(command)),
                    "claims": encode_text(" ".join(f"{name}={value}" for name, value in pairs)),
                }
            )


def microseconds(moment: datetime) -> int:
    """Return a time as microseconds since 1970 in UTC."""
    return ((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)) - EPOCH) // _MICROSECOND


def _number(value: object) -> int:
    """Return a positive number, or 0 for any other value, which a damaged line may have."""
    return value if type(value) is int and 0 < value < 2**62 else 0


class _FileState(NamedTuple):
    """Identity, size and ctime of a trail's file."""

    inode: int
    size: int
    changed: int


def _file_state(path: Path) -> _FileState:
    found = stat_trail(path)
    return _FileState(found.st_ino, found.st_size, found.st_ctime_ns)


def is_same_trail(path: Path, cursor: Cursor) -> bool:
    """True if the trail still has the bytes before the cursor. `audit.verify` detects earlier changes."""
    with open_trail(path) as stream:
        return stream.seek(0, os.SEEK_END) >= cursor.offset and _mark(stream, cursor.offset) == cursor.mark


def _mark(stream: BinaryIO, offset: int) -> str:
    start = max(0, offset - _MARKED)
    stream.seek(start)
    return sha256(stream.read(offset - start)).hexdigest() if offset else ""
