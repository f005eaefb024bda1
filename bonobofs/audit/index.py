"""The index of the trails: kept up from a durable cursor, searched and counted.

The trails are the truth. What is here is read from them, line by line, and can be thrown away and read again. Each
trail is read by one process at a time, under `index.lock` of its state directory; the cursor moves in the transaction
that enters what was read, so a killed process neither loses nor doubles an entry.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Protocol

from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.reader import EPOCH, LONGEST_LINE, OTHER_NAMES, Change, entry_of, trails_in
from bonobofs.audit.trail_file import open_trail, size_of, stat_trail
from bonobofs.system.locks import locked


class By(enum.StrEnum):
    """What changes can be counted by."""

    AGENT = "agent"
    SESSION = "session"
    PATH = "path"
    OPERATION = "operation"
    RULE = "rule"
    CODE = "code"
    RESULT = "result"


class Cursor(NamedTuple):
    """How far a trail has been read."""

    trail: int
    """Its number in the index."""
    session: str
    place: int
    mark: str
    moment: int


class Found(NamedTuple):
    """One change as its lines in the trail; `outcome` is None where there is none."""

    line: str
    outcome: str | None


class Count(NamedTuple):
    """How many changes share a value."""

    value: str
    changes: int
    """Entries: a refusal that was repeated is one, or two with the entry that counts the rest."""
    times: int
    """How often it was really asked."""
    label: str = ""
    """By agent: the label that goes with the UUID."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to look for; what is None is not asked. All parts must hold."""

    agent: str | None = None
    """A UUID or a label."""
    agent_id: str | None = None
    """UUID of the living agent that the label means; None: every agent that ever had the label."""
    session: str | None = None
    path: str | None = None
    """A path, which means all below it too, or a pattern: `*` and `?` within a name, `**` across names."""
    operation: str | None = None
    rule: str | None = None
    result: str | None = None
    since: int | None = None
    """Microseconds since 1970, as all moments here."""
    until: int | None = None


def text_of(text: str) -> str:
    """The form in which the tables hold a text: ASCII, without a NUL, one for each text."""
    return encode_basestring_ascii(text)[1:-1]


def text_from(stored: str) -> str:
    """What `text_of` was given."""
    return str(json.loads(f'"{stored}"')) if "\\" in stored else stored


class Tables(Protocol):
    """What the index is written to and read from. Every call is one transaction; StateError."""

    def cursors(self, home: str, /) -> dict[str, Cursor]:
        """How far each trail of a state directory has been read, by session."""

    def enter_trail(self, home: str, session: str, /) -> Cursor:
        """Begin a trail that is new, or that another state directory had."""

    def forget_trail(self, session: str, /) -> None:
        """Take out all that there is of a trail."""

    def advance(
        self, place: int, cursor: Cursor, rows: Sequence[Mapping[str, Any]], late: Mapping[int, Mapping[str, Any]], /
    ) -> None:
        """Enter what was read from `place` on, and the cursor after it."""

    def find(self, wanted: Wanted, /) -> Iterator[Found]:
        """The changes that answer, by time."""

    def count(self, wanted: Wanted, by: By, most: int | None, /) -> list[Count]:
        """How many changes answer, by a value, the most frequent first."""


__all__ = ["By", "Count", "Index", "Progress", "Wanted", "microseconds"]

ENTRIES_AT_ONCE: Final = 4000
BYTES_AT_ONCE: Final = 16 * 1024 * 1024
"""What is entered in one transaction at the most, one entry aside."""

_MARKED: Final = 128
"""Bytes before the cursor by which a trail is known again: they hold the hash of its last line."""
_MICROSECOND: Final = timedelta(microseconds=1)


class Progress(NamedTuple):
    """What one look at the trails found."""

    entries: int
    """How many entries were read."""
    redone: tuple[str, ...] = ()
    """Sessions whose trail is not the one that had been read; it was read anew."""
    unread: tuple[str, ...] = ()
    """Of each trail that cannot be read, why."""


