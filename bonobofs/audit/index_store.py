"""The tables and queries of the search index.

The index is derived from the trails, so it needs no migration: tables of another version are dropped, created and
filled again. With SQLite the index has its own file `index.db`. SQLite has one writer at a time, and leases and
heartbeats must not wait for the index.

The tables store each text as the inside of a JSON string in ASCII (`encode_text`): file names can have bytes that are
not text, and no database stores every character.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import sqlalchemy
from sqlalchemy import BigInteger, ColumnElement, Connection, Engine, Index, Integer, MetaData, Table, Text, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.schema import Column
from sqlalchemy.sql import and_, bindparam, delete, func, insert, or_, select, tuple_, update
from sqlalchemy.sql.selectable import ScalarSelect

from bonobofs.audit.entry import CALL_BEGIN, CALL_END, PROCESS, TURN, AuditEntry
from bonobofs.audit.index import (
    VERSION,
    Claim,
    Count,
    Cursor,
    GroupBy,
    IndexedChange,
    IndexQuery,
    ToolCall,
    Turn,
    decode_text,
    encode_text,
    paired_calls,
)
from bonobofs.errors import StateError
from bonobofs.state.database import BEGIN, Database, begin_sqlite, url
from bonobofs.state.sqlite_file import Execute, driver_text

_TEXT: Final = Text().with_variant(Text(collation="C"), "postgresql")
"""Compares byte by byte, so that the paths below a directory are a range."""
_BIG: Final = BigInteger().with_variant(Integer(), "sqlite")
_ROWS_AT_ONCE: Final = 1000
_ONE_CHARACTER: Final = (
    r"(?:[^/\\]|\\ud[89ab][0-9a-f]{2}\\ud[c-f][0-9a-f]{2}|\\u[0-9a-f]{4}|\\[^u])"  # a surrogate pair is one character
)

_NO_END: Final = 2**62
_MAKING: Final = 0x626F6E6F6278
"""The advisory lock of PostgreSQL for the creation of the tables."""
_SQLITE: Final = (
    "journal_mode = WAL",
    "synchronous = NORMAL",
    "busy_timeout = 30000",
    "wal_autocheckpoint = 10000",  # pages; each checkpoint waits for the disk
    "cache_size = -65536",
)

_DAMAGED: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

METADATA: Final = MetaData()

SCHEMA: Final = Table(
    "index_schema",
    METADATA,
    Column("version", Integer, primary_key=True, autoincrement=False, comment="VERSION of the code."),
    comment="One row.",
)

TRAILS: Final = Table(
    "index_trails",
    METADATA,
    Column("id", Integer, primary_key=True, comment="Number of the trail in index_changes."),
    Column("session", _TEXT, nullable=False, unique=True, comment="UUID of the session."),
    Column("home", _TEXT, nullable=False, comment="UUID of its state directory, whose daemon alone reads the trail."),
    Column("place", _BIG, nullable=False, comment="Cursor: number of bytes of the trail that are in the index."),
    Column("mark", _TEXT, nullable=False, comment="Digest of the last bytes before that; it identifies the trail."),
    Column("moment", _BIG, nullable=False, comment="Greatest `began` so far."),
    comment="Cursor of each trail, moved in the transaction that inserts the rows.",
)

CHANGES: Final = Table(
    "index_changes",
    METADATA,
    Column("id", _BIG, primary_key=True, comment="Increases with the offset in the trail."),
    Column("trail", Integer, nullable=False, comment="index_trails.id."),
    Column("seq", _BIG, nullable=False, comment="Number of the entry; 0 for an unreadable line."),
    Column("began", _BIG, nullable=False, comment="Microseconds since 1970; never less than in the row before."),
    Column("ended", _BIG, nullable=False, comment="The later of the times of the entry and of its outcome."),
    Column("agent_id", _TEXT, nullable=False, comment="UUID of the agent."),
    Column("agent", _TEXT, nullable=False, comment="Label of the agent at that time."),
    Column("kind", _TEXT, nullable=False, comment="intent, alert or event; outcome: it has no intent, or counts."),
    Column("operation", _TEXT, nullable=False, comment="As in the entry."),
    Column("path", _TEXT, nullable=False, comment="Relative to the root of the workspace."),
    Column("other", _TEXT, nullable=False, comment="The other name of a rename, link or copy, or empty."),
    Column("result", _TEXT, nullable=False, comment="Result of the outcome if there is one, else of the entry."),
    Column("code", _TEXT, nullable=False, comment="Code of a denial, or empty."),
    Column("rule", _TEXT, nullable=False, comment="The rule that decided."),
    Column("times", Integer, nullable=False, comment="Number of requests; more than 1 if the entry counts denials."),
    Column("process", _BIG, nullable=False, comment="Number of the entry of the process; 0: unknown."),
    Column("line", _TEXT, nullable=False, comment="The line of the trail."),
    Column("outcome", _TEXT, comment="The line of the outcome, or null."),
    Index("index_changes_seq", "trail", "seq"),
    Index("index_changes_began", "began"),
    Index("index_changes_ended", "ended", "began"),
    # `undo.path_history` reads no row that it does not show: this index has all columns of its conditions.
    Index("index_changes_path", "path", "began", "trail", "kind", "operation"),
    comment="One row for each intent with its outcome, and for each other entry.",
)
PROCESSES: Final = Table(
    "index_processes",
    METADATA,
    Column("trail", Integer, nullable=False, comment="index_trails.id."),
    Column("seq", _BIG, nullable=False, comment="Number of the entry. A damaged trail may have it twice."),
    Column("parent", _BIG, nullable=False, comment="Number of the entry of the parent; 0: unknown."),
    Column("command", _TEXT, nullable=False, comment="Command line, else the name of the program."),
    Column("claims", _TEXT, nullable=False, comment="Claimed variables NAME=VALUE, separated by spaces."),
    Index("index_processes_seq", "trail", "seq"),
    Index("index_processes_parent", "trail", "parent"),
    comment="The processes that made changes, and their parents.",
)
_IS_REFUSED: Final = CHANGES.c.result != sqlalchemy.literal_column("'allowed'")
_IS_EVENT: Final = CHANGES.c.kind == sqlalchemy.literal_column("'event'")
_HAS_OTHER: Final = CHANGES.c.other != sqlalchemy.literal_column("''")
"""Predicates of partial indexes. Queries must repeat them literally, or the planner will not use the index."""
Index("index_changes_refused", CHANGES.c.began, sqlite_where=_IS_REFUSED, postgresql_where=_IS_REFUSED)
Index("index_changes_other", CHANGES.c.other, CHANGES.c.began, sqlite_where=_HAS_OTHER, postgresql_where=_HAS_OTHER)
Index(
    "index_changes_events",
    *(CHANGES.c.operation, CHANGES.c.trail, CHANGES.c.seq),
    sqlite_where=_IS_EVENT,
    postgresql_where=_IS_EVENT,
)


def sqlite_engine(path: Path) -> Engine:
    """Return the engine of an index in a SQLite file of its own."""
    where = sqlalchemy.URL.create("sqlite", database=str(path))
    engine = sqlalchemy.create_engine(where, connect_args={"isolation_level": None})
    event.listen(engine, "connect", _set_up_sqlite)
    event.listen(engine, "begin", begin_sqlite)
    return engine


def throw_away(home: Path, error: StateError) -> bool:
    """Remove a SQLite index if `error` says that it is damaged. False: the error has another cause.

    Another process that has the index open gets the same error, and opens the new index.
    """
    cause = getattr(error.__cause__, "orig", None)
    if url(home).get_backend_name() != "sqlite" or getattr(cause, "sqlite_errorcode", None) not in _DAMAGED:
        return False
    for suffix in ("", "-wal", "-shm"):
        (home / f"index.db{suffix}").unlink(missing_ok=True)
    return True


def open_tables(home: Path) -> IndexTables:
    """Open the index of a state directory: in its PostgreSQL database, or in `index.db`. StateError."""
    if url(home).get_backend_name() == "sqlite":
        return IndexTables(sqlite_engine(home / "index.db"))
    return IndexTables(Database(home).engine)


class IndexTables:
    """The tables of the index in one database."""

    def __init__(self, engine: Engine) -> None:
        """Create missing tables; drop and create those of another version. StateError."""
        self.engine: Final = engine
        try:
            self._prepare()
        except BaseException:
            engine.dispose()
            raise

    def close(self) -> None:
        self.engine.dispose()

    def cursors(self, home: str) -> dict[str, Cursor]:
        """Return the cursors of the trails of a state directory, by session."""
        statement = select(TRAILS).where(TRAILS.c.home == encode_text(home))
        with _begun(self.engine) as connection:
            return {
                decode_text(row.session): Cursor(row.id, decode_text(row.session), row.place, row.mark, row.moment)
                for row in connection.execute(statement)
            }

    def enter_trail(self, home: str, session: str) -> Cursor:
        """Insert a trail that is new, or that another state directory had, with a cursor at its beginning."""
        with _begun(self.engine) as connection:
            self._forget(connection, session)
            row = {"session": encode_text(session), "home": encode_text(home), "place": 0, "mark": "", "moment": 0}
            number = connection.execute(insert(TRAILS).values(row).returning(TRAILS.c.id)).scalar_one()
        return Cursor(number, session, 0, "", 0)

    @contextlib.contextmanager
    def queries(self) -> Iterator[Execute]:
        """Run a transaction, which reads."""
        with _begun(self.engine) as connection:
            yield lambda statement, values: connection.execute(sqlalchemy.text(statement), values).fetchall()

    def forget_trail(self, session: str) -> None:
        """Delete all rows of a trail."""
        with _begun(self.engine) as connection:
            self._forget(connection, session)

    def advance(
        self,
        offset: int,
        cursor: Cursor,
        rows: Sequence[Mapping[str, Any]],
        late: Mapping[int, Mapping[str, Any]],
        processes: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Insert the rows that were read from `offset` on, and move the cursor, in one transaction.

        `rows` are new changes. `late` are rows of outcomes, by the number of the intent, whose change was inserted
        earlier. An outcome without a change is inserted as a row. `processes` are rows of PROCESSES.
        StateError: the cursor is no longer at `offset`, and
        nothing was inserted. A copied state directory, for example, shares its cursor with the original.
        """
        with _begun(self.engine) as connection:
            ends = self._ends(connection, cursor.trail, late)
            added = [*rows, *(row for intent, row in late.items() if intent not in ends)]
            if added:
                connection.execute(insert(CHANGES), added)
            if processes:
                connection.execute(insert(PROCESSES), processes)
            if ends:
                connection.execute(
                    update(CHANGES)
                    .where(CHANGES.c.id == bindparam("row"))
                    .values(outcome=bindparam("its_line"), result=bindparam("its_result"), ended=bindparam("its_end")),
                    list(ends.values()),
                )
            moved = update(TRAILS).where(TRAILS.c.id == cursor.trail, TRAILS.c.place == offset)
            after = {"place": cursor.offset, "mark": cursor.mark, "moment": cursor.moment}
            if not connection.execute(moved.values(after)).rowcount:
                raise StateError(
                    f"another process with the same state directory also reads the trail of session {cursor.session}; "
                    "if one directory is a copy of the other, remove home.id from the copy"
                )

    def find(self, query: IndexQuery) -> Iterator[IndexedChange]:
        """Return the matching changes by time; each trail keeps its order."""
        statement = (
            select(CHANGES.c.line, CHANGES.c.outcome)
            .where(*self._conditions(query))
            .order_by(CHANGES.c.began, CHANGES.c.trail, CHANGES.c.id)
        )
        with (
            _begun(self.engine) as connection,
            connection.execution_options(yield_per=_ROWS_AT_ONCE).execute(statement) as rows,
        ):
            for row in rows:
                yield IndexedChange(row.line, row.outcome)

    def sessions(self) -> list[str]:
        """Return the sessions of all trails."""
        with _begun(self.engine) as connection:
            return [*map(decode_text, connection.scalars(select(TRAILS.c.session).order_by(TRAILS.c.id)))]

    def turns(self) -> list[Turn]:
        """Return the turns of all trails, in their order in each trail. The first has no entry; its number is 0."""
        found = {session: [Turn(session, 0, "", "")] for session in self.sessions()}
        for session, entry in self._events(TURN):
            turns = found.setdefault(session, [Turn(session, 0, "", "")])
            turns[-1] = turns[-1]._replace(end=entry.seq)
            name, by = (str(entry.details.get(key, "")) for key in ("name", "by"))
            turns.append(Turn(session, entry.seq, name, by))
        return [turn for turns in found.values() for turn in turns]

    def calls(self) -> list[ToolCall]:
        """Return the tool calls of all trails, in their order in each trail."""
        return paired_calls(self._events(CALL_BEGIN, CALL_END, TURN))

    def _events(self, *operations: str) -> Iterator[tuple[str, AuditEntry]]:
        """Yield session and entry of the events with one of these operations, in their order in each trail."""
        statement = (
            select(TRAILS.c.session, CHANGES.c.line)
            .select_from(CHANGES.join(TRAILS, TRAILS.c.id == CHANGES.c.trail))
            .where(_IS_EVENT, CHANGES.c.operation.in_(operations))
            .order_by(CHANGES.c.trail, CHANGES.c.seq)
        )
        with _begun(self.engine) as connection:
            for row in connection.execute(statement):
                yield decode_text(row.session), AuditEntry.from_line(row.line)

    def command(self, session: str, process: int) -> str:
        """Return the command line of a process, or the name of its program; "" if it is unknown."""
        trail = select(TRAILS.c.id).where(TRAILS.c.session == encode_text(session)).scalar_subquery()
        statement = select(PROCESSES.c.command).where(PROCESSES.c.trail == trail, PROCESSES.c.seq == process)
        with _begun(self.engine) as connection:
            return decode_text(connection.execute(statement).scalar() or "")

    def count(self, query: IndexQuery, group_by: GroupBy, most: int | None = None) -> list[Count]:
        """Count the matching changes by a field, the most frequent value first. Alerts and events do not count."""
        label: ColumnElement[str] = sqlalchemy.literal("")
        if group_by is GroupBy.AGENT:
            value, label = CHANGES.c.agent_id, func.max(CHANGES.c.agent)
        elif group_by is GroupBy.SESSION:
            value = TRAILS.c.session
        else:
            value = CHANGES.c[group_by.value]
        changes, times = func.count(), func.sum(CHANGES.c.times)
        statement = (
            select(value, changes, times, label)
            .select_from(CHANGES.join(TRAILS, TRAILS.c.id == CHANGES.c.trail))
            .where(CHANGES.c.kind.in_(("intent", "outcome")), *self._conditions(query))
            .group_by(value)
            .order_by(times.desc(), value)
            .limit(most)
        )
        with _begun(self.engine) as connection:
            rows = connection.execute(statement)
            return [Count(decode_text(row[0]), row[1], row[2], decode_text(row[3])) for row in rows]

    def _prepare(self) -> None:
        with _begun(self.engine) as connection:
            if _version(connection) == VERSION:
                return
        with _begun(self.engine, "BEGIN IMMEDIATE") as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(select(func.pg_advisory_xact_lock(_MAKING)))
            known = _version(connection)
            if known is not None and known > VERSION and connection.dialect.name == "postgresql":
                # Two hosts with different versions would drop each other's tables again and again.
                raise StateError(
                    f"the index has version {known}, and this bonobofs supports {VERSION}; use the newer bonobofs"
                )
            if known != VERSION:
                METADATA.drop_all(connection)
                METADATA.create_all(connection)
                connection.execute(insert(SCHEMA).values(version=VERSION))

    def _forget(self, connection: Connection, session: str) -> None:
        known = connection.execute(select(TRAILS.c.id).where(TRAILS.c.session == encode_text(session))).scalar()
        if known is not None:
            connection.execute(delete(CHANGES).where(CHANGES.c.trail == known))
            connection.execute(delete(PROCESSES).where(PROCESSES.c.trail == known))
            connection.execute(delete(TRAILS).where(TRAILS.c.id == known))

    def _ends(
        self, connection: Connection, trail: int, late: Mapping[int, Mapping[str, Any]]
    ) -> dict[int, dict[str, Any]]:
        """Return, by number of the intent, the row that each late outcome completes and its new values."""
        ends = {}
        numbers = sorted(late)
        for start in range(0, len(numbers), _ROWS_AT_ONCE):
            waiting = select(CHANGES.c.seq, CHANGES.c.id, CHANGES.c.ended).where(
                CHANGES.c.trail == trail,
                CHANGES.c.seq.in_(numbers[start : start + _ROWS_AT_ONCE]),
                CHANGES.c.kind == "intent",
                CHANGES.c.result == "allowed",
                CHANGES.c.outcome.is_(None),
            )
            for row in connection.execute(waiting):
                end = late[row.seq]
                ends[row.seq] = {
                    "row": row.id,
                    "its_line": end["line"],
                    "its_result": end["result"],
                    "its_end": max(row.ended, end["ended"]),
                }
        return ends

    def _conditions(self, query: IndexQuery) -> list[ColumnElement[bool]]:
        found: list[ColumnElement[bool]] = []
        if query.agent_id is not None:
            found.append(CHANGES.c.agent_id == encode_text(query.agent_id))
        elif query.agent is not None:
            name = encode_text(query.agent)
            found.append(or_(CHANGES.c.agent_id == name, CHANGES.c.agent == name))
        if query.session is not None:
            trail = select(TRAILS.c.id).where(TRAILS.c.session == encode_text(query.session)).scalar_subquery()
            found.append(CHANGES.c.trail == trail)
        if query.sessions is not None:
            names = map(encode_text, query.sessions)
            found.append(CHANGES.c.trail.in_(select(TRAILS.c.id).where(TRAILS.c.session.in_(names))))
        found += [
            CHANGES.c[name] == encode_text(value)
            for name in ("operation", "rule", "result")
            if (value := getattr(query, name)) is not None
        ]
        if query.result not in (None, "allowed"):
            found.append(_IS_REFUSED)
        if query.since is not None:
            found += [CHANGES.c.ended >= query.since, CHANGES.c.began >= _first_since(query.since)]
        if query.until is not None:
            found.append(CHANGES.c.began <= query.until)
        if query.operation is None:
            found.append(CHANGES.c.operation != PROCESS)
        if query.command is not None:
            found.append(_made_by(query.command))
        if query.turns is not None:
            found.append(_in_spans((turn.session, turn.seq, turn.end) for turn in query.turns))
        found += map(_is_claimed, query.claims)
        if query.path is not None:
            pieces = _pieces(query.path)
            if pieces:
                # SQLite searches an index for each term of one OR, not for those of an OR within it.
                other = (and_(_HAS_OTHER, term) for term in _matches(CHANGES.c.other, pieces))
                found.append(or_(*_matches(CHANGES.c.path, pieces), *other))
        return found


