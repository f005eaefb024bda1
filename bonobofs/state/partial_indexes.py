"""The tables with their indexes over a part of the rows, which no query names and only a migration makes.

They are apart because such an index has SQLAlchemy load what it knows of PostgreSQL, and every mount and every command
would wait for that.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Column, Index

from bonobofs.state.schema import agents, metadata, sessions, teams

__all__ = ["metadata"]


def _where_null(name: str, column: Column[Any], null: Column[Any], *, unique: bool) -> None:
    """Make an index of a column over the rows in which another is NULL, in either database's words."""
    rows = null.is_(None)
    Index(name, column, unique=unique, sqlite_where=rows, postgresql_where=rows)


_where_null("teams_living", teams.c.name, teams.c.removed, unique=True)
_where_null("agents_living", agents.c.name, agents.c.removed, unique=True)
_where_null("sessions_open", sessions.c.acknowledged, sessions.c.ended, unique=False)
