"""Handlers of UNLINK and RMDIR."""

from __future__ import annotations

import errno
import os
from functools import partial
from typing import Final

from bonobofs.errors import os_error
from bonobofs.fuse import abi as p
from bonobofs.fuse.git_grants import GrantOps
from bonobofs.fuse.mount_context import LEAVES, NOTHING, Handler, Header, MountContext, Reply
from bonobofs.fuse.overlay_ops import OverlayOps
from bonobofs.fuse.temp_files import TempFileOps
from bonobofs.policy.decision import Code, Denied, Layer, Permit
from bonobofs.policy.request import Kind, Operation, Request, kind_of


class RemoveOps:
    """Handlers that remove names."""

    def __init__(self, mount: MountContext, staged: TempFileOps, layers: OverlayOps, grants: GrantOps) -> None:
        self._mount: Final = mount
        self._staged: Final = staged
        self._layers: Final = layers
        self._grants: Final = grants
        o = p.Opcode
        self.handlers: Final[dict[int, Handler]] = {o.UNLINK: self._unlink, o.RMDIR: self._rmdir}

    def _unlink(self, header: Header, body: memoryview) -> Reply:
        (name,) = p.strings(body, 1)
        parent, directory = self._mount.parent_to_change(header, Operation.DELETE_FILE, name)
        if staged := self._staged.staged_at(parent, name):
            self._staged.unlink_staged(header, parent, name, staged)
            return NOTHING
        layer_dir, directory = self._layers.resolve_layer(parent, directory, name)
        st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        request = Request(Operation.DELETE_FILE, self._mount.join(parent, name), kind_of(st.st_mode))
        if self._mount.is_hidden(parent, name):
            raise os_error(errno.ENOENT)
        if self._mount.grants.files and layer_dir is parent and self._mount.grants.hide_replaced(request.path, st):
            return NOTHING
        in_source = layer_dir.layer is Layer.SOURCE
        details = self._mount.preimages.before_removal(directory, name, st) if in_source else None
        admission = self._grants.admission(header, request, LEAVES, st, details)
        with admission as permit:
            node = self._mount.pin_for_removal(layer_dir, directory, name, st)
            unlink = partial(self._mount.preimages.unlink, layer_dir.store, admission, st, node)
            remove = self._layers.removal(layer_dir, permit, unlink)
            self._mount.unpin_on_failure(node, lambda: remove(directory, name, permit))
            self._mount.preimages.record_dir_times(admission, layer_dir, directory)
        self._mount.after_unlink(node, layer_dir, name, st)
        self._layers.hide_name(parent, name, permit)
        return NOTHING

    def _rmdir(self, header: Header, body: memoryview) -> Reply:
        (name,) = p.strings(body, 1)
        parent, directory = self._mount.parent_to_change(header, Operation.RMDIR, name)
        layer_dir, directory = self._layers.resolve_layer(parent, directory, name)
        st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        request = Request(Operation.RMDIR, self._mount.join(parent, name), Kind.DIRECTORY)
        decision = self._mount.enforcer.decide(request, LEAVES)
        by_default = isinstance(decision, Denied) and decision.code is Code.DEFAULT
        if by_default and layer_dir.layer is Layer.SOURCE and self._mount.source.has_names(directory, name):
            raise os_error(errno.ENOTEMPTY)  # git tries to remove it after each file; no denial is recorded
        in_source = layer_dir.layer is Layer.SOURCE
        details = self._mount.preimages.before_removal(directory, name, st) if in_source else None
        context = decision if isinstance(decision, Permit) else LEAVES
        admission = self._grants.admission(header, request, context, details=details)
        with admission as permit:
            self._layers.check_shown_empty(layer_dir, directory, name, request.path, permit)
            remove = self._layers.removal(layer_dir, permit, layer_dir.store.rmdir)
            node = self._mount.pin_for_removal(layer_dir, directory, name, st)
            self._mount.unpin_on_failure(node, lambda: remove(directory, name, permit))
            self._mount.preimages.record_dir_times(admission, layer_dir, directory)
            self._mount.overlay.remove_upper_dir(request.path, permit)
        self._mount.after_unlink(node, layer_dir, name, st)
        self._layers.hide_name(parent, name, permit)
        return NOTHING
