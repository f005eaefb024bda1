"""The kernel's FUSE protocol: structures, flags, and every opcode with its effect on the source.

Source: include/uapi/linux/fuse.h (protocol 7.45, Linux 6.18). Integers are in the machine's byte order, and
structures are aligned to eight bytes, so every format here starts with `=` and spells its padding.
"""

from __future__ import annotations

import enum
import os
import struct
import sys
from typing import Final

from bonobofs.errors import ProtocolError

KERNEL_VERSION: Final = 7
KERNEL_MINOR_VERSION: Final = 45
OLDEST_MINOR_VERSION: Final = 33
ROOT_ID: Final = 1


class RequestEffect(enum.Enum):
    """Effect of a request on the source."""

    CHANGES = "changes"
    READS = "reads"
    REFUSED = "refused"
    """Answered with ENOSYS: the kernel has a fallback, or the feature is not negotiated."""
    SILENT = "silent"
    """Without a reply."""


class Opcode(enum.IntEnum):
    """Every request of the protocol, in the kernel's numbering."""

    LOOKUP = 1
    FORGET = 2
    GETATTR = 3
    SETATTR = 4
    READLINK = 5
    SYMLINK = 6
    MKNOD = 8
    MKDIR = 9
    UNLINK = 10
    RMDIR = 11
    RENAME = 12
    LINK = 13
    OPEN = 14
    READ = 15
    WRITE = 16
    STATFS = 17
    RELEASE = 18
    FSYNC = 20
    SETXATTR = 21
    GETXATTR = 22
    LISTXATTR = 23
    REMOVEXATTR = 24
    FLUSH = 25
    INIT = 26
    OPENDIR = 27
    READDIR = 28
    RELEASEDIR = 29
    FSYNCDIR = 30
    GETLK = 31
    SETLK = 32
    SETLKW = 33
    ACCESS = 34
    CREATE = 35
    INTERRUPT = 36
    BMAP = 37
    DESTROY = 38
    IOCTL = 39
    POLL = 40
    NOTIFY_REPLY = 41
    BATCH_FORGET = 42
    FALLOCATE = 43
    READDIRPLUS = 44
    RENAME2 = 45
    LSEEK = 46
    COPY_FILE_RANGE = 47
    SETUPMAPPING = 48
    REMOVEMAPPING = 49
    SYNCFS = 50
    TMPFILE = 51
    STATX = 52
    COPY_FILE_RANGE_64 = 53
    CUSE_INIT = 4096


