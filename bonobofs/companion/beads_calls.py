"""Issue calls of the guard socket: `beads.bd` for the session's `bd`, and one call for each operation.

`beads.bd` takes a command line of bd and returns its exit status and output. The companion runs bd on the source.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from bonobofs.beads import BeadsIssue
from bonobofs.beads.bd_command_line import ReadCommand, Step, UnsupportedCommand, WriteCommand, parse_command_line
from bonobofs.beads.issue import CLOSED, attachments_of, issue_document
from bonobofs.beads.issue_service import IssueService
from bonobofs.beads.refusals import UNSUPPORTED
from bonobofs.companion.session_context import OTHERS, Content, SessionContext, check_arguments, kinds_of
from bonobofs.enforcement.authorizer import Caller
from bonobofs.errors import BonobofsError
from bonobofs.files.results import bounded
from bonobofs.policy.decision import Denied, Refused, as_document
from bonobofs.policy.request import Operation, WorkspacePath

_FAILED: Final = 1
_IN_LIST: Final = ("id", "title", "issue_type", "status", "priority", "assignee", "labels")
_MOST_LISTED: Final = 1000
_MOST_SHOWN: Final = 200
_STEERING: Final = ("BEADS_", "BD_")
_HARMLESS: Final = frozenset(
    {"BD_JSON", "BD_JSON_ENVELOPE", "BD_NO_HOOKS", "BD_NO_PAGER", "BD_NON_INTERACTIVE", "BD_PAGER", "BD_READONLY"}
)
"""Variables that only change bd's output or restrict it. The call may have them; bonobofs drops them."""
_OPERATIONS: Final = {
    "create": Operation.CREATE_ISSUE,
    "update": Operation.UPDATE_ISSUE,
    "close": Operation.CLOSE_ISSUE,
    "reopen": Operation.REOPEN_ISSUE,
    "dep": Operation.ADD_DEPENDENCY,
    "label": Operation.LABEL_ISSUE,
    "comment": Operation.COMMENT_ISSUE,
}


_SERVICES: Final[weakref.WeakKeyDictionary[SessionContext, IssueService]] = weakref.WeakKeyDictionary()
_SERVICES_LOCK: Final = threading.Lock()


def service_of(session: SessionContext) -> IssueService:
    """Return the session's operations on issues. Raises BeadsError if its workspace has no issues."""
    with _SERVICES_LOCK:
        if session not in _SERVICES:
            _SERVICES[session] = IssueService(session)
        return _SERVICES[session]


def bd(session: SessionContext, arguments: list[str], variables: list[str]) -> Any:
    """Run a command line of bd. Return {"status", "stdout", "stderr", "denied"}; "denied" is a list of denials."""
    caller = Caller("bd", bounded({"command": arguments}))
    try:
        command_line = parse_command_line(arguments)
        if steering := [name for name in variables if name.startswith(_STEERING) and name not in _HARMLESS]:
            raise UnsupportedCommand("environment", f"This is about {', '.join(map(ascii, steering))}.")
    except UnsupportedCommand as error:
        operation = next((_OPERATIONS[word] for word in arguments if word in _OPERATIONS), Operation.CALL)
        denied = Denied(*UNSUPPORTED[error.rule], WorkspacePath(""), operation, about=error.about)
        raise session.guard.deny(denied, caller, guard="beads") from None
    if isinstance(command_line, ReadCommand):
        return _read(session, command_line, caller)
    return _write(session, command_line)


def _check_role(session: SessionContext, caller: Caller) -> None:
    policy, role = session.guard.policy, session.guard.agent.role
    if role not in policy.roles:
        denied = Denied(*policy.unknown_role, WorkspacePath(""), Operation.CALL)
        raise session.guard.deny(denied, caller, guard="beads")


def _read(session: SessionContext, command_line: ReadCommand, caller: Caller) -> Any:
    _check_role(session, caller)
    with service_of(session).beads.locked_client() as client:
        output = client.read(command_line.arguments)
    if output.status is None:
        return _answer(_FAILED, output.stdout, output.stderr + "bd: ended at its time limit\n")
    return _answer(output.status if output.status >= 0 else 128 - output.status, output.stdout, output.stderr)


def _write(session: SessionContext, command_line: WriteCommand) -> Any:
    service = service_of(session)
    completed: list[tuple[Step, BeadsIssue]] = []
    denied: list[dict[str, Any]] = []
    errors: list[str] = []
    for step in command_line.steps:
        try:
            completed.append((step, service.act(step, f"bd {command_line.command}")))
        except Refused as refused:
            denied.append(as_document(refused.decision, refused.decision.path, refused.decision.operation))
        except BonobofsError as error:
            errors.append(f"bd: {error}\n")
    status = Refused.exit_code if denied else _FAILED if errors else 0
    return {**_answer(status, _output(command_line, completed), "".join(errors)), "denied": denied}


def _answer(status: int, stdout: str, stderr: str) -> dict[str, Any]:
    return {"status": status, "stdout": stdout, "stderr": stderr, "denied": []}


