"""What the operator's git waits to end, the gate neither ends nor forgets, but for a reset, which gives it up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bonobofs.errors import GitError
from tests.git.conftest import Gate, Gated, Repo

Begin = Callable[[Repo], None]


def _merge(repo: Repo) -> None:
    repo.git("merge", "side", code=1)


def _pick(repo: Repo) -> None:
    repo.git("cherry-pick", "side", code=1)


def _revert(repo: Repo) -> None:
    repo.git("revert", "--no-edit", "HEAD~1", code=1)


_BEGINNINGS = {"MERGE_HEAD": _merge, "CHERRY_PICK_HEAD": _pick, "REVERT_HEAD": _revert}


@pytest.fixture(params=_BEGINNINGS)
def begun(repo: Repo, gated: Gate, request: pytest.FixtureRequest) -> Gated:
    """A repository in the middle of one, with its conflicts resolved and staged."""
    repo.git("checkout", "-q", "-b", "side")
    repo.commit("Theirs", docs__plan_md="theirs\n")
    repo.git("checkout", "-q", "-b", "aidlc/work", "main")
    repo.commit("Once", docs__plan_md="once\n")
    repo.commit("Ours", docs__plan_md="ours\n")
    _BEGINNINGS[request.param](repo)
    repo.write("docs/plan.md", "both\n")
    repo.git("add", "docs/plan.md")
    assert (repo.root / ".git" / request.param).exists()
    return gated(repo)


def test_nothing_is_made_in_its_place(begun: Gated) -> None:
    """A commit would lack its second parent or its author; a switch, a merge and a stash would leave it astray."""
    head, status = begun.head(), begun.git("status")
    for attempt in (
        lambda: begun.gate.commit("[gt-1] Both"),
        lambda: begun.gate.commit("[gt-1] Both", amend=True),
        lambda: begun.gate.switch("side"),
        lambda: begun.gate.merge("side"),
        begun.gate.stash_push,
        lambda: begun.gate.reset("HEAD", "soft"),
    ):
        with pytest.raises(GitError) as error:
            attempt()
        assert error.value.kind == "unmerged"
    assert (begun.head(), begun.git("status")) == (head, status)


@pytest.mark.parametrize("mode", ["mixed", "hard"])
def test_a_reset_gives_it_up(begun: Gated, mode: str) -> None:
    """Afterwards nothing is under way, and the next message does not begin with the one that was prepared."""
    begun.gate.reset("HEAD", mode)
    assert "in progress" not in begun.git("status").lower()
    left = {path.name for path in (begun.root / ".git").iterdir()}
    assert not left & {"MERGE_HEAD", "CHERRY_PICK_HEAD", "REVERT_HEAD", "MERGE_MSG", "MERGE_MODE", "AUTO_MERGE"}
    assert begun.status() == ("" if mode == "hard" else " M docs/plan.md\n")
    begun.check()
