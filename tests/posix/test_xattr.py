"""setxattr(2) and its like: extended attributes of every kind of file."""

from __future__ import annotations

import os
import random

from tests.posix.harness import ANY, See, case
from tests.support.syscalls import ANNA, BERT, make, mode, opened, read, times


def _names(path: str) -> list[str]:
    return sorted(os.listxattr(path, follow_symlinks=False))


@case()
def test_attributes(see: See) -> None:
    """An attribute is set, read, listed and removed."""
    make("a.md", b"content")
    os.mkdir("d")
    for name in ("a.md", "d"):
        see(f"none on {name}", [], _names, name)
        see(f"missing on {name}", "ENODATA", os.getxattr, name, "user.one")
        see(f"set on {name}", None, os.setxattr, name, "user.one", b"1\0\xff")
        see(f"get from {name}", b"1\0\xff", os.getxattr, name, "user.one")
        see(f"empty on {name}", None, os.setxattr, name, "user.empty", b"")
        see(f"get empty from {name}", b"", os.getxattr, name, "user.empty")
        see(f"list {name}", ["user.empty", "user.one"], _names, name)
        see(f"replace on {name}", None, os.setxattr, name, "user.one", b"another")
        see(f"get again from {name}", b"another", os.getxattr, name, "user.one")
        see(f"remove from {name}", None, os.removexattr, name, "user.one")
        see(f"gone from {name}", "ENODATA", os.getxattr, name, "user.one")
        see(f"remove again from {name}", "ENODATA", os.removexattr, name, "user.one")
        see(f"list {name} again", ["user.empty"], _names, name)
    see("content", b"content", read, "a.md")


@case()
def test_flags(see: See) -> None:
    """XATTR_CREATE and XATTR_REPLACE mean what they say."""
    make("a.md")
    see("replace what is not", "ENODATA", os.setxattr, "a.md", "user.a", b"1", os.XATTR_REPLACE)
    see("create", None, os.setxattr, "a.md", "user.a", b"2", os.XATTR_CREATE)
    see("create what is", "EEXIST", os.setxattr, "a.md", "user.a", b"3", os.XATTR_CREATE)
    see("replace", None, os.setxattr, "a.md", "user.a", b"4", os.XATTR_REPLACE)
    see("value", b"4", os.getxattr, "a.md", "user.a")


@case()
def test_names_and_sizes(see: See) -> None:
    """How long and of what kind names and values may be."""
    make("a.md")
    see("a longest name", None, os.setxattr, "a.md", "user." + "n" * 250, b"v")
    see("too long a name", "ERANGE", os.setxattr, "a.md", "user." + "n" * 251, b"v")
    see("no name", ANY, os.setxattr, "a.md", "user.", b"v")
    see("no prefix", "EOPNOTSUPP", os.setxattr, "a.md", "plain", b"v")
    see("an unknown prefix", "EOPNOTSUPP", os.setxattr, "a.md", "other.name", b"v")
    see("get without prefix", "EOPNOTSUPP", os.getxattr, "a.md", "plain")
    see("not UTF-8", None, os.setxattr, "a.md", b"user.\xff\xfe", b"v")
    see("that back", b"v", os.getxattr, "a.md", b"user.\xff\xfe")
    value = random.Random(7).randbytes(2000)
    see("two thousand bytes", None, os.setxattr, "a.md", "user.large", value)
    see("those back", value, os.getxattr, "a.md", "user.large")
    see("65536 bytes", ANY, os.setxattr, "a.md", "user.huge", b"x" * 65536)
    see("65537 bytes", "E2BIG", os.setxattr, "a.md", "user.huge", b"x" * 65537)
    see("missing file", "ENOENT", os.setxattr, "x", "user.a", b"v")
    see("listing of a missing file", "ENOENT", os.listxattr, "x")


@case()
def test_other_kinds(see: See) -> None:
    """Symlinks and FIFOs carry no attributes of users."""
    os.mkfifo("p.md")
    os.symlink("nowhere", "l.md")
    see("a fifo", "EPERM", os.setxattr, "p.md", "user.a", b"v")
    see("a symlink", "EPERM", lambda: os.setxattr("l.md", "user.a", b"v", follow_symlinks=False))
    see("lists of them", [[], []], lambda: [_names("p.md"), _names("l.md")])
    make("a.md")
    os.symlink("a.md", "m.md")
    see("through a symlink", None, os.setxattr, "m.md", "user.a", b"v")
    see("on the target", b"v", os.getxattr, "a.md", "user.a")


