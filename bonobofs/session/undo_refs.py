"""The refs of a source for `undo`. The git worker moves them back, as the owner of the repository."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from bonobofs.audit.entry import UNDO
from bonobofs.enforcement.authorizer import Admission, Caller
from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.errors import GitError, StateError, reason
from bonobofs.git.source_refs import find_git_dirs, read_head, read_ref
from bonobofs.policy.request import Request
from bonobofs.undo.changes import RefMove
from bonobofs.undo.plan import UndoConflict
from bonobofs.undo.steps import UndoStep

if TYPE_CHECKING:
    from bonobofs.git.git_worker import GitWorker

_SECONDS: Final = 120.0
"""Timeout of one publication, in which a worker that has died is started again and completes the call."""


class RefsOfSource:
    """`SourceRefs` of one undo: of an agent's session, or of the operator's."""

    def __init__(
        self,
        source: Path,
        worker: Callable[[], GitWorker] | None,
        *,
        is_operator: bool = False,
        seconds: float = _SECONDS,
    ) -> None:
        """`source`: the path by which to open it. `worker` returns the session's worker; None: refs are only read.

        `seconds`: timeout of one publication.
        """
        self.source: Final = source
        self._worker: Final = worker
        self._seconds: Final = seconds
        self._refusal: Final = self._refusal_for_operator if is_operator else self._refusal_for_agent
        self.refusal: Final = cache(self._refusal_or_error)

    def value(self, ref: str) -> str:
        """As `SourceRefs.value`. UndoConflict: the repository cannot be read."""
        try:
            return read_ref(find_git_dirs(self.source).common, ref)
        except (GitError, OSError) as error:
            raise UndoConflict(f"the repository cannot be read: {reason(error)}") from error

    def _refusal_or_error(self, moves: tuple[RefMove, ...]) -> str:
        """As `SourceRefs.refusal`. An error refuses this publication only."""
        try:
            return self._refusal(moves)
        except (GitError, StateError, OSError) as error:
            return reason(error)

    def _refusal_for_agent(self, moves: tuple[RefMove, ...]) -> str:
        return self._call(moves, check=True) if moves else ""

    def _refusal_for_operator(self, moves: tuple[RefMove, ...]) -> str:
        """Return what git cannot do. No rule refuses the operator."""
        from bonobofs.git.repository import GitRepository  # noqa: PLC0415 - few undos take back a publication
        from bonobofs.git.shared_head import is_checked_out_elsewhere  # noqa: PLC0415 - as above

        dirs = find_git_dirs(self.source)
        repository = GitRepository(dirs.private)
        for ref, _, new in moves:
            if is_checked_out_elsewhere(dirs.private, dirs.common, ref):
                return "another worktree has the branch checked out"
            if not new and read_head(dirs.private) == f"ref: {ref}":
                return "the branch is checked out; switch to another branch first"
            if new and not repository.has(new):
                return f"the repository no longer has {new}"
        return ""

    def move_back(self, step: UndoStep) -> None:
        """As `SourceRefs.move_back`."""
        moves = [RefMove(*move) for move in step.arguments["updates"]]
        try:
            failure = self._call(moves, publishers=step.arguments["publishers"], details={UNDO: step.change})
        except (GitError, StateError) as error:
            failure = str(error)
        if failure:
            raise OSError(errno.EIO, failure)

    def _call(self, moves: Sequence[RefMove], *, check: bool = False, **arguments: Any) -> str:
        """Call the worker; return why it has not moved the refs, or "". GitError, StateError, OSError."""
        assert self._worker is not None
        arguments = {"updates": moves, "check": check, "publishers": {}, "details": {}, **arguments}
        deadline = monotonic() + self._seconds
        try:
            answer = self._worker().call("take_back", seconds=self._seconds, **arguments)
        except GitError as error:
            if error.kind != "worker":
                raise
            answer = self._worker().call("take_back", seconds=deadline - monotonic(), **arguments)
        return str(answer["line"]).removeprefix("not published: ")


class OperatorAuthorizer:
    """The enforcer of the operator's session, as a `WorkerAuthorizer`."""

    def __init__(self, enforcer: Enforcer, policy: dict[str, Any]) -> None:
        self.agent: Final = enforcer.agent
        self.deny: Final = enforcer.deny
        self.event: Final = enforcer.trail.event
        self.plain_policy: Final = policy
        self._enforcer: Final = enforcer

    def generation(self) -> dict[str, Any]:
        return {"generation": 0, "leases": "none"}

    def authorize_judged(self, request: Request, document: dict[str, Any]) -> Admission | None:
        caller = Caller(*document["caller"])
        return self._enforcer.authorize(request, caller=caller, details=document["details"], guard=document["guard"])
