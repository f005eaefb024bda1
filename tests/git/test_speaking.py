"""Nobody speaks in another's name or for another's issue, and what is said is text that git keeps whole."""

from __future__ import annotations

import os

import pytest

from bonobofs.decision import Code, Refused
from bonobofs.errors import GitError
from bonobofs.guards.git.gate import GitGate
from tests.git.conftest import FREE, Gate, Gated, Repo


def test_an_amended_commit_of_another_becomes_the_agents(alice: Gated) -> None:
    """Its author wrote none of what is in it now; an agent's own keeps the time at which it was made."""
    alice.write("docs/plan.md", "Another\n")
    alice.gate.commit("[gt-1] Mine", ["docs/plan.md"], amend=True)
    said = alice.git("log", "-1", "--format=%an %at")
    assert said.startswith("alice ")
    alice.gate.commit("[gt-1] Mine, better", amend=True)
    assert alice.git("log", "-1", "--format=%an %at") == said


def test_the_issue_is_the_sessions(alice: Gated) -> None:
    """Who calls the gate of a session with an issue commits for no other."""
    gate = GitGate(alice.session, "gt-17")
    alice.write("docs/plan.md", "Another\n")
    with pytest.raises(Refused) as refused:
        gate.commit("Another", ["docs/plan.md"], issue="gt-99")
    assert refused.value.decision.rule == "git.message"
    assert gate.commit("Another", ["docs/plan.md"], issue="gt-17").message == "[gt-17] Another\n"
    gate.close()


@pytest.mark.parametrize("text", ["a\0b", "a\ud800"])
def test_what_is_no_text_is_no_message(alice: Gated, text: str) -> None:
    """Neither a NUL nor half a letter gets into a commit, a merge, a tag or a stash."""
    alice.git("branch", "aidlc/side")
    alice.commit("Ours", a_md="ours\n")
    alice.git("checkout", "-q", "aidlc/side")
    alice.commit("Theirs", b_md="theirs\n")
    alice.write("docs/plan.md", "Another\n")
    for attempt in (
        lambda: alice.gate.commit(f"[gt-1] {text}", ["docs/plan.md"]),
        lambda: alice.gate.merge("aidlc/work", message=f"[gt-1] {text}"),
        lambda: alice.gate.tag("v1", message=text),
        lambda: alice.gate.stash_push(text),
    ):
        with pytest.raises((Refused, GitError)):
            attempt()
    assert alice.status() == " M docs/plan.md\n"
    alice.check()


def test_a_branch_is_made_by_whoever_may_make_one(repo: Repo, gated: Gate) -> None:
    """To create a branch while going to it needs the leave to make branches too."""
    alice = gated(repo, policy=FREE + '[role.worker]\nwrite = ["**"]\ngit = ["checkout"]\n', role="worker")
    with pytest.raises(Refused) as refused:
        alice.gate.switch("aidlc/new", create=True)
    assert refused.value.decision.code is Code.ROLE
    assert "aidlc/new" not in repo.git("branch", "--list")


def test_no_path_is_staged_that_no_commit_may_hold(repo: Repo, gated: Gate) -> None:
    """What another commit has is judged when it is staged, like what a file has."""
    repo.git("checkout", "-q", "-b", "other")
    repo.commit("Theirs", run_sh="#!/bin/sh\n")
    repo.git("checkout", "-q", "-b", "aidlc/work", "main")
    alice = gated(repo, policy='default = "allow"\nhidden = ["**"]\n[[protect]]\npaths = ["**/.git/", "run.sh"]\n')
    with pytest.raises(Refused):
        alice.gate.restore(["run.sh"], source="other", staged=True, worktree=False)
    assert repo.status() == ""


@pytest.mark.parametrize("name", [".git\\hooks", "x\\.GIT \\config", "a\\..\\b"])
def test_a_backslash_hides_no_directory_of_git(alice: Gated, name: str) -> None:
    """What is one name here is a path on other systems, on which the commit may be checked out."""
    alice.write(name, "x")
    with pytest.raises(Refused) as refused:
        alice.gate.commit("[gt-1] x", [name])
    assert refused.value.decision.code is Code.OUTSIDE


def test_submodules_are_not_listed_by_a_symlink(alice: Gated) -> None:
    """git calls a tree broken in which .gitmodules is one."""
    os.symlink("docs/plan.md", alice.root / ".gitmodules")
    with pytest.raises(Refused):
        alice.gate.commit("[gt-1] x", [".gitmodules"])
    alice.check()
