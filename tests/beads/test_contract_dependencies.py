"""Facts about bd 1.0.5 that the tests check on the bd in use: dependencies."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.support.beads_workspace import Workspace


@pytest.fixture
def one(beads_workspace: Workspace) -> str:
    return beads_workspace.create("one")


@pytest.fixture
def two(beads_workspace: Workspace) -> str:
    return beads_workspace.create("two")


@pytest.fixture
def epic(beads_workspace: Workspace) -> str:
    return beads_workspace.create("an epic", "-t", "epic")


def edges(workspace: Workspace) -> set[tuple[str, str, str]]:
    """Every edge there is: which issue depends on which, and how."""
    listed: list[dict[str, Any]] = list(workspace.all_issues().values())
    found = itertools.chain.from_iterable(issue.get("dependencies", []) for issue in listed)
    return {(edge["issue_id"], edge["depends_on_id"], edge["type"]) for edge in found}


def test_an_ordered_pair_has_one_edge(beads_workspace: Workspace, one: str, two: str) -> None:
    """dep add A B makes A depend on B. Repeating it succeeds; another kind for the pair fails."""
    for _ in range(2):
        beads_workspace.json("dep", "add", one, two)
    assert edges(beads_workspace) == {(one, two, "blocks")}
    other = beads_workspace.run("dep", "add", one, two, "-t", "related", "--json")
    assert other.returncode == 1
    assert "already exists with type" in other.stdout
    assert "blocks" in other.stdout


def test_dep_add_accepts_any_kind_and_create_does_not(beads_workspace: Workspace, one: str, two: str) -> None:
    """dep add stores any word, `parent` too, which has no effect."""
    beads_workspace.json("dep", "add", one, two, "-t", "parent")
    assert edges(beads_workspace) == {(one, two, "parent")}
    assert "parent" not in beads_workspace.issue(one)
    for word in ("", "x" * 51):
        assert beads_workspace.run("dep", "add", two, one, f"--type={word}").returncode == 1
    assert beads_workspace.run("create", "x", "--deps", f"parent:{one}").returncode == 1


@pytest.mark.parametrize("kind", ["blocks", "parent-child", "related"])
def test_an_issue_does_not_depend_on_itself(beads_workspace: Workspace, one: str, kind: str) -> None:
    """By no command."""
    assert beads_workspace.run("dep", "add", one, one, "-t", kind).returncode == 1


@pytest.mark.parametrize(
    ("there", "back", "status"),
    [
        ("blocks", "blocks", 1),
        ("blocks", "conditional-blocks", 1),
        ("conditional-blocks", "conditional-blocks", 1),
        ("parent-child", "parent-child", 0),
        ("waits-for", "waits-for", 0),
        ("related", "related", 0),
        ("discovered-from", "discovered-from", 0),
        ("blocks", "parent-child", 0),
        ("parent-child", "blocks", 0),
    ],
)
def test_cycles_are_refused_along_blocking_edges_only(
    beads_workspace: Workspace, one: str, two: str, there: str, back: str, status: int
) -> None:
    """All others are accepted, and those of mixed kinds too."""
    beads_workspace.json("dep", "add", one, two, "-t", there)
    assert beads_workspace.run("dep", "add", two, one, "-t", back).returncode == status


def test_dep_cycles_never_finds_a_cycle(beads_workspace: Workspace, one: str, two: str) -> None:
    """It searches where there is none, and its text contains the word cycle."""
    beads_workspace.json("dep", "add", one, two, "-t", "parent-child")
    beads_workspace.json("dep", "add", two, one, "-t", "parent-child")
    assert beads_workspace.json("dep", "cycles") == []
    assert "cycle" in beads_workspace.run("dep", "cycles").stdout


def test_a_cycle_is_refused_with_and_without_the_check(beads_workspace: Workspace, one: str, two: str) -> None:
    """--no-cycle-check has no effect. Of two concurrent edges one is stored."""
    beads_workspace.json("dep", "add", one, two)
    assert beads_workspace.run("dep", "add", two, one, "--no-cycle-check").returncode == 1
    three, four = (beads_workspace.create(title) for title in ("three", "four"))
    both = [beads_workspace.start("dep", "add", *ends) for ends in ((three, four), (four, three))]
    assert sorted(each.wait(timeout=60) for each in both) == [0, 1]
    for each in both:
        each.communicate()


def test_an_epic_and_another_type_cannot_block_each_other(beads_workspace: Workspace, one: str, epic: str) -> None:
    """In neither direction. A parent may have any type."""
    assert beads_workspace.run("dep", "add", one, epic).returncode == 1
    assert beads_workspace.run("dep", "add", epic, one).returncode == 1
    two = beads_workspace.create("two", "--parent", one)
    assert beads_workspace.issue(two)["parent"] == one
    beads_workspace.json("dep", "add", one, epic, "-t", "parent-child")


def test_an_issue_may_have_two_parents(beads_workspace: Workspace, one: str, two: str, epic: str) -> None:
    """show names one. update replaces the only parent, also by its own child, but not by the issue itself."""
    for parent in (two, epic):
        beads_workspace.json("dep", "add", one, parent, "-t", "parent-child")
    assert edges(beads_workspace) == {(one, two, "parent-child"), (one, epic, "parent-child")}
    assert beads_workspace.issue(one)["parent"] in {two, epic}
    beads_workspace.json("dep", "remove", one, two)
    beads_workspace.json("update", one, "--parent", two)
    assert edges(beads_workspace) == {(one, two, "parent-child")}
    beads_workspace.json("update", one, "--parent", epic)
    assert edges(beads_workspace) == {(one, epic, "parent-child")}
    beads_workspace.json("update", epic, "--parent", one)
    assert (epic, one, "parent-child") in edges(beads_workspace)
    itself = beads_workspace.run("update", one, "--parent", one, "--json")
    assert (itself.returncode, itself.stdout) == (1, "")
    beads_workspace.json("update", one, "--parent", "")
    assert edges(beads_workspace) == {(epic, one, "parent-child")}


def test_removing_a_missing_edge_succeeds(beads_workspace: Workspace, one: str, two: str) -> None:
    """Only an unknown id fails. Edges to other projects are not listed."""
    assert beads_workspace.json("dep", "remove", one, two)["status"] == "removed"
    assert beads_workspace.run("dep", "remove", one, "gt-zzzz").returncode == 1
    beads_workspace.json("dep", "add", one, "external:other:capability")
    assert beads_workspace.json("dep", "list", one) == []


def test_create_stores_the_issue_if_its_edges_fail(beads_workspace: Workspace, epic: str) -> None:
    """With exit status 0 and a warning. Only an unknown parent prevents it."""
    assert beads_workspace.run("create", "below", "--parent", "gt-zzzz").returncode == 1
    for flags in (("--deps", "gt-zzzz"), ("--deps", epic), ("--waits-for", "gt-zzzz")):
        done = beads_workspace.run("create", "x", *flags, "--json")
        assert done.returncode == 0
        assert "Warning" in done.stderr
        assert json.loads(done.stdout)["id"] in beads_workspace.all_issues()
    assert edges(beads_workspace) == set()
    assert "below" not in {issue["title"] for issue in beads_workspace.all_issues().values()}


def test_deps_name_the_dependency_except_for_blocks(beads_workspace: Workspace, one: str) -> None:
    """blocks:X makes X depend on the new issue."""
    for word in ("{}", "depends-on:{}", "blocked-by:{}"):
        new = beads_workspace.create("x", "--deps", word.format(one))
        assert (new, one, "blocks") in edges(beads_workspace)
    new = beads_workspace.create("x", "--deps", f"blocks:{one}")
    assert (one, new, "blocks") in edges(beads_workspace)
    for kind in ("parent-child", "discovered-from"):
        new = beads_workspace.create("x", "--deps", f"{kind}:{one}")
        assert (new, one, kind) in edges(beads_workspace)
    assert beads_workspace.run("create", "x", "--deps", f"parent:{one}").returncode == 1


def test_close_checks_open_children_and_update_does_not(
    beads_workspace: Workspace, one: str, two: str, epic: str
) -> None:
    """Open blockers, open children of an epic, and being pinned: update -s closed and import ignore all three."""
    beads_workspace.json("dep", "add", one, two)
    beads_workspace.json("dep", "add", two, epic, "-t", "parent-child")
    pinned = beads_workspace.create("pinned")
    beads_workspace.json("update", pinned, "-s", "pinned")
    for id_ in (one, epic, pinned):
        assert beads_workspace.run("close", id_).returncode == 1
        assert beads_workspace.json("update", id_, "-s", "closed")[0]["status"] == "closed"
    beads_workspace.json("reopen", one)
    line = {"id": one, "title": "one", "status": "closed", "issue_type": "task", "closed_at": "2026-01-01T00:00:00Z"}
    file = beads_workspace.person / "issues.jsonl"
    file.write_text(json.dumps(line))
    assert beads_workspace.run("import", file).returncode == 0
    assert beads_workspace.issue(one)["status"] == "closed"
    beads_workspace.json("reopen", one)
    beads_workspace.json("close", one, "--force")


def test_closing_again_replaces_the_reason(beads_workspace: Workspace, one: str) -> None:
    """It succeeds. `done` is another word for close."""
    beads_workspace.json("close", one, "--reason=first")
    assert beads_workspace.json("done", one, "--reason=second")[0]["close_reason"] == "second"


def test_delete_removes_an_issue_with_its_edges(beads_workspace: Workspace, one: str, two: str) -> None:
    """Only with --force; without it, delete prints what it would do."""
    beads_workspace.json("dep", "add", one, two)
    assert beads_workspace.run("delete", two).returncode == 0
    assert two in beads_workspace.all_issues()
    beads_workspace.json("delete", two, "--force")
    assert two not in beads_workspace.all_issues()
    assert edges(beads_workspace) == set()
