"""Handlers of SETATTR and of extended attributes, which include `user.bonobofs.why`."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from bonobofs.enforcement.authorizer import Admission, RelatedChange
from bonobofs.enforcement.write_batches import WriteBatch
from bonobofs.errors import ProtocolError, os_error
from bonobofs.fuse import abi as p
from bonobofs.fuse import virtual_dir
from bonobofs.fuse.external_changes import fingerprint_of
from bonobofs.fuse.fd_cache import W, duplicates
from bonobofs.fuse.inode_table import Node
from bonobofs.fuse.lookup_ops import LookupOps
from bonobofs.fuse.mount_context import NOTHING, SET_IDS, Handler, Header, MountContext, Reply
from bonobofs.fuse.overlay import NAME
from bonobofs.fuse.overlay_ops import OverlayOps
from bonobofs.fuse.slices import Steps, finished
from bonobofs.fuse.temp_files import TempFileOps
from bonobofs.ipc.codec import decode_planned_change, encode_decision
from bonobofs.policy.decision import Decision, Layer, Permit, as_document
from bonobofs.policy.engine import decide_move
from bonobofs.policy.request import NO_FACTS, Context, Kind, Operation, PlannedChange, Request, WorkspacePath, kind_of
from bonobofs.system import syscalls

_ACL: Final = b"system.posix_acl_access"
_OURS: Final = b"user.bonobofs."
_SIGN: Final = 1 << 63
# Integers instead of the flags: an archive brings three SETATTR for each file, and a test of an IntFlag takes ten times
# longer.
_SIZE: Final = int(p.Set.SIZE)
_MODE: Final = int(p.Set.MODE)
_UID: Final = int(p.Set.UID)
_GID: Final = int(p.Set.GID)
_OWNER: Final = _UID | _GID
_ATIME: Final = int(p.Set.ATIME)
_MTIME: Final = int(p.Set.MTIME)
_TIMES: Final = _ATIME | _MTIME
_ATIME_NOW: Final = int(p.Set.ATIME_NOW)
_MTIME_NOW: Final = int(p.Set.MTIME_NOW)
_RECORDED: Final = _SIZE | _MODE | _OWNER
"""Of these attributes the record has the new values."""
_KILL_SUIDGID: Final = int(p.Set.KILL_SUIDGID)
_OPERATIONS: Final = {
    _MODE: Operation.SET_MODE,
    _UID: Operation.SET_OWNER,
    _GID: Operation.SET_OWNER,
    _OWNER: Operation.SET_OWNER,
}
_CAPABILITY: Final = b"security.capability"
WHY: Final = b"user.bonobofs.why"
"""The extended attribute that explains whether the path may be written."""
_WHY_NAME: Final = WHY + b"."
"""Prefix of attributes of a directory. A name follows, which need not exist; the value is its decision."""


_NO_NAMES: Final = ("", ".", "..")


class AttrOps:
    """Handlers that read and change attributes."""

    def __init__(self, mount: MountContext, staged: TempFileOps, layers: OverlayOps, lookups: LookupOps) -> None:
        self._mount: Final = mount
        self._staged: Final = staged
        self._layers: Final = layers
        self._lookups: Final = lookups
        o = p.Opcode
        self.handlers: Final[dict[int, Handler]] = {
            o.SETATTR: self._setattr,
            o.GETXATTR: self._getxattr,
            o.SETXATTR: self._setxattr,
            o.LISTXATTR: self._listxattr,
            o.REMOVEXATTR: self._removexattr,
        }

    def _setattr(self, header: Header, body: memoryview) -> Reply:
        fields = p.SETATTR_IN.unpack_from(body)
        valid: int = fields[0]
        known = None if valid & ~(_TIMES | _ATIME_NOW | _MTIME_NOW) else self._mount.nodes.get(header.node_id)
        if known is not None and known.store.prefix:
            return self._refresh_object(known)
        operation = _OPERATIONS.get(valid & (_OWNER | _MODE), Operation.SET_TIMES)
        node = self._mount.node_to_change(header, Operation.TRUNCATE if valid & _SIZE else operation)
        if not valid & _SIZE and (reply := self._set_in_batch(header, node, valid, fields)) is not None:
            return reply
        st = node.store.stat(node, changing=True)
        self._mount.check_external(node, st)
        # Bytes that the truncation frees; st_blocks counts units of 512.
        in_thread = bool(valid & _SIZE) and self._mount.needs_thread(
            max(min(st.st_size - fields[3], st.st_blocks * 512), self._mount.preimages.bytes_to_copy(node, st))
        )
        if node.batch is not None:
            self._mount.enforcer.close_batch(node.id)  # so that the outcomes are in the order of the changes
        path, kind = self._mount.path(node), kind_of(st.st_mode)
        changes = _attribute_changes(self._mount.layer_context(node), kind, st, valid, fields)
        if not changes:
            return self._mount.attr_times + self._mount.attr(node, st)
        permits = []
        for operation, context in changes:
            change = RelatedChange(Request(operation, path, kind), context)
            node, st, permit = self._layers.resolve(header, node, st, change)
            permits.append(permit)
        request = Request(changes[0][0], path, kind)
        if valid & _SIZE and node.layer is Layer.SCRATCH:
            self._layers.check_quota(header, request, node.ino, fields[3])
        details = {**_details(valid, fields), **(self._mount.preimages.before_change(node, st) or {})}
        admission = self._mount.authorize(header, request, *permits, details=details, layer=node.layer)
        admission.on_failure = partial(self._mount.preimages.after_failure, node, st)
        if valid & _SIZE:
            steps = self._truncate(header, node, st, valid, fields, admission, path)
            return steps if in_thread else finished(steps)
        with admission as permit:
            self._set_others(node, valid, fields, permit)
            st = self._mount.preimages.note_after(node, admission)
        return self._changed_attributes(node, st)

    def _refresh_object(self, node: Node) -> Reply:
        """Answer git, which updates the times of an existing object of the source instead of storing it again.

        Nothing is changed or recorded. For a pack, git gets a success; `git gc` keeps its unreachable objects for two
        weeks. For any other file it gets EROFS, and stores the object in the session.
        """
        if not node.name.endswith(b".pack"):
            raise os_error(errno.EROFS)
        return bytes(p.ATTR_OUT.size) + self._mount.attr(node, node.store.stat(node))

    def _set_in_batch(self, header: Header, node: Node, valid: int, fields: tuple[int, ...]) -> bytes | None:
        """Set attributes within the open write batch of the file, and count that in the batch.

        None: the batch does not cover the change, or the change has failed. The caller judges and records it alone.
        """
        batch, enforcer = self._mount.batch_of(header, node), self._mount.enforcer
        if (
            batch is None
            or batch.counter is not None
            or not node.access & W  # no descriptor is open; opening the file for writing may fail
            or enforcer.policy.asks.find(batch.request.path.split("/"))  # an [[ask]] may name the operation alone
        ):
            return None
        if valid & _MODE:
            node.store.confirm_name(node)
        st = os.fstat(node.store.file(node, W))
        if st.st_nlink != 1:
            return None
        self._mount.check_external(node, st)
        if batch.generation != enforcer.generation:
            return None  # another program has changed the file
        if valid & _RECORDED and not self._batch_covers(node, batch, st, valid, fields):
            return None
        try:
            self._set_others(node, valid, fields, batch.permit)
        except OSError:
            return None
        batch.attributes += 1
        if valid & _MODE:
            batch.mode = fields[11] & 0o7777
        batch.state = st = node.store.recent_stat(node)
        batch.last = self._mount.source.now
        return self._changed_attributes(node, st)

    def _batch_covers(
        self, node: Node, batch: WriteBatch, st: os.stat_result, valid: int, fields: tuple[int, ...]
    ) -> bool:
        """Whether a write batch can cover a change of owner and mode. An archive sets both for each file it creates.

        The batch's rule permits the change. The file has a name and no set-id bits. The change leaves the owner as it
        is. It leaves the mode as it is, or the batch created the file and the new mode has no set-id bits. No other
        mode was set in the batch.
        """
        mode = fields[11] & 0o7777
        if (
            valid & _TIMES
            or node.parent is None
            or st.st_mode & SET_IDS
            or (valid & _UID and fields[13] != st.st_uid)
            or (valid & _GID and fields[14] != st.st_gid)
            or (valid & _MODE and batch.mode not in (-1, mode))
            or (valid & _MODE and mode != stat.S_IMODE(st.st_mode) and (mode & SET_IDS or not batch.creates))
        ):
            return False
        path, here = self._mount.path(node), self._mount.layer_context(node)
        for operation, context in _attribute_changes(here, Kind.FILE, st, valid, fields):
            decision = self._mount.enforcer.decide(Request(operation, path, Kind.FILE), context)
            if not isinstance(decision, Permit) or decision.rule != batch.rule or decision.layer is not node.layer:
                return False
        return True

    def _mark_own_attributes(self, node: Node, st: os.stat_result) -> None:
        node.fingerprint = fingerprint_of(st)
        if node.is_dir and node.layer is Layer.SOURCE:
            self._mount.own_effects.note_attributes(st)

    def _changed_attributes(self, node: Node, st: os.stat_result) -> bytes:
        """Return the reply with the attributes that the node has after their change."""
        self._mark_own_attributes(node, st)
        return self._mount.attr_times + self._mount.attr(node, st)

    def _truncate(
        self,
        header: Header,
        node: Node,
        st: os.stat_result,
        valid: int,
        fields: tuple[int, ...],
        admission: Admission,
        path: WorkspacePath,
    ) -> Steps:
        with admission as permit:
            yield from self._mount.preimages.keep_content_in_thread(node, admission, st)
            with duplicates(node.store.file(node, W)) as (fd,):
                yield from self._mount.make_in_thread(node, lambda: node.store.truncate(fd, fields[3], permit))
                if valid & _KILL_SUIDGID and st.st_mode & SET_IDS:
                    self._mount.kill_set_ids(header, node, fd, st, permit)
            self._set_others(node, valid, fields, permit)
            st = self._mount.preimages.note_after(node, admission)
        reply = self._changed_attributes(node, st)
        self._layers.note_size(node, path)
        return reply

    def _set_others(self, node: Node, valid: int, fields: tuple[int, ...], permit: Permit) -> None:
        """Set owner, mode and times."""
        store = node.store
        if valid & _OWNER:
            uid = fields[13] if valid & _UID else -1
            store.set_owner(node, uid, fields[14] if valid & _GID else -1, permit)
        if valid & _MODE:
            store.keep_open_before_mode(node, fields[11])
            store.set_mode(node, fields[11] & 0o7777, permit)
        if valid & _TIMES and not valid & _SIZE:
            access = _time(valid, _ATIME, _ATIME_NOW, fields[5], fields[8])
            store.set_times(node, access, _time(valid, _MTIME, _MTIME_NOW, fields[6], fields[9]), permit)

    def _setxattr(self, header: Header, body: memoryview) -> Reply:
        size, flags, extra, _ = p.SETXATTR_IN.unpack_from(body)
        (name,) = p.strings(body[p.SETXATTR_IN.size :], 1)
        start = p.SETXATTR_IN.size + len(name) + 1
        value = bytes(body[start : start + size])
        if len(value) != size:
            raise ProtocolError("SETXATTR is shorter than it says")
        node = self._mount.node_to_change(header, Operation.SET_XATTR)
        path = self._mount.path(node)
        if name.startswith(_OURS):
            self._mount.refuse_virtual(header, Operation.SET_XATTR, path)
        st = node.store.stat(node, changing=True)
        kind = kind_of(st.st_mode)
        operation, mode = Operation.SET_XATTR, -1
        if name == _ACL and kind is Kind.FILE:
            operation, mode = Operation.SET_MODE, _mode_of_acl(value, stat.S_IMODE(st.st_mode))
        context = self._mount.layer_context(node)._replace(mode=mode)
        self._mount.check_external(node, st)
        node.has_no_xattrs = False

        def effect(node: Node, permit: Permit) -> None:
            node.store.set_xattr(node, name, value, flags, permit)
            if extra & p.SETXATTR_ACL_KILL_SGID:
                mode = stat.S_IMODE(node.store.stat(node).st_mode)
                node.store.set_mode(node, mode & ~stat.S_ISGID, permit)

        change = RelatedChange(Request(operation, path, kind), context)
        return self._change_xattr(header, node, change, st, name, value, effect)

    def _change_xattr(
        self,
        header: Header,
        node: Node,
        change: RelatedChange,
        st: os.stat_result,
        name: bytes,
        value: bytes | None,
        effect: Callable[[Node, Permit], None],
    ) -> bytes:
        """Make a change after which the attribute `name` has the value, or is gone if it is None."""
        request = change.request
        node, st, permit = self._layers.resolve(header, node, st, change)
        growth = node.store.xattr_growth(node, name, len(value) if value is not None else -len(name))
        self._check_xattr_space(header, node, request, growth)
        details = {"name": os.fsdecode(name), **self._mount.preimages.before_xattr(node, name, value)}
        admission = self._mount.authorize(header, request, permit, details=details, layer=node.layer)
        admission.on_failure = partial(self._mount.preimages.after_failure, node, st)
        with admission:
            effect(node, permit)
            self._mount.preimages.note_after(node, admission)
        if node.layer is Layer.SCRATCH:
            self._mount.overlay.sizes.set_size(node.ino, request.path, attributes=growth)
        self._mark_own_attributes(node, node.store.stat(node))
        return NOTHING

    def _check_xattr_space(self, header: Header, node: Node, request: Request, growth: int) -> None:
        """Raise ENOSPC or EFBIG if there is no space for `growth` more bytes of extended attributes."""
        if growth <= 0:
            return
        if node.layer is Layer.SCRATCH:
            self._layers.check_quota(header, request, more=growth)
        if header.uid or node.layer is not Layer.SOURCE:
            self._layers.check_free_space(header, node, request, max(growth, NAME))

    def _removexattr(self, header: Header, body: memoryview) -> Reply:
        (name,) = p.strings(body, 1)
        node = self._mount.node_to_change(header, Operation.REMOVE_XATTR)
        path = self._mount.path(node)
        if name.startswith(_OURS):
            self._mount.refuse_virtual(header, Operation.REMOVE_XATTR, path)
        st = node.store.stat(node, changing=True)
        self._mount.check_external(node, st)

        def effect(node: Node, permit: Permit) -> None:
            node.store.remove_xattr(node, name, permit)

        change = RelatedChange(
            Request(Operation.REMOVE_XATTR, path, kind_of(st.st_mode)), self._mount.layer_context(node)
        )
        return self._change_xattr(header, node, change, st, name, None, effect)

    def _getxattr(self, header: Header, body: memoryview) -> Reply:
        size, _ = p.GETXATTR_IN.unpack_from(body)
        (name,) = p.strings(body[p.GETXATTR_IN.size :], 1)
        if header.node_id >= virtual_dir.FIRST_ID:
            raise os_error(errno.ENODATA)
        node = self._mount.attribute_node(self._mount.node(header.node_id))
        if name.startswith(_WHY_NAME):
            return _sized_reply(self._why_name(header, name[len(_WHY_NAME) :]), size)
        if (node.has_no_xattrs and name == _CAPABILITY) or (node.store.prefix and name != WHY):
            raise OSError(errno.ENODATA, "")  # the kernel requests it before the first write to each file
        value = self._why(node, self._mount.path(node)) if name == WHY else node.store.get_xattr(node, name)
        return _sized_reply(value, size)

    def explain(self, document: dict[str, Any]) -> dict[str, Any]:
        """Answer EXPLAIN: the decision, and the operation that it is about. OSError: the path cannot be looked up."""
        change = decode_planned_change(document)
        user = os.geteuid() if self._mount.repository is None else self._mount.repository.user.uid
        with self._looked_up(Header(p.ROOT_ID, user, 0, 0, 0), change.path.rstrip("/")) as node:
            request, decision = self._explain(node, change)
        return {"operation": request.operation, **encode_decision(decision)}

    @contextmanager
    def _looked_up(self, header: Header, path: str) -> Iterator[Node | None]:
        """Look up a path below the header's directory, without following symlinks; None: the path has no file."""
        node, references = self._mount.node(header.node_id), list[int]()
        try:
            for name in path.split("/") if path else ():
                number = 0
                if name not in _NO_NAMES and "\0" not in name and node.is_dir:
                    number = self._look_up(header._replace(node_id=node.id), os.fsencode(name))
                if not number:
                    yield None
                    return
                references.append(number)
                node = self._mount.node(number)
            yield node
        finally:
            for number in references:
                self._mount.forget_node(number, 1)

    def _look_up(self, header: Header, name: bytes) -> int:
        """Return the node id of a name with one more reference; 0: there is no file, or it is in `.bonobofs`."""
        try:
            entry = self._lookups.lookup(header, memoryview(name + b"\0"))
        except FileNotFoundError:
            return 0
        assert isinstance(entry, bytes)
        number: int = p.ENTRY_OUT.unpack_from(entry)[0]
        return number if number < virtual_dir.FIRST_ID else 0

    def _explain(self, node: Node | None, change: PlannedChange) -> tuple[Request, Decision]:
        st = None if node is None else node.store.stat(node)
        kind = None if st is None else kind_of(st.st_mode)
        existing = NO_FACTS if node is None else self._mount.layer_context(node)
        size = 0 if st is None else st.st_size
        request, context = change.request(kind, size, existing, privileged=self._mount.source.privileged)
        if node is not None and st is not None and kind is Kind.FILE:
            context = self._mount.with_foreign_names(node, st, request.operation, context, request.path)
        decision = self._mount.enforcer.explain(request, context, change.role)
        if change.to is None:
            return request, decision
        arriving = RelatedChange(Request(request.operation, WorkspacePath(change.to), request.kind), existing)
        if node is not None and node.kind in (Kind.FILE, Kind.SYMLINK):
            in_source = node.layer is not Layer.STAGED
            arriving = self._staged.arriving_change(node, arriving.request, in_source=in_source)
        arrival = self._mount.enforcer.explain(arriving.request, arriving.context, change.role, arriving.head)
        decisions = [decision, arrival]
        return request, decide_move(request.path, request.operation, decisions)

    def _why(self, node: Node | None, path: WorkspacePath) -> bytes:
        """Return the decision about a write to the path, as JSON. Programs can read it before they write."""
        request, decision = self._explain(node, PlannedChange(path))
        return json.dumps(as_document(decision, path, request.operation)).encode()

    def _why_name(self, header: Header, name: bytes) -> bytes:
        """Return the decision about writing or creating `name` in the directory of the request, as JSON.

        Raises: ENOTDIR if the node is no directory, EINVAL or ENAMETOOLONG if the name is invalid.
        """
        parent = self._mount.node(header.node_id)
        if not parent.is_dir:
            raise os_error(errno.ENOTDIR)
        text = os.fsdecode(name)
        if text in _NO_NAMES or b"/" in name:
            raise os_error(errno.EINVAL)
        with self._looked_up(header, text) as node:
            return self._why(node, self._mount.join(parent, name))

    def _listxattr(self, header: Header, body: memoryview) -> Reply:
        size, _ = p.GETXATTR_IN.unpack_from(body)
        if header.node_id >= virtual_dir.FIRST_ID:
            return _sized_reply(b"", size)
        node = self._mount.attribute_node(self._mount.node(header.node_id))
        found = [] if node.store.prefix else node.store.list_xattrs(node)
        if header.uid != 0:
            found = [name for name in found if not name.startswith("trusted.")]
        return _sized_reply(b"".join(os.fsencode(name) + b"\0" for name in found), size)


