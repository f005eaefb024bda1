"""GitGuard and `git merge` agree on merges and conflicts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bonobofs.guards import MergeResult
from tests.git.histories import Shape, grow, merges_of
from tests.support.git_guards import Gate, Gated, Repo, alice, gated, repo

__all__ = ["alice", "gated", "repo"]


def merge(guarded: Gated, source: str, target: str) -> MergeResult:
    merged = guarded.guard.merge(source, target, "alice")
    assert isinstance(merged, MergeResult), merged
    return merged


@pytest.mark.parametrize("part", range(2))
@pytest.mark.timeout(400)
def test_merges_have_the_result_of_git(tmp_path: Path, gated: Gate, part: int) -> None:
    """For histories of many shapes the trees and the conflicting paths are equal."""
    seen = {"merged": 0, "conflicts": 0, "forward": 0, "crossed": 0}
    root = tmp_path / "source"
    root.mkdir()
    repo = Repo(root)
    repo.git("init", "-q", "-b", "main")
    alice = gated(repo)
    for seed in range(part, 24, 2):
        rng = random.Random(seed)
        for ours, theirs in grow(repo, rng, Shape(rng)):
            tree, conflicts = merges_of(repo, ours, theirs)
            repo.git("update-ref", "refs/heads/aidlc/target", ours)
            repo.git("update-ref", "refs/heads/aidlc/theirs", theirs)
            found = merge(alice, "aidlc/theirs", "aidlc/target")
            made = None if found.commit_hash is None else repo.tree(found.commit_hash)
            assert (made, {path.split("~")[0] for path in found.conflicts}) == (tree, conflicts), (seed, ours, theirs)
            seen["conflicts" if tree is None else "forward" if found.fast_forward else "merged"] += 1
            seen["crossed"] += len(repo.git("merge-base", "--all", ours, theirs).split()) > 1
    assert min(seen.values()) > 3, seen
    repo.check()


def test_a_rename_is_followed(alice: Gated) -> None:
    """A file that one side renames and the other edits has the edit under the new name only."""
    lines = [f"line {number}\n" for number in range(20)]
    alice.commit("Base", src__a_txt="".join(lines))
    alice.git("checkout", "-q", "-b", "aidlc/edit")
    alice.commit("Edit", src__a_txt="".join(["first\n", *lines[1:]]))
    alice.git("checkout", "-q", "aidlc/work")
    alice.git("mv", "src/a.txt", "src/b.txt")
    alice.write("src/b.txt", "".join([*lines[:-1], "last\n"]))
    alice.git("commit", "-qam", "Rename")
    assert merge(alice, "aidlc/edit", "aidlc/work").conflicts == []
    assert alice.files()["src/b.txt"][1].decode() == "".join(["first\n", *lines[1:-1], "last\n"])
    assert "src/a.txt" not in alice.files()
    assert alice.status() == ""
    alice.check()


@pytest.mark.parametrize("attribute", ["merge=union", "-merge", "merge=binary", "merge=mine"])
def test_merge_attributes_are_respected(alice: Gated, attribute: str) -> None:
    """Union, binary and -merge have git's meaning. A driver program is not run."""
    mark = alice.root.parent / "ran"
    alice.git("config", "merge.mine.driver", f"touch {mark}")
    alice.commit("Base", _gitattributes=f"*.txt {attribute}\n", a_txt="a\nb\n")
    alice.write(".gitattributes", f"*.txt {attribute}\n")
    alice.commit("Attributes")
    alice.git("checkout", "-q", "-b", "aidlc/other")
    alice.commit("Other", a_txt="a\nother\n")
    alice.git("checkout", "-q", "aidlc/work")
    alice.commit("Work", a_txt="a\nwork\n")
    merged = merge(alice, "aidlc/other", "aidlc/work")
    assert not mark.exists()
    if attribute == "merge=union":
        assert alice.files()["a.txt"][1] == b"a\nwork\nother\n"
    else:
        assert merged.conflicts == ["a.txt"]
    assert alice.status() == ""
