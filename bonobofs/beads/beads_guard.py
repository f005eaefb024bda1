r"""Create and change issues from Python, under the rules of the policy and the identity of the session.

    with open_session("project", agent="alice") as session:
        issues = BeadsGuard(session)
        plan = issues.guarded_create("Write the plan", "task", 1, "alice", labels=["phase:design"])
        issues.guarded_update(plan.id, "alice", assignee="alice", status="in_progress")

bd stores the issues in the `.beads` of the workspace. The gate judges the caller's words and then maps them to bd's:
`done` is stored as closed, `parent` as parent-child, and a message as a permanent issue that `bd list` shows.

Denials: `validate_…` methods return a false `ValidationResult`, `guarded_…` methods raise `Refused`, a PermissionError.
The trail records every call with the issue's id. A BeadsError states which part of a change bd did not store; the trail
records it with result `error`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bonobofs.beads import BeadsIssue, IssueStore
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

    `agent` is the session's agent in every call, by label or UUID. Another agent is refused, with an alert. Ids are
    full. All methods raise UsageError for a value of the wrong type.
    """

    def __init__(self, session: GuardedSession, beads: IssueStore | None = None) -> None:
        """Guard the issues of an open session. `beads` is bd for its workspace, by default the installed one.

        Raises BeadsError if the workspace has no `.beads`.
        """
        self._session: Final = session
        self._service: Final = IssueService(session, beads)

    def validate_create(
        self,
        title: str,
        issue_type: str,
        labels: list[str],
        agent: str,
        assignee: str | None = None,
        parent: str | None = None,
    ) -> ValidationResult:
        """Return whether the agent may create this issue."""
        fields = {"labels": labels, "assignee": assignee, "parent": parent}
        call = self._service.create(title, issue_type, None, fields)
        return result_of(self._service.validate(call, agent, "validate_create"))

    def validate_update(self, issue_id: str, changes: Mapping[str, Any], agent: str) -> ValidationResult:
        """Return whether the agent may make these changes. The keys are those of `guarded_update`."""
        return result_of(self._service.validate(self._service.update(issue_id, changes), agent, "validate_update"))

    def validate_dependency(self, blocked_id: str, blocker_id: str, dep_type: str, agent: str) -> ValidationResult:
        """Return whether the agent may add this dependency with `guarded_dependency`."""
        call = self._service.tie(blocked_id, blocker_id, dep_type)
        return result_of(self._service.validate(call, agent, "validate_dependency"))

    def guarded_create(self, title: str, issue_type: str, priority: int | str, agent: str, **fields: Any) -> BeadsIssue:
        """Create a whole issue, or none, and return it. `priority` is from 0, the most urgent, to 4.

        `fields` are labels, assignee, parent, description, design, acceptance, notes and dependencies. These are a list
        as for `bd create --deps`: ID or TYPE:ID for an issue that it depends on, blocks:ID for one that depends on it.
        """
        return self._service.run(self._service.create(title, issue_type, priority, fields), agent, "guarded_create")

    def guarded_update(self, issue_id: str, agent: str, **changes: Any) -> None:
        """Change title, description, design, acceptance, notes, priority, assignee ("" for none) or status.

        A status is open, in_progress, done or closed. `labels` replaces all labels; `add_labels` and `remove_labels`
        change single ones. Values that the issue already has are not written again.
        """
        self._service.run(self._service.update(issue_id, changes), agent, "guarded_update")

    def guarded_label(
        self, issue_id: str, agent: str, *, add: list[str] | None = None, remove: list[str] | None = None
    ) -> None:
        """Add labels to an issue, and remove labels from it."""
        self._service.run(self._service.label(issue_id, add, remove), agent, "guarded_label")

    def guarded_close(self, issue_id: str, agent: str, reason: str | None = None) -> None:
        """Close an issue. Refused while a blocker or a child is open."""
        self._service.run(self._service.close(issue_id, reason), agent, "guarded_close")

    def guarded_reopen(self, issue_id: str, agent: str, reason: str | None = None) -> None:
        """Reopen a closed issue."""
        self._service.run(self._service.reopen(issue_id, reason), agent, "guarded_reopen")

    def guarded_dependency(self, blocked_id: str, blocker_id: str, dep_type: str, agent: str) -> None:
        """Make the blocked issue depend on the blocker. For `parent`, the blocked issue is the child.

        `dep_type` is blocks, conditional-blocks, waits-for, parent, related or discovered-from.
        """
        self._service.run(self._service.tie(blocked_id, blocker_id, dep_type), agent, "guarded_dependency")

    def guarded_remove_dependency(self, blocked_id: str, blocker_id: str, agent: str) -> None:
        """Remove the dependency of one issue on another, whatever its type."""
        self._service.run(self._service.untie(blocked_id, blocker_id), agent, "guarded_remove_dependency")

    def guarded_comment(self, issue_id: str, comment: str, agent: str) -> None:
        """Add a comment to an issue of any assignee."""
        self._service.run(self._service.comment(issue_id, comment), agent, "guarded_comment")

    def has_issue(self, issue_id: str) -> bool:
        """Return whether there is an issue of this full id."""
        with self._service.beads.locked_client() as client:
            return client.find(issue_id) is not None

    def begin_work(self, issue_id: str, agent: str, worktree: str) -> BeadsIssue:
        """Store the UUID of the worktree that is about to be made for an issue, and return the issue.

        Refused while the issue waits for open issues, which the refusal names. Afterwards the gate refuses a new
        blocker for the issue.
        """
        return self._service.run(self._service.begin(issue_id, worktree), agent, "begin_work")
