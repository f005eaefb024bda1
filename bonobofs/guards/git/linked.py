"""Linked worktrees: made, looked through for what is nowhere else, and taken away. Nothing named there is executed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final, NamedTuple

import pygit2
from pygit2.enums import FileStatus, RepositoryOpenFlag

from bonobofs.errors import GitError
from bonobofs.guards.git.looking import check_rules

_UNLIKE_HEAD: Final = ~(FileStatus.WT_DELETED | FileStatus.INDEX_DELETED)

_ONLY_STAGED: Final = FileStatus.INDEX_NEW | FileStatus.INDEX_MODIFIED | FileStatus.INDEX_TYPECHANGE


class Found(NamedTuple):
    """A repository that worktrees can be made of."""

    top: Path
    """The top of its work tree."""
    common: Path


class Shown(NamedTuple):
    """Where a worktree is to be found by whoever works there."""

    work: Path
    """Where its work tree is mounted."""
    view: Path
    """Where the repository is shown."""


class Unsaved(NamedTuple):
    """What of a worktree is in no commit."""

    files: tuple[str, ...]
    """Files that are changed, untracked or ignored; a directory that is a repository of its own ends in a slash."""
    staged: dict[str, bytes]
    """What is staged and is not in the file of that name."""
    deleted: tuple[str, ...]
    """Files that the commit has and the work tree has not."""


def find(directory: Path) -> Found:
    """The repository that a directory lies in. GitError."""
    at = pygit2.discover_repository(str(directory))
    if at is None:
        raise GitError(f"{directory} lies in no git repository", kind="no-repository")
    repository = _open(Path(at))
    if repository.is_bare:
        raise GitError(f"the repository {at} has no work tree", kind="unsupported")
    git = Path(os.path.realpath(repository.path))
    shared = git / "commondir"
    common = Path(os.path.realpath(git / shared.read_text().strip())) if shared.exists() else git
    return Found(Path(os.path.realpath(repository.workdir)), common)


def base_of(common: Path, named: str | None) -> str:
    """The commit that a new branch begins at: what is named, else main, else master, else HEAD. GitError."""
    repository = _open(common)
    for name in (named,) if named else ("refs/heads/main", "refs/heads/master", "HEAD"):
        try:
            found, _ = repository.resolve_refish(name)
            return str(found.peel(pygit2.Commit).id)
        except (KeyError, pygit2.GitError, ValueError):
            continue
    raise GitError(f"there is no commit {named or 'to begin at'} in {common}", kind="not-found")


def tip_of(common: Path, branch: str) -> str | None:
    """The commit that a branch is at; None where there is no such branch."""
    found = _open(common).references.get(f"refs/heads/{branch}")
    return None if found is None else str(found.peel(pygit2.Commit).id)


def holds(common: Path, commit: str, older: str) -> bool:
    """Whether a commit is another one or comes after it."""
    repository = _open(common)
    if older not in repository or commit not in repository:
        return False
    return commit == older or repository.descendant_of(commit, older)


def make(common: Path, name: str, tree: Path, branch: str, base: str, shown: Shown) -> None:
    """Make a worktree and its branch, unless that is there.

    Its `.git` leads to where the repository is shown, and the repository's own note of it to where it is mounted: no
    git that starts from either finds the places behind the mounts. It is locked, as a mount need not be there.
    GitError: the branch is checked out elsewhere, or has no name that can be.
    """
    repository = _open(common)
    try:
        reference = repository.references.get(f"refs/heads/{branch}")
        if reference is None:
            commit = repository[base].peel(pygit2.Commit)
            reference = repository.branches.local.create(branch, commit)
        repository.add_worktree(name, str(tree), reference)
    except (pygit2.GitError, ValueError) as error:
        raise GitError(f"the worktree cannot be made: {error}", kind="exists") from error
    admin = common / "worktrees" / name
    _write(admin / "commondir", "../..\n")
    _write(admin / "locked", "an agent works there; bonobofs worktree remove ends it\n")
    _write(tree / ".git", f"gitdir: {shown.view / 'worktrees' / name}\n")
    _write(admin / "gitdir", f"{shown.work / '.git'}\n")


def unsaved(common: Path, name: str, tree: Path) -> Unsaved:
    """What of a worktree is in no commit."""
    repository = _open(common / "worktrees" / name)
    repository.workdir = str(tree)
    check_rules(tree)
    status = repository.status(untracked_files="all", ignored=True)
    files = tuple(path for path, flags in status.items() if flags & _UNLIKE_HEAD and _is_there(repository, path))
    deleted = tuple(path for path, flags in status.items() if not _is_there(repository, path))
    staged = {}
    for path, flags in status.items():
        if flags & (FileStatus.INDEX_NEW | FileStatus.INDEX_MODIFIED) and (flags & ~_ONLY_STAGED):
            staged[path] = repository.read(repository.index[path].id)[1]
    return Unsaved(files, staged, deleted)


def _is_there(repository: pygit2.Repository, path: str) -> bool:
    return os.path.lexists(os.path.join(repository.workdir, path))


def forget(common: Path, name: str) -> None:
    """Let the repository know a worktree no more; its branch stays. It may know none of that name."""
    shutil.rmtree(common / "worktrees" / name, ignore_errors=True)


def _open(git: Path) -> pygit2.Repository:
    try:
        return pygit2.Repository(str(git), RepositoryOpenFlag.NO_SEARCH)
    except (pygit2.GitError, KeyError) as error:
        raise GitError(f"the repository {git} cannot be opened: {error}", kind="unsupported") from error


def _write(path: Path, text: str) -> None:
    path.write_bytes(os.fsencode(text))


def tracked(common: Path, name: str) -> list[str]:
    """The files that a worktree's index lists."""
    return [entry.path for entry in _open(common / "worktrees" / name).index]
