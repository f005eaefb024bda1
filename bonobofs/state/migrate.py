"""Back up the database, and upgrade it to the newest schema, atomically.

A migration holds the exclusive lock, and is refused while a session is live. `upgrade` first makes a dated backup. The
migration and its health check are one transaction. If a failed migration left changes after the rollback, `upgrade`
restores the backup. If the process was killed before that, every transaction is refused until the next upgrade
restores the backup.
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
from bonobofs.state import heartbeats
from bonobofs.state import schema as tables
from bonobofs.state.database import BEGIN, SECRETS, Database, revision_of
from bonobofs.state.home import home_id
from bonobofs.state.sessions import lives, load_all
from bonobofs.state.sqlite_file import MARK, REVISION, check_version, driver_text

INDEX: Final = "index_"
"""Name prefix of the index tables. They are derived from the trails, so backups exclude them on PostgreSQL."""
_SUFFIXES: Final = (".db", ".dump")


def list_backups(home: Path) -> list[Path]:
    """Return the paths of the backups, oldest first."""
    return [path for path in sorted((home / "backups").glob("*-*.d*")) if path.suffix in _SUFFIXES]


def create_backup(database: Database, revision: str | None = None) -> Path:
    """Back up the database to `backups/DATE-REVISION.db` or `.dump` in the state directory, mode 0600; return the path.

    StateError: there are no tables, or the backup failed. PostgreSQL needs a pg_dump of at least the server's version.
    """
    at = revision or database.revision()
    if at is None:
        raise StateError(f"the database {database.name} has no tables of bonobofs, so no backup is made")
    moment = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S.%fZ")
    path = database.home / "backups" / f"{moment}-{at}.{'db' if database.is_sqlite else 'dump'}"
    try:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        _write(database, path)
    except OSError as error:
        raise StateError(f"the backup {path} cannot be created: {error.strerror}") from error
    return path


def _write(database: Database, path: Path) -> None:
    # The final name appears only for a complete file.
    unfinished = path.with_suffix(f"{path.suffix}.unfinished")
    handle = os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if database.is_sqlite:
            _copy_sqlite(database.url.database or "", str(unfinished))
        else:
            where, hidden = _of(database)
            options = ("--no-password", "--format=custom", "--no-owner", f"--exclude-table={INDEX}*")
            _run("pg_dump", where, *options, f"--file={unfinished}", environment=hidden)
        os.fsync(handle)
        unfinished.rename(path)
    finally:
        os.close(handle)
        unfinished.unlink(missing_ok=True)


def restore(database: Database, backup: Path) -> None:
    """Restore the database from a backup. StateError."""
    if database.is_sqlite:
        _copy_sqlite(str(backup), database.url.database or "")
    else:
        where, hidden = _of(database)
        options = ("--no-password", "--clean", "--if-exists", "--single-transaction", "--no-owner")
        _run("pg_restore", where, *options, str(backup), environment=hidden)


def tables_in(backup: Path) -> set[str]:
    """Return the table names of a dump, from lines such as `215; 1259 16386 TABLE public agents OWNER`. StateError."""
    lines = [line.split() for line in _run("pg_restore", "--list", str(backup)).splitlines()]
    return {line[5] for line in lines if line[3:4] == ["TABLE"]}


def _copy_sqlite(source: str, target: str) -> None:
    try:
        with contextlib.closing(sqlite3.connect(source)) as old, contextlib.closing(sqlite3.connect(target)) as new:
            old.backup(new)
            wrong = new.execute("PRAGMA integrity_check").fetchone()[0]
    except sqlite3.Error as error:
        raise StateError(f"{source} cannot be copied to {target}: {error}") from error
    if wrong != "ok":
        raise StateError(f"the copy of {source} is damaged: {wrong}")


def _of(database: Database) -> tuple[str, dict[str, str]]:
    """Return the --dbname argument for a PostgreSQL program, and its extra environment variables.

    Other users can read arguments, so the password is in the environment and the other secrets are dropped.
    """
    parameters = {
        name: ",".join((value,) if isinstance(value, str) else value) for name, value in database.url.query.items()
    }
    parameters |= {
        name: str(value)
        for name, value in database.url.translate_connect_args(username="user", database="dbname").items()
    }
    hidden = {"PGPASSWORD": parameters["password"]} if "password" in parameters else {}
    info = " ".join(f"{name}='{_quoted_value(value)}'" for name, value in parameters.items() if name not in SECRETS)
    return f"--dbname={info}", hidden


def _run(program: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """Run a PostgreSQL program with `environment` added to that of this process; return its output. StateError."""
    try:
        ran = subprocess.run(
            [program, *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
            env={**os.environ, **(environment or {}), "LC_ALL": "C"},
        )
    except FileNotFoundError as error:
        raise StateError(f"{program} is missing; install postgresql-client") from error
    if ran.returncode:
        reason = ran.stderr.strip().partition("\n")[0] or f"exit status {ran.returncode}"
        raise StateError(f"{program} failed, and nothing was changed: {reason}")
    return ran.stdout


def _quoted_value(value: str) -> str:
    return value.replace("\\", "\\\\").replace("'", "\\'")


MIGRATIONS: Final = (Path(__file__).parent / "migrations" / "versions",)
_NAMED: Final = 5
_UNMARK: Final = delete(tables.counters).where(tables.counters.c.name == MARK)


class UpgradeResult(NamedTuple):
    """Result of `upgrade`: schema revisions and the backup. `before` is None for a new database."""

    before: str | None
    after: str
    backup: Path | None


class DatabaseState(enum.StrEnum):
    """State of a database."""

    CURRENT = "current"
    EMPTY = "empty"
    OLD = "old"
    NEWER = "newer"
    FAULTY = "faulty"


@dataclasses.dataclass(frozen=True, slots=True)
class DatabaseStatus:
    """Output of `db status`."""

    database: str
    """URL without the password."""
    state: DatabaseState
    schema: str | None
    """Its revision; None without tables."""
    newest: str
    faults: list[str]
    live: list[str]
    backups: list[str]


def status(database: Database) -> DatabaseStatus:
    """Return the state of the database; read-only. An error of the database is returned in `faults`."""
    at, wanted = None, newest()
    faulty: list[str] = []
    live: list[str] = []
    try:
        at = database.revision()
        if at == wanted:
            with database.read() as connection:
                faulty = faults(connection)
                live = _live(database, connection)
    except StateError as error:
        faulty = [str(error)]
    state = (
        DatabaseState.EMPTY
        if at is None
        else DatabaseState.OLD
        if at < wanted
        else DatabaseState.NEWER
        if at > wanted
        else DatabaseState.CURRENT
    )
    return DatabaseStatus(
        database=database.name,
        state=DatabaseState.FAULTY if faulty else state,
        schema=at,
        newest=wanted,
        faults=faulty,
        live=live,
        backups=[str(path) for path in list_backups(database.home)],
    )


def newest(scripts: Sequence[Path] = MIGRATIONS) -> str:
    """Return the newest revision in `scripts`."""
    return ScriptDirectory.from_config(_config(scripts)).get_current_head() or ""


def upgrade(database: Database, scripts: Sequence[Path] = MIGRATIONS) -> UpgradeResult:
    """Migrate to the newest schema; idempotent. StateError: refused or failed.

    `scripts` are the directories that hold the migrations.
    """
    if database.revision() is None:
        database.create(lambda connection: _run_migrations(connection, MIGRATIONS))
        if newest(scripts) == REVISION:
            return UpgradeResult(None, REVISION, None)
    with database.alone() as connection:
        before, after = revision_of(connection) or "", newest(scripts)
        connection.rollback()
        if before > after:
            check_version(database.name, before, is_interrupted=False)
        _repair(connection, database, before)
        if before == after:
            return UpgradeResult(before, after, None)
        _refuse_while_live(database, connection)
        made = create_backup(database, before)
        try:
            _migrate(connection, scripts)
        except Exception as error:
            how = "restored from" if _restore_backup(connection, database, made) else "and it has a backup,"
            raise StateError(
                f"the migration to {after} failed: {driver_text(error)}; "
                f"the database is as it was at {before}, {how} {made}"
            ) from error
    return UpgradeResult(before, after, made)


def faults(connection: Connection, revision: str = REVISION, metadata: MetaData = tables.metadata) -> list[str]:
    """Check the schema and the data; return one sentence per fault, and an empty list for a healthy database."""
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


def _migrate(connection: Connection, scripts: Sequence[Path]) -> None:
    """Run all missing migrations and the health check in one transaction.

    The MARK row is inserted first and deleted last. If a migration commits by itself, the row becomes visible and shows
    that a rollback cannot undo the migration.
    """
    connection.execution_options(**{BEGIN: "BEGIN IMMEDIATE"})
    with connection.begin():
        connection.execute(insert(tables.counters).values(name=MARK, value=0))
        _run_migrations(connection, scripts)
        connection.execute(_UNMARK)


def _run_migrations(connection: Connection, scripts: Sequence[Path]) -> None:
    config = _config(scripts)
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    wrong = faults(connection, newest(scripts))
    if wrong:
        raise StateError("; ".join(wrong))


def _refuse_while_live(database: Database, connection: Connection) -> None:
    with connection.begin():
        live = _live(database, connection)
    if live:
        more = f" and {len(live) - _NAMED} more" if len(live) > _NAMED else ""
        raise StateError(f"sessions are live: {', '.join(live[:_NAMED])}{more}; end them, then run this again")


def _live(database: Database, connection: Connection) -> list[str]:
    """Return the live sessions: those of this state directory by process, those of others by heartbeat."""
    mine = home_id(database.home)
    here = [f"{one.agent} in {one.mountpoint or one.source}" for one in load_all(database.home) if lives(one)]
    return here + [f"{one.agent} on {one.host}" for one in heartbeats.living(connection) if one.home != mine]


def _restore_backup(connection: Connection, database: Database, backup: Path) -> bool:
    """Restore the backup if the rollback left part of the migration. Return True if it did."""
    if not _is_marked(connection):
        return False
    if not database.is_sqlite:
        with connection.begin():
            for name in set(inspect(connection).get_table_names()) - tables_in(backup):
                if not name.startswith(INDEX):
                    connection.exec_driver_sql(f'DROP TABLE "{name}" CASCADE')
    restore(database, backup)
    return True


def _repair(connection: Connection, database: Database, revision: str) -> None:
    """Restore the backup of a migration that was killed. StateError: this state directory does not have the backup."""
    if not _is_marked(connection):
        return
    made = [path for path in list_backups(database.home) if path.stem.endswith(f"-{revision}")]
    if not made:
        raise StateError(
            f"a migration of {database.name} was interrupted, and its backup is not in {database.home / 'backups'}; "
            "run bonobofs db upgrade on the host that started it"
        )
    _restore_backup(connection, database, made[-1])


def _is_marked(connection: Connection) -> bool:
    with connection.begin():
        return connection.scalar(select(tables.counters.c.name).where(tables.counters.c.name == MARK)) is not None