ROLES: Final[dict[Opcode, RequestEffect]] = {
    Opcode.LOOKUP: RequestEffect.READS,
    Opcode.FORGET: RequestEffect.SILENT,
    Opcode.GETATTR: RequestEffect.READS,
    Opcode.SETATTR: RequestEffect.CHANGES,
    Opcode.READLINK: RequestEffect.READS,
    Opcode.SYMLINK: RequestEffect.CHANGES,
    Opcode.MKNOD: RequestEffect.CHANGES,
    Opcode.MKDIR: RequestEffect.CHANGES,
    Opcode.UNLINK: RequestEffect.CHANGES,
    Opcode.RMDIR: RequestEffect.CHANGES,
    Opcode.RENAME: RequestEffect.CHANGES,
    Opcode.LINK: RequestEffect.CHANGES,
    Opcode.OPEN: RequestEffect.REFUSED,
    Opcode.READ: RequestEffect.READS,
    Opcode.WRITE: RequestEffect.CHANGES,
    Opcode.STATFS: RequestEffect.READS,
    Opcode.RELEASE: RequestEffect.READS,
    Opcode.FSYNC: RequestEffect.READS,
    Opcode.SETXATTR: RequestEffect.CHANGES,
    Opcode.GETXATTR: RequestEffect.READS,
    Opcode.LISTXATTR: RequestEffect.READS,
    Opcode.REMOVEXATTR: RequestEffect.CHANGES,
    Opcode.FLUSH: RequestEffect.REFUSED,
    Opcode.INIT: RequestEffect.READS,
    Opcode.OPENDIR: RequestEffect.REFUSED,
    Opcode.READDIR: RequestEffect.READS,
    Opcode.RELEASEDIR: RequestEffect.READS,
    Opcode.FSYNCDIR: RequestEffect.READS,
    Opcode.GETLK: RequestEffect.REFUSED,
    Opcode.SETLK: RequestEffect.REFUSED,
    Opcode.SETLKW: RequestEffect.REFUSED,
    Opcode.ACCESS: RequestEffect.REFUSED,
    Opcode.CREATE: RequestEffect.CHANGES,
    Opcode.INTERRUPT: RequestEffect.SILENT,
    Opcode.BMAP: RequestEffect.REFUSED,
    Opcode.DESTROY: RequestEffect.READS,
    Opcode.IOCTL: RequestEffect.REFUSED,
    Opcode.POLL: RequestEffect.REFUSED,
    Opcode.NOTIFY_REPLY: RequestEffect.SILENT,
    Opcode.BATCH_FORGET: RequestEffect.SILENT,
    Opcode.FALLOCATE: RequestEffect.CHANGES,
    Opcode.READDIRPLUS: RequestEffect.READS,
    Opcode.RENAME2: RequestEffect.CHANGES,
    Opcode.LSEEK: RequestEffect.READS,
    Opcode.COPY_FILE_RANGE: RequestEffect.CHANGES,
    Opcode.SETUPMAPPING: RequestEffect.REFUSED,
    Opcode.REMOVEMAPPING: RequestEffect.REFUSED,
    Opcode.SYNCFS: RequestEffect.READS,
    Opcode.TMPFILE: RequestEffect.REFUSED,
    Opcode.STATX: RequestEffect.REFUSED,
    Opcode.COPY_FILE_RANGE_64: RequestEffect.CHANGES,
    Opcode.CUSE_INIT: RequestEffect.REFUSED,
}
"""The kernel sends no ACCESS under `default_permissions`. It keeps locks itself, as FLOCK_LOCKS and POSIX_LOCKS are not
negotiated. IOCTL includes chattr, a change for which there is no rule."""


class Init(enum.IntFlag):
    """Flags of INIT. `flags2` carries the high half."""

    ASYNC_READ = 1 << 0
    BIG_WRITES = 1 << 5
    DONT_MASK = 1 << 6
    AUTO_INVAL_DATA = 1 << 12
    DO_READDIRPLUS = 1 << 13
    ASYNC_DIO = 1 << 15
    NO_OPEN_SUPPORT = 1 << 17
    PARALLEL_DIROPS = 1 << 18
    POSIX_ACL = 1 << 20
    MAX_PAGES = 1 << 22
    CACHE_SYMLINKS = 1 << 23
    NO_OPENDIR_SUPPORT = 1 << 24
    EXPLICIT_INVAL_DATA = 1 << 25
    HANDLE_KILLPRIV_V2 = 1 << 28
    SETXATTR_EXT = 1 << 29
    INIT_EXT = 1 << 30
    CREATE_SUPP_GROUP = 1 << 34


class Set(enum.IntFlag):
    """`valid` of SETATTR."""

    MODE = 1 << 0
    UID = 1 << 1
    GID = 1 << 2
    SIZE = 1 << 3
    ATIME = 1 << 4
    MTIME = 1 << 5
    FH = 1 << 6
    ATIME_NOW = 1 << 7
    MTIME_NOW = 1 << 8
    LOCKOWNER = 1 << 9
    CTIME = 1 << 10
    KILL_SUIDGID = 1 << 11


WRITE_CACHE: Final = 1 << 0
WRITE_KILL_SUIDGID: Final = 1 << 2
SETXATTR_ACL_KILL_SGID: Final = 1 << 0
OPEN_KEEP_CACHE: Final = 1 << 1
OPEN_NOFLUSH: Final = 1 << 5
EXT_GROUPS: Final = 32

NOTIFY_INVAL_INODE: Final = 2
NOTIFY_INVAL_ENTRY: Final = 3
NOTIFY_INC_EPOCH: Final = 8
EPOCH_MINOR_VERSION: Final = 44
NOTIFY_PRUNE: Final = 9
PRUNE_MINOR_VERSION: Final = 45

MAX_PAGES: Final = 256
MAX_WRITE: Final = MAX_PAGES * 4096

