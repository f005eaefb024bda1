"""The libfuse transport: the same handlers behind libfuse's path-based interface, through mfusepy.

libfuse passes paths, and `PathTable` turns each into requests with node ids. All cache timeouts are zero. mfusepy
builds the table of callbacks. The request loop is here, because mfusepy's own has no hook for tidying up, and because
the callbacks need the request itself: libfuse renames an open file to a hidden name before the file is removed or
replaced, and the callback does not show which. This transport does not rename the file. It removes or replaces it, and
the hidden name becomes an alias of the node for the processes that have it open.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import signal
import stat
from collections.abc import Callable, Generator, Iterator
from functools import partial
from time import monotonic
from typing import Any, Final

from bonobofs.errors import MountError, ProtocolError, os_error
from bonobofs.fuse import abi as p
from bonobofs.fuse import virtual_dir
from bonobofs.fuse.fd_cache import RECHECK, stale
from bonobofs.fuse.mount_context import Handler, Header, Notifications, is_member
from bonobofs.fuse.session_git_dir import NAME as GIT
from bonobofs.fuse.slices import Busy, finished
from bonobofs.fuse.transport import Hooks
from bonobofs.system import syscalls

MAX_UNUSED: Final = 1000
"""Maximum of names without pins."""

Call = Callable[[p.Opcode, Header, bytes], bytes]
"""Calls the handler of an opcode, with header and body of the request; the body of the reply. OSError."""


class PathEntry:
    """A name and its node. Only PathTable changes it.

    `pins` counts open handles, aliases, and the names in a directory. `checked` is when the node last was a directory.
    """

    __slots__ = ("checked", "children", "name", "node", "parent", "pins")

    def __init__(self, parent: PathEntry | None, name: bytes, node: int) -> None:
        self.parent = parent
        self.name = name
        self.node = node
        self.pins = 0
        self.checked = 0.0
        self.children: dict[bytes, PathEntry] = {}


class PathTable:
    """The names of one mount that were looked up.

    The handlers keep a node as long as it has references. So each path is walked from the root, with one LOOKUP for
    each component, as the kernel does it. Each name holds one reference to its node, and pins the directory that
    contains it. A name without pins may be forgotten, with one FORGET for its reference.
    """

    def __init__(self, call: Call) -> None:
        self._call: Final = call
        self.root: Final = PathEntry(None, b"", p.ROOT_ID)
        self._entries: Final[dict[PathEntry, None]] = {}
        self._aliases: Final[dict[bytes, PathEntry]] = {}
        self._limit = MAX_UNUSED

    def find(self, header: Header, path: bytes) -> tuple[PathEntry, bytes]:
        """The entry of a path, and its `fuse_attr`, or b"" if the caller must ask for the attributes.

        Raises FileNotFoundError or NotADirectoryError if the path has changed since the kernel walked it.
        """
        if path == b"/":
            return self.root, b""
        parent, name = self.find_parent(header, path)
        alias = self._aliases.get(name)
        return self._lookup(header, parent, name) if alias is None else (alias, b"")

    def find_parent(self, header: Header, path: bytes) -> tuple[PathEntry, bytes]:
        """The entry of the directory that contains the last name of the path, and that name. Errors as in `find`.

        A directory that was looked up within RECHECK is not looked up again: the handler of a change checks it. `.git`
        is always looked up, because users may see different ones.
        """
        parent, now = self.root, monotonic()
        *parts, last = path.split(b"/")[1:]
        for part in parts:
            entry = parent.children.get(part)
            if entry is None or now - entry.checked >= RECHECK or part == GIT:
                entry, attr = self._lookup(header, parent, part)
                if not stat.S_ISDIR(p.ATTR.unpack(attr)[9]):
                    raise os_error(errno.ENOTDIR)
                entry.checked = now
            parent = entry
        return parent, last

    def add(self, parent: PathEntry, name: bytes, reply: bytes) -> tuple[PathEntry, bytes]:
        """Keep the reference that a reply with `fuse_entry_out` gave; the entry and its `fuse_attr`."""
        (node,) = p.NODE_ID.unpack_from(reply)
        if not node:
            raise os_error(errno.ENOENT)
        attr = reply[p.ENTRY_OUT.size : p.ENTRY_OUT.size + p.ATTR.size]
        earlier = parent.children.get(name)
        if earlier is not None:
            if earlier.node == node:
                self._forget(node)
                return earlier, attr
            self._detach(earlier)
        entry = PathEntry(parent, name, node)
        parent.children[name] = entry
        parent.pins += 1
        self._entries[entry] = None
        return entry, attr

    def _lookup(self, header: Header, parent: PathEntry, name: bytes) -> tuple[PathEntry, bytes]:
        try:
            reply = self._call(p.Opcode.LOOKUP, header._replace(node_id=parent.node), name + b"\0")
            return self.add(parent, name, reply)
        except FileNotFoundError:
            self.remove(parent, name)
            raise

    # -- pins and aliases

    def pin(self, entry: PathEntry) -> None:
        """Keep an entry for an open handle."""
        entry.pins += 1

    def unpin(self, entry: PathEntry) -> None:
        """Undo `pin`."""
        entry.pins -= 1
        if entry.parent is not None and entry.parent.children.get(entry.name) is not entry:
            self._drop(entry)  # removed while it was open

    def unpin_closed(self, entry: PathEntry) -> None:
        """As `unpin`; if only aliases pin the entry then, they are removed."""
        self.unpin(entry)
        aliases = [alias for alias, target in self._aliases.items() if target is entry]
        if len(aliases) == entry.pins:
            for alias in aliases:
                self.remove_alias(alias)

    def add_alias(self, alias: bytes, entry: PathEntry) -> None:
        """Have every path that ends in `alias` lead to the entry."""
        self._aliases[alias] = entry
        self.pin(entry)

    def is_alias(self, name: bytes) -> bool:
        """Whether the name is an alias."""
        return name in self._aliases

    def remove_alias(self, alias: bytes) -> bool:
        """Remove an alias; False: there is none."""
        entry = self._aliases.pop(alias, None)
        if entry is not None:
            self.unpin(entry)
        return entry is not None

    # -- changes of names

    def remove(self, parent: PathEntry, name: bytes) -> None:
        """Record that a name was removed."""
        entry = parent.children.get(name)
        if entry is not None:
            self._detach(entry)

    def rename(self, parent: PathEntry, old: bytes, new_parent: PathEntry, new: bytes, *, exchange: bool) -> None:
        """Record a rename, or with `exchange` that two names were exchanged."""
        first, second = parent.children.get(old), new_parent.children.get(new)
        if first is not None and second is not None and first.node == second.node:
            return  # a rename between two hard links of one file changes nothing
        for entry in (first, second):
            if entry is not None:
                assert entry.parent is not None
                del entry.parent.children[entry.name]
        if second is not None and exchange:
            self._place(second, parent, old)
        elif second is not None:
            self._drop(second)
        if first is not None:
            self._place(first, new_parent, new)

    def limit_unused(self) -> None:
        """Forget the entries without pins if there are many."""
        if len(self._entries) > self._limit:
            self.drop_unused()
            self._limit = max(MAX_UNUSED, 2 * len(self._entries))

    def drop_unused(self) -> None:
        """Forget the entries without pins."""
        for entry in reversed(list(self._entries)):
            self._drop(entry)

    def _place(self, entry: PathEntry, parent: PathEntry, name: bytes) -> None:
        old_parent, entry.parent, entry.name = entry.parent, parent, name
        parent.children[name] = entry
        parent.pins += 1
        assert old_parent is not None
        self.unpin(old_parent)

    def _detach(self, entry: PathEntry) -> None:
        assert entry.parent is not None
        del entry.parent.children[entry.name]
        self._drop(entry)

    def _drop(self, entry: PathEntry) -> None:
        """Forget an entry without pins, and the removed directory that only this entry has pinned."""
        if entry.pins or entry not in self._entries:
            return
        parent = entry.parent
        assert parent is not None
        if parent.children.get(entry.name) is entry:
            del parent.children[entry.name]
        del self._entries[entry]
        self._forget(entry.node)
        self.unpin(parent)

    def _forget(self, node: int) -> None:
        self._call(p.Opcode.FORGET, Header(node, 0, 0, 0, 0), p.FORGET_IN.pack(1))


_HIDDEN: Final = b".fuse_hidden"
_ACL: Final = "system.posix_acl_access"
_SECOND: Final = 1_000_000_000
_UNCHANGED: Final = 0xFFFFFFFF
"""An owner or group that chown does not change."""
_UNSIGNED: Final = (1 << 64) - 1
_Time = tuple[int, int]
"""Seconds, and nanoseconds or UTIME_NOW or UTIME_OMIT."""
_MAY_BE_ABSENT: Final = (p.Opcode.LOOKUP, p.Opcode.UNLINK, p.Opcode.RENAME, p.Opcode.RENAME2)
"""Requests for which libfuse gets attributes to see whether a name exists."""
_MAX_NAMES: Final = 4096
"""Bytes of a request that contain its header and its names."""
_READDIR_SIZE: Final = 8192
"""Bytes of entries in one READDIR; the kernel asks libfuse for a page of them."""
_MAX_XATTR: Final = 65536
_ATOMIC_O_TRUNC: Final = 1 << 3
_EXPORT_SUPPORT: Final = 1 << 4
_DONT_MASK: Final = 1 << 6
_SPLICE_READ: Final = 1 << 9
_READDIRPLUS: Final = 3 << 13
_POSIX_ACL: Final = 1 << 19
_NEEDED: Final = _DONT_MASK | _POSIX_ACL
_ATTR: Final = (
    ("st_ino", "st_size", "st_blocks"),
    ("st_mode", "st_nlink", "st_uid", "st_gid", "st_rdev", "st_blksize"),
)


# By itself, mfusepy runs a compiler to find the library, and takes libfuse 2 if both are installed.
_LIBRARY: Final = syscalls.libfuse()
if _LIBRARY is None:
    raise MountError("the portable transport needs libfuse 3; install the package fuse3")
os.environ["FUSE_LIBRARY_PATH"] = _LIBRARY
import mfusepy  # type: ignore[import-untyped] # noqa: E402

_fuse: Final = ctypes.CDLL(_LIBRARY)


class _Arguments(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int), ("values", ctypes.c_void_p), ("allocated", ctypes.c_int))


_fuse.fuse_new_31.restype = ctypes.c_void_p
_fuse.fuse_new_31.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_fuse.fuse_mount.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_fuse.fuse_get_session.restype = ctypes.c_void_p
_fuse.fuse_get_session.argtypes = (ctypes.c_void_p,)
_fuse.fuse_session_receive_buf.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
_fuse.fuse_session_process_buf.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
_fuse.fuse_get_context.restype = ctypes.POINTER(mfusepy.fuse_context)


class _CallbackTable(mfusepy.FUSE):  # type: ignore[misc] # mfusepy has no types
    """The table of callbacks. Those here pass on what mfusepy's own drop: handles, flags, exact times."""

    def __init__(self, callbacks: _Callbacks, failed: Callable[[Exception], None]) -> None:
        self._failed = failed
        self.pointer: Any = None
        self.size = 0
        main, mfusepy.fuse_main_real = mfusepy.fuse_main_real, self._keep_table
        on_interrupt = signal.getsignal(signal.SIGINT)
        try:
            super().__init__(callbacks, "/", raw_fi=True)
        finally:
            mfusepy.fuse_main_real = main
            signal.signal(signal.SIGINT, on_interrupt)
        self.operations = callbacks

    def _keep_table(self, count: int, arguments: object, table: object, size: int, data: object) -> int:
        """In place of libfuse's loop: keep the table for the loop of this module."""
        self.pointer, self.size = table, size
        return 0

    def _wrapper(self, call: Callable[..., int | None], *arguments: object) -> int:
        try:
            return call(*arguments) or 0
        except OSError as error:
            return -(error.errno or errno.EIO)
        except Exception as error:  # noqa: BLE001 - an unknown failure becomes EIO and a log line
            self._failed(error)
            return -errno.EIO

    def getattr_fuse_3(self, path: bytes | None, buffer: Any, info: Any) -> None:
        ctypes.memset(buffer, 0, ctypes.sizeof(mfusepy.c_stat))
        mfusepy.set_st_attrs(buffer.contents, self.operations.getattr(path, _handle(info)), use_ns=True)

    def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> None:
        self.operations.rename(old, new, flags)

    def chmod_fuse_3(self, path: bytes | None, mode: int, info: Any) -> None:
        self.operations.chmod(path, mode, _handle(info))

    def chown_fuse_3(self, path: bytes | None, uid: int, gid: int, info: Any) -> None:
        self.operations.chown(path, uid, gid, _handle(info))

    def truncate_fuse_3(self, path: bytes | None, size: int, info: Any) -> None:
        self.operations.truncate(path, size, _handle(info))

    def utimens_fuse_3(self, path: bytes | None, times: Any, info: Any) -> None:
        access, change = times.contents.actime, times.contents.modtime
        self.operations.utimens(path, (access.tv_sec, access.tv_nsec), (change.tv_sec, change.tv_nsec), _handle(info))

    def copy_file_range(self, path: bytes, info: Any, offset: int, target: bytes, *arguments: Any) -> int:
        target_info, target_offset, size, flags = arguments
        copied: int = self.operations.copy_file_range(
            _handle(info), offset, _handle(target_info), target_offset, size, flags
        )
        return copied

    def lseek(self, path: bytes | None, offset: int, whence: int, info: Any) -> int:
        position: int = self.operations.lseek(_handle(info), offset, whence)
        return position


