"""The read-only directory `.bonobofs` at the root of a mount: what the agent may do, what was refused, and who it is.

It is never listed, so `git status`, cp, tar and rsync do not see it. A lookup that finds new content makes a new node,
so a reader gets one consistent document and no page needs to be invalidated.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from typing import Final

from bonobofs.fuse.abi import ATTR

NAME: Final = b".bonobofs"
FIRST_ID: Final = 1 << 62
DIRECTORY_ID: Final = FIRST_ID
_MOST_KEPT: Final = 32
"""Maximum of snapshots of all files together."""
LONGEST: Final = 1 << 20
"""Maximum of bytes of one file."""
LISTED: Final = 1_000
"""Maximum of names of each kind in `.bonobofs/scratch`. Listing more would delay other requests."""
ALL: Final = -1
"""The viewer that sees all entries: the session's user, root, and the user of `--user`."""
_BY_VIEWER: Final = frozenset({b"denials.jsonl", b"scratch"})
"""Files in which other users see only their own entries."""


class VirtualDir:
    """The nodes of `.bonobofs`: the directory, and snapshots of its files."""

    def __init__(self, files: dict[bytes, Callable[[int], bytes]], guest: int | None = None) -> None:
        """`files` has a function for each name, which returns the content for a viewer (ALL or a uid).

        `guest` is the uid of `--user`.
        """
        self._see_all: Final = {0, os.geteuid(), guest}
        self._files: Final = files
        self._snapshots: dict[int, bytes] = {}
        self._lookups: dict[int, int] = {}
        self._latest: dict[tuple[bytes, int], int] = {}
        """Node ids by name and viewer. The page cache is per node, so viewers share no node."""
        self._next = FIRST_ID + 1
        self._made: Final = int(time.time())
        self._owner: Final = (os.geteuid(), os.getegid())

    def lookup(self, name: bytes, uid: int) -> tuple[int, bytes] | None:
        """Return node id and attributes of a file for this user, and add one reference. None: there is no such file."""
        make = self._files.get(name)
        if make is None:
            return None
        viewer = uid if name in _BY_VIEWER and uid not in self._see_all else ALL
        content = make(viewer)
        if len(content) > LONGEST:
            content = content[: content.rfind(b"\n", 0, LONGEST) + 1]
        key = name, viewer
        node_id = self._latest.get(key, 0)
        if self._snapshots.get(node_id) != content:
            node_id = self._next
            self._next += 1
            if self._latest.get(key, 0) not in self._lookups:
                self._snapshots.pop(self._latest.get(key, 0), None)
            self._snapshots[node_id] = content
            self._latest[key] = node_id
            self._drop_oldest()
        self._lookups[node_id] = self._lookups.get(node_id, 0) + 1
        return node_id, self.attr(node_id)

    def _drop_oldest(self) -> None:
        """Keep at most _MOST_KEPT snapshots. Readers of a dropped one get ESTALE."""
        if len(self._snapshots) > _MOST_KEPT:
            latest = set(self._latest.values())
            oldest = next((each for each in self._snapshots if each not in latest), next(iter(self._snapshots)))
            del self._snapshots[oldest]
            self._latest = {key: node_id for key, node_id in self._latest.items() if node_id != oldest}

    def attr(self, node_id: int) -> bytes:
        """Return `fuse_attr` of a node. KeyError: there is none."""
        if node_id == DIRECTORY_ID:
            mode, size = stat.S_IFDIR | 0o555, 0
        else:
            mode, size = stat.S_IFREG | 0o444, len(self._snapshots[node_id])
        times = (self._made, self._made, self._made, 0, 0, 0)
        blocks = (size + 511) // 512
        return ATTR.pack(node_id, size, blocks, *times, mode, 1, *self._owner, 0, 4096, 0)

    def read(self, node_id: int, offset: int, size: int) -> bytes:
        """Return a part of a file. KeyError: there is no such node."""
        return self._snapshots[node_id][offset : offset + size]

    def path(self, node_id: int) -> str:
        """Return the path of a node in the workspace."""
        name = next((name for (name, _), latest in self._latest.items() if latest == node_id), b"")
        return os.fsdecode(os.path.join(NAME, name)) if name else os.fsdecode(NAME)

    def names(self) -> list[bytes]:
        """Return the names in `.bonobofs`."""
        return list(self._files)

    def forget(self, node_id: int, count: int) -> None:
        """Drop `count` references."""
        left = self._lookups.get(node_id, 0) - count
        if left > 0:
            self._lookups[node_id] = left
            return
        self._lookups.pop(node_id, None)
        if node_id not in self._latest.values():
            self._snapshots.pop(node_id, None)
