"""The tables with their indexes over a part of the rows, which no query names and only a migration makes.

They are apart because such an index has SQLAlchemy load what it knows of PostgreSQL, and every mount and every command
would wait for that.
"""

from __future__ import annotations

from sqlalchemy import Index

from bonobofs.state.tables import agents, metadata, sessions, teams

__all__ = ["metadata"]

Index(
    "teams_living",
    teams.c.name,
    unique=True,
    sqlite_where=teams.c.removed.is_(None),
    postgresql_where=teams.c.removed.is_(None),
)
Index(
    "agents_living",
    agents.c.name,
    unique=True,
    sqlite_where=agents.c.removed.is_(None),
    postgresql_where=agents.c.removed.is_(None),
)
Index(
    "sessions_open",
    sessions.c.acknowledged,
    sqlite_where=sessions.c.ended.is_(None),
    postgresql_where=sessions.c.ended.is_(None),
)
