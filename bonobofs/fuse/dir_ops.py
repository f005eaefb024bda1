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
from bonobofs.fuse.mount_context import NOTHING, Handler, Header, MountContext, Reply
from bonobofs.fuse.overlay import UpperDir
from bonobofs.fuse.overlay_ops import OverlayOps, inode_number
from bonobofs.fuse.session_git_dir import NAME as GIT
from bonobofs.fuse.session_git_dir import BranchMirrorOps
from bonobofs.fuse.temp_files import TempFileOps
from bonobofs.policy.decision import Layer

FIRST_COOKIE: Final = 0x7FFF_FFFF_0000_0000
"""Entries of the upper directory and staged files are listed after the source's own.

ext4, btrfs, XFS and tmpfs use no cookies from here on, except the last one.
"""
LAST_COOKIE: Final = 0x7FFF_FFFF_FFFF_FFFF
_DOT_ENTRY: Final = bytes(p.ENTRY_OUT.size + p.ATTR.size)
_DOTS: Final = (b".", b"..")
_PLUS: Final = p.ENTRY_OUT.size + p.ATTR.size + p.DIRENT.size


class DirOps:
    """Handlers that list the source, the upper directory and staged files as one directory."""

    def __init__(self, mount: MountContext, staged: TempFileOps, layers: OverlayOps, mirror: BranchMirrorOps) -> None:
        self._mount: Final = mount
        self._staged: Final = staged
        self._layers: Final = layers
        self._mirror: Final = mirror
        o = p.Opcode
        self.handlers: Final[dict[int, Handler]] = {o.READDIR: self._readdir, o.READDIRPLUS: self._readdirplus}

    def _readdir(self, header: Header, body: memoryview) -> Reply:
        return self._list(header, body, plus=False)

    def _readdirplus(self, header: Header, body: memoryview) -> Reply:
        return self._list(header, body, plus=True)

    def _list(self, header: Header, body: memoryview, *, plus: bool) -> Reply:
        _, cookie, size, _, _, _, _ = p.READ_IN.unpack_from(body)
        if header.node_id >= virtual_dir.FIRST_ID:
            return self._pack_virtual(header.node_id, cookie, plus=plus)
        node = self._mount.node(header.node_id)
        if node.mounted_over:
            return NOTHING
        upper_dir = self._mount.overlay.upper_dir(node)
        wanted = max(size // 4, 1024) if plus else size
        while not is_behind(cookie) and (entries := node.store.entries(node, cookie, wanted)):
            out = self._pack(node, upper_dir, self._with_upper(node, upper_dir, entries), size, plus=plus)
            if out:
                return out
            cookie = entries[-1][1]
        return self._pack(node, upper_dir, self._entries_behind(node, cookie), size, plus=plus)

    def _with_upper(self, node: Node, upper_dir: UpperDir | None, entries: list[Entry]) -> list[Entry]:
        """Replace the source's entries that the upper directory or staged files hide."""
        if node.layer is not Layer.SOURCE:
            return [self._parent_entry(node, entry) if entry[3] == b".." else entry for entry in entries]
        if self._mount.temp_files.directories and (
            staged := self._mount.temp_files.directories.get(self._mount.path(node))
        ):
            # another process has created this name meanwhile: the staged file is shown
            entries = [entry for entry in entries if entry[3] not in staged]
        if self._mount.grants.hidden:
            entries = [entry for entry in entries if not self._mount.is_hidden(node, entry[3])]
        if self._mount.enforcer.policy.secrets:
            entries = [entry for entry in entries if entry[3] in _DOTS or not self._mount.hide_secret(node, entry[3])]
        if upper_dir is None:
            return entries
        shown = []
        for entry in entries:
            name = entry[3]
            if name in upper_dir.names:
                st = self._mount.overlay.store.stat_entry(upper_dir.node, name)
                shown.append((st.st_ino, entry[1], st.st_mode >> 12, name))
            elif name not in upper_dir.whiteouts:
                shown.append(entry)
        return shown

    def _parent_entry(self, node: Node, entry: Entry) -> Entry:
        """Return the entry `..` of an upper directory, with the inode number of the directory that shows it."""
        if node.parent is None or not self._mount.overlay.is_upper_dir(node.parent):
            return entry
        path = os.fsencode(self._mount.path(node.parent)) or b"."
        return (os.stat(path, dir_fd=self._mount.source.root).st_ino, *entry[1:])

    def _pack(
        self, node: Node, upper_dir: UpperDir | None, entries: Iterable[Entry], space: int, *, plus: bool
    ) -> bytes:
        """Return the entries that fit into `space` bytes. `plus`: with their attributes, and a reference to each."""
        at_root = node.id == p.ROOT_ID
        needed = _PLUS if plus else p.DIRENT.size
        out: list[bytes] = []
        for ino, following, kind, name in entries:
            if at_root and name == virtual_dir.NAME:
                continue
            length = len(name)
            space -= needed + ((length + 7) & ~7)
            if space < 0:
                break
            if plus:
                out.append(_DOT_ENTRY if name in _DOTS else self._entry(node, upper_dir, name, following))
            out.append(p.DIRENT.pack(ino, following & 0xFFFFFFFFFFFFFFFF, length, kind))
            out.append(name + bytes(-length & 7))
        return b"".join(out)

    def _entry(self, node: Node, upper_dir: UpperDir | None, name: bytes, following: int) -> bytes:
        """Return the entry of a listed name. It is empty for a removed name, or if the kernel must look the name up."""
        repository = self._mount.repository
        try:
            if is_behind(following) and (staged := self._staged.staged_at(node, name)) is not None:
                return self._staged.staged_entry(staged)
            if upper_dir is not None and name in upper_dir.names:
                is_private = name == GIT and node.id == p.ROOT_ID and repository is not None and repository.shared
                return _DOT_ENTRY if is_private else self._layers.upper_entry(upper_dir, name)
            if node.layer is not Layer.SOURCE and self._mirror.update_mirrored(node, name):
                return _DOT_ENTRY  # each lookup updates it
            return self._mount.listed_entry(node, name, os.stat(name, dir_fd=node.fd, follow_symlinks=False))
        except OSError:
            return _DOT_ENTRY

    def _entries_behind(self, node: Node, cookie: int) -> Iterator[Entry]:
        """Yield the staged files and names of the upper directory after this cookie, which is behind the
        source's own.
        """
        after = cookie if is_behind(cookie) else 0
        positions: list[tuple[int, bytes, Node | None]] = []
        if self._mount.temp_files.directories:
            positions += self._mount.temp_files.listing(self._mount.path(node), after)
        upper_dir = self._mount.overlay.upper_dir(node)
        if upper_dir is not None:
            # Another process may have created the name in the source meanwhile. Then it is listed at its position
            # there.
            directory = node.store.directory(node)
            positions += [
                (position, name, None)
                for name, position in upper_dir.names.items()
                if position > after and not inode_number(directory, name)
            ]
            positions.sort(key=_position)
        for position, name, staged in positions:
            if staged is not None:
                st = staged.store.stat(staged)
            else:
                assert upper_dir is not None
                st = self._mount.overlay.store.stat_entry(upper_dir.node, name)
            yield st.st_ino, position, st.st_mode >> 12, name

    def _pack_virtual(self, node_id: int, cookie: int, *, plus: bool) -> bytes:
        if node_id != virtual_dir.DIRECTORY_ID:
            raise os_error(errno.ENOTDIR)
        out = bytearray()
        for number, name in enumerate([b".", b"..", *self._mount.virtual_dir.names()], 1):
            if number > cookie:
                kind = 4 if number < 3 else 8
                out += _DOT_ENTRY if plus else b""
                out += p.DIRENT.pack(node_id, number, len(name), kind) + name + bytes(-len(name) & 7)
        return bytes(out)


def is_behind(cookie: int) -> bool:
    """Whether the cookie is behind the source's own names."""
    return FIRST_COOKIE < cookie < LAST_COOKIE


def _position(entry: tuple[int, bytes, Node | None]) -> int:
    return entry[0]
