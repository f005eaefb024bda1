r"""Branches, commits and merges for Python callers, through the same door as the mount.

    with open_session("project", agent="alice") as session:
        guard = GitGuard(session)
        guard.create_branch("aidlc/gt-17", agent="alice")
        guard.checkout_branch("aidlc/gt-17", agent="alice")
        made = guard.commit("Add the plan", ["aidlc-docs/plan.md"], agent="alice", issue_id="gt-17")

How a denial is told: `create_branch`, `checkout_branch`, `commit` and `merge` give a `ValidationResult` that is false,
their `guarded_` twins raise `Refused`, a PermissionError. What is no denial (a damaged repository, a file that git has
locked, one that is not there) is GitError, by both. Conflicts are a result of a merge; nothing is changed then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from bonobofs.decision import Refused
from bonobofs.guard import Caller
from bonobofs.guards.answers import (
    GuardedSession,
    Log,
    ValidationResult,
    claiming,
    is_of_the_session,
    not_the_agent,
    told,
)
from bonobofs.guards.closing import Closing
from bonobofs.guards.failures import recorded
from bonobofs.guards.file_guard import PathLike
from bonobofs.guards.git import rules
from bonobofs.guards.git.gate import GitGate
from bonobofs.guards.git.looking import GitStatus
from bonobofs.guards.git.rules import AIDLC_BRANCH_PREFIX, COMMIT_MESSAGE_PATTERN, PROTECTED_BRANCHES, Refusal
from bonobofs.request import Operation, WorkspacePath

__all__ = [
    "AIDLC_BRANCH_PREFIX",
    "COMMIT_MESSAGE_PATTERN",
    "PROTECTED_BRANCHES",
    "GitGuard",
    "GitStatus",
    "MergeResult",
]

_DENIALS: Final = {
    "not-found": rules.BRANCH,
    "name": rules.BRANCH,
    "exists": rules.EXISTS,
    "dirty": rules.CLEAN,
    "untracked": rules.CLEAN,
    "checked-out": rules.CHECKED_OUT,
}
"""What is fatal to git and a rule here."""
_DENYING: Final = (Operation.CREATE_BRANCH, Operation.CHECKOUT_BRANCH, Operation.MERGE)


@dataclass(frozen=True)
class MergeResult:
    """What came of a merge. Where it was not a success, nothing was changed."""

    success: bool
    commit_hash: str | None
    conflicts: list[str] = field(default_factory=list)
    """Paths that both sides changed and nobody resolved."""
    strategy_used: str = "merge"
    fast_forward: bool = False
    """The target was only moved along; there is no commit of the merge itself."""


@recorded(
    "git",
    create_branch=Operation.CREATE_BRANCH,
    checkout_branch=Operation.CHECKOUT_BRANCH,
    commit=Operation.COMMIT,
    merge=Operation.MERGE,
    get_status=Operation.CALL,
    get_diff=Operation.CALL,
)
class GitGuard(Closing):
    """The guarded repository of one workspace, for the agent of one session. May be used by several threads."""

    def __init__(self, session: GuardedSession, *, issue: str | None = None) -> None:
        """Stand on an open session; `issue` is what the session works on, if it works on one."""
        self._session: Final = session
        self.audit: Final[Log] = session.log
        self._gate: Final = GitGate(session, issue, _denial)
        self._door: Final = session.guard
        self._turn: Final = session.turn

    def close(self) -> None:
        """Let go of the workspace's directory; the session goes on."""
        self._gate.close()

    def create_branch(self, branch_name: str, agent: str, base: str = "main") -> str | ValidationResult:
        """Make a branch at the commit of `base`, and give its name; on denial the ValidationResult."""
        try:
            return self.guarded_create_branch(branch_name, agent, base)
        except Refused as refused:
            return told(refused.decision)

    def guarded_create_branch(self, branch_name: str, agent: str, base: str = "main") -> str:
        """`create_branch`, with Refused (a PermissionError) on denial."""
        caller = Caller("create_branch", {"branch": branch_name, "base": base})
        self._demand(agent, Operation.CREATE_BRANCH, caller)
        self._gate.create_branch(branch_name, base)
        return branch_name

    def checkout_branch(self, branch_name: str, agent: str) -> ValidationResult | None:
        """Switch to a branch; the working tree must have no uncommitted changes. On denial the ValidationResult."""
        try:
            self.guarded_checkout_branch(branch_name, agent)
        except Refused as refused:
            return told(refused.decision)
        return None

    def guarded_checkout_branch(self, branch_name: str, agent: str) -> None:
        """`checkout_branch`, with Refused (a PermissionError) on denial."""
        caller = Caller("checkout_branch", {"branch": branch_name})
        self._demand(agent, Operation.CHECKOUT_BRANCH, caller)
        self._gate.switch(branch_name, clean=True)

    def commit(self, message: str, files: Sequence[PathLike], agent: str, issue_id: str) -> str | ValidationResult:
        """Commit these files as they are now, and give the commit's hash; on denial the ValidationResult.

        A file that is gone is committed as deleted; whatever else is staged stays staged. `[ISSUE]` is prepended to
        the message unless it begins with it. GitError: a file is unknown, or none of them has changed.
        """
        try:
            return self.guarded_commit(message, files, agent, issue_id)
        except Refused as refused:
            return told(refused.decision)

    def guarded_commit(self, message: str, files: Sequence[PathLike], agent: str, issue_id: str) -> str:
        """`commit`, with Refused (a PermissionError) on denial."""
        names = [self._named(path) for path in files]
        caller = Caller("commit", {"message": message, "files": names, "issue": issue_id})
        self._demand(agent, Operation.COMMIT, caller)
        return self._gate.commit(message, names, only=True, issue=issue_id or None).hash

    def merge(self, source: str, target: str, agent: str, strategy: str = "merge") -> MergeResult | ValidationResult:
        """Merge one branch into another, by a merge (or by moving it along, where it has nothing of its own) or squash.

        The target need not be checked out; where it is, the working tree must be clean, and follows. On denial the
        ValidationResult.
        """
        try:
            return self.guarded_merge(source, target, agent, strategy)
        except Refused as refused:
            return told(refused.decision)

    def guarded_merge(self, source: str, target: str, agent: str, strategy: str = "merge") -> MergeResult:
        """`merge`, with Refused (a PermissionError) on denial."""
        caller = Caller("merge", {"source": source, "target": target, "strategy": strategy})
        self._demand(agent, Operation.MERGE, caller)
        merged = self._gate.merge(source, target=target, strategy=strategy)
        conflicts = list(merged.conflicts)
        return MergeResult(not conflicts, merged.hash, conflicts, strategy, merged.fast_forward)

    def get_status(self, agent: str) -> GitStatus:
        """What is staged, modified and untracked. Refused: the agent is not the session's."""
        self._demand(agent, Operation.CALL, Caller("get_status"))
        return self._gate.status()

    def get_diff(self, path: PathLike | None = None) -> str:
        """The changes of tracked files since HEAD, staged or not, as a patch; of one file or directory, or of all."""
        return self._gate.diff(None if path is None else self._named(path))

    def _named(self, path: PathLike) -> str:
        """The path below the workspace's root; what lies elsewhere keeps its slash, and is refused."""
        return str(self._gate.named(path))

    def _demand(self, agent: str, operation: Operation, caller: Caller) -> None:
        """Refused, once entered, if the agent is not who it says it is."""
        if is_of_the_session(agent, self._door.agent):
            return
        denied = not_the_agent(WorkspacePath(""), operation)
        with self._turn:
            raise self._door.refuse(denied, claiming(caller, agent), guard="git")


def _denial(kind: str, operation: Operation) -> Refusal | None:
    if operation is Operation.CREATE_BRANCH and kind in ("not-found", "name"):
        return rules.BASE
    return _DENIALS.get(kind) if operation in _DENYING else None
