"""A decision as one process of a session tells it to another: the companion acts on the leave that the door gave it."""

from __future__ import annotations

from typing import Any

from bonobofs.policy.decision import Code, Decision, Denied, Holding, Layer, Permit
from bonobofs.policy.request import Operation, WorkspacePath


def plain_decision(decision: Decision) -> dict[str, Any]:
    """As plain data."""
    if isinstance(decision, Denied):
        holding = None if decision.holding is None else list(decision.holding)
        return {"denied": list(decision._replace(holding=None)), "holding": holding}
    return {"allowed": list(decision)}


def decision(plain: dict[str, Any]) -> Decision:
    """What `plain_decision` has made plain."""
    if "denied" in plain:
        code, rule, reason, instead, path, operation, _, about = plain["denied"]
        holding = None if plain["holding"] is None else Holding(*plain["holding"])
        return Denied(Code(code), rule, reason, instead, WorkspacePath(path), Operation(operation), holding, about)
    rule, max_size, judges_content, layer = plain["allowed"]
    return Permit(rule, max_size, judges_content, Layer(layer))
