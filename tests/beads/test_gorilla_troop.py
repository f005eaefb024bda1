"""Mistakes of Gorilla Troop's guard that this one does not make."""

from __future__ import annotations

import pytest

from bonobofs.policy.decision import Refused
from tests.beads.conftest import Opened
from tests.support.beads_workspace import Workspace


def test_a_cycle_is_refused_before_it_is_stored(opened: Opened, beads_workspace: Workspace) -> None:
    """It searched for the word "cycle" in the output of `bd dep cycles` for existing cycles."""
    alice = opened().issues
    a, b, c = (beads_workspace.create(title) for title in "abc")
    alice.guarded_dependency(a, b, "blocks", "alice")
    alice.guarded_dependency(b, c, "blocks", "alice")
    assert not alice.validate_dependency(c, a, "blocks", "alice")
    assert alice.validate_dependency(a, c, "blocks", "alice"), "the word stands in what bd says of no cycle too"
    with pytest.raises(Refused):
        alice.guarded_dependency(c, a, "waits-for", "alice")


def test_a_child_has_one_parent_and_a_message_is_for_the_human(opened: Opened, beads_workspace: Workspace) -> None:
    """It had neither rule."""
    alice = opened().issues
    child, one, other = (beads_workspace.create(title) for title in ("child", "one", "other"))
    alice.guarded_dependency(child, one, "parent", "alice")
    assert not alice.validate_dependency(child, other, "parent", "alice")
    assert alice.validate_dependency(child, one, "parent", "alice")
    assert not alice.validate_create("May I?", "message", [], "alice")
    assert alice.validate_create("May I?", "message", [], "alice", assignee="human")


@pytest.mark.parametrize(("now", "word"), [("open", "done"), ("closed", "open"), ("closed", "in_progress")])
def test_an_undefined_status_change_is_refused(opened: Opened, beads_workspace: Workspace, now: str, word: str) -> None:
    """It accepted open -> done, done -> open and closed -> open."""
    one = beads_workspace.create("one")
    if now == "closed":
        beads_workspace.run("close", one)
    assert not opened().issues.validate_update(one, {"status": word}, "alice")


@pytest.mark.parametrize("label", ["urgent", "phase", "discovered-from:gt-1"])
def test_a_label_needs_a_known_prefix(opened: Opened, label: str) -> None:
    """It accepted labels without a colon, and one prefix more than its contract."""
    assert not opened().issues.validate_create("A", "task", [label], "alice")


def test_statuses_and_edges_are_mapped_to_words_of_bd(opened: Opened, beads_workspace: Workspace) -> None:
    """It passed `done` and `parent` to bd, which has neither."""
    alice = opened().issues
    top = alice.guarded_create("top", "task", 2, "alice").id
    one = alice.guarded_create("one", "task", 2, "alice").id
    alice.guarded_dependency(one, top, "parent", "alice")
    alice.guarded_update(one, "alice", status="in_progress")
    alice.guarded_update(one, "alice", status="done")
    shown = beads_workspace.all_issues()[one]
    assert (shown["status"], [edge["type"] for edge in shown["dependencies"]]) == ("closed", ["parent-child"])
