"""The files of a checkout, brought from one commit to another, beneath the root of the workspace and nowhere else.

git exports the new files into a private directory. They are then copied one by one into directories that openat2 has
found without a symlink. Each file is replaced as git replaces it: the old one is removed, the new one is created.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from bonobofs.errors import GitError
from bonobofs.files.workspace import Workspace
from bonobofs.git.checkout import Checkout, give, joined, split
from bonobofs.git.repository import SUBMODULE, Difference, Entry
from bonobofs.git.shared_head import prepared_index
from bonobofs.policy.decision import Permit

_FRESH: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class IndexUpdate:
    """The change of the index alone: its files are as they are committed."""

    def __init__(self, checkout: Checkout, old: str, new: str) -> None:
        """From one commit to another, whatever is staged of these paths."""
        staged = checkout.tracked()
        found = ((one, staged.get(os.fsdecode(one.path))) for one in checkout.repository.differences(old, new))
        self.differences: Final = [one._replace(old=None if was is None else Entry(*was)) for one, was in found]
        self._checkout: Final = checkout

    def apply(self, permit: Permit) -> None:  # noqa: ARG002 - no change without one
        """Change the index. GitError: another process has it."""
        checkout = self._checkout
        with (
            checkout.entered() as token,
            prepared_index(checkout.source, checkout.room / "index", token, self.differences, keep=True) as index,
        ):
            index.replace()


class TreeUpdate:
    """The change of files and index from one commit to another. The checkout is clean."""

    def __init__(self, checkout: Checkout, workspace: Workspace, old: str, new: str) -> None:
        """GitError: git cannot do it here, or (`untracked`) untracked files are in the way. Nothing was changed."""
        self._checkout: Final = checkout
        self._workspace: Final = workspace
        self._owner: Final = os.fstat(workspace.descriptor)
        self.differences: Final = list(checkout.repository.differences(old, new))
        trees = checkout.tree_of(old), checkout.tree_of(new)
        checkout.run("update-index", "-q", "--refresh", codes=(0, 1))
        try:
            checkout.run("read-tree", "-m", "-u", "--dry-run", *trees)
        except GitError as error:
            raise GitError(str(error), kind="untracked") from error
        self._known: Final = {one.path: self._look(one.path) for one in self.differences}
        leaving = {one.path for one in self.differences if one.new is None}
        for one in self.differences:
            if one.old is None and self._is_in_the_way(one.path, leaving):
                raise GitError(f"{os.fsdecode(one.path)} would be overwritten, and is not tracked", kind="untracked")
        checkout.run("read-tree", "-i", "-m", *trees)
        self._export: Final = checkout.room / "export"
        self._export.mkdir()
        if any(record.startswith("S ") for record in split(checkout.run("ls-files", "-t", "-z"))):
            raise GitError("GitGuard does not switch a sparse checkout; use git in a mount", kind="unsupported")
        # What a submodule has checked out stays, as with git.
        self._steps: Final = [one for one in self.differences if not _is_submodule(one)]
        paths = joined(one.path for one in self._steps if one.new is not None)
        checkout.run("checkout-index", "-z", "--stdin", f"--prefix={self._export}/", data=paths)

    def apply(self, permit: Permit) -> None:
        """Change files, then the index. GitError: a file was changed meanwhile, or another process has the index."""
        checkout = self._checkout
        with (
            checkout.entered() as token,
            prepared_index(checkout.source, checkout.room / "index", token, self.differences, keep=False) as index,
        ):
            # Deletions make room: a file may become a directory.
            for one in sorted(self._steps, key=lambda one: (one.new is not None, one.path)):
                path = os.fsdecode(one.path)
                if self._look(one.path) != self._known[one.path]:
                    raise GitError(f"{path} was changed meanwhile", kind="dirty", paths=(path,))
                self._put(path, None if one.new is None else self._export / path, permit)
            index.replace()

    def _look(self, path: bytes) -> tuple[int, ...] | None:
        """The fingerprint of what the work tree has there; None: nothing, or a directory."""
        above, _, name = os.fsdecode(path).rpartition("/")
        try:
            directory = self._workspace.open_directory(above)
        except OSError:
            return None  # a file or a symlink stands where the directory would be
        try:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
        finally:
            os.close(directory)
        return None if stat.S_ISDIR(found.st_mode) else (found.st_ino, found.st_size, found.st_mtime_ns)

    def _is_in_the_way(self, path: bytes, leaving: set[bytes]) -> bool:
        """Whether a file stands there, or a directory with other files than those that leave. Ignored files count."""
        root = os.fsencode(self._checkout.root)
        if self._known[path] is not None:
            return True
        below = (os.path.join(at, name) for at, _, names in os.walk(os.path.join(root, path)) for name in names)
        return any(os.path.relpath(name, root) not in leaving for name in below)

    def _put(self, path: str, source: Path | None, permit: Permit) -> None:  # noqa: ARG002 - no change without one
        """Give a path an exported file, or with None remove it and the directories that are empty without it."""
        above, _, name = path.rpartition("/")
        with suppress(FileNotFoundError):
            directory = self._directory(above, make=source is not None)
            try:
                _remove(directory, name)
                if source is not None:
                    self._create(directory, name, source)
            finally:
                os.close(directory)
        while source is None and above:
            above, _, name = above.rpartition("/")
            try:
                directory = self._directory(above, make=False)
                try:
                    os.rmdir(name, dir_fd=directory)
                finally:
                    os.close(directory)
            except OSError:
                return

    def _directory(self, path: str, *, make: bool) -> int:
        """The directory, for the caller to close."""
        try:
            return self._workspace.open_directory(path)
        except FileNotFoundError:
            if not make:
                raise
        above, _, name = path.rpartition("/")
        directory = self._directory(above, make=True)
        try:
            os.mkdir(name, dir_fd=directory)
            give(Path(f"/proc/self/fd/{directory}", name), self._owner)
        finally:
            os.close(directory)
        return self._workspace.open_directory(path)

    def _create(self, directory: int, name: str, source: Path) -> None:
        found = os.lstat(source)
        if stat.S_ISLNK(found.st_mode):
            os.symlink(os.readlink(source), name, dir_fd=directory)
        else:
            mode = 0o777 if found.st_mode & stat.S_IXUSR else 0o666
            descriptor = os.open(name, _FRESH, mode, dir_fd=directory)
            with open(descriptor, "wb") as file, open(source, "rb") as content:
                shutil.copyfileobj(content, file)
        give(Path(f"/proc/self/fd/{directory}", name), self._owner)


def _is_submodule(difference: Difference) -> bool:
    return any(entry is not None and entry.mode == SUBMODULE for entry in difference[1:])


def _remove(directory: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
        os.rmdir(name, dir_fd=directory)
