"""link(2), symlink(2), unlink(2): several names for one file, names for names, and names that go."""

from __future__ import annotations

import os

from tests.posix.harness import See, case
from tests.support.syscalls import (
    AT_SYMLINK_FOLLOW,
    inode,
    kind,
    link_open,
    linkat,
    links,
    make,
    mode,
    names,
    opened,
    opening,
    read,
    size,
    tick,
    times,
    write,
)


@case()
def test_two_names(see: See) -> None:
    """Two names of a file share inode, content, mode and times, and are counted."""
    os.mkdir("d")
    make("a.md", b"content")
    see("link", None, os.link, "a.md", "b.md")
    see("link in another directory", None, os.link, "b.md", "d/c.md")
    see("inode", True, lambda: inode("a.md") == inode("b.md") == inode("d/c.md"))
    see("links", [3, 3, 3], lambda: [links("a.md"), links("b.md"), links("d/c.md")])
    see("write through one", 3, write, "d/c.md", b"CON")
    see("read through another", b"CONtent", read, "a.md")
    os.chmod("b.md", 0o600)
    see("mode", "0600", mode, "a.md")
    os.utime("b.md", ns=(5, 7))
    see("time", 7, lambda: times("d/c.md")[0])
    os.truncate("a.md", 1)
    see("size", 1, size, "b.md")
    see("unlink one", None, os.unlink, "a.md")
    see("links left", 2, links, "b.md")
    see("content left", b"C", read, "d/c.md")
    os.unlink("d/c.md")
    see("the last", 1, links, "b.md")


@case()
def test_link_errors(see: See) -> None:
    """What cannot be linked."""
    make("a.md")
    make("b.md")
    os.mkdir("d")
    see("a directory", "EPERM", os.link, "d", "e")
    see("onto a file", "EEXIST", os.link, "a.md", "b.md")
    see("onto a directory", "EEXIST", os.link, "a.md", "d")
    see("onto itself", "EEXIST", os.link, "a.md", "a.md")
    see("a missing file", "ENOENT", os.link, "x.md", "y.md")
    see("into a missing directory", "ENOENT", os.link, "a.md", "x/y.md")
    see("below a file", "ENOTDIR", os.link, "a.md", "b.md/c.md")
    see("another file system", "EXDEV", os.link, "a.md", "/dev/a.md")
    see("a long name", "ENAMETOOLONG", os.link, "a.md", "x" * 253 + ".md")
    see("links", 1, links, "a.md")


@case()
def test_other_kinds_linked(see: See) -> None:
    """Symlinks and FIFOs can have several names as well."""
    os.symlink("target", "l.md")
    os.mkfifo("p.md")
    see("a symlink", None, lambda: os.link("l.md", "l2.md", follow_symlinks=False))
    see("is one", ("target", 2), lambda: (os.readlink("l2.md"), links("l.md")))
    see("a fifo", None, os.link, "p.md", "p2.md")
    see("is a fifo", ("p", 2), lambda: (kind("p2.md"), links("p.md")))


@case()
def test_followed_link(see: See) -> None:
    """linkat follows a symlink only with AT_SYMLINK_FOLLOW."""
    make("a.md")
    os.symlink("a.md", "l.md")
    see("followed", None, linkat, "l.md", "b.md", AT_SYMLINK_FOLLOW)
    see("the file", ("-", 2), lambda: (kind("b.md"), links("a.md")))
    see("not followed", None, linkat, "l.md", "m.md", 0)
    see("the symlink", ("l", 2), lambda: (kind("m.md"), links("l.md")))


@case()
def test_link_stamps(see: See) -> None:
    """A link stamps the directory, and the file's change."""
    os.mkdir("d")
    make("a.md")
    os.utime("d", ns=(0, 0))
    before = times("a.md")[1]
    tick()
    os.link("a.md", "d/b.md")
    see("directory", True, lambda: times("d")[0] > 0)
    see("change", True, lambda: times("a.md")[1] > before)
    os.utime("d", ns=(0, 0))
    before = times("a.md")[1]
    tick()
    os.unlink("d/b.md")
    see("directory after unlink", True, lambda: times("d")[0] > 0)
    see("change after unlink", True, lambda: times("a.md")[1] > before)


