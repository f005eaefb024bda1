"""Make a call of the gate from plain data, as the guard socket and bd's command line deliver it."""

from __future__ import annotations

from bonobofs.beads.bd_command_line import Step
from bonobofs.beads.issue import BeadsIssue
from bonobofs.beads.issue_service import IssueService
from bonobofs.policy.request import Principal


def act(acting: IssueService, agent: Principal, step: Step, tool: str) -> BeadsIssue:
    """Make the call as `agent` and return the issue after it. Raises as `IssueService` does."""
    given = dict(step.arguments)
    if step.name == "create":
        title, kind, priority = given.pop("title"), given.pop("type", "task"), given.pop("priority", None)
        return acting.create(title, kind, priority, given, agent.id, tool)
    if step.name == "update":
        if given.pop("claim", False):
            given |= {"assignee": agent.label, "status": "in_progress"}
        return acting.update(step.issue, given, agent.id, tool)
    if step.name == "tie":
        return acting.tie(step.issue, given["other"], given["type"], agent.id, tool)
    if step.name == "untie":
        return acting.untie(step.issue, given["other"], agent.id, tool)
    if step.name == "label":
        return acting.label(step.issue, given.get("add"), given.get("remove"), agent.id, tool)
    if step.name == "comment":
        return acting.comment(step.issue, given["text"], agent.id, tool)
    ending = {"close": acting.close, "reopen": acting.reopen}[step.name]
    return ending(step.issue, given.get("reason"), agent.id, tool)
