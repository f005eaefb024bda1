"""The engine and a naive second implementation agree on random policies and requests."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bonobofs.policy.compiled import Tracked
from bonobofs.policy.decision import Layer, Permit
from bonobofs.policy.document import PolicyDocument
from bonobofs.policy.engine import compile_policy, decide
from bonobofs.policy.request import Context, Kind, Operation, Principal, Request
from tests.policy import oracle
from tests.policy.random_policies import agents, context, documents, mostly, one_line, requests, tracked


@settings(max_examples=400, deadline=None)
@given(documents, agents, requests, context, mostly(st.just([]), tracked) | tracked)
def test_the_engine_agrees_with_the_oracle(
    document: dict[str, Any], agent: Principal, request: Request, known: Context, paths: list[str]
) -> None:
    policy = compile_policy(document).with_tracked(Tracked(paths) if paths else None)
    decision = decide(policy, agent, request, known)
    expected = oracle.decide(document, agent, request, known, paths)
    if isinstance(decision, Permit):
        assert decision.layer == expected
        scratch = {f"scratch:{pattern}" for table in document["scratch"] for pattern in table["paths"]}
        assert decision.rule in {
            Layer.SCRATCH: scratch,
            Layer.STAGED: {"temporary"},
            Layer.SOURCE: {"default", *(rule["name"] for rule in document["rule"])},
        }[decision.layer] or decision.rule.startswith(f"role:{agent.role}:")
    else:
        assert isinstance(expected, set)
        assert decision.code in expected
        assert (decision.path, decision.operation) == (request.path, request.operation)
        assert decision.reason.endswith(".")
        assert decision.instead.endswith(".")
        assert one_line(decision.rule + decision.reason + decision.instead)


def removes(request: Request, known: Context) -> bool:
    return known.leaves or request.operation in (Operation.DELETE_FILE, Operation.RMDIR)


@settings(max_examples=200, deadline=None)
@given(
    documents, agents, requests, context, st.integers(0, 12), st.sampled_from([b"#!/bin/s", b"\x7fELF", b"text", b""])
)
def test_a_permit_is_valid_for_every_size_up_to_its_limit(
    document: dict[str, Any], agent: Principal, request: Request, known: Context, size: int, head: bytes
) -> None:
    """A decision from a cache must equal the decision of the policy."""
    decision = decide(compile_policy(document), agent, request, known)
    if not isinstance(decision, Permit) or removes(request, known):
        return
    if decision.max_size is not None and size > decision.max_size:
        return
    later = known._replace(size=size, size_before=0)
    assert oracle.codes(document, agent, request, later) == set()
    if not decision.judges_content:
        assert oracle.codes(document, agent, request, later._replace(head=head, mode=0o755)) == set()


@settings(max_examples=150, deadline=None)
@given(documents, agents, requests, context)
def test_a_permit_names_the_largest_allowed_size(
    document: dict[str, Any], agent: Principal, request: Request, known: Context
) -> None:
    """A larger file is refused, or staged if its name is temporary."""
    decision = decide(compile_policy(document), agent, request, known)
    if removes(request, known) or request.kind is not Kind.FILE:
        return
    if isinstance(decision, Permit) and decision.max_size is not None:
        grown = known._replace(size=decision.max_size + 1, size_before=0)
        assert oracle.decide(document, agent, request, grown) not in (Layer.SOURCE, Layer.SCRATCH)


@settings(max_examples=200, deadline=None)
@given(documents)
def test_random_policies_can_be_loaded(document: dict[str, Any]) -> None:
    assert compile_policy(PolicyDocument.model_validate(document).model_dump(mode="json")).roles
