"""Issue calls of the guard socket: `beads.bd` for the session's `bd`, and one call for each operation.

`beads.bd` takes a command line of bd and returns its exit status and output. The companion runs bd on the source.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from bonobofs.beads import Beads, BeadsIssue, find_beads
from bonobofs.beads.bd_command_line import Asking, Reading, Step, Unanswered, understand
from bonobofs.beads.call_plan import act
from bonobofs.beads.issue import issue_document
from bonobofs.beads.issue_service import IssueService
from bonobofs.beads.refusals import UNANSWERED
from bonobofs.companion.call_arguments import Arguments, check_empty, required_texts
from bonobofs.companion.session_context import SessionContext
from bonobofs.enforcement.authorizer import Caller
from bonobofs.errors import BonobofsError, UsageError
from bonobofs.policy.decision import Denied, Refused, as_document
from bonobofs.policy.request import Operation, WorkspacePath

_FAILED: Final = 1
_MAX_WORDS: Final = 20
_MAX_WORD: Final = 200
"""Limits for a command line in the trail: number of words, and characters of each word."""
_STEERING: Final = ("BEADS_", "BD_")
_HARMLESS: Final = frozenset(
    {"BD_JSON", "BD_JSON_ENVELOPE", "BD_NO_HOOKS", "BD_NO_PAGER", "BD_NON_INTERACTIVE", "BD_PAGER", "BD_READONLY"}
)
"""Variables of bd that are permitted, because they only change its output or restrict it. bonobofs drops them."""
_OPERATIONS: Final = {
    "create": Operation.CREATE_ISSUE,
    "update": Operation.UPDATE_ISSUE,
    "close": Operation.CLOSE_ISSUE,
    "reopen": Operation.REOPEN_ISSUE,
    "dep": Operation.ADD_DEPENDENCY,
    "label": Operation.LABEL_ISSUE,
    "comment": Operation.COMMENT_ISSUE,
}


class Issues:
    """Issues of a session."""

    def __init__(self, session: SessionContext) -> None:
        self.beads: Final = Beads(find_beads(Path(session.place), session.home), session.home, session.guard.agent)
        self._agent: Final = session.guard.agent
        self._acting: Final = IssueService(session, self.beads)

    def act(self, step: Step, tool: str) -> BeadsIssue:
        """Run one operation and return the issue. Raises Refused, BonobofsError."""
        return act(self._acting, self._agent, step, tool)


_ISSUES: Final[weakref.WeakKeyDictionary[SessionContext, Issues]] = weakref.WeakKeyDictionary()
_ISSUES_LOCK: Final = threading.Lock()


def issues_of(session: SessionContext) -> Issues:
    """Return the session's issues. Raises BeadsError if its workspace has none."""
    with _ISSUES_LOCK:
        if session not in _ISSUES:
            _ISSUES[session] = Issues(session)
        return _ISSUES[session]


def bd(session: SessionContext, arguments: Arguments) -> Any:
    """Run a command line of bd. Return {"status", "stdout", "stderr", "denied"}; "denied" is a list of denials."""
    words, variables = required_texts(arguments, "arguments"), required_texts(arguments, "variables")
    check_empty(arguments)
    caller = Caller("bd", {"command": [word[:_MAX_WORD] for word in words[:_MAX_WORDS]]})
    try:
        command_line = understand(words)
        if steering := [name for name in variables if name.startswith(_STEERING) and name not in _HARMLESS]:
            raise Unanswered("environment", f"This is about {', '.join(map(ascii, steering))}.")
    except Unanswered as unanswered:
        operation = next((_OPERATIONS[word] for word in words if word in _OPERATIONS), Operation.CALL)
        denied = Denied(*UNANSWERED[unanswered.rule], WorkspacePath(""), operation, about=unanswered.about)
        raise session.guard.deny(denied, caller, guard="beads") from None
    if isinstance(command_line, Reading):
        return _read(session, command_line, caller)
    return _ask(session, command_line)


def _read(session: SessionContext, command_line: Reading, caller: Caller) -> Any:
    policy, role = session.guard.policy, session.guard.agent.role
    if role not in policy.roles:
        denied = Denied(*policy.unknown_role, WorkspacePath(""), Operation.CALL)
        raise session.guard.deny(denied, caller, guard="beads")
    with issues_of(session).beads.turn() as turn:
        output = turn.read(command_line.arguments)
    if output.status is None:
        return _answer(_FAILED, output.stdout, output.stderr + "bd: it took too long, and was ended\n")
    return _answer(output.status if output.status >= 0 else 128 - output.status, output.stdout, output.stderr)


