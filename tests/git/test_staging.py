"""add, rm, mv, restore, reset, stash, tag and switch do what git does: each is done by both, on copies of one world."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bonobofs.errors import GitError
from bonobofs.guards.git.gate import GitGate
from tests.git.conftest import Gate, Gated, Repo

Act = Callable[[GitGate], object]


def _world(repo: Repo) -> None:
    """Files of every state: unchanged, changed, staged, both, new, deleted, renamed."""
    repo.git("checkout", "-q", "-b", "aidlc/other")
    repo.commit(
        "Base", a_txt="a\n" * 9, b_txt="b\n", c_txt="c\n", dir__d_txt="d\n", dir__e_txt="e\n", gone_txt="gone\n"
    )
    repo.git("checkout", "-q", "-b", "aidlc/work")
    repo.commit("Work", b_txt="b work\n", work__w_txt="w\n")
    repo.git("tag", "v0")
    repo.commit("More", c_txt="c more\n")
    repo.write("a.txt", "a\n" * 9 + "changed\n")
    repo.write("b.txt", "b staged\n")
    repo.git("add", "b.txt")
    repo.write("c.txt", "c staged\n")
    repo.git("add", "c.txt")
    repo.write("c.txt", "c staged and changed\n")
    repo.write("new.txt", "new\n")
    repo.write("staged.txt", "staged\n")
    repo.git("add", "staged.txt")
    (repo.root / "gone.txt").unlink()


def _clean(repo: Repo) -> None:
    _world(repo)
    repo.git("add", "-A")
    repo.git("commit", "-qm", "All")


CASES: dict[str, tuple[Callable[[Repo], None], list[str], Act]] = {
    "add": (_world, ["add", "a.txt", "new.txt"], lambda gate: gate.add(["a.txt", "new.txt"])),
    "add a deletion": (_world, ["add", "gone.txt"], lambda gate: gate.add(["gone.txt"])),
    "add -u": (
        _world,
        ["add", "-u"],
        lambda gate: gate.add(["a.txt", "c.txt", "gone.txt", "new.txt"], update_only=True),
    ),
    "rm": (_clean, ["rm", "a.txt", "dir/d.txt"], lambda gate: gate.remove(["a.txt", "dir/d.txt"])),
    "rm --cached": (
        _world,
        ["rm", "--cached", "a.txt", "staged.txt"],
        lambda gate: gate.remove(["a.txt", "staged.txt"], cached=True),
    ),
    "rm -f": (
        _world,
        ["rm", "-f", "a.txt", "c.txt", "gone.txt"],
        lambda gate: gate.remove(["a.txt", "c.txt", "gone.txt"], force=True),
    ),
    "mv": (_world, ["mv", "a.txt", "moved.txt"], lambda gate: gate.move([("a.txt", "moved.txt")])),
    "mv a staged file": (_world, ["mv", "c.txt", "dir/c.txt"], lambda gate: gate.move([("c.txt", "dir/c.txt")])),
    "mv a directory": (_world, ["mv", "dir", "elsewhere"], lambda gate: gate.move([("dir", "elsewhere")])),
    "mv -f": (_clean, ["mv", "-f", "a.txt", "b.txt"], lambda gate: gate.move([("a.txt", "b.txt")], force=True)),
    "restore": (
        _world,
        ["restore", "a.txt", "c.txt", "gone.txt"],
        lambda gate: gate.restore(["a.txt", "c.txt", "gone.txt"]),
    ),
    "restore --staged": (
        _world,
        ["restore", "--staged", "b.txt", "c.txt", "staged.txt"],
        lambda gate: gate.restore(["b.txt", "c.txt", "staged.txt"], staged=True, worktree=False),
    ),
    "restore both": (
        _world,
        ["restore", "-SW", "b.txt", "c.txt", "staged.txt"],
        lambda gate: gate.restore(["b.txt", "c.txt", "staged.txt"], staged=True),
    ),
    "restore --source": (
        _world,
        ["restore", "--source", "v0", "c.txt"],
        lambda gate: gate.restore(["c.txt"], source="v0"),
    ),
    "checkout from": (
        _world,
        ["checkout", "v0", "--", "c.txt"],
        lambda gate: gate.restore(["c.txt"], source="v0", staged=True),
    ),
    "reset": (_world, ["reset", "-q"], lambda gate: gate.reset()),
    "reset --soft": (_world, ["reset", "-q", "--soft", "v0"], lambda gate: gate.reset("v0", "soft")),
    "reset --mixed": (_world, ["reset", "-q", "v0"], lambda gate: gate.reset("v0", "mixed")),
    "reset --hard": (_world, ["reset", "-q", "--hard"], lambda gate: gate.reset("HEAD", "hard")),
    "reset --hard back": (
        _world,
        ["reset", "-q", "--hard", "aidlc/other"],
        lambda gate: gate.reset("aidlc/other", "hard"),
    ),
    "commit": (_world, ["commit", "-qm", "[x] y"], lambda gate: gate.commit("[x] y")),
    "commit -a": (
        _world,
        ["commit", "-qam", "[x] y"],
        lambda gate: gate.commit("[x] y", ["a.txt", "c.txt", "gone.txt"]),
    ),
    "commit --": (
        _world,
        ["commit", "-qm", "[x] y", "--", "a.txt", "c.txt"],
        lambda gate: gate.commit("[x] y", ["a.txt", "c.txt"], only=True),
    ),
    "commit --amend": (
        _world,
        ["commit", "-q", "--amend", "-m", "[x] y"],
        lambda gate: gate.commit("[x] y", amend=True),
    ),
    "commit --allow-empty": (
        _clean,
        ["commit", "-q", "--allow-empty", "-m", "[x] y"],
        lambda gate: gate.commit("[x] y", allow_empty=True),
    ),
    "stash": (_world, ["stash", "push", "-q"], lambda gate: gate.stash_push()),
    "stash -u": (_world, ["stash", "push", "-q", "-u"], lambda gate: gate.stash_push(include_untracked=True)),
    "stash -k": (_world, ["stash", "push", "-q", "-k"], lambda gate: gate.stash_push(keep_index=True)),
    "stash -m": (_world, ["stash", "push", "-q", "-m", "aside"], lambda gate: gate.stash_push("aside")),
    "stash --": (
        _world,
        ["stash", "push", "-q", "--", "a.txt", "staged.txt"],
        lambda gate: gate.stash_push(paths=["a.txt", "staged.txt"]),
    ),
    "switch": (_clean, ["switch", "-q", "aidlc/other"], lambda gate: gate.switch("aidlc/other")),
    "switch -f": (_world, ["switch", "-q", "-f", "aidlc/other"], lambda gate: gate.switch("aidlc/other", force=True)),
    "switch with changes": (
        _world,
        ["switch", "-q", "-c", "aidlc/new"],
        lambda gate: gate.switch("aidlc/new", create=True),
    ),
    "switch --detach": (_clean, ["switch", "-q", "--detach", "v0"], lambda gate: gate.switch(commit="v0")),
    "branch": (_world, ["branch", "aidlc/new", "v0"], lambda gate: gate.create_branch("aidlc/new", "v0")),
    "branch -m": (
        _world,
        ["branch", "-m", "aidlc/work", "aidlc/new"],
        lambda gate: gate.rename_branch("aidlc/work", "aidlc/new"),
    ),
    "branch -d": (_clean, ["branch", "-d", "aidlc/other"], lambda gate: gate.delete_branch("aidlc/other")),
    "tag": (_world, ["tag", "v1"], lambda gate: gate.tag("v1")),
    "tag -f": (_world, ["tag", "-f", "v0"], lambda gate: gate.tag("v0", force=True)),
    "tag -d": (_world, ["tag", "-d", "v0"], lambda gate: gate.delete_tag("v0")),
}


def seen(repo: Repo) -> dict[str, object]:
    """All that a person sees of a repository."""
    refs = repo.git("for-each-ref", "--format=%(refname)").split()
    return {
        "HEAD": repo.run("symbolic-ref", "HEAD").stdout,
        "refs": refs,
        "history": [sorted(repo.git("log", "--format=%T %s", ref).splitlines()) for ref in [*refs, "HEAD"]],
        "index": repo.staged(),
        "status": repo.status(),
        "files": repo.files(),
        "stash": repo.git("stash", "list", "--format=%gs"),
        "reflog": repo.git("reflog", "--format=%gs").splitlines(),
    }


@pytest.mark.parametrize("case", CASES)
def test_it_does_what_git_does(repo: Repo, gated: Gate, tmp_path: Path, case: str) -> None:
    """Refs, history, index, files, stash and reflog are afterwards what git makes them."""
    prepare, arguments, act = CASES[case]
    prepare(repo)
    twin = repo.copy(tmp_path / "twin")
    twin.git(*arguments)
    act(gated(repo).gate)
    found, expected = seen(repo), seen(twin)
    if "reset" in case or "stash" in case:
        del found["reflog"], expected["reflog"]  # git names what it was given, and a reset of its own
    assert found == expected
    assert repo.git("diff-files", "--name-only") == twin.git("diff-files", "--name-only")
    repo.check()


@pytest.mark.parametrize("index", [False, True])
def test_what_was_put_aside_comes_back(repo: Repo, gated: Gate, tmp_path: Path, index: bool) -> None:
    """Pop gives files and index as git's does, drops the entry, and leaves the others."""
    _world(repo)
    repo.git("stash", "push", "-q", "-u")
    repo.write("dir/d.txt", "second\n")
    repo.git("stash", "push", "-q", "-m", "second")
    twin = repo.copy(tmp_path / "twin")
    flags = ["--index"] if index else []
    twin.git("stash", "pop", "-q", *flags, "stash@{1}")
    alice = gated(repo)
    alice.gate.stash_apply(1, drop=True, restore_index=index)
    assert {**seen(repo), "reflog": None} == {**seen(twin), "reflog": None}
    twin.git("stash", "drop", "-q")
    alice.gate.stash_drop()
    assert {**seen(repo), "reflog": None} == {**seen(twin), "reflog": None}
    assert not (repo.root / ".git/refs/stash").exists()
    with pytest.raises(GitError, match="no stash entries"):
        alice.gate.stash_apply()
    repo.check()