@case()
def test_linked_while_open(see: See) -> None:
    """A descriptor and names that come and go show one file."""
    make("a.md", b"start")
    with opened("a.md") as fd:
        os.link("a.md", "b.md")
        os.unlink("a.md")
        see("links", 1, links, fd)
        os.write(fd, b"START")
        see("by the new name", b"START", read, "b.md")
        write("b.md", b"e")
        see("by the descriptor", b"eTART", os.pread, fd, 10, 0)
        link_open(fd, "c.md")
        see("linked by its descriptor", 2, links, fd)
    see("listed", ["b.md", "c.md"], names, see.at)


@case()
def test_link_by_descriptor(see: See) -> None:
    """linkat from /proc names the file that is open."""
    make("a.md", b"content")
    with opened("a.md", os.O_RDONLY) as fd:
        see("link", None, link_open, fd, "b.md")
        os.unlink("a.md")
        os.unlink("b.md")
        see("of a file with no name", "ENOENT", link_open, fd, "c.md")


@case()
def test_symlink(see: See) -> None:
    """A symlink holds its text and is followed."""
    os.mkdir("d")
    make("d/a.md", b"content")
    see("symlink", None, os.symlink, "d/a.md", "l.md")
    see("text", "d/a.md", os.readlink, "l.md")
    see("kind", "l", kind, "l.md")
    see("size", 6, size, "l.md")
    see("mode", "0777", mode, "l.md")
    see("links", 1, links, "l.md")
    see("followed", b"content", read, "l.md")
    see("write through it", 3, write, "l.md", b"CON")
    see("target", b"CONtent", read, "d/a.md")
    os.symlink("d", "dl.md")
    see("through a directory", b"CONtent", read, "dl.md/a.md")
    see("create through it", None, make, "dl.md/b.md")
    see("upwards", None, os.symlink, "../l.md", "d/up.md")
    see("followed upwards", b"CONtent", read, "d/up.md")
    see("listed", ["a.md", "b.md", "up.md"], names, see.at / "d")
    see("unlink", None, os.unlink, "l.md")
    see("the target stays", b"CONtent", read, "d/a.md")
    see("with a slash", "ENOTDIR", os.unlink, "dl.md/")
    see("rmdir of a link", "ENOTDIR", os.rmdir, "dl.md")


@case()
def test_symlink_outside(see: See) -> None:
    """A symlink's text may be anything, whether or not it leads somewhere."""
    see("absolute", None, os.symlink, "/etc/hostname", "absolute.md")
    see("its text", "/etc/hostname", os.readlink, "absolute.md")
    see("far up", None, os.symlink, "../" * 30 + "etc", "up.md")
    see("its text too", "../" * 30 + "etc", os.readlink, "up.md")
    see("slashes only", None, os.symlink, "//", "root.md")
    see("dot", None, os.symlink, ".", "dot.md")
    see("dots", None, os.symlink, "..", "dots.md")
    see("round about", None, os.symlink, "../" + see.at.name + "/x.md", "about.md")


