"""Checkout for GitGuard: a private git directory in the state directory, in which bonobofs runs git on the work tree.

Linked worktrees are made and removed under the rule of `private_checkout`: no git process opens the source's git
directory.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import pygit2

from bonobofs.errors import GitError
from bonobofs.git.private_checkout import NOTHING, PrivateCheckout, join_records, split_records
from bonobofs.git.repository import Entry, GitRepository, TreeDifference
from bonobofs.git.session_repository import operations_in_progress
from bonobofs.git.shared_head import IndexReplacement
from bonobofs.git.source_refs import BRANCHES, find_git_dirs, read_head
from bonobofs.policy.decision import Permit


@dataclass(frozen=True)
class GitStatus:
    """State of a work tree, as `git status` shows it."""

    branch: str
    """"" if HEAD is detached."""
    clean: bool
    """No file is staged or modified. Untracked files are ignored."""
    staged: list[str]
    modified: list[str]
    """Files that are changed or deleted in the work tree, or in conflict."""
    untracked: list[str]
    """Untracked files, without ignored ones."""


class CheckoutHead(NamedTuple):
    """Branch and commit of HEAD."""

    branch: str
    """"" if HEAD is detached."""
    commit: str
    """"" if the branch has no commit yet."""


class Checkout(PrivateCheckout):
    """A private checkout with libgit2. The caller closes it."""

    def __init__(self, root: Path, home: Path) -> None:
        """As `PrivateCheckout`."""
        super().__init__(root, home)
        try:
            self.repository: Final = GitRepository(self.source, [self.objects])
            self.head: Final = self._read_head()
        except BaseException:
            self.close()
            raise

    def _read_head(self) -> CheckoutHead:
        text = read_head(self.source)
        if not text.startswith("ref: "):
            return CheckoutHead("", text)
        ref = text.removeprefix("ref: ")
        if not ref.startswith(BRANCHES):
            raise GitError(f"HEAD is on {ref}, which is no branch", kind="unsupported")
        return CheckoutHead(ref.removeprefix(BRANCHES), self.repository.target(ref))

    def check_settled(self) -> None:
        """Raise GitError if a merge, rebase or other git operation is in progress in this checkout."""
        for operation in operations_in_progress(self.source):
            raise GitError(f"{operation} is in progress in this checkout; end it or abort it with git", kind="unmerged")

    def status(self, *, untracked: bool = True, ignored: bool = False) -> Iterator[tuple[str, str]]:
        """Yield (code, path) of each changed path. The code has two letters, as in `git status --porcelain`."""
        words = ["--untracked-files=all" if untracked else "--untracked-files=no", *(["--ignored"] if ignored else [])]
        found = self.run("status", "--porcelain", "-z", "--no-renames", "--ignore-submodules=dirty", *words)
        for record in split_records(found):
            yield record[:2], record[3:]

    def tree_of(self, commit: str) -> str:
        """Return the tree of a commit; "" has the empty tree. Raises GitError."""
        if not commit:
            return self.run("hash-object", "-w", "-t", "tree", "--stdin").decode().strip()
        return self.run("rev-parse", "--verify", f"{commit}^{{tree}}").decode().strip()

    def tidied(self, message: str) -> str:
        """Return a message as git stores it: without trailing spaces and without outer and repeated blank lines."""
        return self.run("stripspace", data=message.encode("utf-8", "surrogatepass")).decode("utf-8", "surrogatepass")

    def filtered(self, paths: Iterable[str], commit: str = "") -> list[str]:
        """Return the paths with a `filter` attribute, by the attributes of the work tree or of a commit."""
        data, index = join_records(map(os.fsencode, paths)), {"GIT_INDEX_FILE": str(self.room / "attributes")}
        if commit:
            self.run("read-tree", commit, more=index)
        words = ("check-attr", *(["--cached"] if commit else []), "-z", "--stdin", "filter")
        found = iter(split_records(self.run(*words, data=data, more=index if commit else NOTHING)))
        return [
            path for path, _, value in zip(found, found, found, strict=True) if value not in ("unspecified", "unset")
        ]

    def writing(self, *updates: tuple[str, str, str]) -> AbstractContextManager[str]:
        """Record a change of index or HEAD in the journal. Yields the token in the names of its temporary files."""
        return self.journal.writing(self.source, self.common_dir, updates)

    def new_objects(self) -> list[Path]:
        """Return the new loose objects, relative to the object directory."""
        return [location.relative_to(self.objects) for location in self.objects.glob("??/*")]

    def give_new_files_to_owner(self, branch: str, objects: Iterable[Path] = ()) -> None:
        """If we are root, chown the files that were written for a branch to the owner of the repository."""
        common = self.common_dir
        owner = os.stat(common)
        made = {common / "objects" / above for location in objects for above in (location, location.parent)}
        made.add(self.source / "logs/HEAD")
        for top in (common, common / "logs"):
            location = top / BRANCHES / branch
            made |= {location, *(above for above in location.parents if above.is_relative_to(top))}
        for location in made:
            with suppress(FileNotFoundError):
                give_to_owner(location, owner)


@contextmanager
def open_checkout(root: Path, home: Path) -> Iterator[Checkout]:
    """Open the checkout at `root` for one operation. Raises GitError."""
    checkout = Checkout(root, home)
    try:
        yield checkout
    finally:
        checkout.close()


def status_of(root: Path, home: Path) -> GitStatus:
    """Return the staged, modified and untracked files of the work tree at `root`. Raises GitError."""
    check_rules(root)
    with open_checkout(root, home) as checkout:
        found = list(checkout.status())
    unmerged = {path for code, path in found if "U" in code or code in ("AA", "DD")}
    staged = sorted(path for code, path in found if code[0] not in " ?" and path not in unmerged)
    modified = sorted(path for code, path in found if code[1] not in " ?" or path in unmerged)
    untracked = sorted(path for code, path in found if code == "??")
    return GitStatus(checkout.head.branch, not (staged or modified), staged, modified, untracked)


def diff_of(root: Path, home: Path, path: str | None) -> str:
    """Return the changes of tracked files since HEAD as a patch. `path` selects a file or directory. Raises GitError.

    Bytes that are not UTF-8 are decoded with surrogateescape.
    """
    words = ["diff", "--no-ext-diff", "--no-textconv", "--no-color", "--no-renames", "--ignore-submodules=dirty"]
    with open_checkout(root, home) as checkout:
        base = checkout.tree_of(checkout.head.commit)
        return os.fsdecode(checkout.run(*words, base, "--", *([] if path is None else [path])))


def check_rules(top: Path) -> None:
    """Raise GitError if a .gitignore or .gitattributes is not a regular file. git would block on a FIFO."""
    for directory, names, files in os.walk(top):
        if ".git" in names:
            names.remove(".git")
        for name in {".gitignore", ".gitattributes"}.intersection(files):
            location = os.path.join(directory, name)
            if os.path.exists(location) and not os.path.isfile(location):
                path = os.path.relpath(location, top)
                raise GitError(f"{path} is no file; remove it", kind="unsupported", paths=(path,))


def give_to_owner(location: Path, owner: os.stat_result) -> None:
    """If we are root, chown a file to the owner of the repository."""
    if os.geteuid() == 0 and owner.st_uid != 0:
        os.chown(location, owner.st_uid, owner.st_gid, follow_symlinks=False)


class IndexUpdate:
    """Update of the index only. The files in the work tree already have the committed content."""

    def __init__(self, checkout: Checkout, old: str, new: str) -> None:
        """Update from commit `old` to commit `new`. Staged content of the changed paths is replaced."""
        staged = checkout.tracked()
        found = ((one, staged.get(os.fsdecode(one.path))) for one in checkout.repository.differences(old, new))
        self.differences: Final = [one._replace(old=None if was is None else Entry(*was)) for one, was in found]
        self._checkout: Final = checkout

    @contextmanager
    def apply(self, permit: Permit) -> Iterator[Callable[[], None]]:  # noqa: ARG002 - no change without one
        """Lock the index, and yield the function that changes it. Raises GitError if another process holds its lock."""
        checkout = self._checkout
        with (
            checkout.writing() as token,
            IndexReplacement(checkout.source, checkout.room / "index", token, self.differences, keep=True) as index,
        ):
            index.lock()
            yield index.install


class TreeUpdate:
    """Update of files and index from one commit to another. The checkout must be clean."""

    def __init__(self, checkout: Checkout, old: str, new: str) -> None:
        """Check the update. Raises GitError, of kind `untracked` if an untracked file is in the way."""
        self._checkout: Final = checkout
        self.differences: Final = list(checkout.repository.differences(old, new))
        self._trees: Final = checkout.tree_of(old), checkout.tree_of(new)
        checkout.run("update-index", "-q", "--refresh", codes=(0, 1))
        if any(record.startswith("S ") for record in split_records(checkout.run("ls-files", "-t", "-z"))):
            raise GitError("GitGuard does not switch a sparse checkout; use git in a mount", kind="unsupported")
        try:
            checkout.run("read-tree", "-m", "-u", "--dry-run", *self._trees)
        except GitError as error:
            raise GitError(str(error), kind="untracked") from error
        leaving = {os.fsdecode(one.path) for one in self.differences if one.new is None}
        for one in self.differences:
            if one.old is None and self._is_in_the_way(os.fsdecode(one.path), leaving):
                raise GitError(f"{os.fsdecode(one.path)} would be overwritten, and is not tracked", kind="untracked")

    @contextmanager
    def apply(self, permit: Permit) -> Iterator[Callable[[], None]]:  # noqa: ARG002 - no change without one
        """Lock the index, change the files, and yield the function that changes the index.

        After an error, the files are as before. Raises GitError if a file was changed meanwhile or the index is locked.
        """
        checkout = self._checkout
        with (
            checkout.writing() as token,
            IndexReplacement(checkout.source, checkout.room / "index", token, self.differences, keep=False) as index,
        ):
            index.lock()
            missing = self._missing_directories()
            try:
                checkout.run("read-tree", "-m", "-u", *self._trees)
                yield index.install
            except BaseException:
                if index.is_locked:
                    self._restore()
                raise
            finally:
                owner = os.stat(checkout.root)
                files = (checkout.root / os.fsdecode(one.path) for one in self.differences)
                for location in (*missing, *files):
                    with suppress(FileNotFoundError, NotADirectoryError):
                        give_to_owner(location, owner)

    def _missing_directories(self) -> set[Path]:
        """Return the directories that the update creates."""
        above = (location for one in self.differences for location in Path(os.fsdecode(one.path)).parents[:-1])
        return {self._checkout.root / location for location in above if not (self._checkout.root / location).is_dir()}

    def _restore(self) -> None:
        """Bring the changed files back to the old commit."""
        run, index = self._checkout.run, {"GIT_INDEX_FILE": str(self._checkout.room / "restore")}
        old, new = (join_records(_lines(self.differences, end)) for end in (1, 2))
        run("update-index", "-z", "--index-info", data=old, more=index)
        tree = run("write-tree", "--missing-ok", more=index).decode().strip()
        run("read-tree", "--empty", more=index)
        run("update-index", "-z", "--index-info", data=new, more=index)
        run("read-tree", "--reset", "-u", tree, more=index)

    def _is_in_the_way(self, path: str, leaving: set[str]) -> bool:
        """True if `path` is a file, or a directory with files not in `leaving`. Ignored files count."""
        root = self._checkout.root
        location = root / path
        if os.path.lexists(location) and (location.is_symlink() or not location.is_dir()):
            return path not in leaving
        below = (Path(above, name) for above, _, names in os.walk(location) for name in names)
        return any(str(name.relative_to(root)) not in leaving for name in below)


def _lines(differences: Iterable[TreeDifference], end: int) -> Iterator[bytes]:
    """Yield input of `git update-index --index-info` for the old (1) or new (2) entries."""
    for difference in differences:
        entry = difference[end]
        if isinstance(entry, Entry):
            yield b"%o %s\t%s" % (entry.mode, entry.oid.encode(), difference.path)


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
