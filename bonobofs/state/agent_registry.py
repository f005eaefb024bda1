"""The register of teams and agents. Each has a UUID and a label.

Every reference to an agent or a team is its UUID. The label is for people and can be reused: a removed agent keeps its
row, so that old records stay readable. A later agent with the same label has a new UUID and inherits nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from bonobofs.errors import StateError, UsageError
from bonobofs.state import heartbeats
from bonobofs.state.database import Database
from bonobofs.state.home import is_uuid
from bonobofs.state.schema import agent_roles, agents, clock, leases, moment, teams
from bonobofs.state.session_rows import check_label


class Team(NamedTuple):
    """One team. `removed` is None until it is removed."""

    id: str
    label: str
    created: datetime
    removed: datetime | None


class Agent(NamedTuple):
    """One agent. `role` is its default role. An agent without `roles` may use every role."""

    id: str
    label: str
    team: str | None
    team_id: str | None
    role: str | None
    roles: tuple[str, ...]
    created: datetime
    removed: datetime | None


def add(database: Database, label: str, *, team: str | None = None, roles: Iterable[str] = ()) -> Agent:
    """Register an agent that may mount with `roles`; the first is its default. Without roles it may use every role.

    UsageError: the label is in use or invalid, or the team does not exist.
    """
    check_label(label)
    wanted = tuple(dict.fromkeys(check_label(role, "a role") for role in roles))
    with database.change() as connection:
        if _agent(connection, label) is not None:
            raise UsageError(
                f"there is an agent {label} already; change it: bonobofs agent change {label} --role R, or use another "
                "name"
            )
        home = None if team is None else _living_team(connection, team)
        insert_agent(connection, label, home, wanted[0] if wanted else None, wanted)
        return _living_agent(connection, label)


def change(database: Database, agent: str, *, team: str | None = None, roles: Iterable[str] = ()) -> Agent:
    """Replace the team or the roles of an agent, given by label or UUID. None or no roles leaves them unchanged.

    Live sessions keep their role. UsageError: the agent or the team does not exist, or a role's label is invalid.
    """
    wanted = tuple(dict.fromkeys(check_label(role, "a role") for role in roles))
    with database.change() as connection:
        found = _living_agent(connection, agent)
        where = agents.c.id == found.id
        if team is not None:
            connection.execute(update(agents).where(where).values(team=_living_team(connection, team)))
        if wanted:
            connection.execute(update(agents).where(where).values(role=wanted[0]))
            connection.execute(delete(agent_roles).where(agent_roles.c.agent == found.id))
            for each in wanted:
                connection.execute(insert(agent_roles).values(agent=found.id, role=each))
        return _living_agent(connection, found.id)


def remove(database: Database, agent: str) -> Agent:
    """Remove an agent, given by label or UUID, and its own leases; leases of its chains stay. Its label becomes free.

    StateError: it has a live session. UsageError: it does not exist.
    """
    with database.change() as connection:
        found = _living_agent(connection, agent)
        if any(one.agent_id == found.id for one in heartbeats.living(connection)):
            raise StateError(f"{found.label} has a live session; end it first, see bonobofs status")
        connection.execute(update(agents).where(agents.c.id == found.id).values(removed=clock()))
        if connection.execute(delete(leases).where(leases.c.agent == found.id, leases.c.chain.is_(None))).rowcount:
            heartbeats.next_generation(connection)
        return found


def list_agents(database: Database, *, removed: bool = False) -> list[Agent]:
    """Return the agents, sorted by label; with `removed`, include the removed ones."""
    with database.read() as connection:
        return _agents(connection, *(() if removed else (agents.c.removed.is_(None),)))


def find(database: Database, agent: str) -> Agent | None:
    """Return the agent of that label or UUID; None if there is none or it was removed."""
    with database.read() as connection:
        return _agent(connection, agent)


def identity_of(database: Database, label: str) -> str | None:
    """Return the UUID of the agent of that label; None if there is none or it was removed."""
    found = find(database, label)
    return None if found is None else found.id


def add_team(database: Database, label: str) -> Team:
    """Register a team. UsageError: the label is in use or invalid."""
    check_label(label, "a team")
    with database.change() as connection:
        if _teams(connection, teams.c.name == label, teams.c.removed.is_(None)):
            raise UsageError(f"there is a team {label} already; remove it first, or use another name")
        connection.execute(insert(teams).values(id=str(uuid.uuid4()), name=label, created=clock()))
        return _teams(connection, teams.c.id == _living_team(connection, label))[0]


def remove_team(database: Database, team: str) -> Team:
    """Remove a team, given by label or UUID. StateError: it has agents. UsageError: it does not exist."""
    with database.change() as connection:
        identity = _living_team(connection, team)
        members = _agents(connection, agents.c.team == identity, agents.c.removed.is_(None))
        if members:
            raise StateError(f"to {team} belong {', '.join(one.label for one in members)}; remove them first")
        connection.execute(update(teams).where(teams.c.id == identity).values(removed=clock()))
        return _teams(connection, teams.c.id == identity)[0]


def list_teams(database: Database, *, removed: bool = False) -> list[Team]:
    """Return the teams, sorted by label; with `removed`, include the removed ones."""
    with database.read() as connection:
        return _teams(connection, *(() if removed else (teams.c.removed.is_(None),)))


def insert_agent(connection: Connection, label: str, team: str | None, role: str | None, roles: tuple[str, ...]) -> str:
    identity = str(uuid.uuid4())
    connection.execute(insert(agents).values(id=identity, name=label, team=team, role=role, created=clock()))
    for each in roles:
        connection.execute(insert(agent_roles).values(agent=identity, role=each))
    return identity


def _agent(connection: Connection, agent: str) -> Agent | None:
    by = agents.c.id == agent.lower() if is_uuid(agent) else agents.c.name == agent
    return next(iter(_agents(connection, by, agents.c.removed.is_(None))), None)


def _living_agent(connection: Connection, agent: str) -> Agent:
    found = _agent(connection, agent)
    if found is None:
        raise UsageError(f"there is no agent {agent}; bonobofs agent list shows the agents")
    return found


def _living_team(connection: Connection, team: str) -> str:
    by = teams.c.id == team.lower() if is_uuid(team) else teams.c.name == team
    found = _teams(connection, by, teams.c.removed.is_(None))
    if not found:
        raise UsageError(f"there is no team {team}; bonobofs team list shows the teams")
    return found[0].id


def _agents(connection: Connection, *where: ColumnElement[bool]) -> list[Agent]:
    wanted = (
        select(
            agents.c.id, agents.c.name, teams.c.name, agents.c.team, agents.c.role, agents.c.created, agents.c.removed
        )
        .join_from(agents, teams, isouter=True)
        .where(*where)
        .order_by(agents.c.name, agents.c.created)
    )
    roles: dict[str, list[str]] = {}
    for agent, role in connection.execute(select(agent_roles.c.agent, agent_roles.c.role).order_by(agent_roles.c.role)):
        roles.setdefault(agent, []).append(role)
    return [
        Agent(
            identity,
            label,
            team,
            team_id,
            role,
            tuple(roles.get(identity, ())),
            moment(created),
            removed and moment(removed),
        )
        for identity, label, team, team_id, role, created, removed in connection.execute(wanted)
    ]


def _teams(connection: Connection, *where: ColumnElement[bool]) -> list[Team]:
    wanted = select(teams.c.id, teams.c.name, teams.c.created, teams.c.removed).where(*where).order_by(teams.c.name)
    return [
        Team(identity, label, moment(created), removed and moment(removed))
        for identity, label, created, removed in connection.execute(wanted)
    ]
