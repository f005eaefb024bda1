"""Each rule for issues permits once and refuses once. No bd runs."""

from __future__ import annotations

from typing import Any

import pytest

from bonobofs.beads import dependency_rules, issue_rules, refusals
from bonobofs.beads.dependency_rules import NEW
from bonobofs.beads.issue import CREATOR_ID, WORKTREE, Actor, BeadsIssue, Edge, assignment
from bonobofs.beads.issue_rules import IssueChanges, IssueRequest
from bonobofs.beads.refusals import Fault
from bonobofs.errors import UsageError
from bonobofs.policy.role_lists import Conventions
from tests.beads.issues import ALICE, BOB, KNOWN, issue, issues, of, verdict

judge_begin = verdict(dependency_rules.judge_begin)
judge_close = verdict(issue_rules.judge_close)
judge_comment = verdict(issue_rules.judge_comment)
judge_concurrent = verdict(dependency_rules.judge_concurrent)
judge_dependency = verdict(dependency_rules.judge_dependency)
judge_removal = verdict(dependency_rules.judge_removal)
judge_reopen = verdict(issue_rules.judge_reopen)
judge_request = verdict(issue_rules.judge_request)
judge_update = verdict(issue_rules.judge_update)

SEVEN = ("task", "epic", "bug", "feature", "chore", "decision", "message")


def refused(found: object, rule: str) -> Fault:
    assert isinstance(found, Fault), found
    assert found.refusal.rule == f"beads.{rule}"
    assert found.refusal.reason
    assert found.refusal.instead
    return found


def create(*there: BeadsIssue, title: str = "Do it", kind: str = "task", **more: Any) -> Fault | tuple[Edge, ...]:
    request = IssueRequest(title, kind, **more)
    return judge_request(request, KNOWN) or verdict(issue_rules.judge_create)(issues(*there), request, ALICE)


def update(one: BeadsIssue, *others: BeadsIssue, **changes: Any) -> Fault | IssueChanges | None:
    return judge_update(issues(one, *others), one.id, changes, ALICE, KNOWN)


def priority_by(who: Actor, one: BeadsIssue) -> Fault | IssueChanges | None:
    return judge_update(issues(one), one.id, {"priority": 0}, who, KNOWN)


# Creating


@pytest.mark.parametrize(
    "title", ["Do it", "x" * 500, "-x", "Gr\u00fc\u00dfe \U0001f468\u200d\U0001f469\u200d\U0001f467", "a..b: [c]"]
)
def test_a_title_is_one_line(title: str) -> None:
    """A title of one plain line passes, in any language."""
    assert create(title=title) == ()


@pytest.mark.parametrize(
    "title",
    ["", "   ", "\t", "a\nb", "a\x1b[2Jb", "a\rb", "a\0b", "x" * 501, "ä" * 251, "a\udcff", "a\u202eb", "a\u2028b"],
)
def test_an_invalid_title_is_refused(title: str) -> None:
    """bd accepts blanks, newlines and escape sequences; the gate does not."""
    refused(create(title=title), "title")


@pytest.mark.parametrize("kind", [kind for kind in SEVEN if kind != "message"])
def test_the_types_of_the_policy_pass(kind: str) -> None:
    """The role determines the right to create epics."""
    assert create(kind=kind) == ()


@pytest.mark.parametrize(
    "kind", ["", "TASK", "story", "spike", "gate", "molecule", "event", "milestone", "enhancement", "dec", "docs"]
)
def test_other_types_of_bd_are_refused(kind: str) -> None:
    """bd accepts six more types and two aliases."""
    fault = refused(create(kind=kind), "type")
    assert fault.refusal.instead == "Use task, epic, bug, feature, chore, decision or message."


def test_types_and_prefixes_come_from_the_policy() -> None:
    known = Conventions(("spike",), ("area",), "maria")
    assert judge_request(IssueRequest("Look", "spike", ("area:ui",)), known) is None
    refused(judge_request(IssueRequest("Look", "task"), known), "type")
    fault = refused(judge_request(IssueRequest("Look", "spike", ("phase:1",)), known), "label")
    assert fault.refusal.instead == "Write area:NAME."


