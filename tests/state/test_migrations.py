"""A migration is complete or undone, and the previous data is kept."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import inspect, text

from bonobofs import session
from bonobofs.errors import StateError
from bonobofs.state import agent_registry, heartbeats, migrate, schema, sqlite_file
from bonobofs.state import migrate as backups
from bonobofs.state.database import Database
from tests.support.world import bonobofs, environment

Migrate = Callable[[str], migrate.UpgradeResult]

HEADER = """
import os
import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"

def commit():
    # What no migration should do, and what a statement that commits by itself does on other databases.
    connection = op.get_bind()
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("COMMIT")
        connection.exec_driver_sql("BEGIN")
    else:
        connection.connection.dbapi_connection.commit()

def upgrade():
"""
ADDS = 'op.create_table("notes", sa.Column("id", sa.Integer, primary_key=True))'
CHANGES = "op.execute(\"UPDATE agents SET name = 'nobody'\")"
UPGRADE = """
import sys
from pathlib import Path
from bonobofs.state import migrate
from bonobofs.state.database import Database

migrate.upgrade(Database(Path(sys.argv[1])), [Path(one) for one in sys.argv[2:]])
"""
FAILS = 'op.execute("INSERT INTO nowhere VALUES (1)")'


@pytest.fixture
def scripts(tmp_path: Path) -> Callable[..., tuple[Path, ...]]:
    """scripts(LINE, ...) gives the directories of our migrations and of a further one that runs these lines."""

    def write(*lines: str) -> tuple[Path, ...]:
        directory = tmp_path / "versions"
        directory.mkdir()
        (directory / "v0002.py").write_text(HEADER + "".join(f"    {line}\n" for line in lines))
        return (*migrate.MIGRATIONS, directory)

    return write


def agents_in(database: Database) -> list[str]:
    """Read without asking for the schema's version, which the test may have changed."""
    with database.engine.connect() as connection:
        return list(connection.scalars(text("SELECT name FROM agents ORDER BY name")))


def tables_in(database: Database) -> set[str]:
    with database.engine.connect() as connection:
        return set(inspect(connection).get_table_names())


def backups_in(home: Path) -> list[Path]:
    return sorted((home / "backups").glob("*")) if (home / "backups").exists() else []


@pytest.mark.parametrize("by_migrations", [False, True])
def test_a_new_database_and_a_migrated_one_have_the_tables_of_the_schema(
    where: str, home: Path, by_migrations: bool
) -> None:
    """`Database.open` creates the tables without the migrations."""
    if by_migrations:
        with Database(home) as database:
            assert migrate.upgrade(database) == (None, sqlite_file.REVISION, None)
    with Database.open(home) as database, database.read() as connection:
        context = MigrationContext.configure(connection, opts={"version_table": sqlite_file.VERSION_TABLE})
        # The comments are for who reads the code; they are not kept in the database.
        found = [one for one in compare_metadata(context, schema.with_partial_indexes()) if "comment" not in str(one)]
        assert found == []
        assert migrate.faults(connection) == []
    assert migrate.newest() == sqlite_file.REVISION


def test_every_column_has_a_comment() -> None:
    columns = [column for table in schema.metadata.sorted_tables for column in table.columns]
    assert [str(column) for column in columns if not (column.comment or "").endswith(".")] == []


def test_an_upgrade_runs_once_and_keeps_the_data(
    database: Database, home: Path, scripts: Callable[..., tuple[Path, ...]]
) -> None:
    agent_registry.add(database, "ann")
    assert migrate.upgrade(database) == ("0001", "0001", None)
    assert backups_in(home) == []
    more = scripts(ADDS)
    done = migrate.upgrade(database, more)
    assert (done.before, done.after) == ("0001", "0002")
    assert backups_in(home) == [done.backup]
    assert "notes" in tables_in(database)
    assert agents_in(database) == ["ann"]
    assert migrate.upgrade(database, more) == ("0002", "0002", None)
    with pytest.raises(StateError, match="from a newer bonobofs"):
        Database.open(home)
    assert done.backup is not None
    assert done.backup.stat().st_mode & 0o777 == 0o600
    backups.restore(database, done.backup)
    with Database.open(home) as again:
        assert again.revision() == "0001"


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param((ADDS, CHANGES, FAILS), id="it fails"),
        pytest.param((ADDS, CHANGES, "commit()", FAILS), id="it commits and fails"),
        pytest.param((ADDS, CHANGES, 'op.drop_table("cursors")'), id="it takes a table away"),
        pytest.param((ADDS, CHANGES, "commit()", 'op.drop_column("sessions", "host")'), id="it takes a column away"),
    ],
)
def test_a_failed_migration_changes_nothing(
    database: Database, home: Path, scripts: Callable[..., tuple[Path, ...]], lines: tuple[str, ...]
) -> None:
    """Also if it has committed half of its steps, and if it succeeds and the health check fails."""
    agent_registry.add(database, "ann")
    before = tables_in(database)
    with pytest.raises(StateError, match="the database is as it was at 0001"):
        migrate.upgrade(database, scripts(*lines))
    assert len(backups_in(home)) == 1
    assert tables_in(database) == before
    assert agents_in(database) == ["ann"]
    with Database.open(home) as again, again.read() as connection:
        assert migrate.faults(connection) == []
        assert heartbeats.generation(connection) == 1