def test_a_stash_that_conflicts_changes_nothing(alice: Gated) -> None:
    """What cannot be brought back without a conflict stays put aside, and the tree as it is."""
    alice.write("docs/plan.md", "Aside\n")
    alice.gate.stash_push()
    alice.commit("Other", docs__plan_md="Other\n")
    before = seen(alice)
    with pytest.raises(GitError) as caught:
        alice.gate.stash_apply(drop=True)
    assert (caught.value.kind, caught.value.paths) == ("conflict", ("docs/plan.md",))
    assert seen(alice) == before


REFUSED: dict[str, tuple[Act, str]] = {
    "rm of what is changed": (lambda gate: gate.remove(["a.txt"]), "dirty"),
    "rm of what is staged": (lambda gate: gate.remove(["b.txt"]), "dirty"),
    "rm of what is unknown": (lambda gate: gate.remove(["new.txt"]), "pathspec"),
    "add of what is not there": (lambda gate: gate.add(["a.txt", "none.txt"]), "pathspec"),
    "mv onto what is there": (lambda gate: gate.move([("a.txt", "new.txt")]), "exists"),
    "mv of what is unknown": (lambda gate: gate.move([("new.txt", "x.txt")]), "pathspec"),
    "restore of what is unknown": (lambda gate: gate.restore(["a.txt", "none.txt"]), "pathspec"),
    "switch over changes": (lambda gate: gate.switch("aidlc/other"), "dirty"),
    "branch that is there": (lambda gate: gate.create_branch("aidlc/other"), "exists"),
    "branch that is checked out": (lambda gate: gate.delete_branch("aidlc/work", force=True), "checked-out"),
    "tag that is there": (lambda gate: gate.tag("v0"), "exists"),
    "commit of nothing known": (lambda gate: gate.reset("nowhere"), "not-found"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_git_refuses_changes_nothing(repo: Repo, gated: Gate, case: str) -> None:
    """An operation that would lose something, or means nothing, leaves everything as it was."""
    act, kind = REFUSED[case]
    _world(repo)
    alice = gated(repo)
    before = seen(repo)
    with pytest.raises(GitError) as caught:
        act(alice.gate)
    assert caught.value.kind == kind
    assert seen(repo) == before
    repo.check()
