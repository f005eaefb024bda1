"""Requests that change names: what appears, what goes, what moves. Both ends are judged, and all below a directory."""

from __future__ import annotations

import errno
import os

from bonobofs.audit.entry import REPLACES
from bonobofs.enforcement.enforcer import RelatedChange, WrongLayerError
from bonobofs.fuse import abi as p
from bonobofs.fuse.external_changes import fingerprint_after_rename
from bonobofs.fuse.granted_files import GrantOps
from bonobofs.fuse.inode_table import Node, kind_of
from bonobofs.fuse.mount_context import LEAVES, NOTHING, CrossLayerError, Handler, Header, Reply
from bonobofs.fuse.slices import Steps, finished
from bonobofs.fuse.temp_files import End
from bonobofs.policy.decision import Code, Denied, Layer
from bonobofs.policy.messages import ELSEWHERE
from bonobofs.policy.request import Context, Kind, Operation, Request, WorkspacePath
from bonobofs.system import syscalls


class NameOps(GrantOps):
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
            self._check_staging_limit(header, request, context)
        groups = self._groups(header, body)
        with self._enforcer.authorize(request, context, caller=self._caller(header), layer=None) as permit:
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
        self._check_staging_limit(header, request, context)
        with self._enforcer.authorize(
            request, context, caller=self._caller(header), details={"target": text}, layer=None
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
            return self._link_or_copy_up(header, node, parent, directory, name)
        except OSError as error:
            self._show_cross_layer_denial(header, Operation.LINK, self._inodes.join(parent, name), error)
            raise

    def _link_or_copy_up(self, header: Header, node: Node, parent: Node, directory: int, name: bytes) -> Reply:
        try:
            return self._link_node(header, node, parent, directory, name)
        except WrongLayerError:
            if self._copy_up(header, node) is None:
                raise
            return self._link_node(header, node, parent, directory, name)

    def _link_node(self, header: Header, node: Node, parent: Node, directory: int, name: bytes) -> Reply:
        st = node.store.stat(node, changing=True)
        self._check_external(node, st)
        if node.parent is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        kind = kind_of(st.st_mode)
        old = Request(Operation.LINK, self._inodes.path(node), kind)
        new = Request(Operation.LINK, self._inodes.join(parent, name), kind)
        context = self._new_name_context(node.store.directory(node.parent), node.name, st, new)
        admission = self._enforcer.authorize(
            new,
            context,
            RelatedChange(old, context, node.layer),
            caller=self._caller(header),
            details={"from": old.path},
            layer=node.layer,
        )
        with admission as permit:
            target_dir, directory = self._target_dir(header, new, parent, directory, permit)
            node.store.link(node, directory, name, permit)
            self._add_upper(parent, target_dir, name)
        node.fingerprint = fingerprint_after_rename(st)
        self._inodes.note_link(node.ino, node.parent, node.name)
        self._inodes.note_link(node.ino, target_dir, name)
        return self._created_entry(target_dir, directory, name)

    def _unlink(self, header: Header, body: memoryview) -> Reply:
        (name,) = p.strings(body, 1)
        parent, directory = self._parent_to_change(header, Operation.DELETE_FILE, name)
        if held := self._staged_at(parent, name):
            self._unlink_staged(header, parent, name, held)
            return NOTHING
        where, directory = self._resolve_layer(parent, directory, name)
        st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        request = Request(Operation.DELETE_FILE, self._inodes.join(parent, name), kind_of(st.st_mode))
        if self._is_hidden(parent, name):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if self.grants.files and where is parent and self.grants.hides(request.path, st):
            return NOTHING
        with self._admission(header, request, LEAVES, st) as permit:
            remove = self._removal(where, permit, where.store.unlink)
            node = self._pin_for_removal(where, directory, name, st)
            self._unpin_on_failure(node, lambda: remove(directory, name, permit))
        self._after_unlink(node, where, name, st)
        self._hide_name(parent, name, permit)
        return NOTHING

    def _rmdir(self, header: Header, body: memoryview) -> Reply:
        (name,) = p.strings(body, 1)
        parent, directory = self._parent_to_change(header, Operation.RMDIR, name)
        where, directory = self._resolve_layer(parent, directory, name)
        st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        request = Request(Operation.RMDIR, self._inodes.join(parent, name), Kind.DIRECTORY)
        if not where.layer and self._fails_as_not_empty(request, directory, name):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        with self._admission(header, request, LEAVES) as permit:
            self._check_shown_empty(where, directory, name, request.path, permit)
            remove = self._removal(where, permit, where.store.rmdir)
            node = self._pin_for_removal(where, directory, name, st)
            self._unpin_on_failure(node, lambda: remove(directory, name, permit))
            self._overlay.remove_upper_dir(request.path, permit)
        self._after_unlink(node, where, name, st)
        self._hide_name(parent, name, permit)
        return NOTHING

    def _fails_as_not_empty(self, request: Request, directory: int, name: bytes) -> bool:
        """Whether a directory that no rule names has something in it. Git tries to remove it after each file in it."""
        verdict = self._enforcer.decide(request, LEAVES)
        return isinstance(verdict, Denied) and verdict.code is Code.DEFAULT and self._source.has_names(directory, name)

    def _rename_plain(self, header: Header, body: memoryview) -> Reply:
        (target_id,) = p.RENAME_IN.unpack_from(body)
        return self._rename(header, target_id, 0, body[p.RENAME_IN.size :])

    def _rename_flags(self, header: Header, body: memoryview) -> Reply:
        target_id, flags, _ = p.RENAME2_IN.unpack_from(body)
        return self._rename(header, target_id, flags, body[p.RENAME2_IN.size :])

    def _rename(self, header: Header, target_id: int, flags: int, body: memoryview) -> Reply:
        old, new = p.strings(body, 2)
        if flags & ~(syscalls.RENAME_NOREPLACE | syscalls.RENAME_EXCHANGE):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        source = self._end(header, old)
        target = self._end(header if target_id == header.node_id else header._replace(node_id=target_id), new)
        steps = self._rename_ends(header, source, target, flags)
        ends = (source, target) if flags & syscalls.RENAME_EXCHANGE else (source,)
        if any(end.st is not None and kind_of(end.st.st_mode) is Kind.DIRECTORY for end in ends):
            return steps
        return finished(steps)

    def _rename_ends(self, header: Header, source: End, target: End, flags: int) -> Steps:
        try:
            if self._temp_files.directories and self._rename_staged(header, source, target, flags):
                return NOTHING
            if source.st is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            return (yield from self._rename_in_a_layer(header, source, target, flags))
        except OSError as error:
            self._show_cross_layer_denial(header, Operation.RENAME, source.path, error)
            raise

    def _show_cross_layer_denial(
        self, header: Header, operation: Operation, path: WorkspacePath, error: OSError
    ) -> None:
        """Show in `denials.jsonl` why a rename or link fails with EXDEV."""
        if error.errno == errno.EXDEV:
            words = error.words if isinstance(error, CrossLayerError) else ELSEWHERE
            self._enforcer.show_denial(Denied(Code.ELSEWHERE, *words, path, operation), self._caller(header))

    def _rename_in_a_layer(self, header: Header, source: End, target: End, flags: int) -> Steps:
        if not (source.parent.layer or target.parent.layer):
            request_number = self._source.request_number
            try:
                return (yield from self._rename_in_source(header, source, target, flags))
            except WrongLayerError:
                if request_number != self._source.request_number:
                    source, target = self._end_again(header, source), self._end_again(header, target)
        return (yield from self._rename_in_overlay(header, source, target, flags))

    def _rename_in_source(self, header: Header, source: End, target: End, flags: int) -> Steps:
        exchange = bool(flags & syscalls.RENAME_EXCHANGE)
        if exchange:
            self._check_no_upper(source.path, target.path)
        source, target = yield from self._judge_move(header, source, target, exchange=exchange)
        st, over = source.st, target.st
        assert st is not None
        same = over is not None and (over.st_ino, over.st_dev) == (st.st_ino, st.st_dev)
        request = Request(Operation.RENAME, source.path, kind_of(st.st_mode))
        parts = self._end_changes(source, target, exchange=exchange)
        if exchange:
            self._check_no_upper(source.path, target.path)
        self._check_not_in_use(source.path, st)
        if exchange and over is not None:
            self._check_not_in_use(target.path, over)
        details: dict[str, object] = {"to": target.path}
        if exchange:
            details["exchange"] = True
        elif over is not None and not same:
            details[REPLACES] = True
        with self._enforcer.authorize(request, LEAVES, *parts, caller=self._caller(header), details=details) as permit:
            moved, other = self._close_batch_of(source.parent, st), None
            if over is not None and exchange:
                other = self._close_batch_of(target.parent, over)
            elif over is not None and not same:
                self._check_shown_empty(target.parent, target.directory, target.name, target.path, permit)
                other = self._pin_for_removal(target.parent, target.directory, target.name, over)
            ends = source.directory, source.name, target.directory, target.name
            self._unpin_on_failure(other, lambda: self._source.rename(*ends, flags, permit))
        if not same:
            self._note_renamed(source, st, moved, target, target, other, exchange=exchange)
            self._move_staged(source, target, exchange=exchange)
            self._move_upper(source, target, permit, exchange=exchange)
        return NOTHING

    def _check_not_in_use(self, path: str, st: os.stat_result) -> None:
        """EBUSY for a directory into which a change is being made that was judged by where it lies."""
        if kind_of(st.st_mode) is Kind.DIRECTORY and self.is_in_use(path):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
