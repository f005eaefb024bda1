"""Remove temporary names that a killed process left in the source.

To replace a file, bonobofs links the complete new file to a temporary sibling name, and renames that name over the old
file. If the process is killed between the two, the temporary name stays. The trail then has an intent that declares the
name, without a successful outcome. No other program uses the name, because it ends in 32 random digits.

An undo renames the old file to a temporary name. If another program has replaced the file in that moment, and the undo
is killed, the other program's file has the temporary name. It gets its name back.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from bonobofs.audit.entry import BY, INODE
from bonobofs.audit.reader import last
from bonobofs.audit.writer import Trail
from bonobofs.errors import TrailError
from bonobofs.state.home import trail_path
from bonobofs.state.sessions import read_all
from bonobofs.system.paths import open_directory_beneath, return_file
from bonobofs.system.processes import is_alive

REMOVE_STRAY: Final = "remove_temporary"
RETURN_FILE: Final = "return_file"
"""Operation of the event that a file of another program gets back the name that an undo took from it."""
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
    name: str
    """Last part of the path that the change replaces or removes."""
    inodes: Sequence[int]
    """Inode numbers of the files that may be removed; empty: the intent does not declare them."""

    @classmethod
    def of(cls, path: str, session: str, intent: int, details: Mapping[str, Any]) -> Self | None:
        """Return the temporary name that an intent declares; None: it declares none."""
        temporary, inodes = declared_temporary(path, details), details.get(INODE, [])
        if temporary is None:
            return None
        name = str(details.get("to", path)).rpartition("/")[2]
        return cls(temporary, session, intent, name, inodes if isinstance(inodes, list) else [inodes])


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

    Removes only files and symlinks with a declared inode number, on the file system of `root`, and follows no
    symlink. Another file returns to its name. The next session retries a failed removal. TrailError: a removal was not
    recorded, and not made.
    """
    for stray in strays:
        above, _, name = stray.path.rpartition("/")
        with suppress(OSError):
            directory = open_directory_beneath(root, above)
            try:
                st = os.stat(name, dir_fd=directory, follow_symlinks=False)
                is_of_file = stat.S_ISREG(st.st_mode) or stat.S_ISLNK(st.st_mode)
                if st.st_dev != os.fstat(root).st_dev or not (is_of_file or stray.inodes):
                    continue
                details = {"session": stray.session, "intent": stray.intent}
                if is_of_file and (not stray.inodes or st.st_ino in stray.inodes):
                    trail.event(REMOVE_STRAY, details, path=stray.path)
                    os.unlink(name, dir_fd=directory)
                else:
                    trail.event(RETURN_FILE, {**details, "to": stray.name}, path=stray.path)
                    return_file((directory, name.encode()), (directory, os.fsencode(stray.name)))
            finally:
                os.close(directory)


def _unfinished(trail: Path) -> Iterator[Stray]:
    try:
        entries = last(trail, _LOOKED_AT)
    except TrailError:
        return
    done = {entry.details.get("intent") for entry in entries if (entry.kind, entry.result) == ("outcome", "allowed")}
    for entry in entries:
        if entry.kind == "intent" and entry.seq not in done:
            stray = Stray.of(entry.path, entry.session, entry.seq, entry.details)
            if stray is not None:
                yield stray
