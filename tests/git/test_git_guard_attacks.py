"""GitGuard executes no program of a repository, and no name, path or tree bypasses a rule."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bonobofs.errors import GitError
from bonobofs.guards import MergeResult
from bonobofs.policy.decision import Code, Refused
from tests.support.git_guards import Gate, Gated, Repo, alice, gated, repo

__all__ = ["alice", "gated", "repo"]

Attack = Callable[[Repo, Path], None]


def _config(key: str, value: str) -> Attack:
    def arm(repo: Repo, mark: Path) -> None:
        repo.git("config", key, value.format(mark=mark))

    return arm


def _hooks(repo: Repo, mark: Path) -> None:
    for name in ("pre-commit", "post-commit", "post-checkout", "reference-transaction", "post-index-change"):
        repo.write(f".git/hooks/{name}", f"#!/bin/sh\ntouch {mark}\n", mode=0o755)


def _hooks_path(repo: Repo, mark: Path) -> None:
    for name in ("pre-commit", "post-checkout", "reference-transaction", "post-index-change"):
        repo.write(f"docs/hooks/{name}", f"#!/bin/sh\ntouch {mark}\n", mode=0o755)
    repo.git("config", "core.hooksPath", "docs/hooks")


def _drivers(repo: Repo, mark: Path) -> None:
    repo.write(".git/info/attributes", "armed.txt diff=evil merge=evil\n")
    repo.git("config", "diff.evil.textconv", f"touch {mark}; cat")
    repo.git("config", "diff.evil.command", f"touch {mark}")
    repo.git("config", "merge.evil.driver", f"touch {mark}")


def _include(repo: Repo, mark: Path) -> None:
    repo.write("docs/config", f"[core]\n\tfsmonitor = touch {mark}\n\tsshCommand = touch {mark}\n")
    repo.git("config", "include.path", "../docs/config")


def _elsewhere(repo: Repo, mark: Path) -> None:
    (mark.parent / "victim").mkdir()
    repo.git("config", "core.worktree", str(mark.parent / "victim"))


ATTACKS: dict[str, Attack] = {
    "hooks": _hooks,
    "hooks path": _hooks_path,
    "diff and merge drivers": _drivers,
    "include": _include,
    "worktree": _elsewhere,
    "fsmonitor": _config("core.fsmonitor", "touch {mark}"),
    "gpg program": _config("gpg.program", "/bin/touch"),
    "editor": _config("core.editor", "touch {mark}"),
    "external diff": _config("diff.external", "touch {mark}"),
    "alternate refs": _config("core.alternateRefsCommand", "touch {mark}"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_git_guard_executes_no_program_of_the_repository(alice: Gated, tmp_path: Path, attack: str) -> None:
    """Hooks, drivers, monitors, signers and included configuration, in every operation."""
    mark = tmp_path / "ran"
    alice.git("branch", "aidlc/other")
    alice.commit("[gt-1] Armed", armed_txt="x\n")
    ATTACKS[attack](alice, mark)
    alice.git("config", "commit.gpgSign", "true")
    alice.write("armed.txt", "changed\n")
    guard = alice.guard
    assert "+changed" in guard.get_diff()
    assert guard.get_status("alice").modified == ["armed.txt"]
    guard.guarded_commit("Armed", ["armed.txt"], "alice", "gt-1")
    guard.guarded_create_branch("aidlc/new", "alice")
    guard.guarded_checkout_branch("aidlc/other", "alice")
    (alice.root / "other.txt").write_text("other\n")
    guard.guarded_commit("Other", ["other.txt"], "alice", "gt-1")
    assert guard.guarded_merge("aidlc/work", "aidlc/other", "alice").success
    assert (alice.root / "armed.txt").read_text() == "changed\n"
    assert not mark.exists()
    assert list((tmp_path / "victim").glob("*")) == []


def test_a_filter_is_not_run(alice: Gated, tmp_path: Path) -> None:
    """A path with a filter program is neither committed nor checked out."""
    mark = tmp_path / "ran"
    alice.git("branch", "aidlc/other")
    alice.commit("[gt-1] Armed", armed_txt="x\n")
    alice.write(".git/info/attributes", "armed.txt filter=evil\n")
    for what in ("clean", "smudge", "process"):
        alice.git("config", f"filter.evil.{what}", f"touch {mark}; cat")
    alice.write("armed.txt", "changed\n")
    with pytest.raises(Refused) as caught:
        alice.guard.guarded_commit("Armed", ["armed.txt"], "alice", "gt-1")
    assert caught.value.decision.rule == "git.filter"
    alice.write("armed.txt", "x\n")
    with pytest.raises(Refused) as caught:
        alice.guard.guarded_checkout_branch("aidlc/other", "alice")
    assert caught.value.decision.rule == "git.filter"
    (alice.root / ".git/info/attributes").unlink()
    alice.guard.guarded_checkout_branch("aidlc/other", "alice")
    assert not mark.exists()


TRICKS = ["-flag", "refs/heads/x:main", "@{-1}", "@", "HEAD^{/x}", "a..b", "x~1", ":/x", "../config", "HEAD.lock"]
TRICKS += [
    "main\0",
    "refs/heads/../../HEAD",
    "main\n",
    "\uff4dain",
    "refs/heads",
    "FETCH_HEAD",
    "config",
    "objects/info",
]


@pytest.mark.parametrize("name", TRICKS)
def test_a_branch_name_is_not_parsed_as_a_revision(alice: Gated, name: str) -> None:
    """Flags, ranges, reflogs, paths and similar names."""
    alice.git("branch", "aidlc/other")
    before = alice.git("for-each-ref"), alice.head(), sorted(path.name for path in (alice.root / ".git").iterdir())
    guard = alice.guard
    calls: list[Callable[[], object]] = [
        lambda: guard.guarded_create_branch(name, "alice"),
        lambda: guard.guarded_create_branch("aidlc/new", "alice", name),
        lambda: guard.guarded_checkout_branch(name, "alice"),
        lambda: guard.guarded_merge(name, "aidlc/work", "alice"),
        lambda: guard.guarded_merge("aidlc/other", name, "alice"),
    ]
    for call in calls:
        with pytest.raises(Refused):
            call()
    after = alice.git("for-each-ref"), alice.head(), sorted(path.name for path in (alice.root / ".git").iterdir())
    assert after == before


def test_a_symbolic_branch_of_main_is_not_moved(alice: Gated) -> None:
    """GitGuard does not follow symbolic references."""
    before = alice.head("main")
    alice.git("symbolic-ref", "refs/heads/aidlc/alias", "refs/heads/main")
    with pytest.raises(Refused) as caught:
        alice.guard.guarded_merge("aidlc/work", "aidlc/alias", "alice")
    assert caught.value.decision.rule == "git.symbolic"
    alice.git("symbolic-ref", "HEAD", "refs/heads/aidlc/alias")
    alice.write("docs/plan.md", "Changed\n")
    with pytest.raises((Refused, GitError)):
        alice.guard.guarded_commit("x", ["docs/plan.md"], "alice", "gt-1")
    assert alice.head("main") == before


EVIL = [
    b".git/config",
    b".GIT/hooks/x",
    b"a/.git/x",
    b"git~1/x",
    b".git ./x",
    b".g\xe2\x80\x8cit/x",
    b"../x",
    b"a/../x",
]


@pytest.mark.parametrize("path", EVIL)
def test_a_tree_with_a_forbidden_path_is_refused(alice: Gated, path: bytes) -> None:
    """A commit with a path below .git, or one that leads out, is neither merged nor checked out."""
    blob = alice.git("hash-object", "-w", "--stdin", given="evil\n").strip()
    tree = ""
    for depth, name in enumerate(reversed(path.split(b"/"))):
        line = f"{'100644 blob' if depth == 0 else '040000 tree'} {blob if depth == 0 else tree}\t".encode() + name
        tree = alice.git("mktree", "-z", given=os.fsdecode(line + b"\0")).strip()
    commit = alice.git("commit-tree", tree, "-p", "HEAD", "-m", "[gt-1] Evil").strip()
    alice.git("update-ref", "refs/heads/aidlc/evil", commit)
    before = alice.files(), alice.head()
    for call in (
        lambda: alice.guard.guarded_merge("aidlc/evil", "aidlc/work", "alice"),
        lambda: alice.guard.guarded_checkout_branch("aidlc/evil", "alice"),
    ):
        with pytest.raises((Refused, GitError)):
            call()
    assert (alice.files(), alice.head()) == before
    assert not (alice.root.parent / "x").exists()


def test_no_denied_path_enters_from_another_branch(repo: Repo, gated: Gate) -> None:
    """Merge, squash and checkout refuse a path that the agent may not write, unless a protected branch has it."""
    repo.commit("Base", src__app_py="print(1)\n", aidlc__a_md="a\n")
    repo.git("checkout", "-q", "-b", "aidlc/other")
    repo.commit("[gt-1] Theirs", src__app_py="print(2)\n", docs__new_md="new\n")
    repo.git("checkout", "-q", "-b", "aidlc/gone", "main")
    repo.commit("[gt-1] Gone", src__app_py=None)
    repo.git("checkout", "-q", "-b", "aidlc/old", "main")
    repo.git("checkout", "-q", "main")
    repo.commit("Main goes on", src__app_py="print(3)\n")
    repo.git("checkout", "-q", "-b", "aidlc/work")
    alice = gated(repo, policy='[[rule]]\nname = "docs"\npaths = ["docs/", "aidlc/"]\n')
    before = repo.files(), repo.git("for-each-ref"), repo.staged()
    guard = alice.guard
    calls: list[Callable[[str], object]] = [
        lambda branch: guard.guarded_merge(branch, "aidlc/old", "alice"),
        lambda branch: guard.guarded_merge(branch, "aidlc/old", "alice", "squash"),
        lambda branch: guard.guarded_checkout_branch(branch, "alice"),
    ]
    for branch in ("aidlc/other", "aidlc/gone"):
        for call in calls:
            with pytest.raises(Refused) as caught:
                call(branch)
            assert (caught.value.decision.code, caught.value.decision.path) == (Code.DEFAULT, "src/app.py")
    assert (repo.files(), repo.git("for-each-ref"), repo.staged()) == before
    assert guard.guarded_merge("main", "aidlc/old", "alice").fast_forward, "what main has is free"
    guard.guarded_checkout_branch("main", "alice")


def test_a_large_file_is_refused_before_it_is_read(repo: Repo, gated: Gate) -> None:
    """A file beyond the limit costs no memory: it is judged by its size first."""
    repo.git("checkout", "-q", "-b", "aidlc/work")
    with repo.write("docs/huge.md", "").open("r+b") as file:
        file.truncate(1 << 42)
    alice = gated(repo, policy='[[rule]]\nname = "docs"\npaths = ["docs/"]\nmax_size = "1MB"\n')
    with pytest.raises(Refused) as caught:
        alice.guard.guarded_commit("x", ["docs/huge.md"], "alice", "gt-1")
    assert caught.value.decision.code is Code.SIZE


@pytest.mark.parametrize("kind", ["fifo", "directory", "socket"])
def test_only_files_and_symlinks_are_committed(alice: Gated, kind: str) -> None:
    """A FIFO is refused without opening it, and a directory is not replaced by its files."""
    if kind == "fifo":
        os.mkfifo(alice.root / "thing")
    elif kind == "directory":
        alice.write("thing/a", "a")
    else:
        os.mknod(alice.root / "thing", 0o140644)
    with pytest.raises(GitError) as caught:
        alice.guard.guarded_commit("x", ["thing"], "alice", "gt-1")
    assert caught.value.kind == "pathspec"
    assert "thing" not in alice.staged()


def test_a_symlink_in_a_path_is_not_followed(alice: Gated, tmp_path: Path) -> None:
    """Neither a commit nor a checkout follows a symlink in place of a directory."""
    alice.commit("[gt-1] Deep", deep__inner__a_md="a\n")
    alice.git("branch", "aidlc/other", "main")
    victim = tmp_path / "victim"
    (victim / "inner").mkdir(parents=True)
    (victim / "inner/a.md").write_text("a\n")
    (alice.root / "deep").rename(tmp_path / "deep")
    (alice.root / "deep").symlink_to(victim)
    with pytest.raises((Refused, GitError)):
        alice.guard.guarded_commit("x", ["deep/inner/a.md"], "alice", "gt-1")
    with pytest.raises((Refused, GitError)):
        alice.guard.guarded_checkout_branch("aidlc/other", "alice")
    assert (victim / "inner/a.md").read_text() == "a\n"


@pytest.mark.parametrize("name", [".gitignore", ".gitattributes"])
def test_a_fifo_in_place_of_gitignore_or_gitattributes_is_an_error(alice: Gated, name: str) -> None:
    """git would wait for a writer."""
    alice.write("docs/a.md", "more\n")
    os.mkfifo(alice.root / "docs" / name)
    with pytest.raises(GitError, match=f"docs/{name} is no file; remove it"):
        alice.guard.get_status("alice")
    (alice.root / "docs" / name).unlink()
    assert alice.guard.get_status("alice").untracked == ["docs/a.md"]


def test_a_merge_keeps_authors_and_committers(repo: Repo, gated: Gate) -> None:
    """A lead merges the branches of its team. The paths are judged as the lead's."""
    repo.git("branch", "aidlc/release")
    repo.git("checkout", "-q", "-b", "aidlc/bob")
    bob = gated(repo, agent="bob")
    repo.write("docs/plan.md", "Bob's plan\n")
    made = bob.guard.guarded_commit("Plan", ["docs/plan.md"], "bob", "gt-1")
    alice = gated(repo, agent="alice")
    merged = alice.guard.merge("aidlc/bob", "aidlc/release", "alice")
    assert isinstance(merged, MergeResult)
    assert (merged.success, merged.commit_hash) == (True, made)
    assert repo.git("log", "-1", "--format=%an %cn", "aidlc/release") == "bob bob\n"
