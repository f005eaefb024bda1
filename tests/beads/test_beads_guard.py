"""BeadsGuard on real issues: a permitted change is stored and recorded; a refused one is reported, recorded and
not stored.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bonobofs.beads import IssueStore, find_beads
from bonobofs.beads.bd_runner import hold_lock
from bonobofs.errors import BeadsError, TrailError
from bonobofs.guards import BeadsGuard, FileGuard
from bonobofs.policy.decision import Code, Refused
from bonobofs.session import open_session
from bonobofs.state import agent_registry
from bonobofs.state.database import Database
from tests.beads.conftest import Opened
from tests.support.beads_workspace import Workspace

LEAD = """
default = "allow"
[role.lead]
write = ["**"]
beads = ["create", "update", "close", "reopen", "epic", "dep", "label", "comment"]
[role.worker]
write = ["**"]
beads = ["create", "update", "comment"]
[role.reader]
write = ["**"]
"""

Wrapped = Callable[[str], Path]


def refused(call: Callable[[], object], rule: str, code: Code = Code.BEADS) -> Refused:
    with pytest.raises(PermissionError) as caught:
        call()
    assert isinstance(caught.value, Refused)
    assert (caught.value.decision.rule, caught.value.decision.code) == (rule, code)
    return caught.value


@pytest.fixture
def wrapped(bd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wrapped:
    """wrapped(text) runs bd through a shell script, in which $BD is the real one; it gives the list of the calls."""

    def wrap(text: str) -> Path:
        script = tmp_path / "wrapped" / "bd"
        script.parent.mkdir(exist_ok=True)
        calls = script.with_name("calls")
        calls.touch()
        script.write_text(f'#!/bin/sh\nBD={bd}\necho "$1 $2" >> {calls}\n{text}\nexec "$BD" "$@"\n')
        script.chmod(0o755)
        monkeypatch.setenv("BONOBOFS_BD", str(script))
        return calls

    return wrap


def test_the_names_and_arguments_are_those_of_the_contract() -> None:
    def arguments(name: str) -> list[str]:
        return list(inspect.signature(getattr(BeadsGuard, name)).parameters)[1:]

    assert arguments("validate_create") == ["title", "issue_type", "labels", "agent", "assignee", "parent"]
    assert arguments("validate_update") == ["issue_id", "changes", "agent"]
    assert arguments("validate_dependency") == ["blocked_id", "blocker_id", "dep_type", "agent"]
    assert arguments("guarded_create")[:4] == ["title", "issue_type", "priority", "agent"]
    assert arguments("guarded_update")[:2] == ["issue_id", "agent"]
    assert arguments("guarded_close") == ["issue_id", "agent", "reason"]
    assert arguments("guarded_dependency") == ["blocked_id", "blocker_id", "dep_type", "agent"]


def test_a_created_issue_has_every_requested_field(opened: Opened, beads_workspace: Workspace) -> None:
    """Under the agent's name, with its identity in the metadata, and one entry with the issue's id."""
    alice = opened()
    epic = beads_workspace.create("Everything", "--type=epic")
    made = alice.issues.guarded_create(
        "-x: a title",
        "bug",
        "P0",
        "alice",
        labels=["phase:build", "unit:3"],
        assignee="alice",
        parent=epic,
        description="@/etc/passwd is text\n",
        design="d",
        acceptance="a",
        notes="n",
    )
    shown = beads_workspace.issue(made.id)
    told = {
        key: shown[key] for key in ("title", "issue_type", "status", "priority", "assignee", "created_by", "parent")
    }
    assert told == {
        "title": "-x: a title",
        "issue_type": "bug",
        "status": "open",
        "priority": 0,
        "assignee": "alice",
        "created_by": "alice",
        "parent": epic,
    }
    assert shown["description"].startswith("@/etc/passwd is text")
    assert sorted(shown["labels"]) == ["phase:build", "unit:3"]
    assert alice.session.session.agent_id in shown["metadata"].values()
    intent, outcome = alice.entries()
    assert (intent.guard, intent.operation, intent.tool, intent.kind) == (
        "beads",
        "create_issue",
        "guarded_create",
        "intent",
    )
    assert (intent.details["title"], intent.details["parent"]) == ("-x: a title", epic)
    assert (outcome.result, outcome.details["issue"]) == ("allowed", made.id)


def test_a_validation_returns_and_records_the_decision_without_a_change(
    opened: Opened, beads_workspace: Workspace
) -> None:
    alice = opened()
    one, other = beads_workspace.create("One"), beads_workspace.create("Other", "--assignee=bob")
    before = beads_workspace.all_issues()
    issues = alice.issues
    allowed = [
        issues.validate_create("A", "task", ["phase:a"], "alice"),
        issues.validate_create("A?", "message", [], alice.session.session.agent_id, "human", one),
        issues.validate_update(one, {"status": "in_progress", "assignee": "alice"}, "alice"),
        issues.validate_dependency(one, other, "blocks", "alice"),
    ]
    assert all(allowed)
    assert [each.rule for each in allowed] == [
        f"role:agent:beads:{word}" for word in ("create", "create", "update", "dep")
    ]
    denied = [
        issues.validate_create(" ", "task", [], "alice"),
        issues.validate_create("A", "task", ["a"], "alice"),
        issues.validate_create("A?", "message", [], "alice"),
        issues.validate_create("A", "task", [], "alice", parent="gt-none"),
        issues.validate_update(other, {"priority": 0}, "alice"),
        issues.validate_update(one, {"status": "done"}, "alice"),
        issues.validate_dependency(one, one, "blocks", "alice"),
    ]
    rules = ["title", "label", "message", "exists", "owner", "status", "cycle"]
    assert [each.rule for each in denied] == [f"beads.{rule}" for rule in rules]
    assert not any(denied)
    assert all(each.reason and each.instead for each in denied)
    assert beads_workspace.all_issues() == before
    calls = alice.calls()
    assert [(entry.result, entry.rule) for entry in calls] == [
        *[("allowed", each.rule) for each in allowed],
        *[("denied", each.rule) for each in denied],
    ]
    assert (calls[2].details["issue"], calls[3].details["depends_on"]) == (one, other)
    assert f"{other} is assigned to bob" in denied[4].about


def test_the_name_of_another_agent_is_refused_with_an_alert_before_bd_runs(opened: Opened, wrapped: Wrapped) -> None:
    calls = wrapped("")
    alice = opened()
    for call in (
        lambda: alice.issues.guarded_create("A", "task", 2, "bob"),
        lambda: alice.issues.guarded_update("gt-1", "bob", priority=0),
        lambda: alice.issues.guarded_comment("gt-1", "text", ""),
    ):
        refused(call, "identity", Code.IDENTITY)
    assert alice.issues.validate_create("A", "task", [], "bob").code is Code.IDENTITY
    assert {entry.details["claimed"] for entry in alice.calls()} == {"bob", ""}
    assert len([entry for entry in alice.entries() if entry.kind == "alert"]) >= 3
    assert calls.read_text() == ""


def test_an_operation_outside_the_role_is_refused_before_bd_runs(opened: Opened, wrapped: Wrapped) -> None:
    calls = wrapped("")
    reader, worker, undefined = (opened(role, role=role, policy=LEAD) for role in ("reader", "worker", "nobody"))
    refused(lambda: reader.issues.guarded_create("A", "task", 2, "reader"), "role:reader:beads:create", Code.ROLE)
    refused(lambda: undefined.issues.guarded_create("A", "task", 2, "nobody"), "role", Code.ROLE)
    refused(lambda: worker.issues.guarded_create("A", "epic", 2, "worker"), "role:worker:beads:epic", Code.ROLE)
    assert not worker.issues.validate_create("A", "epic", [], "worker")
    lacks = "role:worker:beads:close"
    refused(lambda: worker.issues.guarded_close("gt-1", "worker"), lacks, Code.ROLE)
    refused(lambda: worker.issues.guarded_update("gt-1", "worker", status="done"), lacks, Code.ROLE)
    refused(lambda: worker.issues.guarded_update("gt-1", "worker", status="closed"), lacks, Code.ROLE)
    refused(lambda: worker.issues.guarded_reopen("gt-1", "worker"), "role:worker:beads:reopen", Code.ROLE)
    dependent = "role:worker:beads:dep"
    refused(lambda: worker.issues.guarded_create("A", "task", 2, "worker", dependencies=["gt-1"]), dependent, Code.ROLE)
    assert calls.read_text() == ""


def test_an_invalid_request_is_refused_before_bd_runs(opened: Opened, wrapped: Wrapped) -> None:
    calls = wrapped("")
    alice = opened()
    refused(lambda: alice.issues.guarded_create(" ", "task", 2, "alice"), "beads.title")
    refused(lambda: alice.issues.guarded_create("A", "message", 2, "alice"), "beads.message")
    assert alice.issues.validate_create("A", "task", ["wild"], "alice").rule == "beads.label"
    assert calls.read_text() == ""


def test_the_entry_of_a_call_is_bounded(opened: Opened, wrapped: Wrapped) -> None:
    """For any request."""
    wrapped("")
    alice = opened()
    much: list[dict[str, Any]] = [
        {"labels": ["unit:" + "x" * 1000] * 5000},
        {"description": "x" * 1_000_000},
        {"strange" * 1000: "x"},
        {f"strange{number}": {"x": "y" * 1000} for number in range(1000)},
        {"parent": "gt-" * 100_000},
        {"dependencies": ["gt-" * 1000] * 100},
    ]
    for fields in much:
        with pytest.raises(Refused):
            alice.issues.guarded_create("A", "task", 10**3000, "alice", **fields)
        with pytest.raises(Refused):
            alice.issues.guarded_update("gt-" * 100_000, "alice", **fields)
    assert len(alice.calls()) == 2 * len(much)
    assert max(len(line) for line in alice.trail.read_bytes().splitlines()) < 20_000


def test_a_role_with_epics_and_reopening_may_do_both(opened: Opened, beads_workspace: Workspace) -> None:
    lead = opened("harmbe", role="lead", policy=LEAD)
    epic = lead.issues.guarded_create("All of it", "epic", 1, "harmbe")
    lead.issues.guarded_close(epic.id, "harmbe", reason="-r: not now")
    assert beads_workspace.issue(epic.id)["close_reason"] == "-r: not now"
    lead.issues.guarded_reopen(epic.id, "harmbe", "after all")
    shown = beads_workspace.issue(epic.id)
    assert (shown["issue_type"], shown["status"]) == ("epic", "open")
    refused(lambda: opened().issues.guarded_reopen(epic.id, "alice"), "role:agent:beads:reopen", Code.ROLE)


def test_a_message_is_permanent_and_listed(opened: Opened, beads_workspace: Workspace) -> None:
    """bd itself makes an ephemeral one that is not listed."""
    alice = opened()
    asked = alice.issues.guarded_create("May I?", "message", 2, "alice", assignee="human")
    shown = beads_workspace.all_issues()[asked.id]
    assert (shown["issue_type"], shown["assignee"], shown.get("ephemeral")) == ("message", "human", None)
    refused(lambda: alice.issues.guarded_create("May I?", "message", 2, "alice"), "beads.message")
    refused(lambda: alice.issues.guarded_close(asked.id, "alice"), "beads.owner")
    alice.issues.guarded_comment(asked.id, "-- I ask because of --force", "alice")
    said = [comment["text"] for comment in beads_workspace.json("comments", asked.id)]
    assert said == ["-- I ask because of --force"]


def test_a_status_is_judged_before_it_is_mapped(opened: Opened, beads_workspace: Workspace) -> None:
    """`done` is bd's closed, and only an issue in progress may become done."""
    alice = opened()
    one = alice.issues.guarded_create("A", "task", 2, "alice").id
    refused(lambda: alice.issues.guarded_update(one, "alice", status="done"), "beads.status")
    alice.issues.guarded_update(one, "alice", status="in_progress")
    refused(lambda: alice.issues.guarded_update(one, "alice", status="open"), "beads.status")
    alice.issues.guarded_update(one, "alice", status="done", notes="ready")
    shown = beads_workspace.issue(one)
    assert (shown["status"], shown["notes"]) == ("closed", "ready")
    for word in ("open", "in_progress", "done", "blocked"):
        refused(partial(alice.issues.guarded_update, one, "alice", status=word), "beads.status")
    alice.issues.guarded_update(one, "alice", status="closed")
    alice.issues.guarded_close(one, "alice", reason="a better reason")
    assert beads_workspace.issue(one) == shown
    assert [entry.details.get("changed") for entry in alice.entries()[-2:]] == [None, False]


