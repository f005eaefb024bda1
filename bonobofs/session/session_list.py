"""List the sessions and their states, from the register, the process table and the mount table.

No function here reads from a mount: a mount whose server hangs would hang the reader.
"""

from __future__ import annotations

import enum
import errno
import json
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.errors import MountError, StateError, TrailError, UsageError, reason
from bonobofs.state import project_policies
from bonobofs.state.home import GUARD_SOCKET, inside_directory, session_directory, trail_path
from bonobofs.state.sessions import PARTLY, WATCHING, Session, lives, read_all, read_live
from bonobofs.system import mounts
from bonobofs.system.paths import is_within
from bonobofs.system.processes import is_stopped, is_zombie, send

SECONDS_TO_SETTLE = 2.0


class SessionState(enum.StrEnum):
    """State of a session."""

    SERVING = "serving"
    STOPPED = "stopped"
    """A signal has stopped its server: every request to the mount waits."""
    SOURCE_REMOVED = "source removed"
    """Its source was removed, renamed or replaced: the mount still shows the old directory."""
    ENDING = "ending"
    """Its mount is gone; its server still completes the record."""
    DEAD = "dead"
    """Its server is gone; calls in its mount fail, or hang until `umount`."""
    CRASHED = "crashed"
    """Server and mount are gone, and its trail has no closing entry."""
    ENDED = "ended"


SERVED: Final = frozenset({SessionState.SERVING, SessionState.STOPPED, SessionState.SOURCE_REMOVED})
"""States with a server and a mount."""


class SessionStatus(NamedTuple):
    """A session and its state."""

    session: Session
    """Its `policy` is the last one in force."""
    state: SessionState
    watch: str | None = None
    """`watching`, or why external changes are found by polling once a second; None if it is not served."""
    policy_error: str | None = None
    """Why the current policy file is not in force."""
    leases: str | None = None
    """Why the leases are unknown, so that every change of the source is refused."""
    caches: str | None = None
    """Why kernel caching is off and cached data may be stale."""
    observes: bool = False
    """Changes that its rules refuse are made and recorded."""
    images: tuple[int, int] | None = None
    """Bytes of all pre-images, and their limit."""
    unreadable: str | None = None
    """Why its live.json cannot be read. If it cannot, the fields above have their values at the session's start."""

    @property
    def unwatched(self) -> str:
        """Return what `status` and `doctor` print if the source is not fully watched, else ""."""
        if self.watch in (None, WATCHING):
            return ""
        if self.watch.startswith(PARTLY):
            return "its source is watched only in part"
        return "its source is not watched"


def statuses(home: Path, *, include_ended: bool = False) -> list[SessionStatus]:
    """Return the readable sessions that have not ended, oldest first; with `include_ended`, all."""
    sessions, _ = read_all(home)
    mounted = {str(mount.mountpoint) for mount in mounts.bonobofs_mounts()}
    # A mountpoint belongs to its live session; mounts below that one are hidden.
    taken = {session.mountpoint for session in sessions if lives(session)}
    # A dead mount belongs to the last session, which may have closed its trail: its connection was aborted.
    dead_mounts: dict[str | None, Session] = {
        session.mountpoint: session for session in sessions if session.mountpoint in mounted - taken
    }
    entries = [_status(home, session, _state(home, session, mounted, dead_mounts)) for session in sessions]
    return [status for status in entries if include_ended or status.state is not SessionState.ENDED]


def _status(home: Path, session: Session, state: SessionState) -> SessionStatus:
    try:
        live = read_live(session_directory(home, session.session))
    except (OSError, StateError) as error:
        if state not in SERVED:
            return SessionStatus(session, state)  # a power loss may damage it
        return SessionStatus(session, state, unreadable=f"its live.json cannot be read: {reason(error)}")
    if live is None:
        return SessionStatus(session, state)
    session = session._replace(policy=live.policy)
    if state not in SERVED:
        return SessionStatus(session, state)
    states = live.watch, live.policy_error, live.leases, live.caches
    return SessionStatus(session, state, *states, observes=live.observes, images=live.images)


def session_around(home: Path, path: Path) -> SessionStatus | None:
    """Return the served session whose mount, or else whose source, contains the path; of several, the newest.

    StateError: the path is in a mount whose session cannot be read.
    """
    serving = [entry for entry in statuses(home) if entry.state in SERVED]
    for side in ("mountpoint", "source"):
        for entry in reversed(serving):
            root = getattr(entry.session, side)
            if root is not None and is_within(path, root):
                return entry
        if side == "mountpoint" and any(is_within(path, mount.mountpoint) for mount in mounts.bonobofs_mounts()):
            for error in unreadable(home).values():
                raise StateError(f"{path} is in a mount whose session cannot be read: {error}")
    return None


def root_around(home: Path, path: Path) -> Path:
    """Return the root of the workspace around a path; by default the working directory.

    It is the mount or source of a served session, else the innermost source that had a session or has a policy.
    StateError, PolicyError.
    """
    entry = session_around(home, path)
    if entry is not None:
        mountpoint = entry.session.mountpoint
        return Path(mountpoint if mountpoint is not None and is_within(path, mountpoint) else entry.session.source)
    sources = {session.source for session in read_all(home)[0]}
    for above in (path, *path.parents):
        if str(above) in sources or project_policies.is_known(home, above):
            return above
    return Path.cwd()


def check_workspace(directory: Path) -> Path:
    """Return the directory. UsageError: it is no directory. A path in a mount is not read."""
    if mounts.mount_around(directory) is None and not directory.is_dir():
        raise UsageError(f"the workspace {directory} is not a directory; name the directory of the source")
    return directory


