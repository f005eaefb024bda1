"""Requests that only read: names, attributes, content, directories."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator
from typing import Final

from bonobofs.fuse import abi as p
from bonobofs.fuse import virtual_dir
from bonobofs.fuse.branch_mirror import BranchMirrorOps
from bonobofs.fuse.fd_cache import R, stale
from bonobofs.fuse.inode_table import Node, kind_of
from bonobofs.fuse.layer_store import Entry
from bonobofs.fuse.mount_context import NOTHING, UNCACHED_SECONDS, UNWATCHED_SECONDS, Handler, Header, Reply
from bonobofs.fuse.overlay import UpperDir
from bonobofs.fuse.overlay_ops import inode_number
from bonobofs.fuse.session_git_dir import HIDDEN
from bonobofs.fuse.session_git_dir import NAME as GIT
from bonobofs.fuse.slices import Job, Steps
from bonobofs.fuse.splice import Stretch
from bonobofs.fuse.temp_table import is_behind
from bonobofs.policy.decision import as_document
from bonobofs.policy.request import Context, Kind, Operation, Request

_CAPABILITY: Final = b"security.capability"
WHY: Final = b"user.bonobofs.why"
"""The extended attribute that says whether a path may be written, and if not, why."""
_WHY_NAME: Final = WHY + b"."
"""Prefix of the attribute of a directory that answers for a name in it, which need not exist."""
_LOOKS: Final = 16
"""Times that a name is looked up while another process replaces its file."""
_NEW_FILE: Final = Context(size=0, mode=0o644)
_DOT_ENTRY: Final = bytes(p.ENTRY_OUT.size + p.ATTR.size)
_DOTS: Final = (b".", b"..")
_HIDDEN: Final = p.ENTRY_OUT.pack(0, 0, 0, 0, 0, 0) + bytes(p.ATTR.size)
"""The answer that a name is not there, which the kernel does not cache."""
_UNCACHED: Final = bytes(p.ATTR_OUT.size)
_PLUS: Final = p.ENTRY_OUT.size + p.ATTR.size + p.DIRENT.size


class ReadOps(BranchMirrorOps):
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
        if node_id >= virtual_dir.FIRST_ID or (name == virtual_dir.NAME and node_id == p.ROOT_ID):
            return self._virtual_entry(header, node_id, name)
        parent = self._node(node_id)
        if parent.mounted_over:
            return self._no_entry
        p.checked_name(name)
        if self._temp_files.directories and (held := self._staged_at(parent, name)):
            return self._staged_entry(held)
        if self._overlay.directories and (entry := self._lookup_upper(parent, name)) is not None:
            return self._entry_for_user(header, entry, parent, name)
        if self._is_hidden(parent, name):
            return _HIDDEN
        mirrored = self._is_mirrored(parent, name)
        for _ in range(_LOOKS):
            try:
                st = parent.store.stat_entry(parent, name)
            except FileNotFoundError:
                if mirrored or parent.store.place:
                    raise
                return self._no_entry
            if name == HIDDEN and parent.store.place:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            reply = self._entry(parent, name, st)
            if mirrored:
                return p.believed_for(0, reply)
            if not self.external_changes.may_be_replaced(parent, name, st) or self._open_early(parent, st):
                return reply
        raise stale()

    def _virtual_entry(self, header: Header, node_id: int, name: bytes) -> bytes:
        """The entry of `.bonobofs`, or of a name in it."""
        if node_id == p.ROOT_ID:
            node_id = virtual_dir.DIRECTORY_ID
            return p.ENTRY_OUT.pack(node_id, 0, *self._entry_times) + self._virtual_dir.attr(node_id)
        found = self._virtual_dir.lookup(name, header.uid) if node_id == virtual_dir.DIRECTORY_ID else None
        if found is None:
            return self._store_entry(header, node_id, name)
        return p.ENTRY_OUT.pack(found[0], 0, 0, 0, 0, 0) + found[1]

    def _entry_for_user(self, header: Header, entry: bytes, parent: Node, name: bytes) -> bytes:
        """The entry of a name in the layer. If users see different `.git`, the kernel asks again for each of them."""
        if self.repository is None or not self.repository.shared or name != GIT or parent.id != p.ROOT_ID:
            return entry
        if not self.repository.is_seen(header.uid):
            self._forget_node(p.NODE_ID.unpack_from(entry)[0], 1)
            entry = self._entry(parent, GIT, parent.store.stat_entry(parent, GIT))
        return p.believed_for(0, entry)

    def _store_entry(self, header: Header, node_id: int, name: bytes) -> bytes:
        """The entry of an object store in `.bonobofs`."""
        repository = self.repository
        if node_id != virtual_dir.DIRECTORY_ID or repository is None or name not in repository.stores:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if not repository.is_seen(header.uid):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        top = repository.stores[name].top
        top.lookups += 1
        seconds = UNCACHED_SECONDS if repository.shared else UNWATCHED_SECONDS
        return p.ENTRY_OUT.pack(top.id, 0, seconds, seconds, 0, 0) + self._attr(top, top.store.status(top))

    def _open_early(self, parent: Node, st: os.stat_result) -> bool:
        """Open the file before its reader does, which no request tells. False: its name leads elsewhere already."""
        node = self._inodes.find(st.st_ino + parent.store.numbers)
        if node is None or node.fd >= 0:
            return True
        try:
            node.store.file(node, R)
        except OSError as error:
            if error.errno in (errno.ESTALE, errno.ENOENT):
                self._forget_node(node.id, 1)
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
        """One batch may have 65,000 nodes, and to close a file that has no name frees its blocks."""
        for node_id, count in p.FORGET_ONE.iter_unpack(batch):
            self._forget_one(node_id, count)
            yield None
        return NOTHING

    def _forget_one(self, node_id: int, count: int) -> None:
        if node_id >= virtual_dir.FIRST_ID:
            self._virtual_dir.forget(node_id, count)
            return
        self._forget_node(node_id, count)

    def _done(self, header: Header, body: memoryview) -> Reply:
        return NOTHING

    def _getattr(self, header: Header, body: memoryview) -> Reply:
        if header.node_id >= virtual_dir.FIRST_ID:
            return p.ATTR_OUT.pack(0, 0, 0) + self._virtual_attr(header.node_id)
        node = self._node(header.node_id)
        st = node.store.status(node)
        self._check_external(node, st)
        return (_UNCACHED if node.store.place else self._attr_times) + self._attr(node, st)

    def _virtual_attr(self, node_id: int) -> bytes:
        try:
            return self._virtual_dir.attr(node_id)
        except KeyError:
            raise stale() from None

    def _readlink(self, header: Header, body: memoryview) -> Reply:
        if header.node_id >= virtual_dir.FIRST_ID:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        node = self._node(header.node_id)
        return node.store.readlink(node)

    def _read(self, header: Header, body: memoryview) -> Reply:
        _, offset, size, _, _, _, _ = p.READ_IN.unpack_from(body)
        if header.node_id >= virtual_dir.FIRST_ID:
            try:
                return self._virtual_dir.read(header.node_id, offset, size)
            except KeyError:
                raise stale() from None
        node = self._node(header.node_id)
        fd = node.store.file(node, R)
        if size >= Stretch.SHORTEST:
            length = min(size, os.fstat(fd).st_size - offset)
            if length >= Stretch.SHORTEST:
                return Stretch(fd, offset, length)
        buffer = self._buffer[: min(size, p.MAX_WRITE)]
        got = os.preadv(fd, [buffer], offset)
        return NOTHING, buffer[:got]

    def _lseek(self, header: Header, body: memoryview) -> Reply:
        _, offset, whence, _ = p.LSEEK_IN.unpack_from(body)
        if header.node_id >= virtual_dir.FIRST_ID:
            try:
                size = len(self._virtual_dir.read(header.node_id, 0, 1 << 62))
            except KeyError:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL)) from None
            if not 0 <= offset < size:
                raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
            return p.LSEEK_OUT.pack(offset if whence == os.SEEK_DATA else size)
        node = self._node(header.node_id)
        return p.LSEEK_OUT.pack(os.lseek(node.store.file(node, R), offset, whence))

    def _statfs(self, header: Header, body: memoryview) -> Reply:
        self._source.close_released()
        node = self._nodes.get(header.node_id)
        v = (self._source if node is None else node.store).statvfs()
        size = v.f_bsize
        return p.STATFS_OUT.pack(
            v.f_blocks, v.f_bfree, v.f_bavail, v.f_files, v.f_ffree, size, v.f_namemax, v.f_frsize, 0
        )

    def _readdir(self, header: Header, body: memoryview) -> Reply:
        _, cookie, size, _, _, _, _ = p.READ_IN.unpack_from(body)
        if header.node_id >= virtual_dir.FIRST_ID:
            return self._read_virtual(header.node_id, cookie)
        node = self._node(header.node_id)
        if node.mounted_over:
            return NOTHING
        upper_dir = self._overlay.upper_dir(node)
        while not is_behind(cookie) and (found := node.store.entries(node, cookie, size)):
            out = self._pack_entries(node, self._with_upper(node, upper_dir, found), size)
            if out:
                return out
            cookie = found[-1][1]
        return self._pack_entries(node, self._entries_behind(node, cookie), size)

    def _with_upper(self, node: Node, upper_dir: UpperDir | None, found: list[Entry]) -> list[Entry]:
        """Entries of a directory, with what lies beside it in the place of what that hides."""
        if node.layer:
            return [self._parent_entry(node, entry) if entry[3] == b".." else entry for entry in found]
        if self._temp_files.directories and (held := self._temp_files.directories.get(self._inodes.path(node))):
            found = [entry for entry in found if entry[3] not in held]  # made by others since: what is held is shown
        if self.grants.hidden:
            found = [entry for entry in found if not self._is_hidden(node, entry[3])]
        if upper_dir is None:
            return found
        shown = []
        for entry in found:
            name = entry[3]
            if name in upper_dir.names:
                st = self._overlay.store.stat_entry(upper_dir.node, name)
                shown.append((st.st_ino, entry[1], st.st_mode >> 12, name))
            elif name not in upper_dir.whiteouts:
                shown.append(entry)
        return shown

    def _parent_entry(self, node: Node, entry: Entry) -> Entry:
        """The entry `..` of a directory of the layer, which may be shown in one of the source."""
        if node.parent is None or not self._overlay.is_upper_dir(node.parent):
            return entry
        path = os.fsencode(self._inodes.path(node.parent)) or b"."
        return (os.stat(path, dir_fd=self._source.root).st_ino, *entry[1:])

    def _pack_entries(self, node: Node, found: Iterable[Entry], size: int) -> bytes:
        out = bytearray()
        at_root = node.id == p.ROOT_ID
        for ino, following, kind, name in found:
            if at_root and name == virtual_dir.NAME:
                continue
            if len(out) + 24 + len(name) + 7 > size:
                break
            out += p.DIRENT.pack(ino, following & 0xFFFFFFFFFFFFFFFF, len(name), kind) + name + bytes(-len(name) & 7)
        return bytes(out)

    def _entries_behind(self, node: Node, cookie: int) -> Iterator[Entry]:
        """What a listing shows behind the source's own names, after this cookie, as entries like those."""
        after = cookie if is_behind(cookie) else 0
        places: list[tuple[int, bytes, Node | None]] = []
        if self._temp_files.directories:
            places += self._temp_files.listing(self._inodes.path(node), after)
        upper_dir = self._overlay.upper_dir(node)
        if upper_dir is not None:
            # Others may have made or removed the name in the source since: what it has now is shown in its place there.
            directory = node.store.directory(node)
            places += [
                (place, name, None)
                for name, place in upper_dir.names.items()
                if place > after and not inode_number(directory, name)
            ]
            places.sort(key=_place)
        for place, name, held in places:
            if held is not None:
                st = held.store.stat(held)
            else:
                assert upper_dir is not None
                st = self._overlay.store.stat_entry(upper_dir.node, name)
            yield st.st_ino, place, st.st_mode >> 12, name

    def _read_virtual(self, node_id: int, cookie: int) -> bytes:
        if node_id != virtual_dir.DIRECTORY_ID:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        out = bytearray()
        for number, name in enumerate([b".", b"..", *self._virtual_dir.names()], 1):
            if number > cookie:
                kind = 4 if number < 3 else 8
                out += p.DIRENT.pack(node_id, number, len(name), kind) + name + bytes(-len(name) & 7)
        return bytes(out)

    def _readdirplus(self, header: Header, body: memoryview) -> Reply:
        _, cookie, size, _, _, _, _ = p.READ_IN.unpack_from(body)
        if header.node_id >= virtual_dir.FIRST_ID:
            return self._read_virtual_plus(header.node_id, cookie)
        node = self._node(header.node_id)
        if node.mounted_over:
            return NOTHING
        upper_dir = self._overlay.upper_dir(node)
        while not is_behind(cookie) and (found := node.store.entries(node, cookie, max(size // 4, 1024))):
            out = self._pack_entries_plus(node, upper_dir, self._with_upper(node, upper_dir, found), size)
            if out:
                return out
            cookie = found[-1][1]
        return self._pack_behind_plus(node, upper_dir, cookie, size)

    def _pack_entries_plus(self, node: Node, upper_dir: UpperDir | None, found: list[Entry], left: int) -> bytes:
        at_root = node.id == p.ROOT_ID
        directory = node.fd
        out: list[bytes] = []
        for ino, following, kind, name in found:
            length = len(name)
            left -= _PLUS + ((length + 7) & ~7)
            if left < 0:
                break
            if name in _DOTS:
                out.append(_DOT_ENTRY)
            else:
                if at_root and name == virtual_dir.NAME:
                    continue
                try:
                    if at_root and name == GIT and self.repository is not None and self.repository.shared:
                        out.append(_DOT_ENTRY)  # each user looks it up
                    elif node.layer and self._is_mirrored(node, name):
                        out.append(_DOT_ENTRY)  # each lookup mirrors it
                    elif upper_dir is not None and name in upper_dir.names:
                        out.append(self._upper_entry(upper_dir, name))
                    else:
                        out.append(self._entry(node, name, os.stat(name, dir_fd=directory, follow_symlinks=False)))
                except OSError:
                    out.append(_DOT_ENTRY)  # gone, or not to be seen: a lookup will tell
            out.append(p.DIRENT.pack(ino, following & 0xFFFFFFFFFFFFFFFF, length, kind))
            out.append(name + bytes(-length & 7))
        return b"".join(out)

    def _pack_behind_plus(self, node: Node, upper_dir: UpperDir | None, cookie: int, left: int) -> bytes:
        out: list[bytes] = []
        for ino, following, kind, name in self._entries_behind(node, cookie):
            length = len(name)
            left -= _PLUS + ((length + 7) & ~7)
            if left < 0:
                break
            held = self._staged_at(node, name)
            if held is not None:
                out.append(self._staged_entry(held))
            else:
                assert upper_dir is not None
                out.append(self._upper_entry(upper_dir, name))
            out.append(p.DIRENT.pack(ino, following, length, kind) + name + bytes(-length & 7))
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
        if header.node_id >= virtual_dir.FIRST_ID:
            return NOTHING
        node = self._node(header.node_id)
        _, flags, _ = p.FSYNC_IN.unpack_from(body)
        if node.batch is not None:
            self._enforcer.settle(node.id)
        return self._sync(node, data_only=bool(flags & 1))

    def _sync(self, node: Node, *, data_only: bool) -> Steps:
        """Sync the trail, then the file. The kernel lets no writer of this mount into the file meanwhile."""
        fd = os.dup(node.store.fd_to_sync(node))
        sync_file = os.fdatasync if data_only else os.fsync

        def sync() -> None:
            self._enforcer.trail.sync()
            sync_file(fd)

        job = Job(sync)
        try:
            yield job
            job.check()
        finally:
            os.close(fd)
        return NOTHING

    def _getxattr(self, header: Header, body: memoryview) -> Reply:
        size, _ = p.GETXATTR_IN.unpack_from(body)
        (name,) = p.strings(body[p.GETXATTR_IN.size :], 1)
        if header.node_id >= virtual_dir.FIRST_ID:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        node = self._attribute_node(self._node(header.node_id))
        if name.startswith(_WHY_NAME):
            return _sized_reply(self._why_name(header, name[len(_WHY_NAME) :]), size)
        if (node.has_no_xattrs and name == _CAPABILITY) or (node.store.place and name != WHY):
            raise OSError(errno.ENODATA, "")  # the kernel asks before the first write to every file
        value = self._why(node) if name == WHY else node.store.get_xattr(node, name)
        return _sized_reply(value, size)

    def _why(self, node: Node) -> bytes:
        """The decision about writing the node's path, as JSON: what a program can ask before it tries."""
        path = self._inodes.path(node)
        st = node.store.stat(node)
        kind = kind_of(st.st_mode)
        operation = Operation.MKDIR if kind is Kind.DIRECTORY else Operation.WRITE_FILE
        context = self._layer_context(node)
        if kind is Kind.FILE:
            context = self._with_foreign_names(
                node, st, operation, context._replace(size=st.st_size, size_before=st.st_size)
            )
        decision = self._enforcer.explain(Request(operation, path, kind), context)
        return json.dumps(as_document(decision, path, operation)).encode()

    def _why_name(self, header: Header, name: bytes) -> bytes:
        """The decision about writing NAME in the directory of the request, or about making it there.

        ENOTDIR where the request is for no directory, EINVAL for what cannot be a name, ENAMETOOLONG.
        """
        parent = self._node(header.node_id)
        if not parent.is_dir:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if name in (b"", *_DOTS) or b"/" in name:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        entry = self._lookup(header, memoryview(name + b"\0"))
        assert isinstance(entry, bytes)
        found = p.ENTRY_OUT.unpack_from(entry)[0]
        if 0 < found < virtual_dir.FIRST_ID:
            try:
                return self._why(self._node(found))
            finally:
                self._forget_node(found, 1)
        request = Request(Operation.CREATE_FILE, self._inodes.join(parent, name))
        decision = self._enforcer.explain(request, _NEW_FILE)
        return json.dumps(as_document(decision, request.path, request.operation)).encode()

    def _listxattr(self, header: Header, body: memoryview) -> Reply:
        size, _ = p.GETXATTR_IN.unpack_from(body)
        if header.node_id >= virtual_dir.FIRST_ID:
            return _sized_reply(b"", size)
        node = self._attribute_node(self._node(header.node_id))
        found = [] if node.store.place else node.store.list_xattrs(node)
        if header.uid != 0:
            found = [name for name in found if not name.startswith("trusted.")]
        return _sized_reply(b"".join(os.fsencode(name) + b"\0" for name in found), size)


def _place(entry: tuple[int, bytes, Node | None]) -> int:
    return entry[0]


def _sized_reply(value: bytes, size: int) -> bytes:
    """The answer to GETXATTR and LISTXATTR: the length alone where `size` is 0, ERANGE where it is too small."""
    if size == 0:
        return p.XATTR_OUT.pack(len(value), 0)
    if len(value) > size:
        raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))
    return value
