"""The register of worktrees that agents were given: `worktrees/UUID/worktree.json` each, and where their parts lie.

tree  the work tree, which is the source of its mount
work  where it is mounted
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from bonobofs.errors import StateError
from bonobofs.state.home import read_document, write_document


@dataclasses.dataclass(frozen=True, slots=True)
class Worktree:
    """One worktree from its beginning to its end. The field names are those of worktree.json."""

    worktree: str
    """UUID; also the name of its directory."""
    issue: str
    branch: str
    agent: str
    repository: str
    """The top of the work tree of the repository that it belongs to."""
    common: str
    """What that repository shares with its worktrees: its `.git`."""
    name: str
    """What git calls it: the directory in `common`/worktrees."""
    base: str
    """The commit that its branch began at."""
    made: str
    """UTC, ISO 8601."""
    ready: bool
    """False while it is being made; what was left so by a kill is taken away before it is made again."""
    removed: str | None
    """When it was removed."""
    tip: str | None
    """The commit that its branch was at when it was removed."""


@dataclasses.dataclass(frozen=True, slots=True)
class WorktreePaths:
    """Where the parts of a worktree lie."""

    top: Path
    kept: Path
    """What its removal kept."""

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
    """Every worktree there is or was, the oldest first. StateError: a record is not as this version writes it."""
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
    """The top of the repository that one of our work trees belongs to; None where that is no work tree of ours."""
    if not _is_ours(home, tree):
        return None
    return Path(Worktree(**read_document(tree.parent / "worktree.json")).repository)


def _is_ours(home: Path, tree: Path) -> bool:
    return tree.name == "tree" and tree.parent.parent == home / "worktrees"
