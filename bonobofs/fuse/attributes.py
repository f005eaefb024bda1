"""Requests that change attributes: size, mode, owner, times, extended attributes, ACLs."""

from __future__ import annotations

import os
import stat
from typing import Final

from bonobofs.decision import Allowed
from bonobofs.errors import ProtocolError
from bonobofs.fuse import protocol as p
from bonobofs.fuse import system
from bonobofs.fuse.content import Content
from bonobofs.fuse.core import NOTHING, SET_IDS, Handler, Header, Reply
from bonobofs.fuse.inodes import Node, kind_of
from bonobofs.fuse.reading import ATTR_TIMES
from bonobofs.guard import Part
from bonobofs.request import Facts, Kind, Operation, Request

_ACL: Final = b"system.posix_acl_access"
_OURS: Final = b"user.bonobofs."
_SIGN: Final = 1 << 63
# Plain numbers: three changes of attributes follow every file that an archive brings, and an IntFlag costs ten times
# as much to test.
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
_KILL_SUIDGID: Final = int(p.Set.KILL_SUIDGID)


class Attributes(Content):
    """Handlers that change what is said of a file."""

    def _changing_attributes(self) -> dict[int, Handler]:
        o = p.Opcode
        return {o.SETATTR: self._setattr, o.SETXATTR: self._setxattr, o.REMOVEXATTR: self._removexattr}

    def _setattr(self, header: Header, body: memoryview) -> Reply:
        fields = p.SETATTR_IN.unpack_from(body)
        valid: int = fields[0]
        node = self._node(header.node_id)
        st = self._backing.status(node)
        parts = self._attribute_parts(node, st, valid, fields)
        if parts:
            first, *rest = parts
            with self._guard.admit(first.request, first.facts, *rest, caller=self._caller(header)) as leave:
                self._set_attributes(header, node, st, valid, fields, leave)
            st = self._backing.status(node)
        return ATTR_TIMES + p.pack_attr(st)

    def _attribute_parts(self, node: Node, st: os.stat_result, valid: int, fields: tuple[int, ...]) -> list[Part]:
        path, kind = self._inodes.path(node), kind_of(st.st_mode)
        foreign = self._foreign_names(node, st) if kind is Kind.FILE else 0
        parts = []
        if valid & _SIZE:
            facts = Facts(size=fields[3], size_before=st.st_size, foreign_names=foreign)
            parts.append(Part(Request(Operation.TRUNCATE, path, kind), facts))
        if valid & _OWNER:
            parts.append(Part(Request(Operation.SET_OWNER, path, kind), Facts(foreign_names=foreign)))
        if valid & _MODE:
            mode = fields[11] & 0o7777 if kind is Kind.FILE else -1
            parts.append(Part(Request(Operation.SET_MODE, path, kind), Facts(mode=mode, foreign_names=foreign)))
        if valid & _TIMES and not valid & _SIZE:
            parts.append(Part(Request(Operation.SET_TIMES, path, kind)))
        return parts

    def _set_attributes(
        self, header: Header, node: Node, st: os.stat_result, valid: int, fields: tuple[int, ...], leave: Allowed
    ) -> None:
        backing = self._backing
        if valid & _SIZE:
            backing.truncate(node, fields[3], leave)
            if valid & _KILL_SUIDGID and st.st_mode & SET_IDS:
                self._kill_set_ids(header, node, node.fd, st, leave)
        if valid & _OWNER:
            uid = fields[13] if valid & _UID else -1
            backing.set_owner(node, uid, fields[14] if valid & _GID else -1, leave)
        if valid & _MODE:
            backing.hold_before_mode(node, fields[11])
            backing.set_mode(node, fields[11] & 0o7777, leave)
        if valid & _TIMES and not valid & _SIZE:
            access = _time(valid, _ATIME, _ATIME_NOW, fields[5], fields[8])
            backing.set_times(node, access, _time(valid, _MTIME, _MTIME_NOW, fields[6], fields[9]), leave)

    def _setxattr(self, header: Header, body: memoryview) -> Reply:
        size, flags, extra, _ = p.SETXATTR_IN.unpack_from(body)
        (name,) = p.strings(body[p.SETXATTR_IN.size :], 1)
        start = p.SETXATTR_IN.size + len(name) + 1
        value = bytes(body[start : start + size])
        if len(value) != size:
            raise ProtocolError("SETXATTR is shorter than it says")
        node = self._node(header.node_id)
        path = self._inodes.path(node)
        if name.startswith(_OURS):
            self._refuse_virtual(Operation.SET_XATTR, path)
        st = self._backing.stat(node)
        kind = kind_of(st.st_mode)
        operation, mode = Operation.SET_XATTR, -1
        if name == _ACL and kind is Kind.FILE:
            operation, mode = Operation.SET_MODE, _mode_of_acl(value, stat.S_IMODE(st.st_mode))
        foreign = self._foreign_names(node, st) if kind is Kind.FILE else 0
        node.fresh = False
        with self._guard.admit(
            Request(operation, path, kind),
            Facts(mode=mode, foreign_names=foreign),
            caller=self._caller(header),
            details={"name": os.fsdecode(name)},
        ) as leave:
            self._backing.set_xattr(node, name, value, flags, leave)
            if extra & p.SETXATTR_ACL_KILL_SGID:
                mode = stat.S_IMODE(self._backing.stat(node).st_mode)
                self._backing.set_mode(node, mode & ~stat.S_ISGID, leave)
        return NOTHING

    def _removexattr(self, header: Header, body: memoryview) -> Reply:
        (name,) = p.strings(body, 1)
        node = self._node(header.node_id)
        path = self._inodes.path(node)
        if name.startswith(_OURS):
            self._refuse_virtual(Operation.REMOVE_XATTR, path)
        st = self._backing.stat(node)
        kind = kind_of(st.st_mode)
        facts = Facts(foreign_names=self._foreign_names(node, st) if kind is Kind.FILE else 0)
        request = Request(Operation.REMOVE_XATTR, path, kind)
        with self._guard.admit(
            request, facts, caller=self._caller(header), details={"name": os.fsdecode(name)}
        ) as leave:
            self._backing.remove_xattr(node, name, leave)
        return NOTHING


def _time(valid: int, given: int, now: int, seconds: int, nanoseconds: int) -> tuple[int, int]:
    if valid & now:
        return 0, system.UTIME_NOW
    if not valid & given:
        return 0, system.UTIME_OMIT
    return (seconds - (1 << 64) if seconds >= _SIGN else seconds), nanoseconds


_ACL_OWNER: Final = 0x01
_ACL_GROUP: Final = 0x04
_ACL_MASK: Final = 0x10
_ACL_OTHER: Final = 0x20


def _mode_of_acl(value: bytes, mode: int) -> int:
    """The permission bits that a file has once this ACL is set: the mask stands where the group's would."""
    bits: dict[int, int] = {}
    for at in range(4, len(value) - 7, 8):
        tag, allowed = int.from_bytes(value[at : at + 2], "little"), int.from_bytes(value[at + 2 : at + 4], "little")
        bits[tag] = allowed & 7
    group = bits.get(_ACL_MASK, bits.get(_ACL_GROUP, mode >> 3 & 7))
    return (mode & 0o7000) | bits.get(_ACL_OWNER, mode >> 6 & 7) << 6 | group << 3 | bits.get(_ACL_OTHER, mode & 7)
