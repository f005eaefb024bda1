"""A source as it will be after some steps of an undo: the plan is made on it before anything is written.

The tree reads a name from the disk at its first use. Changes stay in memory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from bonobofs.policy.request import Kind
from bonobofs.system import syscalls
from bonobofs.undo.changes import FileState, Restoration


class FileNode:
    """A file, directory or symlink of the tree."""

    __slots__ = (
        "born",
        "children",
        "disk_mtime",
        "disk_size",
        "gid",
        "ino",
        "inos",
        "kind",
        "links",
        "mode",
        "mtime",
        "real",
        "size",
        "target",
        "uid",
    )

    def __init__(self, state: FileState, real: str | None = None, born: int = 0) -> None:
        self.kind: Final = state.kind
        self.mode = state.mode
        self.uid = state.uid
        self.gid = state.gid
        self.mtime = state.mtime
        self.size = state.size
        self.ino: Final = state.ino
        self.born: Final = born
        """When the inode was created, in nanoseconds; 0: unknown."""
        self.inos: Final[set[int]] = set()
        """Inode numbers that the file had before undos restored it."""
        self.links = max(state.links, 1)
        self.real: Final = real
        """Path on the disk; None: the undo creates it."""
        self.disk_size: Final = state.size
        self.disk_mtime: Final = state.mtime
        self.target = ""
        self.children: dict[str, FileNode | None] = {}
        """Names that are known; None: there is no such name."""

    @property
    def is_dir(self) -> bool:
        return self.kind is Kind.DIRECTORY

    def has_content_of(self, state: FileState) -> bool:
        """Whether a file or symlink is as a change left it, as far as size and time of modification tell."""
        return self.kind is state.kind and (self.size, self.mtime) == (state.size, state.mtime)

    def is_file_of(self, state: FileState) -> bool:
        """Whether it is the file of a recorded state.

        An inode that was created after that state has only reused the number.
        """
        if self.kind is not state.kind:
            return False
        return state.ino in self.inos or (state.ino == self.ino and self.born <= state.ctime)


class SourceTree:
    """The files of one source."""

    def __init__(self, source: Path, restored: Mapping[int, list[Restoration]]) -> None:
        """`restored`: see `changes.restored_files`."""
        self._restored: Final = restored
        self._source: Final = os.fspath(source)
        self._by_ino: Final[dict[int, FileNode]] = {}
        """Files with several names."""
        root = self._read("")
        assert root is not None
        self._root: Final = root

    def find(self, path: str) -> FileNode | None:
        """Return the node of a path, without following symlinks; None: there is none."""
        node: FileNode | None = self._root
        for name in path.split("/") if path else ():
            if node is None or not node.is_dir:
                return None
            if name not in node.children:
                node.children[name] = None if node.real is None else self._read(_join(node.real, name))
            node = node.children[name]
        return node

    def directory_of(self, path: str) -> FileNode | None:
        """Return the directory of a path; None: there is none."""
        node = self.find(path.rpartition("/")[0])
        return node if node is not None and node.is_dir else None

    def put(self, path: str, node: FileNode) -> None:
        """Give a node a name. Its directory exists."""
        above = self.directory_of(path)
        assert above is not None
        above.children[path.rpartition("/")[2]] = node

    def remove(self, path: str) -> None:
        """Remove a name."""
        above = self.directory_of(path)
        assert above is not None
        above.children[path.rpartition("/")[2]] = None

    def is_empty(self, node: FileNode) -> bool:
        """Return whether a directory has no names."""
        return not any(True for _ in self.names(node))

    def names(self, node: FileNode) -> Iterator[str]:
        """Yield the names in a directory. OSError."""
        yield from (name for name, child in node.children.items() if child is not None)
        if node.real is not None:
            for name in os.listdir(os.path.join(self._source, node.real)):
                if name not in node.children:
                    yield name

    def directories(self) -> Iterator[tuple[str, FileNode]]:
        """Yield the directories that were found, with their paths."""
        found = [("", self._root)]
        while found:
            path, node = found.pop()
            yield path, node
            below = ((_join(path, name), child) for name, child in node.children.items() if child is not None)
            found += [(name, child) for name, child in below if child.is_dir]

    def path_of(self, state: FileState) -> str | None:
        """Return a path of the file of a recorded state; None: there is none. Leaves out what cannot be read."""
        pending = [("", self._root)]  # no recursion: an agent chooses the depth
        while pending:
            above, top = pending.pop()
            names: list[str] = []
            with suppress(OSError):
                names = sorted(self.names(top))
            for name in names:
                path, child = _join(above, name), None
                with suppress(OSError):
                    child = self.find(path) if path != ".git" else None
                if child is not None and child.is_file_of(state):
                    return path
                if child is not None and child.is_dir:
                    pending.append((path, child))
        return None

    def _read(self, path: str) -> FileNode | None:
        full = os.path.join(self._source, path) if path else self._source
        try:
            st = os.lstat(full)
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISDIR(st.st_mode) and st.st_ino in self._by_ino:
            return self._by_ino[st.st_ino]
        state = FileState(
            st.st_mode, st.st_uid, st.st_gid, st.st_mtime_ns, st.st_size, st.st_ino, st.st_nlink, st.st_ctime_ns
        )
        try:
            born = syscalls.birth_time(os.fsencode(full))
        except OSError:
            born = 0
        node = FileNode(state, path, born)
        for restoration in self._restored.get(st.st_ino, ()):
            if born <= restoration.ctime:
                node.inos.update(restoration.inos)
        if not node.is_dir and st.st_nlink > 1:
            self._by_ino[st.st_ino] = node
        if node.kind is Kind.SYMLINK:
            node.target = os.readlink(full)
        return node


def _join(above: str, name: str) -> str:
    return f"{above}/{name}" if above else name
