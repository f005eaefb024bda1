"""The operations on issues, for `BeadsGuard` and for the session's `bd`: each is judged, made and recorded as one call.

Each returns the issue after the change; an operation on a dependency returns the blocked issue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from bonobofs.beads.bd_client import BdClient, Beads, Stored
from bonobofs.beads.dependency_rules import NEW, judge_begin, judge_dependency, judge_removal, what_came_in_between
from bonobofs.beads.issue import CREATOR_ID, WORKTREE, BeadsIssue, Edge, NewIssue, assigned
from bonobofs.beads.issue_call import InFlight, IssueCall, IssueGate, LockedCall, denied, shown
from bonobofs.beads.issue_rules import (
    EPIC,
    Draft,
    Edit,
    draft,
    judge_close,
    judge_comment,
    judge_create,
    judge_draft,
    judge_reopen,
    judge_update,
    parse_priority,
    require_text,
)
from bonobofs.beads.refusals import Fault
from bonobofs.files.results import GuardedSession
from bonobofs.policy.decision import Decision, Refused
from bonobofs.policy.request import Operation
from bonobofs.state import agent_registry
from bonobofs.state.database import Database

Fields = Mapping[str, Any]


class IssueService:
    """The operations of one session's agent on the issues of one workspace. May be used by several threads.

    `agent` must be the session's agent in every call; `tool` is the caller's name in the trail. All methods raise
    Refused for a recorded denial, UsageError for a value of the wrong type, BeadsError if bd fails.
    """

    def __init__(self, session: GuardedSession, beads: Beads) -> None:
        self._gate: Final = IssueGate(session, beads)
        self._home: Final = session.home

    def validate_create(self, title: str, issue_type: str, fields: Fields, agent: str, tool: str) -> Decision:
        """Return and record whether the agent may create this issue. Nothing is changed."""
        wanted = draft(title, issue_type, None, fields)
        return self._validated(
            _of_create(tool, wanted, fields),
            agent,
            lambda call: judge_create(call.issues, wanted, self._gate.who),
            judge_draft(wanted, self._gate.known),
        )

    def validate_update(self, issue_id: str, changes: Fields, agent: str, tool: str) -> Decision:
        """Return and record whether the agent may make these changes."""
        return self._validated(
            _of_update(tool, issue_id, changes),
            agent,
            lambda call: judge_update(call.issues, issue_id, changes, self._gate.who, self._gate.known),
        )

    def validate_dependency(self, blocked: str, blocker: str, word: str, agent: str, tool: str) -> Decision:
        """Return and record whether the agent may add this dependency."""
        return self._validated(
            _of_edge(Operation.ADD_DEPENDENCY, tool, blocked, blocker, word),
            agent,
            lambda call: judge_dependency(call.issues, blocked, blocker, word, self._gate.who),
        )

    def create(
        self, title: str, issue_type: str, priority: int | str | None, fields: Fields, agent: str, tool: str
    ) -> BeadsIssue:
        """Create a whole issue, or none."""
        wanted = draft(title, issue_type, priority, fields)
        fault = judge_draft(wanted, self._gate.known)
        with self._gate.call(_of_create(tool, wanted, fields), agent, fault) as call:
            edges = call.judged(judge_create(call.issues, wanted, self._gate.who))
            with call.session_turn, call.changing() as change:
                return self._create(call.turn, change, wanted, edges)

    def update(self, issue_id: str, changes: Fields, agent: str, tool: str) -> BeadsIssue:
        """Change fields, labels and status."""
        return self._edited(_of_update(tool, issue_id, changes), issue_id, changes, agent)

    def label(self, issue_id: str, add: object, remove: object, agent: str, tool: str) -> BeadsIssue:
        """Add labels to an issue, and remove labels from it."""
        changes = {"add_labels": add, "remove_labels": remove}
        asked = IssueCall(Operation.LABEL_ISSUE, tool, shown({"issue": issue_id, **changes}))
        return self._edited(asked, issue_id, changes, agent)

    def close(self, issue_id: str, reason: str | None, agent: str, tool: str) -> BeadsIssue:
        """Close an issue. Refused while a blocker or a child is open."""
        why = require_text("reason", reason or "")
        asked = IssueCall(Operation.CLOSE_ISSUE, tool, shown({"issue": issue_id, "reason": reason}))
        return self._changed(
            asked,
            issue_id,
            agent,
            lambda call: judge_close(call.issues, issue_id, why, self._gate.who),
            lambda call, change: call.turn.close_issue(issue_id, change.permit, reason=why),
        )

    def reopen(self, issue_id: str, reason: str | None, agent: str, tool: str) -> BeadsIssue:
        """Reopen a closed issue."""
        why = require_text("reason", reason or "")
        asked = IssueCall(Operation.REOPEN_ISSUE, tool, shown({"issue": issue_id, "reason": reason}))
        return self._changed(
            asked,
            issue_id,
            agent,
            lambda call: judge_reopen(call.issues, issue_id, why, self._gate.who),
            lambda call, change: call.turn.reopen_issue(issue_id, change.permit, reason=why),
        )

    def tie(self, blocked: str, blocker: str, word: str, agent: str, tool: str) -> BeadsIssue:
        """Make one issue depend on another."""
        asked = _of_edge(Operation.ADD_DEPENDENCY, tool, blocked, blocker, word)
        with self._gate.call(asked, agent) as call:
            edge = call.judged(judge_dependency(call.issues, blocked, blocker, word, self._gate.who))
            with call.session_turn, call.changing() as change:
                if edge is None:
                    return _as_it_was(call, change, blocked)
                return _tie(call.turn, change, edge, asked.operation)

    def untie(self, blocked: str, blocker: str, agent: str, tool: str) -> BeadsIssue:
        """Remove the dependency of one issue on another, whatever its kind."""
        return self._changed(
            _of_edge(Operation.REMOVE_DEPENDENCY, tool, blocked, blocker),
            blocked,
            agent,
            lambda call: judge_removal(call.issues, blocked, blocker, self._gate.who),
            lambda call, change: call.turn.remove_dependency(blocked, blocker, change.permit),
        )

    def comment(self, issue_id: str, comment: str, agent: str, tool: str) -> BeadsIssue:
        """Add a comment to an issue of any assignee."""
        said = require_text("comment", comment)
        return self._changed(
            IssueCall(Operation.COMMENT_ISSUE, tool, shown({"issue": issue_id, "comment": said})),
            issue_id,
            agent,
            lambda call: judge_comment(call.issues, issue_id, said),
            lambda call, change: call.turn.add_comment(issue_id, said, change.permit),
        )

    def begin(self, issue_id: str, worktree: str, agent: str, tool: str) -> BeadsIssue:
        """Store the UUID of the worktree that is about to be made for an issue. Refused while a blocker is open."""
        return self._changed(
            IssueCall(Operation.UPDATE_ISSUE, tool, shown({"issue": issue_id, "worktree": worktree})),
            issue_id,
            agent,
            lambda call: judge_begin(call.issues, issue_id),
            lambda call, change: call.turn.update_issue(issue_id, change.permit, metadata={WORKTREE: worktree}),
        )

    def _validated(
        self, asked: IssueCall, agent: str, judge: Callable[[LockedCall], object], fault: Fault | None = None
    ) -> Decision:
        try:
            with self._gate.call(asked, agent, fault) as call:
                call.judged(judge(call))
                return call.answer()
        except Refused as refused:
            return refused.decision

    def _changed(
        self,
        asked: IssueCall,
        issue_id: str,
        agent: str,
        judge: Callable[[LockedCall], Fault | BeadsIssue | Edge | None],
        make: Callable[[LockedCall, InFlight], Stored],
    ) -> BeadsIssue:
        """Judge and make one change of one issue. If the verdict is None, record that nothing changes."""
        with self._gate.call(asked, agent) as call:
            verdict = call.judged(judge(call))
            with call.session_turn, call.changing() as change:
                if verdict is None:
                    return _as_it_was(call, change, issue_id)
                return make(call, change).issue

    def _edited(self, asked: IssueCall, issue_id: str, changes: Fields, agent: str) -> BeadsIssue:
        with self._gate.call(asked, agent) as call:
            edit = call.judged(judge_update(call.issues, issue_id, changes, self._gate.who, self._gate.known))
            with call.session_turn, call.changing() as change:
                if edit is None:
                    return _as_it_was(call, change, issue_id)
                return self._edit(call.turn, change, call.issues[issue_id], edit)

    def _create(self, turn: BdClient, change: InFlight, wanted: Draft, edges: tuple[Edge, ...]) -> BeadsIssue:
        metadata = {CREATOR_ID: self._gate.who.id}
        if wanted.assignee:
            metadata |= assigned(wanted.assignee, self._identity_of(wanted.assignee))
        number = parse_priority(wanted.priority)
        assert isinstance(number, int)
        made = turn.create_issue(
            NewIssue(
                wanted.title,
                wanted.issue_type,
                number,
                assignee=wanted.assignee,
                labels=wanted.labels,
                parent=wanted.parent,
                metadata=metadata,
                **dict(wanted.texts),
            ),
            change.permit,
        )
        issue = made.issue
        change.note(issue=issue.id)
        try:
            for edge in edges:
                blocked, blocker = (issue.id if end == NEW else end for end in edge[:2])
                now = _tie(turn, change, Edge(blocked, blocker, edge.kind), Operation.CREATE_ISSUE)
                issue = now if now.id == issue.id else issue
        except Exception:
            turn.undo_create(made, change.permit)
            change.note(undone=True)
            raise
        return issue

    def _edit(self, turn: BdClient, change: InFlight, issue: BeadsIssue, edit: Edit) -> BeadsIssue:
        fields: dict[str, Any] = {**edit.fields}
        if "assignee" in fields:
            fields["metadata"] = assigned(fields["assignee"], self._identity_of(fields["assignee"]))
        if fields or edit.add_labels or edit.remove_labels:
            fields |= {"add_labels": edit.add_labels, "remove_labels": edit.remove_labels}
            issue = turn.update_issue(issue.id, change.permit, **fields).issue
        return turn.close_issue(issue.id, change.permit).issue if edit.closes else issue

    def _identity_of(self, label: str) -> str | None:
        """Return the UUID of the agent with this label; None if no agent has it."""
        if not label or label == self._gate.who.label:
            return self._gate.who.id if label else None
        with Database.open(self._home) as database:
            return agent_registry.identity_of(database, label)


def _as_it_was(call: LockedCall, change: InFlight, issue_id: str) -> BeadsIssue:
    """Record that the request changes nothing, and return the issue."""
    change.note(changed=False)
    return call.issues[issue_id]


def _tie(turn: BdClient, change: InFlight, edge: Edge, operation: Operation) -> BeadsIssue:
    """Add an edge, and remove it again if a concurrent change outside the gate made it invalid."""
    changed = turn.add_dependency(edge.issue, edge.on, edge.kind, change.permit)
    fault = what_came_in_between(changed.after, edge)
    if fault is not None:
        turn.remove_dependency(edge.issue, edge.on, change.permit)
        change.note(undone=True, rule=fault.refusal.rule, about=fault.about)
        raise Refused(denied(fault, operation))
    return changed.issue


def _of_create(tool: str, wanted: Draft, fields: Mapping[str, Any]) -> IssueCall:
    also = (
        *((Operation.CREATE_EPIC,) if wanted.issue_type == EPIC else ()),
        *((Operation.ADD_DEPENDENCY,) if wanted.dependencies else ()),
    )
    details = {"title": wanted.title, "type": wanted.issue_type, "priority": wanted.priority, **fields}
    return IssueCall(Operation.CREATE_ISSUE, tool, shown(details), also)


def _of_update(tool: str, issue_id: str, changes: Mapping[str, Any]) -> IssueCall:
    # The role must permit closing also if an update closes the issue.
    closes = changes.get("status") in ("done", "closed")
    also = (Operation.CLOSE_ISSUE,) if closes else ()
    return IssueCall(Operation.UPDATE_ISSUE, tool, {**shown({"issue": issue_id}), "changes": shown(changes)}, also)


def _of_edge(operation: Operation, tool: str, blocked: str, blocker: str, kind: str | None = None) -> IssueCall:
    return IssueCall(operation, tool, shown({"issue": blocked, "depends_on": blocker, "type": kind}))
