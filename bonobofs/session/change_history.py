"""`history`: the changes of a path, by the sessions of its source. Loads neither the database nor the enforcement."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import UTC
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.audit.entry import UNDO
from bonobofs.errors import UsageError
from bonobofs.session.session_list import flush_servers
from bonobofs.state.sessions import Session, read_all
from bonobofs.system.paths import is_within
from bonobofs.undo.changes import Change, change_id
from bonobofs.undo.images import Image, Images
from bonobofs.undo.path_history import PathQuery, find_changes

FAR_BEHIND: Final = 8 << 20
"""Bytes that a history reads from the trails in less time than it takes to load what updates the index."""


class History(NamedTuple):
    """The answer of `history`."""

    changes: list[dict[str, Any]]
    """Newest first."""
    needs_index_update: bool
    """The index lacks so much that `update_index` makes the next answer faster."""


def sessions_of(home: Path, source: str) -> list[Session]:
    """Return the sessions of a source, oldest first."""
    return [session for session in read_all(home)[0] if session.source == source]


def sessions_around(home: Path, path: Path) -> list[Session]:
    """Return the sessions of the source around a path, oldest first. UsageError: there is none.

    It is the source of a session whose mount or source contains the path.
    """
    sessions = read_all(home)[0]
    source = _mounted_source(sessions, path)
    if source is None:
        found = [session.source for session in sessions if is_within(path, session.source)]
        if not found:
            raise UsageError(f"no session had a source around {path}; name a path in a mount or its source")
        source = max(found, key=len)
    return [session for session in sessions if session.source == source]


def _mounted_source(sessions: Sequence[Session], path: Path) -> str | None:
    for session in reversed(sessions):
        if (
            session.mountpoint is not None
            and is_within(path, session.mountpoint)
            and os.path.ismount(session.mountpoint)
        ):
            return session.source
    return None


def locate(home: Path, path: str) -> tuple[list[Session], str]:
    """Return the sessions of the source around a path, oldest first, and the path in the source. UsageError."""
    full = os.path.normpath(os.path.join(os.getcwd(), path))
    sessions = sessions_around(home, Path(full))
    mountpoints = [each.mountpoint for each in sessions if each.mountpoint is not None]
    return sessions, workspace_path(full, (*reversed(mountpoints), sessions[0].source))


def workspace_path(path: str, roots: tuple[str, ...]) -> str:
    """Return a path relative to the first root that contains it. UsageError: none does."""
    full = os.path.normpath(os.path.join(os.getcwd(), path))
    for root in roots:
        if is_within(full, root):
            return os.path.relpath(full, root) if full != root else ""
    raise UsageError(f"{path} is not in {roots[-1]}")


def session_named(home: Path, text: str) -> Session:
    """Return the session whose UUID begins with a text. UsageError."""
    found = [session for session in read_all(home)[0] if text and session.session.startswith(text)]
    if len(found) != 1:
        few = "more than one session's UUID begins" if found else "no session's UUID begins"
        raise UsageError(f"{few} with {text!r}; see bonobofs status --all")
    return found[0]


def history(home: Path, sessions: Sequence[Session], path: str, most: int) -> History:
    """Return the last changes and refusals of a path in these sessions. OSError, TrailError."""
    flush_servers(home, sessions)
    found = find_changes(home, [session.session for session in sessions], PathQuery({path}, path), most)
    images = images_of(home, sessions[0].source)
    return History([change_document(each, images) for each in reversed(found.changes)], found.unindexed > FAR_BEHIND)


def update_index(home: Path, seconds: float) -> None:
    """Bring the search index up to date, as far as the time allows, at least by one batch. StateError."""
    from bonobofs.session.retention import open_index  # noqa: PLC0415 - it loads the database

    with open_index(home) as index:
        deadline = time.monotonic() + seconds
        index.catch_up(lambda: time.monotonic() < deadline)


def images_of(home: Path, source: str) -> Images:
    """Return the stores of pre-images of a source."""
    return Images(home / "undo", Path(source) / ".bonobofs" / "undo")


def change_document(change: Change, images: Images) -> dict[str, Any]:
    """Return a change as JSON data."""
    entry = change.entry
    return {
        "change": change.id,
        "time": entry.timestamp.astimezone(UTC).isoformat(),
        "agent": entry.agent,
        "agent_id": entry.agent_id,
        "session": entry.session,
        "tool": entry.tool,
        "pid": entry.details.get("pid"),
        "operation": entry.operation,
        "path": entry.path,
        "to": entry.details.get("to"),
        "result": change.result,
        "code": entry.code,
        "reason": entry.reason if change.outcome is None else change.outcome.reason,
        "bytes": change.bytes,
        "turn": f"{change_id(entry.session, change.turn)}{f' {change.turn_name}' if change.turn_name else ''}",
        "undo_of": entry.details.get(UNDO),
        "not_kept": change.not_kept or None,
        "kept_hash": images.hash_of(Image(entry.session, entry.seq)) or None,
    }
