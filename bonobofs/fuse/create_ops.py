"""Handlers of CREATE, MKDIR, MKNOD, SYMLINK and LINK."""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

from bonobofs.enforcement.authorizer import WrongLayerError
from bonobofs.errors import os_error
from bonobofs.fuse import abi as p
from bonobofs.fuse.external_changes import fingerprint_after_rename
from bonobofs.fuse.fd_cache import stale
from bonobofs.fuse.git_grants import OPENED, GrantOps
from bonobofs.fuse.inode_table import Node
from bonobofs.fuse.mount_context import INLINE, Handler, Header, Reply
from bonobofs.fuse.slices import finished
from bonobofs.policy.decision import Layer, Permit
from bonobofs.policy.request import Context, Kind, Operation, Request, kind_of

_CREATING: Final = 0
"""Key of a write batch whose file has no node yet."""


class CreateOps(GrantOps):
    """Handlers that create names."""

    def _create_handlers(self) -> dict[int, Handler]:
        o = p.Opcode
        return {
            o.CREATE: self._create,
            o.MKDIR: self._mkdir,
            o.MKNOD: self._mknod,
            o.SYMLINK: self._symlink,
            o.LINK: self._link,
        }

    def _create(self, header: Header, body: memoryview) -> Reply:
        flags, mode, umask, _ = p.CREATE_IN.unpack_from(body)
        (name,) = p.strings(body[p.CREATE_IN.size :], 1)
        parent, directory = self._parent_to_change(header, Operation.CREATE_FILE, name)
        mode &= 0o7777
        request = Request(Operation.CREATE_FILE, self._inodes.join(parent, name))
        context = Context(size=0, mode=self._effective_mode(directory, mode, umask))
        groups = self._groups(header, body)
        grant = self._grant_at(parent, name)
        if grant is not None and stat.S_ISREG(grant.mode):
            steps = self._take_in_file(header, grant, parent, name, umask, groups)
            return finished(steps) if grant.size <= INLINE else steps
        permit = self._permit_new_name(header, request, context)
        batch = self._enforcer.open_batch(
            _CREATING, request, permit, self._source.now, caller=self._caller(header), layer=None
        )
        try:
            target_dir, directory = self._target_dir(header, request, parent, directory, batch.permit)
            self._act_as(header, groups, umask)
            node, reply = self._make_file(target_dir, directory, name, mode, batch.permit)
        except BaseException as error:
            self._enforcer.close_batch(_CREATING, getattr(error, "errno", None) or errno.EIO)
            if isinstance(error, FileExistsError) and not flags & os.O_EXCL:
                # The kernel did not know the file. After ESTALE it looks the name up again, and then opens and
                # truncates a file that exists.
                raise stale() from error
            raise
        finally:
            self._source.act_as_self()
        self._add_upper(parent, target_dir, name)
        self._enforcer.rename_batch(_CREATING, node.id)
        node.batch = self._limit_batch(batch, node, 0)
        node.has_no_xattrs = True
        return reply + OPENED

    def _make_file(
        self, target_dir: Node, directory: int, name: bytes, mode: int, permit: Permit
    ) -> tuple[Node, bytes]:
        """Create the file in the layer of the permit. Return its node, with one reference, and its entry."""
        if permit.layer is Layer.STAGED:
            staged = self._stage_file(target_dir, directory, name, mode, permit)
            return staged, self._staged_entry(staged)
        store = target_dir.store
        fd = self._replace_kept(target_dir, directory, name, mode, permit) if self.grants.hidden else -1
        fd = store.create(directory, name, mode, permit) if fd < 0 else fd
        st = os.fstat(fd)
        reply = self._entry(target_dir, name, st, created=True)
        node = self._inodes.find(st.st_ino + store.ino_offset)
        assert node is not None
        store.keep_created(node, fd, mode)
        self._mark_own_name(target_dir, name, st.st_ino)
        return node, reply

    def _created_entry(self, parent: Node, directory: int, name: bytes) -> bytes:
        st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        self._mark_own_name(parent, name, st.st_ino)
        return self._entry(parent, name, st, created=True)

    def _mkdir(self, header: Header, body: memoryview) -> Reply:
        mode, umask = p.MKDIR_IN.unpack_from(body)
        (name,) = p.strings(body[p.MKDIR_IN.size :], 1)
        parent, directory = self._parent_to_change(header, Operation.MKDIR, name)
        request = Request(Operation.MKDIR, self._inodes.join(parent, name), Kind.DIRECTORY)
        groups = self._groups(header, body)
        with self._admission(header, request) as permit:
            target_dir, directory = self._target_dir(header, request, parent, directory, permit)
            try:
                self._act_as(header, groups, umask)
                target_dir.store.mkdir(directory, name, mode & 0o7777, permit)
            finally:
                self._source.act_as_self()
            self._add_upper(parent, target_dir, name)
        return self._created_entry(target_dir, directory, name)

    def _mknod(self, header: Header, body: memoryview) -> Reply:
        mode, device, umask, _ = p.MKNOD_IN.unpack_from(body)
        (name,) = p.strings(body[p.MKNOD_IN.size :], 1)
        kind = kind_of(mode)
        operation = Operation.CREATE_FILE if kind is Kind.FILE else Operation.MKNOD
        parent, directory = self._parent_to_change(header, operation, name)
        request = Request(operation, self._inodes.join(parent, name), kind)
        context = Context(privileged=self._source.privileged)
        if kind is Kind.FILE:
            context = Context(size=0, mode=self._effective_mode(directory, mode & 0o7777, umask))
        permit = self._permit_new_name(header, request, context)
        groups = self._groups(header, body)
        with self._enforcer.authorize(request, permit, caller=self._caller(header), layer=None) as permit:
            target_dir, directory = self._target_dir(header, request, parent, directory, permit)
            try:
                self._act_as(header, groups, umask)
                if permit.layer is Layer.STAGED:
                    return self._staged_entry(self._stage_file(parent, directory, name, mode & 0o7777, permit))
                target_dir.store.mknod(directory, name, mode, p.unpack_rdev(device), permit)
            finally:
                self._source.act_as_self()
            self._add_upper(parent, target_dir, name)
        return self._created_entry(target_dir, directory, name)

    def _symlink(self, header: Header, body: memoryview) -> Reply:
        name, target = p.strings(body, 2)
        parent, directory = self._parent_to_change(header, Operation.SYMLINK, name)
        request = Request(Operation.SYMLINK, self._inodes.join(parent, name), Kind.SYMLINK)
        text = os.fsdecode(target)
        context = Context(target=text)
        groups = self._groups(header, body)
        if self._take_in_symlink(header, parent, name, target, groups):
            return self._created_entry(parent, directory, name)
        permit = self._permit_new_name(header, request, context)
        with self._enforcer.authorize(
            request, permit, caller=self._caller(header), details={"target": text}, layer=None
        ) as permit:
            target_dir, directory = self._target_dir(header, request, parent, directory, permit)
            if permit.layer is Layer.STAGED:
                return self._staged_entry(self._stage_symlink(header, parent, directory, name, target, permit))
            try:
                self._act_as(header, groups, 0)
                target_dir.store.symlink(directory, name, target, permit)
            finally:
                self._source.act_as_self()
            self._add_upper(parent, target_dir, name)
        return self._created_entry(target_dir, directory, name)

    def _link(self, header: Header, body: memoryview) -> Reply:
        (old_id,) = p.LINK_IN.unpack_from(body)
        (name,) = p.strings(body[p.LINK_IN.size :], 1)
        parent, directory = self._parent_to_change(header, Operation.LINK, name)
        node = self._node_to_change(header, Operation.LINK, old_id)
        try:
            if node.layer is Layer.STAGED:
                return self._link_staged(header, node, parent, directory, name)
            return self._link_node(header, node, parent, directory, name)
        except OSError as error:
            self._show_cross_layer_denial(header, Operation.LINK, self._inodes.join(parent, name), error)
            raise

    def _link_node(self, header: Header, node: Node, parent: Node, directory: int, name: bytes) -> Reply:
        st = node.store.stat(node, changing=True)
        self._check_external(node, st)
        if node.parent is None:
            raise os_error(errno.ENOENT)
        place = node.store.directory(node.parent), node.name, st
        change = self._arriving_change(Operation.LINK, self._inodes.join(parent, name), *place)
        old = change._replace(request=change.request._replace(path=self._inodes.path(node)))
        new, caller = change.request, self._caller(header)
        permits = [self._enforcer.permit(each.request, each.context, caller, head=each.head) for each in (change, old)]
        if permits[0].layer is not permits[1].layer:
            raise WrongLayerError(permits[0])
        if permits[0].layer is not node.layer:
            node = self._copy_up(header, node, permits[1])
            st = node.store.stat(node)
        assert node.parent is not None
        details = {"from": old.request.path}
        admission = self._enforcer.authorize(new, *permits, caller=caller, details=details, layer=node.layer)
        with admission as permit:
            target_dir, directory = self._target_dir(header, new, parent, directory, permit)
            node.store.link(node, directory, name, permit)
            self._add_upper(parent, target_dir, name)
        node.fingerprint = fingerprint_after_rename(st)
        self._inodes.note_link(node.ino, node.parent, node.name)
        self._inodes.note_link(node.ino, target_dir, name)
        return self._created_entry(target_dir, directory, name)
