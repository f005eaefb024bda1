"""The register of the agents' worktrees: `worktrees/UUID/worktree.json` each, next to two directories.

tree  the work tree, which is the source of its mount
work  the mountpoint
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from bonobofs.errors import StateError
from bonobofs.state.home import read_document, write_document


@dataclasses.dataclass(frozen=True, slots=True)
class Worktree:
    """One worktree, from creation to removal. The field names are those of worktree.json."""

    worktree: str
    """UUID; also the name of its directory."""
    issue: str
    branch: str
    agent: str
    repository: str
    """Top directory of the main work tree of its repository."""
    common: str
    """The repository's common git directory: its `.git`."""
    name: str
    """Git's name for it: the directory in `common`/worktrees."""
    base: str
    """Commit at which its branch started."""
    made: str
    """UTC, ISO 8601."""
    ready: bool
    """False during creation. The next `add` for the issue removes a worktree that a kill left so."""
    removed: str | None
    """Time of removal, or None."""
    tip: str | None
    """Commit of its branch: before creation, or None if creation makes the branch; at removal. Otherwise None."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorktreePaths:
    """The directories of a worktree."""

    top: Path
    kept: Path
    """Directory of the files that the removal kept."""

    @property
    def tree(self) -> Path:
        return self.top / "tree"

    @property
    def work(self) -> Path:
        return self.top / "work"


def worktree_paths(home: Path, worktree: str) -> WorktreePaths:
    return WorktreePaths(home / "worktrees" / worktree, home / "kept" / worktree)


def save(home: Path, worktree: Worktree) -> None:
    top = worktree_paths(home, worktree.worktree).top
    for directory in (top.parent, top):
        directory.mkdir(mode=0o700, exist_ok=True)
    write_document(top / "worktree.json", dataclasses.asdict(worktree))


def load_all(home: Path) -> Iterator[Worktree]:
    """Yield all worktrees, removed ones too, oldest first. StateError: another version wrote a record."""
    found = []
    for file in (home / "worktrees").glob("*/worktree.json"):
        try:
            found.append(Worktree(**read_document(file)))
        except FileNotFoundError:
            continue
        except TypeError as error:
            raise StateError(f"{file} was not written by this version of bonobofs; move it away") from error
    yield from sorted(found, key=lambda one: one.made)


def repository_of(home: Path, tree: Path) -> Path | None:
    """Return the top of the repository of `tree`; None if `tree` is not a work tree of this state directory."""
    if tree.name != "tree" or tree.parent.parent != home / "worktrees":
        return None
    return Path(Worktree(**read_document(tree.parent / "worktree.json")).repository)
