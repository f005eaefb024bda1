"""read(2), write(2), truncate(2) and what is between: offsets, holes, limits, synchronisation."""

from __future__ import annotations

import errno
import mmap
import os
import random
import resource

from tests.posix.harness import ANY, See, case, in_child
from tests.support.syscalls import (
    FALLOC_KEEP_SIZE,
    FALLOC_PUNCH_HOLE,
    append,
    changed_since,
    fallocate,
    make,
    opened,
    opening,
    read,
    reread,
    size,
    tick,
    times,
    write,
)


@case()
def test_offsets(see: See) -> None:
    """A descriptor has one offset, which reads and writes move and pread and pwrite do not."""
    make("a.md", b"0123456789")
    with opened("a.md") as fd:
        see("read", b"012", os.read, fd, 3)
        see("write behind it", 2, os.write, fd, b"xy")
        see("read on", b"567", os.read, fd, 3)
        see("pread", b"12x", os.pread, fd, 3, 1)
        see("pwrite", 1, os.pwrite, fd, b"!", 0)
        see("offset", 8, os.lseek, fd, 0, os.SEEK_CUR)
        see("the rest", b"89", os.read, fd, 100)
        see("at the end", b"", os.read, fd, 100)
        see("beyond the end", b"", os.pread, fd, 10, 1000)
        see("from the end", 7, os.lseek, fd, -3, os.SEEK_END)
        see("before the start", "EINVAL", os.lseek, fd, -1, os.SEEK_SET)
        see("pread before the start", "EINVAL", os.pread, fd, 1, -1)
        see("pwrite before the start", "EINVAL", os.pwrite, fd, b"x", -1)
    see("content", b"!12xy56789", read, "a.md")


@case()
def test_vectors(see: See) -> None:
    """readv and writev fill and drain several buffers in order."""
    make("a.md")
    with opened("a.md") as fd:
        see("writev", 6, os.writev, fd, [b"ab", b"", b"cde", b"f"])
        see("pwritev", 2, os.pwritev, fd, [b"X", b"Y"], 2)
        one, two = bytearray(4), bytearray(10)
        see("preadv", 6, os.preadv, fd, [one, two], 0)
        see("buffers", (b"abXY", b"ef"), lambda: (bytes(one), bytes(two[:2])))


@case()
def test_shared_offset(see: See) -> None:
    """dup and fork share the offset; a second open has its own."""
    make("a.md", b"0123456789")
    with opened("a.md") as fd, opened("a.md") as other:
        twin = os.dup(fd)
        os.read(fd, 2)
        see("the twin", b"23", os.read, twin, 2)
        see("a child", b"45", in_child, os.read, fd, 2)
        see("afterwards", b"67", os.read, fd, 2)
        see("the other", b"01", os.read, other, 2)
        os.close(twin)
        see("after the twin is closed", b"89", os.read, fd, 2)


@case()
def test_large(see: See) -> None:
    """Content larger than any single request arrives whole, at any alignment."""
    content = random.Random(1).randbytes(900_001)
    make("a.md")
    see("write", 900_001, write, "a.md", content)
    see("size", 900_001, size, "a.md")
    see("read", True, lambda: read("a.md") == content)
    with opened("a.md") as fd:
        for offset, length in ((1, 4096), (4095, 2), (131_071, 131_074), (899_990, 100), (12_345, 300_000)):
            see(f"{length} at {offset}", content[offset : offset + length], os.pread, fd, length, offset)
        os.pwrite(fd, content[:70_001], 65_537)
        expected = content[:65_537] + content[:70_001] + content[135_538:]
        see("overwritten across pages", True, lambda: read("a.md") == expected)


@case()
def test_larger_than_a_megabyte(see: See) -> None:
    """Three megabytes in one write."""
    content = random.Random(2).randbytes(3_000_000)
    make("a.md")
    see("write", 3_000_000, write, "a.md", content)
    see("size", 3_000_000, size, "a.md")
    see("read", True, lambda: read("a.md") == content)


