"""fallocate(2), SEEK_DATA and SEEK_HOLE, copy_file_range(2): space taken, given back, found and copied."""

from __future__ import annotations

import os
import random

from tests.posix.harness import ANY, See, case
from tests.support.syscalls import (
    FALLOC_COLLAPSE_RANGE,
    FALLOC_INSERT_RANGE,
    FALLOC_KEEP_SIZE,
    FALLOC_PUNCH_HOLE,
    FALLOC_ZERO_RANGE,
    fallocate,
    make,
    opened,
    read,
    size,
    tick,
    times,
)

BLOCK = 4096


def _blocks(fd: int) -> int:
    os.fsync(fd)
    return os.fstat(fd).st_blocks


@case()
def test_allocate(see: See) -> None:
    """Allocated space reads as zeros, lengthens the file, and is there."""
    make("a.md", b"abc")
    with opened("a.md") as fd:
        see("allocate", None, fallocate, fd, 0, 0, 10 * BLOCK)
        see("size", 10 * BLOCK, size, fd)
        see("blocks", 80, _blocks, fd)
        see("content", b"abc" + bytes(10), os.pread, fd, 13, 0)
        see("within the file", None, fallocate, fd, 0, 0, BLOCK)
        see("size stays", 10 * BLOCK, size, fd)
        see("posix_fallocate", None, os.posix_fallocate, fd, 10 * BLOCK, 1)
        see("size after", 10 * BLOCK + 1, size, fd)


@case()
def test_allocate_beyond(see: See) -> None:
    """With KEEP_SIZE space is taken beyond the end, and the end stays."""
    make("a.md", b"abc")
    with opened("a.md") as fd:
        see("allocate", None, fallocate, fd, FALLOC_KEEP_SIZE, 0, 20 * BLOCK)
        see("size", 3, size, fd)
        see("blocks", 160, _blocks, fd)
        see("write there", 1, os.pwrite, fd, b"x", 5 * BLOCK)
        see("size then", 5 * BLOCK + 1, size, fd)
        see("between", bytes(10), os.pread, fd, 10, BLOCK)


@case()
def test_punch(see: See) -> None:
    """A hole reads as zeros, keeps the size, and gives its blocks back."""
    make("a.md", b"x" * 10 * BLOCK)
    with opened("a.md") as fd:
        before = _blocks(fd)
        see("punch", None, fallocate, fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 2 * BLOCK, 3 * BLOCK)
        see("content", b"x" + bytes(3 * BLOCK) + b"x", os.pread, fd, 3 * BLOCK + 2, 2 * BLOCK - 1)
        see("size", 10 * BLOCK, size, fd)
        see("blocks given back", 24, lambda: before - _blocks(fd))
        see("not aligned", None, fallocate, fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 100, 200)
        see("its content", b"x" * 100 + bytes(200) + b"x", os.pread, fd, 301, 0)
        see("beyond the end", None, fallocate, fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 20 * BLOCK, BLOCK)
        see("without KEEP_SIZE", "EOPNOTSUPP", fallocate, fd, FALLOC_PUNCH_HOLE, 0, BLOCK)
        see("size in the end", 10 * BLOCK, size, fd)


@case()
def test_zero(see: See) -> None:
    """A range is zeroed, with and without lengthening the file."""
    make("a.md", b"x" * 4 * BLOCK)
    with opened("a.md") as fd:
        see("zero", None, fallocate, fd, FALLOC_ZERO_RANGE, 10, 5000)
        see("content", b"x" * 10 + bytes(5000) + b"x", os.pread, fd, 5011, 0)
        see("across the end", None, fallocate, fd, FALLOC_ZERO_RANGE, 3 * BLOCK, 3 * BLOCK)
        see("size", 6 * BLOCK, size, fd)
        see("keeping the size", None, fallocate, fd, FALLOC_ZERO_RANGE | FALLOC_KEEP_SIZE, 5 * BLOCK, 5 * BLOCK)
        see("size then", 6 * BLOCK, size, fd)