@pytest.mark.parametrize("label", ["phase:design", "unit:unit-3", "stage:a.b", "type:api", "phase:a:b", "unit:\u00fc"])
def test_labels_of_the_conventions_pass(label: str) -> None:
    assert create(labels=(label,)) == ()


@pytest.mark.parametrize(
    "label",
    ["design", "phase", "phase:", "Phase:x", "phase: x", "phase:a,b", "phase:a b",
        'phase:a"b', "phase:\n", "area:x", "", " phase:x",
     "provides:x", "discovered-from:gt-1", "phase:" + "x" * 201, "phase:\x1b", "unit:a\u200b"],
)  # fmt: skip
def test_other_labels_are_refused(label: str) -> None:
    """bd accepts any, and splits some at commas. Gorilla Troop accepted labels without a colon."""
    refused(create(labels=("phase:a", label)), "label")
    refused(update(issue("gt-1"), add_labels=[label]), "label")
    refused(update(issue("gt-1"), labels=[label]), "label")


def test_a_message_is_assigned_to_the_human() -> None:
    assert create(kind="message", assignee="human") == ()
    for assignee in ("", "alice", "Human", "humans"):
        refused(create(kind="message", assignee=assignee), "message")


def test_a_message_stays_assigned_to_the_human() -> None:
    """An update cannot reassign it."""
    stray = issue("gt-1", issue_type="message")
    refused(update(stray, assignee="bob"), "message")
    assert update(stray, assignee="human") == IssueChanges({"assignee": "human"})
    refused(update(issue("gt-1", issue_type="message", assignee="human"), assignee=""), "owner")


@pytest.mark.parametrize("priority", [0, 4, "0", "P3", "p1"])
def test_priorities_go_from_0_to_4(priority: int | str) -> None:
    assert create(priority=priority) == ()


@pytest.mark.parametrize("priority", [5, -1, 9, "high", "", "P9", True, 1.0, "\u0663"])
def test_other_priorities_are_refused(priority: Any) -> None:
    refused(create(priority=priority), "priority")
    refused(create(priority=-(10**5000)), "priority")
    refused(update(issue("gt-1"), priority=priority), "priority")


def test_a_text_must_fit_into_an_argument() -> None:
    """Linux accepts less than 128 KiB, and NUL ends an argument."""
    assert create(texts=(("description", "line\n\tline \x1b @/etc/passwd"), ("notes", "x" * 100_000))) == ()
    for text in ("x" * 100_001, "a\0b", "\udcff"):
        assert "description" in refused(create(texts=(("description", text),)), "text").about
        refused(update(issue("gt-1"), notes=text), "text")
        refused(judge_comment(issues(issue("gt-1")), "gt-1", text), "text")
        refused(judge_close(issues(issue("gt-1")), "gt-1", text, ALICE), "text")


def test_the_size_of_one_call_is_limited() -> None:
    """Other callers wait while it is judged."""
    hundred = tuple(f"unit:{number}" for number in range(100))
    assert create(labels=hundred) == ()
    refused(create(labels=(*hundred, "unit:x")), "many")
    refused(create(dependencies=("gt-1",) * 101), "many")
    refused(update(issue("gt-1"), add_labels=hundred, remove_labels=["a"]), "many")


@pytest.mark.parametrize("name", ["x" * 65, " bob", "bob\n", "b\x00b"])
def test_an_assignee_is_a_name(name: str) -> None:
    refused(create(assignee=name), "assignee")
    refused(update(issue("gt-1"), assignee=name), "assignee")
    assert create(assignee="bob") == ()


def test_the_parent_of_a_new_issue_must_exist_and_be_open() -> None:
    """bd refuses a missing parent. It accepts a closed one, and then has a closed epic with open children."""
    assert create(issue("gt-1"), parent="gt-1") == ()
    refused(create(issue("gt-1"), parent="gt-2"), "exists")
    refused(create(issue("gt-1", status="closed"), parent="gt-1"), "parent_closed")