IN_HEADER: Final = struct.Struct("=IIQQIIIHH")
"""len, opcode, unique, nodeid, uid, gid, pid, total_extlen (in units of eight bytes), padding"""
OUT_HEADER: Final = struct.Struct("=IiQ")
"""len, -errno (or a notification's number), unique (0 in a notification)"""
IN_SIZE: Final = IN_HEADER.size
OUT_SIZE: Final = OUT_HEADER.size
BUFFER_SIZE: Final = MAX_WRITE + 4096

INIT_IN: Final = struct.Struct("=IIII")
INIT_IN_FLAGS2: Final = struct.Struct("=I")
INIT_OUT: Final = struct.Struct("=IIIIHHIIHHII24x")
"""major, minor, max_readahead, flags, max_background, congestion_threshold, max_write, time_gran, max_pages,
map_alignment, flags2, max_stack_depth; request_timeout and the rest stay zero"""

ATTR: Final = struct.Struct("=QQQqqqIIIIIIIIII")
"""ino, size, blocks, atime, mtime, ctime, atimensec, mtimensec, ctimensec, mode, nlink, uid, gid, rdev, blksize,
flags"""
ENTRY_OUT: Final = struct.Struct("=QQQQII")
"""nodeid, generation, entry_valid, attr_valid (s), entry_valid_nsec, attr_valid_nsec; then ATTR"""
NODE_ID: Final = struct.Struct("=Q")
"""The first field of ENTRY_OUT"""
ATTR_OUT: Final = struct.Struct("=QII")
"""attr_valid (s), attr_valid_nsec, dummy; then ATTR"""
OPEN_OUT: Final = struct.Struct("=QII")
DIRENT: Final = struct.Struct("=QQII")
"""ino, off, namelen, type; then the name, padded to eight bytes"""
STATFS_OUT: Final = struct.Struct("=QQQQQIIII24x")
WRITE_OUT: Final = struct.Struct("=II")
LSEEK_OUT: Final = struct.Struct("=Q")
XATTR_OUT: Final = struct.Struct("=II")
COPY_OUT: Final = struct.Struct("=Q")

FORGET_IN: Final = struct.Struct("=Q")
BATCH_FORGET_IN: Final = struct.Struct("=II")
FORGET_ONE: Final = struct.Struct("=QQ")
SETATTR_IN: Final = struct.Struct("=IIQQQQQQIIIIIIII")
"""valid, padding, fh, size, lock_owner, atime, mtime, ctime, atimensec, mtimensec, ctimensec, mode, unused4, uid,
gid, unused5"""
MKNOD_IN: Final = struct.Struct("=IIII")
MKDIR_IN: Final = struct.Struct("=II")
RENAME_IN: Final = struct.Struct("=Q")
RENAME2_IN: Final = struct.Struct("=QII")
LINK_IN: Final = struct.Struct("=Q")
READ_IN: Final = struct.Struct("=QQIIQII")
"""fh, offset, size, read_flags, lock_owner, flags, padding; READDIR and READDIRPLUS too"""
WRITE_IN: Final = struct.Struct("=QQIIQII")
"""fh, offset, size, write_flags, lock_owner, flags, padding; then the data"""
FSYNC_IN: Final = struct.Struct("=QII")
SETXATTR_IN: Final = struct.Struct("=IIII")
GETXATTR_IN: Final = struct.Struct("=II")
CREATE_IN: Final = struct.Struct("=IIII")
"""flags, mode, umask, open_flags"""
FALLOCATE_IN: Final = struct.Struct("=QQQII")
LSEEK_IN: Final = struct.Struct("=QqII")
COPY_FILE_RANGE_IN: Final = struct.Struct("=QQQQQQQ")
"""fh_in, off_in, nodeid_out, fh_out, off_out, len, flags"""
EXT_HEADER: Final = struct.Struct("=II")
SUPP_GROUPS: Final = struct.Struct("=I")
INVAL_INODE_OUT: Final = struct.Struct("=Qqq")
INVAL_ENTRY_OUT: Final = struct.Struct("=QII")
PRUNE_OUT: Final = struct.Struct("=IIQ")
"""count, padding, spare; then the node ids"""

