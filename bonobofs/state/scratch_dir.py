"""Where the scratch layer of a session lies, and how it is taken away.

`sessions/UUID/scratch` ends with the session; `sessions/UUID/kept` is one that was to be kept.
`sessions/UUID/repository` is the session's own `.git`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from bonobofs.state.home import session_directory
from bonobofs.state.sessions import lives, read_all
from bonobofs.system.locks import lock, never
from bonobofs.system.paths import remove_tree

NAME = "scratch"
KEPT = "kept"
REPOSITORY = "repository"
"""The session's own `.git`, before and after the mount; while it is mounted, the layer holds it as `.git`."""


def create(directory: Path, *, keep: bool) -> Path:
    """An empty layer in a session's directory."""
    path = directory / (KEPT if keep else NAME)
    path.mkdir(mode=0o700)
    if (directory / REPOSITORY).exists():
        os.rename(directory / REPOSITORY, path / ".git")
    return path


def shows_repository(directory: Path) -> bool:
    """Whether the mount of the session in this directory shows the session's own `.git`."""
    return any((directory / layer / ".git").exists() for layer in (NAME, KEPT))


def remove(directory: Path) -> None:
    """Take the layer in a session's directory away, unless it was to be kept.

    Where another process removes it, which may take minutes, this returns at once.
    """
    at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(BlockingIOError):
            lock(at, retry=never)
            for layer in (NAME, KEPT):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(directory / layer / ".git", directory / REPOSITORY)
            if (directory / NAME).exists():
                remove_tree(at, os.fsencode(NAME))
    finally:
        os.close(at)


def remove_stale(home: Path) -> None:
    """Take away the layers of sessions that were killed."""
    for session in read_all(home)[0]:
        directory = session_directory(home, session.session)
        if ((directory / NAME).exists() or shows_repository(directory)) and not lives(session):
            remove(directory)