class Index:
    """The index of one state directory. Several processes may use it; one at a time reads trails."""

    def __init__(self, home: Path, name: str, tables: Tables) -> None:
        """Stand over the tables, which may hold other state directories' trails too; `name` tells ours."""
        self._home: Final = home
        self._name: Final = name
        self._tables: Final = tables
        self._looked: dict[str, tuple[_Look, Cursor]] = {}
        """By session, its trail as it was when all of it was in the index: what has not changed is not opened."""

    def catch_up(self, goes_on: Callable[[], bool] = lambda: True) -> Progress:
        """Read what the trails have that the index has not, up to where each ends when it is looked at.

        `goes_on` is asked between transactions and while another process reads, so that whoever must end need not wait
        for a long trail. StateError.
        """
        entries, redone, gone, unread = 0, [], [], []
        with _alone(self._home, goes_on) as begun:
            if not begun:
                return Progress(0)
            known = self._tables.cursors(self._name)
            for path in trails_in(self._home / "trails"):
                cursor = known.pop(path.stem, None)
                try:
                    look = _look(path)
                    if cursor is not None and self._looked.get(path.stem) == (look, cursor):
                        continue
                    if cursor is not None and not _is_the_same(path, cursor):
                        redone.append(path.stem)
                        cursor = None
                    cursor = cursor or self._tables.enter_trail(self._name, path.stem)
                    count, cursor = self._follow(path, cursor, size_of(path), goes_on)
                except FileNotFoundError:
                    gone.append(path.stem)  # it has gone this moment
                except OSError as error:
                    unread.append(f"the trail {path} cannot be read: {error.strerror}")
                else:
                    entries += count
                    if goes_on():
                        self._looked[path.stem] = look, cursor
            for session in (*known, *gone):
                self._tables.forget_trail(session)
                self._looked.pop(session, None)
        return Progress(entries, tuple(redone), tuple(unread))

    def rebuild(self) -> Progress:
        """Throw away what is known of this state directory's trails, and read them all."""
        with _alone(self._home, lambda: True):
            for session in self._tables.cursors(self._name):
                self._tables.forget_trail(session)
        return self.catch_up()

    def changes(self, wanted: Wanted) -> Iterator[Change]:
        """Give the changes that answer, by time, each trail in its own order. A rename answers by either name."""
        for found in self._tables.find(wanted):
            outcome = AuditEntry.from_line(found.outcome) if found.outcome is not None else None
            yield Change(AuditEntry.from_line(found.line), outcome)

    def count(self, wanted: Wanted, by: By, most: int | None = None) -> list[Count]:
        """Count the changes that answer by a value, the most frequent first. Alerts and events are no changes."""
        return self._tables.count(wanted, by, most)

    def _follow(self, path: Path, cursor: Cursor, end: int, goes_on: Callable[[], bool]) -> tuple[int, Cursor]:
        """Enter what a trail has from the cursor to `end`, and give how many entries that were. OSError.

        What is added meanwhile waits for the next look: a writer that never rests must keep nobody waiting.
        """
        entries = 0
        while cursor.place < end and goes_on():
            count, cursor = self._read(path, cursor)
            entries += count
            if not count:
                break
        return entries, cursor

    def _read(self, path: Path, cursor: Cursor) -> tuple[int, Cursor]:
        """Enter the next entries after the cursor, and give how many and the cursor after them."""
        with open_trail(path) as stream:
            batch = _Batch(cursor)
            count = batch.take(stream)
            after = cursor._replace(place=batch.place, mark=_mark(stream, batch.place), moment=batch.moment)
        if count:
            self._tables.advance(cursor.place, after, batch.rows, batch.late)
        return count, after


class _Batch:
    """Entries of one trail, put together to changes."""

    def __init__(self, cursor: Cursor) -> None:
        self.place = cursor.place
        self._until = cursor.place + BYTES_AT_ONCE
        self.moment = cursor.moment
        self.rows: list[dict[str, Any]] = []
        self.late: dict[int, dict[str, Any]] = {}
        """Rows of outcomes whose intent was not in this batch, by its number."""
        self._trail = cursor.trail
        self._session = cursor.session
        self._open: dict[int, dict[str, Any]] = {}

    def take(self, stream: BinaryIO) -> int:
        stream.seek(self.place)
        count = 0
        last = EPOCH + self.moment * _MICROSECOND
        while count < ENTRIES_AT_ONCE and self.place < self._until:
            line = stream.readline(LONGEST_LINE)
            if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
                break
            entry = entry_of(line, self._session, last)
            self._enter(entry, line)
            self.place += len(line)
            last = entry.timestamp
            count += 1
        return count

    def _enter(self, entry: AuditEntry, line: bytes) -> None:
        moment = microseconds(entry.timestamp)
        self.moment = max(self.moment, moment)
        seq = _number(entry.seq)
        text = line[:-1].decode("ascii") if seq and line.isascii() else entry.to_json()
        details, result = entry.details, entry.result
        # An outcome that is denied counts refusals, and ends nothing.
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
            "agent_id": text_of(entry.agent_id),
            "agent": text_of(entry.agent),
            "kind": text_of(entry.kind),
            "operation": text_of(entry.operation),
            "path": text_of(entry.path),
            "other": next((text_of(details[key]) for key in OTHER_NAMES if isinstance(details.get(key), str)), ""),
            "result": text_of(result),
            "code": text_of(entry.code or ""),
            "rule": text_of(entry.rule),
            "times": min(_number(details.get("count")) or 1, 2**31 - 1),
            "line": text,
            "outcome": None,
        }
        if intent and intent not in self.late:
            self.late[intent] = row
            return
        self.rows.append(row)
        if entry.kind == "intent" and result == "allowed":
            self._open[seq] = row


def microseconds(moment: datetime) -> int:
    """A moment as the index has it: microseconds since 1970 in UTC."""
    return ((moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)) - EPOCH) // _MICROSECOND


def _number(value: object) -> int:
    """A number that counts something; 0 where it is none: what a damaged line holds may be anything."""
    return value if type(value) is int and 0 < value < 2**62 else 0


class _Look(NamedTuple):
    """A trail from outside."""

    inode: int
    size: int
    changed: int


def _look(path: Path) -> _Look:
    found = stat_trail(path)
    return _Look(found.st_ino, found.st_size, found.st_ctime_ns)


def _is_the_same(path: Path, cursor: Cursor) -> bool:
    """Whether what had been read still ends where it ended. What was changed before that is for `audit.verify`."""
    with open_trail(path) as stream:
        return stream.seek(0, os.SEEK_END) >= cursor.place and _mark(stream, cursor.place) == cursor.mark


def _mark(stream: BinaryIO, place: int) -> str:
    start = max(0, place - _MARKED)
    stream.seek(start)
    return sha256(stream.read(place - start)).hexdigest() if place else ""


@contextlib.contextmanager
def _alone(home: Path, goes_on: Callable[[], bool]) -> Iterator[bool]:
    """Be the one that reads trails; False: another was, until it had to end."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(home / "index.lock", retry=goes_on))
        except BlockingIOError:
            yield False
        else:
            yield True
