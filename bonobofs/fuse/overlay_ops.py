"""What the handlers share for scratch paths: layer resolution, copy-up, whiteouts and quotas.

The source and the upper layer are shown as one tree. `resolve` finds the layer before a handler acts: if the permit is
for the overlay and the file is in the source, it is copied up, or its name hidden, and the change is made in the
overlay.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from typing import Final

from bonobofs.enforcement.authorizer import RelatedChange
from bonobofs.enforcement.write_batches import WriteBatch
from bonobofs.errors import os_error
from bonobofs.fuse.inode_table import Node
from bonobofs.fuse.mount_context import MOST_NAMES, NOTHING, Header, MountContext
from bonobofs.fuse.overlay import NAME, UpperDir
from bonobofs.fuse.slices import Busy, Steps, finished
from bonobofs.fuse.temp_files import TempFileOps
from bonobofs.policy import denials
from bonobofs.policy.decision import Code, CrossLayerError, Denied, Layer, Permit, WrongLayerError
from bonobofs.policy.request import EXISTS, Kind, Operation, Request, WorkspacePath

Removal = Callable[[int, bytes, Permit], None]


class OverlayOps:
    """Shared steps of handlers for paths in the overlay."""

    def __init__(self, mount: MountContext, staged: TempFileOps) -> None:
        self._mount: Final = mount
        self._staged: Final = staged
        self._failed_copies: Final[dict[int, OSError]] = {}
        """Errors of copies by threads, by node id, for the requests that wait for them."""

    # -- layers

    def resolve_layer(self, parent: Node, directory: int, name: bytes) -> tuple[Node, int]:
        """Return the directory that has the shown name, of the source or of the overlay, and its descriptor.

        FileNotFoundError: the name is a whiteout.
        """
        upper_dir = self._mount.overlay.upper_dir(parent) if self._mount.overlay.directories else None
        if upper_dir is None:
            return parent, directory
        if name in upper_dir.names:
            return upper_dir.node, self._mount.overlay.store.directory(upper_dir.node, changing=True)
        if name in upper_dir.whiteouts:
            raise os_error(errno.ENOENT)
        return parent, directory

    def target_dir(
        self, header: Header, request: Request, parent: Node, directory: int, permit: Permit
    ) -> tuple[Node, int]:
        """Return the directory for a new name, in the layer of the permit, and its descriptor.

        Raises: FileExistsError if the name exists; WrongLayerError if the permit is for the source and the directory is
        only in the overlay; Refused or ENOSPC if there is no space.
        """
        if permit.layer is Layer.SCRATCH:
            self.check_quota(header, request, more=NAME)
            self._staged.check_state_disk(header, request, NAME, 1)
        elif header.uid:
            self._mount.source.check_reserve(NAME)
        if permit.layer is parent.layer and not self._mount.overlay.directories:
            return parent, directory
        name = os.fsencode(request.path.rpartition("/")[2])
        if permit.layer is parent.layer:
            upper_dir = self._mount.overlay.upper_dir(parent)
            if upper_dir is not None:
                # the policy has changed: the path is no longer scratch, so the source is shown
                upper_dir.whiteouts.discard(name)
            return parent, directory
        if parent.layer is not Layer.SOURCE:
            raise WrongLayerError(permit)
        if permit.layer is Layer.STAGED:
            return parent, directory
        upper_dir = self._mount.overlay.ensure_upper_dir(parent, permit)
        if name in upper_dir.names or (name not in upper_dir.whiteouts and inode_number(directory, name)):
            raise os_error(errno.EEXIST)
        self._mount.overlay.remove_upper_dir(self._mount.join(parent, name), permit)
        return upper_dir.node, self._mount.overlay.store.directory(upper_dir.node, changing=True)

    def add_upper(self, parent: Node, target_dir: Node, name: bytes) -> None:
        """Add a name that was created in `target_dir` to the overlay, if it is there."""
        if target_dir.layer is Layer.SCRATCH:
            self._mount.overlay.sizes.add_names(self._mount.join(parent, name), 1)
        if target_dir is not parent:
            upper_dir = self._mount.overlay.directories[self._mount.path(parent)]
            self._mount.overlay.add_upper(upper_dir, name)

    def hide_name(self, parent: Node, name: bytes, permit: Permit) -> None:
        """Hide a name that was removed from the overlay. Add a whiteout if the source has it."""
        if permit.layer is Layer.SCRATCH and parent.layer is Layer.SOURCE:
            upper_dir = self._mount.overlay.ensure_upper_dir(parent, permit)
            below = inode_number(parent.store.directory(parent), name)
            self._mount.overlay.hide(upper_dir, name, below=below > 0)
            self._mount.own_effects.note_name(parent.ino, name, below)  # the name of the source is unchanged

    # -- lookups

    def lookup_upper(self, parent: Node, name: bytes) -> bytes | None:
        """Return the entry of a name that the upper directory has or hides; None if the source decides."""
        upper_dir = self._mount.overlay.upper_dir(parent)
        if upper_dir is None:
            return None
        if name in upper_dir.names:
            return self.upper_entry(upper_dir, name)
        return self._mount.no_entry if name in upper_dir.whiteouts else None

    def upper_entry(self, upper_dir: UpperDir, name: bytes) -> bytes:
        return self._mount.entry(upper_dir.node, name, self._mount.overlay.store.stat_entry(upper_dir.node, name))

    # -- copy-up

    def resolve(
        self, header: Header, node: Node, st: os.stat_result, change: RelatedChange
    ) -> tuple[Node, os.stat_result, Permit]:
        """Get the permit for a change of a node. Return the node in the permit's layer, its stat, and the permit.

        Raises: Refused; WrongLayerError.
        """
        request, context, _, head = change
        if request.kind is Kind.FILE and (st.st_nlink > 1 or (node.parent is None and node.layer is Layer.SOURCE)):
            if head is not None and self._mount.enforcer.policy.judges_content:
                context = context._replace(head=head())  # the other names of the file may be under another rule
            context = self._mount.with_foreign_names(node, st, request.operation, context)
            change = RelatedChange(request, context)
        permit = self._mount.permit(header, change)
        if permit.layer is node.layer:
            return node, st, permit
        node = self.copy_up(header, node, permit)
        return node, node.store.stat(node), permit

    def copy_up(self, header: Header, node: Node, permit: Permit, *, at_once: bool = False) -> Node:
        """Copy a node of the source to the overlay, before a change of it there. Return the node to change.

        Raises: WrongLayerError if the permit is not for the overlay, or the node is in another layer than the source;
        Refused if there is no space for it; Busy if a thread copies it first, because it is large and not needed
        `at_once`.
        """
        if node.id in self._failed_copies:
            raise self._failed_copies.pop(node.id)
        if node.layer is not Layer.SOURCE or permit.layer is not Layer.SCRATCH:
            raise WrongLayerError(permit)
        request = Request(Operation.WRITE_FILE, self._mount.path(node), node.kind)
        if node.is_dir:
            self._staged.check_state_disk(header, request, NAME, 1)
            upper_dir = self._mount.overlay.ensure_upper_dir(node, permit)
            if not upper_dir.attrs_copied:
                self._mount.overlay.store.copy_attributes(upper_dir.node, node, permit)
                upper_dir.attrs_copied = True
            return upper_dir.node
        st = node.store.stat(node)
        if node.kind is Kind.FILE:
            self._check_scratch_alone(header, node, request)
            self.check_quota(header, request, node.ino, st.st_size, more=NAME)
        self._staged.check_state_disk(header, request, st.st_blocks * 512 + NAME, 1)
        self._staged.close_batch(node)
        if not at_once and self._mount.needs_thread(min(st.st_size, st.st_blocks * 512)):
            raise Busy(self._copy_up_first(node, permit))
        finished(self._copy_up(node, permit))
        return node

    def _copy_up_first(self, node: Node, permit: Permit) -> Steps:
        """Copy a file up before the request that needs it is served. If the copy fails, that request gets its error."""
        try:
            return (yield from self._copy_up(node, permit))
        except OSError as error:
            self._failed_copies[node.id] = error
        return NOTHING

    def _copy_up(self, node: Node, permit: Permit) -> Steps:
        others = yield from self._mount.overlay.copy_up(node, partial(self._mount.make_in_thread, node), permit)
        for parent, name in others:
            self._mount.notifications.entry(parent.id, name)  # the name leads to another file now
        self._mount.notifications.inode(node.id, -1, 0)
        return NOTHING

    def _check_scratch_alone(self, header: Header, node: Node, request: Request) -> None:
        """Raise Refused if the file has a name that is not scratch, because the request does not show which name was
        opened.

        A program that opened the other name would write to the overlay, and lose the data at the end of the session.
        """
        links = self._mount.inodes.links(node.ino)
        if len(links) > MOST_NAMES:
            raise self._mount.deny(header, Denied(*denials.HARDLINK, request.path, request.operation))
        for parent, name in links:
            decision = self._mount.enforcer.decide(Request(request.operation, self._mount.join(parent, name)), EXISTS)
            if isinstance(decision, Permit) and decision.layer is Layer.SCRATCH:
                continue
            try:
                leads = node.store.leads_to(parent, name, node)
            except OSError:
                leads = False
            if leads:
                raise self._mount.deny(header, Denied(*denials.HARDLINK, request.path, request.operation))

    def check_quota(self, header: Header, request: Request, number: int = -1, size: int = 0, *, more: int = 0) -> None:
        """Raise Refused if the [[scratch]] has no room for a file of this size and `more` bytes."""
        denied = self._mount.overlay.sizes.refusal(request, number, size, more=more)
        if denied is not None:
            raise self._mount.deny(header, denied)

    def check_free_space(self, header: Header, node: Node, request: Request, needed: int) -> None:
        """Raise ENOSPC if the change allocates `needed` bytes that are reserved."""
        if node.layer is not Layer.SCRATCH:
            node.store.check_reserve(needed)
        elif needed > 0:
            self._staged.check_state_disk(header, request, needed)

    # -- removal

    def removal(self, layer_dir: Node, permit: Permit, effect: Removal) -> Removal:
        """Return the function that removes a name: `effect` in the layer of the permit, or none if the source's file is
        only hidden.
        """
        if permit.layer is layer_dir.layer:
            return effect
        if permit.layer is not Layer.SCRATCH:
            raise WrongLayerError(permit)
        return _stays

    def check_shown_empty(
        self, layer_dir: Node, directory: int, name: bytes, path: WorkspacePath, permit: Permit
    ) -> None:
        """Raise ENOTEMPTY if the directory shows an upper, staged or remaining name of the source."""
        self._staged.check_none_staged(path)
        in_source = layer_dir.layer is Layer.SOURCE
        if not in_source or (permit.layer is Layer.SOURCE and not self._mount.overlay.directories):
            return
        upper_dir = self._mount.overlay.directories.get(path)
        full = upper_dir is not None and bool(upper_dir.names)
        if permit.layer is not Layer.SOURCE:
            gone = upper_dir.whiteouts if upper_dir is not None else set()
            full = full or any(each not in gone for each in self._mount.source.names_in(directory, name))
        if full:
            raise os_error(errno.ENOTEMPTY)

    # -- usage and denials

    def note_size(self, node: Node | None, path: WorkspacePath) -> None:
        """Update the size of an overlay file, and the [[scratch]] that it counts towards."""
        if node is not None and node.layer is Layer.SCRATCH and node.kind is Kind.FILE and node.parent is not None:
            self._mount.overlay.sizes.recount(node.ino, path)
            self._mount.overlay.sizes.set_size(node.ino, path, node.store.stat(node).st_size)

    def limit_batch(self, batch: WriteBatch, node: Node, size: int) -> WriteBatch:
        """Limit a batch to the size that the quota was checked for."""
        if node.layer is Layer.SCRATCH and self._mount.overlay.sizes.is_limited(batch.request.path):
            batch.limit = size
        return batch

    def show_cross_layer_denial(
        self, header: Header, operation: Operation, path: WorkspacePath, error: OSError
    ) -> None:
        """Record in `denials.jsonl` why a rename or link fails with EXDEV."""
        if error.errno == errno.EXDEV:
            words = error.words if isinstance(error, CrossLayerError) else denials.ELSEWHERE
            denied = Denied(Code.ELSEWHERE, *words, path, operation)
            self._mount.enforcer.denial_recorder.show(denied, self._mount.caller(header))


def _stays(_directory: int, _name: bytes, _leave: Permit) -> None:
    """Leave the source's file in place."""


def inode_number(directory: int, name: bytes) -> int:
    """Return the inode number of the name, or 0 if it does not exist."""
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_ino
    except FileNotFoundError:
        return 0
