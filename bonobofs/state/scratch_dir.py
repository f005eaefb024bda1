"""Create and remove the scratch layer of a session.

`sessions/UUID/scratch` is removed with the session, `sessions/UUID/kept` (`--keep-scratch`) is not.
`sessions/UUID/repository` is the session's own `.git`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from bonobofs.state.home import session_directory
from bonobofs.state.sessions import lives, read_all
from bonobofs.system.locks import lock, try_once
from bonobofs.system.paths import remove_tree

NAME = "scratch"
KEPT = "kept"
REPOSITORY = "repository"
"""The session's own `.git` before and after the mount. During the mount it is `.git` of the layer."""


def create(directory: Path, *, keep: bool) -> Path:
    """Create an empty layer in a session's directory."""
    path = directory / (KEPT if keep else NAME)
    path.mkdir(mode=0o700)
    if (directory / REPOSITORY).exists():
        os.rename(directory / REPOSITORY, path / ".git")
    return path


def shows_repository(directory: Path) -> bool:
    """Return whether the mount of this session shows the session's own `.git`."""
    return any(os.path.exists(f"{directory}/{layer}/.git") for layer in (NAME, KEPT))


def remove(directory: Path) -> None:
    """Remove the layer of a session, except `kept`.

    Returns at once if another process is removing it, which may take minutes.
    """
    at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(BlockingIOError):
            lock(at, retry=try_once)
            for layer in (NAME, KEPT):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(directory / layer / ".git", directory / REPOSITORY)
            if (directory / NAME).exists():
                remove_tree(at, os.fsencode(NAME))
    finally:
        os.close(at)


def remove_stale(home: Path) -> None:
    """Remove the layers of killed sessions."""
    for session in read_all(home)[0]:
        directory = session_directory(home, session.session)
        if (os.path.exists(f"{directory}/{NAME}") or shows_repository(directory)) and not lives(session):
            remove(directory)
