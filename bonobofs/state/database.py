"""The database, and transactions on it that are alike on SQLite and PostgreSQL.

On PostgreSQL bonobofs needs a database of its own, which several hosts may share.

Every transaction makes sure first that the schema is the one that this version reads, and keeps a migration out while
it runs: by a lock on a file beside SQLite's, by an advisory lock on PostgreSQL. Whatever the database says is a
StateError; nobody may go on as if it had answered.

SQLite's file is the one that bears the name now. Whoever went on with one that was removed or replaced would follow
leases that nobody else sees.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event, exists, func, inspect, make_url, select, table
from sqlalchemy import column as named_column
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from bonobofs.errors import StateError
from bonobofs.state.schema import REVISION, VERSION_TABLE, counters
from bonobofs.system.locks import locked

_IDLE_SECONDS: Final = 10
"""Seconds after which PostgreSQL gives up a transaction in which nobody says anything: its host may be gone."""
_GATE: Final = 0x626F6E6F626F
"""The advisory lock of PostgreSQL that a migration takes alone and everybody else shares."""
_TURN: Final = _GATE + 1
"""The one that writers take in turn, as SQLite has them do."""
_VERSION: Final = table(VERSION_TABLE, named_column("version_num"))
MARK: Final = "migrating"
"""The counter that is there in the middle of a migration: whoever sees it sees what only half of one has left."""
_CUT_OFF: Final = exists().where(counters.c.name == MARK)


def home_id(home: Path) -> str:
    """The UUID of this state directory, among those that share its database."""
    path = home / "home.id"
    try:
        found = path.read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError:
        found = _name(path)
    try:
        return str(uuid.UUID(found))
    except ValueError as error:
        raise StateError(f"{path} does not hold the UUID that bonobofs wrote there; move it away") from error


def _name(path: Path) -> str:
    mine = path.with_name(f".{path.name}.{uuid.uuid4()}")
    with open(mine, "x", encoding="ascii", opener=_private) as file:
        file.write(f"{uuid.uuid4()}\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        # The first to link has named it; nobody ever reads half of a name.
        with contextlib.suppress(FileExistsError):
            os.link(mine, path)
    finally:
        mine.unlink()
    return path.read_text(encoding="ascii").strip()


class Database:
    """An open database. May be used by several threads; not across a fork."""

    def __init__(self, home: Path) -> None:
        """Nothing is connected yet, and nothing is known of the schema: `open` is what most want."""
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
        """Device and inode of SQLite's file, as it was when it was looked at last."""

    @classmethod
    def open(cls, home: Path) -> Self:
        """The database of a state directory, made where there is none yet. StateError where its schema is another."""
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
        """For people, without what is secret."""
        return without_secrets(self.url)

    def revision(self) -> str | None:
        """The migration that the schema is at; None where there is none of ours."""
        if self.is_sqlite and not os.path.exists(self.url.database or ""):
            return None
        with self.failures(), self._connect() as connection:
            return revision_of(connection)

    def check(self) -> None:
        """Raise StateError unless the schema is the one that this version reads."""
        with self.read():
            pass

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        """A transaction that only reads."""
        with self._transaction("BEGIN") as connection:
            yield connection

    @contextlib.contextmanager
    def change(self) -> Iterator[Connection]:
        """A transaction that may change anything: of those there is one at a time, and each sees all before it."""
        with self._transaction("BEGIN IMMEDIATE", in_turn=True) as connection:
            yield connection

    @contextlib.contextmanager
    def note(self) -> Iterator[Connection]:
        """A transaction that changes rows which nobody else changes; on PostgreSQL it waits for no other.

        On SQLite power loss may take it, and it makes no disk work: heartbeats are written twice a second.
        """
        with self._transaction("BEGIN IMMEDIATE", outlasts_power=False) as connection:
            yield connection

    @contextlib.contextmanager
    def alone(self) -> Iterator[Connection]:
        """A connection, without a transaction, while no transaction of anybody else runs: for migrations."""
        with self.failures(), self._gate(shared=False), self._connect() as connection:
            if self.is_sqlite:
                yield connection
                return
            # Of the connection, not of a transaction: it holds while pg_dump reads and the migration commits.
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
        """Turn whatever the database says into a StateError."""
        try:
            yield
        except (SQLAlchemyError, UnicodeError) as error:
            said = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
            remedy = f"backups are in {self.home / 'backups'}" if self.is_sqlite else "is the server there?"
            raise StateError(f"the database {self.name} cannot be used: {said}; {remedy}") from error

    def _prepare(self) -> None:
        # What is needed once is read once: Alembic takes its time to load.
        if self.revision() is None:
            from bonobofs.state.migrate import create  # noqa: PLC0415

            create(self)
        self.check()

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
                found = connection.execute(select(_VERSION.c.version_num, _CUT_OFF)).one_or_none()
                self.check_revision(None if found is None else found[0])
                if found is not None and found[1]:
                    raise StateError(f"a migration of {self.name} was cut off midway; run bonobofs db upgrade")
                yield connection

    @contextlib.contextmanager
    def _connect(self) -> Iterator[Connection]:
        if self.is_sqlite:
            found = check_sqlite_file(self.url.database or "")
            if self._file != found:
                self.engine.dispose()
                self._file = found
        with self.engine.connect() as connection:
            yield connection

    def _gate(self, *, shared: bool) -> contextlib.AbstractContextManager[None]:
        return _lock_file(f"{self.url.database}.lock", shared=shared) if self.is_sqlite else contextlib.nullcontext()

    def _turn(self, begin: str) -> contextlib.AbstractContextManager[None]:
        """SQLite's own way to wait for a writer is to look again later and later; many at once would starve."""
        if self.is_sqlite and begin != "BEGIN":
            return _lock_file(f"{self.url.database}.turn", shared=False)
        return contextlib.nullcontext()

    def check_revision(self, revision: str | None) -> None:
        """Raise StateError unless that is the schema which this version reads."""
        if revision == REVISION:
            return
        if revision is None:
            raise StateError(f"the database {self.name} holds no tables of bonobofs; make them: bonobofs db upgrade")
        if revision < REVISION:
            raise StateError(
                f"the database {self.name} is at {revision} and this version reads {REVISION}; run bonobofs db upgrade"
            )
        raise StateError(
            f"the database {self.name} is at {revision}, from a newer bonobofs than this one, which reads {REVISION}; "
            "use the newer one"
        )


