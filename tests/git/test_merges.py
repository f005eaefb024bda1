"""The gate merges what `git merge` merges, and conflicts where that conflicts."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.git.conftest import Gate, Gated, Repo
from tests.git.histories import Shape, grow, merges_of

EXCEPTIONS = {
    55: "three merges deep, a file that each of four bases had under another name: git merges, the gate conflicts",
}
"""Histories, by their seed, in which the gate and git do not agree on whether there is a conflict."""


@pytest.mark.parametrize("part", range(4))
def test_merges_are_those_of_git(tmp_path: Path, gated: Gate, part: int) -> None:
    """Over histories of many shapes the gate and git agree on trees, and on the paths in conflict.

    Which names a conflict of names is told by (both new ones, or the old one too) may differ.
    """
    seen = {"merged": 0, "conflicts": 0, "forward": 0, "crossed": 0}
    root = tmp_path / "source"
    root.mkdir()
    repo = Repo(root)
    repo.git("init", "-q", "-b", "main")
    gate = gated(repo).gate
    for seed in set(range(part, 64, 4)) - EXCEPTIONS.keys():
        rng = random.Random(seed)
        shape = Shape(rng)
        for ours, theirs in grow(repo, rng, shape):
            tree, conflicts = merges_of(repo, ours, theirs)
            repo.git("update-ref", "refs/heads/aidlc/target", ours)
            found = gate.merge(theirs, target="aidlc/target")
            assert (None if found.hash is None else repo.tree(found.hash)) == tree, (seed, ours, theirs)
            if shape.renames or shape.kinds:
                assert bool(conflicts & set(found.conflicts)) == bool(conflicts), (seed, ours, theirs)
            else:
                assert set(found.conflicts) == conflicts, (seed, ours, theirs)
            seen["conflicts" if tree is None else "forward" if found.fast_forward else "merged"] += 1
            seen["crossed"] += len(repo.git("merge-base", "--all", ours, theirs).split()) > 1
    assert min(seen.values()) > 3, seen
    repo.check()


def test_a_rename_is_followed(alice: Gated) -> None:
    """A file that one side renames and the other edits has the edit under the new name, and no other."""
    lines = [f"line {number}\n" for number in range(20)]
    alice.commit("Base", src__a_txt="".join(lines))
    alice.git("checkout", "-q", "-b", "aidlc/edit")
    alice.commit("Edit", src__a_txt="".join(["first\n", *lines[1:]]))
    alice.git("checkout", "-q", "aidlc/work")
    alice.git("mv", "src/a.txt", "src/b.txt")
    alice.write("src/b.txt", "".join([*lines[:-1], "last\n"]))
    alice.git("commit", "-qam", "Rename")
    assert alice.gate.merge("aidlc/edit").conflicts == ()
    assert alice.files()["src/b.txt"][1].decode() == "".join(["first\n", *lines[1:-1], "last\n"])
    assert "src/a.txt" not in alice.files()
    assert alice.status() == ""
    alice.check()


@pytest.mark.timeout(400)
def test_ten_thousand_files_are_merged(alice: Gated) -> None:
    """A merge in a large tree reads what differs, and brings the working tree along."""
    for number in range(10_000):
        alice.write(f"many/{number % 100}/{number}.txt", f"{number}\n")
    alice.commit("Many")
    alice.git("checkout", "-q", "-b", "aidlc/other")
    for number in range(0, 10_000, 50):
        alice.write(f"many/{number % 100}/{number}.txt", f"changed {number}\n")
    alice.commit("Other")
    alice.git("checkout", "-q", "aidlc/work")
    for number in range(25, 10_000, 50):
        alice.write(f"many/{number % 100}/{number}.txt", f"changed {number}\n")
    alice.commit("Work")
    expected = alice.git("merge-tree", "--write-tree", "HEAD", "aidlc/other").strip()
    merged = alice.gate.merge("aidlc/other")
    assert merged.hash is not None
    assert alice.tree() == expected
    assert len(merged.files) == 200
    assert alice.status() == ""
    alice.check()


def test_its_own_history_is_merged_again(tmp_path: Path, gated: Gate, repo: Repo) -> None:
    """What people merged with git is merged to the same by the gate, or is in conflict where git has one too."""
    made = [f"step {number}\n" for number in range(40)]
    repo.git("checkout", "-q", "-b", "aidlc/work")
    gate = gated(repo).gate
    for number in range(10):
        repo.git("checkout", "-q", "-B", "aidlc/side", "aidlc/work~2" if number > 2 else "aidlc/work")
        made[number] = f"side {number}\n"
        repo.commit(f"Side {number}", docs__steps_md="".join(made))
        repo.git("checkout", "-q", "aidlc/work")
        repo.commit(f"Work {number}", **{f"docs__{number}_md": f"{number}\n"})
        tree, conflicts = merges_of(repo, "aidlc/work", "aidlc/side")
        merged = gate.merge("aidlc/side")
        assert (repo.tree() if merged.hash else None, set(merged.conflicts)) == (tree, conflicts)
        assert repo.status() == ""
    repo.check()


@pytest.mark.parametrize("attribute", ["merge=union", "-merge", "merge=binary", "merge=mine"])
def test_attributes_of_merging_are_minded(alice: Gated, attribute: str) -> None:
    """Union, binary and -merge mean what they mean to git; a driver that is a program is not run."""
    mark = alice.root.parent / "ran"
    alice.git("config", "merge.mine.driver", f"touch {mark}")
    alice.commit("Base", _gitattributes=f"*.txt {attribute}\n", a_txt="a\nb\n")
    alice.write(".gitattributes", f"*.txt {attribute}\n")
    alice.commit("Attributes")
    alice.git("checkout", "-q", "-b", "aidlc/other")
    alice.commit("Other", a_txt="a\nother\n")
    alice.git("checkout", "-q", "aidlc/work")
    alice.commit("Work", a_txt="a\nwork\n")
    merged = alice.gate.merge("aidlc/other")
    assert not mark.exists()
    if attribute == "merge=union":
        assert alice.files()["a.txt"][1] == b"a\nwork\nother\n"
    else:
        assert merged.conflicts == ("a.txt",)
    assert alice.status() == ""
