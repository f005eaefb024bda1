"""Unmount: detach the mount, wait for its server, and close its record."""

from __future__ import annotations

import errno
import signal
import time
from pathlib import Path
from typing import NamedTuple

from bonobofs.errors import MountError
from bonobofs.git.session_repository import Kept, keep_ended
from bonobofs.session import launcher
from bonobofs.session.session_list import was_closed
from bonobofs.state import scratch_dir
from bonobofs.state.home import session_directory
from bonobofs.state.sessions import Session, live_at, lives, note_ends, read_all, read_live
from bonobofs.system import mounts, processes

SECONDS_TO_SETTLE = 60.0
_SECONDS_TO_LEAVE = 1.0
"""Seconds for the processes in the mount to end: a command that has ended may have left a child that is ending."""
_SECONDS_TO_END = 1.0
"""Seconds for a server to end after its mount is gone."""
_SECONDS_TO_REMOVE = 5.0
"""Seconds to wait for a server that has closed its record and removes its scratch layer."""
_NAMED = 5


class Unmounted(NamedTuple):
    """Result of `unmount_session`."""

    live: bool
    """A served mount was unmounted."""
    dead: int
    """Number of dead mounts that were unmounted."""
    closed: bool
    """The trail has its closing entry, as far as this state directory has the trail."""
    copies: tuple[str, ...] = ()
    """Remaining dead copies of the mount: other mountpoints, and processes of other namespaces."""
    remover: int | None = None
    """Pid of the server if it still removes its scratch layer; its record is closed."""
    kept: tuple[Kept, ...] = ()
    """Repositories of ended sessions with work that the source lacks."""


def unmount_session(home: Path, mountpoint: Path) -> Unmounted:
    """Unmount, wait until the record is complete, and detach every dead mount on this path.

    Raises MountError if no mount of bonobofs is there, if it is in use, or if the server does not end.
    """
    path = mounts.resolve(mountpoint)
    count = len(mounts.at(path))
    session = live_at(home, path)
    if not count and session is None:
        over = _note_ends(home, path)
        if over:
            return Unmounted(live=False, dead=0, closed=all(was_closed(home, one) for one in over))
        raise MountError(f"nothing of bonobofs is mounted on {path}; bonobofs status lists the mounts")
    live = closed = True
    copies: tuple[str, ...] = ()
    remover = None
    if session is not None:
        there = mounts.at(path)[-1:]
        if session.pid is not None and processes.is_zombie(session.pid):
            _abort(home, session, path)
        if there:
            _unmount(path)
        closed = _wait(home, session, path)
        remover = session.pid if processes.is_alive(session.pid, session.starttime) else None
        copies = tuple(copy for mount in there for copy in mounts.copies_of(mount))
    elif not launcher.is_dead(str(path)):
        # It is served from another state directory: unmount it without force.
        _unmount(path)
    else:
        live = False
    dead = detach_all(path)
    _note_ends(home, path)
    scratch_dir.remove_stale(home)
    kept = tuple(keep_ended(home))
    from bonobofs.session.retention import compress_ended  # noqa: PLC0415 - a mount does not need it

    compress_ended(home)
    return Unmounted(live, dead, closed, copies, remover, kept)


def detach_all(mountpoint: Path, *, remaining: int = 0) -> int:
    """Detach dead mounts from this path until `remaining` are left; return how many."""
    taken = 0
    while len(mounts.at(mountpoint)) > remaining:
        mounts.detach(mountpoint, lazy=True)
        taken += 1
    return taken


def _abort(home: Path, session: Session, path: Path) -> None:
    """End the FUSE connection of a killed server of which a thread is blocked. MountError."""
    live = read_live(session_directory(home, session.session))
    try:
        if live is not None and live.device:
            mounts.abort_connection(live.device)
    except OSError as error:
        raise MountError(
            f"the server of {path} was killed, and programs wait for it; this user cannot end the FUSE connection "
            f"({error.strerror}); as root: umount -f {path}"
        ) from error


def _unmount(path: Path) -> None:
    deadline = time.monotonic() + _SECONDS_TO_LEAVE
    while True:
        try:
            return mounts.detach(path)
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            holders = processes.users_of(path)
            if time.monotonic() > deadline:
                named = ", ".join(map(str, holders[:_NAMED])) or "processes that this user may not see"
                more = f" and {len(holders) - _NAMED} more" if len(holders) > _NAMED else ""
                raise MountError(
                    f"{path} is in use by {named}{more}; end their use of it, then run this again"
                ) from error
        for holder in holders:
            started = processes.start_time(holder.pid)
            if started is not None:
                processes.wait_for_end(holder.pid, started, max(0.0, deadline - time.monotonic()))


def _wait(home: Path, session: Session, path: Path) -> bool:
    """Wait until the server has ended, or has closed its record and still removes its scratch layer."""
    if session.pid is None or session.starttime is None:
        return True
    deadline = time.monotonic() + SECONDS_TO_SETTLE
    signalled = False
    while not processes.wait_for_end(session.pid, session.starttime, _SECONDS_TO_END):
        if was_closed(home, session):
            if not processes.wait_for_end(session.pid, session.starttime, _SECONDS_TO_REMOVE):
                _note(home, path, [session.session])
            return True
        if not signalled:
            # A copy of the mount, here or in another namespace, keeps the connection: SIGTERM ends it after LINGER.
            signalled = True
            for number in (signal.SIGTERM, signal.SIGCONT):
                processes.send(session.pid, session.starttime, number)
        if time.monotonic() > deadline:
            raise MountError(
                f"{path} is unmounted, but its server (pid {session.pid}) has not completed its record; run this again"
            )
    return was_closed(home, session)


def _note_ends(home: Path, path: Path) -> list[Session]:
    """Record the end of each crashed session of this mountpoint, and return these sessions."""
    over = [one for one in read_all(home)[0] if one.mountpoint == str(path) and one.ended is None and not lives(one)]
    _note(home, path, [one.session for one in over])
    return over


def _note(home: Path, path: Path, names: list[str]) -> None:
    try:
        note_ends(home, names)
    except OSError as error:
        raise MountError(
            f"{path} is unmounted, but the end of the session cannot be recorded in {home}: {error.strerror}; remove "
            "the cause, such as a full disk, and run this again"
        ) from error
