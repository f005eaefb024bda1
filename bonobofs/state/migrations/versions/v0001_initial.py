"""Teams, agents, sessions, leases, and the cursors of couriers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    _people()
    _sessions()
    _leases()
    op.create_table(
        "cursors",
        sa.Column("courier", sa.Text),
        sa.Column("session", sa.String(36)),
        sa.Column("place", sa.BigInteger, nullable=False),
        sa.Column("seq", sa.BigInteger, nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("noted", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("courier", "session", name="pk_cursors"),
    )


def _people() -> None:
    living = sa.text("removed IS NULL")
    op.create_table(
        "teams",
        sa.Column("id", sa.String(36)),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("created", sa.BigInteger, nullable=False),
        sa.Column("removed", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_teams"),
    )
    op.create_index("teams_living", "teams", ["name"], unique=True, sqlite_where=living, postgresql_where=living)
    op.create_table(
        "agents",
        sa.Column("id", sa.String(36)),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("team", sa.String(36)),
        sa.Column("role", sa.Text),
        sa.Column("created", sa.BigInteger, nullable=False),
        sa.Column("removed", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", name="pk_agents"),
        sa.ForeignKeyConstraint(["team"], ["teams.id"], name="fk_agents_team"),
    )
    op.create_index("agents_living", "agents", ["name"], unique=True, sqlite_where=living, postgresql_where=living)
    op.create_table(
        "agent_roles",
        sa.Column("agent", sa.String(36)),
        sa.Column("role", sa.Text),
        sa.PrimaryKeyConstraint("agent", "role", name="pk_agent_roles"),
        sa.ForeignKeyConstraint(["agent"], ["agents.id"], name="fk_agent_roles_agent"),
    )


def _sessions() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(36)),
        sa.Column("agent", sa.String(36), nullable=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("chain", sa.Text),
        sa.Column("home", sa.String(36), nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("mountpoint", sa.Text),
        sa.Column("started", sa.BigInteger, nullable=False),
        sa.Column("ended", sa.BigInteger),
        sa.Column("heartbeat", sa.BigInteger, nullable=False),
        sa.Column("acknowledged", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_sessions"),
        sa.ForeignKeyConstraint(["agent"], ["agents.id"], name="fk_sessions_agent"),
    )
    still_open = sa.text("ended IS NULL")
    op.create_index("sessions_open", "sessions", ["acknowledged"], sqlite_where=still_open, postgresql_where=still_open)


def _leases() -> None:
    op.create_table(
        "leases",
        sa.Column("id", sa.String(36)),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("agent", sa.String(36)),
        sa.Column("agent_name", sa.Text, nullable=False),
        sa.Column("chain", sa.Text),
        sa.Column("origin", sa.Text, nullable=False),
        sa.Column("shared", sa.Boolean, nullable=False),
        sa.Column("workspace", sa.Text),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("acquired", sa.BigInteger, nullable=False),
        sa.Column("until", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_leases"),
        sa.ForeignKeyConstraint(["agent"], ["agents.id"], name="fk_leases_agent"),
        sa.UniqueConstraint("holder", "origin", name="uq_leases_holder"),
    )
    op.create_table(
        "lease_patterns",
        sa.Column("lease", sa.String(36)),
        sa.Column("pattern", sa.Text),
        sa.PrimaryKeyConstraint("lease", "pattern", name="pk_lease_patterns"),
        sa.ForeignKeyConstraint(["lease"], ["leases.id"], name="fk_lease_patterns_lease", ondelete="CASCADE"),
    )
    counters = op.create_table(
        "counters",
        sa.Column("name", sa.String(32)),
        sa.Column("value", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_counters"),
    )
    op.bulk_insert(counters, [{"name": "leases", "value": 1}])
