"""Staged temporary files: shown in the mount, kept without a name, and published in the source by a rename or link.

A staged file is an unnamed inode on the source's file system, so that its publication is one link(2). The table keeps
it open and holds its own reference to the node, so FORGET does not end it. A staged symlink is in the session's
directory, because a symlink cannot be unnamed. The table is keyed by path, so it does not depend on which directories
the kernel knows.

The content of a staged file is judged when it gets a name in the source, as a file that is created there whole. From
then on the node has that name, also for programs that opened it before.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from typing import Final, NamedTuple

from bonobofs.audit.entry import BY, INODE
from bonobofs.audit.temp_cleanup import stray_name
from bonobofs.enforcement.authorizer import RelatedChange
from bonobofs.errors import os_error
from bonobofs.fuse import abi as p
from bonobofs.fuse.fd_cache import R, W, stale
from bonobofs.fuse.inode_table import Node, joined
from bonobofs.fuse.mount_context import LEAVES, Header, MountContext, Reply
from bonobofs.fuse.overlay import NAME
from bonobofs.fuse.virtual_dir import ALL, LISTED
from bonobofs.policy import denials
from bonobofs.policy.decision import CrossLayerError, Denied, Layer, Permit
from bonobofs.policy.request import EXISTS, STAGED, Context, Kind, Operation, Request, WorkspacePath, kind_of
from bonobofs.system import syscalls
from bonobofs.system.paths import is_within
from bonobofs.system.terminal import escape

_GOES: Final = Context(leaves=True, staged=True)
"""Context of the removal of a staged name."""
_SYMLINKS: Final = 2 << 128
"""Added to the inode number of a staged symlink, which is not on the source's file system."""


class StagedName(NamedTuple):
    """A staged name: its position in a listing, and its node."""

    cookie: int
    node: Node


class TempFiles:
    """The staged names, by directory and name."""

    def __init__(self, directory_path: str, most: int, cookies: count[int]) -> None:
        """`directory_path` is a directory of the session. `most` is the maximum of staged files; each
        keeps a descriptor open.

        `cookies` numbers the entries that a listing shows after the source's own.
        """
        self.directory_path: Final = directory_path
        self._most: Final = most
        self.directories: Final[dict[WorkspacePath, dict[bytes, StagedName]]] = {}
        self._paths: Final[dict[int, list[WorkspacePath]]] = {}
        self._cookies: Final = cookies

    def find(self, directory: WorkspacePath, name: bytes) -> Node | None:
        """Return the node of a staged name, or None."""
        names = self.directories.get(directory)
        staged = names.get(name) if names is not None else None
        return staged.node if staged is not None else None

    def names(self, node: Node) -> int:
        """Return how many staged names the node has."""
        return len(self._paths.get(node.id, ()))

    def listing(self, directory: WorkspacePath, cookie: int) -> list[tuple[int, bytes, Node]]:
        """Return cookie, name and node of the directory's staged names after the cookie, in order."""
        names = self.directories.get(directory)
        if names is None:
            return []
        return [(staged.cookie, name, staged.node) for name, staged in names.items() if staged.cookie > cookie]

    @property
    def is_full(self) -> bool:
        """Whether the maximum of staged files is reached."""
        return len(self._paths) >= self._most

    def add(self, directory: WorkspacePath, name: bytes, node: Node) -> None:
        """Add a staged name of the node. FileExistsError: the name is staged already."""
        names = self.directories.setdefault(directory, {})
        if name in names:
            raise os_error(errno.EEXIST)
        names[name] = StagedName(next(self._cookies), node)
        paths = self._paths.setdefault(node.id, [])
        paths.append(joined(directory, name))
        if node.parent is None:
            node.path = paths[0]

    def drop(self, directory: WorkspacePath, name: bytes) -> Node:
        """Remove a staged name and return its node."""
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
        """Exchange the nodes of two staged names."""
        first, second = self.drop(directory, name), self.drop(other, other_name)
        self.add(directory, name, second)
        self.add(other, other_name, first)

    def below(self, directory: WorkspacePath) -> Iterator[tuple[WorkspacePath, Node]]:
        """Yield path and node of each staged name in the directory and below."""
        for above, names in self.directories.items():
            if is_within(above, directory):
                for name, staged in names.items():
                    yield joined(above, name), staged.node

    def move(self, old: WorkspacePath, new: WorkspacePath, *, exchange: bool = False) -> None:
        """Move the staged names below a directory that has a new path."""
        moved, replaced = self._cut(old), self._cut(new) if exchange else {}
        self._put(moved, old, new)
        self._put(replaced, new, old)

    def _cut(self, path: WorkspacePath) -> dict[WorkspacePath, dict[bytes, StagedName]]:
        found = [above for above in self.directories if is_within(above, path)]
        return {above: self.directories.pop(above) for above in found}

    def _put(self, moved: dict[WorkspacePath, dict[bytes, StagedName]], old: WorkspacePath, new: WorkspacePath) -> None:
        for above, names in moved.items():
            new_path = WorkspacePath(new + above[len(old) :])
            self.directories[new_path] = names
            for name, staged in names.items():
                paths = self._paths[staged.node.id]
                paths[paths.index(joined(above, name))] = joined(new_path, name)
                if staged.node.parent is None:
                    staged.node.path = paths[0]

    def describe(self, viewer: int) -> bytes:
        """Return a line for each of the first LISTED staged names: kind, bytes, path.

        A viewer other than ALL gets its own files.
        """
        lines = list(islice(self._lines(viewer), LISTED + 1))
        if len(lines) > LISTED:
            lines[LISTED] = "temporary\t0\tand more\n"
        return "".join(lines).encode("utf-8", "surrogateescape")

    def _lines(self, viewer: int) -> Iterator[str]:
        """Yield a line for each staged name; "" for one that the viewer may not see."""
        for above, names in sorted(self.directories.items()):
            for name, staged in names.items():
                # A file that was also linked into the source is no longer staged; it has only this staged name.
                st = os.fstat(staged.node.pin) if staged.node.pin >= 0 else None
                is_shown = viewer == ALL or (st is not None and st.st_uid == viewer)
                size = st.st_size if st is not None else 0
                yield f"temporary\t{size}\t{escape(joined(above, name))}\n" if is_shown else ""


