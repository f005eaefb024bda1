"""`bonobofs agent add|change|list|remove` and `bonobofs team add|list|remove`."""

from __future__ import annotations

from typing import Annotated, Any

from bonobofs import session
from bonobofs.cli.options import Argument, Group, Option
from bonobofs.cli.output import listing, note, say
from bonobofs.errors import UsageError

agent_app = Group(help="Register agents and their roles.")
team_app = Group(help="Register teams.")

Json = Annotated[bool, Option("--json", help="One JSON document: a list.")]
Removed = Annotated[bool, Option("--removed", help="Include removed ones.")]


@agent_app.command("add")
def add_agent(
    name: Annotated[str, Argument(metavar="NAME", help="Its label, unique among the agents.")],
    team: Annotated[str | None, Option(metavar="T", help="Its team.")] = None,
    role: Annotated[
        list[str] | None,
        Option(metavar="R", help="A role that it may use; the first is its default. Default: every role."),
    ] = None,
) -> None:
    """Register an agent.

    \b
    Examples:
      bonobofs agent add alice --team red --role impl
      bonobofs agent add bob --role control --role impl
    """
    with session.Database.open(session.home()) as database:
        stored = session.agent_registry.add(database, name, team=team, roles=role or ())
    say(f"{stored.label} is {stored.id}")


@agent_app.command("list")
def list_agents(removed: Removed = False, json: Json = False) -> None:
    """List the agents."""
    with session.Database.open(session.home()) as database:
        entries = session.agent_registry.list_agents(database, removed=removed)
    rows = [
        (entry.label, entry.team or "-", entry.role or "-", ", ".join(entry.roles) or "every", entry.id, _until(entry))
        for entry in entries
    ]
    heading = ("AGENT", "TEAM", "ROLE", "MAY MOUNT AS", "IDENTITY", "REMOVED")
    listing(list(map(_plain, entries)), heading, rows, "no agents; register one: bonobofs agent add NAME", json=json)


@agent_app.command("change")
def change_agent(
    agent: Annotated[str, Argument(metavar="NAME", help="Label or UUID of an agent.")],
    team: Annotated[str | None, Option(metavar="T", help="Its new team.")] = None,
    role: Annotated[
        list[str] | None,
        Option(metavar="R", help="A role that it may use; replaces all earlier roles. The first is its default."),
    ] = None,
) -> None:
    """Change the team or the roles of an agent.

    \b
    Example:
      bonobofs agent change alice --role control --role impl
    """
    if team is None and not role:
        raise UsageError("nothing to change; give --team T or --role R")
    home = session.home()
    with session.Database.open(home) as database:
        stored = session.agent_registry.change(database, agent, team=team, roles=role or ())
    say(f"{stored.label}: team {stored.team or '-'}, may mount as {', '.join(stored.roles) or 'every role'}")
    for entry in session.statuses(home):
        if entry.state in session.SERVED and entry.session.agent_id == stored.id and role:
            where = entry.session.mountpoint or entry.session.source
            note(f"the session in {where} keeps the role {entry.session.role} until it ends")


@agent_app.command("remove")
def remove_agent(agent: Annotated[str, Argument(metavar="NAME", help="Label or UUID of an agent.")]) -> None:
    """Remove an agent and its own leases. Its label is then free for another agent.

    Its records keep its name.
    """
    with session.Database.open(session.home()) as database:
        former = session.agent_registry.remove(database, agent)
    say(f"{former.label} ({former.id}) was removed")


@team_app.command("add")
def add_team(name: Annotated[str, Argument(metavar="NAME", help="Its label.")]) -> None:
    """Register a team."""
    with session.Database.open(session.home()) as database:
        stored = session.agent_registry.add_team(database, name)
    say(f"{stored.label} is {stored.id}")


@team_app.command("list")
def list_teams(removed: Removed = False, json: Json = False) -> None:
    """List the teams."""
    with session.Database.open(session.home()) as database:
        entries = session.agent_registry.list_teams(database, removed=removed)
    rows = [(entry.label, entry.id, _until(entry)) for entry in entries]
    heading = ("TEAM", "IDENTITY", "REMOVED")
    listing(list(map(_plain, entries)), heading, rows, "no teams; add one: bonobofs team add NAME", json=json)


@team_app.command("remove")
def remove_team(team: Annotated[str, Argument(metavar="NAME", help="Label or UUID of a team.")]) -> None:
    """Remove a team that has no agents."""
    with session.Database.open(session.home()) as database:
        former = session.agent_registry.remove_team(database, team)
    say(f"{former.label} ({former.id}) was removed")


def _until(entry: session.agent_registry.Agent | session.agent_registry.Team) -> str:
    return "-" if entry.removed is None else entry.removed.isoformat(timespec="seconds")


def _plain(entry: session.agent_registry.Agent | session.agent_registry.Team) -> dict[str, Any]:
    removed = None if entry.removed is None else entry.removed.isoformat()
    return {**entry._asdict(), "created": entry.created.isoformat(), "removed": removed}
