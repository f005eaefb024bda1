"""The end of a mount: taken off, its server waited for, its record closed."""

from __future__ import annotations

import errno
import signal
import time
from pathlib import Path
from typing import NamedTuple

from bonobofs.errors import MountError
from bonobofs.git.session_repository import Kept, settle
from bonobofs.session import launcher
from bonobofs.session.retention import compress_ended
from bonobofs.session.session_list import was_closed
from bonobofs.state import scratch_dir
from bonobofs.state.sessions import Session, live_at, lives, note_ends, read_all
from bonobofs.system import mounts, processes

SECONDS_TO_SETTLE = 60.0
_SECONDS_TO_END = 1.0
"""Seconds in which a server whose mount is gone ends by itself."""
_SECONDS_TO_REMOVE = 5.0
"""Seconds for which a server that has closed its record is waited for while it removes its scratch layer."""
_NAMED = 5


class Unmounted(NamedTuple):
    """What `unmount_session` did."""

    live: bool
    """A mount that was served was taken off."""
    dead: int
    """Dead mounts that were taken off."""
    closed: bool
    """The record of what was ended has its closing entry, as far as it is kept here."""
    copies: tuple[str, ...] = ()
    """Where a copy of the mount is left, which is dead: other mountpoints, and processes of other namespaces."""
    remover: int | None = None
    """The server, where it still removes its scratch layer; its record is closed."""
    kept: tuple[Kept, ...] = ()
    """Repositories of sessions that have ended, with work that the source lacks."""


def unmount_session(home: Path, mountpoint: Path) -> Unmounted:
    """Unmount what is served there, wait until its record is settled, and take off every dead mount below it.

    Raises MountError when nothing of ours is mounted there, when it is in use, or when the server does not end.
    """
    path = mounts.resolve(mountpoint)
    count = len(mounts.at(path))
    session = live_at(home, path)
    if not count and session is None:
        over = _note_ends(home, path)
        if over:
            return Unmounted(live=False, dead=0, closed=all(was_closed(home, one) for one in over))
        raise MountError(f"nothing of bonobofs is mounted on {path}; bonobofs status lists what is")
    live = closed = True
    copies: tuple[str, ...] = ()
    remover = None
    if session is not None:
        there = mounts.at(path)[-1:]
        if there:
            _unmount(path)
        closed = _wait(home, session, path)
        remover = session.pid if processes.is_alive(session.pid, session.starttime) else None
        copies = tuple(copy for mount in there for copy in mounts.copies_of(mount))
    elif not launcher.is_dead(str(path)):
        # It is served from another state directory: ended like one of ours, and not by force.
        _unmount(path)
    else:
        live = False
    dead = detach_all(path)
    _note_ends(home, path)
    scratch_dir.remove_stale(home)
    kept = tuple(settle(home))
    compress_ended(home)
    return Unmounted(live, dead, closed, copies, remover, kept)


def detach_all(mountpoint: Path, *, permit: int = 0) -> int:
    """Take mounts off this path though they are in use, until `permit` are left, and say how many. For dead ones."""
    taken = 0
    while len(mounts.at(mountpoint)) > permit:
        mounts.detach(mountpoint, lazy=True)
        taken += 1
    return taken


def _unmount(path: Path) -> None:
    try:
        mounts.detach(path)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        holders = processes.users_of(path)
        named = ", ".join(str(process) for process in holders[:_NAMED]) or "processes that this user may not see"
        more = f" and {len(holders) - _NAMED} more" if len(holders) > _NAMED else ""
        raise MountError(f"{path} is in use by {named}{more}; let them leave it, then run this again") from error


def _wait(home: Path, session: Session, path: Path) -> bool:
    """Wait until the server has ended, or has closed its record and needs long to remove its scratch layer."""
    if session.pid is None or session.starttime is None:
        return True
    deadline = time.monotonic() + SECONDS_TO_SETTLE
    signalled = False
    while not processes.wait_for_end(session.pid, session.starttime, _SECONDS_TO_END):
        if was_closed(home, session):
            if not processes.wait_for_end(session.pid, session.starttime, _SECONDS_TO_REMOVE):
                note_ends(home, [session.session])
            return True
        if not signalled:
            # A copy of the mount, here or in another namespace, keeps the connection: SIGTERM ends it after LINGER.
            signalled = True
            for number in (signal.SIGTERM, signal.SIGCONT):
                processes.send(session.pid, session.starttime, number)
        if time.monotonic() > deadline:
            raise MountError(
                f"{path} is unmounted, but its server (pid {session.pid}) has not settled its record yet; wait for it"
            )
    return was_closed(home, session)


def _note_ends(home: Path, path: Path) -> list[Session]:
    """Note the end of each session there that ended without noting it, and return those sessions."""
    over = [one for one in read_all(home)[0] if one.mountpoint == str(path) and one.ended is None and not lives(one)]
    note_ends(home, [one.session for one in over])
    return over
