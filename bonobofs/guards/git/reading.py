"""Looking at a repository without a session: status and diff, which anybody may ask."""

from __future__ import annotations

import os
from pathlib import Path

from bonobofs.guards.beneath import Workspace
from bonobofs.guards.git import looking
from bonobofs.guards.git.index import Index
from bonobofs.guards.git.looking import GitStatus
from bonobofs.guards.git.repository import Repository, find
from bonobofs.guards.git.worktree import WorkTree


def status_of(root: Path, home: Path) -> GitStatus:
    """What is staged, modified and untracked in the repository at `root`. GitError."""
    repository = Repository(find(root, home))
    try:
        return looking.status(repository)
    finally:
        repository.close()


def diff_of(root: Path, home: Path, path: str | None, workspace: Workspace | None = None) -> str:
    """The changes of tracked files since HEAD, as a patch; of all, or of a file or directory. GitError."""
    repository = Repository(find(root, home))
    try:
        index, written = _index(repository.layout.git / "index")
        with WorkTree(workspace or Workspace(root), repository) as tree:
            tree.follow(index)
            return looking.diff(repository, tree, index, written, None if path is None else os.fsencode(path))
    finally:
        repository.close()


def _index(place: Path) -> tuple[Index, int]:
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return Index(), 0
    with os.fdopen(descriptor, "rb") as file:
        written = os.fstat(descriptor).st_mtime_ns
        return Index.read(file.read(), written), written
