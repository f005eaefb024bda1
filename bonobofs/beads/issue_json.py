"""Issues as bd shows them: the JSON of its commands, and its one line for people."""

from __future__ import annotations

from typing import Any, Final

from bonobofs.beads.issue import BeadsIssue

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


def as_document(issue: BeadsIssue) -> dict[str, Any]:
    """An issue as `bd show --json` has it: keys with empty values are left out."""
    found = {key: getattr(issue, name) for name, key in _NAMES.items()}
    edges = [{"issue_id": edge.issue, "depends_on_id": edge.on, "type": edge.kind} for edge in issue.edges]
    told = {**found, "labels": [*issue.labels], "metadata": dict(issue.metadata), "dependencies": edges}
    return {key: value for key, value in told.items() if value or key == "priority"}
