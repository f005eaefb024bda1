"""Worktrees of agents: mounted, with a session git, and removed without loss."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pygit2
import pytest

from bonobofs import session
from bonobofs.audit.reader import read, trails_in
from bonobofs.audit.trail_storage import stat_trail
from bonobofs.errors import BonobofsError, ForbiddenError, GitError, MountError, PolicyError, UsageError
from bonobofs.git import checkout
from bonobofs.git.source_refs import PublishedBranches
from bonobofs.session import worktrees
from bonobofs.session.worktrees import AddedWorktree, WorktreeRequest
from bonobofs.state.sessions import live_at
from bonobofs.state.worktree_registry import load_all, save, worktree_paths
from bonobofs.system import mounts
from tests.support.observe import out_of_band
from tests.support.wait import until
from tests.support.world import Mounted, bonobofs

POLICY = 'default = "allow"\n[[protect]]\npaths = [".git/"]\n'


def git(where: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = ["git", "-c", "user.name=o", "-c", "user.email=o@example.org", "-C", str(where), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check)


def agents_git(where: Path, *arguments: str) -> str:
    """Run git as the agent does, and return what it said."""
    ran = subprocess.run(["git", "-C", str(where), *arguments], capture_output=True, text=True, check=True)
    return ran.stdout + ran.stderr


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    path = tmp_path / "repository"
    (path / "docs").mkdir(parents=True)
    git(path, "init", "-q", "-b", "main")
    (path / "docs/a.md").write_text("one\n")
    (path / "docs/b.md").write_text("two\n")
    (path / ".gitignore").write_text("*.tmp\n")
    git(path, "add", "-A")
    git(path, "commit", "-qm", "The first")
    return path


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    return path


@pytest.fixture
def wanted(home: Path, repository: Path, policy: Path) -> Iterator[WorktreeRequest]:
    yield WorktreeRequest(repository, "gt-1", "alice", policy=policy)
    for one in load_all(home):
        where = worktree_paths(home, one.worktree)
        with contextlib.suppress(BonobofsError):
            session.unmount_session(home, where.work)
        while mounts.at(where.work):
            mounts.detach(where.work, lazy=True)


def add(home: Path, wanted: WorktreeRequest) -> AddedWorktree:
    return worktrees.add(home, wanted)


def test_an_agent_works_in_a_worktree_of_its_own(home: Path, wanted: WorktreeRequest) -> None:
    """The worktree is mounted at `work`, on the branch of its issue, and git reads there as in any repository."""
    made = add(home, wanted._replace(issue="GT-1.2"))
    assert made.work.name == "work"
    assert made.worktree.branch == "aidlc/gt-1-2"
    assert git(made.work, "symbolic-ref", "--short", "HEAD").stdout == "aidlc/gt-1-2\n"
    assert git(made.work, "status", "--short").stdout == ""
    assert git(made.work, "log", "--format=%s").stdout == "The first\n"
    (made.work / "docs/a.md").write_text("more\n")
    (made.work / "docs/c.md").write_text("new\n")
    assert git(made.work, "status", "--short").stdout == " M docs/a.md\n?? docs/c.md\n"
    status = next(one for one in session.statuses(home) if one.session.mountpoint == str(made.work))
    assert status.session.issue == "GT-1.2"
    assert git(wanted.repository, "status", "--short").stdout == "", "the operator's own work tree is untouched"


def test_the_agent_commits_for_its_issue(home: Path, wanted: WorktreeRequest) -> None:
    """Any git works there. A commit of the issue is published, a commit of another issue is not."""
    made = add(home, wanted)
    (made.work / "docs/a.md").write_text("more\n")
    assert "published aidlc/gt-1" in agents_git(made.work, "commit", "-qam", "[gt-1] Say more")
    assert git(wanted.repository, "log", "-1", "--format=%s", "aidlc/gt-1").stdout == "[gt-1] Say more\n"
    assert git(made.work, "status", "--short").stdout == ""
    assert "not published" in agents_git(made.work, "commit", "-q", "--allow-empty", "-m", "[gt-2] Another")
    assert git(wanted.repository, "log", "-1", "--format=%s", "aidlc/gt-1").stdout == "[gt-1] Say more\n"
    worktrees.remove(home, "gt-1")
    git(wanted.repository, "fsck", "--strict")


def test_a_branch_that_another_prepared_is_refused(home: Path, wanted: WorktreeRequest) -> None:
    """The agent would publish commits that it did not make. The refusal lists the ten newest, and makes nothing."""
    git(wanted.repository, "branch", "aidlc/gt-2")
    git(wanted.repository, "switch", "-qc", "aidlc/gt-1")
    for number in range(12):
        git(wanted.repository, "commit", "-q", "--allow-empty", "-m", f"Prepared {number}")
    tip = git(wanted.repository, "rev-parse", "HEAD").stdout.strip()
    git(wanted.repository, "switch", "-q", "main")
    with pytest.raises(ForbiddenError, match=rf"alice did not publish: {tip[:10]} Prepared 11; .* Prepared 2; rename"):
        add(home, wanted)
    assert list(load_all(home)) == []
    assert add(home, wanted._replace(issue="gt-2")).worktree.branch == "aidlc/gt-2", "it has no commit of its own"


def test_the_agent_gets_its_own_branch_again(home: Path, wanted: WorktreeRequest) -> None:
    """A branch that the agent published, or left in a removed worktree, is its own."""
    made = add(home, wanted)
    (made.work / "docs/a.md").write_text("more\n")
    agents_git(made.work, "commit", "-qam", "[gt-1] Say more")
    worktrees.remove(home, "gt-1")
    assert (add(home, wanted).work / "docs/a.md").read_text() == "more\n"
    worktrees.remove(home, "gt-1")
    with pytest.raises(ForbiddenError, match="bob did not publish"):
        add(home, wanted._replace(agent="bob"))
    tip = git(wanted.repository, "rev-parse", "aidlc/gt-1").stdout.strip()
    assert PublishedBranches(home, wanted.repository / ".git", "").find("refs/heads/aidlc/gt-1")[1] == tip


def test_adding_and_removing_a_worktree_is_recorded_and_not_out_of_band(
    home: Path, wanted: WorktreeRequest, mounted: Mounted
) -> None:
    """The repository is mounted, where other changes of `.git` are out of band."""
    world = mounted(source=wanted.repository, policy=POLICY)
    add(home, wanted)
    worktrees.remove(home, "gt-1")
    (wanted.repository / "sign").touch()
    until(lambda: "sign" in out_of_band(world), "what is a stranger's is entered")
    assert list(out_of_band(world)) == ["sign"]
    found = [
        (one.kind, one.operation, one.action, one.guard, one.result, one.agent == "alice")
        for path in sorted(trails_in(home / "trails"), key=lambda path: stat_trail(path).st_mtime)
        for one in read(path)
        if one.operation.endswith("worktree")
    ]
    assert found == [
        ("intent", "create_worktree", "create", "git", "allowed", True),
        ("outcome", "create_worktree", "create", "git", "allowed", True),
        ("intent", "remove_worktree", "delete", "git", "allowed", False),
        ("outcome", "remove_worktree", "delete", "git", "allowed", False),
    ]


def test_a_fifo_does_not_block_a_removal(home: Path, wanted: WorktreeRequest) -> None:
    """The state of the files is unknown then: the worktree stays, and the error says what to remove."""
    made = add(home, wanted)
    tree = worktree_paths(home, made.worktree.worktree).tree
    os.mkfifo(tree / "docs/.gitignore")
    (made.work / "docs/new.md").write_text("new")
    with pytest.raises(GitError, match=r"docs/\.gitignore is no file; remove it"):
        worktrees.remove(home, "gt-1")
    assert (tree / "docs/new.md").read_text() == "new"
    (tree / "docs/.gitignore").unlink()
    removed = worktrees.remove(home, "gt-1")
    assert removed.files == ("docs/new.md",)


def test_obstacles_of_a_removal_are_found_before_the_unmount(home: Path, wanted: WorktreeRequest) -> None:
    made = add(home, wanted)
    (home / "policy.toml").write_text("default = [")
    with pytest.raises(PolicyError):
        worktrees.remove(home, "gt-1")
    assert live_at(home, made.work) is not None
    (home / "policy.toml").unlink()
    assert worktrees.remove(home, "gt-1").kept is None


def test_files_without_a_commit_are_kept(home: Path, wanted: WorktreeRequest) -> None:
    """Changed, staged, untracked and ignored files survive the removal, and each is listed. The branch stays."""
    made = add(home, wanted)
    tree = worktree_paths(home, made.worktree.worktree).tree
    common = wanted.repository / ".git"
    (made.work / "docs/a.md").write_text("changed\n")
    (made.work / "docs/new.md").write_text("new\n")
    (made.work / "build").mkdir()
    (made.work / "build/x.tmp").write_text("ignored\n")
    (made.work / "docs/b.md").unlink()
    (made.work / "name\udcff").write_bytes(b"odd\n")
    _stage(common, made, tree, "docs/a.md", b"staged\n")
    removed = worktrees.remove(home, "gt-1")
    assert removed.kept is not None
    kept = removed.kept
    assert set(removed.files) == {"docs/a.md", "docs/new.md", "build/x.tmp", "name\udcff"}
    assert removed.deleted == ("docs/b.md",)
    assert {path: (kept / path).read_bytes() for path in removed.files} == {
        "docs/a.md": b"changed\n",
        "docs/new.md": b"new\n",
        "build/x.tmp": b"ignored\n",
        "name\udcff": b"odd\n",
    }
    assert removed.staged == ("docs/a.md",)
    assert Path(f"{kept}.staged", "docs/a.md").read_bytes() == b"staged\n"
    assert not tree.exists()
    assert not made.work.exists()
    assert git(wanted.repository, "branch", "--format=%(refname:short)").stdout.split() == ["aidlc/gt-1", "main"]
    assert len(git(wanted.repository, "worktree", "list").stdout.splitlines()) == 1
    git(wanted.repository, "fsck", "--strict")
    assert worktrees.statuses(home) == []


def _stage(common: Path, made: AddedWorktree, tree: Path, path: str, content: bytes) -> None:
    """Stage something else than the file has, as the gate may have done."""
    (tree / path).rename(tree / "aside")
    (tree / path).write_bytes(content)
    repository = pygit2.Repository(str(common / "worktrees" / made.worktree.name))
    repository.index.add(path)
    repository.index.write()
    (tree / "aside").rename(tree / path)


def test_a_clean_worktree_is_removed_completely(home: Path, wanted: WorktreeRequest) -> None:
    """Where all is committed, nothing is kept."""
    made = add(home, wanted)
    removed = worktrees.remove(home, str(made.work))
    assert removed.kept is None
    assert not (home / "kept").exists()
    with pytest.raises(UsageError, match="no worktree"):
        worktrees.remove(home, "gt-1")


def test_a_worktree_in_use_is_not_removed(home: Path, wanted: WorktreeRequest) -> None:
    """A process has its working directory there, and the mount continues to serve."""
    made = add(home, wanted)
    with subprocess.Popen(["sh", "-c", "read x"], cwd=made.work, stdin=subprocess.PIPE) as standing:
        with pytest.raises(MountError, match="in use"):
            worktrees.remove(home, "gt-1")
        assert (made.work / "docs/a.md").read_text() == "one\n"
        standing.communicate(b"\n")
    worktrees.remove(home, "gt-1")


def test_an_issue_has_a_worktree_when_its_dependencies_are_in_the_base(home: Path, wanted: WorktreeRequest) -> None:
    """A worktree is made when the work of every issue that it depends on is in the base, and not before."""
    first = add(home, wanted)
    second = wanted._replace(issue="gt-2", depends_on=["gt-1"])
    assert first.worktree.base == git(wanted.repository, "rev-parse", "main").stdout.strip()
    tree = git(wanted.repository, "rev-parse", "main^{tree}").stdout.strip()
    made = git(wanted.repository, "commit-tree", tree, "-p", "main", "-m", "[gt-1] Work").stdout.strip()
    git(wanted.repository, "update-ref", "refs/heads/aidlc/gt-1", made)
    with pytest.raises(ForbiddenError, match="waits for gt-1"):
        add(home, second)
    with pytest.raises(ForbiddenError, match="waits for gt-9"):
        add(home, second._replace(depends_on=["gt-9"]))
    worktrees.remove(home, "gt-1")
    with pytest.raises(ForbiddenError, match="waits for gt-1"):
        add(home, second)
    git(wanted.repository, "merge", "-q", "--ff-only", "aidlc/gt-1")
    git(wanted.repository, "branch", "-D", "aidlc/gt-1")
    assert add(home, second).worktree.base == made


def test_a_worktree_is_mounted_again(home: Path, wanted: WorktreeRequest) -> None:
    """After an unmount or a crash it has its earlier files. It belongs to one agent."""
    made = add(home, wanted)
    (made.work / "docs/new.md").write_text("new\n")
    session.unmount_session(home, made.work)
    again = add(home, wanted)
    assert again.work == made.work
    assert again.worktree.worktree == made.worktree.worktree
    assert (again.work / "docs/new.md").read_text() == "new\n"
    assert add(home, wanted).mounted is None
    with pytest.raises(UsageError, match="alice's"):
        add(home, wanted._replace(agent="bob"))


def test_an_unfinished_worktree_is_created_again(home: Path, wanted: WorktreeRequest) -> None:
    """A process killed during `add` leaves no obstacle for the next one."""
    made = add(home, wanted)
    worktrees.remove(home, "gt-1")
    save(home, dataclasses.replace(made.worktree, ready=False, removed=None))
    where = worktree_paths(home, made.worktree.worktree)
    common = wanted.repository / ".git"
    checkout.create(common, made.worktree.name, where.tree, made.worktree.branch, made.worktree.base)
    again = add(home, wanted)
    assert again.worktree.worktree != made.worktree.worktree
    assert git(again.work, "status", "--short").stdout == ""


def test_a_worktree_that_cannot_be_mounted_leaves_nothing(home: Path, wanted: WorktreeRequest) -> None:
    """After a failed mount, the new branch, the publisher and the record are gone. A branch of the operator stays."""
    (home / "worktrees").mkdir()
    (home / "worktrees").chmod(0o777)
    git(wanted.repository, "branch", "aidlc/gt-2")
    for issue in ("gt-1", "gt-2"):
        with pytest.raises(MountError):
            add(home, wanted._replace(issue=issue))
    assert git(wanted.repository, "branch", "--format=%(refname:short)").stdout.split() == ["aidlc/gt-2", "main"]
    assert len(git(wanted.repository, "worktree", "list").stdout.splitlines()) == 1
    assert PublishedBranches(home, wanted.repository / ".git", "").find("refs/heads/aidlc/gt-1") == ("", "")
    assert [path.name for path in (home / "worktrees").iterdir() if path.is_dir()] == []
    (home / "worktrees").chmod(0o700)
    assert add(home, wanted).worktree.branch == "aidlc/gt-1"


def test_without_the_repository_the_complete_work_tree_is_kept(
    home: Path, wanted: WorktreeRequest, tmp_path: Path
) -> None:
    """Without the repository no commit has anything, so the whole work tree is kept."""
    add(home, wanted)
    wanted.repository.rename(tmp_path / "elsewhere")
    removed = worktrees.remove(home, "gt-1")
    assert removed.kept is not None
    assert (removed.kept / "docs/a.md").read_text() == "one\n"


@pytest.mark.parametrize("issue", ["", "../x", "a/b", "-x", "a b", "ä", "a\n", ".git", "x" * 200])
def test_an_invalid_issue_id_is_refused(home: Path, wanted: WorktreeRequest, issue: str) -> None:
    """An issue names a branch and directories."""
    with pytest.raises(UsageError):
        add(home, wanted._replace(issue=issue))
    assert list(load_all(home)) == []


def test_a_worktree_needs_a_repository_and_a_free_branch(home: Path, wanted: WorktreeRequest, tmp_path: Path) -> None:
    """Otherwise no file is left."""
    (tmp_path / "plain").mkdir()
    with pytest.raises(GitError, match="no git repository"):
        add(home, wanted._replace(repository=tmp_path / "plain"))
    git(wanted.repository, "switch", "-qc", "aidlc/gt-1")
    with pytest.raises(GitError, match="cannot be made"):
        add(home, wanted)
    assert worktrees.statuses(home) == []
    with pytest.raises(GitError, match="no commit"):
        add(home, wanted._replace(base="nowhere"))


def test_worktree_commands_run_no_program_of_the_repository(
    home: Path, wanted: WorktreeRequest, tmp_path: Path
) -> None:
    """Hooks, filters and monitors, at creation and removal."""
    traces = tmp_path / "traces"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\necho ran >> {traces}\ncat\n")
    program.chmod(0o755)
    hooks = wanted.repository / ".git/hooks"
    for name in ("post-checkout", "reference-transaction", "pre-commit"):
        (hooks / name).symlink_to(program)
    (wanted.repository / ".gitattributes").write_text("*.md filter=x diff=x\n")
    git(wanted.repository, "add", "-A")
    git(wanted.repository, "-c", "core.hooksPath=/dev/null", "commit", "-qm", "Attributes")
    for key in ("filter.x.smudge", "filter.x.clean", "core.fsmonitor", "diff.x.textconv"):
        git(wanted.repository, "config", key, str(program))
    made = add(home, wanted)
    (made.work / "docs/a.md").write_text("changed\n")
    worktrees.remove(home, "gt-1")
    assert not traces.exists()


def test_the_worktree_commands_print_paths_status_and_kept_files(home: Path, wanted: WorktreeRequest) -> None:
    """`add` prints the path of the mount, `list` the status of each, `remove` every kept file."""
    options = ("--issue", "gt-1", "--agent", "alice", "--repository", str(wanted.repository))
    added = bonobofs("worktree", "add", *options, "--policy", str(wanted.policy))
    assert added.returncode == 0, added.stderr
    work = Path(added.stdout.strip())
    (work / "docs/a.md").write_text("put aside\n")
    agents_git(work, "stash", "push", "-q")
    (work / "docs/new.md").write_text("new\n")
    listed = json.loads(bonobofs("worktree", "list", "--json").stdout)
    assert [(one["issue"], one["agent"], one["mounted"], one["work"]) for one in listed] == [
        ("gt-1", "alice", True, str(work))
    ]
    assert "aidlc/gt-1" in bonobofs("worktree", "list").stdout
    again = bonobofs("worktree", "add", *options, "--base", "nosuch", "--role", "agent")
    assert (again.returncode, again.stdout) == (0, added.stdout)
    assert "the worktree exists, so --base and --role had no effect" in again.stderr
    refused = bonobofs("worktree", "add", "--issue", "gt-2", "--depends-on", "gt-3", *options[2:])
    assert refused.returncode == 77
    removed = bonobofs("worktree", "remove", "gt-1")
    assert removed.returncode == 0, removed.stderr
    assert "docs/new.md" in removed.stdout
    assert "kept in" in removed.stdout
    assert "kept: the repository of alice's session" in removed.stdout
    assert "stash" in removed.stdout
    assert bonobofs("worktree", "remove", "gt-1").returncode == 2