def test_dependencies_of_a_new_issue_are_judged_one_by_one() -> None:
    there = [issue("gt-1"), issue("gt-2"), issue("gt-3", **of(BOB))]
    found = create(*there, dependencies=("gt-1", "blocks:gt-2", "discovered-from:gt-3"))
    assert found == (Edge(NEW, "gt-1", "blocks"), Edge("gt-2", NEW, "blocks"), Edge(NEW, "gt-3", "discovered-from"))
    assert create(*there, dependencies=("depends-on:gt-1", "blocked-by:gt-1")) == (Edge(NEW, "gt-1", "blocks"),)
    refused(create(*there, dependencies=("gt-9",)), "exists")
    refused(create(*there, dependencies=("",)), "exists")
    refused(create(*there, dependencies=("blocks:gt-3",)), "owner")
    for strange in ("tracks:gt-1", ":gt-1", "external:proj:cap", "Blocks:gt-1"):
        refused(create(*there, dependencies=(strange,)), "dependency")
    refused(create(*there, dependencies=("gt-1", "waits-for:gt-1")), "pair")
    refused(create(*there, parent="gt-1", dependencies=("parent:gt-2",)), "parent")
    assert create(*there, parent="gt-1", dependencies=("parent-child:gt-1",)) == ()


def test_a_new_issue_cannot_close_a_cycle() -> None:
    there = [issue("gt-1", ("blocks", "gt-2")), issue("gt-2"), issue("gt-3", status="in_progress")]
    refused(create(*there, dependencies=("blocks:gt-2", "gt-1")), "cycle")
    refused(create(*there, dependencies=("gt-1", "blocks:gt-1")), "cycle")
    refused(create(*there, parent="gt-1", dependencies=("blocks:gt-1",)), "cycle")
    refused(create(*there, dependencies=("blocks:gt-3",)), "begun")


# Updating whose


def test_own_and_unassigned_issues_may_be_updated() -> None:
    for one in (issue("gt-1"), issue("gt-1", **of(ALICE)), issue("gt-1", assignee="alice")):
        assert update(one, priority=0) == IssueChanges({"priority": 0})


def test_issues_of_others_may_not_be_updated_closed_labelled_or_reopened() -> None:
    for others in (issue("gt-1", **of(BOB)), issue("gt-1", assignee="bob"), issue("gt-1", assignee="human")):
        every = issues(others, issue("gt-2"))
        refused(update(others, priority=0), "owner")
        refused(update(others, add_labels=["phase:a"]), "owner")
        refused(update(others, assignee="alice"), "owner")
        refused(judge_close(every, "gt-1", "", ALICE), "owner")
        refused(judge_reopen(every, "gt-1", "", ALICE), "owner")
        refused(judge_dependency(every, "gt-1", "gt-2", "blocks", ALICE), "owner")
        refused(judge_removal(every, "gt-1", "gt-2", ALICE), "owner")
        assert isinstance(judge_comment(every, "gt-1", "May I?"), BeadsIssue)
        assert isinstance(judge_dependency(every, "gt-2", "gt-1", "blocks", ALICE), Edge)


def test_the_identity_counts_and_not_a_reused_label() -> None:
    """An agent that gets the label later does not own the issues of the first."""
    later = Actor("alice", "33333333-3333-4333-8333-333333333333")
    one = issue("gt-1", **of(ALICE))
    refused(priority_by(later, one), "owner")
    refused(judge_update(issues(issue("gt-1")), "gt-1", {"title": "Mine"}, later, KNOWN), "author")
    renamed = Actor("alicia", ALICE.id)
    assert priority_by(renamed, one) == IssueChanges({"priority": 0})


def test_an_assignee_set_without_the_gate_is_compared_by_label() -> None:
    """The stored identity applies to the assignee of that time only."""
    one = issue("gt-1", assignee="bob", metadata=assignment("alice", ALICE.id))
    refused(update(one, priority=0), "owner")
    assert priority_by(BOB, one) == IssueChanges({"priority": 0})


