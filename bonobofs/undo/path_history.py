"""The history of paths: from the search index, and from the ends of the trails that the index lacks.

The SQLite index is read without SQLAlchemy, which takes longer to load than an answer. Without a usable index all
entries are read from the trails, with the same result.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from itertools import islice
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from bonobofs.audit.entry import LOSS, NOT_KEPT, TURN, AuditEntry, instant
from bonobofs.audit.index import VERSION, Cursor, encode_text, is_same_trail, microseconds
from bonobofs.audit.reader import EPOCH, paths_of, whole_lines
from bonobofs.audit.recovery import OUT_OF_BAND
from bonobofs.audit.trail_storage import open_trail
from bonobofs.errors import StateError, TrailError
from bonobofs.policy.request import Operation
from bonobofs.state.home import home_id, trail_path
from bonobofs.state.sqlite_file import Execute, check_sqlite_file, sqlite_path, unusable
from bonobofs.system.paths import is_within
from bonobofs.undo.changes import Change

_ALL: Final = 2**62
_MOST_TEXTS: Final = 50
_RECENT: Final = 4000
"""Number of rows that are read faster than a large part of the index."""
_INTENT: Final = re.compile(rb'"intent":(\d{1,18})')
_BUSY_SECONDS: Final = 5.0
_OF_HISTORY: Final = f"(c.kind = 'intent' OR c.operation = '{OUT_OF_BAND}')"


class PathQuery:
    """Selects changes, refusals and external changes of paths, and the renames of the directories above the paths."""

    def __init__(self, paths: Iterable[str], below: str | None = None) -> None:
        self.paths: Final = frozenset(paths)
        self.below: Final = below
        self.above: Final = frozenset(
            path[:end] for path in self.paths for end, character in enumerate(path) if character == "/"
        )

    def matches(self, entry: AuditEntry) -> bool:
        """Return whether an entry, which is an intent or an external change, is selected."""
        names = paths_of(entry)[:2]  # as many as the index has
        if entry.operation == Operation.RENAME and not self.above.isdisjoint(names):
            return True
        return not self.paths.isdisjoint(names) or (
            self.below is not None and any(is_within(name, self.below) for name in names)
        )

    def texts(self) -> list[bytes]:
        """Return texts of which each selected line has one, unless the line has a backslash."""
        found = [encode_basestring_ascii(name) for name in self.paths | self.above]
        if self.below is not None:
            found.append(encode_basestring_ascii(f"{self.below}/")[:-1] if self.below else "")
        return [each.encode() for each in found]

    def conditions(self) -> tuple[list[str], dict[str, Any]]:
        """Return conditions in SQL of which each selected change meets one, and their parameters."""
        if self.below == "":
            return ["c.path >= ''"], {}
        exact = {f"path{number}": encode_text(path) for number, path in enumerate(sorted(self.paths))}
        above = {f"above{number}": encode_text(path) for number, path in enumerate(sorted(self.above))}
        # In ASCII, 0 follows the slash, so the range has all names that begin with the path and a slash.
        below = (
            {}
            if self.below is None
            else {"first": encode_text(f"{self.below}/"), "last": encode_text(f"{self.below}0")}
        )
        found = []
        for column in ("c.path", "c.other"):
            guard = "" if column == "c.path" else "c.other != '' AND "
            found.append(f"{guard}{column} IN ({_parameters(exact)})")
            if above:
                found.append(f"{guard}{column} IN ({_parameters(above)}) AND c.operation = '{Operation.RENAME}'")
            if below:
                found.append(f"{guard}{column} >= :first AND {column} < :last")
        return found, {**exact, **above, **below}


class NumberQuery(PathQuery):
    """Selects one entry."""

    def __init__(self, session: str, seq: int) -> None:
        super().__init__(())
        self._values: Final = {"session": session, "seq": seq}

    def matches(self, entry: AuditEntry) -> bool:
        return {"session": entry.session, "seq": entry.seq} == self._values

    def texts(self) -> list[bytes]:
        return [f'"seq":{self._values["seq"]},'.encode()]

    def conditions(self) -> tuple[list[str], dict[str, Any]]:
        return ["c.trail = (SELECT id FROM index_trails WHERE session = :session) AND c.seq = :seq"], self._values


def _parameters(values: Iterable[str]) -> str:
    return ", ".join(f":{name}" for name in values)


class PathHistory(NamedTuple):
    """The selected changes."""

    changes: list[Change]
    """Oldest first."""
    unindexed: int
    """Number of bytes of the trails that the index lacked."""


class _Found(NamedTuple):
    """A change without its turn."""

    began: int
    """Greatest time of its trail so far, in microseconds since 1970."""
    entry: AuditEntry
    outcome: AuditEntry | None

    @property
    def awaits_outcome(self) -> bool:
        return (self.entry.kind, self.entry.result) == ("intent", "allowed") and self.outcome is None

    def place(self) -> tuple[int, str, int]:
        """Return the key of the order by time."""
        return self.began, self.entry.session, self.entry.seq


def find_changes(home: Path, sessions: Iterable[str], query: PathQuery, most: int | None = None) -> PathHistory:
    """Return the last `most` matching changes of sessions, by default all. OSError, TrailError."""
    names = sorted(sessions)
    try:
        with _index_of(home) as execute:
            return _read(home, names, query, most or _ALL, _Index(home, execute))
    except StateError:
        return _read(home, names, query, most or _ALL, None)


def _read(home: Path, sessions: Sequence[str], query: PathQuery, most: int, index: _Index | None) -> PathHistory:
    known = {} if index is None else index.cursors()
    cursors: dict[str, Cursor] = {}
    for session in sessions:
        cursor = known.get(session)
        with contextlib.suppress(FileNotFoundError):  # pruned
            if cursor is None or not is_same_trail(trail_path(home, session), cursor):
                cursor = Cursor(0, session, 0, "", 0)
            cursors[session] = cursor
    found = {} if index is None else index.find(query, [each for each in cursors.values() if each.offset], most)
    tails: dict[str, _Tail] = {}
    for session, cursor in cursors.items():
        with contextlib.suppress(FileNotFoundError):
            tails[session] = _Tail(trail_path(home, session), cursor, query, found.get(session, {}), most)
    chosen = sorted((each for tail in tails.values() for each in tail.found.values()), key=_Found.place)[-most:]
    changes = [_change(each, cursors[each.entry.session], tails[each.entry.session], index) for each in chosen]
    return PathHistory(changes, sum(tail.size for tail in tails.values()))


def _change(found: _Found, cursor: Cursor, tail: _Tail, index: _Index | None) -> Change:
    seq = found.entry.seq
    turn, loss = tail.turn(seq), tail.losses.get(seq, "")
    if index is not None and cursor.offset:
        turn = turn if turn[0] else index.turn(cursor.trail, seq)
        loss = loss or index.losses(cursor.trail).get(seq, "")
    return Change(found.entry, found.outcome, *turn, loss)


class _Tail:
    """The matching changes of a trail: those that the index has, and those from the cursor on."""

    def __init__(self, trail: Path, cursor: Cursor, query: PathQuery, indexed: dict[int, _Found], most: int) -> None:
        """`indexed`: the changes before the cursor, by number. OSError."""
        self.found: Final = indexed
        """By number, oldest first; at least the last `most`."""
        self.losses: Final[dict[int, str]] = {}
        """Why kept content was lost, by number of the change."""
        self.size = 0
        """Number of bytes from the cursor on."""
        self._turns: Final[list[tuple[int, str]]] = []
        self._query: Final = query
        self._most: Final = most
        self._open: Final = {seq for seq, each in indexed.items() if each.awaits_outcome}
        texts = [f'"{TURN}"'.encode(), f'"{LOSS}"'.encode(), *query.texts()]
        # A line has a quote. To search for so many texts would take longer than to parse it.
        texts = texts if len(texts) <= _MOST_TEXTS else [b'"']
        search = re.compile(b"|".join(map(re.escape, texts))).search
        latest = instant(EPOCH + timedelta(microseconds=cursor.moment)).encode()
        with open_trail(trail) as stream:
            stream.seek(cursor.offset)
            for line in whole_lines(stream):
                self.size += len(line)
                # To parse each line would take three times as long.
                if search(line) is None and (moment := _moment(line)) and not self._completes(line):
                    latest = max(latest, moment)
                    continue
                with contextlib.suppress(TrailError):
                    entry = AuditEntry.from_line(line)
                    latest = max(latest, instant(entry.timestamp).encode())
                    self._add_entry(entry, latest)

    def turn(self, seq: int) -> tuple[int, str]:
        """Return number and name of the turn of a change; (0, ""): it began before the cursor, or there is none."""
        number = bisect_left(self._turns, (seq,))
        return self._turns[number - 1] if number else (0, "")

    def _completes(self, line: bytes) -> bool:
        """True if the line may be the outcome of an open intent."""
        match = _INTENT.search(line) if self._open else None
        return match is not None and int(match[1]) in self._open

    def _add_entry(self, entry: AuditEntry, latest: bytes) -> None:
        if entry.kind == "outcome" and entry.result != "denied":
            number = entry.details.get("intent")
            if isinstance(number, int) and number in self._open:
                self._open.discard(number)
                self.found[number] = self.found[number]._replace(outcome=entry)
        elif entry.kind == "event" and entry.operation == TURN:
            self._turns.append(_turn(entry))
        elif entry.kind == "event" and entry.operation == LOSS:
            self.losses.update(_loss(entry))
        elif _is_of_history(entry) and self._query.matches(entry):
            found = _Found(microseconds(datetime.fromisoformat(latest.decode())), entry, None)
            self.found[entry.seq] = found
            if found.awaits_outcome:
                self._open.add(entry.seq)
            if len(self.found) >= 2 * self._most:
                for seq in list(islice(self.found, self._most)):
                    del self.found[seq]
                    self._open.discard(seq)


def _moment(line: bytes) -> bytes:
    """Return the time of a line that has the form of the writer and no backslash; b"": the line must be parsed."""
    is_plain = line[:14] == b'{"timestamp":"' and line[40:56] == b'+00:00","guard":' and b"\\" not in line
    return line[14:46] if is_plain and line.isascii() else b""


def _is_of_history(entry: AuditEntry) -> bool:
    return entry.kind == "intent" or entry.operation == OUT_OF_BAND


def _turn(entry: AuditEntry) -> tuple[int, str]:
    return entry.seq, str(entry.details.get("name", ""))


def _loss(entry: AuditEntry) -> dict[int, str]:
    number = entry.details.get("change")
    return {number: str(entry.details.get(NOT_KEPT, ""))} if isinstance(number, int) else {}


class _Index:
    """The search index in one transaction. StateError: it cannot be used."""

    def __init__(self, home: Path, execute: Execute) -> None:
        self._home: Final = home_id(home)
        self._execute: Final = execute
        self._losses: Final[dict[int, dict[int, str]]] = {}
        """By number of the trail."""
        if [*map(tuple, execute("SELECT version FROM index_schema", {}))] != [(VERSION,)]:
            raise StateError("the index has another version")

    def cursors(self) -> dict[str, Cursor]:
        """Return the cursors of the trails of the state directory, by session."""
        rows = self._execute(
            "SELECT id, session, place, mark, moment FROM index_trails WHERE home = :home",
            {"home": encode_text(self._home)},
        )
        return {row[1]: Cursor(*row) for row in rows}

    def find(self, query: PathQuery, trails: Sequence[Cursor], most: int) -> dict[str, dict[int, _Found]]:
        """Return the last `most` matching changes of these trails by session and number, oldest first."""
        if not trails:
            return {}
        conditions, values = query.conditions()
        # A plus sign keeps the planner from the index of a column: the index on the path selects less.
        selected = f"{_OF_HISTORY} AND +c.trail IN ({', '.join(str(each.trail) for each in trails)})"
        is_large = query.below is not None and most < _ALL
        rows = self._recent(conditions, selected, values, most) if is_large else []
        if not rows:
            arms = (
                "SELECT id FROM (SELECT c.id FROM index_changes AS c CROSS JOIN index_trails AS t "  # noqa: S608
                f"WHERE t.id = c.trail AND {condition} AND {selected} "
                f"ORDER BY +c.began DESC, t.session DESC, c.id DESC LIMIT :most) AS arm{number}"
                for number, condition in enumerate(conditions)
            )
            rows = self._select("index_changes", f"c.id IN ({' UNION '.join(arms)})", {**values, "most": most})
        found: dict[str, dict[int, _Found]] = {}
        for began, session, _, line, outcome in rows:
            entry = _parse(line)
            ended = None if outcome is None else _parse(outcome)
            if entry.session != session or not (_is_of_history(entry) and query.matches(entry)):
                raise StateError("the index is damaged")
            found.setdefault(session, {})[entry.seq] = _Found(began, entry, ended)
        return found

    def _recent(
        self, conditions: Sequence[str], selected: str, values: Mapping[str, Any], most: int
    ) -> list[tuple[Any, ...]]:
        """Return the last `most` rows, if so many match that they are among the newest of the index, else nothing."""
        matching = "c.path >= :first AND c.path < :last" if values else "c.path >= ''"
        count = f"SELECT count(*) FROM (SELECT 1 FROM index_changes AS c WHERE {matching} LIMIT {_RECENT}) AS m"  # noqa: S608
        bounds = {name: values[name] for name in ("first", "last") if name in values}
        if self._execute(count, bounds)[0][0] < _RECENT:
            return []
        newest = f"(SELECT * FROM index_changes ORDER BY began DESC LIMIT {_RECENT})"  # noqa: S608
        rows = self._select(newest, f"({' OR '.join(conditions)}) AND {selected}", values)
        # Rows with the time of the oldest one may be missing.
        return rows[-most:] if len(rows) > most and rows[-most][0] > rows[0][0] else []

    def _select(self, table: str, condition: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
        """Return time, session, number in the index, line and outcome of the selected changes, oldest first."""
        rows = self._execute(
            f"SELECT c.began, t.session, c.id, c.line, c.outcome FROM {table} AS c CROSS JOIN index_trails AS t "  # noqa: S608
            f"WHERE t.id = c.trail AND {condition}",
            values,
        )
        return sorted(map(tuple, rows))

    def turn(self, trail: int, seq: int) -> tuple[int, str]:
        """Return number and name of the turn of a change; (0, ""): none."""
        rows = self._events(TURN, trail, seq, "DESC LIMIT 1")
        return _turn(_parse(rows[0][0])) if rows else (0, "")

    def losses(self, trail: int) -> dict[int, str]:
        """Return why kept content of a trail was lost, by number of the change."""
        if trail not in self._losses:
            rows = self._events(LOSS, trail, _ALL, "")
            self._losses[trail] = {number: why for row in rows for number, why in _loss(_parse(row[0])).items()}
        return self._losses[trail]

    def _events(self, operation: str, trail: int, before: int, order: str) -> Sequence[Sequence[Any]]:
        """Return the lines of the events before a number, in their order."""
        return self._execute(
            "SELECT line FROM index_changes WHERE kind = 'event' AND operation = :operation AND trail = :trail "  # noqa: S608
            f"AND seq < :before ORDER BY seq {order}",
            {"operation": operation, "trail": trail, "before": before},
        )


def _parse(line: str) -> AuditEntry:
    try:
        return AuditEntry.from_line(line)
    except TrailError as error:
        raise StateError(f"the index is damaged: {error}") from error


@contextlib.contextmanager
def _index_of(home: Path) -> Iterator[Execute]:
    """Open a transaction on the index, which reads. StateError: it is absent, damaged or locked."""
    if sqlite_path(home) is None:
        from bonobofs.audit.index_store import open_tables  # noqa: PLC0415 - it loads SQLAlchemy

        with contextlib.closing(open_tables(home)) as tables, tables.queries() as execute:
            yield execute
        return
    path = str(home / "index.db")
    check_sqlite_file(path)
    try:
        with contextlib.closing(
            sqlite3.connect(f"file:{quote(path)}?mode=ro", uri=True, isolation_level=None, timeout=_BUSY_SECONDS)
        ) as connection:
            connection.execute("BEGIN")
            yield lambda statement, values: connection.execute(statement, values).fetchall()
    except sqlite3.Error as error:
        raise unusable(f"sqlite:///{path}", error, "run bonobofs audit index --rebuild") from error
