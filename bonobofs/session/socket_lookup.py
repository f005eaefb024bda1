"""Which session a command calls: that of the mount around it, whether or not this user can read its state directory."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from bonobofs.errors import MountError
from bonobofs.session.session_list import State, lies_in, mounted_around, statuses
from bonobofs.state.home import GUARD_SOCKET, inside_directory
from bonobofs.system import mounts


class CallableSession(NamedTuple):
    """A session that this process may call."""

    directory: Path
    """Holds its guard.sock and bin."""
    mountpoint: Path
    session: str
    agent_id: str
    role: str
    source: str
    issue: str | None = None
    """The issue of its worktree, as far as this state directory knows the session."""


def callable_around(home: Path, path: Path) -> CallableSession | None:
    """The session in whose mount a path lies; None outside any mount, and in one whose session admits other users only.

    A mount from another state directory names its socket in `.bonobofs/whoami.json`. That is believed where root or
    this user made the mount and owns the directory of the socket. MountError: the server of the mount is gone.
    """
    check_served(home, path)
    made = mounted_around(home, path)
    if made is not None and made.mountpoint is not None:
        directory = inside_directory(home, made.session)
        return CallableSession(
            directory, Path(made.mountpoint), made.session, made.agent_id, made.role, made.source, made.issue
        )
    around = mounts.over(path)
    if around is None or around.owner not in (0, os.geteuid()):
        return None
    try:
        who: dict[str, Any] = json.loads((around.mountpoint / ".bonobofs/whoami.json").read_bytes())
        socket = Path(who["socket"])
        owners = {socket.parent.stat().st_uid, socket.parent.parent.stat().st_uid}
    except (OSError, ValueError, KeyError):
        return None
    if owners != {around.owner} or socket.name != GUARD_SOCKET or not os.access(socket, os.W_OK):
        return None
    return CallableSession(
        socket.parent, around.mountpoint, who["session"], who["agent_id"], who["role"], who["source"]
    )


def check_served(home: Path, path: Path) -> None:
    """MountError where a path lies in a mount whose server is gone."""
    around = mounts.over(path)
    if around is None:
        return
    dead = [one.session for one in statuses(home) if one.state is State.DEAD]
    for session in dead:
        if lies_in(around.mountpoint, session.mountpoint):
            raise MountError(
                f"the server of the mount on {around.mountpoint} is gone, so nothing in it answers; mount again: "
                f"bonobofs mount {session.source} {around.mountpoint}; or unmount: bonobofs umount {around.mountpoint}"
            )
    try:
        os.stat(around.mountpoint)
    except OSError as error:
        if error.errno == errno.ENOTCONN:
            raise MountError(
                f"the server of the mount on {around.mountpoint} is gone, so nothing in it answers; ask the operator "
                "to mount it again"
            ) from None
