"""What an operator's repository may hold beside the ordinary, the gate reads as git does, and loses nothing of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bonobofs.decision import Refused
from bonobofs.errors import GitError
from tests.git.conftest import Gate, Gated, Repo


def test_a_file_that_is_assumed_unchanged_is_not_thrown_away(alice: Gated) -> None:
    """What lies in a file that git does not look at outlives a stash, which does not hold it, and a reset."""
    alice.git("update-index", "--assume-unchanged", "docs/plan.md")
    alice.write("docs/plan.md", "The operator's own\n")
    alice.write("other.md", "x\n")
    alice.git("add", "other.md")
    alice.gate.stash_push()
    alice.gate.reset("HEAD", "hard")
    assert (alice.root / "docs/plan.md").read_text() == "The operator's own\n"


def test_only_a_newline_ends_a_line(alice: Gated) -> None:
    """Names of packed refs and messages of stashes may hold what ends a line for other programs."""
    alice.git("update-ref", "refs/remotes/origin/e\u2028x", "HEAD")
    alice.git("pack-refs", "--all")
    alice.git("commit", "-q", "--allow-empty", "-m", "Loose again")
    alice.write("docs/plan.md", "Another\n")
    alice.git("stash", "push", "-q", "-m", "a\u2028b\x85c")
    alice.gate.stash_apply(0, drop=True)
    assert (alice.root / "docs/plan.md").read_text() == "Another\n"
    alice.gate.commit("[gt-1] Another", ["docs/plan.md"])
    alice.check()


def test_a_shallow_clone_is_merged_in(repo: Repo, gated: Gate, tmp_path: Path) -> None:
    """Where the history of a clone ends, the gate asks for nothing beyond."""
    repo.commit("The second", a_md="a\n")
    repo.git("clone", "-q", "--depth", "1", f"file://{repo.root}", str(tmp_path / "clone"))
    clone = Repo(tmp_path / "clone")
    clone.git("checkout", "-q", "-b", "aidlc/one")
    alice = gated(clone)
    clone.git("branch", "aidlc/other")
    clone.write("b.md", "b\n")
    alice.gate.commit("[gt-1] b", ["b.md"])
    alice.gate.switch("aidlc/other")
    clone.write("c.md", "c\n")
    alice.gate.commit("[gt-1] c", ["c.md"])
    assert alice.gate.merge("aidlc/one").files == ("b.md",)
    alice.check()


def test_nothing_enters_a_submodule(alice: Gated, tmp_path: Path) -> None:
    """A file in a submodule is its own repository's: it is not staged in its place, and none is moved there."""
    inner = Repo(tmp_path / "inner")
    inner.root.mkdir()
    inner.git("init", "-q", "-b", "main")
    inner.commit("Inner", a_txt="a\n")
    alice.git("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(inner.root), "sub")
    alice.git("commit", "-q", "-m", "A submodule")
    alice.write("sub/new.md", "x\n")
    before = alice.staged()
    for attempt in (
        lambda: alice.gate.add(["sub/new.md"]),
        lambda: alice.gate.commit("[gt-1] x", ["sub/new.md"], only=True),
        lambda: alice.gate.move([("docs/plan.md", "sub/plan.md")]),
    ):
        with pytest.raises(Refused) as refused:
            attempt()
        assert refused.value.decision.rule == "git.submodule"
    assert alice.staged() == before
    assert not (alice.root / "sub/plan.md").exists()


def test_a_stash_holds_what_is_tracked_no_more(alice: Gated) -> None:
    """A file taken out of the index and changed is put aside as it is, before HEAD's comes in its place."""
    alice.git("rm", "-q", "--cached", "docs/plan.md")
    alice.write("docs/plan.md", "Mine\n")
    alice.gate.stash_push()
    assert (alice.root / "docs/plan.md").read_text() == "The plan\n"
    alice.gate.stash_apply(0, drop=True)
    assert (alice.root / "docs/plan.md").read_text() == "Mine\n"


@pytest.mark.parametrize("name", [".gitignore", ".gitattributes"])
def test_a_fifo_in_the_place_of_a_rule_keeps_nobody_waiting(alice: Gated, name: str) -> None:
    """libgit2 would wait for somebody to write to it, with the repository held."""
    alice.write("docs/a.md", "more\n")
    os.mkfifo(alice.root / "docs" / name)
    for look in (lambda: alice.guard.get_status("alice"), lambda: alice.gate.stash_push(include_untracked=True)):
        with pytest.raises(GitError, match=f"docs/{name} is no file; remove it"):
            look()
    (alice.root / "docs" / name).unlink()
    assert alice.gate.status().untracked == ["docs/a.md"]


def test_attributes_that_never_end_are_not_read(alice: Gated) -> None:
    """A FIFO, or a symlink to one, in the place of attributes is refused, and the gate does not wait for it."""
    alice.write("docs/plan.md", "Another\n")
    os.mkfifo(alice.root / ".gitattributes")
    with pytest.raises(GitError) as error:
        alice.gate.commit("[gt-1] x", ["docs/plan.md"])
    assert error.value.kind == "unsupported"
    (alice.root / ".gitattributes").unlink()
    os.mkfifo(alice.root / "pipe")
    os.symlink("../pipe", alice.root / "docs/.gitattributes")
    with pytest.raises(GitError):
        alice.gate.commit("[gt-1] x", ["docs/plan.md"])


def test_packed_refs_that_are_none_are_called_damaged(alice: Gated) -> None:
    """A line without a name is no crash."""
    (alice.root / ".git/packed-refs").write_text("garbage\n")
    with pytest.raises(GitError, match="damaged"):
        alice.gate.create_branch("aidlc/other", "aidlc/work")
    (alice.root / ".git/packed-refs").unlink()
