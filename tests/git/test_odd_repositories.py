"""What an operator's repository may hold beside the ordinary, the gate reads as git does, and loses nothing of it."""

from __future__ import annotations

from tests.git.conftest import Gated


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