def test_an_issue_belongs_to_the_identity_of_its_assignee(
    opened: Opened, beads_workspace: Workspace, home: Path
) -> None:
    """A later agent with the same label does not own it. An agent that gets the issue assigned does."""
    alice, bob = opened("alice"), opened("bob")
    one = alice.issues.guarded_create("A", "task", 2, "alice", assignee="alice").id
    refused(lambda: bob.issues.guarded_update(one, "bob", priority=0), "beads.owner")
    refused(lambda: bob.issues.guarded_label(one, "bob", add=["phase:a"]), "beads.owner")
    alice.issues.guarded_update(one, "alice", assignee="bob")
    refused(lambda: alice.issues.guarded_update(one, "alice", assignee="alice"), "beads.owner")
    bob.issues.guarded_update(one, "bob", priority=0, assignee="")
    alice.issues.guarded_update(one, "alice", assignee="carol")
    carol = opened("carol")
    carol.issues.guarded_update(one, "carol", assignee="carol", labels=["unit:a"])
    carol.issues.guarded_update(one, "carol", priority=4)
    shown = beads_workspace.issue(one)
    assert (shown["priority"], shown["assignee"], shown["labels"]) == (4, "carol", ["unit:a"])
    assert carol.session.session.agent_id in shown["metadata"].values()


