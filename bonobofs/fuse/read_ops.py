"""Handlers of READ, LSEEK and FSYNC."""

from __future__ import annotations

import errno
import os
from typing import Final

from bonobofs.errors import os_error
from bonobofs.fuse import abi as p
from bonobofs.fuse import virtual_dir
from bonobofs.fuse.fd_cache import R, stale
from bonobofs.fuse.inode_table import Node
from bonobofs.fuse.mount_context import NOTHING, Handler, Header, MountContext, Reply
from bonobofs.fuse.slices import LongCall, Steps
from bonobofs.fuse.splice import FileRange


class ReadOps:
    """Handlers that read files and sync them."""

    _buffer: Final = memoryview(bytearray(p.MAX_WRITE))

    def __init__(self, mount: MountContext) -> None:
        self._mount: Final = mount
        o = p.Opcode
        self.handlers: Final[dict[int, Handler]] = {
            o.READ: self._read,
            o.LSEEK: self._lseek,
            o.FSYNC: self._fsync,
            o.FSYNCDIR: self._fsync,
        }

    def _read(self, header: Header, body: memoryview) -> Reply:
        _, offset, size, _, _, _, _ = p.READ_IN.unpack_from(body)
        if header.node_id >= virtual_dir.FIRST_ID:
            try:
                return self._mount.virtual_dir.read(header.node_id, offset, size)
            except KeyError:
                raise stale() from None
        node = self._mount.node(header.node_id)
        fd = node.store.file(node, R)
        if size >= FileRange.MIN_LENGTH:
            length = min(size, os.fstat(fd).st_size - offset)
            if length >= FileRange.MIN_LENGTH:
                return FileRange(fd, offset, length)
        buffer = self._buffer[: min(size, p.MAX_WRITE)]
        got = os.preadv(fd, [buffer], offset)
        return NOTHING, buffer[:got]

    def _lseek(self, header: Header, body: memoryview) -> Reply:
        _, offset, whence, _ = p.LSEEK_IN.unpack_from(body)
        if header.node_id >= virtual_dir.FIRST_ID:
            try:
                size = len(self._mount.virtual_dir.read(header.node_id, 0, 1 << 62))
            except KeyError:
                raise os_error(errno.EINVAL) from None
            if not 0 <= offset < size:
                raise os_error(errno.ENXIO)
            return p.LSEEK_OUT.pack(offset if whence == os.SEEK_DATA else size)
        node = self._mount.node(header.node_id)
        return p.LSEEK_OUT.pack(os.lseek(node.store.file(node, R), offset, whence))

    def _fsync(self, header: Header, body: memoryview) -> Reply:
        if header.node_id >= virtual_dir.FIRST_ID:
            return NOTHING
        node = self._mount.node(header.node_id)
        _, flags, _ = p.FSYNC_IN.unpack_from(body)
        if node.batch is not None:
            self._mount.enforcer.close_batch(node.id)
        self._mount.enforcer.write_outcomes()
        return self._sync(node, data_only=bool(flags & 1))

    def _sync(self, node: Node, *, data_only: bool) -> Steps:
        """Sync the trail, then the file. The kernel blocks writes of this mount to the file meanwhile."""
        fd = os.dup(node.store.fd_to_sync(node))
        sync_file = os.fdatasync if data_only else os.fsync

        store, ino = self._mount.preimages.store, node.ino

        def sync() -> None:
            self._mount.enforcer.trail.sync()
            if store is not None:
                store.sync(ino)
            sync_file(fd)

        job = LongCall(sync)
        try:
            yield job
            job.check()
        finally:
            os.close(fd)
        return NOTHING