def test_claiming_an_issue_assigned_by_label_stores_the_identity() -> None:
    """It was assigned before the agent was known, or with bd itself."""
    assert update(issue("gt-1", assignee="alice"), assignee="alice") == IssueChanges({"assignee": "alice"})
    assert update(issue("gt-1", **of(ALICE)), assignee="alice") is None


@pytest.mark.parametrize("name", ["", "gt-2", "1", "gt", "GT-1", "gt-1 ", "--help"])
def test_an_issue_id_must_be_complete(name: str) -> None:
    """bd completes abbreviations, and takes the last touched issue for a missing id."""
    every = issues(issue("gt-1"))
    refused(judge_update(every, name, {"priority": 0}, ALICE, KNOWN), "exists")
    refused(judge_close(every, name, "", ALICE), "exists")
    refused(judge_reopen(every, name, "", ALICE), "exists")
    refused(judge_comment(every, name, "text"), "exists")
    refused(judge_dependency(every, "gt-1", name, "related", ALICE), "exists")
    refused(judge_dependency(every, name, "gt-1", "related", ALICE), "exists")
    refused(judge_begin(every, name), "exists")


# Updating what


def test_the_type_cannot_be_changed() -> None:
    one = issue("gt-1")
    refused(update(one, issue_type="bug"), "immutable")
    refused(update(one, type="epic"), "immutable")
    assert update(one, issue_type="task") is None


@pytest.mark.parametrize("name", ["title", "description", "design", "acceptance", "notes"])
def test_only_the_creator_may_change_texts(name: str) -> None:
    """An agent cannot overwrite a person's notes and title."""
    assert update(issue("gt-1"), **{name: "new"}) == IssueChanges({name: "new"})
    persons = issue("gt-1", created_by="maria", metadata={}, **{name: "said"})
    assert "maria" in refused(update(persons, **{name: "new"}), "author").about
    refused(update(persons, **{name: ""}), "author")
    assert update(persons, **{name: "said"}) is None
    refused(update(issue("gt-1", created_by="", metadata={}), **{name: "new"}), "author")


def test_unknown_fields_are_refused() -> None:
    for name in ("metadata", "parent", "ephemeral", "created_by", "id", "owner", "x\ny"):
        assert "\n" not in refused(update(issue("gt-1"), **{name: "x"}), "field").about


def test_phase_labels_cannot_be_removed() -> None:
    one = issue("gt-1", labels=("phase:a", "unit:b", "wild"))
    refused(update(one, remove_labels=["phase:a"]), "phase")
    refused(update(one, labels=["unit:b"]), "phase")
    refused(update(one, labels=["phase:b", "unit:b"]), "phase")
    assert update(one, remove_labels=["unit:b", "wild"]) == IssueChanges({}, (), ("unit:b", "wild"))
    assert update(one, labels=["phase:a", "phase:b"]) == IssueChanges({}, ("phase:b",), ("unit:b", "wild"))
    assert update(one, add_labels=["phase:a"], remove_labels=["phase:z"]) is None


def test_fields_without_a_change_are_left_out() -> None:
    one = issue("gt-1", priority=3, **of(ALICE))
    assert update(one, title=one.title, priority="P3", assignee="alice", status="open", notes=None) is None


def test_values_of_a_wrong_type_are_a_usage_error() -> None:
    mistakes: list[dict[str, Any]] = [
        {"title": 3},
        {"status": True},
        {"labels": "phase:a"},
        {"add_labels": [3]},
        {"assignee": []},
    ]
    for changes in mistakes:
        with pytest.raises(UsageError):
            update(issue("gt-1"), **changes)


def test_several_changes_are_one_edit() -> None:
    one = issue("gt-1", status="in_progress", labels=("unit:a",))
    assert update(one, status="done", notes="ready", add_labels=["stage:b"], remove_labels=["unit:a"]) == IssueChanges(
        {"notes": "ready"}, ("stage:b",), ("unit:a",), closes=True
    )


# Status

STATUSES = ("open", "in_progress", "blocked", "deferred", "pinned", "hooked", "closed", "done", "review")
STEPS = {("open", "in_progress"), ("in_progress", "done"), *((now, "closed") for now in STATUSES)}


