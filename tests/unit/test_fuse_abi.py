"""The protocol tables equal the kernel's own header, and the parsers refuse malformed requests."""

from __future__ import annotations

import os
import re
import struct
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bonobofs.errors import ProtocolError
from bonobofs.fuse import abi as p

HEADER: Final = Path("/usr/include/linux/fuse.h")
"""Of the package linux-libc-dev. It may be older or newer than what is spoken here."""
BSWAP: Final = {"CUSE_INIT_BSWAP_RESERVED", "FUSE_INIT_BSWAP_RESERVED"}


def _defined(prefix: str) -> dict[str, int]:
    """Flags of the header by name, without the prefix."""
    found = re.findall(rf"^#define {prefix}(\w+)\s+\(1(?:U|UL|ULL)?\s*<<\s*(\d+)\)", HEADER.read_text(), re.MULTILINE)
    return {name: 1 << int(bit) for name, bit in found}


def _opcodes() -> dict[str, int]:
    (body,) = re.findall(r"enum fuse_opcode \{(.*?)\n\};", HEADER.read_text(), re.DOTALL)
    return {name: int(number) for name, number in re.findall(r"(\w+)\s*=\s*(\d+)", body)}


def test_every_opcode_of_the_protocol_is_listed() -> None:
    """All numbers up to 53 that the kernel uses, and that of CUSE."""
    assert {int(opcode) for opcode in p.Opcode} == {*range(1, 54), 4096} - {7, 19}


def test_every_opcode_of_the_installed_header_is_listed_under_its_name() -> None:
    """The test fails if a newer kernel header has an additional request."""
    ours = {opcode.name: int(opcode) for opcode in p.Opcode}
    theirs = {name.removeprefix("FUSE_"): number for name, number in _opcodes().items() if name not in BSWAP}
    assert len(theirs) > 45
    assert {name: ours.get(name) for name in theirs} == theirs


def test_every_opcode_is_classified() -> None:
    """The table of effects has every opcode."""
    assert set(p.ROLES) == set(p.Opcode)


def test_the_changing_opcodes_are_those_of_the_design() -> None:
    """The policy judges each of them."""
    changing = "CREATE WRITE SETATTR FALLOCATE COPY_FILE_RANGE COPY_FILE_RANGE_64 UNLINK RMDIR RENAME RENAME2 LINK"
    changing += " SYMLINK MKDIR MKNOD SETXATTR REMOVEXATTR"
    assert {opcode.name for opcode, role in p.ROLES.items() if role is p.RequestEffect.CHANGES} == set(changing.split())


@pytest.mark.parametrize(("prefix", "flags"), [("FUSE_", p.Init), ("FATTR_", p.Set)])
def test_flags_have_the_kernels_values(prefix: str, flags: type[p.Init | p.Set]) -> None:
    """A flag with a wrong bit would negotiate another feature."""
    theirs = _defined(prefix)
    ours = {str(flag.name): int(flag) for flag in flags}
    assert len(ours.keys() & theirs.keys()) > 10
    assert {name: bit for name, bit in ours.items() if theirs.get(name, bit) != bit} == {}


def test_structures_have_the_kernels_sizes() -> None:
    """A structure with another size would shift every later field."""
    sizes = {
        p.IN_HEADER: 40,
        p.OUT_HEADER: 16,
        p.INIT_OUT: 64,
        p.ATTR: 88,
        p.ENTRY_OUT: 40,
        p.ATTR_OUT: 16,
        p.OPEN_OUT: 16,
        p.DIRENT: 24,
        p.STATFS_OUT: 80,
        p.SETATTR_IN: 88,
        p.READ_IN: 40,
        p.WRITE_IN: 40,
        p.CREATE_IN: 16,
        p.MKNOD_IN: 16,
        p.MKDIR_IN: 8,
        p.RENAME2_IN: 16,
        p.SETXATTR_IN: 16,
        p.GETXATTR_IN: 8,
        p.FSYNC_IN: 16,
        p.FALLOCATE_IN: 32,
        p.LSEEK_IN: 24,
        p.COPY_FILE_RANGE_IN: 56,
        p.INVAL_INODE_OUT: 24,
        p.INVAL_ENTRY_OUT: 16,
    }
    assert {known.format: known.size for known in sizes} == {known.format: size for known, size in sizes.items()}


def test_attributes_are_passed_on_unchanged(tmp_path: Path) -> None:
    """Every field of stat, to the nanosecond, also for times before 1970."""
    file = tmp_path / "file"
    file.write_text("content")
    os.utime(file, ns=(-1_500_000_001, 4_102_444_800_123_456_789))
    below = file.stat()
    ino, size, blocks, at, mt, ct, atn, mtn, ctn, mode, nlink, uid, gid, _, blksize, _ = p.ATTR.unpack(
        p.pack_attr(below)
    )
    assert (ino, size, blocks, mode, nlink) == (below.st_ino, 7, below.st_blocks, below.st_mode, 1)
    assert (uid, gid, blksize) == (below.st_uid, below.st_gid, below.st_blksize)
    seen = (at * 10**9 + atn, mt * 10**9 + mtn, ct * 10**9 + ctn)
    assert seen == (below.st_atime_ns, below.st_mtime_ns, below.st_ctime_ns)


@given(st.integers(0, 0xFFF), st.integers(0, 0xFFFFF))
def test_device_numbers_are_read_as_the_kernel_writes_them(major: int, minor: int) -> None:
    """12 bits of major and 20 bits of minor."""
    packed = (minor & 0xFF) | (major << 8) | ((minor & ~0xFF) << 12)
    assert p.unpack_rdev(packed) == os.makedev(major, minor)


@given(st.binary(max_size=200), st.integers(0, 3))
def test_strings_are_terminated_or_refused(body: bytes, count: int) -> None:
    """A string without an end is refused, and nothing beyond the request is read."""
    try:
        found = p.strings(memoryview(body), count)
    except ProtocolError:
        assert body.count(0) < count
    else:
        assert b"".join(name + b"\0" for name in found) == body[: sum(len(name) + 1 for name in found)]


@given(st.binary(max_size=60))
def test_a_name_is_one_path_component(name: bytes) -> None:
    """A name that the policy judges cannot lead elsewhere."""
    try:
        assert p.checked_name(name) == name
    except ProtocolError:
        assert name in (b"", b".", b"..") or b"/" in name
    else:
        assert os.path.basename(name) == name
        assert os.path.normpath(os.path.join(b"/above", name)) == b"/above/" + name


@given(st.binary(max_size=120), st.integers(0, 40))
def test_malformed_extensions_are_refused(body: bytes, words: int) -> None:
    """Any bytes in place of the caller's groups give groups or a ProtocolError."""
    try:
        groups = p.supplementary_groups(memoryview(body), words)
    except ProtocolError:
        return
    assert len(groups) * 4 <= len(body)


def test_the_callers_groups_are_read() -> None:
    """The extension of CREATE_SUPP_GROUP is at the end of the request."""
    groups = struct.pack("=III", 2, 100, 200)
    extension = struct.pack("=II", 8 + 12 + 4, p.EXT_GROUPS) + groups + bytes(4)
    other = struct.pack("=II", 16, 1) + bytes(8)
    body = b"name\0\0\0\0" + other + extension
    assert p.supplementary_groups(memoryview(body), len(other + extension) // 8) == (100, 200)
