"""When a git gate was last at work on a repository: the locks that it takes change `.git`, and have no intent.

An operation holds flock on the directory that worktrees share, and touches a mark in the state directory at its end.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def mark(home: Path, common: int) -> Path:
    """The mark of the repository that this descriptor leads to; its directory is made. OSError."""
    status = os.fstat(common)
    directory = home / "git" / "marks"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return directory / f"{status.st_dev:x}-{status.st_ino:x}"


def leave(home: Path, common: int) -> None:
    """The operation that holds this repository is over. OSError."""
    os.close(os.open(path := mark(home, common), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    os.utime(path)


def was_at_work(home: Path, git: Path, since: float) -> bool:
    """Whether an operation on this `.git` goes on, or has ended since that moment. OSError: it is no directory."""
    common = os.open(git, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(common, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        try:
            return mark(home, common).stat().st_mtime >= since
        except FileNotFoundError:
            return False
    finally:
        os.close(common)
