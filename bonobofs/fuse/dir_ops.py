"""Handlers of READDIR and READDIRPLUS."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from typing import Final

from bonobofs.errors import os_error
from bonobofs.fuse import abi as p
from bonobofs.fuse import virtual_dir
from bonobofs.fuse.inode_table import Node
from bonobofs.fuse.layer_store import Entry
from bonobofs.fuse.mount_context import NOTHING, Handler, Header, Reply
from bonobofs.fuse.overlay import UpperDir
from bonobofs.fuse.overlay_ops import inode_number
from bonobofs.fuse.session_git_dir import NAME as GIT
from bonobofs.fuse.session_git_dir import BranchMirrorOps

FIRST_COOKIE: Final = 0x7FFF_FFFF_0000_0000
"""Entries of the upper directory and staged files are listed after the source's own.

ext4, btrfs, XFS and tmpfs use no cookies from here on, except the last one.
"""
LAST_COOKIE: Final = 0x7FFF_FFFF_FFFF_FFFF
_DOT_ENTRY: Final = bytes(p.ENTRY_OUT.size + p.ATTR.size)
_DOTS: Final = (b".", b"..")
_PLUS: Final = p.ENTRY_OUT.size + p.ATTR.size + p.DIRENT.size


class DirOps(BranchMirrorOps):
    """Handlers that list the source, the upper directory and staged files as one directory."""

    def _dir_handlers(self) -> dict[int, Handler]:
        o = p.Opcode
        return {
            o.READDIR: self._readdir,
            o.READDIRPLUS: self._readdirplus,
        }

    def _readdir(self, header: Header, body: memoryview) -> Reply:
        _, cookie, size, _, _, _, _ = p.READ_IN.unpack_from(body)
        if header.node_id >= virtual_dir.FIRST_ID:
            return self._read_virtual(header.node_id, cookie)
        node = self._node(header.node_id)
        if node.mounted_over:
            return NOTHING
        upper_dir = self._overlay.upper_dir(node)
        while not is_behind(cookie) and (entries := node.store.entries(node, cookie, size)):
            out = self._pack_entries(node, self._with_upper(node, upper_dir, entries), size)
            if out:
                return out
            cookie = entries[-1][1]
        return self._pack_entries(node, self._entries_behind(node, cookie), size)

    def _with_upper(self, node: Node, upper_dir: UpperDir | None, entries: list[Entry]) -> list[Entry]:
        """Replace the source's entries that the upper directory or staged files hide."""
        if node.layer:
            return [self._parent_entry(node, entry) if entry[3] == b".." else entry for entry in entries]
        if self._temp_files.directories and (staged := self._temp_files.directories.get(self._inodes.path(node))):
            # another process has created this name meanwhile: the staged file is shown
            entries = [entry for entry in entries if entry[3] not in staged]
        if self.grants.hidden:
            entries = [entry for entry in entries if not self._is_hidden(node, entry[3])]
        if upper_dir is None:
            return entries
        shown = []
        for entry in entries:
            name = entry[3]
            if name in upper_dir.names:
                st = self._overlay.store.stat_entry(upper_dir.node, name)
                shown.append((st.st_ino, entry[1], st.st_mode >> 12, name))
            elif name not in upper_dir.whiteouts:
                shown.append(entry)
        return shown

    def _parent_entry(self, node: Node, entry: Entry) -> Entry:
        """Return the entry `..` of an upper directory, with the inode number of the directory that shows it."""
        if node.parent is None or not self._overlay.is_upper_dir(node.parent):
            return entry
        path = os.fsencode(self._inodes.path(node.parent)) or b"."
        return (os.stat(path, dir_fd=self._source.root).st_ino, *entry[1:])

    def _pack_entries(self, node: Node, entries: Iterable[Entry], size: int) -> bytes:
        out = bytearray()
        at_root = node.id == p.ROOT_ID
        for ino, following, kind, name in entries:
            if at_root and name == virtual_dir.NAME:
                continue
            if len(out) + 24 + len(name) + 7 > size:
                break
            out += p.DIRENT.pack(ino, following & 0xFFFFFFFFFFFFFFFF, len(name), kind) + name + bytes(-len(name) & 7)
        return bytes(out)

    def _entries_behind(self, node: Node, cookie: int) -> Iterator[Entry]:
        """Yield the staged files and names of the upper directory after this cookie, which is behind the
        source's own.
        """
        after = cookie if is_behind(cookie) else 0
        places: list[tuple[int, bytes, Node | None]] = []
        if self._temp_files.directories:
            places += self._temp_files.listing(self._inodes.path(node), after)
        upper_dir = self._overlay.upper_dir(node)
        if upper_dir is not None:
            # Another process may have created the name in the source meanwhile. Then it is listed at its position
            # there.
            directory = node.store.directory(node)
            places += [
                (place, name, None)
                for name, place in upper_dir.names.items()
                if place > after and not inode_number(directory, name)
            ]
            places.sort(key=_place)
        for place, name, staged in places:
            if staged is not None:
                st = staged.store.stat(staged)
            else:
                assert upper_dir is not None
                st = self._overlay.store.stat_entry(upper_dir.node, name)
            yield st.st_ino, place, st.st_mode >> 12, name

    def _read_virtual(self, node_id: int, cookie: int) -> bytes:
        if node_id != virtual_dir.DIRECTORY_ID:
            raise os_error(errno.ENOTDIR)
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
        while not is_behind(cookie) and (entries := node.store.entries(node, cookie, max(size // 4, 1024))):
            out = self._pack_entries_plus(node, upper_dir, self._with_upper(node, upper_dir, entries), size)
            if out:
                return out
            cookie = entries[-1][1]
        return self._pack_behind_plus(node, upper_dir, cookie, size)

    def _pack_entries_plus(self, node: Node, upper_dir: UpperDir | None, entries: list[Entry], space: int) -> bytes:
        at_root = node.id == p.ROOT_ID
        directory = node.fd
        out: list[bytes] = []
        for ino, following, kind, name in entries:
            length = len(name)
            space -= _PLUS + ((length + 7) & ~7)
            if space < 0:
                break
            if name in _DOTS:
                out.append(_DOT_ENTRY)
            else:
                if at_root and name == virtual_dir.NAME:
                    continue
                try:
                    if at_root and name == GIT and self.repository is not None and self.repository.shared:
                        out.append(_DOT_ENTRY)  # each user must look it up
                    elif node.layer and self._is_mirrored(node, name):
                        out.append(_DOT_ENTRY)  # each lookup updates it
                    elif upper_dir is not None and name in upper_dir.names:
                        out.append(self._upper_entry(upper_dir, name))
                    else:
                        out.append(self._entry(node, name, os.stat(name, dir_fd=directory, follow_symlinks=False)))
                except OSError:
                    out.append(_DOT_ENTRY)  # removed, or not visible: a lookup will answer
            out.append(p.DIRENT.pack(ino, following & 0xFFFFFFFFFFFFFFFF, length, kind))
            out.append(name + bytes(-length & 7))
        return b"".join(out)

    def _pack_behind_plus(self, node: Node, upper_dir: UpperDir | None, cookie: int, space: int) -> bytes:
        out: list[bytes] = []
        for ino, following, kind, name in self._entries_behind(node, cookie):
            length = len(name)
            space -= _PLUS + ((length + 7) & ~7)
            if space < 0:
                break
            staged = self._staged_at(node, name)
            if staged is not None:
                out.append(self._staged_entry(staged))
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


def is_behind(cookie: int) -> bool:
    """Whether the cookie is behind the source's own names."""
    return FIRST_COOKIE < cookie < LAST_COOKIE


def _place(entry: tuple[int, bytes, Node | None]) -> int:
    return entry[0]
