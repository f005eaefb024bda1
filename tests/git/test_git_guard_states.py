"""GitGuard in unusual repositories, with concurrent programs, and killed at every step."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from bonobofs.errors import GitError
from bonobofs.guards import MergeResult
from bonobofs.policy.decision import Refused
from tests.support.git_guards import FREE, Gate, Gated, Repo, alice, gated, repo
from tests.support.world import ROOT, register

__all__ = ["alice", "gated", "repo"]

NOBODY = 65534


def test_an_empty_repository_gets_its_first_commit(tmp_path: Path, gated: Gate) -> None:
    """On an unborn branch the commit has no parent; on an unborn main it is refused."""
    root = tmp_path / "source"
    root.mkdir()
    repo = Repo(root)
    repo.git("init", "-q", "-b", "aidlc/work")
    repo.write("a.md", "a\n")
    alice = gated(repo)
    assert alice.guard.get_status("alice").untracked == ["a.md"]
    made = alice.guard.guarded_commit("First", ["a.md"], "alice", "gt-1")
    assert (repo.head(), repo.git("log", "--format=%P").strip(), repo.status()) == (made, "", "")
    repo.git("symbolic-ref", "HEAD", "refs/heads/main")
    with pytest.raises(Refused):
        alice.guard.guarded_commit("First", ["a.md"], "alice", "gt-1")
    repo.check()


@pytest.mark.parametrize(
    "shape", ["packed", "shallow", "partial", "alternates", "worktree", "split index", "packed refs"]
)
def test_git_guard_works_in_repositories_of_many_shapes(repo: Repo, gated: Gate, tmp_path: Path, shape: str) -> None:
    """Branch, checkout, commit and merge."""
    repo.commit("The second", a_md="a\n")
    place = tmp_path / "other"
    there = Repo(place)
    if shape in ("packed", "split index", "packed refs"):
        there = repo
        words = {"packed": "gc", "split index": "update-index --split-index", "packed refs": "pack-refs --all --prune"}
        repo.git(*words[shape].split())
    elif shape == "worktree":
        repo.git("worktree", "add", "-q", "--detach", str(place))
    else:
        options = {"shallow": ["--depth=1"], "partial": ["--filter=blob:none"], "alternates": ["--shared"]}[shape]
        repo.git("config", "uploadpack.allowFilter", "true")
        repo.git(
            "clone", "-q", *options, f"file://{repo.root}" if shape != "alternates" else str(repo.root), str(place)
        )
    alice = gated(there)
    guard = alice.guard
    guard.guarded_create_branch("aidlc/one", "alice")
    guard.guarded_create_branch("aidlc/two", "alice")
    guard.guarded_checkout_branch("aidlc/one", "alice")
    there.write("b.md", "b\n")
    guard.guarded_commit("b", ["b.md"], "alice", "gt-1")
    guard.guarded_checkout_branch("aidlc/two", "alice")
    assert not (there.root / "b.md").exists()
    there.write("a.md", "a\nmore\n")
    guard.guarded_commit("a", ["a.md"], "alice", "gt-1")
    merged = guard.merge("aidlc/one", "aidlc/two", "alice")
    assert isinstance(merged, MergeResult)
    assert merged.success
    assert {name: content for name, (_, content) in there.files().items() if name in ("a.md", "b.md")} == {
        "a.md": b"a\nmore\n",
        "b.md": b"b\n",
    }
    assert there.status() == ""
    assert there.git("symbolic-ref", "HEAD") == "refs/heads/aidlc/two\n"
    there.git("fsck", "--strict", "--no-dangling")


def test_symlinks_modes_and_odd_names_are_kept(alice: Gated) -> None:
    """A checkout writes the same tree as git, with non-UTF-8 names, and directories in place of files."""
    alice.git("branch", "aidlc/before")
    alice.write("run.sh", "#!/bin/sh\n", mode=0o755)
    (alice.root / "link").symlink_to("docs/plan.md")
    (alice.root / os.fsdecode(b"na\xffme")).write_bytes(b"odd\n")
    (alice.root / "docs/plan.md").unlink()
    (alice.root / "docs").rmdir()
    alice.write("docs", "a file now\n")
    names = ["run.sh", "link", os.fsdecode(b"na\xffme"), "docs", "docs/plan.md"]
    alice.guard.guarded_commit("x", names, "alice", "gt-1")
    assert alice.status() == ""
    after = alice.files()
    alice.guard.guarded_checkout_branch("aidlc/before", "alice")
    assert (alice.files(), alice.status()) == ({"docs/plan.md": (0, b"The plan\n")}, "")
    alice.guard.guarded_checkout_branch("aidlc/work", "alice")
    assert (alice.files(), alice.status()) == (after, "")
    alice.check()


@pytest.mark.parametrize(("config", "attributes"), [("true", ""), ("input", ""), ("", "*.md text eol=crlf\n")])
def test_line_endings_are_those_of_git(alice: Gated, config: str, attributes: str) -> None:
    """In commits and in checkouts."""
    if config:
        alice.git("config", "core.autocrlf", config)
    if attributes:
        alice.commit("[gt-1] Attributes")
        alice.write(".gitattributes", attributes)
        alice.git("add", "-A")
        alice.git("commit", "-qm", "[gt-1] Attributes")
    alice.git("branch", "aidlc/before")
    alice.write("docs/new.md", "one\r\ntwo\r\n")
    alice.guard.guarded_commit("New", ["docs/new.md"], "alice", "gt-1")
    assert alice.git("show", "HEAD:docs/new.md") == "one\ntwo\n"
    alice.guard.guarded_checkout_branch("aidlc/before", "alice")
    alice.guard.guarded_checkout_branch("aidlc/work", "alice")
    written = (alice.root / "docs/new.md").read_bytes()
    (alice.root / "docs/new.md").unlink()
    alice.git("checkout", "-q", "docs/new.md")
    assert (alice.root / "docs/new.md").read_bytes() == written
    assert alice.status() == ""


@pytest.mark.parametrize("operation", ["commit", "merge", "checkout"])
@pytest.mark.parametrize("lock", ["index.lock", "HEAD.lock", "refs/heads/aidlc/work.lock"])
def test_a_lock_of_git_leaves_files_index_and_refs_as_they_were(alice: Gated, lock: str, operation: str) -> None:
    """The operation is refused before it changes anything, or restores the files, and the lock stays."""
    alice.git("checkout", "-q", "-b", "aidlc/other")
    alice.commit("[gt-1] Other", new__dir__a_md="a\n", docs__plan_md=None, b_md="b\n")
    alice.git("checkout", "-q", "aidlc/work")
    if operation == "commit":
        alice.write("docs/plan.md", "Second\n")
    alice.write(f".git/{lock}", "")
    before = alice.files(), alice.staged(), alice.git("for-each-ref"), (alice.root / ".git/HEAD").read_text()
    calls: dict[str, Callable[[], object]] = {
        "commit": lambda: alice.guard.guarded_commit("x", ["docs/plan.md"], "alice", "gt-1"),
        "merge": lambda: alice.guard.guarded_merge("aidlc/other", "aidlc/work", "alice"),
        "checkout": lambda: alice.guard.guarded_checkout_branch("aidlc/other", "alice"),
    }
    is_in_the_way = lock == "index.lock" or lock.startswith("HEAD") == (operation == "checkout")
    if is_in_the_way:
        with pytest.raises(GitError) as caught:
            calls[operation]()
        assert caught.value.kind == "busy"
        now = alice.files(), alice.staged(), alice.git("for-each-ref"), (alice.root / ".git/HEAD").read_text()
        assert now == before
        assert not (alice.root / "new").exists()
    else:
        calls[operation]()
    assert (alice.root / f".git/{lock}").exists()
    (alice.root / f".git/{lock}").unlink()
    assert "incomplete" not in json.dumps([entry.details for entry in alice.entries()])
    calls[operation]() if is_in_the_way else None
    assert alice.status() == ""


def test_a_checkout_that_fails_in_the_middle_restores_the_files(alice: Gated) -> None:
    """The limit on the size of a file ends git while it writes the last one."""
    alice.git("checkout", "-q", "-b", "aidlc/other")
    alice.commit("[gt-1] Other", a__a_md="a\n", docs__plan_md="Other\n", z_bin="0" * (8 << 20))
    alice.git("checkout", "-q", "aidlc/work")
    before = alice.files(), alice.head(), alice.staged()
    for call in (
        lambda: alice.guard.guarded_checkout_branch("aidlc/other", "alice"),
        lambda: alice.guard.guarded_merge("aidlc/other", "aidlc/work", "alice"),
    ):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, limits[1]))
        try:
            with pytest.raises(GitError):
                call()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (alice.files(), alice.head(), alice.staged(), alice.status()) == (*before, "")
        assert not (alice.root / "a").exists()
    assert alice.guard.guarded_merge("aidlc/other", "aidlc/work", "alice").success


@pytest.mark.parametrize("operation", ["merge", "cherry-pick"])
def test_a_commit_is_refused_during_a_git_operation(repo: Repo, gated: Gate, operation: str) -> None:
    """The commit would lack its second parent or its author."""
    repo.git("checkout", "-q", "-b", "side")
    repo.commit("Theirs", docs__plan_md="theirs\n")
    repo.git("checkout", "-q", "-b", "aidlc/work", "main")
    repo.commit("Ours", docs__plan_md="ours\n")
    repo.git(operation, "side", code=1)
    alice = gated(repo)
    before = repo.head(), repo.git("status")
    with pytest.raises(GitError) as caught:
        alice.guard.guarded_commit("Both", ["docs/plan.md"], "alice", "gt-1")
    assert caught.value.kind == "unmerged"
    assert (repo.head(), repo.git("status")) == before


def test_a_change_within_one_second_is_detected(alice: Gated) -> None:
    """git reports a file as modified that changes again at once with the same size."""
    for number in range(10):
        alice.write("docs/plan.md", f"plan {number}\n")
        alice.guard.guarded_commit("x", ["docs/plan.md"], "alice", "gt-1")
        alice.write("docs/plan.md", f"PLAN {number}\n")
        assert alice.status() == " M docs/plan.md\n", number


@pytest.mark.root
def test_files_created_by_root_belong_to_the_owner(alice: Gated) -> None:
    """A service that runs as root creates no file in a user's repository that the user cannot change."""
    alice.git("checkout", "-q", "-b", "aidlc/other")
    alice.commit("[gt-1] More", new__dir__a_md="a\n")
    alice.git("checkout", "-q", "aidlc/work")
    subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", alice.root], check=True)
    (alice.root / "docs/plan.md").write_text("Changed\n")
    alice.guard.guarded_commit("Change", ["docs/plan.md"], "alice", "gt-1")
    assert alice.guard.guarded_merge("aidlc/other", "aidlc/work", "alice").success
    alice.guard.guarded_create_branch("aidlc/deep/er", "alice")
    alice.guard.guarded_checkout_branch("aidlc/other", "alice")
    assert [str(path) for path in alice.root.rglob("*") if path.lstat().st_uid != NOBODY] == []


