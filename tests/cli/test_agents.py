"""Agents on the command line."""

from __future__ import annotations

import json
from pathlib import Path

from tests.worlds import ALLOW_ALL, Mounted, bonobofs


def test_the_roles_of_an_agent_can_be_changed(mounted: Mounted, home: Path) -> None:
    """The next mount obeys; a session that serves keeps its role, and its mountpoint is named."""
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


def test_a_misspelled_agent_is_not_registered(mounted: Mounted, source: Path, tmp_path: Path) -> None:
    """The nearest name is shown; `--new` registers the name as it is."""
    mounted(policy=ALLOW_ALL, agent="alice")
    mountpoint = tmp_path / "second"
    mountpoint.mkdir()
    wrong = bonobofs("mount", source, mountpoint, "--agent", "alcie")
    assert wrong.returncode == 2
    assert wrong.stderr == "bonobofs: no agent is named alcie; did you mean alice? to register it: --new\n"
    made = bonobofs("mount", source, mountpoint, "--agent", "alcie", "--new")
    assert made.returncode == 0, made.stderr
    assert bonobofs("umount", mountpoint).returncode == 0
