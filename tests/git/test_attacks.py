"""Nothing that a repository says is executed, nothing outside is touched, and no name leads past a rule."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bonobofs.decision import Code, Refused
from bonobofs.errors import GitError
from tests.git.conftest import Gate, Gated, Repo

Attack = Callable[[Repo, Path], None]


def _config(key: str, value: str) -> Attack:
    def arm(repo: Repo, mark: Path) -> None:
        repo.git("config", key, value.format(mark=mark))

    return arm


def _hooks(repo: Repo, mark: Path) -> None:
    for name in (
        "pre-commit",
        "commit-msg",
        "post-commit",
        "post-checkout",
        "post-merge",
        "reference-transaction",
        "pre-merge-commit",
        "prepare-commit-msg",
        "post-index-change",
        "post-rewrite",
        "fsmonitor-watchman",
    ):
        repo.write(f".git/hooks/{name}", f"#!/bin/sh\ntouch {mark}\n", mode=0o755)


def _hooks_path(repo: Repo, mark: Path) -> None:
    for name in ("pre-commit", "post-checkout", "reference-transaction", "post-index-change"):
        repo.write(f"docs/hooks/{name}", f"#!/bin/sh\ntouch {mark}\n", mode=0o755)
    repo.git("config", "core.hooksPath", "docs/hooks")


def _filter(repo: Repo, mark: Path) -> None:
    repo.write(".git/info/attributes", "armed.txt filter=evil diff=evil merge=evil\n")
    for what in ("clean", "smudge", "process"):
        repo.git("config", f"filter.evil.{what}", f"touch {mark}; cat")
    repo.git("config", "diff.evil.textconv", f"touch {mark}; cat")
    repo.git("config", "diff.evil.command", f"touch {mark}")
    repo.git("config", "merge.evil.driver", f"touch {mark}")


def _include(repo: Repo, mark: Path) -> None:
    repo.write(
        "docs/config",
        f"[core]\n\tfsmonitor = touch {mark}\n\tsshCommand = touch {mark}\n[alias]\n\tstatus = !touch {mark}\n",
    )
    repo.git("config", "include.path", "../docs/config")


def _alternates(repo: Repo, mark: Path) -> None:
    (repo.root / ".git/objects/info").mkdir(exist_ok=True)
    repo.write(".git/objects/info/alternates", f"{mark.parent}/nowhere\n/etc\n")


def _worktree_elsewhere(repo: Repo, mark: Path) -> None:
    (mark.parent / "victim").mkdir(exist_ok=True)
    repo.git("config", "core.worktree", str(mark.parent / "victim"))


ATTACKS: dict[str, Attack] = {
    "hooks": _hooks,
    "hooks path": _hooks_path,
    "filters, diff and merge drivers": _filter,
    "include": _include,
    "alternates": _alternates,
    "worktree": _worktree_elsewhere,
    "fsmonitor": _config("core.fsmonitor", "touch {mark}"),
    "ssh command": _config("core.sshCommand", "touch {mark}"),
    "gpg program": _config("gpg.program", "/bin/touch"),
    "editor": _config("core.editor", "touch {mark}"),
    "pager": _config("core.pager", "touch {mark}"),
    "external diff": _config("diff.external", "touch {mark}"),
    "askpass": _config("core.askPass", "touch {mark}"),
    "alternate refs": _config("core.alternateRefsCommand", "touch {mark}"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_nothing_that_the_repository_says_is_executed(alice: Gated, tmp_path: Path, attack: str) -> None:
    """Hooks, filters, drivers, monitors, signers and included configuration are data; every operation is tried."""
    mark = tmp_path / "ran"
    alice.git("branch", "aidlc/other")
    alice.commit("Armed", armed_txt="x\n")
    ATTACKS[attack](alice, mark)
    alice.git("config", "commit.gpgSign", "true")
    alice.git("config", "tag.gpgSign", "true")
    alice.write("plain.txt", "x\n")
    gate = alice.gate
    gate.commit("[gt-1] Plain", ["plain.txt"])
    alice.write("armed.txt", "changed\n")
    if attack == "filters, diff and merge drivers":
        with pytest.raises(Refused) as caught:
            gate.commit("[gt-1] Armed", ["armed.txt"])
        assert caught.value.decision.rule == "git.filter"
        with pytest.raises(GitError, match="filter"):
            gate.stash_push()
        alice.write("armed.txt", "x\n")
        with pytest.raises(GitError, match="filter"):
            gate.reset("aidlc/other", "hard")
    else:
        gate.commit("[gt-1] Armed", ["armed.txt"])
        gate.status()
        gate.diff()
        gate.create_branch("aidlc/new")
        gate.tag("v1", message="Version")
        gate.switch("aidlc/other")
        gate.merge("aidlc/work", fast_forward="no")
        alice.write("armed.txt", "again\n")
        gate.stash_push()
        gate.stash_apply(drop=True)
        gate.restore(["armed.txt"])
        gate.move([("plain.txt", "moved.txt")])
        gate.reset("HEAD", "hard")
    assert not mark.exists()
    assert not list((tmp_path / "victim").glob("*")) if attack == "worktree" else True


TRICKS = [
    "-flag",
    "--upload-pack=x",
    "refs/heads/x:main",
    "@{-1}",
    "@",
    "HEAD^{/x}",
    "a..b",
    "a b",
    "x~1",
    ":/x",
    "refs/../../config",
    "../config",
    "refs/heads/../../HEAD",
    "HEAD.lock",
    "aidlc/\u202ework",
    "main\0",
    "main\n",
    "\uff4dain",
    "MAIN",
    "refs/heads",
    "FETCH_HEAD",
    "config",
    "index",
    "objects/info",
]


@pytest.mark.parametrize("name", TRICKS)
def test_no_name_is_taken_for_more_than_a_name(alice: Gated, name: str) -> None:
    """Flags, ranges, reflogs, paths and look-alikes name no branch: whatever takes a name refuses them."""
    alice.git("branch", "aidlc/other")
    before = alice.git("for-each-ref"), alice.head(), sorted(path.name for path in (alice.root / ".git").iterdir())
    calls: list[Callable[[], object]] = [
        lambda: alice.gate.create_branch(name),
        lambda: alice.gate.create_branch("aidlc/new", name),
        lambda: alice.gate.switch(name),
        lambda: alice.gate.switch(name, create=True),
        lambda: alice.gate.switch(commit=name),
        lambda: alice.gate.merge(name),
        lambda: alice.gate.merge("aidlc/other", target=name),
        lambda: alice.gate.delete_branch(name, force=True),
        lambda: alice.gate.rename_branch("aidlc/other", name, force=True),
        lambda: alice.gate.reset(name, "hard"),
        lambda: alice.gate.delete_tag(name),
    ]
    for call in calls:
        with pytest.raises((Refused, GitError)):
            call()
    after = alice.git("for-each-ref"), alice.head(), sorted(path.name for path in (alice.root / ".git").iterdir())
    assert after == before


def test_a_branch_that_is_another_name_of_main_is_not_moved(alice: Gated) -> None:
    """A symbolic ref leads nowhere: commit, merge and reset on it are refused, as protected if it leads there."""
    before = alice.head("main")
    alice.git("symbolic-ref", "refs/heads/aidlc/alias", "refs/heads/main")
    alice.git("symbolic-ref", "HEAD", "refs/heads/aidlc/alias")
    alice.write("docs/plan.md", "Changed\n")
    for call in (
        lambda: alice.gate.commit("[gt-1] x", ["docs/plan.md"]),
        lambda: alice.gate.merge("aidlc/work", target="aidlc/alias"),
        lambda: alice.gate.reset("aidlc/work", "soft"),
        lambda: alice.gate.delete_branch("aidlc/alias", force=True),
    ):
        with pytest.raises(Refused) as caught:
            call()
        assert caught.value.decision.code is Code.PROTECTED
    assert alice.head("main") == before
    alice.git("symbolic-ref", "refs/heads/aidlc/alias", "refs/heads/aidlc/work")
    with pytest.raises(Refused) as caught:
        alice.gate.commit("[gt-1] x", ["docs/plan.md"])
    assert caught.value.decision.rule == "git.symbolic"


EVIL = [
    b".git/config",
    b".GIT/hooks/x",
    b"a/.git/x",
    b"git~1/x",
    b".git ./x",
    b".g\xe2\x80\x8cit/x",
    b"../x",
    b"a/../x",
    b"./x",
    b".git::$INDEX_ALLOCATION/x",
]


@pytest.mark.parametrize("path", EVIL)
def test_a_tree_with_an_evil_path_is_not_brought_in(alice: Gated, path: bytes) -> None:
    """A commit that holds a path of git's own, or one that leads out, is neither merged nor checked out."""
    blob = alice.git("hash-object", "-w", "--stdin", given="evil\n").strip()
    tree = ""
    for depth, name in enumerate(reversed(path.split(b"/"))):
        line = (
            f"{'100644 blob' if depth == 0 else '040000 tree'} {blob if depth == 0 else tree}\t".encode() + name + b"\0"
        )
        tree = _mktree(alice, line)
    commit = alice.git("commit-tree", tree, "-p", "HEAD", "-m", "Evil").strip()
    alice.git("update-ref", "refs/heads/aidlc/evil", commit)
    before = alice.files()
    for call in (
        lambda: alice.gate.merge("aidlc/evil"),
        lambda: alice.gate.switch("aidlc/evil"),
        lambda: alice.gate.reset("aidlc/evil", "hard"),
    ):
        with pytest.raises(Refused) as caught:
            call()
        assert caught.value.decision.code in (Code.OUTSIDE, Code.PROTECTED)
    assert alice.files() == before
    assert not (alice.root.parent / "x").exists()