def test_a_killed_migration_changes_nothing(
    database: Database, home: Path, scripts: Callable[..., tuple[Path, ...]]
) -> None:
    agent_registry.add(database, "ann")
    before = tables_in(database)
    directories = scripts(ADDS, CHANGES, "os.kill(os.getpid(), 9)")
    ran = subprocess.run([sys.executable, "-c", UPGRADE, home, *directories], env=environment(), check=False)
    assert ran.returncode == -9
    assert tables_in(database) == before
    assert agents_in(database) == ["ann"]
    assert migrate.upgrade(database) == ("0001", "0001", None)


def test_a_half_committed_migration_is_restored(
    database: Database, home: Path, scripts: Callable[..., tuple[Path, ...]]
) -> None:
    """No process uses the committed half before."""
    agent_registry.add(database, "ann")
    before = tables_in(database)
    directories = scripts(ADDS, CHANGES, "commit()", "os.kill(os.getpid(), 9)")
    ran = subprocess.run([sys.executable, "-c", UPGRADE, home, *directories], env=environment(), check=False)
    assert ran.returncode == -9
    assert agents_in(database) == ["nobody"]
    with pytest.raises(StateError, match="was interrupted; run bonobofs db upgrade"):
        Database.open(home)
    status = bonobofs("db", "status")
    assert (status.returncode, status.stdout.count("was interrupted")) == (1, 1)
    (backup,) = backups_in(home)
    away = backup.rename(home / "away")
    with pytest.raises(StateError, match="its backup is not in"):
        migrate.upgrade(database)
    away.rename(backup)
    assert migrate.upgrade(database) == ("0001", "0001", None)
    assert tables_in(database) == before
    assert agents_in(database) == ["ann"]
    with Database.open(home) as again:
        assert [one.label for one in agent_registry.list_agents(again)] == ["ann"]


def test_an_older_bonobofs_leaves_a_newer_database_alone(
    database: Database, home: Path, scripts: Callable[..., tuple[Path, ...]]
) -> None:
    migrate.upgrade(database, scripts(ADDS))
    with pytest.raises(StateError, match="from a newer bonobofs"):
        migrate.upgrade(database)
    assert len(backups_in(home)) == 1
    assert bonobofs("db", "upgrade").returncode == 1
    assert ": newer, schema 0002" in bonobofs("db", "status").stdout


def test_a_live_session_prevents_a_migration(
    database: Database, home: Path, source: Path, scripts: Callable[..., tuple[Path, ...]]
) -> None:
    more = scripts(ADDS)
    with session.open_session(source, agent="ann"):
        with pytest.raises(StateError, match=r"sessions are live: ann in .*/source; end them"):
            migrate.upgrade(database, more)
        assert backups_in(home) == []
        assert bonobofs("db", "status").stdout.count("live: ann in") == 1
    assert migrate.upgrade(database, more).after == "0002"


def test_a_session_of_another_host_prevents_a_migration(
    database: Database,
    opened: Callable[[Path], Database],
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scripts: Callable[..., tuple[Path, ...]],
) -> None:
    """Its heartbeats show that it is live, as its processes are on the other host."""
    monkeypatch.setenv("BONOBOFS_DATABASE", str(database.url.render_as_string(hide_password=False)))
    other = opened(tmp_path / "other")
    with session.open_session(source, agent="ann"), pytest.raises(StateError, match=r"sessions are live: ann on "):
        migrate.upgrade(other, scripts(ADDS))


def test_a_migration_needs_a_backup(
    database: Database,
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scripts: Callable[..., tuple[Path, ...]],
) -> None:
    """It is refused if pg_dump is missing or the copy does not fit."""
    if database.is_sqlite:
        (home / "backups").write_text("in the way")
    else:
        monkeypatch.setenv("PATH", str(tmp_path))
    before = tables_in(database)
    with pytest.raises(StateError):
        migrate.upgrade(database, scripts(ADDS))
    assert tables_in(database) == before


def test_the_db_commands_report_their_result(where: str, home: Path) -> None:
    """From a missing database on."""
    assert "empty" in bonobofs("db", "status").stdout
    assert "created at 0001" in bonobofs("db", "upgrade").stdout
    assert "already at 0001" in bonobofs("db", "upgrade").stdout
    (backup,) = bonobofs("db", "backup").stdout.splitlines()
    assert backups_in(home) == [Path(backup)]
    status = bonobofs("db", "status")
    assert status.returncode == 0
    assert f"current, schema 0001, this version reads 0001\nbackups: 1, the last is {backup}" in status.stdout


@pytest.mark.parametrize(
    "url",
    [
        "mysql://localhost/x",
        "nonsense",
        "sqlite:///relative.db",
        "sqlite:////nonexistent/x.db",
        "sqlite:////tmp",
        "sqlite:////tmp/x.db?mode=ro",
        "postgresql:///x?host=/nonexistent",
        "postgresql://localhost:port/x",
    ],
)
def test_an_invalid_database_is_a_one_line_error_with_exit_1(url: str, home: Path, source: Path) -> None:
    wrong = bonobofs("agent", "list", env={"BONOBOFS_DATABASE": url})
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (1, "", 1)
    assert any(word in wrong.stderr for word in ("DATABASE", "cannot be used", "cannot be created"))
    assert not (home / "bonobofs.log").exists()
