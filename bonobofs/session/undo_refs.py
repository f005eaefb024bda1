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

_TRIES: Final = 2
"""A worker that has died is started again, and completes the call. A slow one is not called again."""


class RefsOfSource:
    """`SourceRefs` of one undo: of an agent's session, or of the operator's."""

    limit = 120.0
    """Seconds for the calls of one publication."""

    def __init__(self, source: Path, worker: Callable[[], GitWorker] | None, *, is_operator: bool = False) -> None:
        """`source`: the path by which to open it. `worker` returns the session's worker; None: refs are only read."""
        self.source: Final = source
        self._worker: Final = worker
        self._is_operator: Final = is_operator
        self.refusal: Final = cache(self._refusal)

    def value(self, ref: str) -> str:
        """As `SourceRefs.value`. UndoConflict: the repository cannot be read."""
        try:
            return read_ref(find_git_dirs(self.source).common, ref)
        except (GitError, OSError) as error:
            raise UndoConflict(f"the repository cannot be read: {reason(error)}") from error

    def _refusal(self, moves: tuple[RefMove, ...]) -> str:
        """As `SourceRefs.refusal`. An error refuses this publication only."""
        try:
            if self._is_operator:
                return self._refusal_for_operator(moves)
            return self._call(moves, check=True) if moves else ""
        except (GitError, OSError) as error:
            return reason(error)

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
        failure = self._call(moves, publishers=step.arguments["publishers"], details={UNDO: step.change})
        if failure:
            raise OSError(errno.EIO, failure)

    def _call(self, moves: Sequence[RefMove], *, check: bool = False, **arguments: Any) -> str:
        """Call the worker; return why it has not moved the refs, or "". OSError."""
        assert self._worker is not None
        arguments = {"updates": moves, "check": check, "publishers": {}, "details": {}, **arguments}
        failure, deadline = "", monotonic() + self.limit
        for _ in range(_TRIES):
            try:
                answer = self._worker().call("take_back", limit=deadline - monotonic(), **arguments)
            except (GitError, StateError) as error:
                failure = str(error)
                if not isinstance(error, GitError) or error.kind != "worker":
                    break
            else:
                return str(answer["line"]).removeprefix("not published: ")
        return failure


class OperatorAuthorizer:
    """The enforcer of the operator's session, as a `WorkerAuthorizer`."""

    def __init__(self, enforcer: Enforcer, policy: dict[str, Any]) -> None:
        self.agent: Final = enforcer.agent
        self.deny: Final = enforcer.deny
        self.event: Final = enforcer.trail.event
        self.plain_policy: Final = policy
        self._enforcer: Final = enforcer

    def generation(self) -> dict[str, Any]:
        return {"generation": 0, "leases": "none", "answers": ["", []]}

    def authorize_judged(self, request: Request, document: dict[str, Any]) -> Admission | None:
        caller = Caller(*document["caller"])
        return self._enforcer.authorize(request, caller=caller, details=document["details"], guard=document["guard"])