def test_a_commit_is_signed_by_policy_or_operator_settings(repo: Repo, gated: Gate, tmp_path: Path) -> None:
    """By ssh, with the operator's key. The repository's own configuration causes no signature."""
    key, mark = tmp_path / "key", tmp_path / "ran"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    repo.git("checkout", "-q", "-b", "aidlc/work")
    repo.git("config", "gpg.ssh.program", f"/bin/touch {mark}")
    repo.git("config", "commit.gpgSign", "true")
    for policy, signed in ((f'[git]\nsign = "ssh:{key}"\n', True), ('[git]\nsign = "off"\n', False), ("", False)):
        alice = gated(repo, policy=FREE + policy)
        repo.write("docs/plan.md", f"{policy}\n")
        alice.guard.guarded_commit("x", ["docs/plan.md"], "alice", "gt-1")
        assert ("BEGIN SSH SIGNATURE" in repo.git("cat-file", "commit", "HEAD")) is signed, policy
    alice = gated(repo, policy=FREE + '[git]\nsign = "ssh:/nowhere/key"\n')
    repo.write("docs/plan.md", "Not signed\n")
    before = repo.head(), repo.staged()
    with pytest.raises(GitError) as caught:
        alice.guard.guarded_commit("x", ["docs/plan.md"], "alice", "gt-1")
    assert caught.value.kind == "signing"
    assert (repo.head(), repo.staged()) == before
    assert not mark.exists()


