"""What the gate keeps in an issue's metadata: whose it is, by UUID, and whether work on it has had a worktree.

A label may one day name another agent, and bd knows labels alone. What is kept counts as long as bd's own field still
says what it said then; what somebody changed with bd itself goes by the label.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from bonobofs.beads import refusals
from bonobofs.beads.issue import BeadsIssue, Issues
from bonobofs.beads.refusals import Fault

ASSIGNEE: Final = "bonobofs_assignee"
ASSIGNEE_ID: Final = "bonobofs_assignee_id"
CREATOR_ID: Final = "bonobofs_creator_id"
WORKTREE: Final = "bonobofs_worktree"


class Who(NamedTuple):
    """The agent that asks."""

    label: str
    id: str


def is_open_to(issue: BeadsIssue, who: Who) -> bool:
    """Whether the issue is the agent's own, or nobody's."""
    if not issue.assignee:
        return True
    if is_kept(issue):
        return bool(issue.metadata[ASSIGNEE_ID] == who.id)
    return issue.assignee == who.label


def is_kept(issue: BeadsIssue) -> bool:
    """Whether the identity of the assignee is known, and of no earlier one."""
    return issue.metadata.get(ASSIGNEE) == issue.assignee and bool(issue.metadata.get(ASSIGNEE_ID))


def is_made_by(issue: BeadsIssue, who: Who) -> bool:
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


def own(issues: Issues, issue_id: str, who: Who) -> Fault | BeadsIssue:
    issue = existing(issues, issue_id)
    if isinstance(issue, Fault) or is_open_to(issue, who):
        return issue
    return Fault(refusals.OWNER, f"{issue.id} is assigned to {issue.assignee}.")
