"""Names: of any bytes, of any length that a directory takes, and paths made of them."""

from __future__ import annotations

import os
import unicodedata

from tests.posix.harness import See, case
from tests.support.syscalls import kind, make, names, opening, read

ODD = (
    b"\xff\xfe.md",
    b"\x80\xc3\x28.md",
    b"new\nline.md",
    b"\x1b[31m.md",
    b"tab\t.md",
    b" space .md",
    b"back\\slash.md",
    b"quo'te\".md",
    b"*?[a].md",
    b"-dash.md",
    b"\x01\x02\x7f.md",
    "übergröße.md".encode(),
    "日本語.md".encode(),
    "\u202egnp.md".encode(),
    "\U0001f412.md".encode(),
    b"a..b.md",
    b"...md.md",
)


@case()
def test_any_bytes(see: See) -> None:
    """Every byte but the slash and NUL may be in a name; the name comes back as it was."""
    for name in ODD[:-1]:
        see(f"create {name!r}", None, make, name, name)
        see(f"read {name!r}", name, read, name)
    see("listed", sorted(ODD[:-1]), lambda: sorted(os.listdir(b".")))
    for name in ODD[:-1]:
        os.rename(name, b"x" + name)
    see("listed after renaming", sorted(b"x" + name for name in ODD[:-1]), lambda: sorted(os.listdir(b".")))
    see("read then", list(ODD[:-1]), lambda: [read(b"x" + name) for name in ODD[:-1]])
    for name in ODD[:-1]:
        os.unlink(b"x" + name)
    see("none left", [], names, see.at)


@case()
def test_any_bytes_of_directories(see: See) -> None:
    """Directories and symlinks take any bytes as well."""
    for number, name in enumerate((b"\xff\xfe", b"new\nline", b"\x1b[31m", "é".encode(), b"trailing ", b"trailing.")):
        see(f"mkdir {name!r}", None, os.mkdir, name)
        see(f"create in {name!r}", None, make, name + b"/a.md", b"%d" % number)
        see(f"symlink to {name!r}", None, os.symlink, name, b"to-" + name + b".md")
        see(f"read through {name!r}", b"%d" % number, read, b"to-" + name + b".md/a.md")
        see(f"text of {name!r}", name, os.readlink, b"to-" + name + b".md")


@case()
def test_hidden(see: See) -> None:
    """Names that begin with a dot are names like others."""
    see("a file", None, make, ".hidden.md", b"x")
    see("read", b"x", read, ".hidden.md")
    see("a directory", None, os.mkdir, ".d")
    see("three dots", None, os.mkdir, "...")
    see("listed", ["...", ".d", ".hidden.md"], names, see.at)


@case()
def test_look_alikes(see: See) -> None:
    """Names that look alike or differ in case are different names."""
    composed = "\u00e9.md"
    decomposed = unicodedata.normalize("NFD", composed)
    for name in (composed, decomposed, "A.md", "a.md", "a .md", "a\u200b.md"):
        see(f"create {name!r}", None, make, name, name.encode())
    for name in (composed, decomposed, "A.md", "a.md", "a .md", "a\u200b.md"):
        see(f"read {name!r}", name.encode(), read, name)
    see("as many", 6, lambda: len(os.listdir(".")))


@case()
def test_other_endings(see: See) -> None:
    """What a name ends in says nothing about the file."""
    for name in ("plain", "a.txt", "a.py", "a.MD", "a.md.", "a.md.txt", "a.md "):
        see(name, None, make, name)
        see(f"kind of {name}", "-", kind, name)
    make("b.md", b"x")
    see("rename", None, os.rename, "b.md", "b.txt")
    make("c.md", b"x")
    see("link", None, os.link, "c.md", "c.txt")


@case()
def test_length(see: See) -> None:
    """255 bytes are the longest name, for every kind of file."""
    long, longer = "x" * 252 + ".md", "x" * 253 + ".md"
    see("create", None, make, long, b"long")
    see("read", b"long", read, long)
    see("listed", [long], names, see.at)
    for what, call in (
        ("open", lambda: opening(longer)),
        ("create", lambda: make(longer)),
        ("mkdir", lambda: os.mkdir(longer)),
        ("symlink", lambda: os.symlink("x", longer)),
        ("mkfifo", lambda: os.mkfifo(longer)),
        ("link", lambda: os.link(long, longer)),
        ("rename", lambda: os.rename(long, longer)),
        ("unlink", lambda: os.unlink(longer)),
        ("rmdir", lambda: os.rmdir(longer)),
        ("stat", lambda: os.stat(longer)),
        ("below", lambda: os.stat(f"{longer}/x")),
    ):
        see(f"{what} of 256 bytes", "ENAMETOOLONG", call)
    see("rename to 255 bytes", None, os.rename, long, "y" * 252 + ".md")
    see("in bytes, not letters", None, make, "ü" * 126 + ".md")
    see("one letter more", "ENAMETOOLONG", make, "ü" * 127 + ".md")
    see("not UTF-8", None, make, b"\xff" * 252 + b".md")
    see("unlink", None, os.unlink, b"\xff" * 252 + b".md")


@case()
def test_paths(see: See) -> None:
    """A path of 4095 bytes is followed, one of 4096 is not."""
    make("a.md", b"x")
    longest = "./" * 2045 + "/a.md"
    see("its length", 4095, lambda: len(longest))
    see("4095 bytes", b"x", read, longest)
    see("4096 bytes", "ENAMETOOLONG", read, "./" * 2046 + "a.md")


@case()
def test_dots_and_slashes(see: See) -> None:
    """Dots and repeated slashes lead where they should."""
    os.makedirs("d/e")
    make("a.md", b"x")
    for path in ("./a.md", ".//a.md", "d/../a.md", "d/e/../../a.md", "d/./e/.././../a.md"):
        see(path, b"x", read, path)
    see("through what is missing", "ENOENT", read, "x/../a.md")
    see("through a file", "ENOTDIR", read, "a.md/../a.md")
    see("create", None, make, "d/../d/e/../b.md")
    see("listed", ["b.md", "e"], names, see.at / "d")
