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
from bonobofs.fuse.git_grants import GitGrants, GrantOps
from bonobofs.fuse.inode_table import InodeTable, Node
from bonobofs.fuse.layer_store import LayerStore
from bonobofs.fuse.lookup_ops import LookupOps
from bonobofs.fuse.mount_context import Handler, MountContext, Notifications
from bonobofs.fuse.overlay import Overlay
from bonobofs.fuse.overlay_ops import OverlayOps
from bonobofs.fuse.read_ops import ReadOps
from bonobofs.fuse.remove_ops import RemoveOps
from bonobofs.fuse.rename_ops import RenameOps
from bonobofs.fuse.session_git_dir import NAME as GIT
from bonobofs.fuse.session_git_dir import BranchMirrorOps, SessionGitDir
from bonobofs.fuse.temp_files import TempFileOps, TempFiles
from bonobofs.fuse.virtual_dir import VirtualDir
from bonobofs.fuse.write_ops import WriteOps


class Operations:
    """All handlers of one mount, and the work between its requests."""

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
        mount = self.mount = MountContext(inodes, source, temp_files, overlay, enforcer, virtual, notifications)
        mount.grants = GitGrants()
        source.on_stale = overlay.store.on_stale = self._look_again
        inodes.on_replaced = lambda parent, name: notifications.entry(parent.id, name)
        self._stores: Final[list[LayerStore]] = []
        staged = TempFileOps(mount)
        layers = OverlayOps(mount, staged)
        grants = GrantOps(mount)
        self._mirror: Final = BranchMirrorOps(mount)
        lookups = LookupOps(mount, staged, layers, self._mirror)
        attributes = AttrOps(mount, staged, layers, lookups)
        self.explain: Final = attributes.explain
        self.handlers: Final[dict[int, Handler]] = {
            **lookups.handlers,
            **DirOps(mount, staged, layers, self._mirror).handlers,
            **ReadOps(mount).handlers,
            **attributes.handlers,
            **WriteOps(mount, layers, grants).handlers,
            **CreateOps(mount, staged, layers, grants).handlers,
            **RemoveOps(mount, staged, layers, grants).handlers,
            **RenameOps(mount, staged, layers).handlers,
        }

    def _look_again(self, node: Node) -> None:
        self.mount.notifications.inode(node.id, 0, 0)
        if node.parent is not None:
            self.mount.notifications.entry(node.parent.id, node.name)

    def show_repository(self, repository: SessionGitDir) -> None:
        """Show the session's own `.git`, which is in the overlay, in place of the source's."""
        self.mount.repository = repository
        self._mirror.mirror_branches(repository.common)
        self.mount.overlay.show_name(GIT)
        for store in repository.stores.values():
            store.on_stale = self._look_again
            self._stores.append(store)

    def begin_request(self, now: float) -> None:
        """Start a request at the time `now`."""
        self.mount.source.begin_request(now)
        if self.mount.overlay.directories:
            self.mount.overlay.store.begin_request(now)
        for store in self._stores:
            store.begin_request(now)

    def after_reply(self) -> None:
        """Close descriptors that no request uses, and make the kernel drop nodes that keep too many."""
        crowded = self.mount.source.after_reply()
        if self.mount.overlay.directories:
            crowded = (*crowded, *self.mount.overlay.store.after_reply())
        for store in self._stores:
            crowded = (*crowded, *store.after_reply())
        if crowded:
            names = [(node.parent.id, node.name) for node in crowded if node.parent is not None]
            self.mount.notifications.prune([node.id for node in crowded], names)

    def expire_caches(self) -> None:
        """Drop what may be out of date: branches, mounts, idle descriptors. Called about once a second."""
        self._mirror.follow_branches()
        self.mount.source.read_mounts()
        self.mount.source.close_idle()
        if self.mount.inodes.shrink():
            self.mount.own_effects.compact()
        self.mount.overlay.store.close_idle()
        for store in self._stores:
            store.close_idle()