@case()
def test_collapse_and_insert(see: See) -> None:
    """Ranges can be cut out of a file and put in."""
    make("a.md", b"a" * BLOCK + b"b" * BLOCK + b"c" * BLOCK)
    with opened("a.md") as fd:
        see("collapse", None, fallocate, fd, FALLOC_COLLAPSE_RANGE, BLOCK, BLOCK)
        see("size", 2 * BLOCK, size, fd)
        see("insert", None, fallocate, fd, FALLOC_INSERT_RANGE, BLOCK, BLOCK)
        see("content", b"a" + b"\0", os.pread, fd, 2, BLOCK - 1)


@case()
def test_allocate_errors(see: See) -> None:
    """Lengths that make no sense, descriptors that do not write, and what is no file."""
    make("a.md", b"abc")
    os.mkdir("d")
    with opened("a.md") as fd, opened("a.md", os.O_RDONLY) as reader, opened("d", os.O_RDONLY) as directory:
        see("no length", "EINVAL", fallocate, fd, 0, 0, 0)
        see("negative", "EINVAL", fallocate, fd, 0, -1, 10)
        see("negative length", "EINVAL", fallocate, fd, 0, 0, -10)
        see("unknown mode", "EOPNOTSUPP", fallocate, fd, 1 << 20, 0, 10)
        see("a reader", "EBADF", fallocate, reader, 0, 0, 10)
        see("a directory", "EBADF", fallocate, directory, 0, 0, 10)
        see("too far", "EFBIG", fallocate, fd, 0, (1 << 63) - 100, 1000)
        see("size", 3, size, fd)


@case()
def test_allocate_stamps(see: See) -> None:
    """Allocating and punching stamp the file."""
    make("a.md", b"x" * 2 * BLOCK)
    with opened("a.md") as fd:
        punch = FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE
        for what, flags in (("allocate", 0), ("punch", punch), ("zero", FALLOC_ZERO_RANGE)):
            os.utime(fd, ns=(0, 0))
            before = times(fd)[1]
            tick()
            fallocate(fd, flags, 0, 3 * BLOCK)
            see(f"{what}: content", True, lambda: times(fd)[0] > 0)
            see(f"{what}: change", True, lambda before=before: times(fd)[1] > before)


def _map(fd: int) -> list[tuple[str, int]]:
    """Where data and holes begin, as SEEK_DATA and SEEK_HOLE tell it."""
    found: list[tuple[str, int]] = []
    at, end = 0, os.fstat(fd).st_size
    while at < end:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            break
        found.append(("data", at))
        at = os.lseek(fd, at, os.SEEK_HOLE)
        found.append(("hole", at))
    return found


@case()
def test_data_and_holes(see: See) -> None:
    """Where data is and where it is not."""
    make("a.md")
    with opened("a.md") as fd:
        os.pwrite(fd, b"x" * BLOCK, 10 * BLOCK)
        os.pwrite(fd, b"x" * 2 * BLOCK, 50 * BLOCK)
        os.ftruncate(fd, 100 * BLOCK)
        os.fsync(fd)
        pieces = [("data", 10), ("hole", 11), ("data", 50), ("hole", 52)]
        see("map", [(what, at * BLOCK) for what, at in pieces], _map, fd)
        see("data from within", 10 * BLOCK + 5, os.lseek, fd, 10 * BLOCK + 5, os.SEEK_DATA)
        see("hole from within a hole", 7, os.lseek, fd, 7, os.SEEK_HOLE)
        see("offset moved", 7, os.lseek, fd, 0, os.SEEK_CUR)
        see("no more data", "ENXIO", os.lseek, fd, 60 * BLOCK, os.SEEK_DATA)
        see("hole at the end", 100 * BLOCK - 1, os.lseek, fd, 100 * BLOCK - 1, os.SEEK_HOLE)
        see("beyond the end", "ENXIO", os.lseek, fd, 100 * BLOCK, os.SEEK_HOLE)
        see("before the start", "ENXIO", os.lseek, fd, -1, os.SEEK_DATA)
        see("end", 100 * BLOCK, os.lseek, fd, 0, os.SEEK_END)
        fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 50 * BLOCK, BLOCK)
        see("after a punch", [("data", 10), ("hole", 11), ("data", 51), ("hole", 52)], _in_blocks, fd)


