"""The files of the working tree, beneath the workspace's root: looked at, read, written, taken away.

Every file is reached by its directory's descriptor, which is opened with no symlink allowed on the way and on no other
file system; the name itself is never followed. So whatever is swapped for a symlink meanwhile, nothing outside is read
or written. A file is replaced by a rename, from a name that the journal states.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict
from collections.abc import Container
from contextlib import suppress
from types import TracebackType
from typing import Final, NamedTuple, Self

from bonobofs.decision import Allowed
from bonobofs.errors import GitError
from bonobofs.guards.beneath import Workspace
from bonobofs.guards.git.conversion import Conversion
from bonobofs.guards.git.index import Entry, Index, Stat, stat_of
from bonobofs.guards.git.journal import Left
from bonobofs.guards.git.modes import EXECUTABLE, FILE, FILES, SYMLINK
from bonobofs.guards.git.repository import Blob, Repository

_HELD: Final = 64
"""How many directories are held open at once."""
_NOT_THERE: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EXDEV)


class Found(NamedTuple):
    """A file or a symlink, as it is."""

    mode: int
    """As git has it."""
    content: bytes
    """What git keeps of it."""
    stat: Stat


class WorkTree:
    """The working tree of a repository; close it after use."""

    def __init__(self, workspace: Workspace, repository: Repository) -> None:
        self._workspace: Final = workspace
        self._repository: Final = repository
        self._conversion: Final = Conversion(repository, self._says_attributes)
        self._executable: Final = repository.settings.flag("core.filemode", default=True)
        self._symlinks: Final = repository.settings.flag("core.symlinks", default=True)
        self._directories: Final[OrderedDict[bytes, int]] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._directories.values():
            os.close(descriptor)
        self._directories.clear()

    def _directory(self, path: bytes) -> int:
        """A directory by its path, held open; OSError where there is none."""
        held = self._directories.get(path)
        if held is not None:
            self._directories.move_to_end(path)
            return held
        descriptor = self._workspace.open_directory(os.fsdecode(path))
        self._directories[path] = descriptor
        if len(self._directories) > _HELD:
            os.close(self._directories.popitem(last=False)[1])
        return descriptor

    def forget(self) -> None:
        """Let go of every directory: names may have come to lead elsewhere."""
        while self._directories:
            os.close(self._directories.popitem()[1])

    def follow(self, index: Index) -> None:
        """Know what is staged, for attributes."""
        self._conversion.follow(index.entries)

    def look(self, path: bytes) -> os.stat_result | None:
        """What is there, unfollowed; None: nothing, or the way there leads over something that is no directory."""
        above, _, name = path.rpartition(b"/")
        try:
            return os.stat(name, dir_fd=self._directory(above), follow_symlinks=False)
        except OSError as error:
            if error.errno in _NOT_THERE:
                return None
            raise

    def _says_attributes(self, path: bytes) -> bool:
        """Whether there is a file of attributes. GitError: it is none that could be read, as a FIFO would never be."""
        status = self.look(path)
        if status is not None and not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise GitError(f"{_text(path)} is no plain file", kind="unsupported", paths=(_text(path),))
        return status is not None

    def read(self, path: bytes, known: Entry | None = None) -> Found | None:
        """A file or symlink and its content; None: nothing is there, or a directory.

        `known` is what is staged of it: its executable bit stays where the file system keeps none. GitError: it is of
        a kind that git does not keep, or changes while it is read.
        """
        above, _, name = path.rpartition(b"/")
        try:
            directory = self._directory(above)
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISLNK(status.st_mode):
                return Found(SYMLINK, os.readlink(name, dir_fd=directory), stat_of(status))
            if stat.S_ISDIR(status.st_mode):
                return None
            if not stat.S_ISREG(status.st_mode):
                raise GitError(f"{_text(path)} is no file that git can keep", kind="pathspec", paths=(_text(path),))
            content, status = self._content(directory, name)
        except OSError as error:
            if error.errno in _NOT_THERE:
                return None
            raise
        self._conversion.check(path)
        mode = self._mode(status, known)
        return Found(mode, self._conversion.to_blob(path, content) if mode != SYMLINK else content, stat_of(status))

    def _content(self, directory: int, name: bytes) -> tuple[bytes, os.stat_result]:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=directory)
        with os.fdopen(descriptor, "rb") as file:
            before = os.fstat(descriptor)
            if not stat.S_ISREG(before.st_mode):
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            content = file.read()
            after = os.fstat(descriptor)
        if stat_of(before) != stat_of(after):
            raise GitError(f"{_text(name)} changes while it is read; try again", kind="busy", paths=(_text(name),))
        return content, after

    def _mode(self, status: os.stat_result, known: Entry | None) -> int:
        if not self._symlinks and known is not None and known.mode == SYMLINK:
            return SYMLINK
        if not self._executable:
            return known.mode if known is not None and known.mode in FILES else FILE
        return EXECUTABLE if status.st_mode & stat.S_IXUSR else FILE

    def is_unchanged(self, entry: Entry, written_ns: int) -> bool:
        """Whether the file is what is staged, told by its times where they can tell.

        `written_ns` is when the index was written: a file as young as that is read.
        """
        status = self.look(entry.path)
        if status is None:
            return False
        if (
            stat_of(status) == entry.stat
            and stat.S_IFMT(status.st_mode) == (stat.S_IFLNK if entry.mode == SYMLINK else stat.S_IFREG)
            and entry.stat[2] * 1_000_000_000 + entry.stat[3] < written_ns
        ):
            return True
        return self.holds(entry.path, Blob(entry.mode, entry.oid), entry)

    def holds(self, path: bytes, blob: Blob | None, known: Entry | None = None) -> bool:
        """Whether the file is what a blob says; None: whether nothing is there."""
        try:
            found = self.read(path, known)
        except GitError as error:
            if error.kind != "pathspec":
                raise
            return False
        if found is None or blob is None:
            return found is None and blob is None
        return found.mode == blob.mode and self._repository.id_of(found.content) == blob.oid

    def blob_of(self, path: bytes, known: Entry | None = None) -> Blob | None:
        """What git would keep of what is there; None: nothing that it keeps. It is kept, so that it can be put back."""
        try:
            found = self.read(path, known)
        except GitError as error:
            if error.kind != "pathspec":
                raise
            return None
        return None if found is None else Blob(found.mode, self._repository.write_blob(found.content))

    def is_directory(self, path: bytes) -> bool:
        status = self.look(path)
        return status is not None and stat.S_ISDIR(status.st_mode)

    def holds_only(self, path: bytes, tracked: Container[bytes]) -> bool:
        """Whether all that lies below a directory is tracked."""
        with os.scandir(self._directory(path)) as found:
            names = [(os.fsencode(each.name), each.is_dir(follow_symlinks=False)) for each in found]
        return all(
            self.holds_only(path + b"/" + name, tracked) if is_directory else path + b"/" + name in tracked
            for name, is_directory in names
        )

    def write(self, path: bytes, blob: Blob, temporary: bytes, leave: Allowed | Left) -> Stat:  # noqa: ARG002 - no change without one
        """Bring a blob to its place, over what is there; `temporary` is a name that nobody else has.

        As root, a file keeps its owner, and a new one has its directory's. Its other names keep the old content.
        """
        above, _, name = path.rpartition(b"/")
        self._make(above)
        directory = self._directory(above)
        old = self.look(path)
        if old is not None and stat.S_ISDIR(old.st_mode):
            try:
                os.rmdir(name, dir_fd=directory)  # an empty one is nothing to git
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:
                    raise
                message = f"{_text(path)} is to be a file, and is a directory of untracked files; move them away"
                raise GitError(message, kind="untracked", paths=(_text(path),)) from None
            self.forget()
            directory = self._directory(above)
        if blob.mode == SYMLINK and self._symlinks:
            os.symlink(self._repository.blob(blob.oid), temporary, dir_fd=directory)
        else:
            self._fill(directory, temporary, path, blob)
        if os.geteuid() == 0:
            owner = os.fstat(directory) if old is None else old
            os.chown(temporary, owner.st_uid, owner.st_gid, dir_fd=directory, follow_symlinks=False)
        self._check(directory, above)
        os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        if name == b".gitattributes":
            self._conversion.forget()
        return stat_of(os.stat(name, dir_fd=directory, follow_symlinks=False))

    def _fill(self, directory: int, temporary: bytes, path: bytes, blob: Blob) -> None:
        content = self._repository.blob(blob.oid)
        if blob.mode in FILES:
            self._conversion.check(path)
            content = self._conversion.to_file(path, blob.oid)
        mode = 0o777 if blob.mode == EXECUTABLE and self._executable else 0o666
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, mode, dir_fd=directory)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)

    def _check(self, directory: int, path: bytes) -> None:
        """See that a held directory still is where its path says; OSError when it was moved."""
        top = os.readlink(f"/proc/self/fd/{self._workspace.descriptor}").rstrip("/")
        there = os.fsencode(os.readlink(f"/proc/self/fd/{directory}"))
        if there != os.fsencode(top) + (b"/" + path if path else b""):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), _text(path))

    def _make(self, path: bytes) -> None:
        """Make the directories of a path that are not there; a file or symlink in their place is not removed."""
        if not path:
            return
        try:
            self._directory(path)
        except FileNotFoundError:
            above, _, name = path.rpartition(b"/")
            self._make(above)
            parent = self._directory(above)
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=parent)
                if os.geteuid() == 0:
                    owner = os.fstat(parent)
                    os.chown(name, owner.st_uid, owner.st_gid, dir_fd=parent, follow_symlinks=False)

    def remove(self, path: bytes, leave: Allowed | Left) -> None:  # noqa: ARG002 - no change without one
        """Take a file away, and the directories that are empty without it. One that is not there is no error."""
        above, _, name = path.rpartition(b"/")
        try:
            directory = self._directory(above)
            self._check(directory, above)
            os.unlink(name, dir_fd=directory)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
        while above:
            path, name = above, above
            above, _, name = path.rpartition(b"/")
            held = self._directories.pop(path, None)
            if held is not None:
                os.close(held)
            try:
                os.rmdir(name, dir_fd=self._directory(above))
            except OSError:
                return

    def remove_stray(self, path: bytes, temporary: bytes) -> None:
        """Take away what a killed process left beside a file."""
        with suppress(OSError):
            os.unlink(temporary, dir_fd=self._directory(path.rpartition(b"/")[0]))


def _text(path: bytes) -> str:
    return path.decode("utf-8", "surrogateescape")
