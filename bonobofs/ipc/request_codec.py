"""How what is asked of the door is written on the line between companion and server."""

from __future__ import annotations

from typing import Any

from bonobofs.enforcement.enforcer import Caller, RelatedChange
from bonobofs.policy.request import NO_FACTS, Context, Kind, Operation, Request, WorkspacePath

_USUAL = NO_FACTS._asdict()


def plain_question(request: Request, context: Context) -> list[Any]:
    """A request with its facts, of which those that are as usual are left out."""
    told = {name: value for name, value in context._asdict().items() if value != _USUAL[name]}
    if context.head:
        told["head"] = context.head.decode("latin-1")
    return [request.operation.value, request.path, request.kind.value, told]


def question(plain: list[Any]) -> RelatedChange:
    """The request, and its facts."""
    operation, path, kind, told = plain
    if "head" in told:
        told["head"] = told["head"].encode("latin-1")
    return RelatedChange(Request(Operation(operation), WorkspacePath(path), Kind(kind)), Context(**told))


def caller(plain: list[Any]) -> Caller:
    """Who asked, as it is written: the tool, and its details."""
    tool, details = plain
    return Caller(tool, details)
