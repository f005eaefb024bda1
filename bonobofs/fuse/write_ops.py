"""Handlers of WRITE, FALLOCATE and COPY_FILE_RANGE."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from functools import partial
from typing import Final, NoReturn

from bonobofs.enforcement.authorizer import Admission, RelatedChange
from bonobofs.enforcement.write_batches import WriteBatch
from bonobofs.errors import ProtocolError, os_error
from bonobofs.fuse import abi as p
from bonobofs.fuse import virtual_dir
from bonobofs.fuse.append_lock import may_be_partial
from bonobofs.fuse.external_changes import fingerprint_of
from bonobofs.fuse.fd_cache import R, W, duplicates, stale
from bonobofs.fuse.git_grants import GrantOps
from bonobofs.fuse.inode_table import Node
from bonobofs.fuse.mount_context import NOTHING, SET_IDS, Handler, Header, MountContext, Reply
from bonobofs.fuse.overlay_ops import OverlayOps
from bonobofs.fuse.slices import Steps, finished
from bonobofs.policy.decision import Layer, Permit
from bonobofs.policy.request import HEAD_BYTES, Operation, Request
from bonobofs.system import syscalls

_MOST_COPIED: Final = 8 << 20
"""Maximum of bytes that one COPY_FILE_RANGE copies.

