"""Which sessions are live, in all state directories that share the database, and which leases bind each of them.

A session that follows the leases says so every BEAT seconds. One that has been silent for LAPSE seconds, by the
database's clock, is taken to refuse every change by itself: it may go on only until LAPSE seconds, by its own clock,
after the moment at which it began to say so.

Nobody relies on a session that is silent; on one that is not, a lease takes effect when it has acknowledged it.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

from sqlalchemy import Connection, select, update

from bonobofs.errors import StateError
from bonobofs.state.database import Database, home_id
from bonobofs.state.schema import agents, clock, counters, sessions
from bonobofs.state.sessions import Session

BEAT: Final = 0.5
LAPSE: Final = 2.0
_LAPSE_MS: Final = round(1000 * LAPSE)
_IS_HEARD: Final = sessions.c.heartbeat > clock() - _LAPSE_MS


class LiveSession(NamedTuple):
    """A session as the others see it."""

    id: str
    agent: str
    """Label."""
    agent_id: str
    host: str
    home: str
    source: str
    acknowledged: int


def generation(connection: Connection) -> int:
    """The generation of leases: it grows with every change of them."""
    return int(connection.execute(select(counters.c.value).where(counters.c.name == "leases")).scalar_one())


def next_generation(connection: Connection) -> int:
    """Raise the generation: whoever follows the leases then reads them anew."""
    leases_counter = counters.c.name == "leases"
    connection.execute(update(counters).where(leases_counter).values(value=counters.c.value + 1))
    return generation(connection)


def insert_session(database: Database, session: Session) -> int:
    """Enter a session that begins, and give the generation of leases that it begins with.

    It must read the leases after this, and follow them from then on. StateError where its agent was removed meanwhile.
    """
    with database.change() as connection:
        known = generation(connection)
        if not agent_lives(connection, session.agent_id):
            raise StateError(f"{session.agent} was removed a moment ago; run this again")
        connection.execute(
            sessions.insert().values(
                id=session.session,
                agent=session.agent_id,
                role=session.role,
                chain=session.chain,
                home=home_id(database.home),
                host=os.uname().nodename,
                source=session.source,
                mountpoint=session.mountpoint,
                started=clock(),
                ended=None,
                heartbeat=clock(),
                acknowledged=known,
            )
        )
        return known


def write_heartbeat(database: Database, session: str, acknowledged: int) -> None:
    """Say that the session follows the leases, and that what is admitted from now on is so under this generation.

    It is committed when this returns: only what is read of the leases afterwards may extend the session's leave.
    StateError where nobody could hear it: the database holds no such session, as after a backup was put back.
    """
    with database.note() as connection:
        said = connection.execute(
            update(sessions)
            .where(sessions.c.id == session, sessions.c.ended.is_(None))
            .values(heartbeat=clock(), acknowledged=acknowledged)
        )
        if said.rowcount != 1:
            raise StateError(f"the database {database.name} does not know the session {session} any more; mount again")


def chains(connection: Connection, agent: str, source: str) -> list[str | None]:
    """For which chains the living sessions of an agent in a source work; None is among them for one without any."""
    wanted = select(sessions.c.chain).where(
        sessions.c.agent == agent, sessions.c.source == source, sessions.c.ended.is_(None), _IS_HEARD
    )
    return list(connection.scalars(wanted.distinct()))


def list_sessions(database: Database) -> list[tuple[str, str, str]]:
    """UUID, role and source of every session that ever was."""
    with database.read() as connection:
        rows = connection.execute(select(sessions.c.id, sessions.c.role, sessions.c.source))
        return [(row.id, row.role, row.source) for row in rows]


def detach(database: Database, session: str) -> None:
    """Enter that the session has ended: nothing of it is under way any more."""
    with database.note() as connection:
        connection.execute(
            update(sessions).where(sessions.c.id == session, sessions.c.ended.is_(None)).values(ended=clock())
        )


def agent_lives(connection: Connection, agent: str) -> bool:
    """Whether there is an agent of that UUID, and it was not removed."""
    return connection.scalar(select(agents.c.id).where(agents.c.id == agent, agents.c.removed.is_(None))) is not None


def living(connection: Connection, *, behind: int | None = None) -> list[LiveSession]:
    """The sessions that have not ended and are not silent; with `behind`, only those that acknowledge less."""
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
