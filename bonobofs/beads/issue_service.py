"""The operations on issues, for `BeadsGuard`, the guard socket, and the session's `bd`.

    service.run(service.close("gt-17", "merged"), agent, "guarded_close")

The service checks the agent and the role before it runs bd. Then it holds the lock of the issues until the end of the
call. It holds the session's change lock for the change only, so that changes of files do not wait for the lock of the
issues. The trail gets one intent and one outcome, or one denial, or one error for each call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.audit.entry import TOUCHES
from bonobofs.beads import dependency_rules, issue_rules, refusals
from bonobofs.beads.bd_client import BdClient, IssueStore, Stored, find_beads
from bonobofs.beads.bd_command_line import Step
from bonobofs.beads.dependency_rules import NEW
from bonobofs.beads.issue import (
    ATTACHED,
    CREATOR_ID,
    WORKTREE,
    Actor,
    BeadsIssue,
    Edge,
    Issues,
    NewIssue,
    assignment,
    attachments_of,
    require_open_to,
)
from bonobofs.beads.issue_rules import EPIC, IssueChanges, IssueRequest, parse_priority, require_text
from bonobofs.beads.refusals import Fault
from bonobofs.enforcement.authorizer import Admission, Caller, RelatedChange
from bonobofs.errors import BeadsError, BonobofsError
from bonobofs.files.results import (
    NOWHERE,
    GuardedSession,
    bounded,
    is_session_agent,
    record_failure,
    with_claimed_agent,
    wrong_agent,
)
from bonobofs.policy.decision import Decision, Denied, Permit, Refused
from bonobofs.policy.request import NO_FACTS, Operation, Request
from bonobofs.policy.role_lists import Conventions, conventions
from bonobofs.state import agent_registry
from bonobofs.state.database import Database

GUARD: Final = "beads"
_DETAILS: Final = {TOUCHES: [".beads/"]}
_LONGEST_ABOUT: Final = 200
"""Characters of the details of a denial."""


class IssueChange:
    """A change in progress: the client of bd, and the permit."""

    def __init__(self, client: BdClient, permit: Permit, admission: Admission) -> None:
        self.client: Final = client
        self.permit: Final = permit
        self._admission: Final = admission

    def record(self, **details: Any) -> None:
        """Add details to the outcome."""
        self._admission.details = {**(self._admission.details or {}), **details}


class IssueCall(NamedTuple):
    """One operation: its arguments for the trail, the rule that judges it, and the change."""

    operation: Operation
    arguments: Mapping[str, Any]
    judge: Callable[[Issues], Any]
    """Returns the argument for `store`, or None if the issue stays as it is. Raises Fault."""
    store: Callable[[IssueChange, Any], BeadsIssue]
    also: tuple[Operation, ...] = ()
    """Further operations that the role must permit."""
    check: Callable[[], None] = lambda: None
    """Applies the rules that need no issues; raises Fault."""


class IssueService:
    """The operations of one session's agent on the issues of its workspace. May be used by several threads.

    A method named after an operation returns its call for `run` or `validate`, and raises UsageError for a value of the
    wrong type.
    """

    def __init__(self, session: GuardedSession, beads: IssueStore | None = None) -> None:
        """`beads` is bd for the workspace, by default the installed one. BeadsError: the workspace has no `.beads`."""
        agent = session.guard.agent
        self._session: Final = session
        self._actor: Final = Actor(agent.label, agent.id)
        self.beads: Final = beads or IssueStore(
            find_beads(Path(session.access_path), session.home), session.home, agent
        )

    # -- the operations

    def create(self, title: str, issue_type: str, priority: int | str | None, fields: Mapping[str, Any]) -> IssueCall:
        """Create a whole issue, or none."""
        request = IssueRequest.parse(title, issue_type, priority, fields)
        also = (
            *((Operation.CREATE_EPIC,) if request.issue_type == EPIC else ()),
            *((Operation.ADD_DEPENDENCY,) if request.dependencies else ()),
        )
        return IssueCall(
            Operation.CREATE_ISSUE,
            {"title": request.title, "type": request.issue_type, "priority": request.priority, **fields},
            lambda issues: issue_rules.judge_create(issues, request, self._actor),
            partial(self._store_new, request),
            also,
            lambda: issue_rules.judge_request(request, self._conventions),
        )

    def update(self, issue_id: str, changes: Mapping[str, Any]) -> IssueCall:
        """Change fields, labels and status."""
        # The role must permit closing also if an update closes the issue.
        also = (Operation.CLOSE_ISSUE,) if changes.get("status") in ("done", "closed") else ()
        call = self._changes(Operation.UPDATE_ISSUE, issue_id, changes)
        return call._replace(arguments={"issue": issue_id, "changes": changes}, also=also)

    def label(self, issue_id: str, add: object = None, remove: object = None) -> IssueCall:
        """Add labels to an issue, and remove labels from it."""
        return self._changes(Operation.LABEL_ISSUE, issue_id, {"add_labels": add, "remove_labels": remove})

    def close(self, issue_id: str, reason: str | None = None) -> IssueCall:
        """Close an issue. Refused while a blocker or a child is open."""
        text = require_text("reason", reason or "")
        return _call(
            Operation.CLOSE_ISSUE,
            {"issue": issue_id, "reason": reason},
            lambda issues: issue_rules.judge_close(issues, issue_id, text, self._actor),
            lambda change: change.client.close_issue(issue_id, change.permit, reason=text),
        )

    def reopen(self, issue_id: str, reason: str | None = None) -> IssueCall:
        """Reopen a closed issue."""
        text = require_text("reason", reason or "")
        return _call(
            Operation.REOPEN_ISSUE,
            {"issue": issue_id, "reason": reason},
            lambda issues: issue_rules.judge_reopen(issues, issue_id, text, self._actor),
            lambda change: change.client.reopen_issue(issue_id, change.permit, reason=text),
        )

    def tie(self, blocked: str, blocker: str, kind: str) -> IssueCall:
        """Make one issue depend on another; the result is the blocked issue."""
        return IssueCall(
            Operation.ADD_DEPENDENCY,
            {"issue": blocked, "depends_on": blocker, "type": kind},
            lambda issues: dependency_rules.judge_dependency(issues, blocked, blocker, kind, self._actor),
            partial(_store_edge, Operation.ADD_DEPENDENCY),
        )

    def untie(self, blocked: str, blocker: str) -> IssueCall:
        """Remove the dependency of one issue on another, whatever its kind; the result is the blocked issue."""
        return _call(
            Operation.REMOVE_DEPENDENCY,
            {"issue": blocked, "depends_on": blocker},
            lambda issues: dependency_rules.judge_removal(issues, blocked, blocker, self._actor),
            lambda change: change.client.remove_dependency(blocked, blocker, change.permit),
        )

    def comment(self, issue_id: str, text: str) -> IssueCall:
        """Add a comment to an issue of any assignee."""
        comment = require_text("comment", text)
        return _call(
            Operation.COMMENT_ISSUE,
            {"issue": issue_id, "comment": comment},
            lambda issues: issue_rules.judge_comment(issues, issue_id, comment),
            lambda change: change.client.add_comment(issue_id, comment, change.permit),
        )

    def attach(self, issue_id: str, path: str, sha256: str) -> IssueCall:
        """Store path and hash of a file in the metadata of an issue of the agent. The same path replaces the hash."""
        return self._attachments(issue_id, path, lambda attached: {**attached, path: sha256})

    def detach(self, issue_id: str, path: str) -> IssueCall:
        """Remove a path from the metadata of an issue of the agent."""
        return self._attachments(
            issue_id, path, lambda attached: {name: attached[name] for name in attached.keys() - {path}}
        )

    def _attachments(self, issue_id: str, path: str, edit: Callable[[dict[str, str]], dict[str, str]]) -> IssueCall:
        def judge(issues: Issues) -> dict[str, str] | None:
            before = attachments_of(require_open_to(issues, issue_id, self._actor))
            after = edit(before)
            if len(after) > refusals.MOST:
                raise Fault(refusals.ATTACHMENTS)
            return None if after == before else after

        def store(change: IssueChange, attached: dict[str, str]) -> BeadsIssue:
            return change.client.update_issue(issue_id, change.permit, metadata={ATTACHED: attached}).issue

        return IssueCall(Operation.UPDATE_ISSUE, {"issue": issue_id, "attachment": path}, judge, store)

    def begin(self, issue_id: str, worktree: str) -> IssueCall:
        """Store the UUID of the worktree that is about to be made for an issue. Refused while a blocker is open."""
        return _call(
            Operation.UPDATE_ISSUE,
            {"issue": issue_id, "worktree": worktree},
            lambda issues: dependency_rules.judge_begin(issues, issue_id),
            lambda change: change.client.update_issue(issue_id, change.permit, metadata={WORKTREE: worktree}),
        )

    # -- running them

    def act(self, step: Step, tool: str) -> BeadsIssue:
        """Run an operation as the session's agent, and return the issue. Raises as `run` does."""
        arguments = dict(step.arguments)
        if step.name == "create":
            title, kind = arguments.pop("title"), arguments.pop("type", "task")
            call = self.create(title, kind, arguments.pop("priority", None), arguments)
        elif step.name == "update":
            if arguments.pop("claim", False):
                arguments |= {"assignee": self._actor.label, "status": "in_progress"}
            call = self.update(step.issue, arguments)
        elif step.name == "tie":
            call = self.tie(step.issue, arguments["other"], arguments["type"])
        elif step.name == "untie":
            call = self.untie(step.issue, arguments["other"])
        else:
            operation: Callable[..., IssueCall] = getattr(self, step.name)
            call = operation(step.issue, **arguments)
        return self.run(call, self._actor.id, tool)

    def run(self, call: IssueCall, agent: str, tool: str) -> BeadsIssue:
        """Judge and make a change, and return the issue after it. `tool` is the caller's name in the trail.

        Raises Refused for a recorded denial, also of another agent than the session's. Other errors are recorded too.
        """
        with self._judged(call, agent, tool) as (client, caller, judgement), self._session.change_lock:
            admission = self._session.guard.authorize(
                _request(call.operation),
                NO_FACTS,
                *(RelatedChange(_request(operation)) for operation in call.also),
                caller=caller,
                details=_DETAILS,
                guard=GUARD,
            )
            with admission as permit:
                change = IssueChange(client, permit, admission)
                try:
                    if judgement is None:
                        change.record(changed=False)
                        return client.issue(call.arguments["issue"])
                    return call.store(change, judgement)
                except BonobofsError as error:
                    change.record(**_error_details(error))
                    raise

    def validate(self, call: IssueCall, agent: str, tool: str) -> Decision:
        """Return and record whether the agent may make a change. Nothing is changed."""
        request = _request(call.operation)
        try:
            with self._judged(call, agent, tool) as (_, caller, _), self._session.change_lock:
                self._session.guard.record_call(request, caller=caller, guard=GUARD)
                return self._session.guard.decide(request)
        except Refused as refused:
            return refused.decision

    @contextmanager
    def _judged(self, call: IssueCall, agent: str, tool: str) -> Iterator[tuple[BdClient, Caller, Any]]:
        """Check agent and role, hold the lock of the issues, and give the client and the judgement of the rule.

        Raises Refused for a recorded denial. Other errors before the change are recorded with result `error`.
        """
        caller = Caller(tool, bounded(call.arguments))
        if not is_session_agent(agent, self._session.guard.agent):
            raise self._deny(wrong_agent(NOWHERE, call.operation), with_claimed_agent(caller, agent))
        for operation in (call.operation, *call.also):
            decision = self._session.guard.decide(_request(operation))
            if isinstance(decision, Denied):
                raise self._deny(decision, caller)
        try:
            call.check()
            with self.beads.locked_client() as client:
                yield client, caller, call.judge(client.all_issues())
        except Fault as fault:
            raise self._deny(_denied(fault, call.operation), caller) from None
        except Exception as error:
            details = _error_details(error)
            record_failure(self._session, _request(call.operation), error, caller, guard=GUARD, details=details)
            raise

    def _deny(self, denied: Denied, caller: Caller) -> Refused:
        with self._session.change_lock:
            return self._session.guard.deny(denied, caller, guard=GUARD)

    @property
    def _conventions(self) -> Conventions:
        """The conventions for issues in the policy in force."""
        return conventions(self._session.guard.policy.document)

    # -- the changes

    def _changes(self, operation: Operation, issue_id: str, changes: Mapping[str, Any]) -> IssueCall:
        return IssueCall(
            operation,
            {"issue": issue_id, **changes},
            lambda issues: issue_rules.judge_update(issues, issue_id, changes, self._actor, self._conventions),
            partial(self._store_changes, issue_id),
        )

    def _store_new(self, request: IssueRequest, change: IssueChange, edges: tuple[Edge, ...]) -> BeadsIssue:
        metadata = {CREATOR_ID: self._actor.id}
        if request.assignee:
            metadata |= assignment(request.assignee, self._identity_of(request.assignee))
        created = change.client.create_issue(
            NewIssue(
                request.title,
                request.issue_type,
                parse_priority(request.priority),
                assignee=request.assignee,
                labels=request.labels,
                parent=request.parent,
                metadata=metadata,
                **dict(request.texts),
            ),
            change.permit,
        )
        issue = created.issue
        change.record(issue=issue.id)
        try:
            for edge in edges:
                blocked, blocker = (issue.id if end == NEW else end for end in edge[:2])
                after = _store_edge(Operation.CREATE_ISSUE, change, Edge(blocked, blocker, edge.kind))
                issue = after if after.id == issue.id else issue
        except Exception:
            change.client.undo_create(created, change.permit)
            change.record(undone=True)
            raise
        return issue

    def _store_changes(self, issue_id: str, change: IssueChange, changes: IssueChanges) -> BeadsIssue:
        fields: dict[str, Any] = {**changes.fields}
        if "assignee" in fields:
            fields["metadata"] = assignment(fields["assignee"], self._identity_of(fields["assignee"]))
        issue = change.client.issue(issue_id)
        if fields or changes.add_labels or changes.remove_labels:
            fields |= {"add_labels": changes.add_labels, "remove_labels": changes.remove_labels}
            issue = change.client.update_issue(issue_id, change.permit, **fields).issue
        return change.client.close_issue(issue_id, change.permit).issue if changes.closes else issue

    def _identity_of(self, label: str) -> str | None:
        """Return the UUID of the agent with this label; None if no agent has it."""
        if not label or label == self._actor.label:
            return self._actor.id if label else None
        with Database.open(self._session.home) as database:
            return agent_registry.identity_of(database, label)


