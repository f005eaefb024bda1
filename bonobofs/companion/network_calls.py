"""The calls by which egress gets the network's lists and records connections.

The agent can call guard.sock too. So these calls need the key of the session, which the sandbox does not show.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from bonobofs.companion.session_context import SessionContext
from bonobofs.enforcement.authorizer import Caller
from bonobofs.errors import ForbiddenError, PolicyError, UsageError, reason
from bonobofs.policy.decision import Denied
from bonobofs.policy.denials import NETWORK
from bonobofs.policy.request import Context, Operation, Request, WorkspacePath
from bonobofs.sandbox.network_list import operator_list
from bonobofs.state.home import EGRESS_KEY, session_directory

_GUARD: Final = "network"
_TOOL: Final = "egress"
_CONNECT: Final = Request(Operation.CONNECT, WorkspacePath(""))


def _check_key(session: SessionContext, key: str) -> None:
    """Raises ForbiddenError if the caller is not the egress process of this session."""
    try:
        expected = (session_directory(session.home, session.session.session) / EGRESS_KEY).read_text(encoding="ascii")
    except FileNotFoundError:
        expected = ""
    if not expected or not hmac.compare_digest(expected.encode(), key.encode()):
        raise ForbiddenError("this call is for the egress process of the session alone")


def _lists(session: SessionContext, key: str) -> Any:
    """The entries of the policy in force and of the operator's list; `error` if that list cannot be read."""
    _check_key(session, key)
    policy = session.guard.policy.document.get("network", {}).get("allow", [])
    try:
        operator, error = operator_list(session.home, Path(session.session.source)), ""
    except (PolicyError, OSError) as failure:
        operator, error = [], reason(failure)
    if error != session.network_error:
        session.network_error = error
        session.guard.event("network_list", {"error": error or None})
    return {"policy": policy, "operator": operator, "error": error}


def _allowed(session: SessionContext, key: str, host: str, port: int, via: str) -> Any:
    """Record a connection before egress makes it. Refused: the policy in force does not admit it, or no record."""
    _check_key(session, key)
    details = {"host": host, "port": port, "via": via}
    session.guard.record_call(_CONNECT, Context(endpoint=(host, port)), guard=_GUARD, caller=Caller(_TOOL, details))


def _refused(session: SessionContext, key: str, refusals: list[Any]) -> Any:
    """Record refused connections: [host, port, via, word, count] each."""
    _check_key(session, key)
    for refusal in refusals:
        try:
            host, port, via, word, count = refusal
            text = NETWORK[word]
        except (ValueError, TypeError, KeyError):
            raise UsageError("a refusal is [host, port, via, word, count]") from None
        endpoint = f"{host}:{port}" if host else "several hosts or ports"
        denied = Denied(*text, _CONNECT.path, _CONNECT.operation, about=f"The connection was to {endpoint}.")
        details = {"host": host, "port": port, "via": via}
        session.guard.deny(denied, Caller(_TOOL, details), guard=_GUARD, count=count)


NETWORK_CALLS: Final[dict[str, Callable[..., Any]]] = {
    "network.lists": _lists,
    "network.allowed": _allowed,
    "network.refused": _refused,
}
