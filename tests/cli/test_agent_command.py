"""Agents on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bonobofs.session.undo_service import operator_session
from tests.support.world import ALLOW_ALL, Mounted, bonobofs, register


def test_the_roles_of_an_agent_can_be_changed(mounted: Mounted, home: Path) -> None:
    """They apply from the next mount. A live session keeps its role, and the command names its mountpoint."""
    assert bonobofs("agent", "add", "alice", "--role", "impl").returncode == 0
    again = bonobofs("agent", "add", "alice", "--role", "control")
    assert (again.returncode, "bonobofs agent change alice --role R" in again.stderr) == (2, True)
    world = mounted(policy=ALLOW_ALL + '[role.impl]\nwrite = ["**"]\n', agent="alice")
    assert bonobofs("team", "add", "red").returncode == 0
    changed = bonobofs("agent", "change", "alice", "--team", "red", "--role", "control", "--role", "impl")
    assert (changed.returncode, changed.stdout) == (0, "alice: team red, may mount as control, impl\n")
    assert f"the session in {world.path} keeps the role impl until it ends" in changed.stderr
    (one,) = json.loads(bonobofs("agent", "list", "--json").stdout)
    assert (one["team"], one["role"], one["roles"]) == ("red", "control", ["control", "impl"])
    assert one["id"] == world.session.agent_id
    assert bonobofs("agent", "change", "alice").returncode == 2
    assert bonobofs("agent", "change", "bob", "--role", "impl").returncode == 2


def test_only_new_registers_an_unknown_agent(mounted: Mounted, source: Path, tmp_path: Path) -> None:
    """Without it the error shows the nearest name, or the known names."""
    mounted(policy=ALLOW_ALL, agent="alice")
    mountpoint = tmp_path / "second"
    mountpoint.mkdir()
    wrong = bonobofs("mount", source, mountpoint, "--agent", "alcie")
    assert wrong.returncode == 2
    assert wrong.stderr == "bonobofs: no agent is named alcie; did you mean alice? to register it: --new\n"
    other = bonobofs("mount", source, mountpoint, "--agent", "bob")
    assert other.returncode == 2
    assert other.stderr == "bonobofs: no agent is named bob; known are alice; to register it: --new\n"
    worktree = bonobofs("worktree", "add", "--issue", "gt-1", "--agent", "bob", cwd=source)
    assert (worktree.returncode, worktree.stderr) == (2, other.stderr)
    made = bonobofs("mount", source, mountpoint, "--agent", "alcie", "--new")
    assert made.returncode == 0, made.stderr
    assert bonobofs("umount", mountpoint).returncode == 0


@pytest.mark.parametrize("name", ["operator", "daemon"])
def test_no_agent_has_the_name_of_the_operator_or_the_daemon(
    name: str, mounted: Mounted, source: Path, tmp_path: Path, home: Path
) -> None:
    """Also after an undo of the operator, which has an agent of that name."""
    mounted(policy=ALLOW_ALL, agent="ann").umount()
    with operator_session(home, str(source)):
        pass
    operator = json.loads(bonobofs("agent", "list", "--json").stdout)[1]
    assert operator["label"] == "operator"
    mountpoint = tmp_path / "second"
    mountpoint.mkdir()
    commands = [
        ("agent", "add", name),
        ("mount", source, mountpoint, "--agent", name, "--new"),
        ("mount", source, mountpoint, "--agent", operator["id"]),
        ("lease", "acquire", "--all-workspaces", "--agent", operator["id"], "docs/**"),
        ("mount", source, mountpoint, "--agent", name),
    ]
    for command in commands:
        refused = bonobofs(*command)
        assert refused.returncode == 2, command
        if command != commands[-1]:
            assert "because the record uses it" in refused.stderr
    assert len(json.loads(bonobofs("agent", "list", "--json").stdout)) == 2


@pytest.mark.parametrize(
    "command",
    [
        ("git", "branch", "aidlc/gt-1"),
        ("beads", "create", "Write it"),
        ("lease", "acquire", "docs/**"),
        ("lease", "extend"),
        ("lease", "release"),
    ],
)
def test_no_command_acts_as_an_unknown_agent(command: tuple[str, ...], tmp_path: Path, home: Path) -> None:
    """In an empty state directory and in one with agents. No agent is registered."""
    (tmp_path / ".git").mkdir()
    (tmp_path / ".beads").mkdir()
    first = bonobofs(*command, "--agent", "alcie", cwd=tmp_path)
    assert first.returncode == 2
    assert first.stderr == "bonobofs: no agent is named alcie; to register it: bonobofs agent add alcie\n"
    register("alice")
    wrong = bonobofs(*command, "--agent", "alcie", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "no agent is named alcie; did you mean alice? to register it" in wrong.stderr
    assert [one["label"] for one in json.loads(bonobofs("agent", "list", "--json").stdout)] == ["alice"]
