"""Requests that change names: what appears, what goes, what moves. Both ends are judged, and all below a directory."""

from __future__ import annotations

import errno
import os

from bonobofs.decision import Apart
from bonobofs.fuse import protocol as p
from bonobofs.fuse import system
from bonobofs.fuse.core import LEAVES, NOTHING, Handler, Header, Reply
from bonobofs.fuse.holding import End, Holding
from bonobofs.fuse.inodes import Node, kind_of
from bonobofs.fuse.noticing import UNTOLD, told_by
from bonobofs.guard import Part
from bonobofs.request import EXISTS, Facts, Kind, Operation, Request, WorkspacePath


class Names(Holding):
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
        st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        self._did_name(parent, name, st.st_ino)
        return self._entry(parent, name, st)

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
        apart = None if kind is Kind.FILE else Apart.NO
        with self._guard.admit(request, facts, caller=self._caller(header), apart=apart) as leave:
            try:
                self._act_as(header, groups, umask)
                if leave.apart:
                    return self._held_entry(self._hold_file(parent, directory, name, mode & 0o7777, leave))
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
            request, Facts(target=text), caller=self._caller(header), details={"target": text}, apart=None
        ) as leave:
            if leave.apart:
                return self._held_entry(self._hold_symlink(header, parent, directory, name, target, leave))
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
        if node.apart:
            return self._link_held(header, node, parent, directory, name)
        st = self._backing.stat(node, changing=True)
        self._see(node, st)
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
        node.told = UNTOLD
        self._inodes.note_link(node.ino, node.parent, node.name)
        self._inodes.note_link(node.ino, parent, name)
        return self._made(parent, directory, name)

    def _unlink(self, header: Header, body: memoryview) -> Reply:
        (name,) = p.strings(body, 1)
        parent, directory = self._changing(header, Operation.DELETE_FILE, name)
        if held := self._held_at(parent, name):
            self._unlink_held(header, parent, name, held)
            return NOTHING
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
            self._check_none_held(request.path)
            node = self._leaving(parent, directory, name, st)
            self._or_stays(node, lambda: self._backing.rmdir(directory, name, leave))
        self._left(node, parent, name, st)
        return NOTHING

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
        if self._held.directories and self._rename_held(header, source, target, flags):
            return NOTHING
        if source.st is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        over = target.st
        exchange = bool(flags & system.RENAME_EXCHANGE)
        same = over is not None and (over.st_ino, over.st_dev) == (source.st.st_ino, source.st.st_dev)
        request = Request(Operation.RENAME, source.path, kind_of(source.st.st_mode))
        parts = self._moving(source, source.st, target.path)
        if over is not None:
            parts += self._giving_way(target, over, source, exchange=exchange)
        details = {"to": target.path, "exchange": True} if exchange else {"to": target.path}
        with self._guard.admit(request, LEAVES, *parts, caller=self._caller(header), details=details) as leave:
            moved, other = self._settled(source.st), None
            if over is not None and exchange:
                other = self._settled(over)
            elif over is not None and not same:
                self._check_none_held(target.path)
                other = self._leaving(target.parent, target.directory, new, over)
            ends = source.directory, old, target.directory, new
            self._or_stays(other, lambda: self._backing.rename(*ends, flags, leave))
        if not same:
            self._renamed(source, moved, target, other, exchange=exchange)
            self._held_moved(source, target, exchange=exchange)
        return NOTHING

    def _renamed(self, source: End, moved: Node | None, target: End, other: Node | None, *, exchange: bool) -> None:
        assert source.st is not None
        if target.st is not None and exchange:
            self._moved(other, target, source, target.st.st_ino)
        else:
            self._did_name(source.parent, source.name, 0)
        if target.st is not None and not exchange:
            self._left(other, target.parent, target.name, target.st)
        self._moved(moved, source, target, source.st.st_ino)

    def _giving_way(self, target: End, over: os.stat_result, source: End, *, exchange: bool) -> list[Part]:
        """What becomes of that which has the new name."""
        leaving = LEAVES if exchange else EXISTS
        parts = [Part(Request(Operation.RENAME, target.path, kind_of(over.st_mode)), leaving)]
        return parts + self._moving(target, over, source.path) if exchange else parts

    def _end(self, header: Header, name: bytes) -> End:
        parent, directory = self._changing(header, Operation.RENAME, name)
        try:
            st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            st = None
        return End(parent, directory, name, self._inodes.join(parent, name), st)

    def _moving(self, origin: End, st: os.stat_result, path: WorkspacePath) -> list[Part]:
        """What appears at `path` when the origin moves there: itself, and everything below a directory.

        Each thing below leaves one path and appears at another, and both are judged.
        """
        kind = kind_of(st.st_mode)
        request = Request(Operation.RENAME, path, kind)
        parts = [Part(request, self._appearing(origin.directory, origin.name, st, request))]
        if kind is not Kind.DIRECTORY:
            return parts
        if self._held.directories:
            parts += self._held_moving(origin, path)
        for below in self._backing.walk(origin.directory, origin.name):
            kind = kind_of(below.st.st_mode)
            leaving = WorkspacePath(f"{origin.path}/{below.path}")
            parts.append(Part(Request(Operation.RENAME, leaving, kind), LEAVES))
            request = Request(Operation.RENAME, WorkspacePath(f"{path}/{below.path}"), kind)
            parts.append(Part(request, self._appearing(below.directory, below.name, below.st, request)))
        return parts

    def _moved(self, node: Node | None, origin: End, target: End, ino: int) -> None:
        self._did_name(target.parent, target.name, ino)
        if node is None:
            return
        try:
            node.told = told_by(os.stat(target.name, dir_fd=target.directory, follow_symlinks=False))
        except OSError:
            node.told = UNTOLD
        if node.parent is origin.parent and node.name == origin.name:
            self._inodes.rename(node, target.parent, target.name)
        else:
            self._inodes.drop_link(node.ino, origin.parent, origin.name)
            self._inodes.note_link(node.ino, target.parent, target.name)
