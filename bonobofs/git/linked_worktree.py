"""Linked worktrees: make one, find its uncommitted content, remove it. Runs no program that the repository names."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import pygit2

from bonobofs.errors import GitError
from bonobofs.git.checkout import check_rules, open_checkout
from bonobofs.git.repository import GitRepository
from bonobofs.git.source_refs import BRANCHES, find_git_dirs

_LISTED: Final = 10


class RepositoryLocation(NamedTuple):
    """A repository with a work tree."""

    top: Path
    """The top of its work tree."""
    common: Path


class Unsaved(NamedTuple):
    """Content of a worktree that is in no commit."""

    files: tuple[str, ...]
    """Changed, untracked and ignored files. A directory that is a repository of its own ends in "/"."""
    staged: dict[str, bytes]
    """Staged content that differs from the file in the work tree, by path."""
    deleted: tuple[str, ...]
    """Files that are in the commit and missing in the work tree."""
    tracked: tuple[str, ...]
    """Files in the index."""


def find_repository(directory: Path) -> RepositoryLocation:
    """Return the repository that contains a directory. Raises GitError if there is none."""
    for top in (directory, *directory.parents):
        if (top / ".git").exists():
            return RepositoryLocation(top, find_git_dirs(top).common)
    raise GitError(f"{directory} lies in no git repository", kind="no-repository")


def base_of(common: Path, name: str | None) -> str:
    """Return the start commit of a new branch: `name`, or the first of main, master and HEAD. Raises GitError."""
    repository = GitRepository(common).raw
    for each in (name,) if name else ("refs/heads/main", "refs/heads/master", "HEAD"):
        try:
            found, _ = repository.resolve_refish(each)
            return str(found.peel(pygit2.Commit).id)
        except (KeyError, pygit2.GitError, ValueError):
            continue
    raise GitError(f"there is no commit {name or 'to begin at'} in {common}", kind="not-found")


def tip_of(common: Path, branch: str) -> str | None:
    """Return the commit of a branch, or None if there is no such branch."""
    return GitRepository(common).target(BRANCHES + branch) or None


def has_commit(common: Path, commit: str, older: str) -> bool:
    """True if both commits exist and `commit` is `older` or a descendant of it."""
    repository = GitRepository(common)
    return all(repository.commit(one) is not None for one in (commit, older)) and repository.reaches(commit, older)


def commits_since(common: Path, base: str, tip: str) -> list[str]:
    """Return at most 10 commits that `tip` reaches and `base` does not, newest first, each as `ID SUBJECT`."""
    walk = GitRepository(common).raw.walk(pygit2.Oid(hex=tip), pygit2.enums.SortMode.TOPOLOGICAL)
    walk.hide(pygit2.Oid(hex=base))
    return [f"{str(commit.id)[:10]} {commit.message.partition(chr(10))[0]}" for commit in islice(walk, _LISTED)]


def create(common: Path, name: str, tree: Path, branch: str, base: str) -> None:
    """Make a worktree, and its branch if it does not exist. Lock the worktree, so that git does not prune it.

    Raises GitError if the branch is checked out elsewhere or its name is invalid.
    """
    repository = GitRepository(common).raw
    try:
        reference = repository.references.get(BRANCHES + branch)
        if reference is None:
            reference = repository.branches.local.create(branch, repository[base].peel(pygit2.Commit))
        repository.add_worktree(name, str(tree), reference)
    except (pygit2.GitError, ValueError) as error:
        raise GitError(f"the worktree cannot be made: {error}", kind="exists") from error
    lock = common / "worktrees" / name / "locked"
    lock.write_text("an agent works there; bonobofs worktree remove ends it\n", encoding="utf-8")


def unsaved(tree: Path, home: Path) -> Unsaved:
    """Return the content of the worktree at `tree` that is in no commit. Raises GitError."""
    check_rules(tree)
    with open_checkout(tree, home) as checkout:
        status = list(checkout.status(ignored=True))
        there = {path for _, path in status if os.path.lexists(tree / path)}
        files = tuple(path for _, path in status if path in there)
        deleted = tuple(path for _, path in status if path not in there)
        staged = {path: checkout.run("cat-file", "blob", f":{path}") for path in _staged_only(status)}
        return Unsaved(files, staged, deleted, tuple(checkout.tracked()))


def _staged_only(status: list[tuple[str, str]]) -> Iterator[str]:
    """Return the paths whose staged content differs from both HEAD and the file."""
    return (path for code, path in status if code[0] in "AMT" and code[1] != " ")


def remove_entry(common: Path, name: str) -> None:
    """Remove a worktree's entry from its repository, if there is one. The branch stays."""
    shutil.rmtree(common / "worktrees" / name, ignore_errors=True)


def delete_branch(common: Path, branch: str) -> None:
    """Delete a branch. Raises GitError if another process holds its lock."""
    try:
        GitRepository(common).raw.references.delete(BRANCHES + branch)
    except (KeyError, pygit2.GitError) as error:
        raise GitError(f"the branch {branch} cannot be deleted: {error}", kind="busy") from error
