"""Requests that only read: names, attributes, content, directories."""

from __future__ import annotations

import errno
import json
import os
from typing import Final

from bonobofs.decision import as_document
from bonobofs.fuse import protocol as p
from bonobofs.fuse import virtual
from bonobofs.fuse.backing import Entry
from bonobofs.fuse.core import NOTHING, Handler, Header, Reply
from bonobofs.fuse.descriptors import R, stale
from bonobofs.fuse.held import is_held
from bonobofs.fuse.holding import Holding
from bonobofs.fuse.inodes import Node, kind_of
from bonobofs.fuse.moving import Stretch
from bonobofs.request import EXISTS, NO_FACTS, Kind, Operation, Request

_CAPABILITY: Final = b"security.capability"
WHY: Final = b"user.bonobofs.why"
"""The extended attribute that says whether a path may be written, and if not, why."""
_DOT_ENTRY: Final = bytes(p.ENTRY_OUT.size + p.ATTR.size)
_DOTS: Final = (b".", b"..")
_TYPES: Final = {Kind.FILE: 8, Kind.SYMLINK: 10}
_PLUS: Final = p.ENTRY_OUT.size + p.ATTR.size + p.DIRENT.size


class Reading(Holding):
    """Handlers that change nothing."""

    _buffer: Final = memoryview(bytearray(p.MAX_WRITE))

    def _reading(self) -> dict[int, Handler]:
        o = p.Opcode
        return {
            o.LOOKUP: self._lookup,
            o.FORGET: self._forget,
            o.BATCH_FORGET: self._batch_forget,
            o.GETATTR: self._getattr,
            o.READLINK: self._readlink,
            o.READ: self._read,
            o.LSEEK: self._lseek,
            o.STATFS: self._statfs,
            o.READDIR: self._readdir,
            o.READDIRPLUS: self._readdirplus,
            o.FSYNC: self._fsync,
            o.FSYNCDIR: self._fsync,
            o.GETXATTR: self._getxattr,
            o.LISTXATTR: self._listxattr,
            o.RELEASE: self._done,
            o.RELEASEDIR: self._done,
            o.SYNCFS: self._done,
            o.DESTROY: self._done,
        }

    def _lookup(self, header: Header, body: memoryview) -> Reply:
        (name,) = p.strings(body, 1)
        node_id = header.node_id
        if node_id >= virtual.FIRST_ID:
            found = self._virtual.lookup(name) if node_id == virtual.DIRECTORY_ID else None
            if found is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return p.ENTRY_OUT.pack(found[0], 0, 0, 0, 0, 0) + found[1]
        if name == virtual.NAME and node_id == p.ROOT_ID:
            return p.ENTRY_OUT.pack(virtual.DIRECTORY_ID, 0, *self._entry_times) + self._virtual.attr(
                virtual.DIRECTORY_ID
            )
        parent = self._node(node_id)
        if parent.covered:
            return self._no_entry
        p.checked_name(name)
        if self._held.directories and (held := self._held_at(parent, name)):
            return self._held_entry(held)
        try:
            st = self._backing.stat_entry(parent, name)
        except FileNotFoundError:
            return self._no_entry
        return self._entry(parent, name, st)

    def _forget(self, header: Header, body: memoryview) -> Reply:
        self._forget_one(header.node_id, p.FORGET_IN.unpack_from(body)[0])
        return NOTHING

    def _batch_forget(self, header: Header, body: memoryview) -> Reply:
        count, _ = p.BATCH_FORGET_IN.unpack_from(body)
        at = p.BATCH_FORGET_IN.size
        for _ in range(count):
            self._forget_one(*p.FORGET_ONE.unpack_from(body, at))
            at += p.FORGET_ONE.size
        return NOTHING

    def _forget_one(self, node_id: int, count: int) -> None:
        if node_id >= virtual.FIRST_ID:
            self._virtual.forget(node_id, count)
            return
        self._forget_node(node_id, count)

    def _done(self, header: Header, body: memoryview) -> Reply:
        return NOTHING

    def _getattr(self, header: Header, body: memoryview) -> Reply:
        if header.node_id >= virtual.FIRST_ID:
            return p.ATTR_OUT.pack(0, 0, 0) + self._virtual_attr(header.node_id)
        node = self._node(header.node_id)
        st = self._backing.status(node)
        self._see(node, st)
        return self._attr_times + self._attr(node, st)

    def _virtual_attr(self, node_id: int) -> bytes:
        try:
            return self._virtual.attr(node_id)
        except KeyError:
            raise stale() from None

    def _readlink(self, header: Header, body: memoryview) -> Reply:
        if header.node_id >= virtual.FIRST_ID:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return self._backing.readlink(self._node(header.node_id))

    def _read(self, header: Header, body: memoryview) -> Reply:
        _, offset, size, _, _, _, _ = p.READ_IN.unpack_from(body)
        if header.node_id >= virtual.FIRST_ID:
            try:
                return self._virtual.read(header.node_id, offset, size)
            except KeyError:
                raise stale() from None
        fd = self._backing.file(self._node(header.node_id), R)
        if size >= Stretch.SHORTEST:
            length = min(size, os.fstat(fd).st_size - offset)
            if length >= Stretch.SHORTEST:
                return Stretch(fd, offset, length)
        buffer = self._buffer[: min(size, p.MAX_WRITE)]
        got = os.preadv(fd, [buffer], offset)
        return NOTHING, buffer[:got]

    def _lseek(self, header: Header, body: memoryview) -> Reply:
        _, offset, whence, _ = p.LSEEK_IN.unpack_from(body)
        if header.node_id >= virtual.FIRST_ID:
            try:
                size = len(self._virtual.read(header.node_id, 0, 1 << 62))
            except KeyError:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL)) from None
            if not 0 <= offset < size:
                raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
            return p.LSEEK_OUT.pack(offset if whence == os.SEEK_DATA else size)
        return p.LSEEK_OUT.pack(os.lseek(self._backing.file(self._node(header.node_id), R), offset, whence))

    def _statfs(self, header: Header, body: memoryview) -> Reply:
        self._backing.close_released()
        v = self._backing.statvfs()
        size = v.f_bsize
        return p.STATFS_OUT.pack(
            v.f_blocks, v.f_bfree, v.f_bavail, v.f_files, v.f_ffree, size, v.f_namemax, v.f_frsize, 0
        )

    def _readdir(self, header: Header, body: memoryview) -> Reply:
        _, cookie, size, _, _, _, _ = p.READ_IN.unpack_from(body)
        if header.node_id >= virtual.FIRST_ID:
            return self._read_virtual(header.node_id, cookie)
        out = bytearray()
        node = self._node(header.node_id)
        if node.covered:
            return NOTHING
        at_root = node.id == p.ROOT_ID
        found = self._backing.entries(node, cookie, size) if not is_held(cookie) else []
        for ino, following, kind, name in found or self._held_entries(node, cookie):
            if at_root and name == virtual.NAME:
                continue
            if len(out) + 24 + len(name) + 7 > size:
                break
            out += p.DIRENT.pack(ino, following & 0xFFFFFFFFFFFFFFFF, len(name), kind) + name + bytes(-len(name) & 7)
        return bytes(out)

    def _read_virtual(self, node_id: int, cookie: int) -> bytes:
        if node_id != virtual.DIRECTORY_ID:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        out = bytearray()
        for number, name in enumerate([b".", b"..", *self._virtual.names()], 1):
            if number > cookie:
                kind = 4 if number < 3 else 8
                out += p.DIRENT.pack(node_id, number, len(name), kind) + name + bytes(-len(name) & 7)
        return bytes(out)

    def _readdirplus(self, header: Header, body: memoryview) -> Reply:
        _, cookie, size, _, _, _, _ = p.READ_IN.unpack_from(body)
        if header.node_id >= virtual.FIRST_ID:
            return self._read_virtual_plus(header.node_id, cookie)
        node = self._node(header.node_id)
        if node.covered:
            return NOTHING
        at_root = node.id == p.ROOT_ID
        found = self._backing.entries(node, cookie, max(size // 4, 1024)) if not is_held(cookie) else []
        if not found and self._held.directories:
            return self._read_held_plus(node, cookie, size)
        directory = node.fd
        out: list[bytes] = []
        left = size
        for ino, following, kind, name in found:
            length = len(name)
            left -= _PLUS + ((length + 7) & ~7)
            if left < 0:
                break
            if name in _DOTS:
                out.append(_DOT_ENTRY)
            else:
                if at_root and name == virtual.NAME:
                    continue
                try:
                    out.append(self._entry(node, name, os.stat(name, dir_fd=directory, follow_symlinks=False)))
                except OSError:
                    out.append(_DOT_ENTRY)  # gone, or not to be seen: a lookup will tell
            out.append(p.DIRENT.pack(ino, following & 0xFFFFFFFFFFFFFFFF, length, kind))
            out.append(name + bytes(-length & 7))
        return b"".join(out)

    def _held_entries(self, node: Node, cookie: int) -> list[Entry]:
        """The held names of a directory as its other entries are; they come after those."""
        return [
            (self._backing.stat(held).st_ino, number, _TYPES[held.kind], name)
            for name, number, held in self._held_listing(node, cookie)
        ]

    def _read_held_plus(self, node: Node, cookie: int, size: int) -> bytes:
        out: list[bytes] = []
        for name, number, held in self._held_listing(node, cookie):
            length = len(name)
            size -= _PLUS + ((length + 7) & ~7)
            if size < 0:
                break
            entry = self._held_entry(held)
            ino = self._backing.stat(held).st_ino
            out.append(entry + p.DIRENT.pack(ino, number, length, _TYPES[held.kind]) + name + bytes(-length & 7))
        return b"".join(out)

    def _read_virtual_plus(self, node_id: int, cookie: int) -> bytes:
        plain = self._read_virtual(node_id, cookie)
        out = bytearray()
        at = 0
        while at < len(plain):
            _, _, length, _ = p.DIRENT.unpack_from(plain, at)
            end = at + p.DIRENT.size + ((length + 7) & ~7)
            out += _DOT_ENTRY + plain[at:end]
            at = end
        return bytes(out)

    def _fsync(self, header: Header, body: memoryview) -> Reply:
        if header.node_id >= virtual.FIRST_ID:
            return NOTHING
        node = self._node(header.node_id)
        _, flags, _ = p.FSYNC_IN.unpack_from(body)
        if node.run is not None:
            self._guard.settle(node.id)
        self._guard.trail.sync()
        self._backing.sync(node, data_only=bool(flags & 1))
        return NOTHING

    def _getxattr(self, header: Header, body: memoryview) -> Reply:
        size, _ = p.GETXATTR_IN.unpack_from(body)
        (name,) = p.strings(body[p.GETXATTR_IN.size :], 1)
        if header.node_id >= virtual.FIRST_ID:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        node = self._node(header.node_id)
        if node.fresh and name == _CAPABILITY:
            raise OSError(errno.ENODATA, "")  # the kernel asks before the first write to every file
        value = self._why(node) if name == WHY else self._backing.get_xattr(node, name)
        return _sized(value, size)

    def _why(self, node: Node) -> bytes:
        """The decision about writing the node's path, as JSON: what a program can ask before it tries."""
        path = self._inodes.path(node)
        st = self._backing.stat(node)
        kind = kind_of(st.st_mode)
        operation = Operation.MKDIR if kind is Kind.DIRECTORY else Operation.WRITE_FILE
        facts = NO_FACTS if node.apart else EXISTS
        if kind is Kind.FILE:
            facts = self._with_links(node, st, operation, facts._replace(size=st.st_size, size_before=st.st_size))
        decision = self._guard.decide(Request(operation, path, kind), facts)
        return json.dumps(as_document(decision, path, operation)).encode()

    def _listxattr(self, header: Header, body: memoryview) -> Reply:
        size, _ = p.GETXATTR_IN.unpack_from(body)
        if header.node_id >= virtual.FIRST_ID:
            return _sized(b"", size)
        found = self._backing.list_xattrs(self._node(header.node_id))
        if header.uid != 0:
            found = [name for name in found if not name.startswith("trusted.")]
        return _sized(b"".join(os.fsencode(name) + b"\0" for name in found), size)


def _sized(value: bytes, size: int) -> bytes:
    """The answer to GETXATTR and LISTXATTR: the length alone where `size` is 0, ERANGE where it is too small."""
    if size == 0:
        return p.XATTR_OUT.pack(len(value), 0)
    if len(value) > size:
        raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))
    return value
