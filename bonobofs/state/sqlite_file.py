"""The SQLite database without SQLAlchemy, which takes longer to load than the rest of a session's start.

The lease follower uses it. `state.database` has the same locks, checks and errors for everything else.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import quote

from bonobofs.errors import BonobofsError, StateError, UsageError
from bonobofs.system.locks import locked

REVISION: Final = "0001"
"""The schema revision that this version reads and writes: the newest migration."""
VERSION_TABLE: Final = "schema_version"
MARK: Final = "migrating"
"""Name of the counter row that exists during a migration. If a transaction sees it, the migration was interrupted."""
CLOCK: Final = "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
"""SQLite's current time in milliseconds since 1970, UTC."""

_VERSION: Final = "SELECT version_num, EXISTS (SELECT 1 FROM counters WHERE name = ?) FROM schema_version"
_OF_DATABASE: Final = frozenset({"BONOBOFS_DATABASE", "HOME", "KRB5CCNAME"})
_BUSY_SECONDS: Final = 10.0
_DAMAGED: Final = frozenset({sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
"""Result codes of SQLite. SQLITE_ERROR: a table is missing."""
_LITTLE_SPACE: Final = 1 << 16
"""Bytes below which SQLite cannot create its shared memory, which it reports as an I/O error."""
_SQLITE_URL: Final = re.compile(r"sqlite:///(/[^?#]+)")
_BYTE: Final = re.compile("[\udc80-\udcff\\\\]")
_ESCAPE: Final = re.compile(r"\\(?:x([0-9a-f]{2})|(\\))")

Execute = Callable[[str, Mapping[str, Any]], Sequence[Sequence[Any]]]
"""Runs one statement of SQL with `:name` parameters, and returns its rows.

`{clock}` in the statement is the database's current time in milliseconds since 1970, UTC.
"""


class Queries(Protocol):
    """A database that runs SQL text."""

    @property
    def name(self) -> str:
        """URL for messages, with the secrets masked."""

    def queries(self, *, write: bool = False, change: bool = False) -> contextlib.AbstractContextManager[Execute]:
        """Run a transaction, which reads.

        With `write`, it changes only rows with a single writer, and does not fsync on SQLite: power loss may undo it.
        With `change`, it is serialized with all other changes, so that it sees all earlier ones.
        """


class SqliteFile:
    """The SQLite database of a state directory. For one thread at a time."""

    def __init__(self, home: Path, path: str) -> None:
        """The file must exist at the first transaction."""
        self.name: str = f"sqlite:///{path}"
        self._home: Final = home
        self._path: Final = path
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        """Device and inode of the file at the last connection."""

    def close(self) -> None:
        """Close the connection. The next transaction opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def has_tables(self) -> bool:
        """Return whether the file has the tables, of any revision. StateError."""
        with self._failures():
            check_sqlite_file(self._path)
            found = self._connected().execute("SELECT 1 FROM sqlite_master WHERE name = ?", (VERSION_TABLE,))
            return found.fetchone() is not None

    @contextlib.contextmanager
    def queries(self, *, write: bool = False, change: bool = False) -> Iterator[Execute]:
        """Run a transaction, as `Queries` says. StateError."""
        turn = waiting_turn(self._path) if write or change else contextlib.nullcontext()
        with self._failures(), migration_lock(self._path, shared=True), turn:
            connection = self._connected()
            connection.execute(f"PRAGMA synchronous = {'FULL' if change else 'NORMAL'}")
            connection.execute("BEGIN IMMEDIATE" if write or change else "BEGIN")
            with connection:  # commits, or rolls back after an error
                versions = connection.execute(
                    "SELECT version_num, EXISTS (SELECT 1 FROM counters WHERE name = ?) FROM schema_version",
                    (MARK,),
                ).fetchall()
                check_version(self.name, *(versions[0] if versions else (None, False)))
                yield lambda statement, values: connection.execute(
                    statement.replace("{clock}", CLOCK), values
                ).fetchall()

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise every database error as StateError."""
        try:
            yield
        except (sqlite3.Error, UnicodeError) as error:
            raise unusable(self.name, error, remedy(error, Path(self._path), self._home)) from error

    def _connected(self) -> sqlite3.Connection:
        file = check_sqlite_file(self._path)
        if self._file != file:
            self.close()
            self._file = file
        if self._connection is None:
            self._connection = connect(self._path)
        return self._connection


def sqlite_path(home: Path) -> str | None:
    """Return the path of the SQLite database, free of symlinks. None: BONOBOFS_DATABASE has another URL."""
    url = os.environ.get("BONOBOFS_DATABASE")
    if not url:
        return os.path.realpath(home / "bonobofs.db")
    match = _SQLITE_URL.fullmatch(url)
    return None if match is None else os.path.realpath(match[1])


def database_environment() -> dict[str, str]:
    """Return the environment variables that bonobofs and libpq read to find the database and to log in."""
    return {name: value for name, value in os.environ.items() if name in _OF_DATABASE or name.startswith("PG")}


def connect(path: str) -> sqlite3.Connection:
    """Open a database in WAL mode, without implicit transactions. sqlite3.Error."""
    # mode=rw does not create an absent file: an empty database would hold no leases.
    uri = f"file:{quote(path)}?mode=rw"
    connection = sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_SECONDS, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def check_sqlite_file(path: str) -> tuple[int, int]:
    """Return device and inode. StateError: absent, not a regular file, another user's, or writable by others."""
    try:
        status = os.stat(path)
    except FileNotFoundError as error:
        raise StateError(f"the database {path} does not exist; create it: bonobofs db upgrade") from error
    except OSError as error:
        raise StateError(f"the database {path} cannot be used: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise StateError(f"the database {path} is not a file; set BONOBOFS_DATABASE to sqlite:////PATH of one")
    if status.st_uid not in (os.geteuid(), 0) and os.geteuid() != 0:
        raise StateError(f"the database {path} belongs to another user; use one of your own")
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise StateError(f"others can write in the database {path}; chmod go-w {path}")
    return status.st_dev, status.st_ino


def check_version(database: str, revision: str | None, is_interrupted: bool) -> None:
    """Raise StateError unless `revision` is the one that this version reads, and no migration was interrupted."""
    if revision is None:
        raise StateError(f"the database {database} has no tables of bonobofs; create them: bonobofs db upgrade")
    if revision < REVISION:
        raise StateError(
            f"the database {database} is at {revision} and this version reads {REVISION}; run bonobofs db upgrade"
        )
    if revision > REVISION:
        raise StateError(
            f"the database {database} is at {revision}, from a newer bonobofs than this one, which reads {REVISION}; "
            "use the newer one"
        )
    if is_interrupted:
        raise StateError(f"a migration of {database} was interrupted; run bonobofs db upgrade")


def migration_lock(path: str, *, shared: bool) -> contextlib.AbstractContextManager[None]:
    """Lock the database: exclusive for a migration, shared for every other transaction. StateError."""
    return _locked(f"{path}.lock", shared=shared)


def waiting_turn(path: str) -> contextlib.AbstractContextManager[None]:
    """Queue the writers on a lock file. SQLite's own busy handler polls, so many writers would starve. StateError."""
    return _locked(f"{path}.turn", shared=False)


@contextlib.contextmanager
def _locked(path: str, *, shared: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(path, shared=shared))
        except OSError as error:
            raise StateError(f"the lock {path} cannot be opened: {error.strerror}; make it writable") from error
        yield


def unusable(database: str, error: Exception, remedy: str) -> BonobofsError:
    """Return the StateError for an error of the database's driver; a UsageError for an argument that is no text."""
    if isinstance(error, UnicodeEncodeError):
        return UsageError(f"{escape(error.object)} is not UTF-8, and the database has only UTF-8; correct it")
    return StateError(f"the database {database} cannot be used: {driver_text(error)}; {remedy}")


def remedy(error: Exception, path: Path, home: Path) -> str:
    """Return what to do after an error of SQLite. A backup helps only if the content of the database is damaged."""
    code = getattr(getattr(error, "orig", error), "sqlite_errorcode", sqlite3.SQLITE_ERROR) & 0xFF
    if code in _DAMAGED:
        backups = home / "backups"
        return f"backups are in {backups}" if backups.is_dir() else "it is damaged, and there is no backup"
    try:
        disk = os.statvfs(path.parent)
    except OSError as failure:
        return f"{path.parent}: {failure.strerror}"
    if disk.f_flag & os.ST_RDONLY:
        return f"the file system of {path.parent} is read-only; remount it writable"
    if code == sqlite3.SQLITE_FULL or disk.f_bavail * disk.f_bsize < _LITTLE_SPACE:
        return f"the disk of {path.parent} is full; free some space"
    return "another process holds it; try again" if code == sqlite3.SQLITE_BUSY else f"check the disk of {path.parent}"


def driver_text(error: Exception) -> str:
    """Return the first line of the driver's message, also of an error that SQLAlchemy raised."""
    return str(getattr(error, "orig", None) or error).strip().partition("\n")[0]


def escape(text: str) -> str:
    r"""Encode a text that may hold bytes outside UTF-8, such as a file name: \xNN for each, and \\ for a backslash."""
    return _BYTE.sub(lambda match: "\\\\" if match[0] == "\\" else f"\\x{ord(match[0]) - 0xDC00:02x}", text)


def unescape(text: str) -> str:
    """Decode a text of `escape`."""
    return _ESCAPE.sub(lambda match: chr(0xDC00 + int(match[1], 16)) if match[1] else "\\", text)
