"""Handlers of CREATE, MKDIR, MKNOD, SYMLINK and LINK."""

from __future__ import annotations

import errno
import os
import stat
from functools import partial
from typing import Final

from bonobofs.errors import os_error
from bonobofs.fuse import abi as p
from bonobofs.fuse.external_changes import fingerprint_after_rename
from bonobofs.fuse.fd_cache import stale
from bonobofs.fuse.git_grants import OPENED, GrantOps
from bonobofs.fuse.inode_table import Node
from bonobofs.fuse.mount_context import INLINE, Handler, Header, MountContext, Reply
from bonobofs.fuse.overlay_ops import OverlayOps
from bonobofs.fuse.slices import finished
from bonobofs.fuse.temp_files import TempFileOps
from bonobofs.policy.decision import Layer, Permit, WrongLayerError
from bonobofs.policy.request import Context, Kind, Operation, Request, kind_of

BY_GIT: Final = "git wrote the content of a kept file; take it back with git"
"""Why the old content of a file that `[[keep]]` protects has no pre-image: its commit has it."""
_CREATING: Final = 0
"""Key of a write batch whose file has no node yet."""


class CreateOps:
    """Handlers that create names."""

    _has_truncated = False
    """Whether the last created file existed, and was truncated for git."""

    def __init__(self, mount: MountContext, staged: TempFileOps, layers: OverlayOps, grants: GrantOps) -> None:
        self._mount: Final = mount
        self._staged: Final = staged
        self._layers: Final = layers
        self._grants: Final = grants
        o = p.Opcode
        self.handlers: Final[dict[int, Handler]] = {
            o.CREATE: self._create,
            o.MKDIR: self._mkdir,
            o.MKNOD: self._mknod,
            o.SYMLINK: self._symlink,
            o.LINK: self._link,
        }

    def _create(self, header: Header, body: memoryview) -> Reply:
        flags, mode, umask, _ = p.CREATE_IN.unpack_from(body)
        (name,) = p.strings(body[p.CREATE_IN.size :], 1)
        parent, directory = self._mount.parent_to_change(header, Operation.CREATE_FILE, name)
        mode &= 0o7777
        request = Request(Operation.CREATE_FILE, self._mount.join(parent, name))
        context = Context(size=0, mode=self._mount.effective_mode(directory, mode, umask))
        groups = self._mount.groups(header, body)
        grant = self._grants.grant_at(parent, name)
        if grant is not None and stat.S_ISREG(grant.mode):
            steps = self._grants.take_in_file(header, grant, parent, name, umask, groups)
            return finished(steps) if grant.size <= INLINE else steps
        permit = self._staged.permit_new_name(header, request, context)
        batch = self._mount.enforcer.open_batch(
            _CREATING, request, permit, self._mount.source.now, caller=self._mount.caller(header), layer=None
        )
        try:
            target_dir, directory = self._layers.target_dir(header, request, parent, directory, batch.permit)
            make = partial(self._make_file, target_dir, directory, name, mode, permit)
            node, reply, state = self._mount.run_as(header, groups, umask, make)
        except BaseException as error:
            self._mount.enforcer.close_batch(_CREATING, getattr(error, "errno", None) or errno.EIO)
            if isinstance(error, FileExistsError) and not flags & os.O_EXCL:
                # The kernel did not know the file. After ESTALE it looks the name up again, and then opens and
                # truncates a file that exists.
                raise stale() from error
            raise
        self._layers.add_upper(parent, target_dir, name)
        self._mount.enforcer.rename_batch(_CREATING, node.id)
        node.batch = self._layers.limit_batch(batch, node, 0)
        if node.layer is Layer.SOURCE:
            batch.state = state
            batch.dir_times = self._mount.preimages.dir_times(target_dir, directory)
        batch.not_kept = BY_GIT if self._has_truncated else ""
        node.kept_turn = self._mount.enforcer.trail.turn
        node.has_no_xattrs = True
        return reply + OPENED

    def _make_file(
        self, target_dir: Node, directory: int, name: bytes, mode: int, permit: Permit
    ) -> tuple[Node, bytes, os.stat_result | None]:
        """Create the file in the layer of the permit. Return its node, with one reference, its entry and its stat."""
        if permit.layer is Layer.STAGED:
            staged = self._staged.stage_file(target_dir, directory, name, mode, permit)
            return staged, self._staged.staged_entry(staged), None
        store = target_dir.store
        fd = self._grants.replace_kept(target_dir, directory, name, mode, permit) if self._mount.grants.hidden else -1
        self._has_truncated = fd >= 0
        fd = store.create(directory, name, mode, permit) if fd < 0 else fd
        st = os.fstat(fd)
        reply = self._mount.entry(target_dir, name, st, created=True, is_open=True)
        node = self._mount.inodes.find(st.st_ino + store.ino_offset)
        assert node is not None
        store.keep_created(node, fd, mode)
        self._mount.mark_own_name(target_dir, name, st.st_ino)
        return node, reply, st

    def _created_entry(self, parent: Node, directory: int, name: bytes) -> bytes:
        st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        self._mount.mark_own_name(parent, name, st.st_ino)
        return self._mount.entry(parent, name, st, created=True)

    def _mkdir(self, header: Header, body: memoryview) -> Reply:
        mode, umask = p.MKDIR_IN.unpack_from(body)
        (name,) = p.strings(body[p.MKDIR_IN.size :], 1)
        parent, directory = self._mount.parent_to_change(header, Operation.MKDIR, name)
        request = Request(Operation.MKDIR, self._mount.join(parent, name), Kind.DIRECTORY)
        groups = self._mount.groups(header, body)
        admission = self._grants.admission(header, request)
        with admission as permit:
            target_dir, directory = self._layers.target_dir(header, request, parent, directory, permit)
            make = partial(target_dir.store.mkdir, directory, name, mode & 0o7777, permit)
            self._mount.run_as(header, groups, umask, make)
            self._mount.preimages.record_dir_times(admission, target_dir, directory)
            self._layers.add_upper(parent, target_dir, name)
        return self._created_entry(target_dir, directory, name)

    def _mknod(self, header: Header, body: memoryview) -> Reply:
        mode, device, umask, _ = p.MKNOD_IN.unpack_from(body)
        (name,) = p.strings(body[p.MKNOD_IN.size :], 1)
        kind = kind_of(mode)
        operation = Operation.CREATE_FILE if kind is Kind.FILE else Operation.MKNOD
        parent, directory = self._mount.parent_to_change(header, operation, name)
        request = Request(operation, self._mount.join(parent, name), kind)
        context = Context(privileged=self._mount.source.privileged)
        if kind is Kind.FILE:
            context = Context(size=0, mode=self._mount.effective_mode(directory, mode & 0o7777, umask))
        permit = self._staged.permit_new_name(header, request, context)
        groups = self._mount.groups(header, body)
        admission = self._mount.authorize(header, request, permit, layer=None)
        with admission as permit:
            target_dir, directory = self._layers.target_dir(header, request, parent, directory, permit)
            if permit.layer is Layer.STAGED:
                stage = partial(self._staged.stage_file, parent, directory, name, mode & 0o7777, permit)
                return self._staged.staged_entry(self._mount.run_as(header, groups, umask, stage))
            make = partial(target_dir.store.mknod, directory, name, mode, p.unpack_rdev(device), permit)
            self._mount.run_as(header, groups, umask, make)
            self._layers.add_upper(parent, target_dir, name)
            if target_dir.layer is Layer.SOURCE:
                self._mount.preimages.after_name(admission, target_dir, directory, name)
        return self._created_entry(target_dir, directory, name)

    def _symlink(self, header: Header, body: memoryview) -> Reply:
        name, target = p.strings(body, 2)
        parent, directory = self._mount.parent_to_change(header, Operation.SYMLINK, name)
        request = Request(Operation.SYMLINK, self._mount.join(parent, name), Kind.SYMLINK)
        text = os.fsdecode(target)
        context = Context(target=text)
        groups = self._mount.groups(header, body)
        if self._grants.take_in_symlink(header, parent, name, target, groups):
            return self._created_entry(parent, directory, name)
        permit = self._staged.permit_new_name(header, request, context)
        admission = self._mount.authorize(header, request, permit, details={"target": text}, layer=None)
        with admission as permit:
            target_dir, directory = self._layers.target_dir(header, request, parent, directory, permit)
            if permit.layer is Layer.STAGED:
                return self._staged.staged_entry(
                    self._staged.stage_symlink(header, parent, directory, name, target, permit)
                )
            make = partial(target_dir.store.symlink, directory, name, target, permit)
            self._mount.run_as(header, groups, 0, make)
            if target_dir.layer is Layer.SOURCE:
                self._mount.preimages.after_name(admission, target_dir, directory, name)
            self._layers.add_upper(parent, target_dir, name)
        return self._created_entry(target_dir, directory, name)

    def _link(self, header: Header, body: memoryview) -> Reply:
        (old_id,) = p.LINK_IN.unpack_from(body)
        (name,) = p.strings(body[p.LINK_IN.size :], 1)
        parent, directory = self._mount.parent_to_change(header, Operation.LINK, name)
        node = self._mount.node_to_change(header, Operation.LINK, old_id)
        try:
            if node.layer is Layer.STAGED:
                return self._staged.link_staged(header, node, parent, directory, name)
            return self._link_node(header, node, parent, directory, name)
        except OSError as error:
            self._layers.show_cross_layer_denial(header, Operation.LINK, self._mount.join(parent, name), error)
            raise

    def _link_node(self, header: Header, node: Node, parent: Node, directory: int, name: bytes) -> Reply:
        st = node.store.stat(node, changing=True)
        self._mount.check_external(node, st)
        if node.parent is None:
            raise os_error(errno.ENOENT)
        existing = node.store.directory(node.parent), node.name, st
        change = self._mount.arriving_change(Operation.LINK, self._mount.join(parent, name), *existing)
        old = change._replace(request=change.request._replace(path=self._mount.path(node)))
        new = change.request
        permits = [self._mount.permit(header, each) for each in (change, old)]
        if permits[0].layer is not permits[1].layer:
            raise WrongLayerError(permits[0])
        if permits[0].layer is not node.layer:
            node = self._layers.copy_up(header, node, permits[1])
            st = node.store.stat(node)
        assert node.parent is not None
        details = {"from": old.request.path, **(self._mount.preimages.before_change(node, st) or {})}
        admission = self._mount.authorize(header, new, *permits, details=details, layer=node.layer)
        with admission as permit:
            target_dir, directory = self._layers.target_dir(header, new, parent, directory, permit)
            node.store.link(node, directory, name, permit)
            self._mount.preimages.record_dir_times(admission, target_dir, directory)
            self._layers.add_upper(parent, target_dir, name)
        node.fingerprint = fingerprint_after_rename(st)
        self._mount.inodes.note_link(node.ino, node.parent, node.name)
        self._mount.inodes.note_link(node.ino, target_dir, name)
        return self._created_entry(target_dir, directory, name)