@case()
def test_fetched_again(see: See) -> None:
    """What is dropped from the kernel's cache comes back the same, in pieces of every size."""
    content = random.Random(9).randbytes(400_000)
    make("a.md", content)
    with opened("a.md") as fd:
        for length in (1, 511, 4096, 4097, 131_072, 400_000):
            see(f"{length} bytes", content[3 : 3 + length], reread, fd, length, 3)
        os.pwrite(fd, b"changed", 200_000)
        see("after a change", content[199_990:200_000] + b"changed", reread, fd, 17, 199_990)
        os.ftruncate(fd, 200_003)
        see("after a cut", content[199_990:200_000] + b"cha", reread, fd, 100, 199_990)


@case()
def test_nothing_written(see: See) -> None:
    """A write of no bytes changes nothing, not even at an offset beyond the end."""
    make("a.md", b"abc")
    os.utime("a.md", ns=(0, 0))
    with opened("a.md") as fd:
        see("write", 0, os.write, fd, b"")
        see("far away", 0, os.pwrite, fd, b"", 100_000)
    see("size", 3, size, "a.md")
    see("not stamped", 0, lambda: times("a.md")[0])


@case()
def test_write_beyond_the_end(see: See) -> None:
    """What lies between the old end and a write beyond it reads as zeros."""
    make("a.md", b"abc")
    with opened("a.md") as fd:
        see("write", 3, os.pwrite, fd, b"end", 10_000)
        see("size", 10_003, size, fd)
        see("between", b"abc" + bytes(20), os.pread, fd, 23, 0)
        see("around", bytes(5) + b"end", os.pread, fd, 100, 9_995)
        see("seek and write", 20_000, os.lseek, fd, 20_000, os.SEEK_SET)
        see("written", 1, os.write, fd, b"!")
        see("size after", 20_001, size, fd)


@case()
def test_truncate(see: See) -> None:
    """truncate cuts, extends with zeros, and never brings back what was cut."""
    make("a.md", b"0123456789" * 1000)
    see("cut", None, os.truncate, "a.md", 5)
    see("content", b"01234", read, "a.md")
    see("extend", None, os.truncate, "a.md", 9_000)
    see("zeros", b"01234" + bytes(8_995), read, "a.md")
    with opened("a.md") as fd:
        see("ftruncate", None, os.ftruncate, fd, 2)
        see("extend again", None, os.ftruncate, fd, 6)
        see("read back", b"01\0\0\0\0", os.pread, fd, 100, 0)
        see("the offset stays", 0, os.lseek, fd, 0, os.SEEK_CUR)
        see("negative", "EINVAL", os.ftruncate, fd, -1)
    see("to nothing", None, os.truncate, "a.md", 0)
    see("empty", b"", read, "a.md")


@case()
def test_truncate_within_a_page(see: See) -> None:
    """Cutting within a page clears its rest, also for who has it mapped or cached."""
    make("a.md", b"x" * 8192)
    with opened("a.md") as fd, mmap.mmap(fd, 8192, mmap.MAP_SHARED) as view:
        os.ftruncate(fd, 100)
        os.ftruncate(fd, 8192)
        see("read", b"x" * 100 + bytes(8092), os.pread, fd, 8192, 0)
        see("mapped", True, lambda: bytes(view) == b"x" * 100 + bytes(8092))


@case()
def test_truncate_errors(see: See) -> None:
    """Only regular files can be cut."""
    os.mkdir("d")
    os.mkfifo("fifo.md")
    os.symlink("nowhere.md", "dangling.md")
    make("a.md", b"abc")
    os.symlink("a.md", "link.md")
    see("a directory", "EISDIR", os.truncate, "d", 0)
    see("a fifo", "EINVAL", os.truncate, "fifo.md", 0)
    see("a missing file", "ENOENT", os.truncate, "b.md", 0)
    see("a dangling link", "ENOENT", os.truncate, "dangling.md", 0)
    see("below a file", "ENOTDIR", os.truncate, "a.md/b.md", 0)
    see("negative", "EINVAL", os.truncate, "a.md", -1)
    see("through a link", None, os.truncate, "link.md", 1)
    see("content", b"a", read, "a.md")


