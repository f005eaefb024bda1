"""Handlers of LOOKUP, FORGET, GETATTR, READLINK and STATFS, and of requests that need no work."""

from __future__ import annotations

import errno
import os
from typing import Final

from bonobofs.errors import os_error
from bonobofs.fuse import abi as p
from bonobofs.fuse import virtual_dir
from bonobofs.fuse.fd_cache import R, stale
from bonobofs.fuse.inode_table import Node
from bonobofs.fuse.mount_context import (
    NOTHING,
    UNCACHED_SECONDS,
    UNWATCHED_SECONDS,
    Handler,
    Header,
    MountContext,
    Reply,
)
from bonobofs.fuse.overlay_ops import OverlayOps
from bonobofs.fuse.session_git_dir import HIDDEN, BranchMirrorOps
from bonobofs.fuse.session_git_dir import NAME as GIT
from bonobofs.fuse.slices import Steps
from bonobofs.fuse.temp_files import TempFileOps

_LOOKS: Final = 16
"""Maximum of attempts to look up a name that another process keeps replacing."""
_HIDDEN: Final = p.ENTRY_OUT.pack(0, 0, 0, 0, 0, 0) + bytes(p.ATTR.size)
"""Reply that the name does not exist, which the kernel does not cache."""
_UNCACHED: Final = bytes(p.ATTR_OUT.size)