def _in_blocks(fd: int) -> list[tuple[str, int]]:
    return [(what, at // BLOCK) for what, at in _map(fd)]


@case()
def test_full_and_empty(see: See) -> None:
    """A full file has its hole at the end, an empty one no data, a directory neither."""
    make("full.md", b"x" * 100)
    make("empty.md")
    with opened("full.md") as full, opened("empty.md") as empty:
        see("data of the full one", 0, os.lseek, full, 0, os.SEEK_DATA)
        see("hole of the full one", 100, os.lseek, full, 0, os.SEEK_HOLE)
        see("data of the empty one", "ENXIO", os.lseek, empty, 0, os.SEEK_DATA)
        see("hole of the empty one", "ENXIO", os.lseek, empty, 0, os.SEEK_HOLE)
        see("an unknown whence", "EINVAL", os.lseek, full, 0, 99)


@case()
def test_copy_range(see: See) -> None:
    """Ranges are copied between files and within one, with and without offsets."""
    content = random.Random(8).randbytes(300_000)
    make("a.md", content)
    make("b.md")
    with opened("a.md") as source, opened("b.md") as target:
        see("with the descriptors' offsets", 100_000, os.copy_file_range, source, target, 100_000)
        see("offset of the source", 100_000, os.lseek, source, 0, os.SEEK_CUR)
        see("offset of the target", 100_000, os.lseek, target, 0, os.SEEK_CUR)
        see("so far", True, lambda: read("b.md") == content[:100_000])
        see("with offsets", 1000, os.copy_file_range, source, target, 1000, 5, 150_000)
        see("there", content[5:1005], os.pread, target, 2000, 150_000)
        see("the gap", bytes(50_000), os.pread, target, 50_000, 100_000)
        see("size", 151_000, size, target)
        see("beyond the end", 10, os.copy_file_range, source, target, 1000, 299_990, 0)
        see("at the end", 0, os.copy_file_range, source, target, 1000, 300_000, 0)
        see("within one file", 50, os.copy_file_range, source, source, 50, 0, 1000)
        see("that", content[:50], os.pread, source, 50, 1000)
        see("overlapping", "EINVAL", os.copy_file_range, source, source, 100, 0, 50)
        see("nothing", 0, os.copy_file_range, source, target, 0)


@case()
def test_copy_range_errors(see: See) -> None:
    """Copying needs a reader and a writer that does not append, and files."""
    make("a.md", b"content")
    make("b.md")
    os.mkdir("d")
    with (
        opened("a.md", os.O_RDONLY) as reader,
        opened("b.md", os.O_WRONLY) as writer,
        opened("b.md", os.O_WRONLY | os.O_APPEND) as appender,
        opened("d", os.O_RDONLY) as directory,
    ):
        see("into a reader", "EBADF", os.copy_file_range, writer, reader, 5)
        see("from a writer", "EBADF", os.copy_file_range, writer, writer, 5)
        see("into an appender", "EBADF", os.copy_file_range, reader, appender, 5)
        see("from a directory", "EISDIR", os.copy_file_range, directory, writer, 5)
        see("all well", 7, os.copy_file_range, reader, writer, 100)
    see("content", b"content", read, "b.md")


@case()
def test_copy_of_a_mapped_change(see: See) -> None:
    """What was just written is what is copied, and what is copied is what is read."""
    make("a.md", b"x" * 10_000)
    make("b.md", b"y" * 10_000)
    with opened("a.md") as source, opened("b.md") as target:
        see("read before", b"yyy", os.pread, target, 3, 0)
        os.pwrite(source, b"new", 0)
        see("copy", 10_000, os.copy_file_range, source, target, 10_000, 0, 0)
        see("read after", b"newx", os.pread, target, 4, 0)
    see("by name", b"new" + b"x" * 9997, read, "b.md")


@case()
def test_sparse_copy(see: See) -> None:
    """A sparse file of half a gigabyte takes the room of what it holds."""
    make("a.md")
    with opened("a.md") as fd:
        see("write", 1, os.pwrite, fd, b"x", 500_000_000)
        see("size", 500_000_001, size, fd)
        see("blocks", ANY, _blocks, fd)
        see("a hole", bytes(100), os.pread, fd, 100, 250_000_000)
    os.truncate("a.md", 0)
