"""Trying the examples that rules carry, for `policy test`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from bonobofs.decision import Decision, Denied
from bonobofs.policy.engine import Policy, compile_policy, decide_in_source
from bonobofs.request import Agent, Facts, Kind, Operation, Request, WorkspacePath

_SMALL_FILE: Final = Facts(size=1, mode=0o644, head=b"a")


def failures(document: Mapping[str, Any]) -> list[str]:
    """One line for each example that the whole policy decides otherwise than its rule expects; empty: all hold.

    `document` is `PolicyDocument.model_dump(mode="json")`. Every example is tried in the default role, as the creation
    of a small plain file in the source, or of a directory where it ends in a slash; what would be kept apart counts as
    denied. PolicyError as from `compile_policy`.
    """
    policy = compile_policy(document)
    agent = Agent("example", "", document.get("default_role", "agent"))
    return list(_failures(policy, agent, document))


def count(document: Mapping[str, Any]) -> int:
    """How many examples the policy's rules carry."""
    return sum(len(paths) for rule in document.get("rule", ()) for paths in rule.get("examples", {}).values())


def _failures(policy: Policy, agent: Agent, document: Mapping[str, Any]) -> Iterator[str]:
    for rule in document.get("rule", ()):
        examples = rule.get("examples", {})
        for path in examples.get("allow", ()):
            decision = _decide(policy, agent, path)
            if isinstance(decision, Denied):
                why = f"{decision.rule} refuses it: {decision.code}: {decision.reason}"
                yield f"rule {rule['name']}: {_shown(path)} should be allowed, but {why}"
        for path in examples.get("deny", ()):
            decision = _decide(policy, agent, path)
            if not isinstance(decision, Denied):
                yield f"rule {rule['name']}: {_shown(path)} should be denied, but {decision.rule} admits it"


def _decide(policy: Policy, agent: Agent, path: str) -> Decision:
    if path.endswith("/"):
        return decide_in_source(policy, agent, Request(Operation.MKDIR, WorkspacePath(path[:-1]), Kind.DIRECTORY))
    return decide_in_source(policy, agent, Request(Operation.CREATE_FILE, WorkspacePath(path)), _SMALL_FILE)


def _shown(path: str) -> str:
    return path if path.isprintable() else ascii(path)[1:-1]
