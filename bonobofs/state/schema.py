"""The tables and their columns. The migrations create them with `with_partial_indexes`; a test compares both.

Identities are UUIDs as text. Timestamps are milliseconds since 1970, UTC, from the database's clock (`clock`), so that
hosts with different clocks agree on expiry. A label is for people. Lookups by label ignore removed rows, and no other
row refers to a label.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any, Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Dialect,
    ForeignKey,
    Index,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
)
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

_BYTE = re.compile("[\udc80-\udcff\\\\]")
_ESCAPE = re.compile(r"\\(?:x([0-9a-f]{2})|(\\))")


class ExactText(TypeDecorator[str]):
    r"""Text that may hold bytes outside UTF-8, such as file names: stored as \xNN, and a backslash as \\."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else escape(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else _unescape(value)


def escape(text: str) -> str:
    return _BYTE.sub(lambda found: "\\\\" if found[0] == "\\" else f"\\x{ord(found[0]) - 0xDC00:02x}", text)


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(0xDC00 + int(found[1], 16)) if found[1] else "\\", text)


def moment(milliseconds: int) -> datetime:
    """Convert milliseconds since 1970 to a UTC datetime. The inverse is `milliseconds_of`."""
    return datetime.fromtimestamp(milliseconds / 1000, UTC)


def milliseconds_of(when: datetime) -> int:
    return round(when.timestamp() * 1000)


class clock(FunctionElement[int]):  # noqa: N801 - it is a function of SQL
    """The database's current time in milliseconds since 1970, UTC. On PostgreSQL it advances within a transaction."""

    type = BigInteger()
    inherit_cache = True


@compiles(clock, "sqlite")
def _clock_of_sqlite(element: clock, compiler: Any, **_: Any) -> str:
    return "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"


@compiles(clock, "postgresql")
def _clock_of_postgresql(element: clock, compiler: Any, **_: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS bigint)"


REVISION: Final = "0001"
"""The schema revision that this version reads and writes: the newest migration."""
VERSION_TABLE: Final = "schema_version"

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)

teams = Table(
    "teams",
    metadata,
    Column("id", String(36), primary_key=True, comment="UUID: what everything else refers to."),
    Column("name", Text, nullable=False, comment="Label for people; unique among the teams that are not removed."),
    Column("created", BigInteger, nullable=False, comment="When it was added."),
    Column(
        "removed", BigInteger, comment="When it was removed; null while it lives. The row stays: records name its UUID."
    ),
)

agents = Table(
    "agents",
    metadata,
    Column("id", String(36), primary_key=True, comment="UUID: the identity in every record."),
    Column("name", Text, nullable=False, comment="Label for people; unique among the agents that are not removed."),
    Column("team", String(36), ForeignKey("teams.id"), comment="The team it belongs to; null: none."),
    Column("role", Text, comment="The role it mounts with when none is named; null: the policy's default_role."),
    Column("created", BigInteger, nullable=False, comment="When it was added, or first mounted."),
    Column(
        "removed",
        BigInteger,
        comment="When it was removed; null while it lives. A later agent of that name is another.",
    ),
)

agent_roles = Table(
    "agent_roles",
    metadata,
    Column("agent", String(36), ForeignKey("agents.id"), primary_key=True, comment="Whose."),
    Column(
        "role", Text, primary_key=True, comment="A role it may mount with. An agent without any row may use every role."
    ),
)

sessions = Table(
    "sessions",
    metadata,
    Column("id", String(36), primary_key=True, comment="UUID: also the name of its trail in the home that made it."),
    Column("agent", String(36), ForeignKey("agents.id"), nullable=False, comment="Who works in it."),
    Column("role", Text, nullable=False, comment="In which role."),
    Column("chain", Text, comment="The chain of work it belongs to, which then holds its leases; null: none."),
    Column(
        "home",
        String(36),
        nullable=False,
        comment="UUID of the state directory that made it; several may share this database.",
    ),
    Column("host", Text, nullable=False, comment="Name of the machine, for people."),
    Column("source", ExactText, nullable=False, comment="The directory that is guarded, as that machine names it."),
    Column("mountpoint", ExactText, comment="Where it is mounted; null: a session of a Python caller."),
    Column("started", BigInteger, nullable=False, comment="When it was made."),
    Column("ended", BigInteger, comment="When it ended; null while it lives, and after a crash."),
    Column("heartbeat", BigInteger, nullable=False, comment="When it last said that it follows the leases."),
    Column(
        "acknowledged",
        BigInteger,
        nullable=False,
        comment="The generation of leases that binds every change it makes, none admitted before being under way.",
    ),
)

