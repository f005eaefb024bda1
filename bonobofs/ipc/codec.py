"""Requests, decisions and failures as JSON: on the channel of server and companion, and on the guard socket."""

from __future__ import annotations

from typing import Any, Final

from bonobofs import errors
from bonobofs.errors import BonobofsError, StateError
from bonobofs.policy.decision import Code, Decision, Denied, Holding, Layer, Permit, as_document
from bonobofs.policy.request import NO_FACTS, Context, Kind, Operation, PlannedChange, Request, WorkspacePath

_DEFAULTS: Final = NO_FACTS._asdict()


def encode_request(request: Request, context: Context) -> list[Any]:
    """Operation, path, kind, and the fields of the context that differ from the default."""
    fields = {name: value for name, value in context._asdict().items() if value != _DEFAULTS[name]}
    if context.head:
        fields["head"] = context.head.decode("latin-1")
    return [request.operation.value, request.path, request.kind.value, fields]


def decode_request(encoded: list[Any]) -> tuple[Request, Context]:
    """Parse `encode_request`."""
    operation, path, kind, fields = encoded
    if "head" in fields:
        fields["head"] = fields["head"].encode("latin-1")
    return Request(Operation(operation), WorkspacePath(path), Kind(kind)), Context(**fields)


def decode_planned_change(document: dict[str, Any]) -> PlannedChange:
    """Parse the fields of a `PlannedChange`; other fields are ignored."""
    change = PlannedChange(*(document[name] for name in PlannedChange._fields))
    return change._replace(operation=change.operation and Operation(change.operation))


def encode_denied(denied: Denied) -> dict[str, Any]:
    """The public form of a denial, and the holder's UUID."""
    document = as_document(denied, denied.path, denied.operation)
    if denied.holding is not None:
        document["holder_id"] = denied.holding.holder_id
    return document


def decode_denied(document: dict[str, Any]) -> Denied:
    """Parse `encode_denied` or the public form of a denial; other fields are ignored."""
    holding = None
    if "holder" in document:
        holding = Holding(document["holder"], document["chain"], document["until"], document.get("holder_id"))
    return Denied(
        Code(document["code"]),
        document["rule"],
        document["reason"],
        document["instead"],
        WorkspacePath(document["path"]),
        Operation(document["operation"]),
        holding,
        document.get("about", ""),
        document.get("question", ""),
    )


def encode_decision(decision: Decision) -> dict[str, Any]:
    """A decision as a JSON object; "allowed" says which of the two it is."""
    return encode_denied(decision) if isinstance(decision, Denied) else {"allowed": True, **decision._asdict()}


def decode_decision(document: dict[str, Any]) -> Decision:
    """Parse `encode_decision`; other fields are ignored."""
    if not document["allowed"]:
        return decode_denied(document)
    layer, answer = Layer(document["layer"]), document.get("answer", 0)
    return Permit(document["rule"], document["max_size"], document["judges_content"], layer, answer)


def encode_failure(error: Exception) -> dict[str, Any]:
    """{"type", "message"}, and "errno" of an OSError that has one."""
    failure: dict[str, Any] = {"type": type(error).__name__, "message": str(error)}
    if isinstance(error, OSError):
        failure["message"] = error.strerror or str(error)
        if error.errno is not None:
            failure["errno"] = error.errno
    return failure


def decode_failure(failure: dict[str, Any]) -> Exception:
    """Parse `encode_failure`; a type that is neither OSError nor BonobofsError becomes StateError."""
    if "errno" in failure:
        return OSError(failure["errno"], failure["message"])
    kind = getattr(errors, failure["type"], None)
    if isinstance(kind, type) and issubclass(kind, BonobofsError):
        return kind(failure["message"])
    return StateError(f"the session failed unexpectedly: {failure['type']}: {failure['message']}")
