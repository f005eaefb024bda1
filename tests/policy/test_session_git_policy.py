"""Decisions in a mount that shows the session's own `.git`."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from bonobofs.policy.decision import Code, Denied, Layer, Permit
from bonobofs.policy.engine import compile_policy, decide
from bonobofs.policy.request import NO_FACTS, Context, Kind, Operation, Principal, Request, WorkspacePath
from tests.policy.random_policies import agents, context, documents, requests

ALICE = Principal("alice", "1", "agent")
POLICY = compile_policy({"git": {"protected_branches": ["main", "release/*"]}}).with_repository()


def judge(path: str, operation: Operation = Operation.CREATE_FILE, context: Context = NO_FACTS) -> Permit | Denied:
    return decide(POLICY, ALICE, Request(operation, WorkspacePath(path), Kind.FILE), context)


@settings(max_examples=150, deadline=None)
@given(documents, agents, requests, context)
def test_only_paths_below_git_are_decided_differently(
    document: dict[str, Any], agent: Principal, request: Request, known: Context
) -> None:
    """An allowed change there goes to the session's git directory, even if the policy protects, denies, hides or
    leases the path.
    """
    policy = compile_policy(document)
    decision = decide(policy.with_repository(), agent, request, known)
    if request.path.split("/")[0] != ".git":
        assert decision == decide(policy, agent, request, known)
    elif isinstance(decision, Permit):
        assert (decision.layer, decision.rule) == (Layer.SCRATCH, "repository")
        assert agent.role in policy.roles
        assert request.path != ".git"
    elif decision.code is Code.PROTECTED:
        assert decision.rule in ("repository", "repository:protected")


@pytest.mark.parametrize("operation", [Operation.RENAME, Operation.RMDIR, Operation.SET_MODE, Operation.SYMLINK])
def test_the_git_directory_cannot_be_moved_removed_or_replaced(operation: Operation) -> None:
    context = Context(target="x") if operation is Operation.SYMLINK else NO_FACTS
    decision = judge(".git", operation, context)
    assert isinstance(decision, Denied)
    assert decision.code in (Code.PROTECTED, Code.OUTSIDE)


@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        (".git/config", True),
        (".git/refs/heads/topic", True),
        (".git/refs/heads/main", False),
        (".git/refs/heads/main.lock", True),
        (".git/refs/heads/release/1", False),
        (".git/refs/heads/release", True),
        (".git/refs/tags/main", True),
        ("vendor/.git/config", False),
    ],
)
def test_protected_branches_are_read_only(path: str, *, allowed: bool) -> None:
    """Their lock files are allowed: git also locks refs that it does not move."""
    assert isinstance(judge(path), Permit) is allowed


@pytest.mark.parametrize(
    ("path", "target", "allowed"),
    [
        (".git/HEAD", "refs/heads/topic", True),
        (".git/refs/heads/a", "../../HEAD", True),
        (".git/HEAD", "../README.md", False),
        (".git/HEAD", "/etc/passwd", False),
        (".git/a/b", "../../..", False),
        (".git/a/b", "c/../../../x", False),
        ("link", ".git/config", False),
    ],
)
def test_no_symlink_leads_out_of_it_or_into_it(path: str, target: str, *, allowed: bool) -> None:
    assert isinstance(judge(path, Operation.SYMLINK, Context(target=target)), Permit) is allowed
