"""Where the scratch layer of a session lies, and how it is taken away.

`sessions/UUID/scratch` ends with the session; `sessions/UUID/kept` is one that was to be kept.
`sessions/UUID/repository` is the session's own `.git`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from pathlib import Path

from bonobofs.state.home import session_directory
from bonobofs.state.sessions import lives, read_all

NAME = "scratch"
KEPT = "kept"
REPOSITORY = "repository"
"""The session's own `.git`, before and after the mount; while it is mounted, the layer holds it as `.git`."""
_WALKED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make(directory: Path, *, keep: bool) -> Path:
    """An empty layer in a session's directory."""
    path = directory / (KEPT if keep else NAME)
    path.mkdir(mode=0o700)
    if (directory / REPOSITORY).exists():
        os.rename(directory / REPOSITORY, path / ".git")
    return path


def shows_repository(directory: Path) -> bool:
    """Whether the mount of the session in this directory shows the session's own `.git`."""
    return any((directory / layer / ".git").exists() for layer in (NAME, KEPT))


def end(directory: Path) -> None:
    """Take the layer in a session's directory away, unless it was to be kept.

    Where another process removes it, which may take minutes, this returns at once.
    """
    at = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(at, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for layer in (NAME, KEPT):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(directory / layer / ".git", directory / REPOSITORY)
            if (directory / NAME).exists():
                remove_tree(at, os.fsencode(NAME))
    finally:
        os.close(at)


def remove_tree(directory: int, name: bytes) -> None:
    """Remove the directory `name` and all that is in it, whatever the modes there, and however deep it is.

    What lies deeper is moved up to `name` itself first: neither the stack, nor descriptors, nor the length of a path
    limit the depth that an agent has reached.
    """
    os.chmod(name, 0o700, dir_fd=directory)
    top = os.open(name, _WALKED, dir_fd=directory)
    try:
        waiting: list[bytes] = []
        _empty(top, top, waiting)
        while waiting:
            each = waiting.pop()
            os.chmod(each, 0o700, dir_fd=top)  # an ordinary user's own directory may be closed to it
            fd = os.open(each, _WALKED, dir_fd=top)
            try:
                _empty(fd, top, waiting)
            finally:
                os.close(fd)
            os.rmdir(each, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=directory)


def _empty(fd: int, top: int, waiting: list[bytes]) -> None:
    """Remove what is in a directory; its own directories go to `top` and wait there."""
    with os.scandir(fd) as entries:
        found = [(os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_dir in found:
        if not is_dir:
            os.unlink(name, dir_fd=fd)
        elif fd == top:
            waiting.append(name)
        else:
            os.chmod(name, 0o700, dir_fd=fd)  # to move it is to write in it, for its `..`
            moved = os.fsencode(f".{secrets.token_hex(16)}")
            os.rename(name, moved, src_dir_fd=fd, dst_dir_fd=top)
            waiting.append(moved)


def remove_left_overs(home: Path) -> None:
    """Take away the layers of sessions that were killed."""
    for session in read_all(home)[0]:
        directory = session_directory(home, session.session)
        if ((directory / NAME).exists() or shows_repository(directory)) and not lives(session):
            end(directory)