@case()
def test_symlink_texts(see: See) -> None:
    """Texts of every length and of any bytes come back as they were."""
    for length in (1, 59, 60, 255, 1023, 4000, 4095):
        text = "x/" * (length // 2) + "y" * (length % 2)
        see(f"{length} bytes", None, os.symlink, text, f"l{length}.md")
        see(f"{length} back", text, os.readlink, f"l{length}.md")
        see(f"{length} as size", length, size, f"l{length}.md")
    see("4096 bytes", "ENAMETOOLONG", os.symlink, "x" * 4096, "l.md")
    see("none", "ENOENT", os.symlink, "", "l.md")
    see("not UTF-8", None, os.symlink, b"\xff\xfe \n\x1b", b"l.md")
    see("back", b"\xff\xfe \n\x1b", os.readlink, b"l.md")


@case()
def test_symlink_errors(see: See) -> None:
    """Loops, names that exist, and what is not a symlink."""
    make("a.md")
    os.mkdir("d")
    os.symlink("self.md", "self.md")
    os.symlink("two.md", "one.md")
    os.symlink("one.md", "two.md")
    see("itself", "ELOOP", os.stat, "self.md")
    see("each other", "ELOOP", opening, "one.md")
    see("on the way", "ELOOP", os.stat, "one.md/x")
    see("lstat", "l", kind, "one.md")
    see("onto a file", "EEXIST", os.symlink, "x", "a.md")
    see("onto a directory", "EEXIST", os.symlink, "x", "d")
    see("onto a symlink", "EEXIST", os.symlink, "x", "self.md")
    see("in a missing directory", "ENOENT", os.symlink, "x", "y/z")
    see("below a file", "ENOTDIR", os.symlink, "x", "a.md/z")
    see("readlink of a file", "EINVAL", os.readlink, "a.md")
    see("readlink of a directory", "EINVAL", os.readlink, "d")
    see("readlink of nothing", "ENOENT", os.readlink, "x")
    os.symlink("a.md", "file.md")
    os.symlink("nowhere", "dangling.md")
    see("through a file", "ENOTDIR", os.stat, "file.md/x")
    see("dangling", "ENOENT", os.stat, "dangling.md")


@case()
def test_symlink_chain(see: See) -> None:
    """Forty symlinks in a row are followed, forty-one are not."""
    os.mkdir("0.md")
    for number in range(1, 42):
        os.symlink(f"{number - 1}.md", f"{number}.md")
    see("forty", True, lambda: os.stat("40.md").st_ino == inode("0.md"))
    see("forty-one", "ELOOP", os.stat, "41.md")


@case()
def test_symlink_attributes(see: See) -> None:
    """Times and owner of a symlink are its own."""
    make("a.md")
    os.symlink("a.md", "l.md")
    os.utime("a.md", ns=(1, 1))
    see("set times", None, lambda: os.utime("l.md", ns=(123_456_789_012, 987_654_321_098), follow_symlinks=False))
    see("its time", 987_654_321_098, lambda: times("l.md")[0])
    see("the target's time", 1, lambda: times("a.md")[0])
    see("chown to its owner", None, os.lchown, "l.md", os.geteuid(), os.getegid())
    see("through it", None, lambda: os.utime("l.md", ns=(5, 5)))
    see("the target's time then", 5, lambda: times("a.md")[0])


@case()
def test_replaced_symlink(see: See) -> None:
    """A symlink that is replaced leads to its new target at once."""
    make("a.md", b"a")
    make("b.md", b"b")
    os.symlink("a.md", "l.md")
    see("first", b"a", read, "l.md")
    os.unlink("l.md")
    os.symlink("b.md", "l.md")
    see("second", b"b", read, "l.md")
    os.symlink("a.md", "m.md")
    os.rename("m.md", "l.md")
    see("third", b"a", read, "l.md")
    see("text", "a.md", os.readlink, "l.md")


@case()
def test_unlink(see: See) -> None:
    """What unlink removes, and what it refuses."""
    make("a.md")
    os.mkdir("d")
    make("d/b.md")
    see("a file", None, os.unlink, "a.md")
    see("twice", "ENOENT", os.unlink, "a.md")
    see("stat", "ENOENT", os.stat, "a.md")
    see("a directory", "EISDIR", os.unlink, "d")
    see("below a file", "ENOTDIR", os.unlink, "d/b.md/c.md")
    see("a file with a slash", "ENOTDIR", os.unlink, "d/b.md/")
    see("dot", "EISDIR", os.unlink, "d/.")
    see("in a missing directory", "ENOENT", os.unlink, "x/y.md")
    os.mkfifo("p.md")
    see("a fifo", None, os.unlink, "p.md")
    see("listed", ["d"], names, see.at)