def revision_of(connection: Connection) -> str | None:
    """The migration that the schema is at; None where there is none of ours."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.scalar(select(_VERSION.c.version_num))


@contextlib.contextmanager
def _lock_file(path: str, *, shared: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(path, shared=shared))
        except OSError as error:
            raise StateError(f"the lock {path} cannot be opened: {error.strerror}; make it writable") from error
        yield


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


_BUSY_SECONDS: Final = 10.0
_CONNECT_SECONDS: Final = 5
SECRETS: Final = frozenset({"password", "sslpassword", "oauth_client_secret"})
"""What of a URL's query nobody is to read."""
_OF_DATABASE: Final = frozenset({"BONOBOFS_DATABASE", "HOME", "KRB5CCNAME"})
BEGIN: Final = "bonobofs_begin"
"""The execution option that says how SQLite begins a transaction."""
OUTLASTS_POWER: Final = "bonobofs_outlasts_power"
"""The one that says whether SQLite waits for the disk before a transaction counts as done; without it, it does."""


def url(home: Path) -> URL:
    """Where the database of this state directory is; StateError for one that cannot be."""
    named = os.environ.get("BONOBOFS_DATABASE")
    if not named:
        return URL.create("sqlite", database=os.path.realpath(home / "bonobofs.db"))
    remedy = "set BONOBOFS_DATABASE to postgresql://USER@HOST/NAME or sqlite:////PATH, or not at all"
    try:
        found = make_url(named)
    except (ArgumentError, ValueError) as error:
        raise StateError(f"BONOBOFS_DATABASE is no URL of a database; {remedy}") from error
    if found.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
        return found.set(drivername="postgresql+psycopg")
    if found.drivername != "sqlite":
        raise StateError(f"BONOBOFS_DATABASE names a {found.drivername} database; {remedy}")
    if not os.path.isabs(found.database or ""):
        raise StateError(f"BONOBOFS_DATABASE names an SQLite file by a relative path; {remedy}")
    if found.query:
        raise StateError(f"BONOBOFS_DATABASE names an SQLite file with options, of which there are none; {remedy}")
    return found.set(database=os.path.realpath(found.database or ""))


def database_environment() -> dict[str, str]:
    """What of the environment says which database it is and how to get in, to us and to libpq."""
    return {name: value for name, value in os.environ.items() if name in _OF_DATABASE or name.startswith("PG")}


def without_secrets(where: URL) -> str:
    """The URL for people, without what is secret."""
    hidden = {name: "***" for name in where.query if name in SECRETS}
    return where.update_query_dict(hidden).render_as_string(hide_password=True)


def check_sqlite_file(path: str) -> tuple[int, int]:
    """Which file it is that bears the name. StateError where it is none of ours, or others could change it."""
    try:
        found = os.stat(path)
    except FileNotFoundError as error:
        raise StateError(f"the database {path} is not there; make a new one: bonobofs db upgrade") from error
    except OSError as error:
        raise StateError(f"the database {path} cannot be used: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise StateError(f"the database {path} is no file; set BONOBOFS_DATABASE to sqlite:////PATH of one")
    if found.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
        raise StateError(f"the database {path} belongs to another user; use one of your own")
    if stat.S_IMODE(found.st_mode) & 0o022:
        raise StateError(f"others can write in the database {path}; chmod go-w {path}")
    return found.st_dev, found.st_ino


def sqlite_engine(where: URL) -> Engine:
    # Whoever finds no file makes none: an empty one would say that nothing is leased.
    name = f"file:{quote(where.database or '')}?mode=rw"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(name, uri=True, isolation_level=None, timeout=_BUSY_SECONDS, check_same_thread=False)

    engine = create_engine(where, creator=connect)
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin)
    return engine


def postgresql_engine(where: URL) -> Engine:
    # A server that is gone without a word must not hold up a heartbeat for minutes, also when it took the question.
    patience = {"connect_timeout": _CONNECT_SECONDS, "tcp_user_timeout": 1000 * _CONNECT_SECONDS}
    patience |= {"keepalives_idle": 2, "keepalives_interval": 1, "keepalives_count": _CONNECT_SECONDS - 2}
    return create_engine(
        where,
        pool_size=2,
        pool_pre_ping=True,
        # Whatever the server's default is: each statement must see what was committed before it got its turn.
        isolation_level="READ COMMITTED",
        connect_args={**patience, "client_encoding": "utf8"},
    )


def _prepare_sqlite(connection: Any, _: object) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA foreign_keys = ON")


def _begin(connection: Connection) -> None:
    level = "FULL" if connection.get_execution_options().get(OUTLASTS_POWER, True) else "NORMAL"
    connection.exec_driver_sql(f"PRAGMA synchronous = {level}")
    begin_sqlite(connection)


def begin_sqlite(connection: Connection) -> None:
    """Begin a transaction as the execution option BEGIN says."""
    # The driver would begin by itself, too late: a transaction that reads before it writes could then fail as busy.
    connection.exec_driver_sql(connection.get_execution_options().get(BEGIN, "BEGIN"))
