"""Issues as bd tells of them. The words are bd's own: an issue that has ended is `closed`, never `done`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

CLOSED: Final = "closed"
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