class End(NamedTuple):
    """One end of a rename: directory, name, and what is there.

    `shown` is the directory in which the caller sees the name; `parent` is the directory that has it, `shown` or its
    upper directory.
    """

    shown: Node
    parent: Node
    directory: int
    name: bytes
    path: WorkspacePath
    st: os.stat_result | None


def replaced_change(target: End, st: os.stat_result, arriving: Kind, *, exchange: bool = False) -> RelatedChange:
    """Return the change of the file `st` that a rename replaces. A regular file leaves its name to another kind."""
    kind = kind_of(st.st_mode)
    leaves = exchange or (kind is Kind.FILE and arriving is not Kind.FILE)
    return RelatedChange(Request(Operation.RENAME, target.path, kind), LEAVES if leaves else EXISTS)


class TempFileOps:
    """Shared steps of handlers for staged files."""

    def __init__(self, mount: MountContext) -> None:
        self._mount: Final = mount

    def staged_at(self, parent: Node, name: bytes) -> Node | None:
        """Return the node that is staged under this name, or None."""
        return (
            self._mount.temp_files.find(self._mount.path(parent), name) if self._mount.temp_files.directories else None
        )

    def staged_entry(self, node: Node) -> bytes:
        """Return `fuse_entry_out` of a staged file, and add one reference."""
        node.lookups += 1
        attr = self._mount.attr(node, self._mount.source.stat(node))
        return p.ENTRY_OUT.pack(node.id, 0, *self._mount.entry_times) + attr

    # -- creation

    def permit_new_name(self, header: Header, request: Request, context: Context) -> Permit:
        """Return the permit for a new file. Refused: it would be staged, and no descriptor is left for it."""
        permit = self._mount.permit(header, RelatedChange(request, context))
        if permit.layer is Layer.STAGED and (self._mount.temp_files.is_full or self._mount.source.is_crowded):
            raise self._mount.deny(header, Denied(*denials.TEMPORARY_FULL, request.path, request.operation))
        return permit

    def check_state_disk(self, header: Header, request: Request, size: int, names: int = 0) -> None:
        """Raise Refused if the state directory's disk has no space for so many bytes and inodes."""
        denied = self._mount.overlay.free_space.take(request, size, names)
        if denied is not None:
            raise self._mount.deny(header, denied)

    def stage_file(self, parent: Node, directory: int, name: bytes, mode: int, permit: Permit) -> Node:
        """Create a staged file as the current caller.

        FileExistsError: the name exists, which the kernel did not know.
        """
        above = self._check_name_free(parent, directory, name)
        fd = self._mount.source.create_nameless(directory, mode, permit)
        return self._add_staged(above, name, Kind.FILE, os.fstat(fd).st_ino, fd)

    def stage_symlink(
        self, header: Header, parent: Node, directory: int, name: bytes, target: bytes, permit: Permit
    ) -> Node:
        above = self._check_name_free(parent, directory, name)
        request = Request(Operation.SYMLINK, self._mount.join(parent, name), Kind.SYMLINK)
        self.check_state_disk(header, request, NAME, 1)  # it is stored in the session's directory
        fd = self._mount.source.create_nameless_symlink(
            self._mount.temp_files.directory_path, target, (header.uid, header.gid), permit
        )
        return self._add_staged(above, name, Kind.SYMLINK, _SYMLINKS | os.fstat(fd).st_ino, fd)

    def _add_staged(self, above: WorkspacePath, name: bytes, kind: Kind, number: int, fd: int) -> Node:
        source = self._mount.source
        node = self._mount.inodes.add_nameless(number, kind, joined(above, name), source)
        source.keep_nameless(node, fd, R | W if kind is Kind.FILE else 0)
        node.layer = Layer.STAGED
        self._mount.temp_files.add(above, name, node)
        return node

    def _check_name_free(self, parent: Node, directory: int, name: bytes) -> WorkspacePath:
        """Return the path of the directory if the name is free in it. FileExistsError."""
        above = self._mount.path(parent)
        try:
            os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            if self._mount.temp_files.find(above, name) is None:
                return above
        raise os_error(errno.EEXIST)

    # -- removal

    def unlink_staged(self, header: Header, parent: Node, name: bytes, node: Node) -> None:
        request = Request(Operation.DELETE_FILE, self._mount.join(parent, name), node.kind)
        with self._mount.authorize(header, request, _GOES, layer=Layer.STAGED):
            self.close_batch(node)
            self._discard(parent, name)

    def _discard(self, parent: Node, name: bytes) -> None:
        """Remove a staged name. Programs that have the file open keep it."""
        node = self._mount.temp_files.drop(self._mount.path(parent), name)
        if not self._mount.temp_files.names(node):
            self._mount.forget_node(node.id, 1)

    def close_batch(self, node: Node) -> None:
        if node.batch is not None:
            self._mount.enforcer.close_batch(node.id)
            node.batch = None

    # -- links

    def link_staged(self, header: Header, node: Node, parent: Node, directory: int, name: bytes) -> Reply:
        self._check_in_source(parent)
        path = self._mount.path(node)
        if not self._mount.temp_files.names(node):
            raise os_error(errno.ENOENT)
        request = Request(Operation.LINK, self._mount.join(parent, name), node.kind)
        taken = self.staged_at(parent, name) is not None
        permit = self._mount.permit(header, self.arriving_change(node, request, in_source=False, staged=taken))
        layer = Layer.STAGED if permit.layer is Layer.STAGED else Layer.SOURCE
        old = RelatedChange(Request(Operation.LINK, path, node.kind), STAGED, Layer.STAGED)
        admission = self._mount.authorize(header, request, permit, old, details={"from": path}, layer=layer)
        with admission:
            if layer is Layer.STAGED:
                self._mount.temp_files.add(self._check_name_free(parent, directory, name), name, node)
            elif node.kind is Kind.SYMLINK:
                raise os_error(errno.EPERM)
            else:
                self.close_batch(node)
                self._mount.source.publish(node, directory, name, b"", permit)
                self._note_published(node, parent, name)
                self._mount.mark_own_name(parent, name, node.ino)
                self._mount.mark_own_change(node)
                self._mount.preimages.after_name(admission, parent, directory, name)
        return self.staged_entry(node)

    def _check_in_source(self, directory: Node) -> None:
        """Raise EXDEV if the directory is in the overlay: staged files belong to directories of the source."""
        if directory.layer is not Layer.SOURCE:
            raise CrossLayerError(denials.OF_STAGED)

    def _note_published(self, node: Node, parent: Node, name: bytes) -> None:
        """Give the node the name that it now has in the source."""
        if node.layer is Layer.SOURCE:
            assert node.parent is not None
            self._mount.inodes.note_link(node.ino, node.parent, node.name)
            self._mount.inodes.note_link(node.ino, parent, name)
            return
        node.layer = Layer.SOURCE
        self._mount.inodes.rename(node, parent, name)
        self._mount.source.keep_named(node)

    # -- renames

    def rename_staged(self, header: Header, origin: End, target: End, flags: int) -> bool:
        """Rename a staged name. False: neither name is staged."""
        moving, replaced = self.staged_at(origin.parent, origin.name), self.staged_at(target.parent, target.name)
        taken = replaced is not None or target.st is not None
        if moving is None and replaced is None:
            return False
        if flags & syscalls.RENAME_NOREPLACE and taken:
            raise os_error(errno.EEXIST)
        if flags & syscalls.RENAME_EXCHANGE and (moving is None or replaced is None):
            raise CrossLayerError(denials.OF_STAGED) if taken else os_error(errno.ENOENT)
        if moving is None:
            return False
        if moving is replaced:
            return True
        self._check_in_source(target.parent)
        self.close_batch(moving)
        in_source, staged = replaced is None and target.st is not None, replaced is not None
        if in_source and target.st is not None and target.st.st_ino == moving.ino:
            self._discard(origin.parent, origin.name)  # a link was published under this name before
            return True
        request = Request(Operation.RENAME, target.path, moving.kind)
        permit = self._mount.permit(header, self.arriving_change(moving, request, in_source=in_source, staged=staged))
        if permit.layer is Layer.STAGED:
            self._rename_among_staged(
                header, moving, origin, target, permit, exchange=bool(flags & syscalls.RENAME_EXCHANGE)
            )
        else:
            self._publish(header, moving, origin, target, request, permit)
        return True

    def _rename_among_staged(
        self, header: Header, node: Node, origin: End, target: End, appears: Permit, *, exchange: bool
    ) -> None:
        old = Request(Operation.RENAME, origin.path, node.kind)
        details = {"to": target.path, "exchange": True} if exchange else {"to": target.path}
        with self._mount.authorize(header, old, _GOES, appears, details=details, layer=Layer.STAGED):
            above, below = self._mount.path(origin.parent), self._mount.path(target.parent)
            replaced = self.staged_at(target.parent, target.name)
            if exchange and replaced is not None:
                self.close_batch(replaced)
                self._mount.temp_files.exchange(above, origin.name, below, target.name)
                return
            if replaced is not None:
                self.close_batch(replaced)
                self._discard(target.parent, target.name)
            self._mount.temp_files.add(below, target.name, node)
            self._mount.temp_files.drop(above, origin.name)

    def _publish(self, header: Header, node: Node, origin: End, target: End, request: Request, permit: Permit) -> None:
        """Rename a staged file into the source, in one step: after a kill at any point, the target is the old file or
        the new one.

        The audit entry has the target's path, which is what changes in the source.
        """
        replaced = target.st
        changes = [RelatedChange(Request(Operation.RENAME, origin.path, node.kind), _GOES, Layer.STAGED)]
        if replaced is not None:
            changes.append(replaced_change(target, replaced, node.kind))
        details: dict[str, object] = {"from": origin.path}
        temporary = stray_name() if replaced is not None or node.kind is Kind.SYMLINK else ""
        if replaced is not None:
            details |= self._mount.preimages.before_removal(target.directory, target.name, replaced) or {}
        if temporary:
            details[BY] = temporary
            if node.kind is Kind.FILE:
                details[INODE] = node.ino
        action = "create" if replaced is None else "modify"
        admission = self._mount.authorize(header, request, permit, *changes, details=details, action=action)
        with admission:
            other = self._pin_replaced(target, replaced) if replaced is not None else None
            ends = target.directory, target.name
            publish = partial(self._rename_into_source, node, *ends, temporary.encode(), permit)
            self._mount.preimages.replace(admission, replaced, other, *ends, publish)
            self._mount.preimages.after_name(admission, target.parent, *ends)
        if replaced is not None:
            self._mount.after_unlink(other, target.parent, target.name, replaced)
        if node.kind is Kind.SYMLINK:
            self._note_published_symlink(node, target)
        else:
            self._note_published(node, target.parent, target.name)
        self._mount.mark_own_name(target.parent, target.name, node.ino)
        if temporary:
            self._mount.own_effects.note_name(target.parent.ino, temporary.encode(), 0)
        self._mount.mark_own_change(node)
        self._discard(origin.parent, origin.name)

    def _pin_replaced(self, target: End, replaced: os.stat_result) -> Node | None:
        try:
            return self._mount.pin_for_removal(target.parent, target.directory, target.name, replaced)
        except FileNotFoundError as error:
            raise stale() from error  # another process has just removed it; see `_rename_into_source`

    def _rename_into_source(self, node: Node, directory: int, name: bytes, temporary: bytes, permit: Permit) -> None:
        try:
            self._mount.source.publish(node, directory, name, temporary, permit)
        except FileExistsError as error:
            # another process has just created the name: the kernel looks it up and sends the request again
            raise stale() from error

    def _note_published_symlink(self, node: Node, target: End) -> None:
        """Give the node the inode of the published symlink. A symlink cannot be linked, so the source has a copy."""
        st = os.stat(target.name, dir_fd=target.directory, follow_symlinks=False)
        self._mount.source.release(node)  # its descriptor leads to the staged symlink
        self._mount.inodes.renumber(node, st.st_ino, self._mount.source)
        self._mount.inodes.rename(node, target.parent, target.name)
        self._mount.notifications.inode(node.id, -1, 0)

    def move_staged(self, origin: End, target: End, *, exchange: bool) -> None:
        """Move the staged names below a moved directory. A staged name that it replaces is discarded."""
        if self._mount.temp_files.directories:
            if self.staged_at(target.parent, target.name) is not None:
                self._discard(target.parent, target.name)
            self._mount.temp_files.move(origin.path, target.path, exchange=exchange)

    def staged_changes(self, origin: End, path: WorkspacePath) -> Iterator[RelatedChange]:
        """Yield the changes of all staged names below a moved directory: each leaves one path and appears at
        another.
        """
        for old, node in list(self._mount.temp_files.below(origin.path)):
            request = Request(Operation.RENAME, WorkspacePath(path + old[len(origin.path) :]), node.kind)
            yield RelatedChange(Request(Operation.RENAME, old, node.kind), _GOES, Layer.STAGED)
            yield self.arriving_change(node, request, in_source=False, staged=True)

    def check_none_staged(self, path: WorkspacePath) -> None:
        """Raise ENOTEMPTY if the directory has staged names."""
        if self._mount.temp_files.directories and next(self._mount.temp_files.below(path), None) is not None:
            raise os_error(errno.ENOTEMPTY)

    def arriving_change(self, node: Node, request: Request, *, in_source: bool, staged: bool = False) -> RelatedChange:
        """Return the change that gives a file or symlink the name of `request`: it is judged as a new one.

        `in_source`: the source has that name already. `staged`: a staged file has it.
        """
        if node.kind is Kind.SYMLINK:
            context = Context(target=os.fsdecode(node.store.readlink(node)), in_source=in_source, staged=staged)
            return RelatedChange(request, context, Layer.STAGED)
        st = node.store.stat(node)
        context = Context(size=st.st_size, mode=stat.S_IMODE(st.st_mode), in_source=in_source, staged=staged)
        return RelatedChange(request, context, Layer.STAGED, (lambda: node.store.head(node)) if st.st_size else None)
