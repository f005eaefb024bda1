"""Follow the leases for one session: send heartbeats, read the leases when they change, acknowledge what is applied.

snapshot = reader.read()          # every BEAT seconds
...                               # judge every change by snapshot.leases until snapshot.expires_at
reader.acknowledge(snapshot)      # once every change that was judged by an earlier snapshot has ended

SQLAlchemy is loaded for PostgreSQL only: it would take a third of the CPU time of a mount.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime, monotonic
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bonobofs.errors import BonobofsError, StateError
from bonobofs.state.sqlite_file import Execute, Queries, SqliteFile, escape, sqlite_path, unescape

if TYPE_CHECKING:
    from bonobofs.state.database import Database

BEAT: Final = 0.5
"""Seconds between two heartbeats of a session."""
LAPSE: Final = 2.0
"""Seconds after its last heartbeat at which a session counts as silent."""
_MARGIN: Final = 0.1
"""Seconds by which a snapshot expires here before other sessions stop waiting: the database counts milliseconds."""


class LeaseSnapshot(NamedTuple):
    """The leases at the time of one read."""

    generation: int
    expires_at: float
    """Seconds of CLOCK_BOOTTIME."""
    leases: list[dict[str, Any]] | None
    """Leases in this session's workspace, its own included; None: unchanged since the last acknowledged snapshot."""
    first_end: int | None
    """When the first of them ends, in milliseconds of the database's clock."""


class LeaseReader:
    """Heartbeats and reads of one session. For one thread."""

    def __init__(self, database: Queries, session: str, holder: str, source: str) -> None:
        """`session` is the UUID, `holder` the key under which the session holds leases."""
        self._database: Final = database
        self._session: Final = session
        self._holder: Final = holder
        self._source: Final = source
        self._acknowledged = LeaseSnapshot(0, 0.0, [], 0)

    def read(self) -> LeaseSnapshot:
        """Send a heartbeat and read the leases if they have changed. StateError."""
        # CLOCK_BOOTTIME and the database's clock run on while the machine sleeps.
        expires_at = clock_gettime(CLOCK_BOOTTIME) + LAPSE - _MARGIN
        self.heartbeat()
        last = self._acknowledged
        with self._database.queries() as execute:
            # The generation first: the leases may then be newer than it, never older.
            ((generation, now),) = execute("SELECT value, {clock} FROM counters WHERE name = 'leases'", {})
            if generation == last.generation and (last.first_end is None or now < last.first_end):
                return last._replace(expires_at=expires_at, leases=None)
            leases, first_end = leases_in_effect(execute, self._holder, self._source)
        return LeaseSnapshot(generation, expires_at, leases, first_end)

    def heartbeat(self) -> None:
        """Send a heartbeat: the session judges every change from now on by the acknowledged generation.

        It is committed when this returns. It does not extend the expiry of a snapshot.

        Raises StateError if the database has no such session, for instance after a backup was restored.
        """
        with self._database.queries(write=True) as execute:
            updated = execute(
                "UPDATE sessions SET heartbeat = {clock}, acknowledged = :generation "
                "WHERE id = :session AND ended IS NULL RETURNING id",
                {"session": self._session, "generation": self._acknowledged.generation},
            )
        if not updated:
            raise StateError(f"the database {self._database.name} has no session {self._session}; mount again")

    def acknowledge(self, snapshot: LeaseSnapshot) -> None:
        """Tell the other sessions that no change judged by an earlier snapshot is in flight."""
        is_newer = snapshot.generation > self._acknowledged.generation
        self._acknowledged = snapshot
        if is_newer:
            self.heartbeat()

    def detach(self) -> None:
        """Record that the session has ended and has no change in flight."""
        detach(self._database, self._session)


def leases_in_effect(execute: Execute, holder: str, source: str) -> tuple[list[dict[str, Any]], int | None]:
    """Return the leases for one session, oldest first, as `policy.lease_set` reads them, and when the first ends."""
    values = {"source": escape(source)}
    rows = execute(
        "SELECT id, holder, agent_name, agent, chain, shared, until FROM leases "
        "WHERE until > {clock} AND (workspace IS NULL OR workspace = :source) ORDER BY acquired, id",
        values,
    )
    patterns: dict[str, list[str]] = {row[0]: [] for row in rows}
    for lease, pattern in execute(
        "SELECT lease, pattern FROM lease_patterns JOIN leases ON id = lease "
        "WHERE workspace IS NULL OR workspace = :source ORDER BY pattern",
        values,
    ):
        if lease in patterns:
            patterns[lease].append(unescape(pattern))
    leases = [
        {
            "patterns": patterns[lease],
            "shared": bool(shared),
            "own": key == holder,
            "holder": agent_name,
            "holder_id": agent,
            "chain": chain,
            "until": datetime.fromtimestamp(until / 1000, UTC).isoformat(timespec="seconds"),
        }
        for lease, key, agent_name, agent, chain, shared, until in rows
    ]
    return leases, min((row[-1] for row in rows), default=None)


def detach(database: Queries, session: str) -> None:
    """Record that a session has ended and has no change in flight. StateError."""
    with database.queries(write=True) as execute:
        execute("UPDATE sessions SET ended = {clock} WHERE id = :session AND ended IS NULL", {"session": session})


Apply = Callable[[LeaseSnapshot, Callable[[], None]], bool]
"""Called with a snapshot and a function that sends a heartbeat; returns whether every change is judged by it now."""


class LeaseFollower:
    """Reads the leases every BEAT seconds in `run` until `ended` is set."""

    def __init__(
        self, home: Path, session: str, holder: str, source: str, apply: Apply, ended: threading.Event
    ) -> None:
        """`session` and `holder` as for `LeaseReader`. A missing database is an error: it is not created."""
        self._home: Final = home
        self._identity: Final = session, holder, source
        self._apply: Final = apply
        self._ended: Final = ended
        self._database: SqliteFile | Database | None = None
        self._reader: LeaseReader | None = None

    def read_first(self) -> None:
        """Apply a first snapshot before `run`. StateError."""
        try:
            self._follow_once()
        except BaseException:
            self._close()
            raise

    def run(self, report: Callable[[Exception], None]) -> None:
        """Follow the leases. `report` gets each error, such as of a database that does not answer."""
        next_read = 0.0 if self._reader is None else monotonic() + BEAT
        while not self._ended.wait(max(0.0, next_read - monotonic())):
            next_read = monotonic() + BEAT
            try:
                self._follow_once()
            except (BonobofsError, OSError) as error:
                # The enforcer refuses changes once the last snapshot expires.
                report(error)
                self._close()
                next_read = monotonic() + BEAT
        if self._reader is not None:
            with suppress(BonobofsError, OSError):  # otherwise the session lapses without heartbeats
                self._reader.detach()
        self._close()

    def _follow_once(self) -> None:
        if self._reader is None:
            self._database = _database(self._home)
            self._reader = LeaseReader(self._database, *self._identity)
        snapshot = self._reader.read()
        if self._apply(snapshot, self._reader.heartbeat):
            self._reader.acknowledge(snapshot)

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
        self._database = self._reader = None


def _database(home: Path) -> SqliteFile | Database:
    path = sqlite_path(home)
    if path is not None:
        return SqliteFile(home, path)
    from bonobofs.state.database import Database  # noqa: PLC0415 - loads SQLAlchemy

    return Database(home)