@pytest.mark.parametrize("now", STATUSES)
@pytest.mark.parametrize("word", [*STATUSES, "Closed", "", "cancelled"])
def test_a_status_changes_from_open_to_in_progress_to_done_or_to_closed(now: str, word: str) -> None:
    """Gorilla Troop accepted open -> done, done -> open and closed -> open."""
    found = update(issue("gt-1", status=now), status=word)
    if word == now:
        assert found is None
    elif (now, word) not in STEPS:
        assert now in refused(found, "status").about
    elif word == "in_progress":
        assert found == IssueChanges({"status": "in_progress"})
    else:
        assert found == IssueChanges({}, closes=True)


@pytest.mark.parametrize("kind", ["blocks", "conditional-blocks", "waits-for"])
def test_an_issue_with_open_blockers_cannot_be_closed_by_any_operation(kind: str) -> None:
    """bd closes it when its status is updated."""
    one = issue("gt-1", (kind, "gt-2"), status="in_progress")
    for other in (issue("gt-2"), issue("gt-2", status="in_progress"), issue("gt-2", status="review")):
        assert "gt-2" in refused(judge_close(issues(one, other), "gt-1", "", ALICE), "blockers").about
        refused(update(one, other, status="done"), "blockers")
        refused(update(one, other, status="closed"), "blockers")
    ended = issue("gt-2", status="closed")
    assert judge_close(issues(one, ended), "gt-1", "", ALICE) == one
    assert update(one, ended, status="done") == IssueChanges({}, closes=True)
    refused(judge_close(issues(one), "gt-1", "", ALICE), "blockers")  # what it waits for is not to be found


@pytest.mark.parametrize("kind", ["epic", "task"])
def test_an_issue_with_open_children_cannot_be_closed_by_any_operation(kind: str) -> None:
    """bd checks only the children of epics."""
    one = issue("gt-1", issue_type=kind)
    child = issue("gt-1.1", ("parent-child", "gt-1"))
    assert "gt-1.1" in refused(judge_close(issues(one, child), "gt-1", "", ALICE), "children").about
    refused(update(one, child, status="closed"), "children")
    assert judge_close(issues(one, issue("gt-1.1", ("parent-child", "gt-1"), status="closed")), "gt-1", "", ALICE)
    assert judge_close(issues(one, child), "gt-1.1", "", ALICE) == child


def test_non_blocking_edges_do_not_prevent_closing() -> None:
    one = issue("gt-1", ("related", "gt-2"), ("discovered-from", "gt-2"))
    assert judge_close(issues(one, issue("gt-2")), "gt-1", "", ALICE) == one


def test_closing_a_closed_issue_changes_nothing() -> None:
    """bd would store a new reason and a new time."""
    one = issue("gt-1", status="closed")
    assert judge_close(issues(one), "gt-1", "again", ALICE) is None
    assert update(one, status="closed") is None


def test_a_closed_issue_can_be_reopened_only_below_an_open_parent() -> None:
    one = issue("gt-1", ("parent-child", "gt-2"), status="closed")
    assert judge_reopen(issues(one, issue("gt-2")), "gt-1", "", ALICE) == one
    refused(judge_reopen(issues(one, issue("gt-2", status="closed")), "gt-1", "", ALICE), "parent_closed")
    assert judge_reopen(issues(issue("gt-1")), "gt-1", "", ALICE) is None
    refused(judge_reopen(issues(issue("gt-1", status="in_progress")), "gt-1", "", ALICE), "status")


# Comments


def test_every_agent_may_comment_on_every_issue() -> None:
    every = issues(issue("gt-1", status="closed", **of(BOB)))
    assert judge_comment(every, "gt-1", "Seen.") == every["gt-1"]
    refused(judge_comment(every, "gt-1", " \n"), "text")


# Dependencies


