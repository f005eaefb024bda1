"""Which paths a repository tracks. Nothing is changed, and nothing that the repository names is run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pygit2

from bonobofs.errors import GitError
from bonobofs.guards.git.index import Index
from bonobofs.guards.git.modes import SUBMODULE
from bonobofs.guards.git.repository import Repository, find


def tracked(root: Path, home: Path, wanted: Callable[[str], bool]) -> set[str]:
    """The wanted paths that the index or HEAD of the work tree `root` has; a submodule's ends in a slash. GitError."""
    repository = Repository(find(root, home))
    try:
        found = {path: blob.mode for path, blob in repository.walk(repository.tree_of(repository.refs.head()[1]))}
        index = repository.layout.git / "index"
        if index.exists():
            entries = Index.read(index.read_bytes(), 0)
            found.update({entry.path: entry.mode for entry in entries.unmerged})
            found.update({path: entries.entries[path].mode for path in entries.entries})
    except (OSError, pygit2.GitError) as error:
        raise GitError(f"the repository cannot be read: {error}", kind="unsupported") from error
    finally:
        repository.close()
    named = ((os.fsdecode(path), mode) for path, mode in found.items())
    return {f"{path}/" if mode == SUBMODULE else path for path, mode in named if wanted(path)}
