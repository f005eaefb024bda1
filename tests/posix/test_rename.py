"""rename(2) and renameat2(2): what moves, what is replaced, what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable

from tests.posix.harness import ANY, See, attempt, case
from tests.support.syscalls import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    inode,
    kind,
    links,
    make,
    names,
    opened,
    read,
    renameat2,
    reread,
    size,
    tick,
    times,
    write,
)


@case()
def test_a_file(see: See) -> None:
    """A file keeps its inode, content and times under its new name."""
    make("a.md", b"content")
    os.utime("a.md", ns=(1_000_000_001, 2_000_000_002))
    before = inode("a.md")
    see("rename", None, os.rename, "a.md", "b.md")
    see("the old name", "ENOENT", os.stat, "a.md")
    see("content", b"content", read, "b.md")
    see("inode", True, lambda: inode("b.md") == before)
    see("time", 2_000_000_002, lambda: times("b.md")[0])
    see("listed", ["b.md"], names, see.at)
    see("the old name can be used again", None, make, "a.md", b"new")
    see("another file", False, lambda: inode("a.md") == before)


@case()
def test_over_a_file(see: See) -> None:
    """The replaced file is gone; its name shows the other."""
    make("a.md", b"a")
    make("b.md", b"replaced, and longer")
    before = inode("a.md")
    see("rename", None, os.rename, "a.md", "b.md")
    see("content", b"a", read, "b.md")
    see("size", 1, size, "b.md")
    see("inode", True, lambda: inode("b.md") == before)
    see("links", 1, links, "b.md")
    see("listed", ["b.md"], names, see.at)


@case()
def test_over_every_kind(see: See) -> None:
    """What may replace what, for each pair of kinds."""
    makers: dict[str, Callable[[str], None]] = {
        "file": make,
        "empty": os.mkdir,
        "full": lambda name: os.makedirs(f"{name}/d"),
        "link": lambda name: os.symlink("nowhere", name),
        "fifo": os.mkfifo,
    }
    for old, make_old in makers.items():
        for new, make_new in makers.items():
            os.mkdir(f"{old} {new}")
            source, target = f"{old} {new}/old-{old}.md", f"{old} {new}/new-{new}.md"
            make_old(source)
            make_new(target)
            directory, over_directory = old in ("empty", "full"), new in ("empty", "full")
            expected = (
                "ENOTDIR" if directory and not over_directory
                else "EISDIR" if over_directory and not directory
                else "ENOTEMPTY" if new == "full"
                else None
            )  # fmt: skip
            see(f"{old} over {new}", expected, os.rename, source, target)


@case()
def test_other_kinds_over_a_file(see: See) -> None:
    """A symlink and a FIFO can replace a file."""
    make("a.md")
    make("b.md")
    os.symlink("c.md", "link.md")
    os.mkfifo("fifo.md")
    see("symlink", None, os.rename, "link.md", "a.md")
    see("is a symlink", "l", kind, "a.md")
    see("fifo", None, os.rename, "fifo.md", "b.md")
    see("is a fifo", "p", kind, "b.md")
    make("d.md", b"file")
    see("file over a symlink", None, os.rename, "d.md", "a.md")
    see("is a file", b"file", read, "a.md")
    see("no target appeared", "ENOENT", os.stat, "c.md")


@case()
def test_a_directory(see: See) -> None:
    """A directory moves with all that it holds, and its parents' link counts follow."""
    os.makedirs("one/d/e")
    os.mkdir("two")
    make("one/d/e/a.md", b"deep")
    before = inode("one/d/e/a.md")
    see("rename", None, os.rename, "one/d", "two/d")
    see("content", b"deep", read, "two/d/e/a.md")
    see("inode", True, lambda: inode("two/d/e/a.md") == before)
    see("links of the old parent", 2, links, "one")
    see("links of the new parent", 3, links, "two")
    see("dot-dot", True, lambda: inode("two/d/..") == inode("two"))
    see("old parent", [], names, see.at / "one")
    see("over an empty directory", None, os.rename, "two/d", "one")
    see("content there", b"deep", read, "one/e/a.md")
    see("links of two", 2, links, "two")


@case()
def test_below_itself(see: See) -> None:
    """A directory cannot be moved into itself, nor onto its parent."""
    os.makedirs("d/e/f")
    see("into itself", "EINVAL", os.rename, "d", "d/x")
    see("deeper", "EINVAL", os.rename, "d", "d/e/f/x")
    see("onto its child", "EINVAL", os.rename, "d", "d/e")
    see("onto its parent", "ENOTEMPTY", os.rename, "d/e", "d")
    see("dot", "EBUSY", os.rename, "d/.", "x")
    see("dot-dot", "EBUSY", os.rename, "d/e/..", "x")
    see("onto dot", "EBUSY", os.rename, "d", "d/e/.")


