"""Read protected directories: the kind, mode and content hash of each path, without following a symlink.

The agent may change the tree while it is read. So each directory and file is opened beneath its parent, each file is
read until its status is the same before and after, and what cannot be read is an entry with its problem.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

from bonobofs.errors import BonobofsError, error_text
from bonobofs.system import syscalls

LARGEST: Final = 1 << 30
"""Maximum bytes of a file whose content is hashed."""
DEEPEST: Final = 200
"""Maximum depth of a path below the root: each level has an open descriptor."""
KEPT: Final = 64 << 20
"""Maximum bytes of the contents that a capture keeps."""
_TRIES: Final = 3
_BLOCK: Final = 1 << 20
_LISTED: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_BENEATH: Final = 0x08 | 0x04 | 0x01
"""RESOLVE_BENEATH, RESOLVE_NO_SYMLINKS and RESOLVE_NO_XDEV."""
MOUNTED: Final = "another file system is mounted here"
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_KINDS: Final = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFBLK: "device",
    stat.S_IFCHR: "device",
}


class IntegrityError(BonobofsError):
    """A protected directory cannot be captured. The message names the path."""


class TreeEntry(NamedTuple):
    """A path of a protected directory."""

    kind: str
    mode: int
    """Permission bits; 0 for a symlink."""
    hash: str = ""
    """SHA-256 of the content or of the target, in hex; "" if there is none or it was not read."""
    blob: str = ""
    """Id of the content as a git blob, in hex."""
    problem: str = ""
    """Why the path could not be read."""
    modified: int = 0
    """Modification time of a file in nanoseconds. A difference is no change."""
    owner: tuple[int, int] = (-1, -1)
    """User and group id. A difference is no change."""

    def equals(self, other: TreeEntry | None) -> bool:
        """True if kind, mode and content are equal. An entry with a problem equals none."""
        return other is not None and self[:3] == other[:3] and not self.problem and not other.problem


Tree = dict[str, TreeEntry]
"""Entries by path from the root, decoded with surrogateescape."""


def capture(
    root: str, directories: Sequence[str], contents: dict[str, bytes] | None = None, *, kept: int = KEPT
) -> Tree:
    """Read `directories` and everything below them, and return the entry of each path.

    The content of files and the targets of symlinks are added to `contents`, by their SHA-256. Their total size is at
    most `kept` bytes: a file for which too few bytes are left is skipped. IntegrityError: `root` cannot be opened.
    """
    try:
        top = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise IntegrityError(f"{root} cannot be read: {error_text(error)}") from error
    try:
        reader = _TreeReader(os.fstat(top).st_dev, contents, kept)
        for directory in directories:
            first, *rest = directory.split("/")
            reader.read(top, first, first, rest)
    finally:
        os.close(top)
    return reader.tree


class _TreeReader:
    def __init__(self, device: int, contents: dict[str, bytes] | None, kept: int) -> None:
        self.tree: Final[Tree] = {}
        self._device: Final = device
        self._contents: Final = contents
        self._room = kept

    def read(self, parent: int, name: str, path: str, rest: Sequence[str] = ()) -> None:
        """Add the entries of `name` in the directory `parent`, and of everything below it.

        `rest` are the further names of a protected directory: above it, nothing else is read.
        """
        st: os.stat_result | None = None
        try:
            st = os.stat(name, dir_fd=parent, follow_symlinks=False)
            kind = _KINDS.get(stat.S_IFMT(st.st_mode), "unknown")
            entry = TreeEntry(kind, 0 if kind == "symlink" else stat.S_IMODE(st.st_mode))
            entry = entry._replace(modified=st.st_mtime_ns, owner=(st.st_uid, st.st_gid))
            if kind == "directory":
                self.tree[path] = entry
                self._read_directory(parent, name, path, rest)
            elif kind == "symlink":
                self.tree[path] = self._with_content(entry, [os.fsencode(os.readlink(name, dir_fd=parent))])
            elif kind == "file":
                self.tree[path] = self._read_file(parent, name, entry)
            else:
                self.tree[path] = entry
        except FileNotFoundError:
            self.tree.pop(path, None)
        except OSError as error:
            known = self.tree.get(path) or TreeEntry("unknown" if st is None else kind, 0)
            self.tree[path] = known._replace(problem=error_text(error))

    def _read_directory(self, parent: int, name: str, path: str, rest: Sequence[str]) -> None:
        fd = os.open(name, _LISTED | os.O_CLOEXEC, dir_fd=parent)
        try:
            if os.fstat(fd).st_dev != self._device:
                raise OSError(errno.EXDEV, MOUNTED)
            if path.count("/") == DEEPEST:
                raise OSError(errno.ELOOP, f"the path has more than {DEEPEST} levels")
            for each in rest[:1] or sorted(os.listdir(fd)):
                self.read(fd, each, f"{path}/{each}", rest[1:])
        finally:
            os.close(fd)

    def _read_file(self, parent: int, name: str, entry: TreeEntry) -> TreeEntry:
        for _ in range(_TRIES):
            fd = os.open(name, _READ | os.O_CLOEXEC, dir_fd=parent)
            try:
                before = os.fstat(fd)
                if not stat.S_ISREG(before.st_mode):
                    continue
                if before.st_size > LARGEST:
                    raise OSError(errno.EFBIG, f"the file has more than {LARGEST} bytes")
                found = self._with_content(entry, blocks(fd, before.st_size), before.st_size)
                after = os.fstat(fd)
            finally:
                os.close(fd)
            if _status(before) == _status(after):
                return found._replace(mode=stat.S_IMODE(after.st_mode), modified=after.st_mtime_ns)
        raise OSError(errno.EBUSY, "the file changes while it is read")

    def _with_content(self, entry: TreeEntry, blocks: Iterator[bytes] | list[bytes], size: int = 0) -> TreeEntry:
        """Return the entry with its hashes. `size` is that of a file, which also gets a git blob id."""
        digest = hashlib.sha256()
        blob = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        kept: list[bytes] | None = [] if self._contents is not None and size <= self._room else None
        for block in blocks:
            digest.update(block)
            blob.update(block)
            if kept is not None:
                kept.append(block)
        found = digest.hexdigest()
        if kept is not None and self._contents is not None and found not in self._contents:
            self._contents[found] = b"".join(kept)
            self._room -= len(self._contents[found])
        return entry._replace(hash=found, blob=blob.hexdigest() if entry.kind == "file" else "")


def blocks(fd: int, size: int) -> Iterator[bytes]:
    """Yield the content of a file, at most one byte more than `size`: a program may append without end."""
    left = size + 1
    while left > 0 and (block := os.read(fd, min(_BLOCK, left))):
        left -= len(block)
        yield block


def _status(st: os.stat_result) -> tuple[int, ...]:
    return st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns


@contextmanager
def opened_parent(top: int, path: str) -> Iterator[tuple[int, str]]:
    """Open the directory of `path` beneath `top` without following symlinks; yield it and the name. OSError."""
    above, _, name = path.rpartition("/")
    directory = syscalls.openat2(top, os.fsencode(above or "."), _LISTED, _BENEATH)
    try:
        yield directory, name
    finally:
        os.close(directory)


def as_plain(tree: Tree) -> dict[str, list[Any]]:
    """Return a tree as data for JSON."""
    return {path: list(entry) for path, entry in tree.items()}


def from_plain(plain: dict[str, list[Any]]) -> Tree:
    """Return the tree of `as_plain`. ValueError: the data is damaged."""
    with suppress(TypeError, IndexError, AttributeError):
        return {path: TreeEntry(*fields[:6])._replace(owner=tuple(fields[6][:2])) for path, fields in plain.items()}
    raise ValueError("the entries of the snapshot are damaged")
