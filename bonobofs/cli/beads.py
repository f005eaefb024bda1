"""`bonobofs beads create|update|close|dep`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import typer

from bonobofs import session
from bonobofs.beads.bd_command_line import Step
from bonobofs.cli.output import document, say
from bonobofs.cli.suggestions import check_agent, check_role
from bonobofs.errors import BeadsError, UsageError
from bonobofs.ipc.client import call

app = typer.Typer(
    help="""Issues in bd, judged by the policy and entered in the record.

In a mount the agent is the session's. Elsewhere this is the operator's, and names the agent with --agent.""",
    rich_markup_mode=None,
)
dep_app = typer.Typer(help="Say which issue waits for which.", rich_markup_mode=None)
app.add_typer(dep_app, name="dep")

AgentOption = Annotated[str | None, typer.Option("--agent", metavar="A", help="Who does it; needed outside a mount.")]
RoleOption = Annotated[str | None, typer.Option("--role", metavar="R", help="In which role. Default: the agent's own.")]
PolicyOption = Annotated[Path | None, typer.Option("--policy", metavar="FILE", help="Outside a mount: the policy.")]
JsonOption = Annotated[bool, typer.Option("--json", help="The issue as one JSON document.")]
IssueArgument = Annotated[str, typer.Argument(metavar="ISSUE", help="Its id, in full.")]
PriorityOption = Annotated[
    str | None, typer.Option("-p", "--priority", metavar="N", help="0, the most urgent, to 4. Default: 2 when new.")
]
TitleOption = Annotated[str | None, typer.Option(metavar="TEXT", help="One line.")]
DescriptionOption = Annotated[str | None, typer.Option("-d", "--description", metavar="TEXT", help="What it is about.")]
DesignOption = Annotated[str | None, typer.Option(metavar="TEXT", help="How it is to be done.")]
AcceptanceOption = Annotated[str | None, typer.Option(metavar="TEXT", help="When it is done.")]
NotesOption = Annotated[str | None, typer.Option(metavar="TEXT", help="What else is to be known.")]
AssigneeOption = Annotated[
    str | None, typer.Option("-a", "--assignee", metavar="A", help="Who is to do it, or to answer it.")
]


class _ActingAs(NamedTuple):
    agent: str | None
    role: str | None
    policy: Path | None


class _Gate(Protocol):
    def __call__(self, step: Step) -> dict[str, Any]: ...


@contextmanager
def _gate(whose: _ActingAs) -> Iterator[_Gate]:
    """The gate of the mount that this is run in, or one of a session of its own."""
    here = Path.cwd()
    called = session.callable_session(session.home(), here)
    if called is not None:
        directory = called.directory
        if whose != _ActingAs(None, None, None):
            raise UsageError("in a mount the agent, the role and the policy are the session's; leave them out")
        yield lambda step: _called(directory, step)
        return
    if whose.agent is None:
        raise UsageError("outside a mount, name the agent with --agent")
    from bonobofs.beads import Beads, find_beads, issue_json  # noqa: PLC0415
    from bonobofs.beads.call_plan import act  # noqa: PLC0415
    from bonobofs.beads.issue_service import Acting  # noqa: PLC0415

    home = session.home()
    top = _top(here, home)
    check_agent(home, whose.agent)
    if whose.role is not None:
        check_role(whose.role, session.choose_policy(home, whose.policy, top))
    with session.open_session(top, agent=whose.agent, role=whose.role, policy=whose.policy, preset=None) as opened:
        agent = opened.guard.agent
        acting = Acting(opened, Beads(find_beads(Path(opened.place), opened.home), opened.home, agent))
        yield lambda step: issue_json.as_document(act(acting, agent, step, f"beads {step.name}"))


def _called(directory: Path, step: Step) -> dict[str, Any]:
    named = {"issue": step.issue} if step.issue else {}
    found: dict[str, Any] = call(directory, f"beads.{step.name}", **named, **step.arguments)
    return found


def _top(directory: Path, home: Path) -> Path:
    from bonobofs.beads.bd_session import seek_beads  # noqa: PLC0415 - as above

    for place in (directory, *directory.parents):
        if seek_beads(place, home) is not None:
            return place
    raise BeadsError(f"neither {directory} nor a directory above it has a .beads; run `bd init`")


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, [])}


def _tell(found: dict[str, Any], json: bool) -> None:
    if json:
        document(found)
    else:
        say(f"{found['id']} is {found['status']}: {found['title']}")


@app.command("create")
def create(
    title: Annotated[str, typer.Argument(metavar="TITLE", help="One line.")],
    kind: Annotated[str, typer.Option("-t", "--type", metavar="T", help="task, bug, message, …")] = "task",
    priority: PriorityOption = None,
    label: Annotated[list[str] | None, typer.Option("-l", "--label", metavar="L", help="As phase:design.")] = None,
    assignee: AssigneeOption = None,
    parent: Annotated[str | None, typer.Option(metavar="ISSUE", help="What it is a part of.")] = None,
    deps: Annotated[
        list[str] | None, typer.Option(metavar="[TYPE:]ISSUE", help="What it depends on; blocks:ISSUE the other way.")
    ] = None,
    description: DescriptionOption = None,
    design: DesignOption = None,
    acceptance: AcceptanceOption = None,
    notes: NotesOption = None,
    agent: AgentOption = None,
    role: RoleOption = None,
    policy: PolicyOption = None,
    json: JsonOption = False,
) -> None:
    """Create an issue, with all its dependencies or not at all.

    \b
    Examples:
      bonobofs beads create 'Write the plan' -l phase:design -p 1 --agent alice
      bonobofs beads create 'Which database?' -t message -a human --agent alice
    """
    fields = _given(
        title=title,
        type=kind,
        priority=priority,
        labels=label,
        assignee=assignee,
        parent=parent,
        dependencies=deps,
        description=description,
        design=design,
        acceptance=acceptance,
        notes=notes,
    )
    with _gate(_ActingAs(agent, role, policy)) as gate:
        _tell(gate(Step("create", "", fields)), json)


@app.command("update")
def update(
    issue: IssueArgument,
    status: Annotated[
        str | None, typer.Option("-s", "--status", metavar="S", help="in_progress, done, closed.")
    ] = None,
    claim: Annotated[bool, typer.Option("--claim", help="Take it: in progress, and assigned to the agent.")] = False,
    title: TitleOption = None,
    priority: PriorityOption = None,
    assignee: AssigneeOption = None,
    add_label: Annotated[list[str] | None, typer.Option(metavar="L", help="As phase:design.")] = None,
    remove_label: Annotated[list[str] | None, typer.Option(metavar="L", help="Any but those of a phase.")] = None,
    description: DescriptionOption = None,
    design: DesignOption = None,
    acceptance: AcceptanceOption = None,
    notes: NotesOption = None,
    agent: AgentOption = None,
    role: RoleOption = None,
    policy: PolicyOption = None,
    json: JsonOption = False,
) -> None:
    """Change an issue that is the agent's own, or nobody's.

    \b
    Examples:
      bonobofs beads update gt-17 --claim --agent alice
      bonobofs beads update gt-17 --status done --agent alice
    """
    changes = _given(
        status=status,
        claim=claim or None,
        title=title,
        priority=priority,
        assignee=assignee,
        add_labels=add_label,
        remove_labels=remove_label,
        description=description,
        design=design,
        acceptance=acceptance,
        notes=notes,
    )
    with _gate(_ActingAs(agent, role, policy)) as gate:
        _tell(gate(Step("update", issue, changes)), json)


@app.command("close")
def close(
    issue: IssueArgument,
    reason: Annotated[str | None, typer.Option("-r", "--reason", metavar="TEXT", help="Why.")] = None,
    agent: AgentOption = None,
    role: RoleOption = None,
    policy: PolicyOption = None,
    json: JsonOption = False,
) -> None:
    """Close an issue that waits for none, and has no child that is not closed.

    \b
    Example:
      bonobofs beads close gt-17 --reason 'merged' --agent alice
    """
    with _gate(_ActingAs(agent, role, policy)) as gate:
        _tell(gate(Step("close", issue, _given(reason=reason))), json)


@dep_app.command("add")
def add(
    blocked: Annotated[str, typer.Argument(metavar="BLOCKED", help="The issue that waits, or the child.")],
    blocker: Annotated[str, typer.Argument(metavar="BLOCKER", help="What it waits for, or the parent.")],
    kind: Annotated[
        str, typer.Option("-t", "--type", metavar="T", help="blocks, waits-for, parent, related, discovered-from, …")
    ] = "blocks",
    agent: AgentOption = None,
    role: RoleOption = None,
    policy: PolicyOption = None,
    json: JsonOption = False,
) -> None:
    """Let one issue wait for another, or be its child.

    \b
    Examples:
      bonobofs beads dep add gt-18 gt-17 --agent alice
      bonobofs beads dep add gt-18 gt-3 --type parent --agent alice
    """
    with _gate(_ActingAs(agent, role, policy)) as gate:
        _tell(gate(Step("tie", blocked, {"other": blocker, "type": kind})), json)


@dep_app.command("remove")
def remove(
    blocked: Annotated[str, typer.Argument(metavar="BLOCKED", help="The issue that waits, or the child.")],
    blocker: Annotated[str, typer.Argument(metavar="BLOCKER", help="What it waits for, or the parent.")],
    agent: AgentOption = None,
    role: RoleOption = None,
    policy: PolicyOption = None,
    json: JsonOption = False,
) -> None:
    """Let one issue no longer depend on another.

    \b
    Example:
      bonobofs beads dep remove gt-18 gt-17 --agent alice
    """
    with _gate(_ActingAs(agent, role, policy)) as gate:
        _tell(gate(Step("untie", blocked, {"other": blocker})), json)