def test_a_reused_agent_label_inherits_no_issue(opened: Opened, beads_workspace: Workspace, home: Path) -> None:
    """An assignee that was set without the gate is compared by the label."""
    with Database.open(home) as database:
        agent_registry.add(database, "dora")
        first = agent_registry.identity_of(database, "dora")
    alice = opened()
    one = alice.issues.guarded_create("A", "task", 2, "alice", assignee="dora").id
    with Database.open(home) as database:
        agent_registry.remove(database, "dora")
        agent_registry.add(database, "dora")
    later = opened("dora")
    assert later.session.session.agent_id != first
    refused(lambda: later.issues.guarded_update(one, "dora", priority=0), "beads.owner")
    beads_workspace.run("update", one, "--assignee=erin")
    opened("erin").issues.guarded_update(one, "erin", priority=0)


def test_texts_of_another_agent_cannot_be_changed(opened: Opened, beads_workspace: Workspace) -> None:
    """Title and texts belong to the creator; status, priority and labels to the assignee."""
    alice, bob = opened("alice"), opened("bob")
    persons = beads_workspace.create("A person's", "--description=said", "--notes=kept")
    made = bob.issues.guarded_create("Bob's", "task", 2, "bob")
    for one in (persons, made.id):
        for field in ("title", "description", "design", "acceptance", "notes"):
            refused(partial(alice.issues.guarded_update, one, "alice", **{field: "x"}), "beads.author")
        alice.issues.guarded_update(one, "alice", status="in_progress", priority=1, add_labels=["stage:x"])
    bob.issues.guarded_update(made.id, "bob", title="Bob's, again")
    shown = beads_workspace.issue(persons)
    assert (shown["title"], shown["description"], shown["notes"]) == ("A person's", "said", "kept")