def _handle(info: Any) -> int:
    """The file handle of a callback; 0: it has only a path."""
    return int(info.contents.fh) if info else 0


class _Callbacks:
    """The callbacks, each with a path, a handle or both. The errno of an OSError is the reply."""

    use_ns = True

    def __init__(self) -> None:
        self.paths: Final = PathTable(self._call)
        self.handlers: dict[int, Handler] = {}
        self.before: Callable[[float], None] = lambda _: None
        self.opcode: int = p.Opcode.INIT
        self.initialized = False
        self.capable = 0
        self._request: Callable[[], bytes] = bytes
        self._handles: dict[int, PathEntry] = {}
        self._last_handle = 0

    def begin(self, request: Callable[[], bytes]) -> None:
        """Begin a request. `request` reads it, as the callbacks do not show all of it."""
        self._request = request
        self.opcode = p.IN_HEADER.unpack_from(request())[1]

    def _call(self, opcode: p.Opcode, header: Header, body: bytes) -> bytes:
        self.before(monotonic())  # to the handlers, each message is a request
        try:
            reply = self.handlers[opcode](header, memoryview(body))
        except Busy as busy:
            if busy.first is None:
                raise
            finished(busy.first)
            reply = self.handlers[opcode](header, memoryview(body))
        if isinstance(reply, Generator):
            reply = finished(reply)
        return reply if isinstance(reply, bytes) else b"".join(reply)

    def _caller(self) -> tuple[Header, int]:
        """A header with the caller and without a node, and the caller's umask."""
        context = _fuse.fuse_get_context().contents
        return Header(0, context.uid, context.gid, context.pid, 0), context.umask

    def _header(self, path: str | bytes | None, handle: int = 0) -> Header:
        """A header with the caller and the node of a handle or path."""
        header, _ = self._caller()
        name = self._opened(handle) if handle else self._find(header, path)[0]
        return header._replace(node_id=name.node)

    def _find(self, header: Header, path: str | bytes | None) -> tuple[PathEntry, bytes]:
        """As `PathTable.find`. ESTALE: the path has changed, so that the kernel walks it again."""
        try:
            return self.paths.find(header, _raw(path))
        except NotADirectoryError:
            raise stale() from None
        except FileNotFoundError:
            if self.opcode in _MAY_BE_ABSENT:
                raise
            raise stale() from None

    def _find_parent(self, header: Header, path: str | bytes) -> tuple[PathEntry, bytes]:
        """As `PathTable.find_parent`. ESTALE: likewise."""
        try:
            return self.paths.find_parent(header, _raw(path))
        except (FileNotFoundError, NotADirectoryError):
            raise stale() from None

    def _opened(self, handle: int) -> PathEntry:
        name = self._handles.get(handle)
        if name is None:
            raise os_error(errno.EBADF)
        return name

    # -- the mount

    def init_with_config(self, connection: Any, config: Any) -> None:
        self.capable = connection.capable
        # Features without a handler are left to the kernel or not negotiated.
        connection.want &= ~(_ATOMIC_O_TRUNC | _EXPORT_SUPPORT | _SPLICE_READ | _READDIRPLUS)
        connection.want |= _NEEDED & connection.capable
        config.use_ino = 1
        config.entry_timeout = config.attr_timeout = config.negative_timeout = 0.0
        self.initialized = True

    def statfs(self, path: str) -> dict[str, int]:
        header, _ = self._caller()
        reply = self._call(p.Opcode.STATFS, header._replace(node_id=p.ROOT_ID), b"")
        names = ("f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_bsize", "f_namemax", "f_frsize")
        return dict(zip(names, p.STATFS_OUT.unpack(reply), strict=False))

    # -- reading

    def getattr(self, path: bytes | None, handle: int) -> dict[str, int]:
        attr = b""
        header, _ = self._caller()
        if handle:
            name = self._opened(handle)
        else:
            name, attr = self._find(header, path)
        if not attr:
            reply = self._call(p.Opcode.GETATTR, header._replace(node_id=name.node), bytes(16))
            attr = reply[p.ATTR_OUT.size :]
        attributes = _stat(attr)
        if self.opcode == p.Opcode.GETATTR and path and self.paths.is_alias(path.rpartition(b"/")[2]):
            attributes["st_nlink"] += 1  # libfuse subtracts the hidden name, which does not exist
        return attributes

    def readlink(self, path: str) -> str:
        return os.fsdecode(self._call(p.Opcode.READLINK, self._header(path), b""))

    def open(self, path: str, info: Any) -> None:
        header, _ = self._caller()
        name, _ = self._find(header, path)
        info.direct_io = (
            name.node >= virtual_dir.FIRST_ID
        )  # virtual files: the size may have changed since the last GETATTR
        info.fh = self._open(name)

    def read(self, path: str | None, size: int, offset: int, info: Any) -> bytes:
        return self._call(
            p.Opcode.READ, self._header(path, info.fh), p.READ_IN.pack(0, offset, size, 0, 0, info.flags, 0)
        )

    def lseek(self, handle: int, offset: int, whence: int) -> int:
        reply = self._call(p.Opcode.LSEEK, self._header(None, handle), p.LSEEK_IN.pack(0, offset, whence, 0))
        return int(p.LSEEK_OUT.unpack(reply)[0])

    def fsync(self, path: str | None, data_only: int, info: Any) -> None:
        self._call(p.Opcode.FSYNC, self._header(path, info.fh), p.FSYNC_IN.pack(0, bool(data_only), 0))

    def release(self, path: str | None, info: Any) -> None:
        self._close(info.fh)

    def opendir(self, path: str) -> int:
        header, _ = self._caller()
        return self._open(self._find(header, path)[0])

    def readdir_with_offset(
        self, path: str | None, offset: int, handle: int
    ) -> Iterator[tuple[str, dict[str, int], int]]:
        header = self._header(path, handle)
        while entries := self._call(p.Opcode.READDIR, header, p.READ_IN.pack(0, offset, _READDIR_SIZE, 0, 0, 0, 0)):
            start = 0
            while start < len(entries):
                ino, offset, length, kind = p.DIRENT.unpack_from(entries, start)
                start += p.DIRENT.size
                yield os.fsdecode(entries[start : start + length]), {"st_ino": ino, "st_mode": kind << 12}, offset
                start += (length + 7) & ~7

    def fsyncdir(self, path: str | None, data_only: int, handle: int) -> None:
        self._call(p.Opcode.FSYNCDIR, self._header(path, handle), p.FSYNC_IN.pack(0, bool(data_only), 0))

    def releasedir(self, path: str | None, handle: int) -> None:
        self._close(handle)

    def getxattr(self, path: str, name: str) -> bytes:
        body = p.GETXATTR_IN.pack(_MAX_XATTR, 0) + os.fsencode(name) + b"\0"
        return self._call(p.Opcode.GETXATTR, self._header(path), body)

    def listxattr(self, path: str) -> list[str]:
        names = self._call(p.Opcode.LISTXATTR, self._header(path), p.GETXATTR_IN.pack(_MAX_XATTR, 0))
        return [os.fsdecode(name) for name in names.split(b"\0")[:-1]]

    def _open(self, name: PathEntry) -> int:
        self.paths.pin(name)
        self._last_handle += 1
        self._handles[self._last_handle] = name
        return self._last_handle

    def _close(self, handle: int) -> None:
        self.paths.unpin_closed(self._handles.pop(handle))

    # -- content

    def create(self, path: str, mode: int, info: Any) -> None:
        body = partial(p.CREATE_IN.pack, info.flags, mode)
        info.fh = self._open(self._make(p.Opcode.CREATE, path, lambda umask: body(umask, 0)))

    def write(self, path: str | None, data: bytes, offset: int, info: Any) -> int:
        header = self._header(path, info.fh)
        flags = (p.WRITE_CACHE if info.writepage else 0) | (p.WRITE_KILL_SUIDGID if header.uid else 0)
        head = p.WRITE_IN.pack(0, offset, len(data), flags, 0, info.flags, 0)
        return int(p.WRITE_OUT.unpack(self._call(p.Opcode.WRITE, header, head + data))[0])

    def fallocate(self, path: str | None, mode: int, offset: int, length: int, info: Any) -> None:
        body = p.FALLOCATE_IN.pack(0, offset, length, mode, 0)
        self._call(p.Opcode.FALLOCATE, self._header(path, info.fh), body)

    def copy_file_range(self, handle: int, offset: int, target: int, target_offset: int, size: int, flags: int) -> int:
        body = p.COPY_FILE_RANGE_IN.pack(0, offset, self._opened(target).node, 0, target_offset, size, flags)
        return int(p.COPY_OUT.unpack(self._call(p.Opcode.COPY_FILE_RANGE_64, self._header(None, handle), body))[0])

    # -- attributes

    def chmod(self, path: bytes | None, mode: int, handle: int) -> None:
        self._setattr(self._header(path, handle), p.Set.MODE, mode=mode)

    def chown(self, path: bytes | None, uid: int, gid: int, handle: int) -> None:
        valid = (p.Set.UID if uid != _UNCHANGED else p.Set(0)) | (p.Set.GID if gid != _UNCHANGED else p.Set(0))
        self._setattr(self._header(path, handle), valid, owner=(uid, gid))

    def truncate(self, path: bytes | None, size: int, handle: int) -> None:
        header = self._header(path, handle)
        self._setattr(header, p.Set.SIZE | (p.Set.KILL_SUIDGID if header.uid else p.Set(0)), size=size)

    def utimens(self, path: bytes | None, access: _Time, change: _Time, handle: int) -> None:
        valid = _valid(access, p.Set.ATIME, p.Set.ATIME_NOW) | _valid(change, p.Set.MTIME, p.Set.MTIME_NOW)
        self._setattr(self._header(path, handle), valid, times=(access, change))

    def _setattr(
        self,
        header: Header,
        valid: p.Set,
        *,
        size: int = 0,
        mode: int = 0,
        owner: tuple[int, int] = (0, 0),
        times: tuple[_Time, _Time] = ((0, 0), (0, 0)),
    ) -> None:
        access, change = times
        seconds = access[0] & _UNSIGNED, change[0] & _UNSIGNED, 0
        nanoseconds = access[1], change[1], 0
        body = p.SETATTR_IN.pack(valid, 0, 0, size, 0, *seconds, *nanoseconds, mode, 0, *owner, 0)
        self._call(p.Opcode.SETATTR, header, body)

    def setxattr(self, path: str, name: str, value: bytes, flags: int) -> None:
        header = self._header(path)
        text = os.fsencode(name)
        extra = p.SETXATTR_ACL_KILL_SGID if name == _ACL and self._clears_set_gid(header) else 0
        body = p.SETXATTR_IN.pack(len(value), flags, extra, 0) + text + b"\0" + value
        self._call(p.Opcode.SETXATTR, header, body)

    def _clears_set_gid(self, header: Header) -> bool:
        """Whether a new ACL clears set-group-id: libfuse drops the kernel's flag for it."""
        attr = self._call(p.Opcode.GETATTR, header, bytes(16))[p.ATTR_OUT.size :]
        return header.uid != 0 and not is_member(header, p.ATTR.unpack(attr)[12])

    def removexattr(self, path: str, name: str) -> None:
        self._call(p.Opcode.REMOVEXATTR, self._header(path), os.fsencode(name) + b"\0")

    # -- names

    def mkdir(self, path: str, mode: int) -> None:
        self._make(p.Opcode.MKDIR, path, lambda umask: p.MKDIR_IN.pack(mode, umask))

    def mknod(self, path: str, mode: int, device: int) -> None:
        self._make(p.Opcode.MKNOD, path, lambda umask: p.MKNOD_IN.pack(mode, device, umask, 0))

    def symlink(self, path: str, text: str) -> None:
        self._make(p.Opcode.SYMLINK, path, lambda _: b"", os.fsencode(text) + b"\0")

    def link(self, path: str, existing: str) -> None:
        node = self._header(existing).node_id
        self._make(p.Opcode.LINK, path, lambda _: p.LINK_IN.pack(node))

    def _make(self, opcode: p.Opcode, path: str, head: Callable[[int], bytes], tail: bytes = b"") -> PathEntry:
        header, umask = self._caller()
        parent, last = self._find_parent(header, path)
        reply = self._call(opcode, header._replace(node_id=parent.node), head(umask) + last + b"\0" + tail)
        return self.paths.add(parent, last, reply)[0]

    def unlink(self, path: str) -> None:
        hidden = _raw(path).rpartition(b"/")[2]
        if self.opcode == p.Opcode.UNLINK and not self.paths.remove_alias(hidden):
            self._remove(p.Opcode.UNLINK, path)
        # Otherwise the last process that had the hidden file open has closed it.

    def rmdir(self, path: str) -> None:
        self._remove(p.Opcode.RMDIR, path)

    def _remove(self, opcode: p.Opcode, path: str | bytes) -> None:
        header, _ = self._caller()
        parent, last = self._find_parent(header, path)
        self._call(opcode, header._replace(node_id=parent.node), last + b"\0")
        self.paths.remove(parent, last)

    def rename(self, old: bytes, new: bytes, flags: int) -> None:
        hidden = new.rpartition(b"/")[2]
        if hidden.startswith(_HIDDEN) and hidden != self._requested_name():
            self._hide(old, hidden)
            return
        header, _ = self._caller()
        parent, name = self._find_parent(header, old)
        new_parent, new_name = self._find_parent(header, new)
        body = p.RENAME2_IN.pack(new_parent.node, flags, 0) + name + b"\0" + new_name + b"\0"
        self._call(p.Opcode.RENAME2, header._replace(node_id=parent.node), body)
        self.paths.rename(parent, name, new_parent, new_name, exchange=bool(flags & syscalls.RENAME_EXCHANGE))

    def _requested_name(self) -> bytes:
        """The new name of a rename request; b"": the request is another one."""
        if self.opcode not in (p.Opcode.RENAME, p.Opcode.RENAME2):
            return b""
        head = p.RENAME_IN if self.opcode == p.Opcode.RENAME else p.RENAME2_IN
        return self._request()[p.IN_SIZE + head.size :].split(b"\0")[1]

    def _hide(self, path: bytes, hidden: bytes) -> None:
        """Make `hidden` an alias of an open file. UNLINK removes the file here, a rename in the next callback."""
        header, _ = self._caller()
        self.paths.add_alias(hidden, self.paths.find(header, path)[0])
        if self.opcode == p.Opcode.UNLINK:
            try:
                self._remove(p.Opcode.UNLINK, path)
            except OSError:
                self.paths.remove_alias(hidden)
                raise


