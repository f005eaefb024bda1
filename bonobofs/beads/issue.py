"""Issues, in the form and the words of bd: a finished issue is `closed`, never `done`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
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
    """`issue` depends on `on`: for example, it is blocked by it, or is its child."""

    issue: str
    on: str
    kind: str
    """A word of bd: blocks, parent-child, waits-for, conditional-blocks, related, discovered-from, …"""


class Comment(NamedTuple):
    """A comment on an issue."""

    id: str
    author: str
    text: str
    created_at: str


@dataclass(frozen=True, slots=True)
class BeadsIssue:
    """One issue. A field without a value is "", () or {}. Times are ISO 8601 in whole seconds."""

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
    """The actor in the call of bd. It is unverified: any caller of bd can pass any name."""
    owner: str
    created_at: str
    updated_at: str
    closed_at: str
    close_reason: str
    labels: tuple[str, ...]
    edges: tuple[Edge, ...]
    """The edges whose `issue` is this one."""
    metadata: Mapping[str, Any]
    ephemeral: bool
    comment_count: int

    @property
    def is_closed(self) -> bool:
        return self.status == CLOSED


@dataclass(frozen=True, slots=True)
class NewIssue:
    """An issue to create. bd chooses the id."""

    title: str
    issue_type: str = "task"
    priority: int = 2
    """From 0, the most urgent, to 4."""
    description: str = ""
    design: str = ""
    acceptance: str = ""
    notes: str = ""
    assignee: str = ""
    labels: tuple[str, ...] = ()
    """bd adds the labels of the parent."""
    parent: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Issues(Mapping[str, BeadsIssue]):
    """A snapshot of all issues by full id, with closed issues, messages and gates."""

    def __init__(self, issues: Iterable[BeadsIssue], documents: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """`documents` has the JSON object of each issue, by id."""
        self.documents: Final = documents or {}
        self._issues: Final = {issue.id: issue for issue in issues}
        self.edges: Final = tuple(edge for issue in self._issues.values() for edge in issue.edges)

    def __getitem__(self, id: str) -> BeadsIssue:  # noqa: A002 - it is bd's word
        return self._issues[id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._issues)

    def __len__(self) -> int:
        return len(self._issues)

    def children(self, parent: str) -> list[BeadsIssue]:
        return [self._issues[edge.issue] for edge in self.edges if edge.on == parent and edge.kind == PARENT]

    def parents(self, child: str) -> list[str]:
        """Return the ids of the parents. bd allows more than one."""
        return [edge.on for edge in self._issues[child].edges if edge.kind == PARENT]


def read_issues(documents: Iterable[Mapping[str, Any]], before: Issues | None = None) -> Issues:
    """Parse the output of `list`. Issues whose JSON is the same as in `before` are not parsed again.

    Raises AttributeError, KeyError, TypeError or ValueError for JSON that is no issue.
    """
    before = before or Issues(())
    by_id = {document["id"]: document for document in documents}
    unchanged = {id_ for id_, document in by_id.items() if before.documents.get(id_) == document}
    return Issues([before[id_] if id_ in unchanged else read_issue(by_id[id_]) for id_ in by_id], by_id)


def read_issue(document: Mapping[str, Any]) -> BeadsIssue:
    """Parse one issue of `list`. Raises as `read_issues` does."""
    get = document.get
    return BeadsIssue(
        id=str(document["id"]),
        title=str(document["title"]),
        issue_type=str(document["issue_type"]),
        status=str(document["status"]),
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
        # bd prints both in the order of its database, which changes.
        labels=tuple(sorted(map(str, get("labels") or ()))),
        edges=tuple(sorted([_read_edge(edge) for edge in get("dependencies") or ()])),
        metadata=_read_metadata(get("metadata")),
        ephemeral=bool(get("ephemeral")),
        comment_count=int(get("comment_count") or 0),
    )


def read_comment(document: Mapping[str, Any]) -> Comment:
    """Parse one comment of `comments`. Raises KeyError or TypeError for other JSON."""
    id_, author, text = (str(document[name]) for name in ("id", "author", "text"))
    return Comment(id_, author, text, str(document.get("created_at") or ""))


def _read_edge(document: Mapping[str, Any]) -> Edge:
    return Edge(str(document["issue_id"]), str(document["depends_on_id"]), str(document["type"]))


def _read_metadata(value: object) -> dict[str, Any]:
    """Return the metadata; {} if it is JSON other than an object."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return value if isinstance(value, dict) else {}


ASSIGNEE: Final = "bonobofs_assignee"
ASSIGNEE_ID: Final = "bonobofs_assignee_id"
CREATOR_ID: Final = "bonobofs_creator_id"
WORKTREE: Final = "bonobofs_worktree"
ATTACHED: Final = "bonobofs_attachments"


class Actor(NamedTuple):
    """The agent that makes a call."""

    label: str
    id: str


def is_open_to(issue: BeadsIssue, actor: Actor) -> bool:
    """Return True if the issue is assigned to the agent, or unassigned."""
    if not issue.assignee:
        return True
    if is_kept(issue):
        return bool(issue.metadata[ASSIGNEE_ID] == actor.id)
    return issue.assignee == actor.label


def is_kept(issue: BeadsIssue) -> bool:
    """Return True if the metadata has the UUID of the current assignee."""
    return issue.metadata.get(ASSIGNEE) == issue.assignee and bool(issue.metadata.get(ASSIGNEE_ID))


def is_made_by(issue: BeadsIssue, actor: Actor) -> bool:
    """Return True if the agent created the issue."""
    if issue.metadata.get(CREATOR_ID):
        return bool(issue.metadata[CREATOR_ID] == actor.id)
    return issue.created_by == actor.label


def attachments_of(issue: BeadsIssue) -> dict[str, str]:
    """Return the attached files: {path: SHA-256 in hex}."""
    attached = issue.metadata.get(ATTACHED)
    return {str(path): str(digest) for path, digest in attached.items()} if isinstance(attached, dict) else {}


def has_had_worktree(issue: BeadsIssue) -> bool:
    return bool(issue.metadata.get(WORKTREE))


def assignment(label: str, identity: str | None) -> dict[str, str]:
    """Return the metadata for an assignment to `label`. `identity` is its UUID, None if it is no agent."""
    return {ASSIGNEE: label, ASSIGNEE_ID: identity or ""}


def require_issue(issues: Issues, issue_id: str) -> BeadsIssue:
    """Return the issue. Raises Fault."""
    issue = issues.get(issue_id)
    if issue is None:
        raise Fault(refusals.EXISTS, f"This is about {issue_id!a}.")
    return issue


def require_open_to(issues: Issues, issue_id: str, actor: Actor) -> BeadsIssue:
    """Return the issue if it is assigned to the agent, or unassigned. Raises Fault."""
    issue = require_issue(issues, issue_id)
    if not is_open_to(issue, actor):
        raise Fault(refusals.OWNER, f"{issue.id} is assigned to {issue.assignee}.")
    return issue


def issue_document(issue: BeadsIssue) -> dict[str, Any]:
    """Return an issue in the form of `bd show --json`, without keys for empty values."""
    document = {each.name: getattr(issue, each.name) for each in fields(issue)}
    del document["ephemeral"], document["comment_count"]
    document["acceptance_criteria"] = document.pop("acceptance")
    edges = document.pop("edges")
    document["dependencies"] = [{"issue_id": edge.issue, "depends_on_id": edge.on, "type": edge.kind} for edge in edges]
    return {key: value for key, value in document.items() if value or key == "priority"}