def _version(connection: Connection) -> int | None:
    if not sqlalchemy.inspect(connection).has_table(SCHEMA.name):
        return None
    return connection.execute(select(SCHEMA.c.version)).scalar()


@contextlib.contextmanager
def _begun(engine: Engine, begin: str = "BEGIN") -> Iterator[Connection]:
    """Run a transaction; raise its failures as StateError."""
    try:
        with engine.execution_options(**{BEGIN: begin}).begin() as connection:
            yield connection
    except sqlalchemy.exc.SQLAlchemyError as error:
        where = engine.url.render_as_string(hide_password=True)
        raise StateError(
            f"the index in {where} cannot be used: {driver_text(error)}; the trails can still be read with "
            "`bonobofs audit tail`; if the index is damaged, run `bonobofs audit index --rebuild`"
        ) from error


def _set_up_sqlite(connection: DBAPIConnection, _: object) -> None:
    """Use WAL, so that readers and a writer run at the same time. Power loss can undo a commit."""
    cursor = connection.cursor()
    for setting in _SQLITE:
        cursor.execute(f"PRAGMA {setting}")
    cursor.close()


def _first_since(moment: int) -> ScalarSelect[int]:
    """Return the least `began` of the changes that ended since a moment. It limits the scan by `began`.

    The query uses the index on `ended`. The `+ 0` keeps SQLite from using the index on `began`.
    """
    return select(func.min(CHANGES.c.began + 0)).where(CHANGES.c.ended >= moment).scalar_subquery()


