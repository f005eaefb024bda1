"""The gate with a faulty bd: report, record and stored state agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bonobofs.beads import BeadsIssue, IssueStore, find_beads
from bonobofs.errors import BeadsError
from bonobofs.policy.decision import Refused
from bonobofs.session import open_session
from tests.beads.conftest import Guarded, Opened
from tests.fakes.faulty_bd import Faulty
from tests.support.beads_workspace import Workspace

STORED = ("killed after", "fails after", "notices", "bare")
NOT_STORED = ("killed before", "fails before", "lies", "mumbles")


@pytest.fixture
def alice(faulty: Faulty, beads_workspace: Workspace, home: Path) -> Iterator[Guarded]:
    """The gate on a bd that goes wrong; of a fault that hangs it is done soon."""
    with open_session(beads_workspace.directory, agent="alice") as session:
        agent = session.guard.agent
        yield Guarded(
            session, IssueStore(find_beads(beads_workspace.directory), home, agent, program=faulty.path, limit=5)
        )


def outcome(alice: Guarded) -> tuple[str, object]:
    """How the last call ended, and whether the record knows what it left; it is one entry, and that of its end."""
    *_, intent, end = [entry for entry in alice.entries() if entry.kind in ("intent", "outcome")]
    assert end.details["intent"] == intent.seq
    return end.result, end.details.get("carried_out")


@pytest.mark.parametrize("how", STORED)
def test_a_stored_change_is_a_success_for_any_output(
    alice: Guarded, faulty: Faulty, beads_workspace: Workspace, how: str
) -> None:
    one, other = beads_workspace.create("one"), beads_workspace.create("other")
    faulty.will(how, "create")
    made = alice.issues.guarded_create("new", "task", 1, "alice", assignee="alice", labels=["phase:a"])
    assert (outcome(alice), alice.entries()[-1].details["issue"]) == (("allowed", None), made.id)
    faulty.will(how, "update")
    alice.issues.guarded_update(one, "alice", status="in_progress", assignee="alice")
    assert outcome(alice) == ("allowed", None)
    faulty.will(how, "dep add")
    alice.issues.guarded_dependency(made.id, other, "waits-for", "alice")
    assert outcome(alice) == ("allowed", None)
    faulty.will(how, "close")
    alice.issues.guarded_update(one, "alice", status="done")
    assert outcome(alice) == ("allowed", None)
    found = beads_workspace.all_issues()
    assert (found[made.id]["assignee"], found[made.id]["labels"], found[one]["status"]) == (
        "alice",
        ["phase:a"],
        "closed",
    )
    assert [edge["depends_on_id"] for edge in found[made.id]["dependencies"]] == [other]


@pytest.mark.parametrize("how", NOT_STORED)
def test_a_change_that_is_not_stored_is_an_error_for_any_output(
    alice: Guarded, faulty: Faulty, beads_workspace: Workspace, how: str
) -> None:
    one, other = beads_workspace.create("one"), beads_workspace.create("other")
    before = beads_workspace.all_issues()
    faulty.will(how, "create")
    with pytest.raises(BeadsError):
        alice.issues.guarded_create("new", "task", 1, "alice")
    assert outcome(alice) == ("error", False)
    faulty.will(how, "update")
    with pytest.raises(BeadsError):
        alice.issues.guarded_update(one, "alice", priority=0)
    assert outcome(alice) == ("error", False)
    faulty.will(how, "dep add")
    with pytest.raises(BeadsError):
        alice.issues.guarded_dependency(one, other, "blocks", "alice")
    assert outcome(alice) == ("error", False)
    faulty.will(how, "close")
    with pytest.raises(BeadsError):
        alice.issues.guarded_close(one, "alice")
    assert outcome(alice) == ("error", False)
    assert beads_workspace.all_issues() == before


def test_a_hanging_bd_is_killed_and_its_stored_state_decides(
    alice: Guarded, faulty: Faulty, beads_workspace: Workspace
) -> None:
    faulty.will("hangs after", "create")
    made = alice.issues.guarded_create("new", "task", 1, "alice")
    assert (outcome(alice), alice.entries()[-1].details["issue"]) == (("allowed", None), made.id)
    faulty.will("hangs before", "close")
    with pytest.raises(BeadsError, match="time limit"):
        alice.issues.guarded_close(made.id, "alice")
    assert outcome(alice) == ("error", False)
    assert beads_workspace.issue(made.id)["status"] == "open"


def test_an_issue_whose_dependency_fails_is_deleted(alice: Guarded, faulty: Faulty, beads_workspace: Workspace) -> None:
    one, other = beads_workspace.create("one"), beads_workspace.create("other")
    faulty.will("killed before", "dep add")
    with pytest.raises(BeadsError):
        alice.issues.guarded_create("new", "task", 1, "alice", dependencies=[one, f"blocks:{other}"])
    assert set(beads_workspace.all_issues()) == {one, other}
    assert alice.entries()[-1].details["undone"] is True


def test_a_partly_stored_change_is_reported(alice: Guarded, faulty: Faulty, beads_workspace: Workspace) -> None:
    one = beads_workspace.create("one")
    faulty.will("partly", "update", without=("add-label",))
    with pytest.raises(BeadsError, match="in part"):
        alice.issues.guarded_update(one, "alice", priority=0, add_labels=["phase:a"])
    assert outcome(alice) == ("error", None)
    assert (alice.entries()[-1].details["done"], alice.entries()[-1].details["missing"]) == (
        ["priority"],
        ["label phase:a"],
    )
    faulty.will("fails before", "close")
    with pytest.raises(BeadsError):
        alice.issues.guarded_update(one, "alice", priority=1, status="closed")
    shown = beads_workspace.issue(one)
    assert (shown["priority"], shown["status"]) == (1, "open")


@pytest.mark.parametrize("how", ["killed before", "fails before", "mumbles"])
def test_unreadable_issues_are_not_changed(
    alice: Guarded, faulty: Faulty, beads_workspace: Workspace, how: str
) -> None:
    """The rules have no facts, so nothing is permitted."""
    one = beads_workspace.create("one")
    faulty.will(how, "list")
    with pytest.raises(BeadsError):
        alice.issues.guarded_close(one, "alice")
    (entry,) = alice.calls()
    assert (entry.result, entry.operation, entry.details["issue"]) == ("error", "close_issue", one)
    assert beads_workspace.issue(one)["status"] == "open"


def test_a_change_that_cannot_be_read_back_is_recorded_as_unknown(
    alice: Guarded, faulty: Faulty, beads_workspace: Workspace
) -> None:
    one = beads_workspace.create("one")
    alice.issues.validate_update(one, {"priority": 0}, "alice")
    faulty.will("notices", "list")
    faulty.will("fails before", "list")
    with pytest.raises(BeadsError, match="it is unknown"):
        alice.issues.guarded_update(one, "alice", priority=0)
    assert outcome(alice) == ("error", None)


def thousand(workspace: Workspace, tmp_path: Path) -> list[str]:
    """A thousand issues, each of which waits for the next."""
    names = [f"gt-n{number:03}" for number in range(1000)]
    lines = [
        {
            "id": name,
            "title": f"Issue {name}",
            "status": "open",
            "priority": 2,
            "issue_type": "task",
            "dependencies": [{"issue_id": name, "depends_on_id": on, "type": "waits-for"}] if on else [],
        }
        for name, on in zip(names, [*names[1:], None], strict=True)
    ]
    file = tmp_path / "thousand.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    done = workspace.run("import", file)
    assert done.returncode == 0, done.stderr
    return names


def test_a_thousand_issues_are_judged_completely(opened: Opened, beads_workspace: Workspace, tmp_path: Path) -> None:
    """bd's limit omits none, and a cycle through all of them is found."""
    names = thousand(beads_workspace, tmp_path)
    alice = opened()
    with pytest.raises(Refused) as refused:
        alice.issues.guarded_dependency(names[-1], names[0], "blocks", "alice")
    assert refused.value.decision.rule == "beads.cycle"
    made = alice.issues.guarded_create("one more", "task", 2, "alice", dependencies=[names[0]])
    assert isinstance(made, BeadsIssue)
    alice.issues.guarded_close(names[-1], "alice")
    assert not alice.issues.validate_update(names[-3], {"status": "closed"}, "alice")
    assert len(beads_workspace.all_issues()) == 1001
