"""Fixtures for bd and what stands on it: a real bd where there is one, else the program of ours that is like it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bonobofs.decision import Allowed
from bonobofs.guards.beads import Beads, find_beads
from bonobofs.request import Agent
from tests.worlds.issues import WORLD, Workspace, find_bd

ALICE = Agent("alice", "0b5c1f2a-7f53-4f37-8e1e-1a2b3c4d5e6f", "agent")


@pytest.fixture(scope="session")
def bd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program. Ours is started by the interpreter of the tests, as another one may be slow to find."""
    found = find_bd()
    if found != WORLD:
        return found
    launcher = tmp_path_factory.mktemp("bin") / "bd"
    launcher.write_text(f"#!{sys.executable} -S\nimport runpy\nrunpy.run_path({str(WORLD)!r}, run_name='__main__')\n")
    launcher.chmod(0o755)
    return launcher


@pytest.fixture
def beads_workspace(bd: Path, source: Path, tmp_path: Path) -> Workspace:
    """`source`, with a `.beads` whose ids begin with gt."""
    return Workspace(bd, source, tmp_path / "person").init()


@pytest.fixture
def leave() -> Allowed:
    """Leave to make a change; what it rests on is not the client's concern."""
    return Allowed("test")


@pytest.fixture
def beads(beads_workspace: Workspace, home: Path) -> Beads:
    """The client, as alice's."""
    return Beads(find_beads(beads_workspace.directory), home, ALICE, program=beads_workspace.bd)
