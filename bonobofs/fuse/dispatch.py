"""What the mount does for each request of the kernel: reads go to the source, changes through the guard first.

A handler gets the request's header fields and body and gives the reply's body; OSError is the reply's errno. Facts
that the engine needs (sizes, first bytes, names of a hard link) are gathered from what lies below at this moment.
"""

from __future__ import annotations

from typing import Final

from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.fuse.attr_ops import Attributes
from bonobofs.fuse.inode_table import Inodes, Node
from bonobofs.fuse.layer_store import LayerStore
from bonobofs.fuse.mount_context import Handler, Notices
from bonobofs.fuse.name_ops import Names
from bonobofs.fuse.overlay import Scratch
from bonobofs.fuse.read_ops import Reading
from bonobofs.fuse.session_git_dir import NAME as GIT
from bonobofs.fuse.session_git_dir import Repository
from bonobofs.fuse.temp_table import Held
from bonobofs.fuse.virtual_dir import Virtual


class Operations(Reading, Attributes, Names):
    """The handlers of one mount, by opcode."""

    def __init__(
        self,
        inodes: Inodes,
        backing: LayerStore,
        held: Held,
        scratch: Scratch,
        guard: Enforcer,
        files: Virtual,
        notices: Notices,
    ) -> None:
        super().__init__(inodes, backing, held, scratch, guard, files, notices)
        backing.lost = scratch.store.lost = self._look_again
        self._stores: Final[list[LayerStore]] = []
        inodes.moved = lambda parent, name: notices.entry(parent.id, name)
        self.handlers: Final[dict[int, Handler]] = {
            **self._reading(),
            **self._changing_content(),
            **self._changing_names(),
            **self._changing_attributes(),
        }

    def _look_again(self, node: Node) -> None:
        self._notices.inode(node.id, 0, 0)
        if node.parent is not None:
            self._notices.entry(node.parent.id, node.name)

    def show(self, repository: Repository) -> None:
        """Show the session's own `.git`, which lies in the scratch layer, in place of the source's."""
        self.repository = repository
        self.mirror_branches(repository.common)
        self._scratch.show(GIT)
        for store in repository.stores.values():
            store.lost = self._look_again
            self._stores.append(store)

    def begin(self, now: float) -> None:
        """A request begins at this time."""
        self._backing.begin(now)
        if self._scratch.directories:
            self._scratch.store.begin(now)
        for store in self._stores:
            store.begin(now)

    def relieve(self) -> None:
        """Called after each request: have the kernel forget what is held for nobody, before descriptors run out."""
        crowded = self._backing.crowded()
        if self._scratch.directories:
            self._scratch.store.after()
            crowded += self._scratch.store.crowded()
        for store in self._stores:
            store.after()
            crowded += store.crowded()
        if crowded:
            names = [(node.parent.id, node.name) for node in crowded if node.parent is not None]
            self._notices.prune([node.id for node in crowded], names)

    def quiet(self) -> None:
        """Called about once a second: forget what may have changed by itself."""
        self._callers.clear()
        self.follow_branches()
        self._backing.note_mounts()
        self._backing.drop_quiet()
        self._scratch.store.drop_quiet()
        for store in self._stores:
            store.drop_quiet()
