"""Answer the hook events of Claude Code and Codex, which send the same JSON.

Outside of a mount every event but those of worktrees is answered with nothing. The client's ids are claims: the session
records them as such. A refusal is reported only if the session has it, from the time of the same tool call.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.audit.entry import UNKNOWN
from bonobofs.errors import UsageError
from bonobofs.ipc.client import call_within
from bonobofs.session.session_list import CallableSession, session_of_mount
from bonobofs.system.terminal import printable

_ANSWER_SECONDS: Final = 10.0
_LONGEST_LINE: Final = 200
_MOST_LINES: Final = 20
_MOST_SHOWN: Final = 5
_IN_NO_PATH: Final = re.compile("[\0\ud800-\udc7f\udd00-\udfff]")
"""NUL, and the surrogates that stand for no byte."""
_TRIED: Final = frozenset({"rmdir", "set_times"})
"""Operations that programs try and whose failure they ignore."""

Event = Mapping[str, Any]


class _Hooked(NamedTuple):
    """The session of a hook."""

    session: CallableSession

    def call(self, name: str, /, **arguments: Any) -> Any:
        present = {key: value for key, value in arguments.items() if value}
        return call_within(_ANSWER_SECONDS, self.session.directory, name, **present)

    def read(self, name: str) -> list[str]:
        """Return the lines of a file of `.bonobofs`."""
        file = self.session.mountpoint / ".bonobofs" / name
        return file.read_text(encoding="utf-8", errors="backslashreplace").splitlines()


def answer(name: str, event: Event) -> str:
    """Return what a hook prints: JSON, a path for WorktreeCreate, or "".

    `name` is the event of the command line, `event` the JSON of stdin. UsageError: there is no such event.
    BonobofsError, OSError: the session does not answer, or a worktree cannot be made.
    """
    if name in _WORKTREES:
        return _WORKTREES[name](event)
    if name not in _EVENTS:
        raise UsageError(f"there is no hook event {name}; there are {', '.join(EVENTS)}")
    place = Path(_text(event, "cwd") or os.getcwd())
    session = session_of_mount(Path(os.path.realpath(place))) if place.is_absolute() else None
    if session is None:
        return ""
    context = _EVENTS[name](_Hooked(session), event)
    if not context:
        return ""
    output = {"additionalContext": context} if isinstance(context, str) else context
    return json.dumps({"hookSpecificOutput": {"hookEventName": name, **output}})


def parse_event(text: bytes) -> Event:
    """Parse the JSON of stdin. UsageError: it is no object."""
    try:
        event = json.loads(text or b"{}")
    except (ValueError, RecursionError):
        event = None
    if not isinstance(event, dict):
        raise UsageError("a hook event is a JSON object on standard input")
    return event


def _text(event: Event, *names: str) -> str:
    """Return the first of these fields that is a text and can be a path, else ""."""
    found = (event.get(name) for name in names)
    return next((value for value in found if isinstance(value, str) and not _IN_NO_PATH.search(value)), "")


def _begin_session(hooked: _Hooked, _: Event) -> str:
    """Say in at most 20 lines what may be written."""
    who = hooked.call("whoami")
    first = f"This directory is a mount of bonobofs: you are agent {who['agent']}, role {who['role']}."
    last = (
        "The whole policy is in .bonobofs/policy.md. `bonobofs why PATH` says if a change is allowed. A refused change "
        "stays refused: do what the refusal says instead."
    )
    shown = []
    for line in hooked.read("policy.md")[4:]:
        if line.startswith("## Tools"):
            break
        if line.startswith(("#", "- ")):
            shown.append(line.lstrip("# ") if line.startswith("#") else _short(line))
    return "\n".join([first, *shown[: _MOST_LINES - 2], last])


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 1]}…"


def _begin_turn(hooked: _Hooked, event: Event) -> None:
    hooked.call("mark", name=f"prompt of {_text(event, 'session_id')[:8] or 'the client'}", by="hook")


def _end_turn(hooked: _Hooked, event: Event) -> None:
    hooked.call("mark", name=f"after the prompt of {_text(event, 'session_id')[:8] or 'the client'}", by="hook")


def _begin_call(hooked: _Hooked, event: Event) -> None:
    hooked.call(
        "call.begin",
        tool_call=_text(event, "tool_use_id") or UNKNOWN,
        tool=_text(event, "tool_name") or UNKNOWN,
        agent_session=_text(event, "session_id") or UNKNOWN,
        turn=_text(event, "turn_id", "prompt_id"),
        subagent=_text(event, "agent_id"),
    )


def _end_call(hooked: _Hooked, event: Event) -> str:
    """End the claim, and report the refusals since the call began."""
    begun = hooked.call("call.end", tool_call=_text(event, "tool_use_id") or UNKNOWN)["begun"]
    if not begun:
        return ""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for denial in map(json.loads, hooked.read("denials.jsonl")):
        if denial["timestamp"] >= begun and denial["operation"] not in _TRIED:
            found.setdefault((denial["rule"], denial["path"]), denial)
    if not found:
        return ""
    lines = [f"bonobofs refused {len(found)} change{'s' * (len(found) > 1)} in this mount while the tool call ran:"]
    lines += [_sentence(denial) for denial in list(found.values())[:_MOST_SHOWN]]
    if len(found) > _MOST_SHOWN:
        lines.append(f"and {len(found) - _MOST_SHOWN} more; see .bonobofs/denials.jsonl")
    return "\n".join(lines)


def _sentence(denial: Event) -> str:
    """Return a refusal in one line: operation, path, code, rule, reason, question and what to do instead."""
    asked = f"The question to the operator is {denial['question']}." if denial.get("question") else ""
    held = f"It is held by {denial['holder']} until {denial['until']}." if denial.get("holder") else ""
    parts = (denial["reason"], _short(denial.get("about", "")), held, asked, denial["instead"])
    about = f"- {denial['operation']} {_short(denial['path'])} ({denial['code']}, rule {denial['rule']}):"
    return printable(" ".join([about, *filter(None, parts)]))  # the agent chooses the path


def _judge_permission(hooked: _Hooked, event: Event) -> dict[str, Any] | None:
    """Deny a file tool at once if the policy refuses the change."""
    tool_input = event.get("tool_input")
    path = _text(tool_input, "file_path", "notebook_path") if isinstance(tool_input, dict) else ""
    place = Path(os.path.realpath(os.path.dirname(path)), os.path.basename(path)) if os.path.isabs(path) else None
    if place is None or not place.is_relative_to(hooked.session.mountpoint):
        return None
    try:
        decision = hooked.call("why", path=str(place))
    except TimeoutError:
        raise
    except OSError:
        return None  # no file can be looked up by this path, such as a too long one: the client's own tool reports it
    if decision["allowed"]:
        return None
    return {"decision": {"behavior": "deny", "message": f"bonobofs refuses this change. {_sentence(decision)[2:]}"}}


def _create_worktree(event: Event) -> str:
    """Make a worktree with its mount for the client, and return its path."""
    from bonobofs.session import worktrees  # noqa: PLC0415 - most hooks make no worktree
    from bonobofs.session.registration import default_agent  # noqa: PLC0415
    from bonobofs.state.home import home  # noqa: PLC0415

    name = _text(event, "name", "worktree_name")
    if not name:
        raise UsageError("WorktreeCreate needs the name of the worktree in `name`")
    cwd = Path(_text(event, "cwd") or os.getcwd())
    request = worktrees.WorktreeRequest(cwd, name, default_agent(), needs_issue=False)
    return str(worktrees.add(home(), request).work)


def _remove_worktree(event: Event) -> str:
    from bonobofs.session import worktrees  # noqa: PLC0415 - as above
    from bonobofs.state.home import home  # noqa: PLC0415

    path = _text(event, "worktree_path")
    if not path:
        raise UsageError("WorktreeRemove needs the path of the worktree in `worktree_path`")
    worktrees.remove(home(), path)
    return ""


_EVENTS: Final[dict[str, Callable[[_Hooked, Event], str | dict[str, Any] | None]]] = {
    "SessionStart": _begin_session,
    "UserPromptSubmit": _begin_turn,
    "PreToolUse": _begin_call,
    "PostToolUse": _end_call,
    "PostToolUseFailure": _end_call,
    "PermissionRequest": _judge_permission,
    "Stop": _end_turn,
}
_WORKTREES: Final[dict[str, Callable[[Event], str]]] = {
    "WorktreeCreate": _create_worktree,
    "WorktreeRemove": _remove_worktree,
}
EVENTS: Final = (*_EVENTS, *_WORKTREES)
