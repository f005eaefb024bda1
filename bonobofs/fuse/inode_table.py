"""The table of nodes that the kernel knows.

A node is an inode, identified by device and file handle, because an inode number may be reused. All nodes of a layer
have its device, so the table is keyed by inode number. The handle is read when a node is first shown and compared
whenever it is opened. A node with another handle is detached. Node ids are never reused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from bonobofs.fuse.abi import ROOT_ID
from bonobofs.policy.request import Kind, WorkspacePath, kind_of

if TYPE_CHECKING:
    from bonobofs.enforcement.write_batches import WriteBatch
    from bonobofs.fuse.layer_store import LayerStore

_SHRINK_AFTER: Final = 16_384
"""Minimum of nodes that are forgotten before the tables are shrunk."""
UNKNOWN: Final = -1
"""Fingerprint of a node that the kernel has not cached, or of a directory in which the mount has changed a name."""


class Node:
    """One inode that the kernel holds a reference to.

    `ino` is the inode number plus the offset of its layer. `layer` is the layer that has its bytes, `store` the store
    of that layer. `handle` is the file handle (`syscalls.file_handle`); it is empty if it is unknown. `parent` and
    `name` are one name of the inode. Without a parent, the node has no name left (an orphan) and is reached only by
    `fd` or `pin`. `name_unverified`: the name did not lead to the node at the last check.

    `fd` is -1 or a descriptor opened for `access` (os.R_OK | os.W_OK). `keeps_fd` excludes it from the cache's eviction
    until FORGET. `pin` is -1 or an O_PATH descriptor.

    `fingerprint` is the state that the kernel last got (`external_changes.fingerprint_of`), or UNKNOWN.
    `mounted_over`: something else is mounted on this directory, which is shown empty. `has_no_xattrs`: the file was
    created through this mount and has been given no extended attribute.

    `mtime` is the time of modification of a directory, in nanoseconds, when a change of a name in it last verified it.

    `kept`: the number of the pre-image that is a link of this inode, or 0. `kept_turn`: the last turn in which the
    content was kept.
    """

    __slots__ = (
        "access",
        "batch",
        "checked",
        "fd",
        "fingerprint",
        "handle",
        "has_no_xattrs",
        "id",
        "ino",
        "is_dir",
        "keeps_fd",
        "kept",
        "kept_turn",
        "kind",
        "layer",
        "lookups",
        "mounted_over",
        "mtime",
        "name",
        "name_unverified",
        "parent",
        "path",
        "path_epoch",
        "pin",
        "position",
        "store",
        "used",
    )

    def __init__(self, node_id: int, ino: int, parent: Node | None, name: bytes, kind: Kind, store: LayerStore) -> None:
        self.id = node_id
        self.store = store
        self.layer = store.layer
        self.ino = ino
        self.parent = parent
        self.name = name
        self.kind = kind
        self.is_dir = kind is Kind.DIRECTORY
        self.lookups = 0
        self.fd = -1
        self.pin = -1
        self.access = 0
        self.keeps_fd = False
        self.has_no_xattrs = False
        self.name_unverified = False
        self.mounted_over = False
        self.handle = b""
        self.path: WorkspacePath | None = None
        self.path_epoch = -1
        self.position = 0
        self.used = 0
        self.checked = 0.0
        self.mtime = 0
        self.batch: WriteBatch | None = None
        self.fingerprint = UNKNOWN
        self.kept = 0
        """Number of the linked pre-image that is this inode, which then has no other name; below 0: a thread copies it.
        """
        self.kept_turn = -1

    def shown_links(self, st: os.stat_result) -> int:
        """Return the number of names in the mount. An expiry may have removed that in the store."""
        return max(st.st_nlink - 1, 0) if self.kept else st.st_nlink


class ListedFile(NamedTuple):
    """A regular file of the source with one name, which the kernel knows from a listing alone.

    It takes 112 bytes, a node 240. The first request for it makes it a node.
    """

    id: int
    ino: int
    lookups: int
    parent: Node
    name: bytes
    handle: bytes
    fingerprint: int


class InodeTable:
    """Nodes by node id and by inode number."""

    def __init__(self) -> None:
        self._by_id: dict[int, Node | ListedFile] = {}
        self._by_ino: dict[int, Node | ListedFile] = {}
        self._forgotten = 0
        """Nodes dropped since the tables were last shrunk."""
        self._forgotten_before = 0
        """The same at the last call of `shrink`."""
        self._next_id = ROOT_ID + 1
        self._layers = 0
        self._linked: dict[int, dict[tuple[int, bytes], Node]] = {}
        self.on_replaced: Callable[[Node, bytes], None] = lambda _parent, _name: None
        """Called with a directory and a name that no longer lead to the node that the kernel has cached."""
        self._epoch = 0

    @property
    def root(self) -> Node:
        """The node of the mount's root."""
        return self._node(self._by_id[ROOT_ID])

    def get(self, node_id: int) -> Node | None:
        """Return the node with this id, or None."""
        known = self._by_id.get(node_id)
        return known if known is None or isinstance(known, Node) else self._node(known)

    def peek(self, node_id: int) -> Node | ListedFile | None:
        """Return the node or listed file with this id, or None."""
        return self._by_id.get(node_id)

    def _node(self, known: Node | ListedFile) -> Node:
        """Return the node; for a listed file, a new one with its id."""
        if isinstance(known, Node):
            return known
        node = Node(known.id, known.ino, known.parent, known.name, Kind.FILE, self._source)
        node.lookups = known.lookups
        node.handle = known.handle
        node.fingerprint = known.fingerprint
        self._by_id[node.id] = self._by_ino[node.ino] = node
        return node

    def add_layer(self) -> int:
        """Return the offset for the inode numbers of another layer. The first layer is the source; its offset is 0."""
        self._layers += 1
        return self._layers - 1 << 64

    def add_root(self, number: int, store: LayerStore) -> Node:
        """Add the root of a layer: for the source, the root of the mount; for others, a node that the kernel does not
        know.
        """
        if ROOT_ID in self._by_id:
            return self.add_nameless(number, Kind.DIRECTORY, store.prefix, store)
        node = Node(ROOT_ID, number, None, b"", Kind.DIRECTORY, store)
        node.lookups = 1
        self._source = store
        self._by_id[ROOT_ID] = self._by_ino[number] = node
        return node

    def find(self, number: int) -> Node | None:
        """Return the node with this inode number, or None."""
        known = self._by_ino.get(number)
        return known if known is None or isinstance(known, Node) else self._node(known)

    def list_file(self, parent: Node, name: bytes, st: os.stat_result, handle: Callable[[], bytes]) -> int:
        """Add a reference to a listed file and return its id; 0 if it has a node, or its state has changed.

        The caller ensures that `ListedFile` describes it.
        """
        current = st.st_size << 62 | st.st_ctime_ns
        known = self._by_ino.get(st.st_ino)
        if known is None:
            listed = ListedFile(self._next_id, st.st_ino, 1, parent, name, handle(), current)
            self._next_id += 1
        elif isinstance(known, Node) or known[3:5] != (parent, name) or known.fingerprint != current:
            return 0
        else:
            listed = ListedFile(known.id, known.ino, known.lookups + 1, *known[3:])
        self._by_id[listed.id] = self._by_ino[listed.ino] = listed
        return listed.id

    def reference(self, parent: Node, name: bytes, st: os.stat_result) -> Node:
        """Return the node of `name` in `parent`, with one more reference. `st` was just read from it.

        If the inode number is known under another name and the file has only one, the file was moved externally
        or the number reused. These cases cannot be distinguished, so the result is a new node.
        """
        number = st.st_ino + parent.store.ino_offset
        node = self.find(number)
        if node is None:
            node = self._new(number, parent, name, kind_of(st.st_mode), parent.store)
        elif node.parent is None and (node.pin >= 0 or node.keeps_fd):
            # its descriptor keeps the inode number, so this is another of its names
            node.parent, node.name = parent, name
        elif node.parent is not parent or node.name != name:
            if node.is_dir or st.st_nlink < 2:
                node = self._replace(node, parent, name, st)
            elif node.name_unverified or node.parent is None or self._by_id.get(node.parent.id) is not node.parent:
                node.parent, node.name = parent, name  # its name leads elsewhere, or its renames are not followed
                node.name_unverified = False
        elif node.kind is not kind_of(st.st_mode):
            node = self._replace(node, parent, name, st)
        if st.st_nlink > 1 and not node.is_dir:
            if node.parent is not None:  # the kernel may know this name since the file had one only
                self.note_link(node.ino, node.parent, node.name)
            self.note_link(node.ino, parent, name)
        node.lookups += 1
        return node

    def reference_mounted_over(self, parent: Node, name: bytes, st: os.stat_result) -> Node:
        """Return the node of a mountpoint below the source. It is not keyed by its inode number alone."""
        key = (1 << 128) | (st.st_dev << 64) | st.st_ino
        node = self.find(key)
        if node is None:
            node = self._new(key, parent, name, Kind.DIRECTORY, parent.store)
            node.mounted_over = True
        node.parent, node.name = parent, name
        node.lookups += 1
        return node

    def _new(self, ino: int, parent: Node | None, name: bytes, kind: Kind, store: LayerStore) -> Node:
        node = Node(self._next_id, ino, parent, name, kind, store)
        self._next_id += 1
        self._by_id[node.id] = node
        self._by_ino[ino] = node
        return node

    def add_nameless(self, number: int, kind: Kind, path: WorkspacePath, store: LayerStore) -> Node:
        """Add a node without a name, shown at `path`. The caller has its first reference."""
        node = self._new(number, None, b"", kind, store)
        node.path = path
        node.lookups = 1
        return node

    def renumber(self, node: Node, number: int, store: LayerStore) -> None:
        """Give the node another inode, of the layer of `store`."""
        if self._by_ino.get(node.ino) is node:
            del self._by_ino[node.ino]
        node.ino = number
        node.handle = b""
        node.fingerprint = UNKNOWN
        node.store = store
        node.layer = store.layer
        self._by_ino[number] = node

    def replace_reused(self, old: Node, parent: Node, name: bytes, st: os.stat_result) -> Node:
        """Return a new node for `name`, because another file has reused the inode number of `old`."""
        old.lookups -= 1
        node = self._replace(old, parent, name, st)
        if st.st_nlink > 1 and not node.is_dir:
            self.note_link(node.ino, parent, name)
        node.lookups += 1
        return node

    def _replace(self, old: Node, parent: Node, name: bytes, st: os.stat_result) -> Node:
        if old.parent is not None:
            self.on_replaced(old.parent, old.name)
        self.detach(old)
        return self._new(old.ino, parent, name, kind_of(st.st_mode), parent.store)

    def detach(self, node: Node) -> None:
        """Detach the node from its inode number and names. The kernel may still use its id."""
        if self._by_ino.get(node.ino) is node:
            del self._by_ino[node.ino]
        self._linked.pop(node.ino, None)
        self.orphan(node)

    def orphan(self, node: Node) -> None:
        """Remove the node's last known name. `path` is still its last path."""
        node.path = self.path(node)
        node.parent = None
        node.fingerprint = UNKNOWN

    def forget(self, node_id: int, count: int) -> Node | ListedFile | None:
        """Drop references. Return the node if these were the last, so that the caller closes its descriptors."""
        node = self._by_id.get(node_id)
        if node is None or node_id == ROOT_ID:
            return None
        if isinstance(node, ListedFile) and node.lookups > count:
            node = self._node(node)
        if isinstance(node, Node):
            node.lookups -= count
            if node.lookups > 0:
                return None
        del self._by_id[node_id]
        if self._by_ino.get(node.ino) is node:
            del self._by_ino[node.ino]
        self._forgotten += 1
        return node

    def shrink(self) -> bool:
        """Rebuild the tables after a burst of FORGETs has ended. Return True if few nodes are left.

        A dict keeps its size when its keys are deleted: the two tables keep 84 MB after a million nodes.
        """
        before, self._forgotten_before = self._forgotten_before, self._forgotten
        if self._forgotten != before or before < max(_SHRINK_AFTER, len(self._by_id)):
            return False
        self._forgotten = 0
        for table in (self._by_id, self._by_ino):
            known = dict(table)
            table.clear()
            table.update(known)
        return len(self._by_id) < _SHRINK_AFTER

    def path(self, node: Node) -> WorkspacePath:
        """Return the node's path, or the last path of an orphan."""
        if node.path_epoch == self._epoch and node.path is not None:
            return node.path
        above: list[Node] = []
        at = node
        while at.parent is not None and (at.path_epoch != self._epoch or at.path is None):
            above.append(at)
            at = at.parent
        path = at.path or ""
        for below in reversed(above):
            name = below.name.decode("utf-8", "surrogateescape")
            path = f"{path}/{name}" if path else name
            if below.is_dir:
                below.path = WorkspacePath(path)
                below.path_epoch = self._epoch
        return WorkspacePath(path)

    def join(self, parent: Node, name: bytes) -> WorkspacePath:
        """Return the path of `name` in `parent`."""
        above = self.path(parent)
        text = name.decode("utf-8", "surrogateescape")
        return WorkspacePath(f"{above}/{text}" if above else text)

    def rename(self, node: Node, parent: Node, name: bytes) -> None:
        """Give the node this name."""
        if node.parent is not None:
            self.drop_link(node.ino, node.parent, node.name)
        node.parent = parent
        node.name = name
        if node.ino in self._linked:
            self._linked[node.ino][parent.ino, name] = parent
        if node.is_dir:
            self._epoch += 1

    def note_link(self, ino: int, parent: Node, name: bytes) -> None:
        """Add a name of a file that has several. It is kept after FORGET, so that the name does not become unknown."""
        self._linked.setdefault(ino, {})[parent.ino, name] = parent

    def drop_link(self, ino: int, parent: Node, name: bytes) -> None:
        """Remove a name of a file that has several."""
        links = self._linked.get(ino)
        if links is not None:
            links.pop((parent.ino, name), None)
            if not links:
                del self._linked[ino]

    def links(self, ino: int) -> tuple[tuple[Node, bytes], ...]:
        """Return the known names of a file that has several."""
        known = self._linked.get(ino)
        if known is None:
            return ()
        # A directory that was forgotten and looked up again is a new node. Renames are followed for the new one.
        return tuple((self.find(above) or parent, name) for (above, name), parent in known.items())

    def descends(self, node: Node, ancestor: Node) -> bool:
        """Whether `node` is `ancestor` or below it."""
        at: Node | None = node
        while at is not None:
            if at is ancestor:
                return True
            at = at.parent
        return False

    def __iter__(self) -> Iterator[int]:
        """Iterate over the node ids."""
        return iter(self._by_id)

    def files_below(self, directory: Node) -> Iterator[int]:
        """Yield the ids of the regular files below a directory. No node may be added meanwhile."""
        return (
            each.id
            for each in self._by_id.values()
            if (isinstance(each, ListedFile) or each.kind is Kind.FILE)
            and each.parent is not None
            and self.descends(each.parent, directory)
        )


def joined(directory: WorkspacePath, name: bytes) -> WorkspacePath:
    """Return the path of a name in a directory."""
    text = os.fsdecode(name)
    return WorkspacePath(f"{directory}/{text}" if directory else text)
