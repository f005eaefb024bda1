"""How what is asked of the door is written on the line between companion and server."""

from __future__ import annotations

from typing import Any

from bonobofs.enforcement.enforcer import Caller, Part
from bonobofs.policy.request import NO_FACTS, Facts, Kind, Operation, Request, WorkspacePath

_USUAL = NO_FACTS._asdict()


def plain_question(request: Request, facts: Facts) -> list[Any]:
    """A request with its facts, of which those that are as usual are left out."""
    told = {name: value for name, value in facts._asdict().items() if value != _USUAL[name]}
    if facts.head:
        told["head"] = facts.head.decode("latin-1")
    return [request.operation.value, request.path, request.kind.value, told]


def question(plain: list[Any]) -> Part:
    """The request, and its facts."""
    operation, path, kind, told = plain
    if "head" in told:
        told["head"] = told["head"].encode("latin-1")
    return Part(Request(Operation(operation), WorkspacePath(path), Kind(kind)), Facts(**told))


def caller(plain: list[Any]) -> Caller:
    """Who asked, as it is written: the tool, and its details."""
    tool, details = plain
    return Caller(tool, details)
