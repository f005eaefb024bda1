"""Names that are held: what programs give to a file until it is whole, shown in the mount and not in the source.

A held file is an inode without a name on the source's own file system, so that a rename onto an allowed name is one
link. It is kept open for as long as the session shows it: the table has a reference of its own to each node, and
FORGET does not end it. A held symlink lies in the session's directory, as there are none without a name.

The table goes by paths, not by nodes, so that it does not matter which directories the kernel remembers.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import count, islice
from typing import Final, NamedTuple

from bonobofs.fuse.inode_table import Node
from bonobofs.fuse.virtual_dir import ALL
from bonobofs.policy.request import WorkspacePath

FIRST_COOKIE: Final = 0x7FFF_FFFF_0000_0000
"""What is not the source's is listed behind what it has. ext4, btrfs, XFS and tmpfs give no cookies up there, but for
the very last one."""
LAST_COOKIE: Final = 0x7FFF_FFFF_FFFF_FFFF
LISTED: Final = 1_000
"""Names of each kind that `.bonobofs/scratch` lists; looking at more keeps other requests waiting."""


class StagedName(NamedTuple):
    """One held name: where it stands in a listing of its directory, and what it leads to."""

    cookie: int
    node: Node


class TempFiles:
    """The names that are held, by directory and name."""

    def __init__(self, place: str, most: int, cookies: count[int]) -> None:
        """`place` is a directory of the session's; `most` is how many may be held: each takes a descriptor.

        `cookies` number what a listing shows behind the source's own names.
        """
        self.place: Final = place
        self._most: Final = most
        self.directories: Final[dict[WorkspacePath, dict[bytes, StagedName]]] = {}
        self._paths: Final[dict[int, list[WorkspacePath]]] = {}
        self._cookies: Final = cookies

    def find(self, directory: WorkspacePath, name: bytes) -> Node | None:
        """What is held under this name."""
        names = self.directories.get(directory)
        held = names.get(name) if names is not None else None
        return held.node if held is not None else None

    def names(self, node: Node) -> int:
        """How many held names lead to the node."""
        return len(self._paths.get(node.id, ()))

    def listing(self, directory: WorkspacePath, cookie: int) -> list[tuple[int, bytes, Node]]:
        """Cookie, name and node of the held names of a directory that come after the cookie, in order."""
        names = self.directories.get(directory)
        if names is None:
            return []
        return [(held.cookie, name, held.node) for name, held in names.items() if held.cookie > cookie]

    @property
    def is_full(self) -> bool:
        """Whether no further file can be held."""
        return len(self._paths) >= self._most

    def add(self, directory: WorkspacePath, name: bytes, node: Node) -> None:
        """Hold the node under this name (too). FileExistsError: another is held under it."""
        names = self.directories.setdefault(directory, {})
        if name in names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        names[name] = StagedName(next(self._cookies), node)
        paths = self._paths.setdefault(node.id, [])
        paths.append(joined(directory, name))
        if node.parent is None:
            node.path = paths[0]

    def drop(self, directory: WorkspacePath, name: bytes) -> Node:
        """The name is held no more; it led to this node."""
        names = self.directories[directory]
        node = names.pop(name).node
        if not names:
            del self.directories[directory]
        paths = self._paths[node.id]
        paths.remove(joined(directory, name))
        if not paths:
            del self._paths[node.id]
        elif node.parent is None:
            node.path = paths[0]
        return node

    def exchange(self, directory: WorkspacePath, name: bytes, other: WorkspacePath, other_name: bytes) -> None:
        """Each of two held names leads to what the other led to."""
        one, two = self.drop(directory, name), self.drop(other, other_name)
        self.add(directory, name, two)
        self.add(other, other_name, one)

    def below(self, directory: WorkspacePath) -> Iterator[tuple[WorkspacePath, Node]]:
        """Path and node of everything that is held in the directory or deeper."""
        for above, names in self.directories.items():
            if is_below(above, directory):
                for name, held in names.items():
                    yield joined(above, name), held.node

    def move(self, old: WorkspacePath, new: WorkspacePath, *, exchange: bool = False) -> None:
        """A directory goes by another path now: what is held in it goes along."""
        moved, replaced = self._cut(old), self._cut(new) if exchange else {}
        self._put(moved, old, new)
        self._put(replaced, new, old)

    def _cut(self, path: WorkspacePath) -> dict[WorkspacePath, dict[bytes, StagedName]]:
        found = [above for above in self.directories if is_below(above, path)]
        return {above: self.directories.pop(above) for above in found}

    def _put(self, moved: dict[WorkspacePath, dict[bytes, StagedName]], old: WorkspacePath, new: WorkspacePath) -> None:
        for above, names in moved.items():
            there = WorkspacePath(new + above[len(old) :])
            self.directories[there] = names
            for name, held in names.items():
                paths = self._paths[held.node.id]
                paths[paths.index(joined(above, name))] = joined(there, name)
                if held.node.parent is None:
                    held.node.path = paths[0]

    def describe(self, viewer: int) -> bytes:
        """A line for each of the first LISTED held names: kind, bytes, path.

        A viewer other than ALL is shown its own files.
        """
        lines = list(islice(self._lines(viewer), LISTED + 1))
        if len(lines) > LISTED:
            lines[LISTED] = "temporary\t0\tand more\n"
        return "".join(lines).encode("utf-8", "surrogateescape")

    def _lines(self, viewer: int) -> Iterator[str]:
        """A line for each held name; "" for one that the viewer does not see."""
        for above, names in sorted(self.directories.items()):
            for name, held in names.items():
                # What was linked into the source is not apart any more, only this name of it.
                st = os.fstat(held.node.pin) if held.node.pin >= 0 else None
                is_shown = viewer == ALL or (st is not None and st.st_uid == viewer)
                size = st.st_size if st is not None else 0
                yield f"temporary\t{size}\t{printable(joined(above, name))}\n" if is_shown else ""


def joined(directory: WorkspacePath, name: bytes) -> WorkspacePath:
    """The path of a name in a directory."""
    text = os.fsdecode(name)
    return WorkspacePath(f"{directory}/{text}" if directory else text)


def is_below(path: WorkspacePath, directory: WorkspacePath) -> bool:
    """Whether the path is the directory's or lies below it."""
    return not directory or path == directory or path.startswith(f"{directory}/")


def printable(path: str) -> str:
    """The path on one line: backslashes and control characters as in a Python string."""
    return "".join(repr(each)[1:-1] if each == "\\" or each < " " or each == "\x7f" else each for each in path)


def is_behind(cookie: int) -> bool:
    """Whether a reader of a directory is behind the source's own names."""
    return FIRST_COOKIE < cookie < LAST_COOKIE
