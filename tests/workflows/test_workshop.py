"""The comparison itself: a difference in a mount is found, and the shown policy is the used one."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest

from bonobofs.policy.document import parse
from tests.support.world import ROOT
from tests.workflows.workshop import POLICY, TEAM, Place, Workshop


def _in_the_mount_alone(change: Callable[[Place], object]) -> Callable[[Place], object]:
    return lambda at: change(at) if at.path.name == "work" else None


def _relink(at: Place) -> None:
    (at / "aidlc-docs/units/unit-1/same.md").unlink()
    at.run("cp", "-p", "notes.md", "same.md", cwd="aidlc-docs/units/unit-1")


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda at: at.write("aidlc-docs/plan.md", "other"), "aidlc-docs/plan.md: "),
        (lambda at: at.write("aidlc-docs/new.md", "new"), "aidlc-docs/new.md: None and"),
        (lambda at: (at / "aidlc-docs/plan.md").unlink(), "aidlc-docs/plan.md: .* and None"),
        (lambda at: (at / "aidlc-docs/plan.md").chmod(0o600), "aidlc-docs/plan.md: "),
        (lambda at: os.utime(at / "aidlc-docs/plan.md", (1, 1)), "modified=1000000000"),
        (_relink, "aidlc-docs/units/unit-1/same.md: "),
        (lambda _: "said", "on the bare directory None, in the mount said"),
    ],
    ids=["content", "new name", "name gone", "mode", "time", "link", "word"],
)
def test_a_difference_is_found(workshop: Workshop, change: Callable[[Place], object], found: str) -> None:
    """A program that leaves or prints something different in a mount fails its test."""
    with pytest.raises(AssertionError, match=found):
        workshop.compare(_in_the_mount_alone(change))


def test_a_refusal_is_found(workshop: Workshop) -> None:
    """An unlisted refusal by the mount fails the test, even if the program ignores it."""

    def work(at: Place) -> None:
        try:
            at.write("aidlc-docs/notes.txt", "")
            (at / "aidlc-docs/notes.txt").unlink()
        except PermissionError:
            pass

    with pytest.raises(AssertionError, match="refused, but not listed"):
        workshop.compare(work)


def test_the_team_policy_is_short_and_shown() -> None:
    """The workflows need at most 20 lines beyond the default policy. docs/policy.md shows them."""
    parse(POLICY, "the default and a team's")
    lines = TEAM.strip().splitlines()
    assert len(lines) <= 20
    shown = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/policy.md").read_text(encoding="utf-8"), re.DOTALL)
    assert f'extends = "aidlc"\n\n{TEAM.strip()}\n' in shown