def _mktree(repo: Repo, line: bytes) -> str:
    return repo.git("mktree", "-z", given=os.fsdecode(line)).strip()


def test_no_denied_path_enters_from_another_branch(repo: Repo, gated: Gate) -> None:
    """What the agent may not write comes in by no merge, checkout, reset, restore, stash or squash."""
    repo.commit("Base", src__app_py="print(1)\n", aidlc__a_md="a\n")
    repo.git("checkout", "-q", "-b", "aidlc/other")
    repo.commit("Theirs", src__app_py="print(2)\n", docs__new_md="new\n")
    repo.git("checkout", "-q", "-b", "aidlc/gone", "main")
    repo.commit("Gone", src__app_py=None)
    repo.git("checkout", "-q", "-b", "aidlc/moved", "main")
    repo.git("mv", "src/app.py", "docs/app.md")
    repo.git("commit", "-qm", "Moved")
    repo.git("checkout", "-q", "-b", "aidlc/work", "main")
    policy = '[[rule]]\nname = "docs"\npaths = ["docs/", "aidlc/"]\n'
    alice = gated(repo, policy=policy)
    before = repo.files(), repo.git("for-each-ref"), repo.staged()
    gate = alice.gate
    calls: list[Callable[[str], object]] = [
        gate.merge,
        lambda branch: gate.merge(branch, strategy="squash"),
        lambda branch: gate.merge(branch, fast_forward="no"),
        gate.switch,
        lambda branch: gate.switch(commit=branch),
        lambda branch: gate.reset(branch, "hard"),
        lambda branch: gate.reset(branch, "soft"),
        lambda branch: gate.reset(branch, "mixed"),
        lambda branch: gate.restore(["src/app.py"], source=branch),
    ]
    for branch in ("aidlc/other", "aidlc/gone", "aidlc/moved"):
        for call in calls:
            with pytest.raises(Refused) as caught:
                call(branch)
            assert (caught.value.decision.code, caught.value.decision.path) == (Code.DEFAULT, "src/app.py")
    assert (repo.files(), repo.git("for-each-ref"), repo.staged()) == before