leases = Table(
    "leases",
    metadata,
    Column("id", String(36), primary_key=True, comment="UUID; another one when the holder acquires again."),
    Column(
        "holder",
        Text,
        nullable=False,
        comment="chain:NAME, agent:UUID, or mail:NAME for one whom only Agent Mail knows.",
    ),
    Column("agent", String(36), ForeignKey("agents.id"), comment="Who acquired it; null: known to Agent Mail only."),
    Column("agent_name", Text, nullable=False, comment="Label of who acquired it, as it was then, for people."),
    Column("chain", Text, comment="The chain that holds it; null: the agent does."),
    Column(
        "origin",
        Text,
        nullable=False,
        comment="Empty for what was acquired here; else where it is mirrored from, with its number there.",
    ),
    Column(
        "shared",
        Boolean,
        nullable=False,
        comment="False: only the holder may change what matches. True: other shared holders may too.",
    ),
    Column("workspace", ExactText, comment="The one source that it covers; null: every source."),
    Column("reason", ExactText, nullable=False, comment="Why, in the holder's words; may be empty."),
    Column("acquired", BigInteger, nullable=False, comment="When it was acquired."),
    Column(
        "until",
        BigInteger,
        nullable=False,
        comment="From this moment on it counts no more, whether or not the row is still there.",
    ),
    UniqueConstraint("holder", "origin"),
)

lease_patterns = Table(
    "lease_patterns",
    metadata,
    Column(
        "lease", String(36), ForeignKey("leases.id", ondelete="CASCADE"), primary_key=True, comment="Of which lease."
    ),
    Column(
        "pattern",
        ExactText,
        primary_key=True,
        comment="A path pattern as in policy.toml; the lease covers what any of its patterns matches.",
    ),
)

counters = Table(
    "counters",
    metadata,
    Column(
        "name",
        String(32),
        primary_key=True,
        comment="`leases`: the generation of leases, raised by every change of them.",
    ),
    Column("value", BigInteger, nullable=False, comment="Grows, and never goes back."),
)

cursors = Table(
    "cursors",
    metadata,
    Column("courier", Text, primary_key=True, comment="Which courier: names its server, project and sender."),
    Column("session", String(36), primary_key=True, comment="UUID of the session whose trail it carries."),
    Column("place", BigInteger, nullable=False, comment="Bytes of the trail that are carried."),
    Column("seq", BigInteger, nullable=False, comment="Number of the last entry that is carried; 0: none."),
    Column("hash", String(64), nullable=False, comment="That entry's hash, in hex; empty: none."),
    Column(
        "noted",
        Text,
        nullable=False,
        comment="The receiving server's own moment of the last letter, in its spelling; empty: none.",
    ),
)


def with_partial_indexes() -> MetaData:
    """Add the partial indexes to `metadata` and return it; idempotent. Only a migration needs them.

    They are not declared with the tables: SQLAlchemy would load its PostgreSQL dialect for them, which would delay
    every mount and every command.
    """
    for name, column, null, unique in (
        ("teams_living", teams.c.name, teams.c.removed, True),
        ("agents_living", agents.c.name, agents.c.removed, True),
        ("sessions_open", sessions.c.acknowledged, sessions.c.ended, False),
    ):
        if all(index.name != name for index in column.table.indexes):
            rows = null.is_(None)
            Index(name, column, unique=unique, sqlite_where=rows, postgresql_where=rows)
    return metadata