def test_fields_that_control_bd_are_refused(opened: Opened, beads_workspace: Workspace) -> None:
    """A chosen id would overwrite the issue that has it."""
    alice = opened()
    one = beads_workspace.create("Kept")
    beads_workspace.run("close", one)
    for field in ("id", "force", "db", "repo", "file", "graph", "metadata", "body_file", "ephemeral", "actor"):
        refused(partial(alice.issues.guarded_create, "New", "task", 2, "alice", **{field: one}), "beads.field")
        refused(partial(alice.issues.guarded_update, one, "alice", **{field: one}), "beads.field")
    assert list(beads_workspace.all_issues()) == [one]
    assert beads_workspace.issue(one)["status"] == "closed"


def test_labels_can_be_added_and_removed_except_phases(opened: Opened, beads_workspace: Workspace) -> None:
    alice = opened()
    one = alice.issues.guarded_create("A", "task", 2, "alice", labels=["phase:a", "unit:b"]).id
    alice.issues.guarded_label(one, "alice", add=["stage:c"], remove=["unit:b"])
    refused(lambda: alice.issues.guarded_label(one, "alice", remove=["phase:a"]), "beads.phase")
    refused(lambda: alice.issues.guarded_label(one, "alice", add=["urgent"]), "beads.label")
    refused(lambda: alice.issues.guarded_update(one, "alice", labels=[]), "beads.phase")
    assert sorted(beads_workspace.issue(one)["labels"]) == ["phase:a", "stage:c"]
    assert [entry.operation for entry in alice.calls()][1] == "label_issue"


