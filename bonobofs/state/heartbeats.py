"""Heartbeats: which sessions are live, and which generation of leases each has acknowledged.

A session sends a heartbeat every BEAT seconds (`lease_follower`). If it sends none for LAPSE seconds, its lease
snapshot expires and it refuses every change of the source. A lease takes effect when every session with a later
heartbeat has acknowledged it. The session measures LAPSE by its own clock, the others measure it by the database's
clock.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from sqlalchemy import Connection, select, update

from bonobofs.state.database import Database
from bonobofs.state.lease_follower import LAPSE
from bonobofs.state.schema import agents, clock, counters, sessions

_LAPSE_MS: Final = round(1000 * LAPSE)
_IS_HEARD: Final = sessions.c.heartbeat > clock() - _LAPSE_MS


class LiveSession(NamedTuple):
    """A live session as other sessions see it."""

    id: str
    agent: str
    """Label."""
    agent_id: str
    host: str
    home: str
    source: str
    acknowledged: int


def generation(connection: Connection) -> int:
    """Return the generation of leases. Every change of leases raises it."""
    return int(connection.execute(select(counters.c.value).where(counters.c.name == "leases")).scalar_one())


def next_generation(connection: Connection) -> int:
    """Raise the generation, so that every session reads the leases again."""
    leases_counter = counters.c.name == "leases"
    connection.execute(update(counters).where(leases_counter).values(value=counters.c.value + 1))
    return generation(connection)


def chains(connection: Connection, agent: str, source: str) -> list[str | None]:
    """Return the chains of an agent's live sessions in a source; None for a session without a chain."""
    wanted = select(sessions.c.chain).where(
        sessions.c.agent == agent, sessions.c.source == source, sessions.c.ended.is_(None), _IS_HEARD
    )
    return list(connection.scalars(wanted.distinct()))


def list_sessions(database: Database) -> list[tuple[str, str, str]]:
    """Return UUID, role and source of every session, ended ones too."""
    with database.read() as connection:
        rows = connection.execute(select(sessions.c.id, sessions.c.role, sessions.c.source))
        return [(row.id, row.role, row.source) for row in rows]


def agent_lives(connection: Connection, agent: str) -> bool:
    """Return whether an agent has this UUID and was not removed."""
    return connection.scalar(select(agents.c.id).where(agents.c.id == agent, agents.c.removed.is_(None))) is not None


def living(connection: Connection, *, behind: int | None = None) -> list[LiveSession]:
    """Return the live sessions; with `behind`, only those that have acknowledged an older generation."""
    wanted = (
        select(
            sessions.c.id,
            agents.c.name,
            sessions.c.agent,
            sessions.c.host,
            sessions.c.home,
            sessions.c.source,
            sessions.c.acknowledged,
        )
        .join_from(sessions, agents)
        .where(sessions.c.ended.is_(None), _IS_HEARD)
        .order_by(sessions.c.started)
    )
    if behind is not None:
        wanted = wanted.where(sessions.c.acknowledged < behind)
    return [LiveSession(*row) for row in connection.execute(wanted)]
