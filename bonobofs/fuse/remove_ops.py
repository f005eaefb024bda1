"""Handlers of UNLINK and RMDIR."""

from __future__ import annotations

import errno
import os

from bonobofs.errors import os_error
from bonobofs.fuse import abi as p
from bonobofs.fuse.git_grants import GrantOps
from bonobofs.fuse.mount_context import LEAVES, NOTHING, Handler, Header, Reply
from bonobofs.policy.decision import Code, Denied, Permit
from bonobofs.policy.request import Kind, Operation, Request, kind_of


class RemoveOps(GrantOps):
    """Handlers that remove names."""

    def _remove_handlers(self) -> dict[int, Handler]:
        o = p.Opcode
        return {
            o.UNLINK: self._unlink,
            o.RMDIR: self._rmdir,
        }

    def _unlink(self, header: Header, body: memoryview) -> Reply:
        (name,) = p.strings(body, 1)
        parent, directory = self._parent_to_change(header, Operation.DELETE_FILE, name)
        if staged := self._staged_at(parent, name):
            self._unlink_staged(header, parent, name, staged)
            return NOTHING
        layer_dir, directory = self._resolve_layer(parent, directory, name)
        st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        request = Request(Operation.DELETE_FILE, self._inodes.join(parent, name), kind_of(st.st_mode))
        if self._is_hidden(parent, name):
            raise os_error(errno.ENOENT)
        if self.grants.files and layer_dir is parent and self.grants.hides(request.path, st):
            return NOTHING
        with self._admission(header, request, LEAVES, st) as permit:
            remove = self._removal(layer_dir, permit, layer_dir.store.unlink)
            node = self._pin_for_removal(layer_dir, directory, name, st)
            self._unpin_on_failure(node, lambda: remove(directory, name, permit))
        self._after_unlink(node, layer_dir, name, st)
        self._hide_name(parent, name, permit)
        return NOTHING

    def _rmdir(self, header: Header, body: memoryview) -> Reply:
        (name,) = p.strings(body, 1)
        parent, directory = self._parent_to_change(header, Operation.RMDIR, name)
        layer_dir, directory = self._resolve_layer(parent, directory, name)
        st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        request = Request(Operation.RMDIR, self._inodes.join(parent, name), Kind.DIRECTORY)
        verdict = self._enforcer.decide(request, LEAVES)
        by_default = isinstance(verdict, Denied) and verdict.code is Code.DEFAULT
        if by_default and not layer_dir.layer and self._source.has_names(directory, name):
            raise os_error(errno.ENOTEMPTY)  # git tries to remove it after each file; no denial is recorded
        with self._admission(header, request, verdict if isinstance(verdict, Permit) else LEAVES) as permit:
            self._check_shown_empty(layer_dir, directory, name, request.path, permit)
            remove = self._removal(layer_dir, permit, layer_dir.store.rmdir)
            node = self._pin_for_removal(layer_dir, directory, name, st)
            self._unpin_on_failure(node, lambda: remove(directory, name, permit))
            self._overlay.remove_upper_dir(request.path, permit)
        self._after_unlink(node, layer_dir, name, st)
        self._hide_name(parent, name, permit)
        return NOTHING
