"""The choice of a session's policy: the order, its permanence, and errors of a broken policy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bonobofs import session
from bonobofs.errors import PolicyError
from bonobofs.session import choose_policy, open_session
from bonobofs.state.project_policies import policy_file, store_preset, stored_preset
from tests.support.world import ALLOW_ALL, World, bonobofs

Mount = Callable[..., World]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A source that no session has seen."""
    path = tmp_path / "project"
    path.mkdir()
    return path


def _mount(source: Path, mountpoint: Path, *options: str) -> str:
    """Mount, unmount, and give what `mount` printed."""
    mountpoint.mkdir(exist_ok=True)
    made = bonobofs("mount", source, mountpoint, *options)
    assert made.returncode == 0, made.stderr
    assert bonobofs("umount", mountpoint).returncode == 0
    return made.stdout


def test_without_a_policy_the_source_determines_a_permanent_choice(home: Path, project: Path, tmp_path: Path) -> None:
    """Removing aidlc-docs after the first mount does not widen the policy, and creating it does not narrow it."""
    (project / "aidlc-docs").mkdir()
    assert "policy preset:aidlc (the source has aidlc-docs/)" in _mount(project, tmp_path / "m")
    (project / "aidlc-docs").rmdir()
    assert "policy preset:aidlc (stored at the first session" in _mount(project, tmp_path / "m")
    assert choose_policy(home, None, project).origin == "preset:aidlc"
    other = tmp_path / "other"
    other.mkdir()
    assert "policy preset:project (the source has no aidlc-docs/)" in _mount(other, tmp_path / "m")
    (other / "aidlc-docs").mkdir()
    assert "policy preset:project (stored at the first session" in _mount(other, tmp_path / "m")


def test_project_permits_sources_and_refuses_files_that_run_later(home: Path, project: Path, tmp_path: Path) -> None:
    """On a real mount, by every kind of call."""
    mountpoint = tmp_path / "m"
    mountpoint.mkdir()
    (project / ".vscode").mkdir()
    world = World(home, session.start(home, session.MountRequest(project, mountpoint, agent="alice")).session)
    try:
        (mountpoint / "src").mkdir()
        (mountpoint / "src/app.py").write_text("print()\n")
        (mountpoint / "run.sh").write_text("#!/bin/sh\n")
        (mountpoint / "run.sh").chmod(0o755)
        (mountpoint / "settings.json").write_text("{}")
        for change in (
            lambda: (mountpoint / ".vscode/settings.json").write_text("{}"),
            lambda: os.rename(mountpoint / "settings.json", mountpoint / ".vscode/settings.json"),
            lambda: os.link(mountpoint / "settings.json", mountpoint / ".mcp.json"),
            lambda: os.symlink("src", mountpoint / ".idea"),
            lambda: os.rename(mountpoint / "src", mountpoint / ".husky"),
            lambda: (mountpoint / ".env").write_text("TOKEN=1"),
            (mountpoint / ".git").mkdir,
        ):
            with pytest.raises(OSError, match=r"Read-only file system|Permission denied"):
                change()
        who = json.loads((mountpoint / ".bonobofs/whoami.json").read_text())
        (status,) = json.loads(bonobofs("status", "--json").stdout)
        assert who["policy_origin"] == status["policy"]["origin"] == "preset:project"
        assert who["policy"] == status["policy"]["digest"]
        assert "Until the operator permits it" in (mountpoint / ".bonobofs/policy.md").read_text()
    finally:
        assert world.clear() == []
    assert sorted(path.name for path in project.rglob("*")) == [".vscode", "app.py", "run.sh", "settings.json", "src"]


def test_a_preset_can_be_named(project: Path, tmp_path: Path) -> None:
    assert "policy preset:read-only (named)" in _mount(project, tmp_path / "m", "--policy", "read-only")


def test_the_order_of_policies(home: Path, project: Path, tmp_path: Path) -> None:
    """--policy, the project's, the state directory's, a preset. The last default of FileGuard is `aidlc`."""
    assert choose_policy(home, None, project).origin == "preset:project"
    with open_session(project) as opened:
        assert opened.session.policy.origin == "preset:aidlc"
    assert stored_preset(home, project) is None
    (home / "policy.toml").write_text(ALLOW_ALL)
    assert choose_policy(home, None, project).origin == str(home / "policy.toml")
    own = policy_file(home, project)
    own.parent.mkdir(exist_ok=True)
    own.write_text('extends = "docs"\n')
    assert choose_policy(home, None, project).origin == str(own)
    assert choose_policy(home, None, tmp_path).origin == str(home / "policy.toml")
    assert choose_policy(home, Path("aidlc"), project).origin == "preset:aidlc"
    with open_session(project) as opened:
        assert opened.session.policy.origin == str(own)


@pytest.mark.parametrize("broken", ["default = ", "\udcff", "directory", "dangling", "loop"])
@pytest.mark.parametrize("level", ["project", "state directory"])
def test_a_broken_policy_is_an_error_at_every_level(home: Path, project: Path, broken: str, level: str) -> None:
    file = policy_file(home, project) if level == "project" else home / "policy.toml"
    file.parent.mkdir(exist_ok=True)
    if broken == "directory":
        file.mkdir()
    elif broken in ("dangling", "loop"):
        file.symlink_to(file if broken == "loop" else home / "none.toml")
    else:
        file.write_text(broken, errors="surrogateescape")
    with pytest.raises(PolicyError):
        choose_policy(home, None, project)


def test_a_broken_choice_is_an_error(home: Path, project: Path) -> None:
    store_preset(home, project, "aidlc")
    (choice,) = (home / "policies").glob("*.json")
    for text in ('{"preset": "wide", "chosen": ""}', "{}"):
        choice.write_text(text)
        with pytest.raises(PolicyError, match="preset"):
            choose_policy(home, None, project)
    choice.unlink()
    (home / "policies").rmdir()
    (home / "policies").write_text("")
    with pytest.raises(PolicyError, match="cannot be read"):
        choose_policy(home, None, project)


def test_the_choice_of_the_first_of_two_sessions_stays(home: Path, project: Path) -> None:
    assert store_preset(home, project, "aidlc") == "aidlc"
    assert store_preset(home, project, "project") == "aidlc"
    assert [path.suffix for path in (home / "policies").iterdir()] == [".json"]


def test_check_prints_every_mistake_and_every_warning(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text('colour = 1\ndefault = "maybe"\n')
    checked = bonobofs("policy", "check", file)
    assert checked.returncode == 1
    assert [line.split(":")[2] for line in checked.stderr.splitlines()] == ["1", "2"]
    answer = json.loads(bonobofs("policy", "check", "--json", file).stdout)
    assert (len(answer["errors"]), answer["warnings"]) == (2, [])
    file.write_text('default = "allow"\n')
    checked = bonobofs("policy", "check", file)
    assert checked.returncode == 0
    assert f"{file}:1: warning: " in checked.stderr
    assert ": valid, " in checked.stdout


@pytest.mark.parametrize("preset", ["project", "aidlc", "docs", "read-only"])
def test_the_commands_take_presets(preset: str) -> None:
    checked = bonobofs("policy", "check", preset)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert bonobofs("policy", "test", preset).returncode == 0
    shown = json.loads(bonobofs("policy", "show", "--json", "--policy", preset).stdout)
    assert shown["origin"] == f"preset:{preset}"
