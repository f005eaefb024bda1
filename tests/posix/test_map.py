"""mmap(2) and msync(2): shared and private mappings, combined with read and write."""

from __future__ import annotations

import mmap
import os

from tests.posix.harness import ANY, See, case, in_child
from tests.support.syscalls import make, opened, read, size, times, write

PAGE = mmap.PAGESIZE


def _map(fd: int, length: int, flags: int, protection: int) -> None:
    mmap.mmap(fd, length, flags, protection).close()


@case()
def test_shared(see: See) -> None:
    """What is written to a shared mapping is in the file, for every reader."""
    make("a.md", b"x" * 2 * PAGE)
    with opened("a.md") as fd, mmap.mmap(fd, 2 * PAGE, mmap.MAP_SHARED) as view:
        see("read", b"xxx", lambda: view[:3])
        view[PAGE - 2 : PAGE + 2] = b"1234"
        see("by descriptor", b"x1234x", os.pread, fd, 6, PAGE - 3)
        see("msync", None, view.flush)
        see("by another process", b"x1234x", in_child, lambda: read("a.md")[PAGE - 3 : PAGE + 3])
        os.pwrite(fd, b"pwrite", 0)
        see("a write in the mapping", b"pwrite", lambda: view[:6])
        write("a.md", b"byname")
        see("a write by name in the mapping", b"byname", lambda: view[:6])
        view[0] = ord("!")
    see("after unmapping", b"!yname", lambda: read("a.md")[:6])
    see("size", 2 * PAGE, size, "a.md")


@case()
def test_shared_between_processes(see: See) -> None:
    """Two processes that map one file see each other's bytes."""
    make("a.md", bytes(PAGE))
    with opened("a.md") as fd, mmap.mmap(fd, PAGE, mmap.MAP_SHARED) as view:

        def there() -> bytes:
            with opened("a.md") as own, mmap.mmap(own, PAGE, mmap.MAP_SHARED) as their:
                before = their[:5]
                their[5:10] = b"child"
                return before

        view[:6] = b"parent"
        see("the child reads", b"paren", in_child, there)
        see("the parent reads", b"parenchild", lambda: view[:10])
    see("in the file", b"parenchild", lambda: read("a.md")[:10])


@case()
def test_private(see: See) -> None:
    """No other process sees writes to a private mapping."""
    make("a.md", b"content" + bytes(PAGE))
    both = mmap.PROT_READ | mmap.PROT_WRITE
    with opened("a.md", os.O_RDONLY) as fd, mmap.mmap(fd, PAGE, mmap.MAP_PRIVATE, both) as view:
        view[:7] = b"private"
        see("in the mapping", b"private", lambda: view[:7])
        see("in the file", b"content", os.pread, fd, 7, 0)
    see("afterwards", b"content", lambda: read("a.md")[:7])


@case()
def test_rights(see: See) -> None:
    """A mapping needs the rights that it uses."""
    make("a.md", b"x" * PAGE)
    both = mmap.PROT_READ | mmap.PROT_WRITE
    with opened("a.md", os.O_RDONLY) as reader, opened("a.md", os.O_WRONLY) as writer, opened(".", os.O_RDONLY) as d:
        see("reading", None, _map, reader, PAGE, mmap.MAP_SHARED, mmap.PROT_READ)
        see("shared writing through a reader", "EACCES", _map, reader, PAGE, mmap.MAP_SHARED, both)
        see("private writing through a reader", None, _map, reader, PAGE, mmap.MAP_PRIVATE, both)
        see("through a writer", "EACCES", _map, writer, PAGE, mmap.MAP_SHARED, mmap.PROT_WRITE)
        see("a directory", "ENODEV", lambda: _map(d, 1, mmap.MAP_PRIVATE, mmap.PROT_READ))


@case()
def test_descriptor_closed(see: See) -> None:
    """A mapping outlives the descriptor, and the name."""
    make("a.md", b"x" * PAGE)
    with opened("a.md") as fd:
        view = mmap.mmap(fd, PAGE, mmap.MAP_SHARED)
    view[:4] = b"open"
    see("in the file", b"openx", lambda: read("a.md")[:5])
    os.unlink("a.md")
    view[:4] = b"gone"
    see("without a name", b"gonex", lambda: view[:5])
    see("msync", None, view.flush)
    view.close()


@case()
def test_renamed_over(see: See) -> None:
    """A mapping of a replaced file keeps the old content; the new one is not touched."""
    make("a.md", b"old" + bytes(PAGE - 3))
    make("b.md", b"new" + bytes(PAGE - 3))
    with opened("a.md") as fd, mmap.mmap(fd, PAGE, mmap.MAP_SHARED) as view:
        os.rename("b.md", "a.md")
        see("the mapping", b"old", lambda: view[:3])
        view[:3] = b"OLD"
        see("msync", None, view.flush)
        see("the descriptor", b"OLD", os.pread, fd, 3, 0)
    see("the name", b"new", lambda: read("a.md")[:3])


@case()
def test_beyond_the_end(see: See) -> None:
    """The rest of the last page reads as zeros, a page beyond the end ends the process."""
    make("a.md", b"abc")
    with opened("a.md") as fd:
        os.ftruncate(fd, 3 * PAGE)
        with mmap.mmap(fd, 3 * PAGE, mmap.MAP_SHARED) as view:
            os.ftruncate(fd, 3)
            see("in the last page", bytes(10), lambda: view[3:13])
            see("beyond it", "signal 7", in_child, lambda: view[2 * PAGE])
            os.ftruncate(fd, 3 * PAGE)
            see("once it is long enough", 0, lambda: view[2 * PAGE])
            view[2 * PAGE] = 1
            see("written", b"\x01", os.pread, fd, 1, 2 * PAGE)


@case()
def test_hole_written(see: See) -> None:
    """Writing through a mapping fills holes."""
    make("a.md")
    with opened("a.md") as fd:
        os.ftruncate(fd, 20 * PAGE)
        with mmap.mmap(fd, 20 * PAGE, mmap.MAP_SHARED) as view:
            view[10 * PAGE : 10 * PAGE + 4] = b"data"
            view.flush()
            os.fsync(fd)
            see("found", 10 * PAGE, os.lseek, fd, 0, os.SEEK_DATA)
            see("blocks", ANY, lambda: os.fstat(fd).st_blocks)


@case()
def test_stamps(see: See) -> None:
    """Writing through a mapping stamps the file by msync at the latest."""
    make("a.md", b"x" * PAGE)
    os.utime("a.md", ns=(0, 0))
    with opened("a.md") as fd, mmap.mmap(fd, PAGE, mmap.MAP_SHARED) as view:
        view[0] = 1
        view.flush()
        see("stamped", True, lambda: times("a.md")[0] > 0)


@case()
def test_mapped_after_rights_are_gone(see: See) -> None:
    """A mapping made before the rights were removed is still written back."""
    make("a.md", b"x" * PAGE)
    with opened("a.md") as fd, mmap.mmap(fd, PAGE, mmap.MAP_SHARED) as view:
        os.chmod("a.md", 0)
        view[:3] = b"new"
        see("msync", None, view.flush)
        os.chmod("a.md", 0o644)
    see("in the file", b"newx", lambda: read("a.md")[:4])
