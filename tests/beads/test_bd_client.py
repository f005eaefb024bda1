"""The client performs every operation of bd and reports its result."""

from __future__ import annotations

import json

import pytest

from bonobofs.beads import Edge, IssueStore, NewIssue
from bonobofs.errors import BeadsError, UsageError
from bonobofs.policy.decision import Permit
from tests.support.beads_workspace import Workspace

WHOLE = NewIssue(
    "A title",
    "bug",
    0,
    description="What is wrong.\n\nIn two paragraphs.",
    design="How it is to be.",
    acceptance="- [ ] done",
    notes="n",
    assignee="bob",
    labels=("phase:build", "unit:one"),
    metadata={"agent": "1"},
)


def test_an_issue_is_created_with_every_given_field(
    beads: IssueStore, beads_workspace: Workspace, permit: Permit
) -> None:
    """Creator is alice, and the owner address is alice's."""
    with beads.locked_client() as client:
        made = client.create_issue(WHOLE, permit)
    issue = made.issue
    assert (issue.title, issue.issue_type, issue.priority, issue.status) == ("A title", "bug", 0, "open")
    assert (issue.description, issue.design, issue.notes) == (WHOLE.description, WHOLE.design, WHOLE.notes)
    assert (issue.acceptance, issue.assignee, issue.labels) == (WHOLE.acceptance, WHOLE.assignee, WHOLE.labels)
    assert issue.metadata["agent"] == "1"
    assert (issue.created_by, issue.owner) == ("alice", "0b5c1f2a-7f53-4f37-8e1e-1a2b3c4d5e6f@bonobofs.invalid")
    assert made.after[issue.id] == issue
    assert beads_workspace.issue(issue.id)["title"] == "A title"


def test_a_child_is_created_below_its_parent(beads: IssueStore, permit: Permit) -> None:
    """It has the edge to the parent and the parent's labels."""
    with beads.locked_client() as client:
        epic = client.create_issue(NewIssue("an epic", "epic", labels=("phase:build",)), permit).issue
        child = client.create_issue(NewIssue("a child", parent=epic.id), permit)
        assert child.issue.edges == (Edge(child.issue.id, epic.id, "parent-child"),)
        assert child.issue.labels == ("phase:build",)
        assert [issue.id for issue in child.after.children(epic.id)] == [child.issue.id]


def test_a_message_is_permanent_and_listed(beads: IssueStore, beads_workspace: Workspace, permit: Permit) -> None:
    """bd itself makes messages ephemeral."""
    with beads.locked_client() as client:
        made = client.create_issue(NewIssue("a question", "message", assignee="human"), permit)
    assert made.issue.issue_type == "message"
    assert not made.issue.ephemeral
    assert made.issue.id in {issue["id"] for issue in beads_workspace.json("list", "--include-infra")}


def test_an_update_changes_only_the_named_fields(beads: IssueStore, permit: Permit) -> None:
    """Other metadata stays too."""
    with beads.locked_client() as client:
        made = client.create_issue(WHOLE, permit).issue
        now = client.update_issue(
            made.id,
            permit,
            status="in_progress",
            assignee="",
            title="-another",
            metadata={"more": [1]},
            add_labels=["unit:two"],
            remove_labels=["unit:one"],
        ).issue
    assert (now.status, now.assignee, now.title) == ("in_progress", "", "-another")
    assert now.labels == ("phase:build", "unit:two")
    assert now.metadata == {**made.metadata, "more": [1]}
    assert (now.description, now.design, now.priority) == (made.description, made.design, made.priority)


def test_an_issue_is_closed_and_reopened(beads: IssueStore, permit: Permit) -> None:
    """Closing sets the reason, and reopening removes it."""
    with beads.locked_client() as client:
        made = client.create_issue(NewIssue("one"), permit).issue
        closed = client.close_issue(made.id, permit, reason="-it is done").issue
        assert (closed.is_closed, closed.close_reason) == (True, "-it is done")
        opened = client.reopen_issue(made.id, permit).issue
        assert (opened.status, opened.close_reason) == ("open", "")


def test_dependencies_are_added_and_removed(beads: IssueStore, permit: Permit) -> None:
    """An edge is visible from both ends until it is removed."""
    with beads.locked_client() as client:
        one, two = (client.create_issue(NewIssue(title), permit).issue.id for title in ("one", "two"))
        tied = client.add_dependency(one, two, "blocks", permit)
        assert tied.issue.edges == tied.after.edges == (Edge(one, two, "blocks"),)
        with pytest.raises(BeadsError, match="block") as refused:
            client.close_issue(one, permit)
        assert refused.value.carried_out is False
        assert client.remove_dependency(one, two, permit).after.edges == ()


def test_a_comment_is_stored_unchanged(beads: IssueStore, permit: Permit) -> None:
    """Also if it begins like a flag, or has several lines."""
    with beads.locked_client() as client:
        made = client.create_issue(NewIssue("one"), permit).issue
        for text in ("--actor=bob", "two\nlines", "@/etc/passwd"):
            client.add_comment(made.id, text, permit)
        told = client.comments(made.id)
    assert [(each.author, each.text) for each in told] == [
        ("alice", "--actor=bob"),
        ("alice", "two\nlines"),
        ("alice", "@/etc/passwd"),
    ]


def test_only_complete_ids_are_accepted(beads: IssueStore, permit: Permit) -> None:
    """No abbreviation, and no empty id, which bd takes for the last touched issue."""
    with beads.locked_client() as client:
        made = client.create_issue(NewIssue("one"), permit).issue
        for part in (made.id.partition("-")[2], made.id[:-1], made.id.upper()):
            with pytest.raises(BeadsError, match="full id"):
                client.close_issue(part, permit)
        with pytest.raises(UsageError, match="changed last"):
            client.close_issue("", permit)
        assert not client.all_issues(fresh=True)[made.id].is_closed


def test_output_for_people_is_that_of_bd(beads: IssueStore, beads_workspace: Workspace, permit: Permit) -> None:
    """It has no envelope. Read-only mode makes no change."""
    one = beads_workspace.create("one")
    with beads.locked_client() as client:
        assert json.loads(client.read(["show", "--json", "--", one]).stdout) == beads_workspace.json("show", one)
        refused = client.read(["create", "--title=two"])
        assert refused.status == 1
        assert list(client.all_issues(fresh=True)) == [one]
