"""Messages by hypothesis: valid ones with all values, truncated ones, and noise."""

from __future__ import annotations

import os
import struct
from typing import Final, NamedTuple

from hypothesis import strategies as st

from bonobofs.fuse import abi as p
from bonobofs.fuse import virtual_dir

NAMES: Final = (b"a.md", b"b.md", b"new.md", b"sub", b"link", b"hard.md", b"docs", b"closed", b"x.txt", b"d")
_ODD: Final = (
    b"",
    b".",
    b"..",
    b"a/b",
    b"../outside",
    b".git",
    b".bonobofs",
    b"\xff.md",
    b"n" * 255 + b".md",
    b"x" * 300,
)
_EDGES: Final = (0, 1, 2, 7, 8, 4096, 99_999, 100_000, 100_001, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
_WIDE: Final = (*_EDGES, (1 << 62), (1 << 63) - 1, 1 << 63, (1 << 64) - 1)

names = st.sampled_from(NAMES) | st.sampled_from(NAMES) | st.sampled_from(_ODD)
nodes = st.integers(1, 9) | st.sampled_from(
    (p.ROOT_ID, virtual_dir.FIRST_ID, virtual_dir.FIRST_ID + 1, 0, 1 << 40, (1 << 64) - 1)
)
u32 = st.integers(0, 64) | st.sampled_from(_EDGES)
u64 = st.integers(0, 64) | st.sampled_from(_WIDE)
modes = st.sampled_from((0o644, 0o600, 0o755, 0o4755, 0o777, 0)) | st.integers(0, (1 << 32) - 1)
types = st.sampled_from((0o100000, 0o010000, 0o140000, 0o020000, 0o060000, 0o120000, 0o040000, 0))
data = st.sampled_from((b"", b"#", b"!", b"#!", b"text", b"\x7fELF", b"asm", bytes(5000), bytes(120_000))) | st.binary(
    max_size=20
)
xattrs = st.sampled_from(
    (b"user.x", b"user.bonobofs.why", b"system.posix_acl_access", b"system.posix_acl_default", b"trusted.x", b"x", b"")
)
acls = st.sampled_from((b"", struct.pack("<I" + "HHI" * 3, 2, 1, 7, 2**32 - 1, 4, 7, 2**32 - 1, 32, 7, 2**32 - 1)))
flags = st.sampled_from((os.O_RDONLY, os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND, os.O_RDWR | os.O_EXCL)) | u32


class Message(NamedTuple):
    """A request, before it is sent."""

    opcode: int
    node: int
    body: bytes
    uid: int = 0
    extensions: int = 0


def _packed(structure: struct.Struct, *fields: st.SearchStrategy[int]) -> st.SearchStrategy[bytes]:
    unsigned = struct.Struct(structure.format.upper())
    bits = [struct.calcsize(f"={code}") * 8 for code in unsigned.format.lstrip("=")]

    def pack(values: tuple[int, ...]) -> bytes:
        return unsigned.pack(*(value & ((1 << size) - 1) for value, size in zip(values, bits, strict=True)))

    return st.tuples(*fields).map(pack)


def _ended(*parts: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.tuples(*(part.map(lambda text: text + b"\0") for part in parts)).map(b"".join)


def _joined(*parts: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return st.tuples(*parts).map(b"".join)


@st.composite
def _writes(draw: st.DrawFn) -> bytes:
    content = draw(data)
    size = draw(st.just(len(content)) | u32)
    return (
        p.WRITE_IN.pack(0, draw(u64), size & 0xFFFFFFFF, draw(st.integers(0, 7)), 0, draw(flags) & 0xFFFFFFFF, 0)
        + content
    )


@st.composite
def _setxattrs(draw: st.DrawFn) -> bytes:
    value = draw(data | acls)
    size = draw(st.just(len(value)) | u32)
    head = p.SETXATTR_IN.pack(size & 0xFFFFFFFF, draw(st.integers(0, 3) | u32) & 0xFFFFFFFF, draw(st.integers(0, 1)), 0)
    return head + draw(xattrs) + b"\0" + value


@st.composite
def _allocations(draw: st.DrawFn) -> bytes:
    """Lengths between two megabytes and what no disk has are left out: they would only fill it."""
    length = draw(st.sampled_from((0, 1, 8, 4096, 99_999, 200_000, 1 << 62, (1 << 64) - 1)))
    return p.FALLOCATE_IN.pack(0, draw(st.sampled_from((0, 1, 8, 4096, 99_999))), length, draw(st.integers(0, 127)), 0)


o = p.Opcode
_valid = st.sampled_from(
    (
        p.Set.SIZE,
        p.Set.SIZE | p.Set.KILL_SUIDGID | p.Set.LOCKOWNER,
        p.Set.SIZE | p.Set.FH | p.Set.MTIME,
        p.Set.MODE,
        p.Set.UID | p.Set.GID | p.Set.KILL_SUIDGID,
        p.Set.GID,
        p.Set.ATIME | p.Set.MTIME,
        p.Set.ATIME | p.Set.ATIME_NOW | p.Set.MTIME | p.Set.MTIME_NOW,
        p.Set.MTIME,
        p.Set.CTIME,
        0,
    )
)
"""What one system call sets together."""
_setattr = _packed(
    p.SETATTR_IN, _valid, u32, u64, u64, u64, u64, u64, u64, u32, u32, u32, modes, u32,
    st.sampled_from((0, 65534, (1 << 32) - 1)), st.sampled_from((0, 65534)), u32,
)  # fmt: skip
_copies = _packed(p.COPY_FILE_RANGE_IN, u64, u64, nodes, u64, u64, u64, u64)
_reads = _packed(p.READ_IN, u64, u64, u32, u32, u64, u32, u32)
BODIES: Final[dict[int, st.SearchStrategy[bytes]]] = {
    o.LOOKUP: _ended(names),
    o.FORGET: _packed(p.FORGET_IN, st.integers(0, 3)),
    o.BATCH_FORGET: _joined(_packed(p.BATCH_FORGET_IN, st.integers(0, 2) | u32, u32), st.binary(max_size=40)),
    o.GETATTR: st.binary(max_size=16),
    o.SETATTR: _setattr,
    o.READLINK: st.just(b""),
    o.SYMLINK: _ended(names, names | st.sampled_from((b"/etc", b"../closed", b"../../x", b"../.git", b"b.md"))),
    o.MKNOD: _joined(_packed(p.MKNOD_IN, st.tuples(modes, types).map(sum), u32, u32, u32), _ended(names)),
    o.MKDIR: _joined(_packed(p.MKDIR_IN, modes, u32), _ended(names)),
    o.UNLINK: _ended(names),
    o.RMDIR: _ended(names),
    o.RENAME: _joined(_packed(p.RENAME_IN, nodes), _ended(names, names)),
    o.RENAME2: _joined(_packed(p.RENAME2_IN, nodes, st.integers(0, 4), u32), _ended(names, names)),
    o.LINK: _joined(_packed(p.LINK_IN, nodes), _ended(names)),
    o.READ: _reads,
    o.WRITE: _writes(),
    o.STATFS: st.just(b""),
    o.FSYNC: _packed(p.FSYNC_IN, u64, u32, u32),
    o.SETXATTR: _setxattrs(),
    o.GETXATTR: _joined(_packed(p.GETXATTR_IN, u32, u32), _ended(xattrs)),
    o.LISTXATTR: _packed(p.GETXATTR_IN, u32, u32),
    o.REMOVEXATTR: _ended(xattrs),
    o.CREATE: _joined(_packed(p.CREATE_IN, flags, modes, st.sampled_from((0, 0o22, 0o777)) | u32, u32), _ended(names)),
    o.FALLOCATE: _allocations(),
    o.READDIR: _reads,
    o.READDIRPLUS: _reads,
    o.LSEEK: _packed(p.LSEEK_IN, u64, u64, st.integers(0, 5), u32),
    o.COPY_FILE_RANGE: _copies,
    o.COPY_FILE_RANGE_64: _copies,
}

users = st.sampled_from((0, 0, 0, 65534))


@st.composite
def sound(draw: st.DrawFn) -> Message:
    """A request as the kernel forms it, with values that it may never send."""
    opcode = draw(st.sampled_from(list(BODIES)))
    body = draw(BODIES[opcode])
    # Two groups of the caller, as CREATE_SUPP_GROUP appends them, or a length of which nothing is true.
    extensions = draw(st.sampled_from((0, 0, 0, 3, 1, 9, 65535)))
    if extensions == 3:
        body += bytes(-len(body) & 7) + p.EXT_HEADER.pack(24, p.EXT_GROUPS) + struct.pack("=4I", 2, 0, 65534, 0)
    return Message(opcode, draw(nodes), body, draw(users), extensions)


@st.composite
def cut(draw: st.DrawFn) -> Message:
    """The same, cut short or with some of its bytes changed."""
    message = draw(sound())
    body = bytearray(message.body)
    if message.opcode != o.FALLOCATE:
        for at, byte in draw(st.lists(st.tuples(st.integers(0, 80), st.integers(0, 255)), max_size=3)):
            if at < len(body):
                body[at] = byte
    return message._replace(body=bytes(body[: draw(st.integers(0, len(body)))]))


@st.composite
def noise(draw: st.DrawFn) -> Message:
    """Any bytes to any handler but one: most lengths that FALLOCATE could read there would fill the disk."""
    opcodes = st.sampled_from([*(each for each in p.Opcode if each != o.FALLOCATE)]) | st.integers(60, 70)
    return Message(draw(opcodes), draw(nodes), draw(st.binary(max_size=120)), draw(users), draw(st.integers(0, 65535)))
