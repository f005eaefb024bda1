"""The engine and the written rule of leases agree on random leases and paths."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bonobofs.policy.decision import Code, Denied, Holding, Layer, Permit
from bonobofs.policy.engine import compile_policy, decide
from bonobofs.policy.lease_set import UNKNOWN, compile_leases
from bonobofs.policy.request import Context, Kind, Operation, Principal, Request, WorkspacePath
from tests.policy import oracle
from tests.policy.random_policies import agents, context, documents, patterns, plain_paths, requests

leases = st.lists(
    st.fixed_dictionaries(
        {
            "patterns": st.lists(patterns, min_size=1, max_size=3),
            "shared": st.booleans(),
            "own": st.booleans(),
            "holder": st.sampled_from(["ann", "bob"]),
            "holder_id": st.sampled_from([None, "22222222-2222-4222-8222-222222222222"]),
            "chain": st.sampled_from([None, "C1"]),
            "until": st.just("2026-11-23T00:00:00+00:00"),
        }
    ),
    max_size=5,
)
ALLOW = compile_policy({"default": "allow", "hidden": ["**"]})
ANN = Principal("ann", "11111111-1111-4111-8111-111111111111", "agent")


def may_change(held: list[dict[str, Any]], path: str) -> bool:
    """As the contracts say: exclusive, only the holder; shared, any of its shared holders."""
    matching = [lease for lease in held if oracle.any_matches(lease["patterns"], path.split("/"))]
    shared = [lease for lease in matching if lease["shared"]]
    others_alone = any(not lease["shared"] and not lease["own"] for lease in matching)
    own = any(lease["own"] for lease in matching)
    return not others_alone and (own or not any(not lease["own"] for lease in shared))


@settings(max_examples=500, deadline=None)
@given(leases, plain_paths.filter(lambda path: ".bonobofs" not in path and ".git" not in path))  # always protected
def test_a_leased_path_belongs_to_its_holder(held: list[dict[str, Any]], path: str) -> None:
    policy = ALLOW.bound_by(compile_leases(held))
    decision = decide(policy, ANN, Request(Operation.WRITE_FILE, WorkspacePath(path)))
    assert isinstance(decision, Permit) == may_change(held, path)
    if isinstance(decision, Denied):
        assert decision.code is Code.LEASED
        assert decision.holding is not None
        assert decision.holding in [
            Holding(lease["holder"], lease["chain"], lease["until"], lease["holder_id"]) for lease in held
        ]


@pytest.mark.parametrize("own", [False, True])
def test_a_symlink_above_leased_paths_needs_the_lease(*, own: bool) -> None:
    """A shared lease permits it beside other shared leases."""
    lease = {"patterns": ["a/b/**"], "shared": True, "chain": None, "until": "2030-01-01", "holder_id": None}
    held = [{**lease, "own": False, "holder": "bob"}, {**lease, "own": True, "holder": "ann"}]
    policy = ALLOW.bound_by(compile_leases(held if own else held[:1]))
    request = Request(Operation.SYMLINK, WorkspacePath("a/b"), Kind.SYMLINK)
    assert isinstance(decide(policy, ANN, request, Context(target="../c")), Permit) == own


@settings(max_examples=300, deadline=None)
@given(documents, agents, requests, context, leases)
def test_leases_never_allow_more(
    document: dict[str, Any], agent: Principal, request: Request, known: Context, held: list[dict[str, Any]]
) -> None:
    """A request that is denied without leases is denied with them, for the same reason. Leases do not apply to other
    layers, except to a file that moves with its directory in the source.
    """
    policy = compile_policy(document)
    without = decide(policy, agent, request, known)
    for bound in (policy.bound_by(compile_leases(held)), policy.bound_by(UNKNOWN)):
        decision = decide(bound, agent, request, known)
        if isinstance(without, Denied) or (without.layer is not Layer.SOURCE and not known.carried):
            assert decision == without
        else:
            assert decision == without or (isinstance(decision, Denied) and decision.code is Code.LEASED)


def test_unknown_leases_refuse_every_change() -> None:
    for kind in Kind:
        request = Request(Operation.SET_MODE, WorkspacePath("a"), kind)
        decision = decide(ALLOW.bound_by(UNKNOWN), ANN, request)
        assert isinstance(decision, Denied)
        assert (decision.code, decision.holding) == (Code.LEASED, None)
