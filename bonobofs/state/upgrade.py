"""Bringing the database to the newest schema, so that it is either there or as it was before.

A migration runs while no transaction of anybody else does, and never while a session is live. Before it a dated backup
is made; it is one transaction, and the health check is its last part. Where a failed one has left anything behind all
the same, the backup is put back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
import sqlite3
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, delete, insert, inspect, select, text
from sqlalchemy.schema import MetaData

from bonobofs.errors import StateError
from bonobofs.state import presence, tables
from bonobofs.state.database import BEGIN, Database, home_id, revision_of
from bonobofs.state.sessions import lives, load_all

MIGRATIONS: Final = (Path(__file__).parent / "migrations" / "versions",)
_NAMED: Final = 5
_SUFFIXES: Final = (".db", ".dump")
_MARK: Final = "migrating"
_UNMARK: Final = delete(tables.counters).where(tables.counters.c.name == _MARK)


class Upgraded(NamedTuple):
    """What `upgrade` did. `before` is None where there were no tables."""

    before: str | None
    after: str
    backup: Path | None


class State(enum.StrEnum):
    """How a database stands."""

    CURRENT = "current"
    EMPTY = "empty"
    OLD = "old"
    NEWER = "newer"
    FAULTY = "faulty"


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """What `db status` says."""

    database: str
    """URL without the password."""
    state: State
    schema: str | None
    """The migration it is at."""
    newest: str
    faults: list[str]
    live: list[str]
    backups: list[str]


def status(database: Database) -> Status:
    """How the database stands; it is not changed. StateError when it cannot be reached."""
    at, wanted = database.revision(), newest()
    faulty: list[str] = []
    live: list[str] = []
    if at == wanted:
        with database.read() as connection:
            faulty = faults(connection)
            live = _live(database, connection)
    state = State.EMPTY if at is None else State.OLD if at < wanted else State.NEWER if at > wanted else State.CURRENT
    return Status(
        database=database.name,
        state=State.FAULTY if faulty else state,
        schema=at,
        newest=wanted,
        faults=faulty,
        live=live,
        backups=[str(path) for path in sorted((database.home / "backups").glob("*-*.d*")) if path.suffix in _SUFFIXES],
    )


def create(database: Database) -> None:
    """Make the tables where there are none. Of several who try at once, one does."""
    if database.is_sqlite:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(database.url.database or "", os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    with database.alone() as connection:
        if revision_of(connection) is None:
            connection.rollback()
            _migrate(connection, MIGRATIONS)


def newest(scripts: Sequence[Path] = MIGRATIONS) -> str:
    """The migration that `upgrade` leads to."""
    return ScriptDirectory.from_config(_config(scripts)).get_current_head() or ""


def upgrade(database: Database, scripts: Sequence[Path] = MIGRATIONS) -> Upgraded:
    """Migrate to the newest schema; done again it does nothing. StateError when it is refused or failed.

    `scripts` are the directories that hold the migrations.
    """
    if database.revision() is None:
        create(database)
        if newest(scripts) == tables.REVISION:
            return Upgraded(None, tables.REVISION, None)
    with database.alone() as connection:
        before, after = revision_of(connection) or "", newest(scripts)
        connection.rollback()
        if before == after:
            return Upgraded(before, after, None)
        if before > after:
            database.check()
        _refuse_while_live(database, connection)
        made = back_up(database, before)
        known = _tables_of(connection)
        try:
            _migrate(connection, scripts, marked=True)
        except Exception as error:
            how = "put back from" if _put_back(connection, database, known, made) else "and there is also a backup,"
            raise StateError(
                f"the migration to {after} failed: {_said(error)}; the database is as it was at {before}, {how} {made}"
            ) from error
    return Upgraded(before, after, made)


def back_up(database: Database, revision: str | None = None) -> Path:
    """A copy of the database, dated and named by its schema, in `backups/` of the state directory; 0600.

    StateError when it cannot be made: for PostgreSQL that takes pg_dump of at least the server's version.
    """
    at = revision or database.revision()
    if at is None:
        raise StateError(f"the database {database.name} holds no tables of bonobofs, so there is nothing to keep")
    directory = database.home / "backups"
    directory.mkdir(mode=0o700, exist_ok=True)
    moment = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S.%fZ")
    path = directory / f"{moment}-{at}.{'db' if database.is_sqlite else 'dump'}"
    # It gets its name when it is whole: what bears the name of a backup is one.
    unfinished = path.with_suffix(f"{path.suffix}.unfinished")
    os.close(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        if database.is_sqlite:
            _copy_sqlite(database.url.database or "", str(unfinished))
        else:
            _run(
                database, "pg_dump", "--format=custom", "--no-owner", "--exclude-table=index_*", f"--file={unfinished}"
            )
        handle = os.open(unfinished, os.O_RDONLY | os.O_CLOEXEC)
        os.fsync(handle)
        os.close(handle)
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def faults(connection: Connection, revision: str = tables.REVISION, metadata: MetaData = tables.metadata) -> list[str]:
    """What is wrong with the schema and what it holds, a sentence each; none when it is healthy."""
    found = []
    at = revision_of(connection)
    if at != revision:
        found.append(f"it is at {at}, not at {revision}")
    inspector = inspect(connection)
    present = set(inspector.get_table_names())
    for table in metadata.sorted_tables:
        if table.name not in present:
            found.append(f"the table {table.name} is missing")
            continue
        columns = {column["name"] for column in inspector.get_columns(table.name)}
        found += [f"the column {table.name}.{name} is missing" for name in set(table.columns.keys()) - columns]
    if (
        not found
        and connection.scalar(select(tables.counters.c.value).where(tables.counters.c.name == "leases")) is None
    ):
        found.append("the counter of leases is missing")
    if connection.dialect.name == "sqlite":
        found += [row[0] for row in connection.execute(text("PRAGMA integrity_check")) if row[0] != "ok"]
        found += [f"a row of {row[0]} refers to none" for row in connection.execute(text("PRAGMA foreign_key_check"))]
    return found


def _config(scripts: Sequence[Path]) -> Config:
    config = Config()
    config.set_main_option("script_location", _quoted(MIGRATIONS[0].parent))
    config.set_main_option("path_separator", "newline")
    config.set_main_option("version_locations", "\n".join(_quoted(path) for path in scripts))
    return config


def _quoted(path: Path) -> str:
    return str(path).replace("%", "%%")


def _migrate(connection: Connection, scripts: Sequence[Path], *, marked: bool = False) -> None:
    """All migrations that are missing, and the health check, in one transaction.

    `marked`: its first act is a mark and its last to remove it, so that the mark is seen when a migration committed
    something of itself, which no rollback then takes back.
    """
    config = _config(scripts)
    config.attributes["connection"] = connection
    connection.execution_options(**{BEGIN: "BEGIN IMMEDIATE"})
    with connection.begin():
        if marked:
            connection.execute(insert(tables.counters).values(name=_MARK, value=0))
        command.upgrade(config, "head")
        wrong = faults(connection, newest(scripts))
        if wrong:
            raise StateError("; ".join(wrong))
        if marked:
            connection.execute(_UNMARK)


def _refuse_while_live(database: Database, connection: Connection) -> None:
    with connection.begin():
        live = _live(database, connection)
    if live:
        more = f" and {len(live) - _NAMED} more" if len(live) > _NAMED else ""
        raise StateError(f"sessions are live: {', '.join(live[:_NAMED])}{more}; end them, then run this again")


def _live(database: Database, connection: Connection) -> list[str]:
    """The live sessions: of this state directory by their processes, of others by their word."""
    mine = home_id(database.home)
    here = [f"{one.agent} in {one.mountpoint or one.source}" for one in load_all(database.home) if lives(one)]
    return here + [f"{one.agent} on {one.host}" for one in presence.living(connection) if one.home != mine]


def _put_back(connection: Connection, database: Database, known: set[str], backup: Path) -> bool:
    """Restore the backup if the rollback has left anything of the migration; whether that was needed."""
    with connection.begin():
        marked = connection.scalar(select(tables.counters.c.name).where(tables.counters.c.name == _MARK))
    if marked is None:
        return False
    if not database.is_sqlite:
        added = _tables_of(connection) - known
        with connection.begin():
            for name in added:
                connection.exec_driver_sql(f'DROP TABLE "{name}" CASCADE')
    restore(database, backup)
    return True


def restore(database: Database, backup: Path) -> None:
    """Put the database back to what a backup holds."""
    if database.is_sqlite:
        _copy_sqlite(str(backup), database.url.database or "")
    else:
        _run(database, "pg_restore", "--clean", "--if-exists", "--single-transaction", "--no-owner", str(backup))


def _tables_of(connection: Connection) -> set[str]:
    with connection.begin():
        return set(inspect(connection).get_table_names())


def _copy_sqlite(source: str, target: str) -> None:
    try:
        with contextlib.closing(sqlite3.connect(source)) as old, contextlib.closing(sqlite3.connect(target)) as new:
            old.backup(new)
            wrong = new.execute("PRAGMA integrity_check").fetchone()[0]
    except sqlite3.Error as error:
        raise StateError(f"{source} cannot be copied to {target}: {error}") from error
    if wrong != "ok":
        raise StateError(f"the copy of {source} is damaged: {wrong}")


def _run(database: Database, program: str, *arguments: str) -> None:
    """Run a program of PostgreSQL on the database; the password goes where not everybody can read it."""
    said = {name: ",".join((value,) if isinstance(value, str) else value) for name, value in database.url.query.items()}
    said |= {
        name: str(value)
        for name, value in database.url.translate_connect_args(username="user", database="dbname").items()
        if name != "password"
    }
    info = " ".join(f"{name}='{_quoted_value(value)}'" for name, value in said.items())
    command_line = [program, f"--dbname={info}", "--no-password", *arguments]
    password = {"PGPASSWORD": str(database.url.password)} if database.url.password is not None else {}
    try:
        ran = subprocess.run(
            command_line,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
            env={**os.environ, **password, "LC_ALL": "C"},
        )
    except FileNotFoundError as error:
        raise StateError(f"{program} is missing, without which nothing is done; install postgresql-client") from error
    if ran.returncode:
        raise StateError(f"{program} failed, so nothing is done: {ran.stderr.strip().splitlines()[0]}")


def _quoted_value(value: str) -> str:
    return value.replace("\\", "\\\\").replace("'", "\\'")


def _said(error: Exception) -> str:
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0]
