"""Names that a killed process left in the source, taken away by the next session.

A file that is whole comes onto a name that is taken by way of another name: a link to that, and a rename. In between
there is a moment in which the process may be killed. The intent of the change stands in its trail without a good
outcome, and states the name, which nobody else can have: it ends in 32 random digits.
"""

from __future__ import annotations

import os
import secrets
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
"""Entries at the end of a trail. Outcomes are written before the next change, so only the last can be without."""


class Stray(NamedTuple):
    """A name that may have been left, and the intent that states it."""

    path: str
    session: str
    intent: int
    inode: int | None
    """Number of the inode that the name was to lead to, where the intent states it."""


def stray_name() -> str:
    """A name that nobody has."""
    return _PREFIX + secrets.token_hex(_DIGITS // 2)


def is_stray_name(name: object) -> bool:
    """Whether `stray_name` could have given this."""
    if not isinstance(name, str) or not name.startswith(_PREFIX):
        return False
    digits = name.removeprefix(_PREFIX)
    return len(digits) == _DIGITS and set(digits) <= set("0123456789abcdef")


def by_way_of(path: str, details: Mapping[str, Any]) -> str | None:
    """The name, beside the one that an intent is to end at, by way of which it gets there; None: it states none."""
    name, to = details.get(BY), details.get("to")
    if not is_stray_name(name):
        return None
    above = (to if isinstance(to, str) else path).rpartition("/")[0]
    return f"{above}/{name}" if above else str(name)


def left_in(home: Path, source: Path) -> list[Stray]:
    """What the ended sessions of a source that can be read may have left there."""
    return [
        stray
        for session in read_all(home)[0]
        if session.source == str(source) and not is_alive(session.pid, session.starttime)
        for stray in _unfinished(trail_path(home, session.session))
    ]


def remove(root: int, trail: Trail, strays: Iterable[Stray]) -> None:
    """Take away what is still there below the directory `root`, each entered in `trail` first.

    Only a file or a symlink that is the one meant, reached without a symlink and on the file system of `root`. What
    cannot be had is looked for again by the next session. TrailError: nothing was removed that is not entered.
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


def _is_meant(found: os.stat_result, root: os.stat_result, stray: Stray) -> bool:
    kind = stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)
    return kind and found.st_dev == root.st_dev and stray.inode in (None, found.st_ino)


def _unfinished(trail: Path) -> Iterator[Stray]:
    try:
        entries = last(trail, _LOOKED_AT)
    except TrailError:
        return
    done = {entry.details.get("intent") for entry in entries if (entry.kind, entry.result) == ("outcome", "allowed")}
    for entry in entries:
        path = by_way_of(entry.path, entry.details) if entry.kind == "intent" and entry.seq not in done else None
        if path is not None:
            inode = entry.details.get(INODE)
            yield Stray(path, entry.session, entry.seq, inode if isinstance(inode, int) else None)
