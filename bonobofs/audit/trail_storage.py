"""Open, compress and remove the file of a trail: plain while its session lives, compressed after the session's end.

`trails/SESSION.jsonl.gz` contains the bytes of `trails/SESSION.jsonl`, and `zcat` reads it. It is a sequence of gzip
members, one for each block of the trail, so that a reader can start at any offset. All blocks but the last have the
same size. The last member is empty; its extra field (RFC 1952) is the index of the blocks. All paths in this module
name the plain form, and all offsets count its bytes, so that the cursors of readers survive the compression.
"""

from __future__ import annotations

import errno
import io
import itertools
import os
import struct
import zlib
from array import array
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, Final

from bonobofs.system.paths import regular_file

BLOCK: Final = 64 * 1024
_MOST_BLOCKS: Final = 16_000
"""An extra field has at most 65,535 bytes, and each block takes four of them. Longer trails have larger blocks."""
_LARGEST_BLOCK: Final = 16 * 1024 * 1024
_MEMBER: Final = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
_LAST_MEMBER: Final = b"\x1f\x8b\x08\x04\x00\x00\x00\x00\x00\xff"
_EXTRA: Final = struct.Struct("<H2sHIQ")
"""Size of the extra field, name and size of its only part, size of a block, size of the trail. Then follow the size of
each block's member (u32) and the offset of the last member (u64)."""
_NOTHING: Final = b"\x03\x00" + bytes(8)
"""An empty gzip member without its header."""
_OFFSET: Final = struct.Struct("<Q")


def compressed(trail: Path) -> Path:
    """Return the path of the compressed form of a trail."""
    return trail.with_name(f"{trail.name}.gz")


def open_trail(trail: Path) -> BinaryIO:
    """Open a trail for reading, plain or compressed. FileNotFoundError: neither exists.

    If both exist, a compression was interrupted, and the plain form is read. `form_problem` compares them. A damaged
    block reads as one line that is
    not an entry. A truncated compressed form ends with its last complete block.
    """
    try:
        return open(trail, "rb", opener=regular_file)
    except FileNotFoundError:
        # `compress` creates the compressed form before it removes the plain one.
        return _open_compressed(compressed(trail))


def stat_trail(trail: Path) -> os.stat_result:
    """Return the status of the form that `open_trail` opens. FileNotFoundError as there."""
    try:
        return trail.stat()
    except FileNotFoundError:
        return compressed(trail).stat()


def size_of(trail: Path) -> int:
    """Return the size of the plain form in bytes. FileNotFoundError as `open_trail`."""
    with open_trail(trail) as stream:
        return stream.seek(0, os.SEEK_END)


def form_problem(trail: Path) -> str:
    """Return what is wrong with the compressed form of a trail apart from its entries; "" if nothing is. OSError.

    An interrupted compression leaves both forms with the same content.
    """
    target = compressed(trail)
    try:
        with _open_blocks(target) as packed:
            if not packed.has_index:
                return f"{target} was changed or cut behind its last entry"
            with open(trail, "rb", opener=regular_file) as plain:
                differs = _digest(plain) != _digest(packed)
    except FileNotFoundError:
        return ""
    return f"{target} and {trail.name} have different content; move the wrong file away" if differs else ""


