"""The calls by which hooks and people mark turns, and by which hooks name the tool calls of an agent's client.

What a caller names here is a claim: the trail records it apart from what bonobofs observes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from bonobofs.companion.session_context import SessionContext
from bonobofs.errors import UsageError

_MARKS: Final = ("mark", "hook")
_LONGEST: Final = 200
"""Maximum characters of a claimed name or id."""


def _mark(session: SessionContext, name: str, by: str = "mark") -> Any:
    """Begin a turn; return its id."""
    if by not in _MARKS:
        raise UsageError(f"by is {' or '.join(_MARKS)}")
    return {"turn": f"{session.session.session[:8]}:{session.guard.begin_turn(name, by)}"}


def _begin_call(
    session: SessionContext,
    tool_call: str,
    tool: str,
    agent_session: str,
    turn: str | None = None,
    subagent: str | None = None,
) -> None:
    """Record that a tool call of the client begins."""
    claims = {"tool_call": tool_call, "tool": tool, "agent_session": agent_session, "turn": turn, "subagent": subagent}
    named = {name: text[:_LONGEST] for name, text in claims.items() if text is not None}
    session.guard.event("call_begin", named)


def _end_call(session: SessionContext, tool_call: str) -> None:
    """Record that a tool call of the client has ended."""
    session.guard.event("call_end", {"tool_call": tool_call[:_LONGEST]})


TURN_CALLS: Final[dict[str, Callable[..., Any]]] = {"mark": _mark, "call.begin": _begin_call, "call.end": _end_call}