def unreadable(home: Path) -> dict[str, StateError]:
    """Return the error of each registered session that cannot be read, by UUID."""
    return read_all(home)[1]


def mount_around(home: Path, path: Path) -> Session | None:
    """Return the served session in whose mount a path lies; commands there act as its agent."""
    entry = session_around(home, path)
    if entry is None or entry.session.mountpoint is None or not is_within(path, entry.session.mountpoint):
        return None
    return entry.session


def was_closed(home: Path, session: Session) -> bool:
    """Return True if the last entry of the trail is the closing entry."""
    from bonobofs.audit.reader import is_closed  # noqa: PLC0415 - few commands read a trail

    try:
        return is_closed(trail_path(home, session.session))
    except TrailError:
        return False


def flush_servers(home: Path, sessions: Iterable[Session] | None = None) -> None:
    """Have the servers of these sessions, by default all, write their queued entries, and wait for their answers.

    A server answers by renewing the mtime of `settled` in its session's directory. A server that has not answered after
    two seconds is skipped. Its earlier entries can be read.
    """
    servers = []
    for session in read_all(home)[0] if sessions is None else sessions:
        if session.pid is None or session.starttime is None or session.mountpoint is None or not lives(session):
            continue
        mark = session_directory(home, session.session) / "settled"
        before = _renewed(mark)
        if send(session.pid, session.starttime, signal.SIGUSR1):
            servers.append((mark, before))
    deadline = time.monotonic() + SECONDS_TO_SETTLE
    for mark, before in servers:
        while _renewed(mark) == before and time.monotonic() < deadline:
            time.sleep(0.002)


def _renewed(mark: Path) -> int:
    try:
        return mark.stat().st_mtime_ns
    except OSError:
        return 0


def _has_source(session: Session) -> bool:
    """Return True if the source is still the directory that was mounted."""
    if mounts.mount_around(Path(session.source)) is not None:
        return True  # a stat would access the mount, which can hang
    try:
        st = os.stat(session.source)
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR)
    return session.source_inode in (None, st.st_ino)


def _state(home: Path, session: Session, mounted: set[str], dead_mounts: dict[str | None, Session]) -> SessionState:
    if session.ended is not None:
        return SessionState.ENDED
    if lives(session):
        if session.mountpoint is None:
            return SessionState.SERVING
        if session.mountpoint not in mounted:
            return SessionState.ENDING
        if session.pid is not None and is_stopped(session.pid):
            return SessionState.STOPPED
        if session.pid is not None and is_zombie(session.pid):
            return SessionState.DEAD
        return SessionState.SERVING if _has_source(session) else SessionState.SOURCE_REMOVED
    if dead_mounts.get(session.mountpoint) is session:
        return SessionState.DEAD
    return SessionState.ENDED if was_closed(home, session) else SessionState.CRASHED


class CallableSession(NamedTuple):
    """A session that this process may call through its socket."""

    directory: Path
    """Directory of its guard.sock and bin."""
    mountpoint: Path
    session: str
    agent_id: str
    role: str
    source: str
    issue: str | None = None
    """Issue of its worktree, if this state directory has the session."""


def callable_session(home: Path, path: Path) -> CallableSession | None:
    """Return the session in whose mount a path lies; None outside a mount, or if the session does not admit this user.

    A mount from another state directory names its socket itself. MountError: the server of the mount is gone.
    """
    check_served(home, path)
    session = mount_around(home, path)
    if session is not None and session.mountpoint is not None:
        directory = inside_directory(home, session.session)
        identity = session.session, session.agent_id, session.role, session.source, session.issue
        return CallableSession(directory, Path(session.mountpoint), *identity)
    return session_of_mount(path)


def session_of_mount(path: Path) -> CallableSession | None:
    """Return the session that the mount around a path names in `.bonobofs/whoami.json`; None as for `callable_session`.

    The name is trusted if root or this user made the mount and owns the socket's directory. Neither the environment nor
    a state directory is read.
    """
    mount = mounts.mount_around(path)
    if mount is None or mount.owner not in (0, os.geteuid()):
        return None
    try:
        who: dict[str, Any] = json.loads((mount.mountpoint / ".bonobofs/whoami.json").read_bytes())
        socket = Path(who["socket"])
        owners = {socket.parent.stat().st_uid, socket.parent.parent.stat().st_uid}
    except (OSError, ValueError, KeyError):
        return None
    if owners != {mount.owner} or socket.name != GUARD_SOCKET or not os.access(socket, os.W_OK):
        return None
    return CallableSession(socket.parent, mount.mountpoint, who["session"], who["agent_id"], who["role"], who["source"])


def check_served(home: Path, path: Path) -> None:
    """Raise MountError if the path is in a mount whose server is gone."""
    mount = mounts.mount_around(path)
    if mount is None:
        return
    dead = [entry.session for entry in statuses(home) if entry.state is SessionState.DEAD]
    for session in dead:
        if session.mountpoint is not None and is_within(mount.mountpoint, session.mountpoint):
            raise MountError(
                f"the server of the mount on {mount.mountpoint} is gone, so nothing in it answers; mount again: "
                f"bonobofs mount {session.source} {mount.mountpoint}; or unmount: bonobofs umount {mount.mountpoint}"
            )
    try:
        os.stat(mount.mountpoint)
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            raise MountError(
                f"the server of the mount on {mount.mountpoint} is gone, so nothing in it answers; ask the operator "
                "to mount it again"
            ) from None