def compress(trail: Path) -> None:
    """Replace the plain form of an ended trail by the compressed form.

    The plain form is removed only when the compressed form is on the disk and was read back. A kill at any step leaves
    the plain form, the compressed form, or both. A compressed form of other content is not replaced. OSError: at least
    one complete form still exists.
    """
    target = compressed(trail)
    if problem := form_problem(trail):
        raise OSError(errno.EEXIST, problem)
    part = target.with_name(f"{target.name}.part")
    try:
        written = _write(trail, part)
        with _open_compressed(part) as stream:
            if _digest(stream) != written:
                raise OSError(errno.EIO, "the compressed trail does not read back")
        os.rename(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_directory(trail.parent)
    trail.unlink()
    sync_directory(trail.parent)


def remove(trail: Path) -> None:
    """Remove all forms of a trail. OSError."""
    target = compressed(trail)
    for path in (target.with_name(f"{target.name}.part"), trail, target):
        path.unlink(missing_ok=True)
    sync_directory(trail.parent)


def sync_directory(directory: Path) -> None:
    """Sync a directory to the disk. OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(trail: Path, part: Path) -> bytes:
    """Write the compressed form of a trail; return the SHA-256 of the plain form."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(trail, "rb", opener=regular_file) as plain, os.fdopen(os.open(part, flags, 0o600), "wb") as out:
        status = os.fstat(plain.fileno())
        block = max(BLOCK, -(-status.st_size // _MOST_BLOCKS))
        digest, total, sizes = sha256(), 0, array("I")
        while data := plain.read(block):
            digest.update(data)
            packer = zlib.compressobj(3, zlib.DEFLATED, -zlib.MAX_WBITS)
            ending = struct.pack("<II", zlib.crc32(data), len(data))
            sizes.append(out.write(b"".join((_MEMBER, packer.compress(data), packer.flush(), ending))))
            total += len(data)
        index = sizes.tobytes() + _OFFSET.pack(sum(sizes))
        part_size = _EXTRA.size - 6 + len(index)
        out.write(_LAST_MEMBER + _EXTRA.pack(part_size + 4, b"BF", part_size, block, total) + index + _NOTHING)
        out.flush()
        if os.geteuid() == 0:
            os.fchown(out.fileno(), status.st_uid, status.st_gid)
        os.utime(out.fileno(), ns=(status.st_atime_ns, status.st_mtime_ns))
        os.fsync(out.fileno())
    return digest.digest()


def _digest(stream: io.RawIOBase | BinaryIO) -> bytes:
    digest = sha256()
    while data := stream.read(1024 * 1024):
        digest.update(data)
    return digest.digest()


def _unpacked(packed: bytes, most: int) -> tuple[bytes, int]:
    """Return the content and size of the first gzip member; (b"", 0) if it is incomplete or larger than `most`."""
    unpacked = zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        data = unpacked.decompress(packed, most)
    except zlib.error:
        return b"", 0
    return (data, len(packed) - len(unpacked.unused_data)) if unpacked.eof else (b"", 0)


def _open_compressed(path: Path) -> BinaryIO:
    return io.BufferedReader(_open_blocks(path), BLOCK)


def _open_blocks(path: Path) -> _Blocks:
    return _Blocks(open(path, "rb", buffering=0, opener=regular_file))


class _Blocks(io.RawIOBase):
    """The plain bytes of a compressed trail."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self._position = 0
        self._cached: tuple[int, bytes] = (-1, b"")
        """Cache of the last block read: its number and its bytes."""
        try:
            index = self._index()
            self.has_index: Final = index is not None
            self._block, self._size, self._offsets = index or self._scan()
        except BaseException:
            file.close()
            raise

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._position >= self._size:
            return 0
        number, start = divmod(self._position, self._block)
        if self._cached[0] != number:
            self._cached = (number, self._read_block(number))
        data = self._cached[1][start : start + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def _read_block(self, number: int) -> bytes:
        size = min(self._block, self._size - number * self._block)
        begin, end = self._offsets[number : number + 2]
        data, _ = _unpacked(self._pread(end - begin, begin), size + 1)
        return data if len(data) == size else b"?" * (size - 1) + b"\n"

    def _index(self) -> tuple[int, int, list[int]] | None:
        """Return the size of a block, the size of the trail and the offsets of the members; None: no valid index."""
        size = os.fstat(self._file.fileno()).st_size
        ending = self._pread(_OFFSET.size + len(_NOTHING), size - _OFFSET.size - len(_NOTHING))
        if len(ending) != _OFFSET.size + len(_NOTHING):
            return None
        (offset,) = _OFFSET.unpack_from(ending)
        if not 0 <= size - offset < 2**17:
            return None
        member = self._pread(size - offset, offset)
        if not member.startswith(_LAST_MEMBER) or len(member) < len(_LAST_MEMBER) + _EXTRA.size:
            return None
        *_, block, total = _EXTRA.unpack_from(member, len(_LAST_MEMBER))
        sizes = member[len(_LAST_MEMBER) + _EXTRA.size : -len(ending)]
        if not 0 < block <= _LARGEST_BLOCK or len(sizes) != 4 * -(-total // block):
            return None
        offsets = list(itertools.accumulate(array("I", sizes), initial=0))
        return (block, total, offsets) if offsets[-1] == offset else None

    def _scan(self) -> tuple[int, int, list[int]]:
        """Return the same as `_index`, computed from the members up to the first incomplete one."""
        block, total, offsets = _LARGEST_BLOCK, 0, [0]
        while True:
            data, size = _unpacked(self._pread(2 * block, offsets[-1]), block)
            if not data or total % block:
                return block, total, offsets
            block = len(data) if not total else block
            total += len(data)
            offsets.append(offsets[-1] + size)

    def _pread(self, size: int, offset: int) -> bytes:
        return os.pread(self._file.fileno(), size, offset) if offset >= 0 else b""
