"""The calls `undo` and `undo.preview` of the guard socket: a session's agent takes back its own changes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bonobofs.audit.reader import since as moment_of
from bonobofs.companion.session_context import SessionContext
from bonobofs.enforcement.authorizer import Caller
from bonobofs.errors import UsageError
from bonobofs.policy.request import Operation, Request, WorkspacePath
from bonobofs.undo.changes import Selection

if TYPE_CHECKING:
    from bonobofs.session.undo_refs import RefsOfSource


def _preview(
    session: SessionContext,
    change: str | None = None,
    turn: str | None = None,
    since: str | None = None,
    path: str | None = None,
    this_session: bool = False,
) -> Any:
    """What `undo` would do with the same arguments."""
    from bonobofs.session import undo_service  # noqa: PLC0415 - few sessions undo anything

    _record(session, "undo.preview", path)
    selected = _selection(session, change, turn, since, path, this_session=this_session)
    planned = undo_service.preview(session.home, session.session.source, selected, _refs(session), session.guard)
    return undo_service.as_document(planned)


def _undo(
    session: SessionContext,
    change: str | None = None,
    turn: str | None = None,
    since: str | None = None,
    path: str | None = None,
    this_session: bool = False,
) -> Any:
    """Take back the agent's own changes that all arguments name. The role must have the tool `undo`."""
    from bonobofs.session import undo_service  # noqa: PLC0415 - as above

    _record(session, "undo", path)
    own = session.session
    selected = _selection(session, change, turn, since, path, this_session=this_session)
    with session.change_lock:
        result = undo_service.take_back(
            session.home,
            own.source,
            selected,
            undo_service.Undoer(own.session, session.guard, session.guard.event, session.guard),
            _refs(session),
        )
    return undo_service.as_document(result)


def _refs(session: SessionContext) -> RefsOfSource:
    from bonobofs.session.undo_refs import RefsOfSource  # noqa: PLC0415 - as above

    return RefsOfSource(Path(session.access_path), lambda: session.git_worker)


def _record(session: SessionContext, name: str, path: str | None) -> None:
    """Record the call. Refused: the role does not have the tool."""
    session.guard.record_call(Request(Operation.UNDO, WorkspacePath(path or "")), caller=Caller(name))


def _selection(
    session: SessionContext,
    change: str | None,
    turn: str | None,
    since: str | None,
    path: str | None,
    *,
    this_session: bool,
) -> Selection:
    from bonobofs.session import undo_service  # noqa: PLC0415 - as above

    if path is None and not any((change, turn, since, this_session)):
        raise UsageError("say what to take back: change, turn, since, path or this_session")
    return undo_service.selection(
        session.home,
        session.session.source,
        change=change,
        turn=turn,
        of_session=session.session.session if this_session else None,
        since=None if since is None else moment_of(since, datetime.now(UTC)),
        path=path,
        agent=session.session.agent_id,
    )


UNDO_CALLS: Final[dict[str, Callable[..., Any]]] = {"undo": _undo, "undo.preview": _preview}
