"""Atomic backups of the database: SQLite with its backup API, PostgreSQL with pg_dump."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from bonobofs.errors import StateError
from bonobofs.state.database import SECRETS, Database

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
        raise StateError(f"the database {database.name} holds no tables of bonobofs, so there is nothing to keep")
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