@case()
def test_follow_the_file(see: See) -> None:
    """Attributes go with the file: names, descriptors, and until the last of both is gone."""
    make("a.md")
    os.setxattr("a.md", "user.a", b"1")
    os.link("a.md", "b.md")
    os.rename("a.md", "c.md")
    see("by another name", b"1", os.getxattr, "b.md", "user.a")
    with opened("c.md") as fd:
        see("by descriptor", b"1", os.getxattr, fd, "user.a")
        see("set by descriptor", None, os.setxattr, fd, "user.b", b"2")
        see("by name", b"2", os.getxattr, "b.md", "user.b")
        os.unlink("b.md")
        os.unlink("c.md")
        see("without a name", b"1", os.getxattr, fd, "user.a")
        see("set without a name", None, os.setxattr, fd, "user.c", b"3")
        see("listed", ["user.a", "user.b", "user.c"], lambda: sorted(os.listxattr(fd)))
        see("removed", None, os.removexattr, fd, "user.a")
        see("left", ["user.b", "user.c"], lambda: sorted(os.listxattr(fd)))
    make("a.md")
    see("not on a new file", [], _names, "a.md")


@case()
def test_many(see: See) -> None:
    """Forty attributes at once."""
    make("a.md")
    for number in range(40):
        os.setxattr("a.md", f"user.number-{number}", b"%d" % number)
    see("list", sorted(f"user.number-{n}" for n in range(40)), _names, "a.md")
    values = [b"%d" % n for n in range(40)]
    see("values", values, lambda: [os.getxattr("a.md", f"user.number-{n}") for n in range(40)])


@case()
def test_stamps(see: See) -> None:
    """An attribute stamps the change and not the content."""
    make("a.md", b"x")
    os.utime("a.md", ns=(5, 7))
    os.setxattr("a.md", "user.a", b"1")
    see("content", 7, lambda: times("a.md")[0])
    see("mode", "0644", mode, "a.md")


@case(root=True)
def test_rights(see: See) -> None:
    """Reading an attribute needs reading the file, setting it writing."""
    make("a.md")
    os.setxattr("a.md", "user.a", b"1")
    path = see.at / "a.md"
    see("get", b"1", os.getxattr, path, "user.a", by=ANNA)
    see("set", "EACCES", os.setxattr, path, "user.a", b"2", by=ANNA)
    see("remove", "EACCES", os.removexattr, path, "user.a", by=ANNA)
    os.chmod(path, 0o600)
    see("get without rights", "EACCES", os.getxattr, path, "user.a", by=ANNA)
    os.chmod(path, 0o666)
    see("set with rights", None, os.setxattr, path, "user.a", b"2", by=ANNA)
    os.mkdir("d")
    os.chmod("d", 0o1777)
    see("on another's sticky directory", "EPERM", os.setxattr, see.at / "d", "user.a", b"1", by=BERT)


@case(root=True)
def test_other_namespaces(see: See) -> None:
    """trusted.* is root's, security.* goes through."""
    make("a.md")
    os.chmod("a.md", 0o666)
    path = see.at / "a.md"
    see("trusted", None, os.setxattr, path, "trusted.a", b"1")
    see("told to root", b"1", os.getxattr, path, "trusted.a")
    see("listed to root", ["trusted.a"], _names, str(path))
    see("not told to others", "ENODATA", os.getxattr, path, "trusted.a", by=ANNA)
    see("not set by others", "EPERM", os.setxattr, path, "trusted.a", b"2", by=ANNA)
    see("not listed to others", [], _names, str(path), by=ANNA)
    see("security", None, os.setxattr, path, "security.test", b"1")
    see("security told", b"1", os.getxattr, path, "security.test", by=ANNA)
    see("security by others", "EPERM", os.setxattr, path, "security.test", b"2", by=ANNA)
    os.symlink("x", "l.md")
    see("trusted on a symlink", None, lambda: os.setxattr("l.md", "trusted.a", b"1", follow_symlinks=False))
    see("told of the symlink", b"1", lambda: os.getxattr("l.md", "trusted.a", follow_symlinks=False))
    os.mkfifo("p.md")
    see("trusted on a fifo", None, os.setxattr, "p.md", "trusted.a", b"1")
