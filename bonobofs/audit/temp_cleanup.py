"""Remove temporary names that a killed process left in the source.

To replace a file, bonobofs links the complete new file to a temporary sibling name, and renames that name over the old
file. If the process is killed between the two, the temporary name stays. The trail then has an intent that declares the
name, without a successful outcome. No other program uses the name, because it ends in 32 random digits.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.audit.entry import BY, INODE
from bonobofs.audit.reader import last
from bonobofs.audit.writer import Trail
from bonobofs.errors import TrailError
from bonobofs.state.home import trail_path
from bonobofs.state.sessions import read_all
from bonobofs.system.paths import open_directory_beneath
from bonobofs.system.processes import is_alive

REMOVE_STRAY: Final = "remove_temporary"
_PREFIX: Final = ".bonobofs-"
_DIGITS: Final = 32
_LOOKED_AT: Final = 64
"""Number of entries that are searched at the end of a trail: an outcome is written before the next change."""


_SESSIONS: Final = 8
"""Number of ended sessions of a source whose trails are searched again: a removal may have failed."""


class Stray(NamedTuple):
    """A temporary name that may exist, and the intent that declares it."""

    path: str
    session: str
    intent: int
    inode: int | None
    """Inode number of the file, if the intent declares it."""


def stray_name() -> str:
    """Return a new temporary name."""
    return _PREFIX + os.urandom(_DIGITS // 2).hex()


def is_stray_name(name: object) -> bool:
    """True if `name` has the form of a temporary name."""
    if not isinstance(name, str) or not name.startswith(_PREFIX):
        return False
    digits = name.removeprefix(_PREFIX)
    return len(digits) == _DIGITS and set(digits) <= set("0123456789abcdef")


def declared_temporary(path: str, details: Mapping[str, Any]) -> str | None:
    """Return the temporary sibling name that an intent declares, as a path, or None."""
    name, to = details.get(BY), details.get("to")
    if not is_stray_name(name):
        return None
    above = (to if isinstance(to, str) else path).rpartition("/")[0]
    return f"{above}/{name}" if above else str(name)


def strays_of(home: Path, source: Path) -> list[Stray]:
    """Return the temporary names that ended sessions of a source may have left there.

    The trails of the last _SESSIONS sessions are read, and those of all sessions whose end is not recorded yet: the
    cost of a mount must not grow with the number of earlier sessions.
    """
    over = [
        session
        for session in read_all(home)[0]
        if session.source == str(source) and not is_alive(session.pid, session.starttime)
    ]
    return [
        stray
        for index, session in enumerate(over)
        if session.ended is None or index >= len(over) - _SESSIONS
        for stray in _unfinished(trail_path(home, session.session))
    ]


def remove(root: int, trail: Trail, strays: Iterable[Stray]) -> None:
    """Remove the names that still exist below the directory `root`, after recording each removal in `trail`.

    Removes only files and symlinks with the declared inode number, on the file system of `root`, and follows no
    symlink. The next session retries a failed removal. TrailError: a removal was not recorded, and not made.
    """
    for stray in strays:
        above, _, name = stray.path.rpartition("/")
        with suppress(OSError):
            directory = open_directory_beneath(root, above)
            try:
                if _is_meant(os.stat(name, dir_fd=directory, follow_symlinks=False), os.fstat(root), stray):
                    details = {"session": stray.session, "intent": stray.intent}
                    trail.event(REMOVE_STRAY, details, path=stray.path)
                    os.unlink(name, dir_fd=directory)
            finally:
                os.close(directory)


def _is_meant(status: os.stat_result, root: os.stat_result, stray: Stray) -> bool:
    kind = stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)
    return kind and status.st_dev == root.st_dev and stray.inode in (None, status.st_ino)


def _unfinished(trail: Path) -> Iterator[Stray]:
    try:
        entries = last(trail, _LOOKED_AT)
    except TrailError:
        return
    done = {entry.details.get("intent") for entry in entries if (entry.kind, entry.result) == ("outcome", "allowed")}
    for entry in entries:
        path = (
            declared_temporary(entry.path, entry.details) if entry.kind == "intent" and entry.seq not in done else None
        )
        if path is not None:
            inode = entry.details.get(INODE)
            yield Stray(path, entry.session, entry.seq, inode if isinstance(inode, int) else None)