def _output(command_line: WriteCommand, completed: Sequence[tuple[Step, BeadsIssue]]) -> str:
    """Return the output that bd prints for the operations that succeeded."""
    if not completed:
        return ""
    if command_line.silent and not command_line.json:
        return "".join(f"{issue.id}\n" for _, issue in completed)
    results = [_result(command_line.command, step, issue) for step, issue in completed]
    if not command_line.json:
        return "".join(f"✓ {line}\n" for _, line in results)
    documents = [document for document, _ in results]
    is_single = command_line.command in ("create", "dep", "dep add", "dep remove", "comment", "comments add")
    return json.dumps(documents[0] if is_single else documents, indent=2) + "\n"


def _result(command: str, step: Step, issue: BeadsIssue) -> tuple[Mapping[str, Any], str]:
    """Return the JSON and the line that bd prints for an operation."""
    other, kind = step.arguments.get("other"), step.arguments.get("type")
    edge = {"issue_id": step.issue, "depends_on_id": other}
    if step.name == "tie":
        line = f"Added dependency: {step.issue} depends on {other} ({kind})"
        return {"status": "added", **edge, "type": kind}, line
    if step.name == "untie":
        return {"status": "removed", **edge}, f"Removed dependency: {step.issue} no longer depends on {other}"
    if step.name == "label":
        key, status, word = ("add", "added", "to") if command.endswith("add") else ("remove", "removed", "from")
        label = step.arguments[key][0]
        line = f"{status.capitalize()} label {label} {word} {issue.id}"
        return {"issue_id": step.issue, "label": label, "status": status}, line
    if step.name == "comment":
        return {"issue_id": step.issue, "text": step.arguments["text"]}, f"Comment added to {issue.id}"
    word = {"create": "Created issue:", "update": "Updated issue:", "close": "Closed", "reopen": "Reopened"}[step.name]
    return issue_document(issue), f"{word} {issue.id}: {issue.title}"


def _operation(name: str, **kinds: Any) -> Callable[[SessionContext, dict[str, Any]], Any]:
    """Make the call for one operation. The call returns the issue as `bd show --json` does."""

    def call(session: SessionContext, arguments: dict[str, Any]) -> Any:
        checked = check_arguments(arguments, kinds)
        step = Step(name, checked.pop("issue", ""), checked)
        return issue_document(service_of(session).act(step, f"beads.{name}"))

    return call


def _list(session: SessionContext, filters: dict[str, Any]) -> Any:
    """Return the issues that match, without their texts, the most urgent first."""
    checked = check_arguments(filters, {"status": str | None, "assignee": str | None, "label": str | None})
    status = CLOSED if checked.get("status") == "done" else checked.get("status")
    found = []
    for issue in _snapshot(session).values():
        fits = (status or issue.status) == issue.status, checked.get("assignee", issue.assignee) == issue.assignee
        if all(fits) and ("label" not in checked or checked["label"] in issue.labels):
            document = issue_document(issue)
            found.append({name: document[name] for name in _IN_LIST if name in document})
    return sorted(found, key=lambda each: (each["priority"], each["id"]))[:_MOST_LISTED]


def _show(session: SessionContext, arguments: dict[str, Any]) -> Any:
    """Return an issue with its comments and attachments."""
    issue_id = check_arguments(arguments, {"issue": str})["issue"]
    _check_role(session, Caller("beads.show", {"issue": issue_id[:_MOST_SHOWN]}))
    with service_of(session).beads.locked_client() as client:
        issue = client.issue(issue_id)
        comments = [comment._asdict() for comment in client.comments(issue_id)] if issue.comment_count else []
    return {**issue_document(issue), "comments": comments, "attachments": attachments_of(issue)}


def _snapshot(session: SessionContext) -> Mapping[str, BeadsIssue]:
    _check_role(session, Caller("beads.list"))
    with service_of(session).beads.locked_client() as client:
        return client.all_issues()


def _attach(session: SessionContext, arguments: dict[str, Any]) -> Any:
    """Store path and hash of a file of the workspace in an issue."""
    checked = check_arguments(arguments, {"issue": str, "path": str})
    digest = session.tools.guarded_hash_file(checked["path"])
    service = service_of(session)
    call = service.attach(checked["issue"], digest.path, digest.sha256)
    return _attached(service.run(call, session.guard.agent.id, "beads.attach"))


def _detach(session: SessionContext, arguments: dict[str, Any]) -> Any:
    checked = check_arguments(arguments, {"issue": str, "path": str})
    service = service_of(session)
    call = service.detach(checked["issue"], checked["path"])
    return _attached(service.run(call, session.guard.agent.id, "beads.detach"))


def _attached(issue: BeadsIssue) -> dict[str, Any]:
    return {"issue": issue.id, "attachments": attachments_of(issue)}


BEADS_CALLS: Final[dict[str, Callable[[SessionContext, dict[str, Any]], Any]]] = {
    "bd": lambda session, arguments: bd(session, **check_arguments(arguments, kinds_of(bd))),
    "create": _operation("create", title=Content, **{OTHERS: Any}),
    "update": _operation("update", issue=str, **{OTHERS: Any}),
    "close": _operation("close", issue=str, reason=Content | None),
    "reopen": _operation("reopen", issue=str, reason=Content | None),
    "tie": _operation("tie", issue=str, other=str, type=str),
    "untie": _operation("untie", issue=str, other=str),
    "label": _operation("label", issue=str, add=list[str] | None, remove=list[str] | None),
    "comment": _operation("comment", issue=str, text=Content),
    "list": _list,
    "show": _show,
    "attach": _attach,
    "detach": _detach,
}