def test_dependencies_are_added_and_removed_without_cycles(opened: Opened, beads_workspace: Workspace) -> None:
    alice = opened()
    a, b, c = (beads_workspace.create(title) for title in "abc")
    add, remove = alice.issues.guarded_dependency, alice.issues.guarded_remove_dependency
    add(a, b, "waits-for", "alice")
    add(b, c, "parent", "alice")
    refused(lambda: add(c, a, "blocks", "alice"), "beads.cycle")
    refused(lambda: add(b, a, "parent", "alice"), "beads.parent")
    refused(lambda: add(a, "gt-none", "blocks", "alice"), "beads.exists")
    refused(lambda: add(a, c, "tracks", "alice"), "beads.dependency")
    told = {(edge["depends_on_id"], edge["type"]) for edge in beads_workspace.all_issues()[a]["dependencies"]}
    assert told == {(b, "waits-for")}
    blocked = refused(lambda: alice.issues.guarded_close(a, "alice"), "beads.blockers")
    assert b in str(blocked)
    refused(lambda: alice.issues.guarded_update(a, "alice", status="closed"), "beads.blockers")
    refused(lambda: alice.issues.guarded_close(c, "alice"), "beads.children")
    remove(a, b, "alice")
    remove(a, b, "alice")
    add(c, a, "blocks", "alice")
    alice.issues.guarded_close(a, "alice")
    assert [entry.operation for entry in alice.calls()].count("remove_dependency") == 2


def test_an_issue_is_created_with_all_its_dependencies_or_not_at_all(
    opened: Opened, beads_workspace: Workspace
) -> None:
    """bd stores the issue, reports success and omits the edges."""
    alice = opened()
    epic = beads_workspace.create("Epic", "--type=epic")
    one, other = beads_workspace.create("One"), beads_workspace.create("Other")
    made = alice.issues.guarded_create("New", "task", 2, "alice", dependencies=[one, f"blocks:{other}"])
    edges = {
        (e["issue_id"], e["depends_on_id"])
        for i in beads_workspace.all_issues().values()
        for e in i.get("dependencies", ())
    }
    assert edges == {(made.id, one), (other, made.id)}
    before = set(beads_workspace.all_issues())
    refused(lambda: alice.issues.guarded_create("New", "task", 2, "alice", dependencies=["gt-none"]), "beads.exists")
    with pytest.raises(BeadsError, match="epic"):
        alice.issues.guarded_create("New", "task", 2, "alice", dependencies=[one, epic])
    assert set(beads_workspace.all_issues()) == before
    assert (alice.entries()[-1].result, alice.entries()[-1].details["undone"]) == ("error", True)


