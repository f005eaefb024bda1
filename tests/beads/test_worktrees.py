"""Worktrees and issues: none is made while its issue waits, and its bd is the repository's."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bonobofs import session
from bonobofs.decision import Refused
from bonobofs.guards.beads import find_beads
from bonobofs.session import worktrees
from bonobofs.session.worktrees import Wanted
from bonobofs.state.worktrees import places
from tests.worlds.issues import Workspace


def test_a_worktree_is_made_when_its_issue_waits_for_nothing(
    beads_workspace: Workspace, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Beads gate says for what an issue waits; once that is closed there is a worktree, with the same issues."""
    monkeypatch.setenv("BONOBOFS_BD", str(beads_workspace.bd))
    top = beads_workspace.directory
    for command in (("init", "-q", "-b", "main"), ("commit", "-q", "--allow-empty", "-m", "The first")):
        identity = ("-c", "user.name=o", "-c", "user.email=o@example.org")
        subprocess.run(["git", *identity, *command], cwd=top, check=True)
    one, blocker = beads_workspace.create("one"), beads_workspace.create("blocker")
    beads_workspace.run("dep", "add", one, blocker)
    wanted = Wanted(top, one, "alice")
    with pytest.raises(Refused, match=f"waits for {blocker}"):
        worktrees.add(home, wanted)
    assert worktrees.standings(home) == []
    beads_workspace.run("close", blocker)
    made = worktrees.add(home, wanted)
    try:
        assert find_beads(places(home, made.worktree.worktree).tree, home) == top / ".beads"
    finally:
        worktrees.remove(home, one)
    assert [status.session.mountpoint for status in session.statuses(home)] == []