@pytest.mark.parametrize(
    ("word", "kind"),
    [("blocks", "blocks"), ("conditional-blocks", "conditional-blocks"), ("waits-for", "waits-for"),
     ("parent", "parent-child"), ("parent-child", "parent-child"), ("related", "related"),
     ("discovered-from", "discovered-from")],
)  # fmt: skip
def test_dependency_words_are_mapped_to_those_of_bd(word: str, kind: str) -> None:
    every = issues(issue("gt-1"), issue("gt-2"))
    assert judge_dependency(every, "gt-1", "gt-2", word, ALICE) == Edge("gt-1", "gt-2", kind)
    assert judge_dependency(issues(issue("gt-1", (kind, "gt-2")), issue("gt-2")), "gt-1", "gt-2", word, ALICE) is None
    assert judge_removal(issues(issue("gt-1", (kind, "gt-2"))), "gt-1", "gt-2", ALICE) == Edge("gt-1", "gt-2", kind)
    assert judge_removal(every, "gt-1", "gt-2", ALICE) is None


@pytest.mark.parametrize("word", ["", "tracks", "Blocks", "depends-on", "until", "x" * 50])
def test_other_dependency_words_are_refused(word: str) -> None:
    """bd stores any."""
    refused(judge_dependency(issues(issue("gt-1"), issue("gt-2")), "gt-1", "gt-2", word, ALICE), "dependency")


def test_two_issues_have_one_dependency() -> None:
    every = issues(issue("gt-1", ("related", "gt-2")), issue("gt-2"))
    assert "related" in refused(judge_dependency(every, "gt-1", "gt-2", "blocks", ALICE), "pair").about
    assert isinstance(judge_dependency(every, "gt-2", "gt-1", "blocks", ALICE), Edge)


def test_a_child_has_one_parent() -> None:
    """bd accepts a second one, and shows one of them."""
    every = issues(issue("gt-1", ("parent-child", "gt-2")), issue("gt-2"), issue("gt-3"), issue("gt-4"))
    assert "gt-2" in refused(judge_dependency(every, "gt-1", "gt-3", "parent", ALICE), "parent").about
    assert judge_dependency(every, "gt-1", "gt-2", "parent", ALICE) is None
    assert judge_dependency(every, "gt-4", "gt-2", "parent", ALICE) == Edge("gt-4", "gt-2", "parent-child")
    closed = issues(issue("gt-1"), issue("gt-2", status="closed"), issue("gt-3", status="closed"))
    refused(judge_dependency(closed, "gt-1", "gt-2", "parent", ALICE), "parent_closed")
    assert judge_dependency(closed, "gt-3", "gt-2", "parent", ALICE) == Edge("gt-3", "gt-2", "parent-child")


ORDERED = ("blocks", "conditional-blocks", "waits-for", "parent")


@pytest.mark.parametrize("first", ORDERED)
@pytest.mark.parametrize("second", ORDERED)
def test_no_cycle_of_two_issues_is_accepted_for_any_kinds(first: str, second: str) -> None:
    """bd finds only cycles of blocks."""
    kind = {"parent": "parent-child"}.get(first, first)
    every = issues(issue("gt-1", (kind, "gt-2")), issue("gt-2"))
    assert "gt-2 -> gt-1 -> gt-2" in refused(judge_dependency(every, "gt-2", "gt-1", second, ALICE), "cycle").about


@pytest.mark.parametrize("word", [*ORDERED, "related", "discovered-from"])
def test_no_issue_depends_on_itself(word: str) -> None:
    fault = judge_dependency(issues(issue("gt-1")), "gt-1", "gt-1", word, ALICE)
    refused(fault, "cycle")


def test_a_long_cycle_is_found_and_reported() -> None:
    every = issues(
        issue("a", ("blocks", "b")),
        issue("b", ("parent-child", "c")),
        issue("c", ("waits-for", "d"), ("related", "a")),
        issue("d"),
    )
    assert "d -> a -> b -> c -> d" in refused(judge_dependency(every, "d", "a", "blocks", ALICE), "cycle").about
    assert isinstance(judge_dependency(every, "d", "b", "discovered-from", ALICE), Edge)


