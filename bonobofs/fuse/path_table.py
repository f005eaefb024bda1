"""Table of paths and their nodes, for libfuse, which passes paths where the handlers need node ids.

The handlers keep a node as long as it has references. So each path is walked from the root, with one LOOKUP for each
component, as the kernel does it. Each name in the table holds one reference to its node, and pins the directory that
contains it. A name without pins may be forgotten, with one FORGET for its reference.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import Callable
from time import monotonic
from typing import Final

from bonobofs.errors import os_error
from bonobofs.fuse import abi as p
from bonobofs.fuse.fd_cache import RECHECK
from bonobofs.fuse.mount_context import Header
from bonobofs.fuse.session_git_dir import NAME as GIT

MAX_UNUSED: Final = 1000
"""Names that are kept although nothing pins them."""

Call = Callable[[p.Opcode, Header, bytes], bytes]
"""Calls the handler of an opcode, with header and body of the request; the body of the reply. OSError."""


class PathEntry:
    """A name and its node. Only PathTable changes it.

    `pins` counts open handles, aliases, and the names in a directory. `checked` is when the node last was a directory.
    """

    __slots__ = ("checked", "children", "name", "node", "parent", "pins")

    def __init__(self, parent: PathEntry | None, name: bytes, node: int) -> None:
        self.parent = parent
        self.name = name
        self.node = node
        self.pins = 0
        self.checked = 0.0
        self.children: dict[bytes, PathEntry] = {}


class PathTable:
    """The names of one mount that were looked up."""

    def __init__(self, call: Call) -> None:
        self._call: Final = call
        self.root: Final = PathEntry(None, b"", p.ROOT_ID)
        self._entries: Final[dict[PathEntry, None]] = {}
        self._aliases: Final[dict[bytes, PathEntry]] = {}
        self._limit = MAX_UNUSED

    def find(self, header: Header, path: bytes) -> tuple[PathEntry, bytes]:
        """The entry of a path, and its `fuse_attr`, or b"" if the caller must ask for the attributes.

        Raises FileNotFoundError or NotADirectoryError if the path has changed since the kernel walked it.
        """
        if path == b"/":
            return self.root, b""
        parent, name = self.find_parent(header, path)
        alias = self._aliases.get(name)
        return self._lookup(header, parent, name) if alias is None else (alias, b"")

    def find_parent(self, header: Header, path: bytes) -> tuple[PathEntry, bytes]:
        """The entry of the directory that contains the last name of the path, and that name. Errors as in `find`.

        A directory that was looked up within RECHECK is not looked up again: the handler of a change checks it. `.git`
        is always looked up, because users may see different ones.
        """
        parent, now = self.root, monotonic()
        *parts, last = path.split(b"/")[1:]
        for part in parts:
            entry = parent.children.get(part)
            if entry is None or now - entry.checked >= RECHECK or part == GIT:
                entry, attr = self._lookup(header, parent, part)
                if not stat.S_ISDIR(p.ATTR.unpack(attr)[9]):
                    raise os_error(errno.ENOTDIR)
                entry.checked = now
            parent = entry
        return parent, last

    def add(self, parent: PathEntry, name: bytes, reply: bytes) -> tuple[PathEntry, bytes]:
        """Keep the reference that a reply with `fuse_entry_out` gave; the entry and its `fuse_attr`."""
        (node,) = p.NODE_ID.unpack_from(reply)
        if not node:
            raise os_error(errno.ENOENT)
        attr = reply[p.ENTRY_OUT.size : p.ENTRY_OUT.size + p.ATTR.size]
        earlier = parent.children.get(name)
        if earlier is not None:
            if earlier.node == node:
                self._forget(node)
                return earlier, attr
            self._detach(earlier)
        entry = PathEntry(parent, name, node)
        parent.children[name] = entry
        parent.pins += 1
        self._entries[entry] = None
        return entry, attr

    def _lookup(self, header: Header, parent: PathEntry, name: bytes) -> tuple[PathEntry, bytes]:
        try:
            reply = self._call(p.Opcode.LOOKUP, header._replace(node_id=parent.node), name + b"\0")
            return self.add(parent, name, reply)
        except FileNotFoundError:
            self.remove(parent, name)
            raise

    # -- pins and aliases

    def pin(self, entry: PathEntry) -> None:
        """Keep an entry for an open handle."""
        entry.pins += 1

    def unpin(self, entry: PathEntry) -> None:
        """Undo `pin`."""
        entry.pins -= 1
        if entry.parent is not None and entry.parent.children.get(entry.name) is not entry:
            self._drop(entry)  # removed while it was open

    def unpin_closed(self, entry: PathEntry) -> None:
        """As `unpin`; if only aliases pin the entry then, they are removed."""
        self.unpin(entry)
        aliases = [alias for alias, target in self._aliases.items() if target is entry]
        if len(aliases) == entry.pins:
            for alias in aliases:
                self.remove_alias(alias)

    def add_alias(self, alias: bytes, entry: PathEntry) -> None:
        """Have every path that ends in `alias` lead to the entry."""
        self._aliases[alias] = entry
        self.pin(entry)

    def is_alias(self, name: bytes) -> bool:
        """Whether the name is an alias."""
        return name in self._aliases

    def remove_alias(self, alias: bytes) -> bool:
        """Remove an alias; False: there is none."""
        entry = self._aliases.pop(alias, None)
        if entry is not None:
            self.unpin(entry)
        return entry is not None

    # -- changes of names

    def remove(self, parent: PathEntry, name: bytes) -> None:
        """Record that a name was removed."""
        entry = parent.children.get(name)
        if entry is not None:
            self._detach(entry)

    def rename(self, parent: PathEntry, old: bytes, new_parent: PathEntry, new: bytes, *, exchange: bool) -> None:
        """Record a rename, or with `exchange` that two names were exchanged."""
        first, second = parent.children.get(old), new_parent.children.get(new)
        if first is not None and second is not None and first.node == second.node:
            return  # a rename between two hard links of one file changes nothing
        for entry in (first, second):
            if entry is not None:
                assert entry.parent is not None
                del entry.parent.children[entry.name]
        if second is not None and exchange:
            self._place(second, parent, old)
        elif second is not None:
            self._drop(second)
        if first is not None:
            self._place(first, new_parent, new)

    def limit_unused(self) -> None:
        """Forget the entries without pins if there are many."""
        if len(self._entries) > self._limit:
            self.drop_unused()
            self._limit = max(MAX_UNUSED, 2 * len(self._entries))

    def drop_unused(self) -> None:
        """Forget the entries without pins."""
        for entry in reversed(list(self._entries)):
            self._drop(entry)

    def _place(self, entry: PathEntry, parent: PathEntry, name: bytes) -> None:
        old_parent, entry.parent, entry.name = entry.parent, parent, name
        parent.children[name] = entry
        parent.pins += 1
        assert old_parent is not None
        self.unpin(old_parent)

    def _detach(self, entry: PathEntry) -> None:
        assert entry.parent is not None
        del entry.parent.children[entry.name]
        self._drop(entry)

    def _drop(self, entry: PathEntry) -> None:
        """Forget an entry without pins, and the removed directory that only this entry has pinned."""
        if entry.pins or entry not in self._entries:
            return
        parent = entry.parent
        assert parent is not None
        if parent.children.get(entry.name) is entry:
            del parent.children[entry.name]
        del self._entries[entry]
        self._forget(entry.node)
        self.unpin(parent)

    def _forget(self, node: int) -> None:
        self._call(p.Opcode.FORGET, Header(node, 0, 0, 0, 0), p.FORGET_IN.pack(1))