def test_what_was_staged_by_another_is_judged(repo: Repo, gated: Gate) -> None:
    """A commit of what is staged takes in no path that the agent could not have staged."""
    repo.git("checkout", "-q", "-b", "aidlc/work")
    repo.write("src/app.py", "x\n")
    repo.git("add", "-A")
    alice = gated(repo, policy='[[rule]]\nname = "docs"\npaths = ["docs/"]\n')
    with pytest.raises(Refused) as caught:
        alice.gate.commit("[gt-1] x")
    assert caught.value.decision.path == "src/app.py"
    repo.write("docs/plan.md", "Changed\n")
    assert alice.gate.commit("[gt-1] x", ["docs/plan.md"], only=True).files == ("docs/plan.md",)
    assert repo.status() == "A  src/app.py\n"


def test_a_large_file_is_refused_before_it_is_read(repo: Repo, gated: Gate) -> None:
    """A file beyond the limit costs no memory: it is judged by its size first."""
    repo.git("checkout", "-q", "-b", "aidlc/work")
    with repo.write("docs/huge.md", "").open("r+b") as file:
        file.truncate(1 << 42)
    alice = gated(repo, policy='[[rule]]\nname = "docs"\npaths = ["docs/"]\nmax_size = "1MB"\n')
    with pytest.raises(Refused) as caught:
        alice.gate.commit("[gt-1] x", ["docs/huge.md"])
    assert caught.value.decision.code is Code.SIZE


@pytest.mark.parametrize("kind", ["fifo", "directory", "socket"])
def test_only_files_and_symlinks_are_committed(alice: Gated, kind: str) -> None:
    """Nothing waits at a FIFO, and a directory is not taken for the files in it."""
    if kind == "fifo":
        os.mkfifo(alice.root / "thing")
    elif kind == "directory":
        alice.write("thing/a", "a")
    else:
        os.mknod(alice.root / "thing", 0o140644)
    with pytest.raises(GitError) as caught:
        alice.gate.commit("[gt-1] x", ["thing"])
    assert caught.value.kind == "pathspec"
    assert "thing" not in alice.staged()