@case()
def test_same_file(see: See) -> None:
    """Renaming onto itself, or onto another name of the same file, changes nothing."""
    make("a.md", b"content")
    os.link("a.md", "b.md")
    see("itself", None, os.rename, "a.md", "a.md")
    see("its other name", None, os.rename, "a.md", "b.md")
    see("both are there", ["a.md", "b.md"], names, see.at)
    see("links", 2, links, "a.md")
    see("an exchange of both", None, renameat2, "a.md", "b.md", RENAME_EXCHANGE)
    see("no replacement", "EEXIST", renameat2, "a.md", "b.md", RENAME_NOREPLACE)


@case()
def test_paths_that_cannot_be(see: See) -> None:
    """Missing names, slashes behind files, and another file system."""
    make("a.md")
    os.mkdir("d")
    see("a missing file", "ENOENT", os.rename, "x.md", "y.md")
    see("a missing directory", "ENOENT", os.rename, "a.md", "x/y.md")
    see("below a file", "ENOTDIR", os.rename, "a.md", "a.md/b.md")
    see("a file with a slash", "ENOTDIR", os.rename, "a.md/", "b.md")
    see("onto a slash", "ENOTDIR", os.rename, "a.md", "b/")
    see("a directory with slashes", None, os.rename, "d/", "e/")
    see("to another file system", "EXDEV", os.rename, "a.md", "/proc/a.md")
    see("an empty name", "ENOENT", os.rename, "a.md", "")
    see("a long name", "ENAMETOOLONG", os.rename, "a.md", "x" * 253 + ".md")
    see("listed", ["a.md", "e"], names, see.at)


@case()
def test_without_replacing(see: See) -> None:
    """RENAME_NOREPLACE refuses a name that exists."""
    make("a.md", b"a")
    make("b.md", b"b")
    os.mkdir("d")
    see("a file", "EEXIST", renameat2, "a.md", "b.md", RENAME_NOREPLACE)
    see("a directory", "EEXIST", renameat2, "a.md", "d", RENAME_NOREPLACE)
    see("itself", "EEXIST", renameat2, "a.md", "a.md", RENAME_NOREPLACE)
    see("a free name", None, renameat2, "a.md", "c.md", RENAME_NOREPLACE)
    see("missing", "ENOENT", renameat2, "a.md", "e.md", RENAME_NOREPLACE)
    see("content", [b"b", b"a"], lambda: [read("b.md"), read("c.md")])
    see("with an exchange", "EINVAL", renameat2, "b.md", "c.md", RENAME_NOREPLACE | RENAME_EXCHANGE)
    see("an unknown flag", "EINVAL", renameat2, "b.md", "c.md", 1 << 10)


@case()
def test_exchange(see: See) -> None:
    """RENAME_EXCHANGE swaps two names, of any kinds."""
    os.makedirs("one/d")
    os.makedirs("two/e.md/f")
    make("one/a.md", b"a")
    make("two/b.md", b"longer b")
    make("two/e.md/c.md", b"c")
    one, two = inode("one/a.md"), inode("two/b.md")
    see("files", None, renameat2, "one/a.md", "two/b.md", RENAME_EXCHANGE)
    see("contents", [b"longer b", b"a"], lambda: [read("one/a.md"), read("two/b.md")])
    see("inodes", True, lambda: (inode("one/a.md"), inode("two/b.md")) == (two, one))
    see("directories", None, renameat2, "one/d", "two/e.md", RENAME_EXCHANGE)
    see("what they list", [["c.md", "f"], []], lambda: [names(see.at / "one/d"), names(see.at / "two/e.md")])
    see("dot-dot", True, lambda: inode("one/d/..") == inode("one"))
    see("content below", b"c", read, "one/d/c.md")
    os.mkfifo("p.md")
    see("a directory and a fifo", None, renameat2, "p.md", "two/e.md", RENAME_EXCHANGE)
    see("kinds", ["d", "p"], lambda: [kind("p.md"), kind("two/e.md")])
    see("links of both parents", [3, 2], lambda: [links("one"), links("two")])
    see("with a missing name", "ENOENT", renameat2, "one/a.md", "x.md", RENAME_EXCHANGE)
    see("from a missing name", "ENOENT", renameat2, "x.md", "one/a.md", RENAME_EXCHANGE)
    see("with its own child", "EINVAL", renameat2, "one", "one/d", RENAME_EXCHANGE)
    see("with its own parent", "EINVAL", renameat2, "one/d", "one", RENAME_EXCHANGE)
    os.symlink("x", "l.md")
    see("a symlink and a file", None, renameat2, "l.md", "one/a.md", RENAME_EXCHANGE)
    see("the symlink", "x", os.readlink, "one/a.md")