def _raw(path: str | bytes | None) -> bytes:
    """A path as bytes. ENOENT: libfuse has none, because the open file has no name any more."""
    if path is None:
        raise os_error(errno.ENOENT)
    return os.fsencode(path)


def _stat(attr: bytes) -> dict[str, int]:
    values = p.ATTR.unpack(attr)
    attributes = dict(zip(_ATTR[0], values, strict=False)) | dict(zip(_ATTR[1], values[9:], strict=False))
    for name, seconds, nanoseconds in zip(("st_atime", "st_mtime", "st_ctime"), values[3:6], values[6:9], strict=True):
        attributes[name] = seconds * _SECOND + nanoseconds
    return attributes


def _valid(time: _Time, is_set: p.Set, is_now: p.Set) -> p.Set:
    if time[1] == syscalls.UTIME_OMIT:
        return p.Set(0)
    return is_set | is_now if time[1] == syscalls.UTIME_NOW else is_set


class _Buffer(ctypes.Structure):
    """`struct fuse_buf`, with room for fields of later versions."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("flags", ctypes.c_int),
        ("mem", ctypes.c_void_p),
        ("fd", ctypes.c_int),
        ("pos", ctypes.c_int64),
        ("spare", ctypes.c_uint64 * 4),
    )


class LibfuseTransport:
    """A connection that libfuse serves: it reads requests and calls the handlers through `_Callbacks`."""

    def __init__(self, fd: int) -> None:
        self._fd: Final = fd
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._callbacks: Final = _Callbacks()
        self._hooks: Hooks | None = None
        self._readers: Final[dict[int, Callable[[], None]]] = {}
        self._table: Final = _CallbackTable(self._callbacks, self._failed)
        self._buffer: Final = _Buffer()
        self._poll: Final = select.poll()
        for descriptor in (fd, self._wake):
            self._poll.register(descriptor, select.POLLIN)
        os.set_blocking(fd, False)
        name = (ctypes.c_char_p * 1)(b"bonobofs")
        arguments = _Arguments(1, ctypes.cast(name, ctypes.c_void_p), 0)
        instance = _fuse.fuse_new_31(ctypes.byref(arguments), self._table.pointer, self._table.size, None)
        # The mount exists; libfuse gets its connection.
        if not instance or _fuse.fuse_mount(instance, b"/dev/fd/%d" % fd):
            raise MountError("libfuse cannot serve the mount; run bonobofs doctor")
        self._session: Final = ctypes.c_void_p(_fuse.fuse_get_session(instance))

    @property
    def waker(self) -> int:
        """A descriptor that wakes the loop when it is written to (signal.set_wakeup_fd)."""
        return self._waker

    @property
    def notices(self) -> Notifications:
        """The kernel caches nothing, so only unused entries of the path table are dropped."""
        return Notifications(
            lambda _node, _offset, _length: None,
            lambda _directory, _name: None,
            lambda _nodes, _names: self._callbacks.paths.drop_unused(),
            lambda: True,
            lambda callback: callback(True),
        )

    @property
    def blocked_notifications(self) -> int:
        return 0

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` between requests, in the serving thread, whenever `fd` is readable."""
        self._readers[fd] = callback
        self._poll.register(fd, select.POLLIN)

    def remove_reader(self, fd: int) -> None:
        """Call no callback for `fd` any more."""
        del self._readers[fd]
        self._poll.unregister(fd)

    def handshake(self, *, watched: bool) -> None:
        """Have libfuse answer INIT. ProtocolError: the kernel is too old.

        `watched` makes no difference, because the kernel caches nothing.
        """
        while not self._callbacks.initialized:
            self._poll.poll()
            if self._receive() < 0:
                raise ProtocolError("the kernel did not begin with INIT")
            self._process()
        if self._callbacks.capable & _NEEDED != _NEEDED:
            raise ProtocolError("the kernel's FUSE lacks ACLs or umasks; use Linux 4.9 or later")

    def serve(self, handlers: dict[int, Handler], hooks: Hooks) -> None:
        """Serve until the mount ends. An unexpected exception in a handler fails that request with EIO."""
        self._callbacks.handlers, self._callbacks.before, self._hooks = handlers, hooks.before, hooks
        due = monotonic()
        while True:
            ready = [fd for fd, _ in self._poll.poll(max(0.0, due - monotonic()) * 1000)]
            length = self._receive() if self._fd in ready else 0
            if length < 0:
                return
            now = monotonic()
            if self._wake in ready:
                os.read(self._wake, 4096)
            for fd in ready:
                if fd in self._readers:
                    self._readers[fd]()
            if not length or now >= due:
                wait = hooks.idle(now)
                if wait is None:
                    return
                due = now + wait
            if length:
                self._process()
                self._callbacks.paths.limit_unused()
                hooks.after()
                while hooks.rest():
                    pass

    def _receive(self) -> int:
        """Read a request into the buffer; its length. 0: there is none; -1: the mount has ended."""
        length = int(_fuse.fuse_session_receive_buf(self._session, ctypes.byref(self._buffer)))
        if length in (-errno.EAGAIN, -errno.EINTR):
            return 0
        return length if length > 0 else -1

    def _process(self) -> None:
        self._callbacks.begin(lambda: ctypes.string_at(self._buffer.mem, min(self._buffer.size, _MAX_NAMES)))
        _fuse.fuse_session_process_buf(self._session, ctypes.byref(self._buffer))

    def _failed(self, error: Exception) -> None:
        if self._hooks is None:
            raise error
        self._hooks.failed(self._callbacks.opcode, error)

    def close(self) -> None:
        """End the connection: every further access to the mount fails with ENOTCONN."""
        os.close(self._fd)
