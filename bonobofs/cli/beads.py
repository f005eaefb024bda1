"""`bonobofs beads create|update|close|dep`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from bonobofs import session
from bonobofs.beads.bd_command_line import Step
from bonobofs.cli.actor import ActingAs, AgentOption, PolicyOption, RoleOption
from bonobofs.cli.options import Argument, Group, Option
from bonobofs.cli.output import document, say
from bonobofs.errors import BeadsError
from bonobofs.ipc.client import call

app = Group(
    help="""Create and change the issues of bd under the policy. Every change is recorded.

In a mount, the session's agent acts. Elsewhere the operator names the agent with --agent.""",
)
dep_app = Group(help="Add or remove a dependency between two issues.")
app.members["dep"] = dep_app

JsonOption = Annotated[bool, Option("--json", help="The issue as one JSON document.")]
IssueArgument = Annotated[str, Argument(metavar="ISSUE", help="The full id of the issue.")]
PriorityOption = Annotated[
    str | None, Option("-p", "--priority", metavar="N", help="0 (most urgent) to 4. Default of a new issue: 2.")
]
TitleOption = Annotated[str | None, Option(metavar="TEXT", help="One line.")]
DescriptionOption = Annotated[str | None, Option("-d", "--description", metavar="TEXT", help="The description.")]
DesignOption = Annotated[str | None, Option(metavar="TEXT", help="The design.")]
AcceptanceOption = Annotated[str | None, Option(metavar="TEXT", help="The acceptance criteria.")]
NotesOption = Annotated[str | None, Option(metavar="TEXT", help="Further notes.")]
AssigneeOption = Annotated[
    str | None, Option("-a", "--assignee", metavar="A", help="The agent or person to work on it or answer it.")
]


@contextmanager
def _operations(identity: ActingAs) -> Iterator[Callable[[Step], dict[str, Any]]]:
    """Give a function that runs an operation in the mount around the working directory, or else in a new session."""
    mounted = identity.mount_session()
    if mounted is not None:
        yield lambda step: _call(mounted.directory, step)
        return
    from bonobofs.beads.issue import issue_document  # noqa: PLC0415
    from bonobofs.beads.issue_service import IssueService  # noqa: PLC0415

    with identity.open_session(_top(Path.cwd(), session.home())) as opened:
        service = IssueService(opened)
        yield lambda step: issue_document(service.act(step, f"beads {step.name}"))


def _call(directory: Path, step: Step) -> dict[str, Any]:
    issue = {"issue": step.issue} if step.issue else {}
    document: dict[str, Any] = call(directory, f"beads.{step.name}", **issue, **step.arguments)
    return document


def _run(step: Step, identity: ActingAs, json: bool) -> None:
    """Run one operation, and print the issue."""
    with _operations(identity) as run:
        issue = run(step)
    if json:
        document(issue)
    else:
        say(f"{issue['id']} is {issue['status']}: {issue['title']}")


def _top(directory: Path, home: Path) -> Path:
    from bonobofs.beads.bd_client import seek_beads  # noqa: PLC0415 - as above

    for above in (directory, *directory.parents):
        if seek_beads(above, home) is not None:
            return above
    raise BeadsError(f"neither {directory} nor a directory above it has a .beads; run `bd init`")


def _without_empty(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value not in (None, [])}


@app.command("create")
def create(
    title: Annotated[str, Argument(metavar="TITLE", help="One line.")],
    kind: Annotated[str, Option("-t", "--type", metavar="T", help="task, bug, message, …")] = "task",
    priority: PriorityOption = None,
    label: Annotated[list[str] | None, Option("-l", "--label", metavar="L", help="Such as phase:design.")] = None,
    assignee: AssigneeOption = None,
    parent: Annotated[str | None, Option(metavar="ISSUE", help="The parent issue.")] = None,
    deps: Annotated[
        list[str] | None,
        Option(metavar="[TYPE:]ISSUE", help="It depends on ISSUE; blocks:ISSUE: it blocks ISSUE."),
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
    """Create an issue with all its dependencies, or nothing.

    \b
    Examples:
      bonobofs beads create 'Write the plan' -l phase:design -p 1 --agent alice
      bonobofs beads create 'Which database?' -t message -a human --agent alice
    """
    fields = _without_empty(
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
    _run(Step("create", "", fields), ActingAs(agent, role, policy), json)


@app.command("update")
def update(
    issue: IssueArgument,
    status: Annotated[str | None, Option("-s", "--status", metavar="S", help="in_progress, done, closed.")] = None,
    claim: Annotated[bool, Option("--claim", help="Assign it to the agent and set in_progress.")] = False,
    title: TitleOption = None,
    priority: PriorityOption = None,
    assignee: AssigneeOption = None,
    add_label: Annotated[list[str] | None, Option(metavar="L", help="Such as phase:design.")] = None,
    remove_label: Annotated[list[str] | None, Option(metavar="L", help="Phase labels stay.")] = None,
    description: DescriptionOption = None,
    design: DesignOption = None,
    acceptance: AcceptanceOption = None,
    notes: NotesOption = None,
    agent: AgentOption = None,
    role: RoleOption = None,
    policy: PolicyOption = None,
    json: JsonOption = False,
) -> None:
    """Change an issue that the agent owns or that has no owner.

    \b
    Examples:
      bonobofs beads update gt-17 --claim --agent alice
      bonobofs beads update gt-17 --status done --agent alice
    """
    changes = _without_empty(
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
    _run(Step("update", issue, changes), ActingAs(agent, role, policy), json)


@app.command("close")
def close(
    issue: IssueArgument,
    reason: Annotated[str | None, Option("-r", "--reason", metavar="TEXT", help="The reason.")] = None,
    agent: AgentOption = None,
    role: RoleOption = None,
    policy: PolicyOption = None,
    json: JsonOption = False,
) -> None:
    """Close an issue. All its blockers and children must be closed.

    \b
    Example:
      bonobofs beads close gt-17 --reason 'merged' --agent alice
    """
    _run(Step("close", issue, _without_empty(reason=reason)), ActingAs(agent, role, policy), json)


@dep_app.command("add")
def add(
    blocked: Annotated[str, Argument(metavar="BLOCKED", help="The issue that is blocked, or the child.")],
    blocker: Annotated[str, Argument(metavar="BLOCKER", help="The issue that blocks it, or the parent.")],
    kind: Annotated[
        str, Option("-t", "--type", metavar="T", help="blocks, waits-for, parent, related, discovered-from, …")
    ] = "blocks",
    agent: AgentOption = None,
    role: RoleOption = None,
    policy: PolicyOption = None,
    json: JsonOption = False,
) -> None:
    """Make one issue depend on another, or make it a child of the other.

    \b
    Examples:
      bonobofs beads dep add gt-18 gt-17 --agent alice
      bonobofs beads dep add gt-18 gt-3 --type parent --agent alice
    """
    _run(Step("tie", blocked, {"other": blocker, "type": kind}), ActingAs(agent, role, policy), json)


@dep_app.command("remove")
def remove(
    blocked: Annotated[str, Argument(metavar="BLOCKED", help="The issue that is blocked, or the child.")],
    blocker: Annotated[str, Argument(metavar="BLOCKER", help="The issue that blocks it, or the parent.")],
    agent: AgentOption = None,
    role: RoleOption = None,
    policy: PolicyOption = None,
    json: JsonOption = False,
) -> None:
    """Remove the dependency of one issue on another.

    \b
    Example:
      bonobofs beads dep remove gt-18 gt-17 --agent alice
    """
    _run(Step("untie", blocked, {"other": blocker}), ActingAs(agent, role, policy), json)
