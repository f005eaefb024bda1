"""Issues as bd tells of them. The words are bd's own: an issue that has ended is `closed`, never `done`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from bonobofs.beads import refusals
from bonobofs.beads.refusals import Fault

OPEN: Final = "open"
CLOSED: Final = "closed"
MESSAGE: Final = "message"
"""The type of an issue that asks a person a question."""
PARENT: Final = "parent-child"
"""The kind of an edge from a child to its parent."""


class Edge(NamedTuple):
    """`issue` depends on `on`: it is blocked by it, is its child, was discovered from it."""

    issue: str
    on: str
    kind: str
    """A word of bd: blocks, parent-child, waits-for, conditional-blocks, related, discovered-from, …"""


class Comment(NamedTuple):
    """What somebody has said of an issue."""

    id: str
    author: str
    text: str
    created_at: str


@dataclass(frozen=True, slots=True)
class BeadsIssue:
    """One issue. What bd leaves out is "", () or {}; times are ISO 8601, in whole seconds."""

    id: str
    title: str
    issue_type: str
    status: str
    priority: int
    description: str
    design: str
    acceptance: str
    notes: str
    assignee: str
    created_by: str
    """The actor that bd was told; a name that anybody could have given."""
    owner: str
    created_at: str
    updated_at: str
    closed_at: str
    close_reason: str
    labels: tuple[str, ...]
    edges: tuple[Edge, ...]
    """Those of which this is `issue`."""
    metadata: Mapping[str, Any]
    ephemeral: bool
    comment_count: int

    @property
    def is_closed(self) -> bool:
        return self.status == CLOSED


@dataclass(frozen=True, slots=True)
class NewIssue:
    """An issue to be created. The id is bd's to choose."""

    title: str
    issue_type: str = "task"
    priority: int = 2
    """0, the most urgent, to 4."""
    description: str = ""
    design: str = ""
    acceptance: str = ""
    notes: str = ""
    assignee: str = ""
    labels: tuple[str, ...] = ()
    """Beside these bd gives a child the labels of its parent."""
    parent: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Issues(Mapping[str, BeadsIssue]):
    """All issues at one moment, by their full ids: the closed, messages and gates too."""

    def __init__(self, issues: Iterable[BeadsIssue], told: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """`told`: what they were read from, by their ids."""
        self.told: Final = told or {}
        self._issues: Final = {issue.id: issue for issue in issues}
        self.edges: Final = tuple(edge for issue in self._issues.values() for edge in issue.edges)

    def __getitem__(self, id: str) -> BeadsIssue:  # noqa: A002 - it is bd's word
        return self._issues[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._issues)

    def __len__(self) -> int:
        return len(self._issues)

    def children(self, parent: str) -> list[BeadsIssue]:
        found = (edge.issue for edge in self.edges if edge.on == parent and edge.kind == PARENT)
        return [self._issues[child] for child in found]

    def parents(self, child: str) -> list[str]:
        """Ids; bd lets in more than one."""
        return [edge.on for edge in self._issues[child].edges if edge.kind == PARENT]


def read_issues(told: Iterable[Mapping[str, Any]], before: Issues | None = None) -> Issues:
    """The issues of `list`; those that are told as they were before are not read again.

    AttributeError, KeyError, TypeError, ValueError: something there is no issue.
    """
    known = {} if before is None else before.told
    issues = []
    told_by_id = {}
    for each in told:
        id_ = each["id"]
        told_by_id[id_] = each
        issues.append(before[id_] if before is not None and known.get(id_) == each else read_issue(each))
    return Issues(issues, told_by_id)


def read_issue(told: Mapping[str, Any]) -> BeadsIssue:
    """An issue of `list`. AttributeError, KeyError, TypeError, ValueError: it is not one."""
    get = told.get
    return BeadsIssue(
        id=str(told["id"]),
        title=str(told["title"]),
        issue_type=str(told["issue_type"]),
        status=str(told["status"]),
        priority=int(get("priority", 0)),
        description=str(get("description") or ""),
        design=str(get("design") or ""),
        acceptance=str(get("acceptance_criteria") or ""),
        notes=str(get("notes") or ""),
        assignee=str(get("assignee") or ""),
        created_by=str(get("created_by") or ""),
        owner=str(get("owner") or ""),
        created_at=str(get("created_at") or ""),
        updated_at=str(get("updated_at") or ""),
        closed_at=str(get("closed_at") or ""),
        close_reason=str(get("close_reason") or ""),
        # bd collects both in whatever order its database has them.
        labels=tuple(sorted(map(str, get("labels") or ()))),
        edges=tuple(sorted([_read_edge(edge) for edge in get("dependencies") or ()])),
        metadata=_read_metadata(get("metadata")),
        ephemeral=bool(get("ephemeral")),
        comment_count=int(get("comment_count") or 0),
    )


def read_comment(told: Mapping[str, Any]) -> Comment:
    """A comment of `comments`. KeyError, TypeError: it is not one."""
    return Comment(str(told["id"]), str(told["author"]), str(told["text"]), str(told.get("created_at") or ""))


def _read_edge(told: Mapping[str, Any]) -> Edge:
    return Edge(str(told["issue_id"]), str(told["depends_on_id"]), str(told["type"]))


def _read_metadata(told: object) -> dict[str, Any]:
    """Any JSON can stand there; what is no object says nothing to us."""
    if isinstance(told, str):
        try:
            told = json.loads(told)
        except ValueError:
            return {}
    return told if isinstance(told, dict) else {}


ASSIGNEE: Final = "bonobofs_assignee"
ASSIGNEE_ID: Final = "bonobofs_assignee_id"
CREATOR_ID: Final = "bonobofs_creator_id"
WORKTREE: Final = "bonobofs_worktree"


class Actor(NamedTuple):
    """The agent that asks."""

    label: str
    id: str


def is_open_to(issue: BeadsIssue, who: Actor) -> bool:
    """Whether the issue is the agent's own, or nobody's."""
    if not issue.assignee:
        return True
    if is_kept(issue):
        return bool(issue.metadata[ASSIGNEE_ID] == who.id)
    return issue.assignee == who.label


def is_kept(issue: BeadsIssue) -> bool:
    """Whether the identity of the assignee is known, and of no earlier one."""
    return issue.metadata.get(ASSIGNEE) == issue.assignee and bool(issue.metadata.get(ASSIGNEE_ID))


def is_made_by(issue: BeadsIssue, who: Actor) -> bool:
    """Whether the agent created the issue."""
    if issue.metadata.get(CREATOR_ID):
        return bool(issue.metadata[CREATOR_ID] == who.id)
    return issue.created_by == who.label


def has_had_worktree(issue: BeadsIssue) -> bool:
    return bool(issue.metadata.get(WORKTREE))


def assigned(label: str, identity: str | None) -> dict[str, str]:
    """The metadata of an issue that is assigned to `label` now; `identity` is None where that is no agent."""
    return {ASSIGNEE: label, ASSIGNEE_ID: identity or ""}


def existing(issues: Issues, issue_id: str) -> Fault | BeadsIssue:
    issue = issues.get(issue_id)
    return Fault(refusals.EXISTS, f"This is about {issue_id!a}.") if issue is None else issue


def own(issues: Issues, issue_id: str, who: Actor) -> Fault | BeadsIssue:
    issue = existing(issues, issue_id)
    if isinstance(issue, Fault) or is_open_to(issue, who):
        return issue
    return Fault(refusals.OWNER, f"{issue.id} is assigned to {issue.assignee}.")


_NAMES: Final = {
    "id": "id",
    "title": "title",
    "description": "description",
    "design": "design",
    "acceptance": "acceptance_criteria",
    "notes": "notes",
    "status": "status",
    "priority": "priority",
    "issue_type": "issue_type",
    "assignee": "assignee",
    "owner": "owner",
    "created_at": "created_at",
    "created_by": "created_by",
    "updated_at": "updated_at",
    "closed_at": "closed_at",
    "close_reason": "close_reason",
    "labels": "labels",
    "metadata": "metadata",
}


def issue_document(issue: BeadsIssue) -> dict[str, Any]:
    """An issue as `bd show --json` has it: keys with empty values are left out."""
    found = {key: getattr(issue, name) for name, key in _NAMES.items()}
    edges = [{"issue_id": edge.issue, "depends_on_id": edge.on, "type": edge.kind} for edge in issue.edges]
    told = {**found, "labels": [*issue.labels], "metadata": dict(issue.metadata), "dependencies": edges}
    return {key: value for key, value in told.items() if value or key == "priority"}