_SECOND: Final = 1_000_000_000
_LINKS_AT: Final = struct.calcsize("=QQQqqqIIII")


def pack_attr(st: os.stat_result) -> bytes:
    """`fuse_attr` of a file in the source, unchanged: git hashes a file again if inode, owner or time differs."""
    rdev = st.st_rdev
    if rdev:
        major, minor = os.major(rdev), os.minor(rdev)
        rdev = (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)
    accessed, modified, changed = st.st_atime_ns, st.st_mtime_ns, st.st_ctime_ns
    return ATTR.pack(
        st.st_ino,
        st.st_size,
        st.st_blocks,
        accessed // _SECOND,
        modified // _SECOND,
        changed // _SECOND,
        accessed % _SECOND,
        modified % _SECOND,
        changed % _SECOND,
        st.st_mode,
        st.st_nlink,
        st.st_uid,
        st.st_gid,
        rdev,
        st.st_blksize,
        0,
    )


def with_links(attr: bytes, links: int) -> bytes:
    """The same `fuse_attr` with another link count."""
    return attr[:_LINKS_AT] + links.to_bytes(4, sys.byteorder) + attr[_LINKS_AT + 4 :]


def with_number(attr: bytes, number: int) -> bytes:
    """The same `fuse_attr` with another inode number."""
    return number.to_bytes(8, sys.byteorder) + attr[8:]


def with_owner(attr: bytes, uid: int, rights: int) -> bytes:
    """The same `fuse_attr` with another owner, who has these rights (rwx)."""
    values = list(ATTR.unpack(attr))
    values[9] = values[9] & ~0o700 | rights << 6
    values[11] = uid
    return ATTR.pack(*values)


def readable(attr: bytes) -> bytes:
    """The same `fuse_attr`, readable by every user."""
    values = list(ATTR.unpack(attr))
    values[9] |= 0o555 if values[9] & 0o170000 == 0o040000 else 0o444
    return ATTR.pack(*values)


def with_cache_timeout(seconds: int, entry: bytes) -> bytes:
    """The same `fuse_entry_out` with a cache timeout in seconds for name and attributes."""
    return ENTRY_OUT.pack(*ENTRY_OUT.unpack_from(entry)[:2], seconds, seconds, 0, 0) + entry[ENTRY_OUT.size :]


def unpack_rdev(rdev: int) -> int:
    """The kernel's 32-bit device number (new_encode_dev) as `os.mknod` takes it."""
    return os.makedev((rdev >> 8) & 0xFFF, (rdev & 0xFF) | ((rdev >> 12) & 0xFFF00))


def strings(body: memoryview, count: int) -> list[bytes]:
    """The `count` NUL-terminated strings at the start of `body`. ProtocolError: one has no end."""
    parts = bytes(body).split(b"\0", count)
    if len(parts) <= count:
        raise ProtocolError("a string in the request has no end")
    return parts[:count]


def checked_name(name: bytes) -> bytes:
    """`name`, if it is one path component, as the kernel guarantees. ProtocolError otherwise."""
    if not name or b"/" in name or name in (b".", b".."):
        raise ProtocolError("a name in the request is not a path component")
    return name


def supplementary_groups(body: memoryview, total_extlen: int) -> tuple[int, ...]:
    """The caller's groups, which CREATE_SUPP_GROUP appends to a request that creates; (): none."""
    start = len(body) - total_extlen * 8
    if start < 0:
        raise ProtocolError("the request's extensions are longer than the request")
    while start + EXT_HEADER.size <= len(body):
        size, kind = EXT_HEADER.unpack_from(body, start)
        if size < EXT_HEADER.size or start + size > len(body):
            raise ProtocolError("an extension of the request has an invalid length")
        if kind == EXT_GROUPS and size >= EXT_HEADER.size + SUPP_GROUPS.size:
            (count,) = SUPP_GROUPS.unpack_from(body, start + EXT_HEADER.size)
            first = start + EXT_HEADER.size + SUPP_GROUPS.size
            if first + 4 * count > start + size:
                raise ProtocolError("the caller's groups are truncated")
            return struct.unpack_from(f"={count}I", body, first)
        start += size
    return ()
