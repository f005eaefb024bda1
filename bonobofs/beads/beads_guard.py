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

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from bonobofs.beads import Beads, BeadsIssue, find_beads
from bonobofs.beads.issue_service import IssueService
from bonobofs.files.results import GuardedSession, ValidationResult, recorded, result_of
from bonobofs.policy.request import Operation


@recorded(
    "beads",
    validate_create=Operation.CREATE_ISSUE,
    validate_update=Operation.UPDATE_ISSUE,
    validate_dependency=Operation.ADD_DEPENDENCY,
    guarded_create=Operation.CREATE_ISSUE,
    guarded_update=Operation.UPDATE_ISSUE,
    guarded_label=Operation.LABEL_ISSUE,
    guarded_close=Operation.CLOSE_ISSUE,
    guarded_reopen=Operation.REOPEN_ISSUE,
    guarded_dependency=Operation.ADD_DEPENDENCY,
    guarded_remove_dependency=Operation.REMOVE_DEPENDENCY,
    guarded_comment=Operation.COMMENT_ISSUE,
    begin_work=Operation.UPDATE_ISSUE,
)
class BeadsGuard:
    """The guarded issues of one workspace, for the agent of one session. May be used by several threads.

    `agent` is the session's agent in every call, by label or UUID; another one is refused, with an alert. Ids are given
    in full. UsageError: a value is of the wrong kind.
    """

    def __init__(self, session: GuardedSession, beads: Beads | None = None) -> None:
        """Stand on an open session; `beads` is bd for its workspace, by default the one that is installed.

        BeadsError: the workspace has no issues.
        """
        if beads is None:
            beads = Beads(find_beads(Path(session.place), session.home), session.home, session.guard.agent)
        self._session: Final = session
        self._acting: Final = IssueService(session, beads)

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
        return result_of(self._acting.validate_create(title, issue_type, fields, agent, "validate_create"))

    def validate_update(self, issue_id: str, changes: Mapping[str, Any], agent: str) -> ValidationResult:
        """Whether the agent may change an issue so; the keys are those that `guarded_update` takes."""
        return result_of(self._acting.validate_update(issue_id, changes, agent, "validate_update"))

    def validate_dependency(self, blocked_id: str, blocker_id: str, dep_type: str, agent: str) -> ValidationResult:
        """Whether the agent may let one issue depend on another, as `guarded_dependency` does."""
        return result_of(
            self._acting.validate_dependency(blocked_id, blocker_id, dep_type, agent, "validate_dependency")
        )

    def guarded_create(self, title: str, issue_type: str, priority: int | str, agent: str, **fields: Any) -> BeadsIssue:
        """Create an issue, all of it or nothing, and give it. `priority` is 0, the most urgent, to 4.

        `fields` may have labels, assignee, parent, description, design, acceptance, notes; and dependencies, a list of
        what `bd create --deps` takes: an id or TYPE:ID for what it depends on, blocks:ID for what depends on it.
        """
        return self._acting.create(title, issue_type, priority, fields, agent, "guarded_create")

    def guarded_update(self, issue_id: str, agent: str, **changes: Any) -> None:
        """Change an issue: title, description, design, acceptance, notes, priority, assignee ("": nobody), status.

        A status is open, in_progress, done or closed. `labels` are all that it is to have, `add_labels` and
        `remove_labels` those that come and go. What is asked for and is so already changes nothing.
        """
        self._acting.update(issue_id, changes, agent, "guarded_update")

    def guarded_label(
        self, issue_id: str, agent: str, *, add: list[str] | None = None, remove: list[str] | None = None
    ) -> None:
        """Give an issue labels, and take others away."""
        self._acting.label(issue_id, add, remove, agent, "guarded_label")

    def guarded_close(self, issue_id: str, agent: str, reason: str | None = None) -> None:
        """Close an issue that waits for none and has no child that is not closed."""
        self._acting.close(issue_id, reason, agent, "guarded_close")

    def guarded_reopen(self, issue_id: str, agent: str, reason: str | None = None) -> None:
        """Open a closed issue again."""
        self._acting.reopen(issue_id, reason, agent, "guarded_reopen")

    def guarded_dependency(self, blocked_id: str, blocker_id: str, dep_type: str, agent: str) -> None:
        """Let one issue depend on another; for `parent`, the blocked is the child.

        `dep_type` is blocks, conditional-blocks, waits-for, parent, related or discovered-from.
        """
        self._acting.tie(blocked_id, blocker_id, dep_type, agent, "guarded_dependency")

    def guarded_remove_dependency(self, blocked_id: str, blocker_id: str, agent: str) -> None:
        """Let one issue no longer depend on another, in whichever way it did."""
        self._acting.untie(blocked_id, blocker_id, agent, "guarded_remove_dependency")

    def guarded_comment(self, issue_id: str, comment: str, agent: str) -> None:
        """Say something of an issue, whosever it is."""
        self._acting.comment(issue_id, comment, agent, "guarded_comment")

    def begin_work(self, issue_id: str, agent: str, worktree: str) -> BeadsIssue:
        """Note that a worktree, by its UUID, is about to be made for an issue, and give the issue as it is.

        Refused where it waits for issues that have not ended, which the refusal names. From now on nothing new is put
        before it.
        """
        return self._acting.begin(issue_id, worktree, agent, "begin_work")
