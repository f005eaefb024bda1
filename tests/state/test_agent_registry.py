"""The agent registry: identities are permanent, labels can be reused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from bonobofs import session
from bonobofs.errors import ForbiddenError, StateError, UsageError
from bonobofs.state import agent_registry, session_rows
from bonobofs.state.database import Database


def test_a_reused_label_inherits_nothing(database: Database) -> None:
    agent_registry.add_team(database, "red")
    first = agent_registry.add(database, "ann", team="red", roles=["impl"])
    agent_registry.remove(database, "ann")
    second = agent_registry.add(database, "ann")
    assert first.id != second.id
    assert (second.team, second.role, second.roles) == (None, None, ())
    assert agent_registry.identity_of(database, "ann") == second.id
    assert agent_registry.identity_of(database, first.id) is None
    both = agent_registry.list_agents(database, removed=True)
    assert [(one.id, one.removed is not None) for one in both] == [(first.id, True), (second.id, False)]
    assert agent_registry.list_agents(database) == [second]


def test_an_agent_mounts_only_in_a_registered_role(database: Database) -> None:
    agent_registry.add(database, "ann", roles=["impl", "control"])
    assert session_rows.register(database, "ann").role == "impl"
    assert session_rows.register(database, "ann", "control").role == "impl"
    with pytest.raises(ForbiddenError, match="may not mount as orchestrator, but as control, impl"):
        session_rows.register(database, "ann", "orchestrator")


def test_an_agent_registered_by_its_first_mount_may_use_other_roles(database: Database) -> None:
    """The registry does not restrict its roles."""
    made = session_rows.register(database, "bob", "impl")
    again = session_rows.register(database, "bob", "control")
    assert (made.new, again.new) == (True, False)
    assert (again.id, again.role) == (made.id, "impl")


def test_an_existing_agent_cannot_be_added_and_an_unknown_one_cannot_be_removed(database: Database) -> None:
    agent_registry.add(database, "ann")
    agent_registry.add_team(database, "red")
    for wrong in (
        lambda: agent_registry.add(database, "ann"),
        lambda: agent_registry.add(database, "bob", team="blue"),
        lambda: agent_registry.remove(database, "bob"),
        lambda: agent_registry.add_team(database, "red"),
        lambda: agent_registry.remove_team(database, "blue"),
        lambda: agent_registry.add(database, "4f0c1b9e-6c43-4f67-9c0a-0a2f4f6d8a10"),
        lambda: agent_registry.add(database, "a/b"),
        lambda: agent_registry.add(database, " ann"),
        lambda: agent_registry.add(database, "bob", roles=["\udcff"]),
        lambda: session_rows.register(database, "4f0c1b9e-6c43-4f67-9c0a-0a2f4f6d8a10"),
    ):
        with pytest.raises(UsageError):
            wrong()
    assert [one.label for one in agent_registry.list_agents(database)] == ["ann"]


def test_only_an_empty_team_can_be_removed(database: Database) -> None:
    team = agent_registry.add_team(database, "red")
    agent_registry.add(database, "ann", team=team.id)
    with pytest.raises(StateError, match="to red belong ann"):
        agent_registry.remove_team(database, "red")
    agent_registry.remove(database, "ann")
    assert agent_registry.remove_team(database, "red").id == team.id
    assert agent_registry.list_teams(database) == []
    assert agent_registry.add_team(database, "red").id != team.id


def test_no_session_begins_for_an_agent_removed_meanwhile(database: Database, source: Path) -> None:
    """Between the lookup and the registration of the session, its label may become that of another agent."""
    with session.open_session(source, agent="ann") as opened:
        made = opened.session
    agent_registry.remove(database, "ann")
    agent_registry.add(database, "ann")
    late = made._replace(session="33333333-3333-4333-8333-333333333333")
    with pytest.raises(StateError, match="ann was removed a moment ago"):
        session_rows.insert_session(database, database.home, late)


def test_many_agents_are_registered_concurrently(opened: Callable[[Path], Database], home: Path) -> None:
    """With a database that does not exist yet, no name is lost and none gets two identities."""
    labels = [f"agent-{number % 10}" for number in range(40)]
    found: list[session_rows.MountingAgent] = []

    def register(label: str) -> None:
        with Database.open(home) as mine:
            found.append(session_rows.register(mine, label))

    threads = [threading.Thread(target=register, args=(label,)) for label in labels]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({(one.label, one.id) for one in found}) == 10
    assert sum(one.new for one in found) == 10
