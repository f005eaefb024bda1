"""The git gate of one session: git's own operations, by the session's agent, each judged, entered and done.

    gate = GitGate(session, issue="gt-17")
    gate.add(["docs/plan.md"])
    made = gate.commit("Add the plan")

Paths are relative to the workspace and name files; commits are ids, names of branches and tags, or full names of refs.
Refused (a PermissionError): the policy says no. GitError: what git itself would call fatal. After either, nothing has
changed. May be used by several threads; operations on one repository wait for each other, also those of other sessions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from bonobofs.errors import GitError, UsageError
from bonobofs.guard import Part
from bonobofs.guards.answers import GuardedSession
from bonobofs.guards.beneath import Workspace
from bonobofs.guards.failures import enter_failure
from bonobofs.guards.git import branches, looking, merging, staging, stash, switching
from bonobofs.guards.git.commit import Committed, Wanted, commit
from bonobofs.guards.git.identity import COMMITTER
from bonobofs.guards.git.looking import GitStatus
from bonobofs.guards.git.merging import Merged, Wish
from bonobofs.guards.git.reading import diff_of, status_of
from bonobofs.guards.git.rules import Refusal, bad_message
from bonobofs.guards.git.switching import Switched, To
from bonobofs.guards.git.transaction import Transaction
from bonobofs.guards.git.work import GUARD, Work
from bonobofs.request import Operation, Request, WorkspacePath

Pairs = Sequence[tuple[str, str]]
Paths = Sequence[str]

_LISTED: Final = 1000
"""Paths of an error that its entry lists."""


class GitGate:
    """What the shim, the command line and GitGuard ask."""

    def __init__(
        self,
        session: GuardedSession,
        issue: str | None = None,
        denials: Callable[[str, Operation], Refusal | None] = lambda *_: None,
    ) -> None:
        """Stand on an open session; `issue` is what its commits are for.

        `denials` gives the rule that a GitError of a kind breaks by the caller's rules, None if it breaks none.
        """
        self._session: Final = session
        self._denials: Final = denials
        self._door: Final = session.guard
        self._turn: Final = session.turn
        self._name: Final = str(getattr(session.session, "session", ""))
        self._workspace: Final = Workspace(Path(session.session.source), session.place)
        self._home: Final = session.home
        self.issue: Final = issue
        self.index = b""
        """The index as the last operation that changed it wrote it."""

    @property
    def root(self) -> Path:
        """The top of the working tree."""
        return self._workspace.root

    def close(self) -> None:
        """Let go of the workspace's directory; the session goes on."""
        self._workspace.close()

    def named(self, path: str | os.PathLike[str]) -> WorkspacePath:
        """The path below the workspace's root; what lies elsewhere keeps its slash, and is refused."""
        return self._workspace.named(path)

    @contextmanager
    def _work(self, operation: Operation, tool: str) -> Iterator[Work]:
        transaction = Transaction(self._home, self._workspace, self._name, COMMITTER)
        with transaction:
            work = Work(self._door, self._turn, transaction, operation, tool)
            try:
                yield work
            except Exception as error:
                self._fail(work, error)
                raise
            self.index = transaction.staged or self.index

    def _fail(self, work: Work, error: Exception) -> None:
        """Enter the failure; Refused, once entered, where the rules of the caller have it as a denial."""
        details: dict[str, Any] | None = None
        if isinstance(error, GitError):
            paths = list(error.paths)[:_LISTED]
            details = {"error": error.kind, "message": str(error), "paths": paths}
            if not work.is_entered and (denial := self._denials(error.kind, work.operation)) is not None:
                work.demand(denial, **details)
        if not work.is_entered:
            enter_failure(self._session, work.request, error, work.caller, guard=GUARD, details=details)

    def add(self, paths: Paths, *, update_only: bool = False) -> None:
        """Stage files as they are now; one that is gone is staged as deleted. All or none."""
        with self._work(Operation.ADD, "git add") as work:
            staging.add(work, _bytes(paths), update_only=update_only)

    def restore(self, paths: Paths, *, source: str | None = None, staged: bool = False, worktree: bool = True) -> None:
        """Bring paths back to a commit; with no source, files to the index and the index to HEAD."""
        with self._work(Operation.RESTORE, "git restore") as work:
            staging.restore(work, _bytes(paths), source, staged=staged, worktree=worktree)

    def remove(self, paths: Paths, *, cached: bool = False, force: bool = False) -> None:
        """Take files out of the index, and away unless `cached`."""
        with self._work(Operation.RM, "git rm") as work:
            staging.remove(work, _bytes(paths), cached=cached, force=force)

    def move(self, pairs: Pairs, *, force: bool = False) -> None:
        """Give tracked files, or directories of them, other names."""
        with self._work(Operation.MV, "git mv") as work:
            plain = [(os.fsencode(source), os.fsencode(target)) for source, target in pairs]
            staging.move(work, plain, force=force)

    def commit(
        self,
        message: str | None,
        files: Paths | None = None,
        *,
        only: bool = False,
        amend: bool = False,
        allow_empty: bool = False,
        issue: str | None = None,
    ) -> Committed:
        """Commit what is staged and `files`; with `only`, these alone, and what else is staged stays staged."""
        with self._work(Operation.COMMIT, "git commit") as work:
            named = None if files is None else _bytes(files)
            wanted = Wanted(message, named, only=only, amend=amend, allow_empty=allow_empty)
            if self.issue is not None and issue not in (None, self.issue):
                work.demand(bad_message(work.rules, "names the issue that it is for, and no other"), issue=issue)
            return commit(work, wanted, self.issue or issue)

    def create_branch(self, name: str, base: str = "HEAD") -> str:
        """Make a branch, and give the commit that it is at."""
        with self._work(Operation.CREATE_BRANCH, "git branch") as work:
            return branches.create_branch(work, name, base)

    def delete_branch(self, name: str, *, force: bool = False) -> str:
        """Remove a branch that is merged, or any with `force`; gives the commit that it was at."""
        with self._work(Operation.DELETE_BRANCH, "git branch") as work:
            return branches.delete_branch(work, name, force=force)

    def rename_branch(self, old: str, new: str, *, force: bool = False) -> None:
        """Give a branch another name."""
        with self._work(Operation.CREATE_BRANCH, "git branch") as work:
            branches.rename_branch(work, old, new, force=force)

    def switch(
        self,
        branch: str | None = None,
        *,
        commit: str | None = None,
        create: bool = False,
        base: str | None = None,
        force: bool = False,
        clean: bool = False,
    ) -> Switched:
        """Go to a branch, made before with `create`, or to a commit; what is not committed stays where it can.

        With `clean`, whatever is not committed is a GitError; with `force`, it is thrown away.
        """
        with self._work(Operation.CHECKOUT_BRANCH, "git switch") as work:
            if create:
                work.demand_leave(Part(Request(Operation.CREATE_BRANCH, WorkspacePath(""))))
            return switching.switch(work, To(branch, commit, create, base, force, clean))

    def merge(
        self,
        source: str,
        *,
        target: str | None = None,
        strategy: str = "merge",
        message: str | None = None,
        fast_forward: str = "auto",
        commit: bool = True,
    ) -> Merged:
        """Merge into a branch, or where HEAD is. With conflicts nothing is changed, and they are told."""
        with self._work(Operation.MERGE, "git merge") as work:
            return merging.merge(work, Wish(source, target, strategy, message, fast_forward, commit), self.issue)

    def reset(self, commit: str = "HEAD", mode: str = "mixed") -> str:
        """Bring the branch that HEAD is on to a commit; gives its id."""
        with self._work(Operation.RESET, "git reset") as work:
            return switching.reset(work, commit, mode)

    def stash_push(
        self,
        message: str | None = None,
        *,
        include_untracked: bool = False,
        paths: Paths | None = None,
        keep_index: bool = False,
    ) -> str:
        """Put changes aside; gives the commit that holds them."""
        with self._work(Operation.STASH, "git stash") as work:
            untracked = looking.status(work.repository).untracked if include_untracked else []
            if paths is not None:
                untracked = [path for path in untracked if path in paths]
            chosen = None if paths is None else _bytes(paths)
            return stash.push(work, message, _bytes(untracked), chosen, keep_index=keep_index)

    def stash_apply(self, index: int = 0, *, drop: bool = False, restore_index: bool = False) -> None:
        """Bring back what was put aside. With conflicts nothing is changed: GitError."""
        with self._work(Operation.STASH, "git stash") as work:
            stash.apply(work, index, drop=drop, restore_index=restore_index)

    def stash_drop(self, index: int = 0) -> str:
        """Forget what was put aside; gives its commit."""
        with self._work(Operation.STASH, "git stash") as work:
            return stash.drop(work, index)

    def stash_clear(self) -> None:
        """Forget all that was put aside."""
        with self._work(Operation.STASH, "git stash") as work:
            stash.clear(work)

    def tag(self, name: str, target: str = "HEAD", *, message: str | None = None, force: bool = False) -> str:
        """Make a tag; gives what it holds."""
        with self._work(Operation.TAG, "git tag") as work:
            return branches.tag(work, name, target, message, force=force)

    def delete_tag(self, name: str) -> str:
        """Remove a tag; gives what it held."""
        with self._work(Operation.TAG, "git tag") as work:
            return branches.delete_tag(work, name)

    def status(self) -> GitStatus:
        """What is staged, modified and untracked."""
        return status_of(self.root, self._home)

    def diff(self, path: str | None = None) -> str:
        """The changes of tracked files since HEAD, as a patch."""
        return diff_of(self.root, self._home, path, self._workspace)


def _bytes(paths: Sequence[str]) -> list[bytes]:
    if isinstance(paths, str):
        raise UsageError("paths are a list, and not one text")
    return list(dict.fromkeys(os.fsencode(path) for path in paths))
