"""The tables and their columns. The migrations create the same tables; a test compares both.

Identities are UUIDs as text. Timestamps are milliseconds since 1970, UTC, from the database's clock (`clock`), so that
hosts with different clocks agree on expiry. A label is for people. Lookups by label ignore removed rows, and no other
row refers to a label.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Dialect,
    ForeignKey,
    Index,
    MetaData,
    PrimaryKeyConstraint,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from bonobofs.state.sqlite_file import CLOCK, REVISION, VERSION_TABLE, escape, unescape


class ExactText(TypeDecorator[str]):
    r"""Text that may hold bytes outside UTF-8, such as file names: stored as \xNN, and a backslash as \\."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else escape(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else unescape(value)


def moment(milliseconds: int) -> datetime:
    """Convert milliseconds since 1970 to a UTC datetime. The inverse is `milliseconds_of`."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def milliseconds_of(when: datetime) -> int:
    return round(when.timestamp() * 1000)


POSTGRESQL_CLOCK: Final = "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)"


class clock(FunctionElement[int]):  # noqa: N801 - it is a function of SQL
    """The database's current time in milliseconds since 1970, UTC. On PostgreSQL it advances within a transaction."""

    type = BigInteger()
    inherit_cache = True


@compiles(clock, "sqlite")
def _clock_of_sqlite(element: clock, compiler: Any, **_: Any) -> str:
    return CLOCK


@compiles(clock, "postgresql")
def _clock_of_postgresql(element: clock, compiler: Any, **_: Any) -> str:
    return POSTGRESQL_CLOCK


metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

_UUID: Final = String(36)

teams = Table(
    "teams",
    metadata,
    Column("id", _UUID, primary_key=True, comment="UUID; all references use it."),
    Column("name", Text, nullable=False, comment="Label; unique among the teams that are not removed."),
    Column("created", BigInteger, nullable=False, comment="Time of registration."),
    Column("removed", BigInteger, comment="Time of removal, or null. The row stays, because trails have its UUID."),
)

agents = Table(
    "agents",
    metadata,
    Column("id", _UUID, primary_key=True, comment="UUID; the identity in every trail."),
    Column("name", Text, nullable=False, comment="Label; unique among the agents that are not removed."),
    Column("team", _UUID, ForeignKey("teams.id"), comment="Its team, or null."),
    Column("role", Text, comment="Default role of its sessions; null: the policy's default_role."),
    Column("created", BigInteger, nullable=False, comment="Time of registration or of the first mount."),
    Column("removed", BigInteger, comment="Time of removal, or null. A later agent may have the same label."),
)

agent_roles = Table(
    "agent_roles",
    metadata,
    Column("agent", _UUID, ForeignKey("agents.id"), primary_key=True, comment="The agent."),
    Column("role", Text, primary_key=True, comment="A role that it may use. An agent without rows may use all roles."),
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", _UUID, primary_key=True, comment="UUID; also the name of its trail in its state directory."),
    Column("agent", _UUID, ForeignKey("agents.id"), nullable=False, comment="The agent of the session."),
    Column("role", Text, nullable=False, comment="The role of the session."),
    Column("chain", Text, comment="The chain that holds its leases; null: the agent holds them."),
    Column("home", _UUID, nullable=False, comment="UUID of its state directory. Several may share this database."),
    Column("host", Text, nullable=False, comment="Host name, for messages."),
    Column("source", ExactText, nullable=False, comment="Path of the source on that host."),
    Column("mountpoint", ExactText, comment="Path of the mount; null: a session of the Python API."),
    Column("started", BigInteger, nullable=False, comment="Time of the start."),
    Column("ended", BigInteger, comment="Time of the end; null while live and after a crash."),
    Column("heartbeat", BigInteger, nullable=False, comment="Time of the last heartbeat."),
    Column("acknowledged", BigInteger, nullable=False, comment="Generation of leases that all its changes obey."),
)

