"""Issues for the tests of the rules, without any bd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from bonobofs.beads.issue import CREATOR_ID, Actor, BeadsIssue, Issues, assignment, read_issue
from bonobofs.beads.refusals import Fault
from bonobofs.policy.role_lists import Conventions

ALICE = Actor("alice", "11111111-1111-4111-8111-111111111111")
BOB = Actor("bob", "22222222-2222-4222-8222-222222222222")
KNOWN = Conventions()

_P = ParamSpec("_P")
_T = TypeVar("_T")


def issue(name: str, *edges: tuple[str, str], **more: Any) -> BeadsIssue:
    """One issue that alice made; `edges` are pairs of a kind and what it depends on."""
    told: dict[str, Any] = {
        "id": name,
        "title": f"Title of {name}",
        "issue_type": "task",
        "status": "open",
        "priority": 2,
        "created_by": "alice",
        "metadata": {CREATOR_ID: ALICE.id},
        "dependencies": [{"issue_id": name, "depends_on_id": on, "type": kind} for kind, on in edges],
        **more,
    }
    if "acceptance" in told:
        told["acceptance_criteria"] = told["acceptance"]
    return read_issue(told)


def issues(*found: BeadsIssue) -> Issues:
    return Issues(found)


def of(who: Actor) -> Mapping[str, Any]:
    """What an issue that is assigned to an agent has."""
    return {"assignee": who.label, "metadata": {CREATOR_ID: ALICE.id, **assignment(who.label, who.id)}}


def verdict(rule: Callable[_P, _T]) -> Callable[_P, _T | Fault]:
    """A rule that returns its Fault instead of raising it."""

    def judge(*args: _P.args, **kwargs: _P.kwargs) -> _T | Fault:
        try:
            return rule(*args, **kwargs)
        except Fault as fault:
            return fault

    return judge
