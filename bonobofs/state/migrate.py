"""Upgrade the database to the newest schema, atomically.

A migration holds the exclusive lock, and is refused while a session is live. `upgrade` first makes a dated backup. The
migration and its health check are one transaction. If a failed migration left changes after the rollback, `upgrade`
restores the backup. If the process was killed before that, every transaction is refused until the next upgrade
restores the backup.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
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
from bonobofs.state.backup import INDEX, create_backup, list_backups, restore, tables_in
from bonobofs.state.database import BEGIN, Database, revision_of
from bonobofs.state.home import home_id
from bonobofs.state.sessions import lives, load_all
from bonobofs.state.sqlite_file import MARK, REVISION, check_version, driver_text

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
        _mend(connection, database, before)
        if before == after:
            return UpgradeResult(before, after, None)
        _refuse_while_live(database, connection)
        made = create_backup(database, before)
        try:
            _migrate(connection, scripts)
        except Exception as error:
            how = "restored from" if _put_back(connection, database, made) else "and it has a backup,"
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


def _put_back(connection: Connection, database: Database, backup: Path) -> bool:
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


def _mend(connection: Connection, database: Database, revision: str) -> None:
    """Restore the backup of a migration that was killed. StateError: this state directory does not have the backup."""
    if not _is_marked(connection):
        return
    made = [path for path in list_backups(database.home) if path.stem.endswith(f"-{revision}")]
    if not made:
        raise StateError(
            f"a migration of {database.name} was interrupted, and its backup is not in {database.home / 'backups'}; "
            "run bonobofs db upgrade on the host that started it"
        )
    _put_back(connection, database, made[-1])


def _is_marked(connection: Connection) -> bool:
    with connection.begin():
        return connection.scalar(select(tables.counters.c.name).where(tables.counters.c.name == MARK)) is not None
