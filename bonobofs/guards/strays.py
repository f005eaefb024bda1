"""Temporary names that a killed process left, taken away by the next session.

Between the link and the rename that put new content under an old name there is a moment in which a process may be
killed. The intent of that write stands in its trail without a good outcome, and states the name.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from bonobofs.audit.history import last
from bonobofs.audit.log import Trail
from bonobofs.audit.record import AuditEntry
from bonobofs.audit.recovery import TEMPORARY
from bonobofs.errors import TrailError
from bonobofs.guards.beneath import Workspace
from bonobofs.guards.content import is_temporary
from bonobofs.request import WorkspacePath
from bonobofs.state.home import trail_path
from bonobofs.state.processes import is_alive
from bonobofs.state.sessions import load_all

_LOOKED_AT: Final = 64
"""Entries at the end of a trail. Outcomes are written at once, so only the last changes can be without."""


def remove(home: Path, workspace: Workspace, trail: Trail) -> None:
    """Undo what the last writes of each ended session of this workspace left, each entered in `trail` first.

    TrailError: nothing was removed that is not entered. StateError: the register cannot be read.
    """
    for session in load_all(home):
        if session.source != str(workspace.root) or session.mountpoint is not None:
            continue  # a mount makes no such names
        if is_alive(session.pid, session.starttime):
            continue
        for intent in _unfinished(trail_path(home, session.session)):
            _remove(workspace, trail, intent)


def _unfinished(trail: Path) -> Iterator[AuditEntry]:
    try:
        entries = last(trail, _LOOKED_AT)
    except TrailError:
        return
    done = {entry.details.get("intent") for entry in entries if (entry.kind, entry.result) == ("outcome", "allowed")}
    for entry in entries:
        if entry.kind == "intent" and entry.seq not in done and is_temporary(entry.details.get(TEMPORARY)):
            yield entry


def _remove(workspace: Workspace, trail: Trail, intent: AuditEntry) -> None:
    above, _, _ = intent.path.rpartition("/")
    stray = WorkspacePath(f"{above}/{intent.details[TEMPORARY]}" if above else intent.details[TEMPORARY])
    with suppress(OSError):  # gone, or not to be had: it is looked for again by the next session
        place = workspace.locate(stray, follow=False)
        if place is None:
            return
        with place:
            if place.found is not None and stat.S_ISREG(place.found.st_mode):
                trail.event("remove_temporary", {"session": intent.session, "intent": intent.seq}, path=stray)
                place.check()
                os.unlink(place.name, dir_fd=place.directory)