def test_the_operators_configuration_signs_without_a_policy_setting(repo: Repo, tmp_path: Path) -> None:
    """If the policy does not specify it."""
    register("alice")
    key, person = tmp_path / "key", tmp_path / "person"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    person.mkdir()
    (person / ".gitconfig").write_text(
        f"[commit]\n\tgpgSign = true\n[gpg]\n\tformat = ssh\n[user]\n\tsigningKey = {key}\n"
    )
    (tmp_path / "policy.toml").write_text(FREE)
    repo.git("checkout", "-q", "-b", "aidlc/work")
    repo.write("docs/plan.md", "Changed\n")
    words = ["git", "commit", "-m", "[gt-1] Signed", "docs/plan.md", "--agent", "alice", "--policy"]
    environment = {**os.environ, "HOME": str(person), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-m", "bonobofs", *words, tmp_path / "policy.toml"],
        cwd=repo.root,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "BEGIN SSH SIGNATURE" in repo.git("cat-file", "commit", "HEAD")


_KILLED = """
import os, signal, sys
from pathlib import Path
from bonobofs.guards import GitGuard
from bonobofs.session import open_session

root, policy, operation, at = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
count = 0

def kill(event, arguments):
    global count
    changes = event in ("os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.symlink")
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & 3
    # A relative name is one below a directory of the work tree that is held open.
    path = os.fsdecode(arguments[0]) if (changes or writes) and not isinstance(arguments[0], int) else "/"
    if (changes or writes) and (str(root) in path or not path.startswith("/")):
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)

with open_session(root, agent="alice", policy=policy) as session, GitGuard(session) as guard:
    sys.addaudithook(kill)
    if operation == "commit":
        guard.guarded_commit("x", ["a.txt"], "alice", "gt-1")
    elif operation == "merge":
        guard.guarded_merge("aidlc/other", "aidlc/work", "alice")
    else:
        guard.guarded_checkout_branch("aidlc/other", "alice")
    done, count = count, -1000
    print(done)
"""


KILLS: Final = 12
"""Steps at which an operation is killed, spread over all of them; BONOBOFS_TEST_KILLS=all kills it at each."""


def _chosen(steps: int) -> list[int]:
    every = list(range(1, steps + 1))
    if os.environ.get("BONOBOFS_TEST_KILLS") == "all" or steps <= KILLS:
        return every
    return sorted({every[number * (steps - 1) // (KILLS - 1)] for number in range(KILLS)})


@pytest.mark.parametrize("operation", ["commit", "merge", "checkout"])
@pytest.mark.timeout(600)
def test_a_kill_at_any_step_leaves_a_valid_repository(tmp_path: Path, gated: Gate, operation: str) -> None:
    """The next GitGuard operation removes the remains. Refs and HEAD are old or new, and fsck succeeds."""
    base = Repo(tmp_path / "base")
    base.root.mkdir()
    base.git("init", "-q", "-b", "main")
    base.commit("Base", a_txt="a\n", gone_txt="gone\n", dir__deep_txt="deep\n")
    base.git("checkout", "-q", "-b", "aidlc/other")
    base.commit("[gt-1] Other", dir__deep_txt=None, other__one_txt="1\n", gone_txt="still\n")
    base.git("checkout", "-q", "-b", "aidlc/work", "main")
    base.commit("[gt-1] Work", work_txt="work\n")
    if operation == "commit":
        base.write("a.txt", "changed\n")
    policy = tmp_path / "policy.toml"
    policy.write_text(FREE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}

    def run(repo: Repo, at: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", _KILLED, str(repo.root), str(policy), operation, str(at)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    whole = run(base.copy(tmp_path / "whole"), 0)
    assert whole.returncode == 0, whole.stderr
    steps = int(whole.stdout)
    assert steps > 3
    for at in _chosen(steps):
        repo = base.copy(tmp_path / f"killed-{at}")
        assert run(repo, at).returncode == -9, at
        alice = gated(repo)
        alice.guard.guarded_create_branch(f"aidlc/after-{at}", "alice")
        repo.check()
        if repo.head("aidlc/work") != base.head():
            assert repo.status() == "", "the index followed the branch"
        assert repo.run("reset", "--hard", "-q").returncode == 0
        assert repo.head("aidlc/other") == base.head("aidlc/other")
        if operation != "checkout":
            assert repo.head("aidlc/work~0") == base.head() or repo.head("aidlc/work^1") == base.head()


def test_many_files_are_committed_and_checked_out(alice: Gated) -> None:
    """A thousand files in one call."""
    alice.git("branch", "aidlc/before")
    names = [f"many/{number % 10}/{number}.txt" for number in range(1000)]
    for name in names:
        alice.write(name, name)
    alice.guard.guarded_commit("Many", names, "alice", "gt-1")
    alice.guard.guarded_checkout_branch("aidlc/before", "alice")
    assert not (alice.root / "many").exists()
    alice.guard.guarded_checkout_branch("aidlc/work", "alice")
    assert alice.status() == ""