def test_a_conflicting_change_without_the_gate_is_rolled_back(
    opened: Opened, beads_workspace: Workspace, wrapped: Wrapped
) -> None:
    """Another user closes the cycle, or sets another parent, at the same moment."""
    a, b, c, d, e = (beads_workspace.create(title) for title in "abcde")
    wrapped(
        f"""case "$*" in
        *"dep add"*blocks*) "$BD" dep add {b} {a} --type=waits-for;;
        *"dep add"*parent-child*) "$BD" dep add {c} {e} --type=parent-child;;
        esac"""
    )
    alice = opened()
    refused(lambda: alice.issues.guarded_dependency(a, b, "blocks", "alice"), "beads.cycle")
    refused(lambda: alice.issues.guarded_dependency(c, d, "parent", "alice"), "beads.parent")
    edges = [edge for issue in beads_workspace.all_issues().values() for edge in issue.get("dependencies", ())]
    assert {(edge["issue_id"], edge["depends_on_id"]) for edge in edges} == {(b, a), (c, e)}
    ends = [entry for entry in alice.entries() if entry.kind == "outcome"]
    assert [(end.result, end.details["undone"], end.details["rule"]) for end in ends] == [
        ("error", True, "beads.cycle"),
        ("error", True, "beads.parent"),
    ]


def test_an_issue_with_a_worktree_gets_no_new_blocker(opened: Opened, beads_workspace: Workspace) -> None:
    alice = opened()
    one, blocker, later = (beads_workspace.create(title) for title in ("one", "blocker", "later"))
    alice.issues.guarded_dependency(one, blocker, "blocks", "alice")
    waiting = refused(lambda: alice.issues.begin_work(one, "alice", "w-1"), "beads.waiting")
    assert f"It waits for {blocker}." in str(waiting)
    alice.issues.guarded_close(blocker, "alice")
    assert alice.issues.begin_work(one, "alice", "w-1").id == one
    alice.issues.guarded_remove_dependency(one, blocker, "alice")
    refused(lambda: alice.issues.guarded_dependency(one, later, "blocks", "alice"), "beads.begun")
    alice.issues.guarded_dependency(one, later, "related", "alice")


def test_each_operation_takes_one_list_before_and_one_after(
    opened: Opened, beads_workspace: Workspace, wrapped: Wrapped
) -> None:
    """The rules need no other call of bd, which is by far the slowest part."""
    one, other = beads_workspace.create("one"), beads_workspace.create("other")
    calls = wrapped("")
    issues = opened().issues
    issues.validate_create("A", "task", [], "alice")

    def made_by(call: Callable[[], object]) -> list[str]:
        calls.write_text("")
        call()
        return [line.replace("--json", "").strip() for line in calls.read_text().splitlines()]

    create = partial(issues.guarded_create, "A", "task", 2, "alice")
    assert made_by(create) == ["list", "create", "list"]
    assert made_by(partial(create, labels=["phase:a"], assignee="alice", parent=other)) == ["list", "create", "list"]
    assert made_by(lambda: issues.guarded_update(one, "alice", priority=0, assignee="alice")) == [
        "list",
        "update",
        "list",
    ]
    assert made_by(lambda: issues.guarded_update(one, "alice", priority=0)) == ["list"]
    assert made_by(lambda: issues.validate_update(one, {"priority": 0}, "alice")) == ["list"]
    assert made_by(lambda: issues.guarded_dependency(one, other, "blocks", "alice")) == ["list", "dep add", "list"]
    assert made_by(lambda: issues.guarded_remove_dependency(one, other, "alice")) == ["list", "dep remove", "list"]
    assert made_by(lambda: issues.guarded_comment(one, "text", "alice")) == ["list", "comments add", "comments"]
    assert made_by(lambda: issues.guarded_close(one, "alice")) == ["list", "close", "list"]


