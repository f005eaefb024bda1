"""Register the agent and the session of a mount in the database, with SQL text: it needs no SQLAlchemy on SQLite."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.errors import ForbiddenError, StateError, UsageError
from bonobofs.state.home import home_id, is_uuid, new_uuid
from bonobofs.state.sessions import Session
from bonobofs.state.sqlite_file import Execute, Queries, SqliteFile, escape, sqlite_path

_LONGEST_LABEL: Final = 64
_AGENT: Final = "an agent"
OPERATOR: Final = "operator"
"""Label of the agent in whose name the operator's own changes are recorded."""
DAEMON: Final = "daemon"
"""The actor of the alert about a direct edit of a protected directory (`session.protected_run`)."""


class Holder(NamedTuple):
    """Holder of a lease: the chain if there is one, else the agent. The agent acquired it in both cases."""

    agent: str
    """Label."""
    agent_id: str | None
    """None: known to Agent Mail only."""
    chain: str | None = None

    @property
    def key(self) -> str:
        """Unique key of the holder."""
        if self.chain is not None:
            return f"chain:{self.chain}"
        return f"agent:{self.agent_id}" if self.agent_id is not None else f"mail:{self.agent}"

    def __str__(self) -> str:
        return f"chain {self.chain} ({self.agent})" if self.chain is not None else self.agent


class MountingAgent(NamedTuple):
    """An agent as a mount uses it. `role` is its default role, or None."""

    label: str
    id: str
    role: str | None
    team: str | None
    """Label of its team."""
    roles: tuple[str, ...] = ()
    """The roles that it may use; empty: every role."""
    new: bool = False
    """True if this call registered it."""


@contextlib.contextmanager
def open_queries(home: Path) -> Iterator[Queries]:
    """Open the database of a state directory; create it if absent. StateError."""
    path = sqlite_path(home)
    if path is not None and os.path.exists(path):
        file = SqliteFile(home, path)
        if file.has_tables():
            with contextlib.closing(file):
                yield file
            return
        file.close()
    from bonobofs.state.database import Database  # noqa: PLC0415 - loads SQLAlchemy

    with Database.open(home) as database:
        yield database


def check_label(label: str, kind: str = _AGENT) -> str:
    """Return the label if it is safe in log lines, terminals and file names and is not a UUID; else UsageError.

    An agent cannot have the names by which the record shows the operator and the daemon.
    """
    if not label or len(label) > _LONGEST_LABEL or not label.isprintable() or "/" in label or label != label.strip():
        raise UsageError(
            f"{label!r} cannot name {kind}; use 1 to {_LONGEST_LABEL} printable characters without a slash"
        )
    if is_uuid(label):
        raise UsageError(f"{label!r} cannot name {kind}, as it has the form of an identity; use a name")
    if kind == _AGENT and label in (OPERATOR, DAEMON):
        raise UsageError(
            f"{label!r} cannot name {kind}, because the record uses it for the {label} itself; use another name"
        )
    return label


def register(database: Queries, label: str, role: str | None = None, *, is_operator: bool = False) -> MountingAgent:
    """Return the agent of that label or UUID. Register a new label, with `role` as its default role.

    A known agent keeps its default role. Only with `is_operator`, the label may be OPERATOR. ForbiddenError: the agent
    may not mount with `role`. UsageError: bad label, or unknown UUID.
    """
    with database.queries(change=True) as execute:
        known = _find(execute, label)
        if known is None and is_uuid(label):
            raise UsageError(f"there is no agent {label}; bonobofs agent list shows the agents")
        if not is_operator:
            check_label(label if known is None else known.label)
        if known is None:
            known = MountingAgent(label, new_uuid(), role, None, new=True)
            execute(
                "INSERT INTO agents (id, name, role, created) VALUES (:id, :label, :role, {clock})",
                {"id": known.id, "label": label, "role": role},
            )
    if role is not None and known.roles and role not in known.roles:
        raise ForbiddenError(
            f"{known.label} may not mount as {role}, but as {', '.join(known.roles)}; "
            f"to change that: bonobofs agent change {known.label} --role R"
        )
    return known


def labels(database: Queries, agent: str) -> list[str] | None:
    """Return None if an agent has that label or UUID, else the labels of all agents, sorted."""
    with database.queries() as execute:
        if _find(execute, agent) is not None:
            return None
        return [label for (label,) in execute("SELECT name FROM agents WHERE removed IS NULL ORDER BY name", {})]


def insert_session(database: Queries, home: Path, session: Session) -> int:
    """Insert a new session and return the generation of leases that it begins with.

    The session must read the leases after this call. StateError: its agent was removed meanwhile.
    """
    with database.queries(change=True) as execute:
        ((generation,),) = execute("SELECT value FROM counters WHERE name = 'leases'", {})
        agent = {"agent": session.agent_id}
        if not execute("SELECT id FROM agents WHERE id = :agent AND removed IS NULL", agent):
            raise StateError(f"{session.agent} was removed a moment ago; run this again")
        execute(
            "INSERT INTO sessions (id, agent, role, chain, home, host, source, mountpoint, started, heartbeat, "
            "acknowledged) VALUES (:id, :agent, :role, :chain, :home, :host, :source, :mountpoint, {clock}, {clock}, "
            ":generation)",
            {
                **agent,
                "id": session.session,
                "role": session.role,
                "chain": session.chain,
                "home": home_id(home),
                "host": os.uname().nodename,
                "source": escape(session.source),
                "mountpoint": None if session.mountpoint is None else escape(session.mountpoint),
                "generation": generation,
            },
        )
        return int(generation)


def _find(execute: Execute, agent: str) -> MountingAgent | None:
    """Return the agent of that label or UUID that was not removed."""
    rows = execute(
        "SELECT agents.name, agents.id, agents.role, teams.name FROM agents LEFT JOIN teams ON teams.id = agents.team "
        "WHERE (agents.id = :id OR agents.name = :label) AND agents.removed IS NULL",
        {"id": agent.lower(), "label": agent},
    )
    if not rows:
        return None
    label, identity, role, team = rows[0]
    roles = execute("SELECT role FROM agent_roles WHERE agent = :agent ORDER BY role", {"agent": identity})
    return MountingAgent(label, identity, role, team, tuple(name for (name,) in roles))