@case()
def test_far_away(see: See) -> None:
    """A file can be a terabyte long and hold one byte."""
    make("a.md")
    see("write", 1, lambda: in_child(_write_at, 1 << 40))
    see("size", ANY, size, "a.md")
    see("the byte", ANY, lambda: in_child(_read_at, 1 << 40))
    see("cut", None, os.truncate, "a.md", 10)
    see("extend to a gigabyte", None, os.truncate, "a.md", 1 << 30)
    see("size after", 1 << 30, size, "a.md")
    see("blocks after", 0, lambda: os.stat("a.md").st_blocks)
    os.truncate("a.md", 0)


def _write_at(offset: int) -> int:
    with opened("a.md") as fd:
        return os.pwrite(fd, b"!", offset)


def _read_at(offset: int) -> bytes:
    with opened("a.md") as fd:
        return os.pread(fd, 10, offset)


@case()
def test_limit_of_the_process(see: See) -> None:
    """RLIMIT_FSIZE holds for writing, truncating and allocating."""
    make("a.md")

    def limited() -> list[object]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with opened("a.md") as fd:
            outcomes: list[object] = [os.write(fd, b"x" * 1500)]
            for call in (
                lambda: os.write(fd, b"y"),
                lambda: os.ftruncate(fd, 1001),
                lambda: os.posix_fallocate(fd, 0, 1001),
                lambda: os.ftruncate(fd, 999),
            ):
                try:
                    outcomes.append(call())
                except OSError as error:
                    outcomes.append(errno.errorcode[error.errno or 0])
        return outcomes

    see("outcomes", [1000, "EFBIG", "EFBIG", "EFBIG", None], in_child, limited)
    see("size", 999, size, "a.md")


@case()
def test_stamps(see: See) -> None:
    """Writing and cutting stamp the file; reading does not."""
    make("a.md", b"content")
    for what, call in (
        ("write", lambda: write("a.md", b"C")),
        ("append", lambda: append("a.md", b"!")),
        ("cut", lambda: os.truncate("a.md", 3)),
        ("extend", lambda: os.truncate("a.md", 10)),
    ):
        os.utime("a.md", ns=(0, 0))
        before = times("a.md")[1]
        tick()
        call()
        see(f"{what} stamps the content", True, lambda: times("a.md")[0] > 0)
        see(f"{what} stamps the change", True, changed_since, "a.md", before)
    os.utime("a.md", ns=(0, 0))
    read("a.md")
    see("reading does not", 0, lambda: times("a.md")[0])
    os.truncate("a.md", 10)
    see("cutting to the same size", ANY, lambda: times("a.md")[0] > 0)


@case()
def test_sync(see: See) -> None:
    """Files and directories can be synchronised, through any descriptor."""
    make("a.md", b"content")
    with opened("a.md") as fd:
        os.write(fd, b"C")
        see("fsync", None, os.fsync, fd)
        see("fdatasync", None, os.fdatasync, fd)
    with opened("a.md", os.O_RDONLY) as fd:
        see("fsync of a reader", None, os.fsync, fd)
    with opened(".", os.O_RDONLY) as fd:
        see("fsync of a directory", None, os.fsync, fd)
        see("fdatasync of a directory", None, os.fdatasync, fd)
    with opened("a.md", os.O_PATH) as fd:
        see("fsync through O_PATH", "EBADF", os.fsync, fd)