def both(first: Callable[[], object], second: Callable[[], object]) -> list[str]:
    """What came of two calls that are made at the same moment, the rule for a refusal."""
    ready = threading.Barrier(2)
    found: list[str] = []

    def run(call: Callable[[], object]) -> None:
        ready.wait()
        try:
            call()
        except Refused as error:
            found.append(error.decision.rule)
        else:
            found.append("done")

    threads = [threading.Thread(target=run, args=(call,)) for call in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(found)


def test_one_of_two_agents_that_claim_an_issue_gets_it(opened: Opened, beads_workspace: Workspace) -> None:
    alice, bob = opened("alice"), opened("bob")
    for _ in range(5):
        one = beads_workspace.create("one")
        taken = both(
            partial(alice.issues.guarded_update, one, "alice", assignee="alice", status="in_progress"),
            partial(bob.issues.guarded_update, one, "bob", assignee="bob", status="in_progress"),
        )
        assert taken == ["beads.owner", "done"]


@pytest.mark.parametrize("kinds", [("waits-for", "waits-for"), ("parent", "blocks")])
def test_two_concurrent_edges_cannot_close_a_cycle(
    opened: Opened, beads_workspace: Workspace, kinds: tuple[str, str]
) -> None:
    alice, bob = opened("alice"), opened("bob")
    for _ in range(3):
        a, b = beads_workspace.create("a"), beads_workspace.create("b")
        tied = both(
            partial(alice.issues.guarded_dependency, a, b, kinds[0], "alice"),
            partial(bob.issues.guarded_dependency, b, a, kinds[1], "bob"),
        )
        assert tied == ["beads.cycle", "done"]


def test_file_calls_do_not_wait_for_issue_calls(opened: Opened, beads_workspace: Workspace, home: Path) -> None:
    alice = opened(policy=LEAD, role="lead")
    with FileGuard(alice.session) as files:
        with hold_lock(home, find_beads(beads_workspace.directory), 5.0):
            creating = threading.Thread(target=alice.issues.guarded_create, args=("A", "task", 2, "alice"))
            creating.start()
            files.guarded_write_file("notes.md", "text\n", "alice")
            assert creating.is_alive()
        creating.join()
    assert [issue["title"] for issue in beads_workspace.all_issues().values()] == ["A"]


def test_a_change_is_not_made_if_its_record_fails(beads: IssueStore, beads_workspace: Workspace) -> None:
    one = beads_workspace.create("one")

    def work() -> None:
        with open_session(beads_workspace.directory, agent="alice") as session:
            issues = BeadsGuard(session, beads)
            session.guard.trail.close()
            refused(lambda: issues.guarded_close(one, "alice"), "trail", Code.UNRECORDED)
            refused(lambda: issues.guarded_create("A", "task", 2, "alice"), "trail", Code.UNRECORDED)

    with pytest.raises(TrailError):
        work()
    assert [issue["status"] for issue in beads_workspace.all_issues().values()] == ["open"]


def test_a_missing_bd_is_an_error_with_the_remedy(
    opened: Opened, beads_workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = opened()
    monkeypatch.setenv("BONOBOFS_BD", "/nowhere/bd")
    with pytest.raises(BeadsError, match="install bd"):
        alice.issues.guarded_create("A", "task", 2, "alice")
    with pytest.raises(BeadsError, match="install bd"):
        alice.issues.validate_update("gt-1", {"priority": 0}, "alice")
    first, second = alice.calls()
    assert (first.result, first.operation, "install bd" in first.details["error"]) == ("error", "create_issue", True)
    assert (second.result, second.details["issue"]) == ("error", "gt-1")