def _call(
    operation: Operation,
    arguments: Mapping[str, Any],
    judge: Callable[[Issues], Any],
    store: Callable[[IssueChange], Stored],
) -> IssueCall:
    """Make a call whose change does not depend on the judgement."""
    return IssueCall(operation, arguments, judge, lambda change, _: store(change).issue)


def _request(operation: Operation) -> Request:
    return Request(operation, NOWHERE)


def _denied(fault: Fault, operation: Operation) -> Denied:
    about = fault.about if len(fault.about) <= _LONGEST_ABOUT else f"{fault.about[:_LONGEST_ABOUT]}…"
    return Denied(*fault.refusal, NOWHERE, operation, about=about)


def _store_edge(operation: Operation, change: IssueChange, edge: Edge) -> BeadsIssue:
    """Add an edge, and remove it again if a concurrent change outside the gate made it invalid."""
    stored = change.client.add_dependency(edge.issue, edge.on, edge.kind, change.permit)
    try:
        dependency_rules.judge_concurrent(stored.after, edge)
    except Fault as fault:
        change.client.remove_dependency(edge.issue, edge.on, change.permit)
        change.record(undone=True, rule=fault.refusal.rule, about=fault.about)
        raise Refused(_denied(fault, operation)) from None
    return stored.issue


def _error_details(error: Exception) -> dict[str, Any]:
    if not isinstance(error, BeadsError):
        return {"error": type(error).__name__}
    parts = {"done": [*error.stored], "missing": [*error.missing]} if error.stored or error.missing else {}
    return {"error": str(error), "carried_out": error.carried_out, **parts}
