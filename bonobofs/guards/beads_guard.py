r"""Creating and changing issues for Python callers, under the rules of the policy and the identity of the session.

    with open_session("project", agent="alice") as session:
        issues = BeadsGuard(session)
        plan = issues.guarded_create("Write the plan", "task", 1, "alice", labels=["phase:design"])
        issues.guarded_update(plan.id, "alice", assignee="alice", status="in_progress")

The issues are bd's, in the `.beads` of the workspace. Where its words and these differ the gate maps them, after it has
judged them: `done` is stored as closed, `parent` as parent-child, and a message so that it lasts and is listed.

How a denial is told: `validate_…` give a `ValidationResult` that is false, `guarded_…` raise `Refused`, a
PermissionError. Every call is one entry in the record, with the issue's id. A BeadsError says what bd did not do, and
whether anything of it is stored; it is entered with result `error`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from bonobofs.decision import Refused
from bonobofs.guards.answers import GuardedSession, ValidationResult, told
from bonobofs.guards.beads import Beads, BeadsIssue, NewIssue, Turn, find_beads, form
from bonobofs.guards.beads.editing import Edit, judge_close, judge_reopen, judge_update
from bonobofs.guards.beads.gate import Asked, Call, Change, Gate, denied, shown
from bonobofs.guards.beads.issue import Edge
from bonobofs.guards.beads.keeping import CREATOR_ID, WORKTREE, assigned
from bonobofs.guards.beads.making import EPIC, Draft, draft, judge_comment, judge_create
from bonobofs.guards.beads.tying import NEW, judge_begin, judge_dependency, judge_removal, what_came_in_between
from bonobofs.request import Operation
from bonobofs.state import registry
from bonobofs.state.database import Database
from bonobofs.state.home import home


class BeadsGuard:
    """The guarded issues of one workspace, for the agent of one session. May be used by several threads.

    `agent` is the session's agent in every call, by label or UUID; another one is refused, with an alert. Ids are given
    in full. UsageError: a value is of the wrong kind.
    """

    def __init__(self, session: GuardedSession, beads: Beads | None = None) -> None:
        """Stand on an open session; `beads` is bd for its workspace, by default the one that is installed.

        BeadsError: the workspace has no issues.
        """
        self._gate: Final = Gate(
            session,
            beads
            if beads is not None
            else Beads(find_beads(Path(session.session.source)), home(), session.guard.agent),
        )

    def validate_create(
        self,
        title: str,
        issue_type: str,
        labels: list[str],
        agent: str,
        assignee: str | None = None,
        parent: str | None = None,
    ) -> ValidationResult:
        """Whether the agent may create such an issue."""
        fields = {"labels": labels, "assignee": assignee, "parent": parent}
        wanted = draft(title, issue_type, None, fields)
        return self._validated(
            _of_create("validate_create", wanted, fields),
            agent,
            lambda call: judge_create(call.issues, wanted, self._gate.who, self._gate.known),
        )

    def validate_update(self, issue_id: str, changes: Mapping[str, Any], agent: str) -> ValidationResult:
        """Whether the agent may change an issue so; the keys are those that `guarded_update` takes."""
        return self._validated(
            _of_update("validate_update", issue_id, changes),
            agent,
            lambda call: judge_update(call.issues, issue_id, changes, self._gate.who, self._gate.known),
        )

    def validate_dependency(self, blocked_id: str, blocker_id: str, dep_type: str, agent: str) -> ValidationResult:
        """Whether the agent may let one issue depend on another, as `guarded_dependency` does."""
        return self._validated(
            _of_edge(Operation.ADD_DEPENDENCY, "validate_dependency", blocked_id, blocker_id, dep_type),
            agent,
            lambda call: judge_dependency(call.issues, blocked_id, blocker_id, dep_type, self._gate.who),
        )

    def guarded_create(self, title: str, issue_type: str, priority: int | str, agent: str, **fields: Any) -> BeadsIssue:
        """Create an issue, all of it or nothing, and give it. `priority` is 0, the most urgent, to 4.

        `fields` may have labels, assignee, parent, description, design, acceptance, notes; and dependencies, a list of
        what `bd create --deps` takes: an id or TYPE:ID for what it depends on, blocks:ID for what depends on it.
        """
        wanted = draft(title, issue_type, priority, fields)
        with self._gate.call(_of_create("guarded_create", wanted, fields), agent) as call:
            edges = call.judged(judge_create(call.issues, wanted, self._gate.who, self._gate.known))
            with call.changing() as change:
                return self._create(call.turn, change, wanted, edges)

    def guarded_update(self, issue_id: str, agent: str, **changes: Any) -> None:
        """Change an issue: title, description, design, acceptance, notes, priority, assignee ("": nobody), status.

        A status is open, in_progress, done or closed. `labels` are all that it is to have, `add_labels` and
        `remove_labels` those that come and go. What is asked for and is so already changes nothing.
        """
        with self._gate.call(_of_update("guarded_update", issue_id, changes), agent) as call:
            edit = call.judged(judge_update(call.issues, issue_id, changes, self._gate.who, self._gate.known))
            with call.changing() as change:
                self._edit(call.turn, change, issue_id, edit)

    def guarded_label(
        self, issue_id: str, agent: str, *, add: list[str] | None = None, remove: list[str] | None = None
    ) -> None:
        """Give an issue labels, and take others away."""
        changes = {"add_labels": add, "remove_labels": remove}
        asked = Asked(Operation.LABEL_ISSUE, "guarded_label", {"issue": issue_id, **shown(changes)})
        with self._gate.call(asked, agent) as call:
            edit = call.judged(judge_update(call.issues, issue_id, changes, self._gate.who, self._gate.known))
            with call.changing() as change:
                self._edit(call.turn, change, issue_id, edit)

    def guarded_close(self, issue_id: str, agent: str, reason: str | None = None) -> None:
        """Close an issue that waits for none and has no child that is not closed."""
        why = form.text("reason", reason or "")
        asked = Asked(Operation.CLOSE_ISSUE, "guarded_close", {"issue": issue_id, **shown({"reason": reason})})
        with self._gate.call(asked, agent) as call:
            issue = call.judged(judge_close(call.issues, issue_id, why, self._gate.who))
            with call.changing() as change:
                if issue is None:
                    change.note(changed=False)
                else:
                    call.turn.close_issue(issue_id, change.leave, reason=why)

    def guarded_reopen(self, issue_id: str, agent: str, reason: str | None = None) -> None:
        """Open a closed issue again."""
        why = form.text("reason", reason or "")
        asked = Asked(Operation.REOPEN_ISSUE, "guarded_reopen", {"issue": issue_id, **shown({"reason": reason})})
        with self._gate.call(asked, agent) as call:
            issue = call.judged(judge_reopen(call.issues, issue_id, why, self._gate.who))
            with call.changing() as change:
                if issue is None:
                    change.note(changed=False)
                else:
                    call.turn.reopen_issue(issue_id, change.leave, reason=why)

    def guarded_dependency(self, blocked_id: str, blocker_id: str, dep_type: str, agent: str) -> None:
        """Let one issue depend on another; for `parent`, the blocked is the child.

        `dep_type` is blocks, conditional-blocks, waits-for, parent, related or discovered-from.
        """
        asked = _of_edge(Operation.ADD_DEPENDENCY, "guarded_dependency", blocked_id, blocker_id, dep_type)
        with self._gate.call(asked, agent) as call:
            edge = call.judged(judge_dependency(call.issues, blocked_id, blocker_id, dep_type, self._gate.who))
            with call.changing() as change:
                if edge is None:
                    change.note(changed=False)
                else:
                    _tie(call.turn, change, edge, Operation.ADD_DEPENDENCY)

    def guarded_remove_dependency(self, blocked_id: str, blocker_id: str, agent: str) -> None:
        """Let one issue no longer depend on another, in whichever way it did."""
        asked = _of_edge(Operation.REMOVE_DEPENDENCY, "guarded_remove_dependency", blocked_id, blocker_id)
        with self._gate.call(asked, agent) as call:
            edge = call.judged(judge_removal(call.issues, blocked_id, blocker_id, self._gate.who))
            with call.changing() as change:
                if edge is None:
                    change.note(changed=False)
                else:
                    call.turn.remove_dependency(blocked_id, blocker_id, change.leave)

    def guarded_comment(self, issue_id: str, comment: str, agent: str) -> None:
        """Say something of an issue, whosever it is."""
        said = form.text("comment", comment)
        asked = Asked(Operation.COMMENT_ISSUE, "guarded_comment", {"issue": issue_id, **shown({"comment": said})})
        with self._gate.call(asked, agent) as call:
            call.judged(judge_comment(call.issues, issue_id, said))
            with call.changing() as change:
                call.turn.add_comment(issue_id, said, change.leave)

    def begin_work(self, issue_id: str, agent: str, worktree: str) -> BeadsIssue:
        """Note that a worktree, by its UUID, is about to be made for an issue, and give the issue as it is.

        Refused where it waits for issues that have not ended, which the refusal names. From now on nothing new is put
        before it.
        """
        asked = Asked(Operation.UPDATE_ISSUE, "begin_work", {"issue": issue_id, "worktree": worktree})
        with self._gate.call(asked, agent) as call:
            call.judged(judge_begin(call.issues, issue_id))
            with call.changing() as change:
                return call.turn.update_issue(issue_id, change.leave, metadata={WORKTREE: worktree}).issue

    def _validated(self, asked: Asked, agent: str, judge: Callable[[Call], object]) -> ValidationResult:
        try:
            with self._gate.call(asked, agent) as call:
                call.judged(judge(call))
                return told(call.answer())
        except Refused as refused:
            return told(refused.decision)

    def _create(self, turn: Turn, change: Change, wanted: Draft, edges: tuple[Edge, ...]) -> BeadsIssue:
        metadata = {CREATOR_ID: self._gate.who.id}
        if wanted.assignee:
            metadata |= assigned(wanted.assignee, self._identity_of(wanted.assignee))
        number = form.priority(wanted.priority)
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
            change.leave,
        )
        issue = made.issue
        change.note(issue=issue.id)
        try:
            for edge in edges:
                blocked, blocker = (issue.id if end == NEW else end for end in edge[:2])
                now = _tie(turn, change, Edge(blocked, blocker, edge.kind), Operation.CREATE_ISSUE)
                issue = now if now.id == issue.id else issue
        except Exception:
            turn.undo_create(made, change.leave)
            change.note(undone=True)
            raise
        return issue

    def _edit(self, turn: Turn, change: Change, issue_id: str, edit: Edit | None) -> None:
        if edit is None:
            change.note(changed=False)
            return
        fields: dict[str, Any] = {**edit.fields}
        if "assignee" in fields:
            fields["metadata"] = assigned(fields["assignee"], self._identity_of(fields["assignee"]))
        if fields or edit.add_labels or edit.remove_labels:
            turn.update_issue(
                issue_id, change.leave, add_labels=edit.add_labels, remove_labels=edit.remove_labels, **fields
            )
        if edit.closes:
            turn.close_issue(issue_id, change.leave)

    def _identity_of(self, label: str) -> str | None:
        """The UUID of the agent of that label; None for a person."""
        if not label or label == self._gate.who.label:
            return self._gate.who.id if label else None
        with Database.open(home()) as database:
            return registry.identity_of(database, label)


def _tie(turn: Turn, change: Change, edge: Edge, operation: Operation) -> BeadsIssue:
    """Add an edge, and take it away again if, by what was done without the gate meanwhile, it must not be."""
    changed = turn.add_dependency(edge.issue, edge.on, edge.kind, change.leave)
    fault = what_came_in_between(changed.after, edge)
    if fault is not None:
        turn.remove_dependency(edge.issue, edge.on, change.leave)
        change.note(undone=True, rule=fault.refusal.rule, about=fault.about)
        raise Refused(denied(fault, operation))
    return changed.issue


def _of_create(tool: str, wanted: Draft, fields: Mapping[str, Any]) -> Asked:
    also = (
        *((Operation.CREATE_EPIC,) if wanted.issue_type == EPIC else ()),
        *((Operation.ADD_DEPENDENCY,) if wanted.dependencies else ()),
    )
    details = {"title": wanted.title, "type": wanted.issue_type, "priority": wanted.priority, **fields}
    return Asked(Operation.CREATE_ISSUE, tool, shown(details), also)


def _of_update(tool: str, issue_id: str, changes: Mapping[str, Any]) -> Asked:
    # By whatever route an issue is closed, the role must have closing.
    closes = changes.get("status") in ("done", "closed")
    also = (Operation.CLOSE_ISSUE,) if closes else ()
    return Asked(Operation.UPDATE_ISSUE, tool, {"issue": issue_id, "changes": shown({**changes})}, also)


def _of_edge(operation: Operation, tool: str, blocked: str, blocker: str, kind: str | None = None) -> Asked:
    return Asked(operation, tool, shown({"issue": blocked, "depends_on": blocker, "type": kind}))
