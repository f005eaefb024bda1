"""The database: where it is, and transactions on it that are alike on SQLite and PostgreSQL.

`BONOBOFS_DATABASE` names it by URL (`postgresql://USER@HOST/NAME`, `sqlite:////PATH`); without it, it is `bonobofs.db`
in the state directory. On PostgreSQL bonobofs needs a database of its own, which several hosts may share.

Every transaction makes sure first that the schema is the one that this version reads, and keeps a migration out while
it runs: by a lock on a file beside SQLite's, by an advisory lock on PostgreSQL. Whatever the database says is a
StateError; nobody may go on as if it had answered.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

from sqlalchemy import URL, Connection, Engine, create_engine, event, func, inspect, make_url, select, table
from sqlalchemy import column as named_column
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from bonobofs.errors import StateError
from bonobofs.state.tables import REVISION, VERSION_TABLE

_BUSY_SECONDS: Final = 10.0
_CONNECT_SECONDS: Final = 5
BEGIN: Final = "bonobofs_begin"
"""The execution option that says how SQLite begins a transaction."""
_GATE: Final = 0x626F6E6F626F
"""The advisory lock of PostgreSQL that a migration takes alone and everybody else shares."""
_TURN: Final = _GATE + 1
"""The one that writers take in turn, as SQLite has them do."""
_VERSION: Final = table(VERSION_TABLE, named_column("version_num"))


def url(home: Path) -> URL:
    """Where the database of this state directory is; StateError for one that cannot be."""
    named = os.environ.get("BONOBOFS_DATABASE")
    if not named:
        return URL.create("sqlite", database=str(home / "bonobofs.db"))
    remedy = "set BONOBOFS_DATABASE to postgresql://USER@HOST/NAME or sqlite:////PATH, or not at all"
    try:
        found = make_url(named)
    except ArgumentError as error:
        raise StateError(f"BONOBOFS_DATABASE is no URL of a database; {remedy}") from error
    if found.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
        return found.set(drivername="postgresql+psycopg")
    if found.drivername != "sqlite":
        raise StateError(f"BONOBOFS_DATABASE names a {found.drivername} database; {remedy}")
    if not os.path.isabs(found.database or ""):
        raise StateError(f"BONOBOFS_DATABASE names an SQLite file by a relative path; {remedy}")
    return found


def home_id(home: Path) -> str:
    """The UUID of this state directory, among those that share its database."""
    path = home / "home.id"
    with contextlib.suppress(FileExistsError):
        mine = path.with_name(f".{path.name}.{uuid.uuid4()}")
        with open(mine, "x", encoding="ascii", opener=_private) as file:
            file.write(f"{uuid.uuid4()}\n")
        try:
            # The first to link has named it; nobody ever reads half of a name.
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
            self.engine: Final[Engine] = _sqlite(self.url) if self.is_sqlite else _postgresql(self.url)
        except ModuleNotFoundError as error:
            raise StateError("PostgreSQL needs a driver; install bonobofs[postgresql]") from error

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
        """For people, without the password."""
        return self.url.render_as_string(hide_password=True)

    def revision(self) -> str | None:
        """The migration that the schema is at; None where there is none of ours."""
        if self.is_sqlite and not os.path.exists(self.url.database or ""):
            return None
        with self.failures(), self.engine.connect() as connection:
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
        """A transaction that changes rows which nobody else changes; on PostgreSQL it waits for no other."""
        with self._transaction("BEGIN IMMEDIATE") as connection:
            yield connection

    @contextlib.contextmanager
    def alone(self) -> Iterator[Connection]:
        """A connection, without a transaction, while no transaction of anybody else runs: for migrations."""
        with self.failures(), self._gate(fcntl.LOCK_EX), self.engine.connect() as connection:
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
        except SQLAlchemyError as error:
            said = str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
            raise StateError(
                f"the database {self.name} cannot be used: {said}; look at it: bonobofs db status"
            ) from error

    def _prepare(self) -> None:
        # What is needed once is read once: Alembic takes its time to load.
        if self.revision() is None:
            from bonobofs.state.upgrade import create  # noqa: PLC0415

            create(self)
        self.check()
        earlier = self.home / "agents.json"
        if earlier.exists():
            from bonobofs.state.takeover import take_over  # noqa: PLC0415

            take_over(self, earlier)

    @contextlib.contextmanager
    def _transaction(self, begin: str, *, in_turn: bool = False) -> Iterator[Connection]:
        with self.failures(), self._gate(fcntl.LOCK_SH), self._turn(begin), self.engine.connect() as connection:
            connection.execution_options(**{BEGIN: begin})
            with connection.begin():
                if not self.is_sqlite:
                    connection.execute(select(func.pg_advisory_xact_lock_shared(_GATE)))
                    if in_turn:
                        connection.execute(select(func.pg_advisory_xact_lock(_TURN)))
                self._check_revision(connection.scalar(select(_VERSION.c.version_num)))
                yield connection

    def _gate(self, how: int) -> contextlib.AbstractContextManager[None]:
        return _locked(f"{self.url.database}.lock", how) if self.is_sqlite else contextlib.nullcontext()

    def _turn(self, begin: str) -> contextlib.AbstractContextManager[None]:
        """SQLite's own way to wait for a writer is to look again later and later; many at once would starve."""
        if self.is_sqlite and begin != "BEGIN":
            return _locked(f"{self.url.database}.turn", fcntl.LOCK_EX)
        return contextlib.nullcontext()

    def _check_revision(self, revision: str | None) -> None:
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


def _sqlite(where: URL) -> Engine:
    engine = create_engine(where, connect_args={"isolation_level": None, "timeout": _BUSY_SECONDS})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", begin_sqlite)
    return engine


def _postgresql(where: URL) -> Engine:
    # A host that is gone without a word must not hold up a heartbeat for minutes.
    settings = {"connect_timeout": _CONNECT_SECONDS, "tcp_user_timeout": 1000 * _CONNECT_SECONDS}
    return create_engine(where, pool_size=2, pool_pre_ping=True, connect_args={**settings, "client_encoding": "utf8"})


@contextlib.contextmanager
def _locked(path: str, how: int) -> Iterator[None]:
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StateError(f"{path} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _prepare_sqlite(connection: Any, _: object) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def begin_sqlite(connection: Connection) -> None:
    """Begin a transaction as the execution option BEGIN says."""
    # The driver would begin by itself, too late: a transaction that reads before it writes could then fail as busy.
    connection.exec_driver_sql(connection.get_execution_options().get(BEGIN, "BEGIN"))