def _ask(session: SessionContext, command_line: Asking) -> Any:
    issues = issues_of(session)
    completed: list[tuple[Step, BeadsIssue]] = []
    denied: list[dict[str, Any]] = []
    errors: list[str] = []
    for step in command_line.steps:
        try:
            completed.append((step, issues.act(step, f"bd {command_line.command}")))
        except Refused as refused:
            denied.append(as_document(refused.decision, refused.decision.path, refused.decision.operation))
        except BonobofsError as error:
            errors.append(f"bd: {error}\n")
    status = Refused.exit_code if denied else _FAILED if errors else 0
    return {**_answer(status, _output(command_line, completed), "".join(errors)), "denied": denied}


def _answer(status: int, stdout: str, stderr: str) -> dict[str, Any]:
    return {"status": status, "stdout": stdout, "stderr": stderr, "denied": []}


def _output(command_line: Asking, completed: Sequence[tuple[Step, BeadsIssue]]) -> str:
    """Return the output that bd prints for the operations that succeeded."""
    if not completed:
        return ""
    if command_line.silent and not command_line.json:
        return "".join(f"{issue.id}\n" for _, issue in completed)
    if not command_line.json:
        return "".join(f"{_line(command_line.command, step, issue)}\n" for step, issue in completed)
    documents = [_document(command_line.command, step, issue) for step, issue in completed]
    is_single = command_line.command in ("create", "dep", "dep add", "dep remove", "comment", "comments add")
    return json.dumps(documents[0] if is_single else documents, indent=2) + "\n"


def _document(command: str, step: Step, issue: BeadsIssue) -> Mapping[str, Any]:
    fields = step.arguments
    if step.name == "tie":
        return {"status": "added", "issue_id": step.issue, "depends_on_id": fields["other"], "type": fields["type"]}
    if step.name == "untie":
        return {"status": "removed", "issue_id": step.issue, "depends_on_id": fields["other"]}
    if step.name == "label":
        way = command.rpartition(" ")[2]
        return {"issue_id": step.issue, "label": fields[way][0], "status": "added" if way == "add" else "removed"}
    if step.name == "comment":
        return {"issue_id": step.issue, "text": fields["text"]}
    return issue_document(issue)


def _line(command: str, step: Step, issue: BeadsIssue) -> str:
    fields = step.arguments
    if step.name == "tie":
        return f"✓ Added dependency: {step.issue} depends on {fields['other']} ({fields['type']})"
    if step.name == "untie":
        return f"✓ Removed dependency: {step.issue} no longer depends on {fields['other']}"
    if step.name == "label":
        added = command.endswith("add")
        label = fields["add" if added else "remove"][0]
        return f"✓ Added label {label} to {issue.id}" if added else f"✓ Removed label {label} from {issue.id}"
    if step.name == "comment":
        return f"✓ Comment added to {issue.id}"
    word = {"create": "Created issue:", "update": "Updated issue:", "close": "Closed", "reopen": "Reopened"}[step.name]
    return f"✓ {word} {issue.id}: {issue.title}"


def _operation(name: str, needed: str, others: str | None = None) -> Callable[[SessionContext, Arguments], Any]:
    """Make the call for one operation. The call returns the issue as `bd show --json` does.

    `needed` lists the required arguments, `others` the optional ones. None permits the fields of an issue.
    """

    def call(session: SessionContext, arguments: Arguments) -> Any:
        for key in needed.split():
            if not isinstance(arguments.get(key), str):
                raise UsageError(f"the call needs {key}, a text")
        if others is not None and (strange := arguments.keys() - {*needed.split(), *others.split()}):
            raise UsageError(f"the call takes no {', '.join(sorted(strange))}")
        step = Step(name, arguments.pop("issue", ""), arguments)
        return issue_document(issues_of(session).act(step, f"beads.{name}"))

    return call


BEADS_CALLS: Final[dict[str, Callable[[SessionContext, Arguments], Any]]] = {
    "beads.bd": bd,
    "beads.create": _operation("create", "title"),
    "beads.update": _operation("update", "issue"),
    "beads.close": _operation("close", "issue", "reason"),
    "beads.reopen": _operation("reopen", "issue", "reason"),
    "beads.tie": _operation("tie", "issue other type", ""),
    "beads.untie": _operation("untie", "issue other", ""),
    "beads.label": _operation("label", "issue", "add remove"),
    "beads.comment": _operation("comment", "issue text", ""),
}