def test_a_child_cannot_depend_on_its_own_parent() -> None:
    """The parent cannot be closed before the child, so neither could ever be closed."""
    every = issues(issue("child", ("parent-child", "top")), issue("top"), issue("x", ("blocks", "top")))
    refused(judge_dependency(every, "child", "x", "blocks", ALICE), "cycle")
    assert isinstance(judge_dependency(every, "x", "child", "blocks", ALICE), Edge)


def test_an_existing_cycle_does_not_block_other_edges() -> None:
    every = issues(issue("a", ("waits-for", "b")), issue("b", ("waits-for", "a")), issue("c"))
    assert isinstance(judge_dependency(every, "c", "a", "blocks", ALICE), Edge)


@pytest.mark.parametrize("word", ["blocks", "conditional-blocks", "waits-for"])
def test_an_issue_whose_work_may_have_begun_gets_no_new_blocker(word: str) -> None:
    """Seed 004: an issue in progress or ended, with a worktree, or whose blockers have all ended."""
    blocker, ended = issue("gt-2"), issue("gt-3", status="closed")
    begun = [
        issue("gt-1", status="in_progress"),
        issue("gt-1", status="closed"),
        issue("gt-1", status="hooked"),
        issue("gt-1", metadata={CREATOR_ID: ALICE.id, WORKTREE: "x"}),
        issue("gt-1", ("blocks", "gt-3")),
        issue("gt-1", ("waits-for", "gt-3")),
    ]
    for one in begun:
        refused(judge_dependency(issues(one, blocker, ended), "gt-1", "gt-2", word, ALICE), "begun")
        assert isinstance(judge_dependency(issues(one, blocker, ended), "gt-1", "gt-2", "related", ALICE), Edge)
    for one in (issue("gt-1"), issue("gt-1", status="blocked"), issue("gt-1", ("blocks", "gt-3"), ("blocks", "gt-4"))):
        every = issues(one, blocker, ended, issue("gt-4"))
        assert isinstance(judge_dependency(every, "gt-1", "gt-2", word, ALICE), Edge)


def test_removing_a_dependency_is_always_allowed() -> None:
    for status in ("open", "in_progress", "closed"):
        one = issue("gt-1", ("blocks", "gt-2"), status=status, metadata={WORKTREE: "x"})
        assert judge_removal(issues(one, issue("gt-2")), "gt-1", "gt-2", ALICE) == Edge("gt-1", "gt-2", "blocks")
    assert judge_removal(issues(issue("gt-1", ("blocks", "gone"))), "gt-1", "gone", ALICE) is not None


def test_a_concurrent_change_is_found_after_the_operation() -> None:
    """bd accepts changes that the gate would refuse."""
    edge = Edge("a", "b", "waits-for")
    assert judge_concurrent(issues(issue("a", ("waits-for", "b")), issue("b")), edge) is None
    both = issues(issue("a", ("waits-for", "b")), issue("b", ("waits-for", "a")))
    fault = judge_concurrent(both, edge)
    assert fault is not None
    assert fault.refusal is refusals.CYCLE
    child = Edge("a", "b", "parent-child")
    two = judge_concurrent(issues(issue("a", ("parent-child", "b"), ("parent-child", "c"))), child)
    assert two is not None
    assert two.refusal is refusals.PARENT


# Worktrees


def test_a_worktree_needs_the_ordering_edges_of_its_issue_and_not_its_parent() -> None:
    one = issue("gt-1", ("blocks", "gt-2"), ("waits-for", "gt-3"), ("parent-child", "gt-4"), ("related", "gt-5"))
    rest = [issue("gt-4"), issue("gt-5")]
    waiting = judge_begin(issues(one, issue("gt-2"), issue("gt-3"), *rest), "gt-1")
    assert refused(waiting, "waiting").about == "It waits for gt-2 and gt-3."
    half = judge_begin(issues(one, issue("gt-2", status="closed"), issue("gt-3", status="in_progress"), *rest), "gt-1")
    assert refused(half, "waiting").about == "It waits for gt-3."
    ended = [issue("gt-2", status="closed"), issue("gt-3", status="closed"), *rest]
    assert judge_begin(issues(one, *ended), "gt-1") == one
