"""Requests that change names: what appears, what goes, what moves. Both ends are judged, and all below a directory."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import NamedTuple

from bonobofs.fuse import protocol as p
from bonobofs.fuse import system
from bonobofs.fuse.core import LEAVES, NOTHING, Core, Handler, Header, Reply
from bonobofs.fuse.inodes import Node, kind_of
from bonobofs.guard import Part
from bonobofs.request import NO_FACTS, Facts, Kind, Operation, Request, WorkspacePath


class _End(NamedTuple):
    """One end of a rename: the directory, the name in it, and what lies there."""

    parent: Node
    directory: int
    name: bytes
    path: WorkspacePath
    st: os.stat_result | None


class Names(Core):
    """Handlers that change directories."""

    def _changing_names(self) -> dict[int, Handler]:
        o = p.Opcode
        return {
            o.MKDIR: self._mkdir,
            o.MKNOD: self._mknod,
            o.SYMLINK: self._symlink,
            o.LINK: self._link,
            o.UNLINK: self._unlink,
            o.RMDIR: self._rmdir,
            o.RENAME: self._rename_plain,
            o.RENAME2: self._rename_flags,
        }

    def _made(self, parent: Node, directory: int, name: bytes) -> bytes:
        return self._entry(parent, name, os.stat(name, dir_fd=directory, follow_symlinks=False))

    def _mkdir(self, header: Header, body: memoryview) -> Reply:
        mode, umask = p.MKDIR_IN.unpack_from(body)
        (name,) = p.strings(body[p.MKDIR_IN.size :], 1)
        parent, directory = self._changing(header, Operation.MKDIR, name)
        request = Request(Operation.MKDIR, self._inodes.join(parent, name), Kind.DIRECTORY)
        groups = self._groups(header, body)
        with self._guard.admit(request, caller=self._caller(header)) as leave:
            try:
                self._act_as(header, groups, umask)
                self._backing.mkdir(directory, name, mode & 0o7777, leave)
            finally:
                self._backing.act_as_self()
        return self._made(parent, directory, name)

    def _mknod(self, header: Header, body: memoryview) -> Reply:
        mode, device, umask, _ = p.MKNOD_IN.unpack_from(body)
        (name,) = p.strings(body[p.MKNOD_IN.size :], 1)
        kind = kind_of(mode)
        operation = Operation.CREATE_FILE if kind is Kind.FILE else Operation.MKNOD
        parent, directory = self._changing(header, operation, name)
        request = Request(operation, self._inodes.join(parent, name), kind)
        facts = Facts(privileged=self._backing.privileged)
        if kind is Kind.FILE:
            facts = Facts(size=0, mode=self._made_mode(directory, mode & 0o7777, umask))
        groups = self._groups(header, body)
        with self._guard.admit(request, facts, caller=self._caller(header)) as leave:
            try:
                self._act_as(header, groups, umask)
                self._backing.mknod(directory, name, mode, p.unpack_rdev(device), leave)
            finally:
                self._backing.act_as_self()
        return self._made(parent, directory, name)

    def _symlink(self, header: Header, body: memoryview) -> Reply:
        name, target = p.strings(body, 2)
        parent, directory = self._changing(header, Operation.SYMLINK, name)
        request = Request(Operation.SYMLINK, self._inodes.join(parent, name), Kind.SYMLINK)
        text = os.fsdecode(target)
        groups = self._groups(header, body)
        with self._guard.admit(
            request, Facts(target=text), caller=self._caller(header), details={"target": text}
        ) as leave:
            try:
                self._act_as(header, groups, 0)
                self._backing.symlink(directory, name, target, leave)
            finally:
                self._backing.act_as_self()
        return self._made(parent, directory, name)

    def _link(self, header: Header, body: memoryview) -> Reply:
        (old_id,) = p.LINK_IN.unpack_from(body)
        (name,) = p.strings(body[p.LINK_IN.size :], 1)
        parent, directory = self._changing(header, Operation.LINK, name)
        node = self._changed(header, Operation.LINK, old_id)
        st = self._backing.stat(node, changing=True)
        if node.parent is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        kind = kind_of(st.st_mode)
        old = Request(Operation.LINK, self._inodes.path(node), kind)
        new = Request(Operation.LINK, self._inodes.join(parent, name), kind)
        facts = self._appearing(self._backing.directory(node.parent), node.name, st, new)
        admission = self._guard.admit(
            new, facts, Part(old, facts), caller=self._caller(header), details={"from": old.path}
        )
        with admission as leave:
            self._backing.link(node, directory, name, leave)
        self._inodes.note_link(node.ino, node.parent, node.name)
        self._inodes.note_link(node.ino, parent, name)
        return self._made(parent, directory, name)

    def _unlink(self, header: Header, body: memoryview) -> Reply:
        (name,) = p.strings(body, 1)
        parent, directory = self._changing(header, Operation.DELETE_FILE, name)
        st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        request = Request(Operation.DELETE_FILE, self._inodes.join(parent, name), kind_of(st.st_mode))
        with self._guard.admit(request, LEAVES, caller=self._caller(header)) as leave:
            node = self._leaving(parent, directory, name, st)
            self._or_stays(node, lambda: self._backing.unlink(directory, name, leave))
        self._left(node, parent, name, st)
        return NOTHING

    def _rmdir(self, header: Header, body: memoryview) -> Reply:
        (name,) = p.strings(body, 1)
        parent, directory = self._changing(header, Operation.RMDIR, name)
        st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        request = Request(Operation.RMDIR, self._inodes.join(parent, name), Kind.DIRECTORY)
        with self._guard.admit(request, LEAVES, caller=self._caller(header)) as leave:
            node = self._leaving(parent, directory, name, st)
            self._or_stays(node, lambda: self._backing.rmdir(directory, name, leave))
        self._left(node, parent, name, st)
        return NOTHING

    def _leaving(self, parent: Node, directory: int, name: bytes, st: os.stat_result) -> Node | None:
        """The node of a name that is about to go, held for those who have it open."""
        node = self._settled(st) if st.st_dev == self._backing.device else None
        if node is not None and node.parent is parent and node.name == name:
            self._backing.pin(node, directory, name)
        return node

    def _or_stays(self, node: Node | None, effect: Callable[[], None]) -> None:
        """Make a name go, and if it does not, let go of what was held because it would."""
        try:
            effect()
        except OSError:
            if node is not None:
                self._backing.unpin(node)
            raise

    def _left(self, node: Node | None, parent: Node, name: bytes, st: os.stat_result) -> None:
        """A name is gone: the node goes by another of its names that is known, or by none."""
        self._inodes.drop_link(st.st_ino, parent, name)
        if node is None or node.parent is not parent or node.name != name:
            return
        for other_parent, other_name in self._inodes.links(node.ino):
            self._inodes.rename(node, other_parent, other_name)
            self._inodes.note_link(node.ino, other_parent, other_name)
            self._backing.unpin(node)
            return
        if st.st_nlink > 1 and not node.is_dir:
            self._inodes.orphan(node)
        else:
            self._inodes.cut_off(node)

    def _rename_plain(self, header: Header, body: memoryview) -> Reply:
        (target_id,) = p.RENAME_IN.unpack_from(body)
        return self._rename(header, target_id, 0, body[p.RENAME_IN.size :])

    def _rename_flags(self, header: Header, body: memoryview) -> Reply:
        target_id, flags, _ = p.RENAME2_IN.unpack_from(body)
        return self._rename(header, target_id, flags, body[p.RENAME2_IN.size :])

    def _rename(self, header: Header, target_id: int, flags: int, body: memoryview) -> Reply:
        old, new = p.strings(body, 2)
        if flags & ~(system.RENAME_NOREPLACE | system.RENAME_EXCHANGE):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        source = self._end(header, old)
        target = self._end(header._replace(node_id=target_id), new)
        if source.st is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        over = target.st
        exchange = bool(flags & system.RENAME_EXCHANGE)
        same = over is not None and (over.st_ino, over.st_dev) == (source.st.st_ino, source.st.st_dev)
        request = Request(Operation.RENAME, source.path, kind_of(source.st.st_mode))
        parts = self._moving(source, source.st, target.path)
        if over is not None:
            leaving = LEAVES if exchange else NO_FACTS
            parts.append(Part(Request(Operation.RENAME, target.path, kind_of(over.st_mode)), leaving))
        if over is not None and exchange:
            parts += self._moving(target, over, source.path)
        details = {"to": target.path, "exchange": True} if exchange else {"to": target.path}
        with self._guard.admit(request, LEAVES, *parts, caller=self._caller(header), details=details) as leave:
            moved, other = self._settled(source.st), None
            if over is not None and exchange:
                other = self._settled(over)
            elif over is not None and not same:
                other = self._leaving(target.parent, target.directory, new, over)
            ends = source.directory, old, target.directory, new
            self._or_stays(other, lambda: self._backing.rename(*ends, flags, leave))
        if not same:
            if over is not None and exchange:
                self._moved(other, target, source)
            elif over is not None:
                self._left(other, target.parent, new, over)
            self._moved(moved, source, target)
        return NOTHING

    def _end(self, header: Header, name: bytes) -> _End:
        parent, directory = self._changing(header, Operation.RENAME, name)
        try:
            st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            st = None
        return _End(parent, directory, name, self._inodes.join(parent, name), st)

    def _settled(self, st: os.stat_result) -> Node | None:
        """The node of what is about to move, its run of writes settled under the old name."""
        node = self._inodes.find(st.st_ino)
        if node is not None and node.run is not None:
            self._guard.settle(node.id)
            node.run = None
        elif stat.S_ISDIR(st.st_mode):
            self._guard.end_runs()  # what is open below is judged by its new path
        return node

    def _moving(self, origin: _End, st: os.stat_result, path: WorkspacePath) -> list[Part]:
        """What appears at `path` when the origin moves there: itself, and everything below a directory.

        Each thing below leaves one path and appears at another, and both are judged.
        """
        kind = kind_of(st.st_mode)
        request = Request(Operation.RENAME, path, kind)
        parts = [Part(request, self._appearing(origin.directory, origin.name, st, request))]
        if kind is not Kind.DIRECTORY:
            return parts
        for below in self._backing.walk(origin.directory, origin.name):
            kind = kind_of(below.st.st_mode)
            leaving = WorkspacePath(f"{origin.path}/{below.path}")
            parts.append(Part(Request(Operation.RENAME, leaving, kind), LEAVES))
            request = Request(Operation.RENAME, WorkspacePath(f"{path}/{below.path}"), kind)
            parts.append(Part(request, self._appearing(below.directory, below.name, below.st, request)))
        return parts

    def _moved(self, node: Node | None, origin: _End, target: _End) -> None:
        if node is None:
            return
        if node.parent is origin.parent and node.name == origin.name:
            self._inodes.rename(node, target.parent, target.name)
        else:
            self._inodes.drop_link(node.ino, origin.parent, origin.name)
            self._inodes.note_link(node.ino, target.parent, target.name)
