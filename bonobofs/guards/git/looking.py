"""What a repository looks like now: status and diff. Nothing is changed, and no index refreshed."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pygit2
from pygit2.enums import FileStatus

from bonobofs.errors import GitError
from bonobofs.guards.git.index import Index
from bonobofs.guards.git.judging import named
from bonobofs.guards.git.modes import SUBMODULE
from bonobofs.guards.git.repository import Blob, Repository
from bonobofs.guards.git.worktree import WorkTree

_STAGED: Final = (
    FileStatus.INDEX_NEW
    | FileStatus.INDEX_MODIFIED
    | FileStatus.INDEX_DELETED
    | FileStatus.INDEX_RENAMED
    | FileStatus.INDEX_TYPECHANGE
)
_MODIFIED: Final = (
    FileStatus.WT_MODIFIED
    | FileStatus.WT_DELETED
    | FileStatus.WT_TYPECHANGE
    | FileStatus.WT_RENAMED
    | FileStatus.WT_UNREADABLE
    | FileStatus.CONFLICTED
)

_RULES: Final = frozenset({".gitignore", ".gitattributes"})


@dataclass(frozen=True)
class GitStatus:
    """What `git status` would show."""

    branch: str
    """"" where HEAD is detached."""
    clean: bool
    """Nothing is staged or modified; untracked files do not count."""
    staged: list[str]
    modified: list[str]
    """Changed or deleted in the working tree, or in conflict."""
    untracked: list[str]
    """Each file, none that is ignored."""


def status(repository: Repository) -> GitStatus:
    """What libgit2 sees of it. GitError: something lies there that it would wait for."""
    check_rules(repository.layout.root)
    found = repository.store.status(untracked_files="all")
    staged = sorted(path for path, flags in found.items() if flags & _STAGED)
    modified = sorted(path for path, flags in found.items() if flags & _MODIFIED)
    untracked = sorted(path for path, flags in found.items() if flags & FileStatus.WT_NEW)
    return GitStatus(repository.refs.head()[0], not (staged or modified), staged, modified, untracked)


def check_rules(top: Path) -> None:
    """GitError: what says which files are ignored, or how they are converted, is no file, so that it cannot be read.

    libgit2 opens whatever lies there, and waits for ever for somebody to write to a FIFO.
    """
    for directory, names, files in os.walk(top):
        if ".git" in names:
            names.remove(".git")
        for name in _RULES.intersection(files):
            place = os.path.join(directory, name)
            try:
                kind = os.stat(place).st_mode
            except OSError:
                continue  # what leads nowhere says nothing
            if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
                path = os.path.relpath(place, top)
                raise GitError(f"{path} is no file; remove it", kind="unsupported", paths=(path,))


def diff(repository: Repository, tree: WorkTree, index: Index, written_ns: int, path: bytes | None) -> str:
    """The changes of tracked files since HEAD, staged or not, as a patch; of one file or all below one directory."""
    head = repository.tree_of(repository.refs.head()[1])
    wanted = {entry.path: Blob(entry.mode, entry.oid) for entry in index}
    before = dict(repository.walk(head))
    out: list[str] = []
    for name in sorted(before.keys() | wanted.keys()):
        if path is not None and name != path and not name.startswith(path.rstrip(b"/") + b"/"):
            continue
        old, entry = before.get(name), index.entries.get(name)
        staged = wanted.get(name)
        if SUBMODULE in (old.mode if old else 0, staged.mode if staged else 0):
            continue
        if entry is not None and (entry.skips_worktree or tree.is_unchanged(entry, written_ns)):
            new = staged
        elif entry is None:
            new = None
        else:
            found = tree.read(name, entry)
            new = None if found is None else Blob(found.mode, repository.id_of(found.content))
            if new is not None and new != old:
                out.append(_patch(repository, name, old, new, found.content if found is not None else b""))
                continue
        if new != old:
            out.append(_patch(repository, name, old, new, None))
    return "".join(out)


def _patch(repository: Repository, path: bytes, old: Blob | None, new: Blob | None, content: bytes | None) -> str:
    name = named(path)
    sides = [b"" if old is None else repository.blob(old.oid)]
    sides.append(content if content is not None else b"" if new is None else repository.blob(new.oid))
    head = f"diff --git a/{name} b/{name}\n"
    if old is None and new is not None:
        head += f"new file mode {new.mode:o}\n"
    elif new is None and old is not None:
        head += f"deleted file mode {old.mode:o}\n"
    elif old is not None and new is not None and old.mode != new.mode:
        head += f"old mode {old.mode:o}\nnew mode {new.mode:o}\n"
    if sides[0] == sides[1]:
        return head
    if any(b"\0" in side[:8000] for side in sides):
        return (
            head
            + f"Binary files {'/dev/null' if old is None else 'a/' + name} and "
            + (f"{'/dev/null' if new is None else 'b/' + name} differ\n")
        )
    # libgit2 sees two texts and no paths: no driver, no textconv.
    patch = pygit2.Patch.create_from(sides[0], sides[1], old_as_path="a", new_as_path="a")
    hunks = patch.data.decode("utf-8", "replace")
    hunks = hunks[hunks.index("\n@@") + 1 :] if "\n@@" in hunks else hunks
    names = f"--- {'/dev/null' if old is None else 'a/' + name}\n+++ {'/dev/null' if new is None else 'b/' + name}\n"
    return head + names + hunks
