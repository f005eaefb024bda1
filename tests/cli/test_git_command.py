"""`bonobofs git` as an operator runs it, outside a mount."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.git_guards import FREE, Repo
from tests.support.world import Mounted, bonobofs, register


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    root = tmp_path / "project"
    root.mkdir()
    made = Repo(root)
    made.git("init", "-q", "-b", "main")
    made.commit("The first", docs__plan_md="The plan\n")
    (tmp_path / "policy.toml").write_text(FREE)
    return made


def test_an_operator_may_act_as_an_agent(repo: Repo, tmp_path: Path) -> None:
    """Branch, checkout, commit and merge work under the agent's policy and are in the agent's record."""
    register("alice")
    whose = ("--agent", "alice", "--policy", str(tmp_path / "policy.toml"))

    def run(*arguments: str, code: int = 0, cwd: Path = repo.root) -> str:
        done = bonobofs("git", *arguments, cwd=cwd)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert run("branch", "aidlc/gt-1", *whose) == "aidlc/gt-1 made at main\n"
    assert run("checkout", "aidlc/gt-1", *whose) == "on aidlc/gt-1\n"
    repo.write("docs/plan.md", "Another\n")
    repo.write("docs/new.md", "New\n")
    assert json.loads(run("status", "--json")) == {
        "branch": "aidlc/gt-1",
        "clean": False,
        "staged": [],
        "modified": ["docs/plan.md"],
        "untracked": ["docs/new.md"],
    }
    assert "+Another" in run("diff")
    said = run("commit", "-m", "Change", "--issue", "gt-1", "plan.md", *whose, cwd=repo.root / "docs")
    assert said == f"{repo.head()[:12]} committed\n"
    assert repo.git("log", "-1", "--format=%s") == "[gt-1] Change\n"
    assert run("diff") == ""
    assert "Begin with the issue" in run("commit", "-m", "Change", "docs/new.md", *whose, code=77)
    assert "the operator's to move" in run("merge", "aidlc/gt-1", "main", *whose, code=77)
    repo.git("branch", "aidlc/other", "main")
    assert run("merge", "aidlc/gt-1", "aidlc/other", *whose) == (f"aidlc/other at {repo.head()[:12]} by fast-forward\n")
    assert "--agent" in run("branch", "aidlc/x", code=2)
    assert "no git repository" in run("status", code=1, cwd=tmp_path)
    repo.git("checkout", "-q", "-b", "aidlc/mine", "main")
    repo.commit("[gt-1] Mine", docs__plan_md="Mine\n")
    repo.write("docs/plan.md", "Not committed\n")
    assert "uncommitted changes" in run("checkout", "main", *whose, code=77)
    repo.git("checkout", "-q", "docs/plan.md")
    assert "conflict: docs/plan.md" in run("merge", "aidlc/gt-1", *whose, code=1)
    denied = json.loads(bonobofs("audit", "query", "--result", "denied", "--json").stdout)
    assert [entry["code"] for entry in denied if entry["kind"] == "intent"] == ["GIT", "PROTECTED", "GIT"]


def test_staged_files_are_committed(repo: Repo, tmp_path: Path) -> None:
    """Without a FILE the command commits what is staged, and refuses a file that changed after it was staged."""
    register("alice")
    whose = ("--agent", "alice", "--policy", str(tmp_path / "policy.toml"), "--issue", "gt-1")
    assert bonobofs("git", "branch", "aidlc/gt-1", *whose[:4], cwd=repo.root).returncode == 0
    assert bonobofs("git", "checkout", "aidlc/gt-1", *whose[:4], cwd=repo.root).returncode == 0
    assert "nothing is staged" in bonobofs("git", "commit", "-m", "Change", *whose, cwd=repo.root).stderr
    repo.write("docs/plan.md", "Staged\n")
    repo.git("add", "docs/plan.md")
    repo.write("docs/plan.md", "Changed again\n")
    assert "changed after it was staged" in bonobofs("git", "commit", "-m", "Change", *whose, cwd=repo.root).stderr
    repo.git("add", "docs/plan.md")
    assert bonobofs("git", "commit", "-m", "Change", *whose, cwd=repo.root).returncode == 0
    assert repo.git("show", "HEAD:docs/plan.md") == "Changed again\n"


def test_in_a_mount_the_session_git_is_used(repo: Repo, mounted: Mounted, tmp_path: Path) -> None:
    """It commits staged or named files, merges into a branch that is not checked out, and lists conflicts."""
    world = mounted(policy=FREE, source=repo.root)

    def run(*arguments: str, code: int = 0) -> str:
        done = bonobofs("git", *arguments, cwd=world.path)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    run("branch", "aidlc/one")
    run("branch", "aidlc/two")
    run("checkout", "aidlc/one")
    (world.path / "docs" / "plan.md").write_text("One\n")
    (world.path / "docs" / "other.md").write_text("Other\n")
    run("commit", "-m", "Change", "--issue", "gt-1", "docs/plan.md")
    assert repo.git("log", "-1", "--format=%s", "aidlc/one") == "[gt-1] Change\n"
    run("merge", "aidlc/one", "aidlc/two")
    assert repo.git("rev-parse", "aidlc/two") == repo.git("rev-parse", "aidlc/one")
    (world.path / "docs" / "plan.md").write_text("Two\n")
    assert "uncommitted changes" in run("checkout", "aidlc/two", code=77)
    run("commit", "-m", "[gt-1] Two", "docs/plan.md")
    run("checkout", "aidlc/two")
    (world.path / "docs" / "plan.md").write_text("Three\n")
    run("commit", "-m", "[gt-1] Three", "docs/plan.md")
    assert "conflict: docs/plan.md" in run("merge", "aidlc/one", code=1)
    assert (world.path / "docs" / "plan.md").read_text() == "Three\n"
