"""Linked worktrees: make one, find what is in no commit, remove one. Nothing that the repository names is executed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pygit2

from bonobofs.errors import GitError
from bonobofs.git.checkout import check_rules, opened
from bonobofs.git.repository import BRANCHES, Repository, find_common_dir, find_git_dir

_LISTED: Final = 10


class RepositoryLocation(NamedTuple):
    """A repository of which worktrees can be made."""

    top: Path
    """The top of its work tree."""
    common: Path


class Unsaved(NamedTuple):
    """What of a worktree is in no commit."""

    files: tuple[str, ...]
    """Files that are changed, untracked or ignored. A directory that is a repository of its own ends in a slash."""
    staged: dict[str, bytes]
    """The staged content that the file of that name does not have."""
    deleted: tuple[str, ...]
    """Files that the commit has and the work tree lacks."""
    tracked: tuple[str, ...]
    """The files that the index lists."""


def find(directory: Path) -> RepositoryLocation:
    """The repository that a directory lies in. GitError."""
    for top in (directory, *directory.parents):
        git_dir = find_git_dir(top)
        if git_dir is not None and git_dir.is_dir():
            return RepositoryLocation(top, Path(os.path.realpath(find_common_dir(git_dir))))
    raise GitError(f"{directory} lies in no git repository", kind="no-repository")


def base_of(common: Path, name: str | None) -> str:
    """The commit at which a new branch begins: `name`, or else main, master or HEAD. GitError."""
    repository = Repository(common).raw
    for each in (name,) if name else ("refs/heads/main", "refs/heads/master", "HEAD"):
        try:
            found, _ = repository.resolve_refish(each)
            return str(found.peel(pygit2.Commit).id)
        except (KeyError, pygit2.GitError, ValueError):
            continue
    raise GitError(f"there is no commit {name or 'to begin at'} in {common}", kind="not-found")


def tip_of(common: Path, branch: str) -> str | None:
    """The commit of a branch; None if there is no such branch."""
    return Repository(common).target(BRANCHES + branch) or None


def holds(common: Path, commit: str, older: str) -> bool:
    """Whether a commit is `older` or comes after it."""
    repository = Repository(common)
    return all(repository.commit(one) is not None for one in (commit, older)) and repository.reaches(commit, older)


def commits_since(common: Path, base: str, tip: str) -> list[str]:
    """The commits that `tip` has and `base` lacks, newest first, each as `ID SUBJECT`; the first of them."""
    repository = Repository(common)
    found = repository.new_commits(tip, [base], _LISTED)[-_LISTED:]
    commits = (repository.commit(one) for one in reversed(found))
    return [f"{str(one.id)[:10]} {one.message.partition(chr(10))[0]}" for one in commits if one is not None]


def make(common: Path, name: str, tree: Path, branch: str, base: str) -> None:
    """Make a worktree, and its branch unless that exists. It is locked, so that git does not prune it.

    GitError: the branch is checked out elsewhere, or cannot have this name.
    """
    repository = Repository(common).raw
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
    """What of the worktree at `tree` is in no commit. GitError."""
    check_rules(tree)
    with opened(tree, home) as checkout:
        status = list(checkout.status(ignored=True))
        there = {path for _, path in status if os.path.lexists(tree / path)}
        files = tuple(path for _, path in status if path in there)
        deleted = tuple(path for _, path in status if path not in there)
        staged = {path: checkout.run("cat-file", "blob", f":{path}") for path in _staged_apart(status)}
        return Unsaved(files, staged, deleted, tuple(checkout.tracked()))


def _staged_apart(status: list[tuple[str, str]]) -> Iterator[str]:
    """The paths of which other content is staged than HEAD and the file have."""
    return (path for code, path in status if code[0] in "AMT" and code[1] != " ")


def forget(common: Path, name: str) -> None:
    """Remove a worktree from its repository, if that knows it. Its branch stays."""
    shutil.rmtree(common / "worktrees" / name, ignore_errors=True)
