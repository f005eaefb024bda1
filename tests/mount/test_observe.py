"""`mount --observe`, and what the record then teaches about the policy."""

from __future__ import annotations

import json
import os
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import bonobofs
from tests.support.users import run_in_child
from tests.support.wait import until
from tests.support.world import Mounted, World, register

POLICY = """
# The comment stays.
[[rule]]
name = "notes"
paths = ["docs/"]
suffixes = [".md"]
max_size = "1KB"
executable = false

[[protect]]
paths = ["locked"]

[role.reader]
"""


def work(top: Path) -> None:
    """What the policy refuses in many ways, and some of what it permits."""
    (top / "docs/a.md").write_text("permitted")
    (top / "docs/b.txt").write_text("another suffix")
    (top / "docs/large.md").write_text("x" * 5000)
    (top / "docs/.hidden.md").write_text("hidden")
    (top / "src").mkdir()
    for number in range(6):
        (top / f"src/{number}.py").write_text("print()")
    (top / "src/[a]*.py").write_text("a name with wildcards")
    (top / "tool").write_text("#!/bin/sh\n")
    (top / "tool").chmod(0o755)
    os.rename(top / "docs/b.txt", top / "docs/c.txt")
    os.unlink(top / "docs/c.txt")


def refused(top: Path) -> list[str]:
    """The names below the mount that cannot be written although the policy may only observe."""
    found = []
    for name in ("locked", ".git/x", "docs/.bonobofs-x"):
        try:
            (top / name).write_text("x")
        except OSError:
            found.append(name)
    return found


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    file = tmp_path / "policy.toml"
    file.write_text(POLICY)
    return file


@pytest.fixture
def observed(source: Path, tmp_path: Path, policy: Path, mounted: Mounted) -> World:
    """A mount that observes, after the work."""
    (source / "docs").mkdir()
    (source / "locked").touch()
    (source / ".git").mkdir()
    world = mounted(policy=policy, observe=True)
    run_in_child(work, world.path)
    return world


def test_refused_changes_are_made_and_recorded(observed: World) -> None:
    assert (observed.source / "docs/large.md").stat().st_size == 5000
    rules = {entry.path: entry.rule for entry in observed.entries() if entry.kind == "intent"}
    assert rules["docs/a.md"] == "notes"
    assert rules["docs/c.txt"] == "observe:SUFFIX:notes"
    assert rules["src/0.py"] == "observe:DEFAULT:default"
    assert rules["docs/.hidden.md"] == "observe:HIDDEN:hidden"
    assert "observes" in bonobofs("status").stdout


def test_protected_paths_and_leases_stay_refused(observed: World) -> None:
    assert {"locked", ".git/x"} <= set(run_in_child(refused, observed.path))
    register("bob")
    done = bonobofs("lease", "acquire", "--agent", "bob", "src/**", "--workspace", observed.source)
    assert done.returncode == 0, done.stderr
    with pytest.raises(PermissionError):
        run_in_child(Path.write_text, observed.path / "src/0.py", "x")


def test_a_reload_keeps_observing(observed: World, policy: Path) -> None:
    policy.write_text(POLICY + '[[keep]]\npaths = ["docs/a.md"]\n')
    until(lambda: "keep" in (observed.path / ".bonobofs/policy.md").read_text().lower(), "the policy is loaded")
    run_in_child(os.unlink, observed.path / "docs/a.md")
    assert not (observed.source / "docs/a.md").exists()


def proposed(policy: Path) -> dict[str, Any]:
    done = bonobofs("policy", "propose", "--policy", policy, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_proposal_permits_what_was_seen_and_little_more(observed: World, policy: Path, mounted: Mounted) -> None:
    observed.umount()
    found = proposed(policy)
    assert not found["left"]
    applied = subprocess.run(["patch", policy], input=found["diff"], text=True, capture_output=True, check=False)
    assert applied.returncode == 0, applied.stdout
    assert "# The comment stays." in policy.read_text()
    assert bonobofs("policy", "test", policy).returncode == 0
    rules = tomllib.loads(policy.read_text())["rule"]
    paths = [path for rule in rules[1:] for path in rule["paths"]]
    assert "src/*.py" in paths
    assert "tool" in paths
    assert not any("**" in path for path in paths)
    assert any("src/*.py" in line for line in found["wider"])
    assert proposed(policy)["diff"] == ""
    for path in (observed.source / "src").iterdir():
        path.unlink()
    for name in ("src", "docs"):
        for path in (observed.source / name).iterdir():
            path.unlink()
    (observed.source / "src").rmdir()
    (observed.source / "tool").unlink()
    world = mounted(policy=policy, mountpoint=observed.path)
    run_in_child(work, world.path)
    with pytest.raises(PermissionError):
        run_in_child(Path.write_text, world.path / "docs/d.txt", "never seen")


def test_refusals_of_an_enforcing_session_are_proposed_too(source: Path, policy: Path, mounted: Mounted) -> None:
    (source / "docs").mkdir()
    world = mounted(policy=policy)
    for _ in range(3):
        with pytest.raises(PermissionError):
            run_in_child(Path.write_text, world.path / "docs/plan.txt", "text")
    world.umount()
    found = proposed(policy)
    assert '+paths = ["docs/plan.txt"]' in found["diff"]
    assert any("sizes are unknown" in line for line in found["wider"])


def test_a_replay_lists_what_another_policy_decides_otherwise(observed: World, policy: Path, tmp_path: Path) -> None:
    observed.umount()
    open_, closed = tmp_path / "open.toml", tmp_path / "closed.toml"
    open_.write_text('default = "allow"\nhidden = ["**"]\n')
    closed.write_text(POLICY.replace('".md"', '".rst"'))
    done = bonobofs("policy", "diff", policy, closed, "--replay")
    assert done.returncode == 1
    assert "now refused: create_file docs/a.md" in done.stdout
    assert "now allowed" not in done.stdout
    found = json.loads(bonobofs("policy", "diff", policy, open_, "--replay", "--json").stdout)
    assert {each["path"] for each in found if each["allowed"]} >= {"docs/b.txt", "src/0.py", "docs/.hidden.md"}
    assert bonobofs("policy", "diff", policy, policy, "--replay").returncode == 0
    words = bonobofs("policy", "diff", policy, closed)
    assert "-- `docs/`: `.md` files" in words.stdout
    assert words.returncode == 1


def test_an_unknown_session_and_a_broken_policy_are_clear_errors(policy: Path) -> None:
    done = bonobofs("policy", "propose", "--policy", policy, "--session", "none")
    assert "no session has the UUID none" in done.stderr
    policy.write_text("[[rule]]\n")
    assert "policy.toml" in bonobofs("policy", "propose", "--policy", policy).stderr
    assert bonobofs("policy", "diff", "project", policy).returncode != 0
