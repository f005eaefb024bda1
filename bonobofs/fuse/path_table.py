"""From paths to nodes: a kernel in miniature, for a transport that is given paths.

The handlers know nodes, which they are asked about by the messages of the kernel's protocol, and keep what they know of
a node for as long as somebody holds a reference to it. So each path is walked here from the root, with a LOOKUP for
each component and a FORGET for each reference that is given up, and what was found is kept as the kernel keeps it:
a name holds one reference, and holds the directory that it lies in.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from time import monotonic
from typing import Final

from bonobofs.fuse import abi as p
from bonobofs.fuse.fd_cache import RECHECK
from bonobofs.fuse.mount_context import Header
from bonobofs.fuse.session_git_dir import NAME as GIT

MOST_NAMES: Final = 1000
"""Names that are kept for nobody."""

Ask = Callable[[p.Opcode, Header, bytes], bytes]
"""Puts one message to the handlers: opcode, who asks about which node, body; the reply's body. OSError."""


class Name:
    """A name that was found, and its node. Nobody but Paths changes one.

    `pins` counts what keeps it: handles, and names in it if it is a directory; `checked` is when it last was one.
    """

    __slots__ = ("above", "below", "checked", "name", "node", "pins")

    def __init__(self, above: Name | None, name: bytes, node: int) -> None:
        self.above = above
        self.name = name
        self.node = node
        self.pins = 0
        self.checked = 0.0
        self.below: dict[bytes, Name] = {}


class Paths:
    """The names of one mount that were found."""

    def __init__(self, ask: Ask) -> None:
        self._ask: Final = ask
        self.root: Final = Name(None, b"", p.ROOT_ID)
        self._names: Final[dict[Name, None]] = {}
        self._aliases: Final[dict[bytes, Name]] = {}
        self._most = MOST_NAMES

    def find(self, header: Header, path: bytes) -> tuple[Name, bytes]:
        """What lies at the path, and its `fuse_attr`, empty where that must be asked for.

        FileNotFoundError, NotADirectoryError: the way there is not what it was when the kernel went it.
        """
        if path == b"/":
            return self.root, b""
        above, last = self.directory(header, path)
        alias = self._aliases.get(last)
        return self._look(header, above, last) if alias is None else (alias, b"")

    def directory(self, header: Header, path: bytes) -> tuple[Name, bytes]:
        """The directory in which the path's last name lies, or is to lie, and that name. Errors as in `find`.

        A directory on the way that was found within RECHECK is not asked for again: a change looks at it anyway. Users
        may see different `.git`, so that each is asked for.
        """
        above, now = self.root, monotonic()
        *parts, last = path.split(b"/")[1:]
        for part in parts:
            known = above.below.get(part)
            if known is None or now - known.checked >= RECHECK or part == GIT:
                known, attr = self._look(header, above, part)
                if not stat.S_ISDIR(p.ATTR.unpack(attr)[9]):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                known.checked = now
            above = known
        return above, last

    def enter(self, above: Name, name: bytes, reply: bytes) -> tuple[Name, bytes]:
        """Keep the reference that the reply to LOOKUP, or to a request that made something, gave; with `fuse_attr`."""
        (node,) = p.NODE_ID.unpack_from(reply)
        if not node:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        attr = reply[p.ENTRY_OUT.size : p.ENTRY_OUT.size + p.ATTR.size]
        known = above.below.get(name)
        if known is not None:
            if known.node == node:
                self._forget(node)
                return known, attr
            self._detach(known)
        found = Name(above, name, node)
        above.below[name] = found
        above.pins += 1
        self._names[found] = None
        return found, attr

    def _look(self, header: Header, above: Name, name: bytes) -> tuple[Name, bytes]:
        try:
            reply = self._ask(p.Opcode.LOOKUP, header._replace(node_id=above.node), name + b"\0")
            return self.enter(above, name, reply)
        except FileNotFoundError:
            self.removed(above, name)
            raise

    # -- what keeps a name

    def pin(self, name: Name) -> None:
        """Somebody has it open."""
        name.pins += 1

    def unpin(self, name: Name) -> None:
        """Somebody has closed it."""
        name.pins -= 1
        if name.above is not None and name.above.below.get(name.name) is not name:
            self._drop(name)  # it was removed meanwhile

    def closed(self, name: Name) -> None:
        """As `unpin`, and where nothing but aliases keeps it then, they go."""
        self.unpin(name)
        texts = [text for text, other in self._aliases.items() if other is name]
        if len(texts) == name.pins:
            for text in texts:
                self.unalias(text)

    def alias(self, text: bytes, name: Name) -> None:
        """Paths that end in this lead to the name from now on, whatever its own path leads to."""
        self._aliases[text] = name
        self.pin(name)

    def is_alias(self, text: bytes) -> bool:
        """Whether it leads to a name."""
        return text in self._aliases

    def unalias(self, text: bytes) -> bool:
        """Forget an alias; False where there is none."""
        name = self._aliases.pop(text, None)
        if name is not None:
            self.unpin(name)
        return name is not None

    # -- what becomes of names

    def removed(self, above: Name, name: bytes) -> None:
        """The name is gone."""
        known = above.below.get(name)
        if known is not None:
            self._detach(known)

    def moved(self, above: Name, old: bytes, target: Name, new: bytes, *, exchange: bool) -> None:
        """What had the old name now has the new one, and with `exchange` the other way round too."""
        first, second = above.below.get(old), target.below.get(new)
        if first is not None and second is not None and first.node == second.node:
            return  # two names of one file: nothing has moved
        for known in (first, second):
            if known is not None:
                assert known.above is not None
                del known.above.below[known.name]
        if second is not None and exchange:
            self._place(second, above, old)
        elif second is not None:
            self._drop(second)
        if first is not None:
            self._place(first, target, new)

    def sweep(self) -> None:
        """Give up what is kept for nobody, where it has become much."""
        if len(self._names) > self._most:
            self.give_up()
            self._most = max(MOST_NAMES, 2 * len(self._names))

    def give_up(self) -> None:
        """Give up what is kept for nobody."""
        for name in reversed(list(self._names)):
            self._drop(name)

    def _place(self, name: Name, above: Name, text: bytes) -> None:
        before, name.above, name.name = name.above, above, text
        above.below[text] = name
        above.pins += 1
        assert before is not None
        self.unpin(before)

    def _detach(self, name: Name) -> None:
        assert name.above is not None
        del name.above.below[name.name]
        self._drop(name)

    def _drop(self, name: Name) -> None:
        """Give up a name that nothing keeps, and a removed directory that was kept by it alone."""
        if name.pins or name not in self._names:
            return
        above = name.above
        assert above is not None
        if above.below.get(name.name) is name:
            del above.below[name.name]
        del self._names[name]
        self._forget(name.node)
        self.unpin(above)

    def _forget(self, node: int) -> None:
        self._ask(p.Opcode.FORGET, Header(node, 0, 0, 0, 0), p.FORGET_IN.pack(1))