leases = Table(
    "leases",
    metadata,
    Column("id", _UUID, primary_key=True, comment="UUID; a new one when the holder acquires again."),
    Column("holder", Text, nullable=False, comment="chain:NAME, agent:UUID, or mail:NAME if only Agent Mail has it."),
    Column("agent", _UUID, ForeignKey("agents.id"), comment="The agent that acquired it; null: only in Agent Mail."),
    Column("agent_name", Text, nullable=False, comment="Label of that agent when it acquired the lease."),
    Column("chain", Text, comment="The chain that holds it; null: the agent holds it."),
    Column("origin", Text, nullable=False, comment="Source and number of a mirrored lease; empty: acquired here."),
    Column("shared", Boolean, nullable=False, comment="False: only the holder may change its paths."),
    Column("workspace", ExactText, comment="The source that it covers; null: every source."),
    Column("reason", ExactText, nullable=False, comment="Reason in the holder's words; may be empty."),
    Column("acquired", BigInteger, nullable=False, comment="Time of the acquisition."),
    Column("until", BigInteger, nullable=False, comment="Expiry. An expired row has no effect."),
    UniqueConstraint("holder", "origin"),
)

lease_patterns = Table(
    "lease_patterns",
    metadata,
    Column("lease", _UUID, ForeignKey("leases.id", ondelete="CASCADE"), primary_key=True, comment="The lease."),
    Column("pattern", ExactText, primary_key=True, comment="A path pattern as in policy.toml."),
)

counters = Table(
    "counters",
    metadata,
    Column("name", String(32), primary_key=True, comment="`leases`: generation of leases, raised by each change."),
    Column("value", BigInteger, nullable=False, comment="It never decreases."),
)

cursors = Table(
    "cursors",
    metadata,
    Column("courier", Text, primary_key=True, comment="Server, project and sender of the courier."),
    Column("session", _UUID, primary_key=True, comment="UUID of the session of the trail."),
    Column("place", BigInteger, nullable=False, comment="Number of bytes of the trail that were sent."),
    Column("seq", BigInteger, nullable=False, comment="Number of the last entry that was sent; 0: none."),
    Column("hash", String(64), nullable=False, comment="Hash of that entry in hex; empty: none."),
    Column("noted", Text, nullable=False, comment="The mail server's time of the last letter; empty: none."),
)


_PARTIAL_INDEXES: Final = (
    ("teams_living", teams.c.name, teams.c.removed, True),
    ("agents_living", agents.c.name, agents.c.removed, True),
    ("sessions_open", sessions.c.acknowledged, sessions.c.ended, False),
)
"""Name, indexed column, the column that is null in the indexed rows, and whether the index is unique."""


def with_partial_indexes() -> MetaData:
    """Add the partial indexes to `metadata` and return it; idempotent. Only a migration needs them.

    They are not declared with the tables: SQLAlchemy would load its PostgreSQL dialect for them, which would delay
    every mount and every command.
    """
    for name, column, null, unique in _PARTIAL_INDEXES:
        if all(index.name != name for index in column.table.indexes):
            rows = null.is_(None)
            Index(name, column, unique=unique, sqlite_where=rows, postgresql_where=rows)
    return metadata


def create_tables(connection: Connection) -> None:
    """Create the tables of the newest revision, as the migrations do."""
    metadata.create_all(connection)
    for name, column, null, unique in _PARTIAL_INDEXES:
        kind = "UNIQUE INDEX" if unique else "INDEX"
        where = f"{column.table.name} ({column.name}) WHERE {null.name} IS NULL"
        connection.exec_driver_sql(f"CREATE {kind} IF NOT EXISTS {name} ON {where}")
    key = PrimaryKeyConstraint("version_num", name=f"{VERSION_TABLE}_pkc")
    version = Table(VERSION_TABLE, MetaData(), Column("version_num", String(32)), key)
    version.create(connection)
    connection.execute(version.insert().values(version_num=REVISION))
    connection.execute(counters.insert().values(name="leases", value=1))