@case()
def test_synchronous_writes(see: See) -> None:
    """O_SYNC and O_DSYNC write like any other."""
    for flag in (os.O_SYNC, os.O_DSYNC):
        opening("a.md", os.O_WRONLY | os.O_CREAT)
        with opened("a.md", os.O_RDWR | flag) as fd:
            see(f"write {flag}", 7, os.write, fd, b"content")
            see(f"read {flag}", b"content", os.pread, fd, 10, 0)
        os.unlink("a.md")


@case()
def test_direct(see: See) -> None:
    """O_DIRECT reads what was written with it and without, and the other way round."""
    make("a.md", b"x" * 8192)
    with mmap.mmap(-1, 4096) as page, opened("a.md", os.O_RDWR | os.O_DIRECT) as direct, opened("a.md") as cached:
        see("read", 4096, os.preadv, direct, [page], 0)
        see("what was read", b"x" * 4096, lambda: page[:])
        page[:] = b"d" * 4096
        see("write", 4096, os.pwritev, direct, [page], 4096)
        see("seen by the other", b"x" + b"d" * 9, os.pread, cached, 10, 4095)
        os.pwrite(cached, b"cached", 0)
        see("read again", 4096, os.preadv, direct, [page], 0)
        see("what the other wrote", b"cachedxx", lambda: page[:8])


@case()
def test_sendfile_and_splice(see: See) -> None:
    """The kernel's own ways to move bytes move the same bytes."""
    content = random.Random(3).randbytes(100_000)
    make("a.md", content)
    make("b.md")
    with opened("a.md") as source, opened("b.md") as target:
        see("sendfile", 50_000, os.sendfile, target, source, 0, 50_000)
        reader, writer = os.pipe()
        moved = 0
        while moved < 50_000:
            length = os.splice(source, writer, 4096, offset_src=50_000 + moved)
            moved += os.splice(reader, target, length)
        os.close(reader)
        os.close(writer)
        see("the rest by splice", ANY, lambda: moved)
    see("content", True, lambda: read("b.md")[:100_000] == content)


@case()
def test_random_changes(see: See) -> None:
    """After each of four hundred random changes the file is what a model in memory says."""
    dice, model = random.Random(4), bytearray()
    make("a.md", bytes(0x20000))
    wrong: list[str] = []
    with opened("a.md") as fd, opened("a.md", os.O_RDONLY) as reader, mmap.mmap(fd, 0x20000, mmap.MAP_SHARED) as view:
        os.ftruncate(fd, 0)
        for step in range(400):
            offset, length = dice.randrange(0x20000), dice.randrange(1, 20_000)
            length = min(length, 0x20000 - offset)
            what = dice.choice(("write", "write", "append", "cut", "punch", "map", "allocate"))
            if what == "write":
                data = dice.randbytes(length)
                os.pwrite(fd, data, offset)
            elif what == "append":
                offset, data = len(model), dice.randbytes(min(length, 0x20000 - len(model)))
                with opened("a.md", os.O_WRONLY | os.O_APPEND) as appender:
                    os.write(appender, data)
            elif what == "cut":
                os.ftruncate(fd, offset)
                model = model[:offset] + bytes(max(0, offset - len(model)))
            elif what == "punch":
                fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, offset, length)
                data = bytes(min(length, max(0, len(model) - offset)))
            elif what == "map":
                data = dice.randbytes(min(length, max(0, len(model) - offset)))
                view[offset : offset + len(data)] = data
            else:
                os.posix_fallocate(fd, offset, length)
                model += bytes(max(0, offset + length - len(model)))
            if what in ("write", "append", "punch", "map") and data:
                model += bytes(max(0, offset - len(model)))
                model[offset : offset + len(data)] = data
            if os.pread(reader, 0x20001, 0) != model:
                wrong.append(f"step {step}: {what} {length} at {offset}")
                break
    see("differs from the model", [], lambda: wrong)
    see("at the end", True, lambda: read("a.md") == model)
