"""Issues on the command line, as the operator and in a mount."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.beads_workspace import Workspace
from tests.support.world import ALLOW_ALL, Mounted, bonobofs, register


def test_an_operator_acts_as_a_named_agent_and_is_recorded(
    beads_workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any directory of the workspace."""
    register("alice", "bob")
    monkeypatch.setenv("BONOBOFS_BD", str(beads_workspace.bd))
    below = beads_workspace.directory / "below"
    below.mkdir()

    def run(*words: str, agent: str = "alice") -> Any:
        return bonobofs("beads", *words, "--agent", agent, cwd=below)

    made = json.loads(run("create", "Write it", "-l", "phase:a", "-p", "1", "--json").stdout)
    assert (made["title"], made["labels"], made["priority"], made["created_by"]) == (
        "Write it",
        ["phase:a"],
        1,
        "alice",
    )
    one = made["id"]
    other = json.loads(run("create", "Try it", "--deps", one, "--json").stdout)["id"]
    assert run("update", one, "--claim", "--add-label", "unit:b").stdout == f"{one} is in_progress: Write it\n"
    refused = run("update", one, "-p", "0", agent="bob")
    assert (refused.returncode, refused.stderr.count("\n")) == (77, 1)
    assert f"{one} is assigned to alice" in refused.stderr
    assert run("close", other).returncode == 77
    assert run("close", one, "-r", "written").stdout == f"{one} is closed: Write it\n"
    assert run("dep", "add", other, one, "-t", "related").returncode == 77
    assert run("dep", "remove", other, one).returncode == 0
    assert run("dep", "add", other, one, "-t", "parent").returncode == 77
    assert beads_workspace.issue(one)["close_reason"] == "written"
    tail = bonobofs("audit", "tail", "-n", "100").stdout
    assert "alice  create_issue  Write it" in tail
    refusal = f"The issue is assigned to another agent or person. {one} is assigned to alice."
    assert f"bob  update_issue  {one}  BEADS: {refusal}" in tail
    told = json.loads(bonobofs("audit", "query", "--json").stdout)
    closed = [entry for entry in told if entry["operation"] == "close_issue" and entry["kind"] == "intent"]
    assert [(entry["result"], entry["details"]["issue"]) for entry in closed] == [("denied", other), ("allowed", one)]


def test_a_command_without_agent_or_issues_names_the_remedy(beads_workspace: Workspace, tmp_path: Path) -> None:
    nobody = bonobofs("beads", "close", "gt-1", cwd=beads_workspace.directory)
    assert (nobody.returncode, "--agent" in nobody.stderr) == (2, True)
    nowhere = bonobofs("beads", "close", "gt-1", "--agent", "alice", cwd=tmp_path)
    assert (nowhere.returncode, "bd init" in nowhere.stderr) == (1, True)


def test_in_a_mount_the_agent_is_that_of_the_session(
    beads_workspace: Workspace, mounted: Mounted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BONOBOFS_BD", str(beads_workspace.bd))
    world = mounted(policy=ALLOW_ALL)
    made = bonobofs("beads", "create", "Write it", "--json", cwd=world.path)
    assert made.returncode == 0, made.stderr
    one = json.loads(made.stdout)["id"]
    assert bonobofs("beads", "close", one, cwd=world.path).stdout == f"{one} is closed: Write it\n"
    assert bonobofs("beads", "close", one, "--agent", "bob", cwd=world.path).returncode == 2
    refused = bonobofs("beads", "close", "gt-none", cwd=world.path)
    assert (refused.returncode, "no issue of this id" in refused.stderr) == (77, True)
    entries = [entry for entry in world.entries() if entry.guard == "beads" and entry.kind == "intent"]
    assert [entry.operation for entry in entries] == ["create_issue", "close_issue", "close_issue"]
    assert beads_workspace.issue(one)["created_by"] == "alice"
