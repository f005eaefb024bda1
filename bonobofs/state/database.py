"""The database and its transactions, with the same interface on SQLite and PostgreSQL.

On PostgreSQL bonobofs needs a dedicated database. Several hosts may share it.

Each transaction first checks the schema revision, and blocks migrations while it runs: SQLite with a lock file next to
the database, PostgreSQL with an advisory lock. Every database error is raised as StateError, so that no caller
continues without an answer.

Each connection to SQLite first compares device and inode of the file. If the file was replaced, the pool is dropped:
a session on the old file would follow leases that other sessions do not see.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from sqlalchemy import (
    URL,
    Connection,
    Engine,
    create_engine,
    event,
    exists,
    func,
    inspect,
    make_url,
    select,
    table,
    text,
)
from sqlalchemy import column as named_column
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from bonobofs.errors import StateError
from bonobofs.state.schema import POSTGRESQL_CLOCK, counters, create_tables
from bonobofs.state.sqlite_file import (
    CLOCK,
    MARK,
    VERSION_TABLE,
    Execute,
    check_sqlite_file,
    check_version,
    connect,
    migration_lock,
    remedy,
    sqlite_path,
    unusable,
    waiting_turn,
)

_IDLE_SECONDS: Final = 10
"""Seconds after which PostgreSQL aborts an idle transaction, because its client host may be down."""
_GATE: Final = 0x626F6E6F626F
"""PostgreSQL advisory lock: exclusive for a migration, shared for every other transaction."""
_TURN: Final = _GATE + 1
"""PostgreSQL advisory lock that serializes writers, as on SQLite."""
_VERSION: Final = table(VERSION_TABLE, named_column("version_num"))
_IS_MARKED: Final = exists().where(counters.c.name == MARK)


class Database:
    """An open database. Thread-safe. Do not use it across a fork."""

    def __init__(self, home: Path) -> None:
        """Create the engine without connecting or checking the schema. Most callers use `open`. StateError."""
        self.home: Final = home
        self.url: Final = url(home)
        self.is_sqlite: Final = self.url.get_backend_name() == "sqlite"
        try:
            self.engine: Final[Engine] = sqlite_engine(self.url) if self.is_sqlite else postgresql_engine(self.url)
        except ModuleNotFoundError as error:
            raise StateError(
                "the PostgreSQL driver psycopg is not installed; in a checkout of bonobofs, run: "
                "pip install '.[postgresql]'"
            ) from error
        self._file: tuple[int, int] | None = None
        """Device and inode of the SQLite file at the last connection."""

    @classmethod
    def open(cls, home: Path) -> Self:
        """Open the database of a state directory; create it if absent. StateError: wrong schema revision."""
        database = cls(home)
        try:
            database._prepare()
        except BaseException:
            database.close()
            raise
        return database

    def close(self) -> None:
        self.engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def name(self) -> str:
        """URL for messages, with the secrets masked."""
        return without_secrets(self.url)

    def revision(self) -> str | None:
        """Return the schema revision; None without the version table. StateError."""
        if self.is_sqlite and not os.path.exists(self.url.database or ""):
            return None
        with self.failures(), self._connect() as connection:
            return revision_of(connection)

    def check(self) -> None:
        """Raise StateError unless the schema has this version's revision."""
        with self.read():
            pass

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """Run a read-only transaction."""
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextlib.contextmanager
    def change(self) -> Iterator[Connection]:
        """Run a write transaction. Write transactions are serialized: each sees all earlier ones."""
        with self._transaction("BEGIN IMMEDIATE", in_turn=True) as connection:
            yield connection

    @contextlib.contextmanager
    def note(self) -> Iterator[Connection]:
        """Run a transaction that changes only rows with a single writer. On PostgreSQL it does not take the write lock.

        On SQLite it does not fsync, so power loss may undo it: sessions write heartbeats twice a second.
        """
        with self._transaction("BEGIN IMMEDIATE", outlasts_power=False) as connection:
            yield connection

    @contextlib.contextmanager
    def queries(self, *, write: bool = False, change: bool = False) -> Iterator[Execute]:
        """Run a transaction for SQL text: `change`, `note` with `write`, else `read`."""
        now = CLOCK if self.is_sqlite else POSTGRESQL_CLOCK
        with self.change() if change else self.note() if write else self.read() as connection:

            def execute(statement: str, values: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
                result = connection.execute(text(statement.replace("{clock}", now)), values)
                return result.all() if result.returns_rows else ()

            yield execute

    @contextlib.contextmanager
    def alone(self) -> Iterator[Connection]:
        """Give a connection outside a transaction while the exclusive migration lock is held."""
        with self.failures(), self._gate(shared=False), self._connect() as connection:
            if self.is_sqlite:
                yield connection
                return
            # A session-level lock, which is held while pg_dump reads and the migration commits.
            connection.execute(select(func.pg_advisory_lock(_GATE)))
            connection.commit()
            try:
                yield connection
            finally:
                connection.rollback()
                connection.execute(select(func.pg_advisory_unlock(_GATE)))
                connection.commit()

    @contextlib.contextmanager
    def failures(self) -> Iterator[None]:
        """Raise every database error as StateError."""
        try:
            yield
        except (SQLAlchemyError, UnicodeError) as error:
            path = Path(self.url.database or "")
            advice = remedy(error, path, self.home) if self.is_sqlite else "is the server running?"
            raise unusable(self.name, error, advice) from error

    def _prepare(self) -> None:
        if self.revision() is None:
            # Not by the migrations: loading Alembic takes 0.5 s of CPU. A test compares both results.
            self.create(create_tables)
        self.check()

    def create(self, build: Callable[[Connection], None]) -> None:
        """Create the tables with `build`, in one transaction, if there are none. Safe under concurrent calls."""
        if self.is_sqlite:
            path = self.url.database or ""
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            except FileExistsError:
                pass
            except OSError as error:
                raise StateError(f"the database {path} cannot be created: {error.strerror}") from error
        with self.alone() as connection:
            if revision_of(connection) is None:
                connection.rollback()
                connection.execution_options(**{BEGIN: "BEGIN IMMEDIATE"})
                with connection.begin():
                    build(connection)

    @contextlib.contextmanager
    def _transaction(self, begin: str, *, in_turn: bool = False, outlasts_power: bool = True) -> Iterator[Connection]:
        with self.failures(), self._gate(shared=True), self._turn(begin), self._connect() as connection:
            connection.execution_options(**{BEGIN: begin, OUTLASTS_POWER: outlasts_power})
            with connection.begin():
                if not self.is_sqlite:
                    idle = func.set_config("idle_in_transaction_session_timeout", str(1000 * _IDLE_SECONDS), True)
                    connection.execute(select(idle, func.pg_advisory_xact_lock_shared(_GATE)))
                    if in_turn:
                        connection.execute(select(func.pg_advisory_xact_lock(_TURN)))
                version = connection.execute(select(_VERSION.c.version_num, _IS_MARKED)).one_or_none()
                check_version(self.name, *(version or (None, False)))
                yield connection

    @contextlib.contextmanager
    def _connect(self) -> Iterator[Connection]:
        if self.is_sqlite:
            file = check_sqlite_file(self.url.database or "")
            if self._file != file:
                self.engine.dispose()
                self._file = file
        with self.engine.connect() as connection:
            yield connection

    def _gate(self, *, shared: bool) -> contextlib.AbstractContextManager[None]:
        return migration_lock(self.url.database or "", shared=shared) if self.is_sqlite else contextlib.nullcontext()

    def _turn(self, begin: str) -> contextlib.AbstractContextManager[None]:
        if self.is_sqlite and begin != "BEGIN":
            return waiting_turn(self.url.database or "")
        return contextlib.nullcontext()


def revision_of(connection: Connection) -> str | None:
    """Return the schema revision; None without the version table."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.scalar(select(_VERSION.c.version_num))


_CONNECT_SECONDS: Final = 5
SECRETS: Final = frozenset({"password", "sslpassword", "oauth_client_secret"})
"""Parameters of a URL's query that are masked in messages and kept out of program arguments."""
BEGIN: Final = "bonobofs_begin"
"""Execution option: the statement that begins a transaction on SQLite."""
OUTLASTS_POWER: Final = "bonobofs_outlasts_power"
"""Execution option: whether SQLite fsyncs at commit. Default: True."""


def url(home: Path) -> URL:
    """Return the URL from BONOBOFS_DATABASE, else of `bonobofs.db` in the state directory. StateError: invalid URL."""
    path = sqlite_path(home)
    if path is not None:
        return URL.create("sqlite", database=path)
    remedy = "set BONOBOFS_DATABASE to postgresql://USER@HOST/NAME or sqlite:////PATH, or not at all"
    try:
        found = make_url(os.environ["BONOBOFS_DATABASE"])
    except (ArgumentError, ValueError) as error:
        raise StateError(f"BONOBOFS_DATABASE is not the URL of a database; {remedy}") from error
    if found.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
        return found.set(drivername="postgresql+psycopg")
    if found.drivername != "sqlite":
        raise StateError(f"BONOBOFS_DATABASE names a {found.drivername} database; {remedy}")
    if not os.path.isabs(found.database or ""):
        raise StateError(f"BONOBOFS_DATABASE names an SQLite file by a relative path; {remedy}")
    if found.query:
        raise StateError(f"BONOBOFS_DATABASE names an SQLite file with options, and bonobofs supports none; {remedy}")
    return found.set(database=os.path.realpath(found.database or ""))


def without_secrets(url: URL) -> str:
    """Return the URL for messages, with the secrets masked."""
    hidden = {name: "***" for name in url.query if name in SECRETS}
    return url.update_query_dict(hidden).render_as_string(hide_password=True)


def sqlite_engine(url: URL) -> Engine:
    def creator() -> sqlite3.Connection:
        return connect(url.database or "")

    engine = create_engine(url, creator=creator)
    event.listen(engine, "begin", _begin)
    return engine


def postgresql_engine(url: URL) -> Engine:
    # A dead server must not delay a heartbeat for minutes, before or after it received the query.
    patience = {"connect_timeout": _CONNECT_SECONDS, "tcp_user_timeout": 1000 * _CONNECT_SECONDS}
    patience |= {"keepalives_idle": 2, "keepalives_interval": 1, "keepalives_count": _CONNECT_SECONDS - 2}
    return create_engine(
        url,
        pool_size=2,
        pool_pre_ping=True,
        # Explicit, for any server default: after a wait for the lock, a statement must see the newest commits.
        isolation_level="READ COMMITTED",
        connect_args={**patience, "client_encoding": "utf8"},
    )


def _begin(connection: Connection) -> None:
    level = "FULL" if connection.get_execution_options().get(OUTLASTS_POWER, True) else "NORMAL"
    connection.exec_driver_sql(f"PRAGMA synchronous = {level}")
    begin_sqlite(connection)


def begin_sqlite(connection: Connection) -> None:
    """Begin a transaction with the statement in the execution option BEGIN."""
    # The driver's implicit BEGIN comes at the first write: a transaction that has read before could fail as busy.
    connection.exec_driver_sql(connection.get_execution_options().get(BEGIN, "BEGIN"))