def _attribute_changes(
    here: Context, kind: Kind, st: os.stat_result, valid: int, fields: tuple[int, ...]
) -> list[tuple[Operation, Context]]:
    changes: list[tuple[Operation, Context]] = []
    if valid & _SIZE:
        changes.append((Operation.TRUNCATE, here._replace(size=fields[3], size_before=st.st_size)))
    if valid & _OWNER:
        changes.append((Operation.SET_OWNER, here))
    if valid & _MODE:
        context = here._replace(mode=fields[11] & 0o7777) if kind is Kind.FILE else here
        changes.append((Operation.SET_MODE, context))
    if valid & _TIMES and not valid & _SIZE:
        changes.append((Operation.SET_TIMES, here))
    return changes


def _details(valid: int, fields: tuple[int, ...]) -> dict[str, Any]:
    """Return what SETATTR sets, for the audit entry."""
    details: dict[str, Any] = {}
    if valid & _SIZE:
        details["size"] = fields[3]
    if valid & _UID:
        details["owner"] = fields[13]
    if valid & _GID:
        details["group"] = fields[14]
    if valid & _MODE:
        details["mode"] = f"{fields[11] & 0o7777:04o}"
    return details


def _time(valid: int, explicit: int, now: int, seconds: int, nanoseconds: int) -> tuple[int, int]:
    if valid & now:
        return 0, syscalls.UTIME_NOW
    if not valid & explicit:
        return 0, syscalls.UTIME_OMIT
    return (seconds - (1 << 64) if seconds >= _SIGN else seconds), nanoseconds


_ACL_OWNER: Final = 0x01
_ACL_GROUP: Final = 0x04
_ACL_MASK: Final = 0x10
_ACL_OTHER: Final = 0x20


def _mode_of_acl(value: bytes, mode: int) -> int:
    """Return the permission bits that a file has after this ACL is set.

    The mask takes the place of the group's bits.
    """
    bits: dict[int, int] = {}
    for at in range(4, len(value) - 7, 8):
        tag, allowed = int.from_bytes(value[at : at + 2], "little"), int.from_bytes(value[at + 2 : at + 4], "little")
        bits[tag] = allowed & 7
    group = bits.get(_ACL_MASK, bits.get(_ACL_GROUP, mode >> 3 & 7))
    return (mode & 0o7000) | bits.get(_ACL_OWNER, mode >> 6 & 7) << 6 | group << 3 | bits.get(_ACL_OTHER, mode & 7)


def _sized_reply(value: bytes, size: int) -> bytes:
    """Return the reply to GETXATTR or LISTXATTR: only the length if `size` is 0. ERANGE: `size` is too small."""
    if size == 0:
        return p.XATTR_OUT.pack(len(value), 0)
    if len(value) > size:
        raise os_error(errno.ERANGE)
    return value