class LookupOps:
    """Handlers that find nodes and show their attributes."""

    def __init__(self, mount: MountContext, staged: TempFileOps, layers: OverlayOps, mirror: BranchMirrorOps) -> None:
        self._mount: Final = mount
        self._staged: Final = staged
        self._layers: Final = layers
        self._mirror: Final = mirror
        o = p.Opcode
        self.handlers: Final[dict[int, Handler]] = {
            o.LOOKUP: self.lookup,
            o.FORGET: self._forget,
            o.BATCH_FORGET: self._batch_forget,
            o.GETATTR: self._getattr,
            o.READLINK: self._readlink,
            o.STATFS: self._statfs,
            o.RELEASE: self._done,
            o.RELEASEDIR: self._done,
            o.SYNCFS: self._done,
            o.DESTROY: self._done,
        }

    def lookup(self, header: Header, body: memoryview) -> Reply:
        (name,) = p.strings(body, 1)
        node_id = header.node_id
        if node_id >= virtual_dir.FIRST_ID or (name == virtual_dir.NAME and node_id == p.ROOT_ID):
            return self._virtual_entry(header, node_id, name)
        parent = self._mount.node(node_id)
        if parent.mounted_over:
            return self._mount.no_entry
        p.checked_name(name)
        if self._mount.temp_files.directories and (staged := self._staged.staged_at(parent, name)):
            return self._staged.staged_entry(staged)
        if self._mount.overlay.directories and (entry := self._layers.lookup_upper(parent, name)) is not None:
            return self._entry_for_user(header, entry, parent, name)
        if self._mount.is_hidden(parent, name):
            return _HIDDEN
        mirrored = self._mirror.update_mirrored(parent, name)
        for _ in range(_LOOKS):
            try:
                st = parent.store.stat_entry(parent, name)
            except FileNotFoundError:
                if mirrored or parent.store.prefix:
                    raise
                return self._mount.no_entry
            if (name == HIDDEN and parent.store.prefix) or self._mount.hide_secret(parent, name, header):
                raise os_error(errno.ENOENT)
            reply = self._mount.entry(parent, name, st)
            if mirrored:
                return p.with_cache_timeout(0, reply)
            if not self._mount.external_changes.may_be_replaced(parent, name, st) or self._open_early(parent, st):
                return reply
        raise stale()

    def _virtual_entry(self, header: Header, node_id: int, name: bytes) -> bytes:
        """Return the entry of `.bonobofs`, or of a name in it."""
        if node_id == p.ROOT_ID:
            node_id = virtual_dir.DIRECTORY_ID
            return p.ENTRY_OUT.pack(node_id, 0, *self._mount.entry_times) + self._mount.virtual_dir.attr(node_id)
        found = self._mount.virtual_dir.lookup(name, header.uid) if node_id == virtual_dir.DIRECTORY_ID else None
        if found is None:
            return self._store_entry(header, node_id, name)
        return p.ENTRY_OUT.pack(found[0], 0, 0, 0, 0, 0) + found[1]

    def _entry_for_user(self, header: Header, entry: bytes, parent: Node, name: bytes) -> bytes:
        """Return the entry for this caller.

        The session's `.git` is shown only to its user, so the kernel must not cache it.
        """
        if self._mount.repository is None or not self._mount.repository.shared or name != GIT or parent.id != p.ROOT_ID:
            return entry
        if not self._mount.repository.is_seen(header.uid):
            self._mount.forget_node(p.NODE_ID.unpack_from(entry)[0], 1)
            entry = self._mount.entry(parent, GIT, parent.store.stat_entry(parent, GIT))
        return p.with_cache_timeout(0, entry)

    def _store_entry(self, header: Header, node_id: int, name: bytes) -> bytes:
        """Return the entry of an object store in `.bonobofs`."""
        repository = self._mount.repository
        if node_id != virtual_dir.DIRECTORY_ID or repository is None or name not in repository.stores:
            raise os_error(errno.ENOENT)
        if not repository.is_seen(header.uid):
            raise os_error(errno.EACCES)
        top = repository.stores[name].top
        top.lookups += 1
        seconds = UNCACHED_SECONDS if repository.shared else UNWATCHED_SECONDS
        return p.ENTRY_OUT.pack(top.id, 0, seconds, seconds, 0, 0) + self._mount.attr(top, top.store.recent_stat(top))

    def _open_early(self, parent: Node, st: os.stat_result) -> bool:
        """Open a file that may soon be replaced, because no OPEN request comes later.

        False: its name already leads elsewhere.
        """
        node = self._mount.inodes.find(st.st_ino + parent.store.ino_offset)
        if node is None or node.fd >= 0:
            return True
        try:
            node.store.file(node, R)
        except OSError as error:
            if error.errno in (errno.ESTALE, errno.ENOENT):
                self._mount.forget_node(node.id, 1)
                return False
        return True

    def _forget(self, header: Header, body: memoryview) -> Reply:
        self._forget_one(header.node_id, p.FORGET_IN.unpack_from(body)[0])
        return NOTHING

    def _batch_forget(self, header: Header, body: memoryview) -> Reply:
        count, _ = p.BATCH_FORGET_IN.unpack_from(body)
        start = p.BATCH_FORGET_IN.size
        return self._forget_all(bytes(body[start : start + count * p.FORGET_ONE.size]))

    def _forget_all(self, batch: bytes) -> Steps:
        """Drop each node of a batch. It may have 65,000, and closing a file without a name frees its blocks."""
        for node_id, count in p.FORGET_ONE.iter_unpack(batch):
            self._forget_one(node_id, count)
            yield None
        return NOTHING

    def _forget_one(self, node_id: int, count: int) -> None:
        if node_id >= virtual_dir.FIRST_ID:
            self._mount.virtual_dir.forget(node_id, count)
            return
        self._mount.forget_node(node_id, count)

    def _done(self, header: Header, body: memoryview) -> Reply:
        return NOTHING

    def _getattr(self, header: Header, body: memoryview) -> Reply:
        if header.node_id >= virtual_dir.FIRST_ID:
            return p.ATTR_OUT.pack(0, 0, 0) + self._virtual_attr(header.node_id)
        node = self._mount.node(header.node_id)
        st = node.store.recent_stat(node)
        self._mount.check_external(node, st)
        return (_UNCACHED if node.store.prefix else self._mount.attr_times) + self._mount.attr(node, st)

    def _virtual_attr(self, node_id: int) -> bytes:
        try:
            return self._mount.virtual_dir.attr(node_id)
        except KeyError:
            raise stale() from None

    def _readlink(self, header: Header, body: memoryview) -> Reply:
        if header.node_id >= virtual_dir.FIRST_ID:
            raise os_error(errno.EINVAL)
        node = self._mount.node(header.node_id)
        return node.store.readlink(node)

    def _statfs(self, header: Header, body: memoryview) -> Reply:
        self._mount.source.close_released()
        node = self._mount.nodes.get(header.node_id)
        v = (self._mount.source if node is None else node.store).statvfs()
        size = v.f_bsize
        return p.STATFS_OUT.pack(
            v.f_blocks, v.f_bfree, v.f_bavail, v.f_files, v.f_ffree, size, v.f_namemax, v.f_frsize, 0
        )
