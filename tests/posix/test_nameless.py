"""Files whose last name is gone while they are open: they live until the last descriptor is closed."""

from __future__ import annotations

import mmap
import os

from tests.posix.harness import See, case, in_child
from tests.support.syscalls import (
    FALLOC_KEEP_SIZE,
    FALLOC_PUNCH_HOLE,
    fallocate,
    inode,
    links,
    make,
    mode,
    names,
    opened,
    read,
    reread,
    size,
    times,
)


@case()
def test_used_on(see: See) -> None:
    """Reading, writing, cutting, stating and changing go on without a name."""
    make("a.md", b"content")
    with opened("a.md") as fd:
        number = inode(fd)
        os.unlink("a.md")
        see("by name", "ENOENT", read, "a.md")
        see("listed", [], names, see.at)
        see("links", 0, links, fd)
        see("inode", True, lambda: inode(fd) == number)
        see("read", b"content", reread, fd, 100, 0)
        see("write", 3, os.pwrite, fd, b"CON", 0)
        see("written", b"CONtent", reread, fd, 100, 0)
        see("append", 1, lambda: (os.lseek(fd, 0, os.SEEK_END), os.write(fd, b"!"))[1])
        see("size", 8, size, fd)
        see("ftruncate", None, os.ftruncate, fd, 2)
        see("cut", b"CO", reread, fd, 100, 0)
        see("extended", None, os.ftruncate, fd, 5)
        see("zeros", b"CO\0\0\0", reread, fd, 100, 0)
        see("fchmod", None, os.fchmod, fd, 0o600)
        see("mode", "0600", mode, fd)
        see("fchown", None, os.fchown, fd, os.geteuid(), os.getegid())
        see("times", None, lambda: os.utime(fd, ns=(5, 7)))
        see("told", 7, lambda: times(fd)[0])
        see("fsync", None, os.fsync, fd)
        see("allocate", None, os.posix_fallocate, fd, 0, 8192)
        see("punch", None, fallocate, fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 0, 4096)
        see("punched", b"\0\0", reread, fd, 2, 0)
        see("data and holes", 4096, os.lseek, fd, 0, os.SEEK_DATA)
        see("attribute", None, os.setxattr, fd, "user.a", b"1")
        see("attribute told", b"1", os.getxattr, fd, "user.a")


@case()
def test_only_opened_for_reading(see: See) -> None:
    """A reader that was opened before the name went, and never read, still reads all."""
    make("a.md", b"content" * 1000)
    with opened("a.md", os.O_RDONLY) as fd:
        os.unlink("a.md")
        see("read", b"content" * 1000, os.read, fd, 100_000)
        see("in a child", b"content", in_child, reread, fd, 7, 7)


@case()
def test_only_opened_for_writing(see: See) -> None:
    """A writer that was opened before the name went still writes."""
    make("a.md")
    with opened("a.md", os.O_WRONLY) as fd:
        os.unlink("a.md")
        see("write", 4, os.write, fd, b"data")
        see("size", 4, size, fd)
    see("no name comes back", [], names, see.at)


@case()
def test_name_taken_again(see: See) -> None:
    """A new file under the old name is another file."""
    make("a.md", b"old")
    with opened("a.md") as old:
        os.unlink("a.md")
        make("a.md", b"newer")
        with opened("a.md") as new:
            see("different", False, lambda: inode(old) == inode(new))
            os.pwrite(old, b"OLD", 0)
            os.pwrite(new, b"NEW", 0)
            see("old", b"OLD", reread, old, 10, 0)
            see("new", b"NEWer", reread, new, 10, 0)
            see("sizes", [3, 5], lambda: [size(old), size(new)])
            os.unlink("a.md")
            see("both without a name", [0, 0], lambda: [links(old), links(new)])
            see("old again", b"OLD", reread, old, 10, 0)
            see("new again", b"NEWer", reread, new, 10, 0)


