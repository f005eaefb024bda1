"""The files of a checkout, brought from one commit to another, beneath the root of the workspace and nowhere else.

git exports the files of both commits into the private directory. They are then copied one by one into directories that
openat2 has found without a symlink. Each file is replaced as git replaces it: the old one is removed, the new one is
created. If a step fails, the steps before it are reverted.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

from bonobofs.decision import Allowed
from bonobofs.errors import GitError
from bonobofs.git.checkout import Checkout, give, joined
from bonobofs.git.repository import SUBMODULE, Difference, Entry
from bonobofs.guards.beneath import Workspace

_FRESH: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class TreeUpdate:
    """The change of the work tree and of the private index from one commit to another. The checkout is clean."""

    def __init__(self, checkout: Checkout, workspace: Workspace, old: str | None, new: str) -> None:
        """GitError: git cannot do it here, or untracked files are in the way. Nothing was changed."""
        self._checkout: Final = checkout
        self._workspace: Final = workspace
        self._owner: Final = os.fstat(workspace.descriptor)
        if checkout.settings.get("core.sparsecheckout") == "true":
            raise GitError("GitGuard does not switch a sparse checkout; use git in a mount", kind="unsupported")
        self.differences: Final = list(checkout.repository.differences(old or "", new))
        # What a submodule has checked out stays, as with git.
        self._steps: Final = [one for one in self.differences if SUBMODULE not in (_mode(one.old), _mode(one.new))]
        self._known: Final = {one.path: self._look(one.path) for one in self._steps}
        self._done: Final[list[Difference]] = []
        self._leave: Allowed | None = None
        self._check_room()
        self._export("old", (one.path for one in self._steps if one.old is not None))
        checkout.run("read-tree", "-i", "-m", checkout.tree_of(old), checkout.tree_of(new))
        self._export("new", (one.path for one in self._steps if one.new is not None))

    def apply(self, leave: Allowed) -> None:
        """Change files, then the index. GitError, OSError: both are as they were."""
        self._leave = leave
        try:
            # Deletions make room: a file may become a directory.
            for one in sorted(self._steps, key=lambda one: (one.new is not None, one.path)):
                if self._look(one.path) != self._known[one.path]:
                    path = os.fsdecode(one.path)
                    raise GitError(f"{path} was changed meanwhile", kind="dirty", paths=(path,))
                self._done.append(one)
                self._put(os.fsdecode(one.path), "" if one.new is None else "new", leave)
            self._checkout.run("update-index", "-q", "--refresh", codes=(0, 1))
            self._checkout.install_index()
        except BaseException:
            self._revert(leave)
            raise

    def undo(self) -> None:
        """Revert what `apply` has done, if it has done anything."""
        if self._leave is not None and self._done:
            self._revert(self._leave)
            with suppress(GitError):
                self._checkout.restore_index()

    def _revert(self, leave: Allowed) -> None:
        """Put back the files of the old commit."""
        for one in sorted(self._done, key=lambda one: (one.old is not None, one.path)):
            with suppress(OSError):
                self._put(os.fsdecode(one.path), "" if one.old is None else "old", leave)
        self._done.clear()

    def _look(self, path: bytes) -> tuple[int, ...] | None:
        """The fingerprint of what the work tree has there; None: nothing."""
        above, _, name = os.fsdecode(path).rpartition("/")
        try:
            directory = self._directory(above, make=False)
        except OSError:
            return None  # a file or a symlink stands where the directory would be
        try:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return None
        finally:
            os.close(directory)
        if stat.S_ISDIR(found.st_mode):
            return (0,)
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns

    def _check_room(self) -> None:
        """GitError: an untracked file stands where a new file is to come."""
        leaving = {one.path for one in self._steps if one.new is None}
        untracked: set[bytes] = set()
        for one in self._steps:
            if one.old is None:
                untracked |= set(self._in_the_way(one.path)) - leaving
        if untracked:
            paths = sorted(map(os.fsdecode, untracked))
            raise GitError("untracked files would be overwritten", kind="untracked", paths=paths)

    def _in_the_way(self, path: bytes) -> Iterable[bytes]:
        root = os.fsencode(self._checkout.root)
        names = path.split(b"/")
        for depth in range(1, len(names) + 1):
            place = os.path.join(root, *names[:depth])
            if not os.path.lexists(place):
                return
            if os.path.islink(place) or not os.path.isdir(place):
                yield b"/".join(names[:depth])
                return
        for above, _, files in os.walk(os.path.join(root, path)):
            yield from (os.path.relpath(os.path.join(above, name), root) for name in files)

    def _export(self, name: str, paths: Iterable[bytes]) -> None:
        """Let git write files of the private index, converted as for the work tree, into a private directory."""
        prefix = f"--prefix={self._checkout.room(name)}/"
        self._checkout.run("checkout-index", "-z", "--stdin", prefix, data=joined(paths))

    def _put(self, path: str, export: str, leave: Allowed) -> None:  # noqa: ARG002 - no change without one
        """Give a path its file of an export, or with "" remove it."""
        above, _, name = path.rpartition("/")
        source = self._checkout.git.parent / export / path if export else None
        try:
            directory = self._directory(above, make=source is not None)
        except FileNotFoundError:
            return
        try:
            _remove(directory, name)
            if source is not None:
                self._create(directory, name, source)
        finally:
            os.close(directory)
        if source is None:
            self._remove_empty(above)

    def _remove_empty(self, path: str) -> None:
        """Remove a directory that has become empty, and those above it."""
        while path:
            path, _, name = path.rpartition("/")
            directory = self._directory(path, make=False)
            try:
                os.rmdir(name, dir_fd=directory)
            except OSError:
                return
            finally:
                os.close(directory)

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
            self._give(directory, name)
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
        self._give(directory, name)

    def _give(self, directory: int, name: str) -> None:
        give(Path(f"/proc/self/fd/{directory}", name), self._owner)


def _mode(entry: Entry | None) -> int:
    return 0 if entry is None else entry.mode


def _remove(directory: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=directory)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
        os.rmdir(name, dir_fd=directory)