@case()
def test_exchange_of_open_files(see: See) -> None:
    """Descriptors stay with their files when the names are swapped."""
    make("a.md", b"a")
    make("b.md", b"b")
    with opened("a.md") as one, opened("b.md") as two:
        renameat2("a.md", "b.md", RENAME_EXCHANGE)
        os.write(one, b"first")
        os.write(two, b"second")
        see("one", b"first", reread, one, 10, 0)
        see("two", b"second", reread, two, 10, 0)
    see("names", [b"second", b"first"], lambda: [read("a.md"), read("b.md")])


@case()
def test_an_open_file(see: See) -> None:
    """A descriptor follows its file to its new name and its new directory."""
    os.mkdir("d")
    make("a.md", b"old")
    with opened("a.md") as fd:
        os.rename("a.md", "d/b.md")
        see("write", 3, os.write, fd, b"new")
        see("append by name", 1, lambda: os.write(os.open("d/b.md", os.O_WRONLY | os.O_APPEND), b"!"))
        see("read", b"new!", reread, fd, 10, 0)
        see("chmod", None, os.fchmod, fd, 0o600)
        os.rename("d", "e")
        see("write after its directory moved", 2, os.pwrite, fd, b"NE", 0)
    see("content", b"NEw!", read, "e/b.md")


@case()
def test_over_an_open_file(see: See) -> None:
    """A descriptor of the replaced file keeps the replaced file."""
    make("a.md", b"the new one")
    make("b.md", b"the old one")
    with opened("b.md") as fd:
        before = os.fstat(fd).st_ino
        os.rename("a.md", "b.md")
        see("read", b"the old one", reread, fd, 100, 0)
        see("write", 3, os.write, fd, b"THE")
        see("read again", b"THE old one", reread, fd, 100, 0)
        see("links", 0, links, fd)
        see("inode", True, lambda: os.fstat(fd).st_ino == before)
        see("cut", None, os.ftruncate, fd, 3)
        see("size", 3, size, fd)
        see("the name", b"the new one", read, "b.md")
        see("write by name", 3, write, "b.md", b"The")
        see("the descriptor", b"THE", reread, fd, 100, 0)
    see("in the end", b"The new one", read, "b.md")


@case()
def test_over_one_of_two_names(see: See) -> None:
    """A file of which one name is replaced lives on under the other."""
    make("a.md", b"a")
    make("b.md", b"b")
    os.link("b.md", "c.md")
    with opened("b.md") as fd:
        os.rename("a.md", "b.md")
        see("links", 1, links, fd)
        see("write", 3, os.write, fd, b"bbb")
        see("by its other name", b"bbb", read, "c.md")
    see("the name", b"a", read, "b.md")


@case()
def test_stamps(see: See) -> None:
    """A rename stamps both directories, and nothing of the content."""
    os.mkdir("one")
    os.mkdir("two")
    make("one/a.md", b"a")
    for path in ("one", "two", "one/a.md"):
        os.utime(path, ns=(0, 0))
    changed = times("one/a.md")[1]
    tick()
    os.rename("one/a.md", "two/a.md")
    see("old directory", True, lambda: times("one")[0] > 0)
    see("new directory", True, lambda: times("two")[0] > 0)
    see("content", 0, lambda: times("two/a.md")[0])
    see("change", ANY, lambda: times("two/a.md")[1] > changed)


@case()
def test_write_and_replace(see: See) -> None:
    """A hundred times written to a second file and renamed over: readers see one or the other, complete."""
    make("a.md", b"0" * 1000)
    seen = []
    for number in range(1, 100):
        make("b.md", b"%d" % (number % 10) * 1000)
        os.rename("b.md", "a.md")
        seen.append(len(set(read("a.md"))) == 1 and size("a.md") == 1000 and read("a.md")[:1] == b"%d" % (number % 10))
    see("whole and new", [True] * 99, lambda: seen)
    see("listed", ["a.md"], names, see.at)


@case()
def test_a_round(see: See) -> None:
    """Names that go round in a circle end where they should."""
    for number in range(10):
        make(f"{number}.md", b"%d" % number)
    os.rename("0.md", "spare.md")
    for number in range(1, 10):
        os.rename(f"{number}.md", f"{number - 1}.md")
    os.rename("spare.md", "9.md")
    see("contents", [b"%d" % ((n + 1) % 10) for n in range(10)], lambda: [read(f"{n}.md") for n in range(10)])


@case()
def test_missing_after_a_failed_one(see: See) -> None:
    """A rename that fails leaves both names as they were."""
    make("a.md", b"a")
    os.makedirs("d/e")
    see("refused", "EISDIR", os.rename, "a.md", "d")
    see("the file", b"a", read, "a.md")
    see("the directory", ["e"], names, see.at / "d")
    see("refused again", "ENOENT", lambda: attempt(os.rename, "a.md", "x/b.md"))
    see("the file again", b"a", read, "a.md")
