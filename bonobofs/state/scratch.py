"""Where the scratch layer of a session lies, and how it is taken away.

`sessions/UUID/scratch` ends with the session; `sessions/UUID/kept` is one that was to be kept.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from bonobofs.state.home import session_directory
from bonobofs.state.sessions import lives, load_all

NAME = "scratch"
KEPT = "kept"


def make(directory: Path, *, keep: bool) -> Path:
    """An empty layer in a session's directory."""
    path = directory / (KEPT if keep else NAME)
    path.mkdir(mode=0o700)
    return path


def end(directory: Path) -> None:
    """Take the layer in a session's directory away, unless it was to be kept."""
    if (directory / NAME).exists():
        _remove(directory / NAME)


def _remove(path: Path) -> None:
    """Take a layer away, whatever the modes of what lies in it."""
    try:
        shutil.rmtree(path)
    except PermissionError:
        _open_up(path)
        shutil.rmtree(path)


def _open_up(path: Path) -> None:
    """Let an ordinary user into its own directories."""
    waiting = [str(path)]
    while waiting:
        directory = waiting.pop()
        os.chmod(directory, 0o700)
        with os.scandir(directory) as entries:
            waiting += [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]


def remove_left_overs(home: Path) -> None:
    """Take away the layers of sessions that were killed."""
    for session in load_all(home):
        directory = session_directory(home, session.session)
        if (directory / NAME).exists() and not lives(session):
            end(directory)