def _made_by(command: str) -> ColumnElement[bool]:
    """Return the condition that a process whose command line has this text, or a child of it, made the change."""
    matches = PROCESSES.c.command.regexp_match(re.escape(encode_text(command)))
    made = select(PROCESSES.c.trail, PROCESSES.c.seq).where(matches).cte("made", recursive=True)
    child = and_(PROCESSES.c.trail == made.c.trail, PROCESSES.c.parent == made.c.seq)
    made = made.union(select(PROCESSES.c.trail, PROCESSES.c.seq).join(made, child))
    return tuple_(CHANGES.c.trail, CHANGES.c.process).in_(select(made.c.trail, made.c.seq))


def _in_spans(spans: Iterable[tuple[str, int, int]]) -> ColumnElement[bool]:
    """Return the condition that a change lies in one of these spans: session, first number, end or 0."""
    rows = [(encode_text(session), first, end or _NO_END) for session, first, end in spans]
    if not rows:
        return sqlalchemy.false()
    columns = (Column("session", _TEXT), Column("first", _BIG), Column("end_", _BIG))
    # A table of spans, because SQLite has a limit of nested terms.
    span, inside = sqlalchemy.values(*columns, name="spans").data(rows).cte("spans"), CHANGES.alias("inside")
    trail = TRAILS.alias("trail")
    found = select(inside.c.id).where(
        trail.c.session == span.c.session,
        inside.c.trail == trail.c.id,
        inside.c.seq >= span.c.first,
        inside.c.seq < span.c.end_,
    )
    return CHANGES.c.id.in_(found)


