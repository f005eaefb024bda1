"""`why`: explain the decision on a planned change. A mount's server decides about the mount and its source."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

from bonobofs.errors import BonobofsError, UsageError
from bonobofs.ipc.client import SOCKET_VARIABLE, call
from bonobofs.policy.request import (
    PlannedChange,
)
from bonobofs.session.session_list import SessionStatus, callable_session, check_workspace, root_around, session_around
from bonobofs.state.home import inside_directory
from bonobofs.state.sessions import Session
from bonobofs.system import mounts

WHY: Final = "user.bonobofs.why"


def explain(home: Path, change: PlannedChange, workspace: Path | None = None) -> dict[str, Any]:
    """Decide on a change; return a document in the schema of decisions.

    Both names of a rename or link are judged, and for a directory all names below it. The paths are relative to
    `workspace`. Its default is `root_around` the path. In a session its own policy and role apply, elsewhere the policy
    that `mount` would choose. Raises UsageError, PolicyError, MountError, StateError.
    """
    base = Path.cwd() if workspace is None else check_workspace(Path(os.path.realpath(workspace)))
    # Textual only: resolving symlinks would access a mount, and the engine judges `..` unresolved.
    path = Path(os.path.normpath(base / change.path))
    to = None if change.to is None else os.path.join(base, change.to)
    around = session_around(home, path)
    failure = "cannot be called (see bonobofs status)"
    if around is None or not _is_git_of_source(path, around.session):
        planned = change._replace(path=os.path.join(base, change.path), to=to)
        try:
            answer = _explain_by_session(home, path, around, planned)
        except OSError as error:
            answer, failure = None, f"cannot look up {path}: {error.strerror}"
        if answer is not None:
            return answer
    mount = mounts.mount_around(path)
    if mount is not None:
        return _explain_by_attribute(path, mount, failure, plain=change == PlannedChange(change.path))
    if workspace is None and around is None and SOCKET_VARIABLE in os.environ:
        here: dict[str, Any] = call(None, "why", **change._asdict())
        return here
    root = base if workspace is not None else root_around(home, path)
    root = root if around is None else Path(around.session.source)
    from bonobofs.session.files_explanation import explain_files  # noqa: PLC0415 - loads the policy engine

    return explain_files(home, root, base, change, None if around is None else around.session)


def _is_git_of_source(path: Path, registered: Session) -> bool:
    """Whether the path is in the source's `.git`. The session has a `.git` of its own at the same path of the mount."""
    mountpoint = registered.mountpoint
    if mountpoint is not None and path.is_relative_to(mountpoint):
        return False
    return path.is_relative_to(Path(registered.source) / ".git")


def _explain_by_session(
    home: Path, path: Path, around: SessionStatus | None, change: PlannedChange
) -> dict[str, Any] | None:
    """Ask the session of a mount or its source. None: the path is in neither, or the session cannot be called.

    OSError: the session answers that it cannot look up the path.
    """
    if around is not None and around.session.mountpoint is not None:
        directory = inside_directory(home, around.session.session)
    elif (called := callable_session(home, path)) is not None:
        directory = called.directory
    else:
        return None
    try:
        answer: dict[str, Any] = call(directory, "why", **change._asdict())
    except UsageError:
        raise
    except BonobofsError:
        return None
    return answer


def _explain_by_attribute(path: Path, mount: mounts.Mount, failure: str, *, plain: bool) -> dict[str, Any]:
    """Read the decision on writing a path from the attribute of the path, else of its directory.

    UsageError: they have none; the message has the `failure` of the session.
    """
    for owner, name in ((path, WHY), (path.parent, f"{WHY}.{path.name}")) if plain else ():
        try:
            answer: dict[str, Any] = json.loads(os.getxattr(owner, name))
        except (OSError, ValueError):
            continue
        return answer
    raise UsageError(
        f"the session of {mount.mountpoint} {failure}, so only the decision on writing in an existing directory is "
        f"known, without options; {mount.mountpoint}/.bonobofs/policy.md has the rules"
    )
