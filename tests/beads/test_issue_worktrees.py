"""A worktree of an issue needs the end of the issues that it depends on."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from bonobofs import session
from bonobofs.errors import BonobofsError
from bonobofs.hooks.hook_events import answer
from bonobofs.policy.decision import Refused
from bonobofs.state.worktree_registry import load_all, worktree_paths
from bonobofs.system import mounts
from tests.support.beads_workspace import Workspace
from tests.support.world import ALLOW_ALL, bonobofs


@pytest.fixture
def repository(beads_workspace: Workspace, home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workspace]:
    """The workspace as a repository. The fixture unmounts every worktree of it."""
    monkeypatch.setenv("BONOBOFS_BD", str(beads_workspace.bd))
    place = beads_workspace.directory
    (place / "a.md").write_text("one\n")
    for command in (["init", "-q", "-b", "main"], ["add", "a.md"], ["commit", "-qm", "The first"]):
        identity = ["-c", "user.name=o", "-c", "user.email=o@example.org"]
        subprocess.run(["git", *identity, *command], cwd=place, check=True)
    yield beads_workspace
    for one in load_all(home):
        mountpoint = worktree_paths(home, one.worktree).work
        with suppress(BonobofsError):
            session.unmount_session(home, mountpoint)
        while mounts.at(mountpoint):
            mounts.detach(mountpoint, lazy=True)


def add(
    repository: Workspace, issue: str, tmp_path: Path, where: Path | None = None
) -> subprocess.CompletedProcess[str]:
    policy = tmp_path / "policy.toml"
    policy.write_text(ALLOW_ALL)
    words = ["--issue", issue, "--agent", "alice", "--new", "--policy", str(policy)]
    return bonobofs("worktree", "add", *words, cwd=where or repository.directory)


def test_an_issue_has_no_worktree_before_its_dependencies_have_ended(repository: Workspace, tmp_path: Path) -> None:
    one, first, second, top = (repository.create(title) for title in ("one", "first", "second", "top"))
    repository.run("dep", "add", one, first)
    repository.run("dep", "add", one, second, "--type=waits-for")
    repository.run("dep", "add", one, top, "--type=parent-child")
    refused = add(repository, one, tmp_path)
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (77, "", 1)
    assert all(waiting in refused.stderr for waiting in (first, second))
    assert top not in refused.stderr
    assert json.loads(bonobofs("worktree", "list", "--json").stdout) == []
    repository.run("close", first)
    assert first not in add(repository, one, tmp_path).stderr
    repository.run("close", second)
    made = add(repository, one, tmp_path)
    assert made.returncode == 0, made.stderr
    assert "bonobofs_worktree" in repository.issue(one)["metadata"]
    assert add(repository, one, tmp_path).returncode == 0, "it is there, and is not requested again"
    other = repository.create("other")
    late = bonobofs("beads", "dep", "add", one, other, "--agent", "alice", cwd=repository.directory)
    assert (late.returncode, "may have begun" in late.stderr) == (77, True)


def test_an_issue_is_not_begun_if_its_worktree_cannot_be_mounted(
    repository: Workspace, tmp_path: Path, home: Path
) -> None:
    """A blocker can still be added to the issue."""
    one, other = repository.create("one"), repository.create("other")
    (home / "worktrees").mkdir()
    (home / "worktrees").chmod(0o777)
    refused = add(repository, one, tmp_path)
    assert refused.returncode == 1, refused.stderr
    late = bonobofs("beads", "dep", "add", one, other, "--agent", "alice", cwd=repository.directory)
    assert late.returncode == 0, late.stderr


def test_an_unknown_issue_has_no_worktree(repository: Workspace, tmp_path: Path, home: Path) -> None:
    refused = add(repository, "gt-none", tmp_path)
    assert (refused.returncode, "no issue of this id" in refused.stderr) == (77, True)
    assert list(load_all(home)) == []


def test_a_client_names_a_worktree_as_it_likes(repository: Workspace, home: Path) -> None:
    """Only the name of an issue begins the issue, by the rules for issues."""
    one, first = repository.create("one"), repository.create("first")
    repository.run("dep", "add", one, first)
    event = {"cwd": str(repository.directory)}
    work = Path(answer("WorktreeCreate", {**event, "name": "brave-turing"}))
    assert (work / "a.md").read_text() == "one\n"
    assert answer("WorktreeRemove", {"worktree_path": str(work)}) == ""
    with pytest.raises(Refused, match="waits for"):
        answer("WorktreeCreate", {**event, "name": one})
    repository.run("close", first)
    answer("WorktreeCreate", {**event, "name": one})
    assert "bonobofs_worktree" in repository.issue(one)["metadata"]
    assert [record.issue for record in load_all(home)] == ["brave-turing", one]


def test_a_linked_worktree_uses_the_issues_of_the_main_one(repository: Workspace, tmp_path: Path) -> None:
    """`.beads` is ignored by git, so only the main work tree has it. The dependency applies in both."""
    one, first, other = (repository.create(title) for title in ("one", "first", "other"))
    repository.run("dep", "add", one, first)
    (repository.directory / ".gitignore").write_text(".beads/\n")
    linked = tmp_path / "linked"
    subprocess.run(["git", "worktree", "add", "-q", str(linked)], cwd=repository.directory, check=True)
    assert not (linked / ".beads").exists()
    refused = add(repository, one, tmp_path, where=linked)
    assert (refused.returncode, first in refused.stderr) == (77, True)
    repository.run("close", first)
    made = add(repository, one, tmp_path, where=linked)
    assert made.returncode == 0, made.stderr
    assert "bonobofs_worktree" in repository.issue(one)["metadata"]
    late = bonobofs("beads", "dep", "add", one, other, "--agent", "alice", cwd=linked)
    assert (late.returncode, "may have begun" in late.stderr) == (77, True)


def test_in_a_worktree_bd_has_the_issues_of_the_repository(repository: Workspace, tmp_path: Path, home: Path) -> None:
    one = repository.create("one")
    assert add(repository, one, tmp_path).returncode == 0
    (made,) = load_all(home)
    work = str(worktree_paths(home, made.worktree).work)
    taken = bonobofs("shell", work, "--", "bd", "update", one, "--claim", "--json")
    assert taken.returncode == 0, taken.stderr
    assert [issue["status"] for issue in json.loads(taken.stdout)] == ["in_progress"]
    assert repository.issue(one)["assignee"] == "alice"
    assert bonobofs("shell", work, "--", "bd", "import", "x").returncode == 77
    assert bonobofs("worktree", "remove", one).returncode == 0
    assert repository.issue(one)["status"] == "in_progress"
