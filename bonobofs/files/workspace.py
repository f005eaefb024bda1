"""Resolve a caller's path to a name below the workspace's root, and hold the directory that contains the name.

openat2(RESOLVE_BENEATH) follows the symlinks of the path and fails at one that leads out of the root. The directory of
the real path is then opened again with no symlink allowed, and stays open. If another process replaces a directory by a
symlink in between, the call fails with an error. The policy judges the real path. The change applies to a name in the
open directory, which is compared with the path once more directly before the change.
"""

from __future__ import annotations

import errno
import os
import stat
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Final, NamedTuple, Self

from bonobofs.policy.decision import Permit
from bonobofs.policy.isolation import boundary_of, enforce_absolute_path_boundary
from bonobofs.policy.request import Kind, WorkspacePath, kind_of
from bonobofs.system.syscalls import RESOLVE_BENEATH, RESOLVE_NO_SYMLINKS, RESOLVE_NO_XDEV, openat2

MAKER: Final[ContextVar[Callable[[], AbstractContextManager[object]]]] = ContextVar("MAKER", default=nullcontext)
"""Context manager to enter while creating a file or directory: the thread acts as the user that is to own it."""

_EXACTLY: Final = RESOLVE_NO_SYMLINKS | RESOLVE_NO_XDEV
_TRIES: Final = 128
"""Number of tries of openat2, which fails with EAGAIN if a rename happens while it resolves a `..`."""


def _open_beneath(directory: int, path: str, flags: int, resolve: int) -> int:
    code = errno.EAGAIN
    for _ in range(_TRIES):
        try:
            return openat2(directory, os.fsencode(path or "."), flags, resolve | RESOLVE_BENEATH)
        except OSError as error:
            code = error.errno or errno.EIO
        if code != errno.EAGAIN:
            break
    raise OSError(code, os.strerror(code), path)


def _moved(path: str) -> OSError:
    """Return the ESTALE error for a path that another process changed during the look-up."""
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)


