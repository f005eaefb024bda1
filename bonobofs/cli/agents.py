"""`bonobofs agent add|change|list|remove` and `bonobofs team add|list|remove`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bonobofs import session
from bonobofs.cli.output import document, note, say, table
from bonobofs.errors import UsageError
from bonobofs.state import agent_registry
from bonobofs.state.database import Database

agent_app = typer.Typer(help="Register agents and their roles.", rich_markup_mode=None)
team_app = typer.Typer(help="Register teams.", rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="One JSON document: a list.")]
Removed = Annotated[bool, typer.Option("--removed", help="Include removed ones.")]


@agent_app.command("add")
def add_agent(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its label, unique among the agents.")],
    team: Annotated[str | None, typer.Option(metavar="T", help="Its team.")] = None,
    role: Annotated[
        list[str] | None,
        typer.Option(metavar="R", help="A role that it may use; the first is its default. Default: every role."),
    ] = None,
) -> None:
    """Register an agent.

    \b
    Examples:
      bonobofs agent add alice --team red --role impl
      bonobofs agent add bob --role control --role impl
    """
    with Database.open(session.home()) as database:
        made = agent_registry.add(database, name, team=team, roles=role or ())
    say(f"{made.label} is {made.id}")


@agent_app.command("list")
def list_agents(removed: Removed = False, json: Json = False) -> None:
    """List the agents."""
    with Database.open(session.home()) as database:
        found = agent_registry.list_agents(database, removed=removed)
    if json:
        document([_plain(one) for one in found])
        return
    if not found:
        say("no agents; register one: bonobofs agent add NAME")
        return
    rows = [
        (one.label, one.team or "-", one.role or "-", ", ".join(one.roles) or "every", one.id, _until(one))
        for one in found
    ]
    table(("AGENT", "TEAM", "ROLE", "MAY MOUNT AS", "IDENTITY", "REMOVED"), rows)


@agent_app.command("change")
def change_agent(
    agent: Annotated[str, typer.Argument(metavar="NAME", help="Label or UUID of an agent.")],
    team: Annotated[str | None, typer.Option(metavar="T", help="Its new team.")] = None,
    role: Annotated[
        list[str] | None,
        typer.Option(metavar="R", help="A role that it may use; replaces all earlier roles. The first is its default."),
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
    with Database.open(home) as database:
        made = agent_registry.change(database, agent, team=team, roles=role or ())
    say(f"{made.label}: team {made.team or '-'}, may mount as {', '.join(made.roles) or 'every role'}")
    for one in session.statuses(home):
        if one.state in session.SERVED and one.session.agent_id == made.id and role:
            where = one.session.mountpoint or one.session.source
            note(f"the session in {where} keeps the role {one.session.role} until it ends")


@agent_app.command("remove")
def remove_agent(agent: Annotated[str, typer.Argument(metavar="NAME", help="Label or UUID of an agent.")]) -> None:
    """Remove an agent and its own leases. Its label is then free for another agent.

    Its records keep its name.
    """
    with Database.open(session.home()) as database:
        gone = agent_registry.remove(database, agent)
    say(f"{gone.label} ({gone.id}) was removed")


@team_app.command("add")
def add_team(name: Annotated[str, typer.Argument(metavar="NAME", help="Its label.")]) -> None:
    """Register a team."""
    with Database.open(session.home()) as database:
        made = agent_registry.add_team(database, name)
    say(f"{made.label} is {made.id}")


@team_app.command("list")
def list_teams(removed: Removed = False, json: Json = False) -> None:
    """List the teams."""
    with Database.open(session.home()) as database:
        found = agent_registry.list_teams(database, removed=removed)
    if json:
        document([_plain(one) for one in found])
        return
    if not found:
        say("no teams; add one: bonobofs team add NAME")
        return
    table(("TEAM", "IDENTITY", "REMOVED"), [(one.label, one.id, _until(one)) for one in found])


@team_app.command("remove")
def remove_team(team: Annotated[str, typer.Argument(metavar="NAME", help="Label or UUID of a team.")]) -> None:
    """Remove a team that has no agents."""
    with Database.open(session.home()) as database:
        gone = agent_registry.remove_team(database, team)
    say(f"{gone.label} ({gone.id}) was removed")


def _until(one: agent_registry.Agent | agent_registry.Team) -> str:
    return "-" if one.removed is None else one.removed.isoformat(timespec="seconds")


def _plain(one: agent_registry.Agent | agent_registry.Team) -> dict[str, Any]:
    removed = None if one.removed is None else one.removed.isoformat()
    return {**one._asdict(), "created": one.created.isoformat(), "removed": removed}