@case()
def test_a_directory_of_that_name(see: See) -> None:
    """The name may become a directory, which concerns the descriptor no more."""
    make("a.md", b"file")
    with opened("a.md") as fd:
        os.unlink("a.md")
        os.mkdir("a.md")
        see("write", 4, os.pwrite, fd, b"FILE", 0)
        see("read", b"FILE", reread, fd, 10, 0)
    see("a directory", [], names, see.at / "a.md")


@case()
def test_directory_gone_too(see: See) -> None:
    """The file outlives its directory as well."""
    os.makedirs("d/e")
    make("d/e/a.md", b"content")
    with opened("d/e/a.md") as fd:
        os.unlink("d/e/a.md")
        os.rmdir("d/e")
        os.rmdir("d")
        see("read", b"content", reread, fd, 10, 0)
        see("write", 3, os.pwrite, fd, b"CON", 0)
        see("read again", b"CONtent", reread, fd, 10, 0)


@case()
def test_created_and_removed(see: See) -> None:
    """A scratch file, removed as soon as it is made, as tempfile does it."""
    with opened("a.md", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600) as fd:
        os.unlink("a.md")
        see("write", 100_000, os.write, fd, b"x" * 100_000)
        see("read", 100_000, lambda: len(os.pread(fd, 200_000, 0)))
        os.ftruncate(fd, 0)
        see("cut", 0, size, fd)
        see("stat", "0600", mode, fd)


@case()
def test_opened_again_through_proc(see: See) -> None:
    """/proc gives a second descriptor of a file without a name."""
    make("a.md", b"content")
    with opened("a.md", os.O_RDONLY) as fd:
        os.unlink("a.md")
        with opened(f"/proc/self/fd/{fd}", os.O_RDWR) as again:
            see("write", 3, os.write, again, b"CON")
            see("read", b"CONtent", reread, fd, 10, 0)
        with opened(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_TRUNC):
            see("emptied", 0, size, fd)


@case()
def test_mapped(see: See) -> None:
    """A file without a name can be mapped."""
    make("a.md", b"x" * 8192)
    with opened("a.md") as fd:
        os.unlink("a.md")
        with mmap.mmap(fd, 8192, mmap.MAP_SHARED) as view:
            see("read", b"xxx", lambda: view[4095:4098])
            view[:3] = b"map"
            see("flush", None, view.flush)
            see("by descriptor", b"mapx", reread, fd, 4, 0)


@case()
def test_one_of_two_names(see: See) -> None:
    """With one of two names gone the file is whole under the other."""
    make("a.md", b"content")
    os.link("a.md", "b.md")
    with opened("a.md") as fd:
        os.unlink("a.md")
        see("links", 1, links, fd)
        see("write", 3, os.pwrite, fd, b"CON", 0)
        see("by name", b"CONtent", read, "b.md")
        os.unlink("b.md")
        see("none left", 0, links, fd)
        see("read", b"CONtent", reread, fd, 10, 0)


@case()
def test_many(see: See) -> None:
    """Two hundred files without names, each with its own content."""
    held = []
    for number in range(200):
        make(f"{number}.md", b"%d" % number)
        held.append(os.open(f"{number}.md", os.O_RDWR))
    for number in range(200):
        os.unlink(f"{number}.md")
    for fd in held:
        os.pwrite(fd, b"!", 5)
    expected = [(b"%d" % number).ljust(5, b"\0") + b"!" for number in range(200)]
    see("contents", expected, lambda: [reread(fd, 9, 0) for fd in held])
    see("listed", [], names, see.at)
    for fd in held:
        os.close(fd)


@case()
def test_rights_gone_before_the_name(see: See) -> None:
    """Mode 0 and no name: the descriptor still reads and writes."""
    make("a.md", b"content")
    with opened("a.md") as fd:
        os.chmod("a.md", 0)
        os.unlink("a.md")
        see("read", b"content", reread, fd, 10, 0)
        see("write", 3, os.pwrite, fd, b"CON", 0)
