"""The table of handlers by opcode, and the work between requests.

A handler gets the header and the body of a request and returns the body of the reply; an OSError becomes the reply's
errno. Reads go to a layer directly. Each change is authorized by the enforcer first, with a context (sizes, first
bytes, hard links) that the handler reads at that moment.
"""

from __future__ import annotations

from typing import Final

from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.fuse.attr_ops import AttrOps
from bonobofs.fuse.create_ops import CreateOps
from bonobofs.fuse.dir_ops import DirOps
from bonobofs.fuse.git_grants import GitGrants
from bonobofs.fuse.inode_table import InodeTable, Node
from bonobofs.fuse.layer_store import LayerStore
from bonobofs.fuse.mount_context import Handler, Notifications
from bonobofs.fuse.overlay import Overlay
from bonobofs.fuse.read_ops import ReadOps
from bonobofs.fuse.remove_ops import RemoveOps
from bonobofs.fuse.rename_ops import RenameOps
from bonobofs.fuse.session_git_dir import NAME as GIT
from bonobofs.fuse.session_git_dir import SessionGitDir
from bonobofs.fuse.temp_files import TempFiles
from bonobofs.fuse.virtual_dir import VirtualDir
from bonobofs.fuse.write_ops import WriteOps


class Operations(AttrOps, DirOps, ReadOps, WriteOps, CreateOps, RemoveOps, RenameOps):
    """All handlers of one mount."""

    def __init__(
        self,
        inodes: InodeTable,
        source: LayerStore,
        temp_files: TempFiles,
        overlay: Overlay,
        enforcer: Enforcer,
        virtual: VirtualDir,
        notifications: Notifications,
    ) -> None:
        super().__init__(inodes, source, temp_files, overlay, enforcer, virtual, notifications)
        self.grants = GitGrants()
        source.on_stale = overlay.store.on_stale = self._look_again
        self._stores: Final[list[LayerStore]] = []
        inodes.on_replaced = lambda parent, name: notifications.entry(parent.id, name)
        self.handlers: Final[dict[int, Handler]] = {
            **self._lookup_handlers(),
            **self._dir_handlers(),
            **self._read_handlers(),
            **self._attr_handlers(),
            **self._write_handlers(),
            **self._create_handlers(),
            **self._remove_handlers(),
            **self._rename_handlers(),
        }

    def _look_again(self, node: Node) -> None:
        self._notifications.inode(node.id, 0, 0)
        if node.parent is not None:
            self._notifications.entry(node.parent.id, node.name)

    def show_repository(self, repository: SessionGitDir) -> None:
        """Show the session's own `.git`, which is in the overlay, in place of the source's."""
        self.repository = repository
        self.mirror_branches(repository.common)
        self._overlay.show_name(GIT)
        for store in repository.stores.values():
            store.on_stale = self._look_again
            self._stores.append(store)

    def begin_request(self, now: float) -> None:
        """Start a request at the time `now`."""
        self._source.begin_request(now)
        if self._overlay.directories:
            self._overlay.store.begin_request(now)
        for store in self._stores:
            store.begin_request(now)

    def prune_nodes(self) -> None:
        """Make the kernel drop unused nodes that keep a descriptor, if there are too many.

        Called after each request.
        """
        crowded = self._source.nodes_to_prune()
        if self._overlay.directories:
            self._overlay.store.after_reply()
            crowded += self._overlay.store.nodes_to_prune()
        for store in self._stores:
            store.after_reply()
            crowded += store.nodes_to_prune()
        if crowded:
            names = [(node.parent.id, node.name) for node in crowded if node.parent is not None]
            self._notifications.prune([node.id for node in crowded], names)

    def expire_caches(self) -> None:
        """Drop what may be out of date: callers, branches, mounts, idle descriptors. Called about once a second."""
        self._callers.clear()
        self.follow_branches()
        self._source.read_mounts()
        self._source.close_idle()
        self._overlay.store.close_idle()
        for store in self._stores:
            store.close_idle()