class Workspace:
    """An open directory. `close` closes the descriptor, or else the last reference to this object does."""

    def __init__(self, root: Path, access_path: str = "") -> None:
        """Open the directory. `root` is absolute and without symlinks. `access_path`: open this path instead."""
        self.root: Final = root
        self._boundary: Final = boundary_of(str(root))
        self.descriptor = os.open(access_path or root, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._close: Final = weakref.finalize(self, os.close, self.descriptor)

    def close(self) -> None:
        """Close the directory. Later calls fail with EBADF."""
        self.descriptor = -1  # the kernel may reuse the number for another file
        self._close()

    def relative(self, path: str | os.PathLike[str]) -> WorkspacePath:
        """Return the path relative to the root, unresolved. An absolute path outside keeps its leading slash."""
        pure = PurePosixPath(path)
        if not pure.is_absolute():
            return WorkspacePath(_text(pure))
        pure = PurePosixPath("/", *pure.parts[1:])
        for candidate in (pure, _without_symlinks(pure)):
            outside = enforce_absolute_path_boundary(str(candidate), self._boundary)
            if outside is None and candidate.is_relative_to(self.root):
                return WorkspacePath(_text(candidate.relative_to(self.root)))
        return WorkspacePath(str(pure))

    def locate(self, path: WorkspacePath, *, follow: bool) -> Location | None:
        """Resolve a path and open its directory. Returns None if a symlink leads out of the workspace.

        `follow`: also follow a symlink in the last component. Raises OSError, ESTALE if the path changes meanwhile.
        """
        try:
            real = self._real(path, follow=follow)
        except OSError as error:
            if error.errno == errno.EXDEV:
                return None
            raise
        if real.rest:
            parent, missing, name = real.path, real.rest[:-1], real.rest[-1]
        else:
            parent, _, name = real.path.rpartition("/")
            missing = ()
        directory = self.open_directory(parent)
        try:
            # The path of a descriptor in /proc can be out of date: check that it still leads to the same inode.
            expected = os.fstat(directory) if real.rest else _lstat(directory, name or ".")
            if expected is None or not os.path.samestat(expected, real.status):
                raise _moved(path)
            status = None if missing else _lstat(directory, name) if name else expected
            return Location(self, directory, parent, missing, name, status)
        except BaseException:
            os.close(directory)
            raise

    def _real(self, path: str, *, follow: bool) -> _Real:
        parts = path.split("/")
        for depth in range(len(parts) if follow else len(parts) - 1, -1, -1):
            try:
                descriptor = _open_beneath(self.descriptor, "/".join(parts[:depth]), os.O_PATH, 0)
            except FileNotFoundError:
                continue
            try:
                return _Real(self._text(descriptor), os.fstat(descriptor), tuple(parts[depth:]))
            finally:
                os.close(descriptor)
        raise _moved(path)

    def _text(self, descriptor: int) -> str:
        root = os.readlink(f"/proc/self/fd/{self.descriptor}").rstrip("/")
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path != root and not path.startswith(f"{root}/"):
            raise _moved(path)
        return path[len(root) + 1 :]

    def open_directory(self, path: str) -> int:
        """Open a directory without following symlinks or entering other file systems. The caller closes it."""
        return _open_beneath(self.descriptor, path, os.O_RDONLY | os.O_DIRECTORY, _EXACTLY)


class _Real(NamedTuple):
    """The existing part of a path, resolved; its status; and the components that do not exist."""

    path: str
    status: os.stat_result
    rest: tuple[str, ...]


class Location:
    """A name in a directory. The directory stays open until the end of a `with` block."""

    def __init__(
        self,
        workspace: Workspace,
        directory: int,
        parent: str,
        missing: tuple[str, ...],
        name: str,
        status: os.stat_result | None,
    ) -> None:
        self.directory = directory
        self.name: Final = name
        self.status: Final = status
        """Status of the name when it was located; None if it did not exist."""
        self._workspace: Final = workspace
        self._parent = parent
        self._missing = missing

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self.directory)

    @property
    def path(self) -> WorkspacePath:
        return WorkspacePath("/".join(filter(None, (self._parent, *self._missing, self.name))))

    @property
    def kind(self) -> Kind:
        """Kind of the name; FILE if it does not exist."""
        return Kind.FILE if self.status is None else kind_of(self.status.st_mode)

    @property
    def missing(self) -> list[WorkspacePath]:
        """The missing parent directories, uppermost first."""
        ends = range(1, len(self._missing) + 1)
        return [WorkspacePath("/".join(filter(None, (self._parent, *self._missing[:end])))) for end in ends]

    def open_file(self) -> int:
        """Open the file for reading; the caller closes it. ESTALE if it was replaced or is not a regular file."""
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
        descriptor = _open_beneath(self.directory, self.name, flags, _EXACTLY)
        now = os.fstat(descriptor)
        if self.status is None or not os.path.samestat(now, self.status) or not stat.S_ISREG(now.st_mode):
            os.close(descriptor)
            raise _moved(self.path)
        return descriptor

    def make_directory(self, permit: Permit) -> None:  # noqa: ARG002 - a change requires one
        """Create the uppermost missing directory, or accept it if it exists by now, and hold it instead."""
        name, *rest = self._missing
        self.check()
        is_new = True
        try:
            with MAKER.get()():
                os.mkdir(name, dir_fd=self.directory)
        except FileExistsError:
            is_new = False
        above, path = self.directory, f"{self._parent}/{name}" if self._parent else name
        below = _open_beneath(above, name, os.O_RDONLY | os.O_DIRECTORY, _EXACTLY)
        self.directory, self._parent, self._missing = below, path, tuple(rest)
        try:
            if is_new:
                os.fsync(above)
        finally:
            os.close(above)

    def unlink(self, permit: Permit) -> None:  # noqa: ARG002 - a change requires one
        """Remove a file or symlink. Raises FileNotFoundError, OSError."""
        if self.status is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
        self.check()
        os.unlink(self.name, dir_fd=self.directory)

    def check(self) -> None:
        """Check that the path still leads to the open directory. Raises OSError if the directory was moved."""
        descriptor = self._workspace.open_directory(self._parent)
        try:
            if not os.path.samestat(os.fstat(descriptor), os.fstat(self.directory)):
                raise _moved(self._parent)
        finally:
            os.close(descriptor)


def _text(pure: PurePosixPath) -> str:
    return "" if not pure.parts else str(pure)


def _without_symlinks(pure: PurePosixPath) -> PurePosixPath:
    """Resolve the directory of a path, for callers that name the workspace through a symlink."""
    try:
        # The policy refuses a literal `..`. realpath would resolve it through the symlinks.
        return pure if ".." in pure.parts else PurePosixPath(os.path.realpath(pure.parent), pure.name)
    except ValueError:
        return pure  # NUL or an invalid name: the policy refuses it


def _lstat(directory: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