def _is_claimed(claim: Claim) -> ColumnElement[bool]:
    """Return the condition that a change was made during one of the calls, or by a process with the variables."""
    matches = PROCESSES.c.claims.regexp_match(f"(?:^| ){claim.variables}(?: |$)")
    processes = select(PROCESSES.c.trail, PROCESSES.c.seq).where(matches)
    calls = _in_spans((call.session, call.seq, call.end) for call in claim.calls)
    return or_(calls, tuple_(CHANGES.c.trail, CHANGES.c.process).in_(processes))


def _pieces(pattern: str) -> list[str]:
    return re.findall(r"\*\*/|\*\*|\*|\?|[^*?]+", pattern.removeprefix("./").strip("/"))


def _matches(column: ColumnElement[str], pieces: list[str]) -> list[ColumnElement[bool]]:
    """Return conditions of which one is met if a path, or a directory above it, matches a path or pattern."""
    across = f"(?:{_ONE_CHARACTER}|/)*"
    forms = {"**/": f"(?:{across}/)?", "**": across, "*": f"{_ONE_CHARACTER}*", "?": _ONE_CHARACTER}
    literal = encode_text(pieces[0]) if pieces[0] not in forms else ""
    if len(pieces) == 1 and literal:
        # In ASCII, 0 follows the slash, so the range has all names that begin with the path and a slash.
        return [column == literal, and_(column >= f"{literal}/", column < f"{literal}0")]
    expression = "".join(forms.get(piece) or re.escape(encode_text(piece)) for piece in pieces)
    matches = column.regexp_match(f"^{expression}(?:/.*)?$")
    return [and_(column >= literal, column < f"{literal}\x7f", matches) if literal else matches]
