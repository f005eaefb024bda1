"""Reaching the database: which one it is, by the environment, and the engine that connects to it.

`BONOBOFS_DATABASE` names it by URL (`postgresql://USER@HOST/NAME`, `sqlite:////PATH`); without it, it is `bonobofs.db`
in the state directory.
"""

from __future__ import annotations

import os
import sqlite3
import stat
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError

from bonobofs.errors import StateError

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


def shown(where: URL) -> str:
    """The URL for people, without what is secret."""
    hidden = {name: "***" for name in where.query if name in SECRETS}
    return where.update_query_dict(hidden).render_as_string(hide_password=True)


def look_at_sqlite(path: str) -> tuple[int, int]:
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
