"""The refs of a source for `undo`. The git worker moves them back, as the owner of the repository."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bonobofs.audit.entry import UNDO
from bonobofs.enforcement.authorizer import Admission, Caller
from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.errors import GitError
from bonobofs.git.source_refs import find_git_dirs, read_head, read_ref
from bonobofs.policy.decision import Denied, Refused
from bonobofs.policy.request import Request
from bonobofs.state.sessions import Session
from bonobofs.undo.changes import RefMove
from bonobofs.undo.plan import UndoStep

if TYPE_CHECKING:
    from bonobofs.git.git_worker import GitWorker

_TRIES: Final = 2
"""A worker that was killed is started again, and completes the call."""
_ERROR: Final = 5
"""EIO."""


class RefsOfSource:
    """`SourceRefs` of one undo: of an agent's session, or of the operator's."""

    def __init__(self, source: Path, worker: Callable[[], GitWorker] | None, *, is_operator: bool = False) -> None:
        """`source`: the path by which to open it. `worker` returns the session's worker; None: refs are only read."""
        self.source: Final = source
        self._worker: Final = worker
        self.refusal: Final = cache(self._refusal_for_operator if is_operator else self._refusal_for_agent)

    def value(self, ref: str) -> str:
        """As `SourceRefs.value`."""
        with suppress(GitError):
            return read_ref(find_git_dirs(self.source).common, ref)
        return ""

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
        failure = self._call(moves, publishers=step.arguments["publishers"], details={UNDO: step.change})
        if failure:
            raise OSError(_ERROR, failure)

    def _call(self, moves: Sequence[RefMove], *, check: bool = False, **arguments: Any) -> str:
        """Call the worker; return why it has not moved the refs, or ""."""
        assert self._worker is not None
        arguments = {"updates": moves, "check": check, "publishers": {}, "details": {}, **arguments}
        failure = ""
        for _ in range(_TRIES):
            try:
                answer = self._worker().call("take_back", **arguments)
            except GitError as error:
                failure = str(error)
            else:
                return str(answer["line"]).removeprefix("not published: ")
        return failure


class _OperatorAuthorizer:
    """The enforcer of the operator's session, for the worker."""

    def __init__(self, enforcer: Enforcer, policy: dict[str, Any]) -> None:
        self.agent: Final = enforcer.agent
        self.plain_policy: Final = policy
        self._enforcer: Final = enforcer

    def generation(self) -> dict[str, Any]:
        return {"generation": 0, "leases": "none"}

    def authorize_judged(self, request: Request, document: dict[str, Any]) -> Admission | None:
        caller = Caller(*document["caller"])
        return self._enforcer.authorize(request, caller=caller, details=document["details"], guard=document["guard"])

    def deny(self, denied: Denied, caller: Caller, *, guard: str) -> Refused:
        return self._enforcer.deny(denied, caller, guard=guard)

    def event(self, operation: str, details: dict[str, Any]) -> None:
        self._enforcer.trail.event(operation, details)


class OperatorGitSession(NamedTuple):
    """The operator's session, for the worker."""

    home: Path
    session: Session
    guard: _OperatorAuthorizer
    note_index: Callable[[], object] = lambda: None

    @classmethod
    def of(cls, home: Path, session: Session, enforcer: Enforcer, policy: dict[str, Any]) -> OperatorGitSession:
        return cls(home, session, _OperatorAuthorizer(enforcer, policy))


class OperatorWorker:
    """The worker of the operator's session, which is started for the first publication."""

    def __init__(self, session: OperatorGitSession, source: Path) -> None:
        self._session: Final = session
        self._source: Final = source
        self._worker: GitWorker | None = None

    def __call__(self) -> GitWorker:
        """Return the worker, after the repository is cleaned up after killed ones."""
        from bonobofs.git.git_worker import GitWorker  # noqa: PLC0415 - few undos take back a publication

        if self._worker is None:
            self._worker = GitWorker(self._session, list, self._source, is_operator=True)
            self._worker.recover()
        return self._worker

    def close(self) -> None:
        """End the worker."""
        if self._worker is not None:
            self._worker.close()