The caller requests the rest; waiting requests are served in between.
"""
_JUDGED_COPIED: Final = 4096
"""Bytes that a copy writes as they were judged: a block, so that the file system can clone the rest."""


class WriteOps:
    """Handlers that change the content of files."""

    def __init__(self, mount: MountContext, layers: OverlayOps, grants: GrantOps) -> None:
        self._mount: Final = mount
        self._layers: Final = layers
        self._grants: Final = grants
        o = p.Opcode
        self.handlers: Final[dict[int, Handler]] = {
            o.WRITE: self._write,
            o.FALLOCATE: self._fallocate,
            o.COPY_FILE_RANGE: partial(self._copy, lambda copied: p.WRITE_OUT.pack(copied, 0)),
            o.COPY_FILE_RANGE_64: partial(self._copy, p.COPY_OUT.pack),
        }

    def _write(self, header: Header, body: memoryview) -> Reply:
        _, offset, size, write_flags, _, flags, _ = p.WRITE_IN.unpack_from(body)
        data = body[p.WRITE_IN.size : p.WRITE_IN.size + size]
        if len(data) != size:
            raise ProtocolError("WRITE is shorter than it says")
        node = self._mount.node_to_change(header, Operation.WRITE_FILE)
        lock = self._mount.append_lock
        if not flags & os.O_APPEND or lock is None or node.layer is not Layer.SOURCE:
            written = self._write_data(header, node, offset, data, write_flags, flags & os.O_APPEND)
        else:
            with lock.hold(node.ino, half=may_be_partial(offset, size)):
                written = self._write_data(header, node, offset, data, write_flags, flags & os.O_APPEND)
        return p.WRITE_OUT.pack(written, 0)

    def _write_data(
        self, header: Header, node: Node, offset: int, data: memoryview, write_flags: int, appends: int
    ) -> int:
        """Write at `offset` or append, and return the number of bytes written."""
        fd, size = node.store.file(node, W), len(data)
        st = os.fstat(fd)
        if node.fingerprint != st.st_size << 62 | st.st_ctime_ns:
            self._mount.check_external(node, st)
        # The kernel appends at the size that it knows. Another program may have appended since.
        position = st.st_size if appends else offset
        if self._mount.grants.files and self._grants.changes_nothing(node, fd, position, data):
            return size
        batch = self._mount.batch_of(header, node)
        if batch is None or not self._is_covered(batch, st, position, size):
            batch, fd, st = self._authorize_batch(header, node, fd, position, data, write_flags)
        # The kernel writes the dirty pages of a mapping without a caller.
        is_bounded = node.store.privileged and (header.uid or write_flags & p.WRITE_CACHE)
        needed = _allocated(st, position, size) if is_bounded or node.layer is not Layer.SOURCE else 0
        written = self._write_bytes(header, node, fd, data, -1 if appends else position, needed, batch)
        batch.size = max(st.st_size, position + written)
        if node.layer is Layer.SCRATCH:
            self._mount.overlay.sizes.set_size(node.ino, batch.request.path, batch.size)
        if write_flags & p.WRITE_KILL_SUIDGID and st.st_mode & SET_IDS:
            self._mount.kill_set_ids(header, node, fd, st, batch.permit)
        after = batch.state = os.fstat(fd)
        if position != offset or after.st_size != batch.size:
            self._mount.notifications.inode(
                node.id, 0, 0
            )  # another program has appended: the kernel does not know its bytes
        node.fingerprint = after.st_size << 62 | after.st_ctime_ns
        return written

    def _write_bytes(
        self, header: Header, node: Node, fd: int, data: memoryview, position: int, needed: int, batch: WriteBatch
    ) -> int:
        """Write at the offset `position`, or append if it is -1. Count it, and return the number of bytes written.

        `needed` is how many bytes the write allocates.
        """
        try:
            if needed > 0:
                self._layers.check_free_space(header, node, batch.request, needed)
            written = (
                node.store.append(fd, data, batch.permit)
                if position < 0
                else node.store.write(fd, data, position, batch.permit)
            )
        except BaseException as error:
            self._mount.preimages.after_failed_write(node, batch, os.fstat(fd))
            self._mount.enforcer.close_batch(node.id, getattr(error, "errno", None) or errno.EIO)
            raise
        batch.count += 1
        batch.written += written
        batch.last = self._mount.source.now
        return written

    def _is_covered(self, batch: WriteBatch, st: os.stat_result, position: int, size: int) -> bool:
        """Whether the permit of the batch covers a write of `size` bytes."""
        return (
            st.st_size <= batch.limit
            and position + size <= batch.limit
            and st.st_nlink == 1
            # A write sets both times to one value. A link, removal or rename by another process sets only the change
            # time.
            and st.st_ctime_ns == st.st_mtime_ns
            and (position >= HEAD_BYTES or not batch.permit.judges_content)
        )

    def _authorize_batch(
        self, header: Header, node: Node, fd: int, offset: int, data: memoryview, write_flags: int
    ) -> tuple[WriteBatch, int, os.stat_result]:
        """Return a batch for this write: the open one if it can be extended. Return the descriptor and stat to use."""
        node.store.confirm_name(node)
        st = os.fstat(fd)
        if st.st_nlink == 0 and node.parent is not None:
            self._fail_removed(node)
        size, batch = max(st.st_size, offset + len(data)), node.batch
        is_followed = batch is not None and batch.generation == self._mount.enforcer.generation
        operation = batch.judged_as if batch is not None and is_followed else Operation.WRITE_FILE
        try:
            request, st, permit = self._resolve_content(header, node, operation, st, size, offset, lambda: data)
            batch = self._mount.batch_of(header, node)
            if batch is not None:
                batch.extend(permit)
            else:
                batch = node.batch = self._mount.enforcer.open_batch(
                    node.id,
                    request._replace(operation=Operation.WRITE_FILE),
                    permit,
                    self._mount.source.now,
                    caller=self._mount.caller(header),
                    details=self._mount.preimages.before_change(node, st),
                    layer=node.layer,
                )
                batch.judged_as = operation
                batch.not_kept = self._mount.preimages.keep_content(node, batch.seq, st)
        except OSError:
            if write_flags & p.WRITE_CACHE:
                # programs that read the file still see the refused page of the mapping
                self._mount.notifications.inode(node.id, 0, 0)
            raise
        return self._layers.limit_batch(batch, node, size), node.store.file(node, W), st

    def _resolve_content(
        self,
        header: Header,
        node: Node,
        operation: Operation,
        st: os.stat_result,
        size: int,
        offset: int,
        data: Callable[[], memoryview | bytes],
    ) -> tuple[Request, os.stat_result, Permit]:
        """Resolve a change of a file's content at `offset`, after which it has `size` bytes.

        `data` returns the first of the new bytes.
        """
        request = Request(operation, self._mount.path(node))
        context = self._mount.layer_context(node)._replace(size=size, size_before=st.st_size)

        def head() -> bytes:
            return _overlaid(node.store.head(node) if st.st_size else b"", offset, data())

        change = RelatedChange(request, context, head=head if offset < HEAD_BYTES else None)
        _, resolved, permit = self._layers.resolve(header, node, st, change)
        if permit.layer is Layer.SCRATCH:
            self._layers.check_quota(header, request, node.ino, size)
        return request, resolved, permit

    def _fail_removed(self, node: Node) -> NoReturn:
        """Fail with ESTALE: the file was removed or replaced externally, and the kernel still has its name
        cached.
        """
        node.store.on_stale(node)
        self._mount.inodes.detach(node)
        raise stale()

    def _fallocate(self, header: Header, body: memoryview) -> Reply:
        _, offset, length, mode, _ = p.FALLOCATE_IN.unpack_from(body)
        node = self._mount.node_to_change(header, Operation.ALLOCATE)
        st = self._stat_content(node, W)
        in_thread = self._mount.needs_thread(max(length, self._mount.preimages.bytes_to_copy(node, st)))
        # Blocks kept beyond the end count too: they take the space of a larger file.
        after = st.st_size if mode & syscalls.FALLOC_PUNCH_HOLE else max(st.st_size, offset + length)
        zeroes = mode & (syscalls.FALLOC_PUNCH_HOLE | syscalls.FALLOC_ZERO_RANGE) and st.st_size
        request, st, permit = self._resolve_content(
            header,
            node,
            Operation.ALLOCATE,
            st,
            after,
            offset if zeroes else HEAD_BYTES,
            lambda: bytes(min(length, HEAD_BYTES)),
        )
        keeps_size = mode & syscalls.FALLOC_KEEP_SIZE and after > st.st_size
        if keeps_size and permit.layer is Layer.SCRATCH and self._mount.overlay.sizes.is_limited(request.path):
            raise os_error(errno.EOPNOTSUPP)  # the size would not show the blocks that this allocates
        details = self._mount.preimages.before_change(node, st)
        admission = self._mount.authorize(header, request, permit, details=details, size=length, layer=node.layer)
        admission.on_failure = partial(self._mount.preimages.after_failure, node, st)

        def steps() -> Steps:
            with admission as permit, duplicates(node.store.file(node, W)) as (own,):
                yield from self._mount.preimages.keep_content_in_thread(node, admission, st)
                if (header.uid or node.layer is not Layer.SOURCE) and not mode & syscalls.FALLOC_PUNCH_HOLE:
                    self._layers.check_free_space(header, node, request, _allocated(st, offset, length))
                yield from self._mount.make_in_thread(
                    node, lambda: node.store.allocate(own, mode, offset, length, permit)
                )
                self._layers.note_size(node, request.path)
                if header.uid and st.st_mode & SET_IDS:
                    self._mount.kill_set_ids(header, node, own, st, permit)
                self._note_state(node, admission, os.fstat(own))
            return NOTHING

        return steps() if in_thread else finished(steps())

    def _stat_content(self, node: Node, need: int) -> os.stat_result:
        """Open a file whose content will change, verify its name, and return its stat. Close its write batch."""
        self._mount.enforcer.close_batch(node.id)
        fd = node.store.file(node, need)
        node.store.confirm_name(node)
        st = os.fstat(fd)
        self._mount.check_external(node, st)
        return st

    def _note_state(self, node: Node, admission: Admission, st: os.stat_result) -> None:
        node.fingerprint = fingerprint_of(st)
        self._mount.preimages.after(node, admission, st)

    def _copy(self, pack: Callable[[int], bytes], header: Header, body: memoryview) -> Reply:
        _, source_offset, target_id, _, target_offset, length, _ = p.COPY_FILE_RANGE_IN.unpack_from(body)
        target = self._mount.node_to_change(header, Operation.COPY_RANGE, target_id)
        if header.node_id >= virtual_dir.FIRST_ID:
            # no file to copy from: the caller copies by reads and writes
            raise os_error(errno.EXDEV)
        source = self._mount.node(header.node_id)
        need = R | W if source is target else W
        st = self._stat_content(target, need)
        source_fd = source.store.file(source, R)
        length = min(length, max(os.fstat(source_fd).st_size - source_offset, 0), _MOST_COPIED)
        in_thread = self._mount.needs_thread(max(length, self._mount.preimages.bytes_to_copy(target, st)))
        # The source may change until the copy, also outside the mount.
        is_judged = target_offset < HEAD_BYTES and self._mount.enforcer.policy.judges_content
        head = os.pread(source_fd, min(_JUDGED_COPIED, length), source_offset) if is_judged else b""
        request, st, permit = self._resolve_content(
            header,
            target,
            Operation.COPY_RANGE,
            st,
            max(st.st_size, target_offset + length),
            target_offset,
            lambda: head,
        )
        target_fd = target.store.file(target, need)
        if source is target:
            source_fd = target_fd
        details = {"from": self._mount.path(source), **(self._mount.preimages.before_change(target, st) or {})}
        admission = self._mount.authorize(header, request, permit, details=details, size=length, layer=target.layer)
        admission.on_failure = partial(self._mount.preimages.after_failure, target, st)

        def steps() -> Steps:
            with admission as permit, duplicates(source_fd, target_fd) as (old, new):
                yield from self._mount.preimages.keep_content_in_thread(target, admission, st)
                if header.uid or target.layer is not Layer.SOURCE:
                    self._layers.check_free_space(header, target, request, _allocated(st, target_offset, length))
                ends = old, source_offset, new, target_offset
                copied = yield from self._mount.make_in_thread(
                    target, lambda: target.store.copy_range(*ends, length, head, permit)
                )
                admission.written = copied
                self._layers.note_size(target, request.path)
                if header.uid and st.st_mode & SET_IDS:
                    self._mount.kill_set_ids(header, target, new, st, permit)
                self._note_state(target, admission, os.fstat(new))
            return pack(copied)

        return steps() if in_thread else finished(steps())


def _allocated(st: os.stat_result, offset: int, length: int) -> int:
    """Return how many bytes a change of `length` bytes at `offset` may allocate; a file with holes may fill them."""
    has = st.st_blocks * 512
    return min(length, offset + length - has) if has >= st.st_size else length


def _overlaid(head: bytes, offset: int, data: memoryview | bytes) -> bytes:
    """Return the first HEAD_BYTES of a file after `data` is written at `offset` (below HEAD_BYTES)."""
    after = bytearray(head.ljust(offset, b"\0"))
    after[offset : offset + len(data)] = bytes(data[:HEAD_BYTES])
    return bytes(after[:HEAD_BYTES])
