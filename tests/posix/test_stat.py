"""stat(2), utimensat(2), statvfs(3): the attributes of a file, and the times that can be set."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from tests.posix.harness import ANY, See, case
from tests.support.syscalls import (
    ANNA,
    UTIME_NOW,
    UTIME_OMIT,
    append,
    changed_since,
    inode,
    kind,
    links,
    make,
    opened,
    read,
    size,
    tick,
    times,
    utimensat,
)


@case()
def test_inode_stays(see: See) -> None:
    """An inode number is constant for the life of a file, by every way of reading it."""
    make("a.md", b"content")
    os.mkdir("d")
    number = inode("a.md")
    with opened("a.md") as fd:
        see("by descriptor", True, lambda: inode(fd) == number)
    see("by the entry", True, lambda: {e.name: e.inode() for e in os.scandir(".")}["a.md"] == number)
    append("a.md", b"more")
    os.chmod("a.md", 0o600)
    os.rename("a.md", "d/b.md")
    see("after changes", True, lambda: inode("d/b.md") == number)
    os.rename("d", "e")
    see("after its directory moved", True, lambda: inode("e/b.md") == number)
    make("a.md")
    see("different files", False, lambda: inode("a.md") == number)


@case()
def test_kinds_and_sizes(see: See) -> None:
    """Kind, size and link count of a file, a directory and a symlink."""
    make("a.md", b"12345")
    os.mkdir("d")
    os.symlink("a.md", "l.md")
    see("file", (0o100644, 5, 1), lambda: (os.lstat("a.md").st_mode, size("a.md"), links("a.md")))
    see("directory", (0o040755, 2), lambda: (os.lstat("d").st_mode, links("d")))
    see("symlink", (0o120777, 4, 1), lambda: (os.lstat("l.md").st_mode, size("l.md"), links("l.md")))
    see("followed", 0o100644, lambda: os.stat("l.md").st_mode)
    see("one device", True, lambda: len({os.lstat(name).st_dev for name in ("a.md", "d", "l.md", ".")}) == 1)
    see("block size", ANY, lambda: os.stat("a.md").st_blksize)
    see("directory size", ANY, lambda: size("d"))
    see("missing", "ENOENT", os.stat, "x")
    see("below a file", "ENOTDIR", os.stat, "a.md/x")
    see("a file with a slash", "ENOTDIR", os.stat, "a.md/")
    see("too long", "ENAMETOOLONG", os.stat, "x" * 256)


@case()
def test_blocks(see: See) -> None:
    """Blocks are counted as used, not as long."""
    make("empty.md")
    make("small.md", b"x")
    make("large.md", b"x" * 100_000)
    make("sparse.md")
    os.truncate("sparse.md", 900_000)
    for name in ("empty", "small", "large", "sparse"):
        with opened(f"{name}.md") as fd:
            os.fsync(fd)
    see("empty", 0, lambda: os.stat("empty.md").st_blocks)
    see("small", 8, lambda: os.stat("small.md").st_blocks)
    see("large", 200, lambda: os.stat("large.md").st_blocks)
    see("sparse", 0, lambda: os.stat("sparse.md").st_blocks)
    os.truncate("large.md", 0)
    see("after a cut", 0, lambda: os.stat("large.md").st_blocks)


@case()
def test_times_set(see: See) -> None:
    """Times are kept to the nanosecond, before 1970 and after 2038."""
    make("a.md")
    os.mkdir("d")
    os.mkfifo("p.md")
    for name in ("a.md", "d", "p.md"):
        for access, change in (
            (0, 0),
            (1, 999_999_999),
            (1_234_567_890_123_456_789, 987_654_321_987_654_321),
            (-1_000_000_001, -5_000_000_000),
            (2**32 * 10**9 + 7, 2**33 * 10**9 + 123_456_789),
        ):
            see(f"set {change} on {name}", None, _set_both, name, access, change)
            see(f"told {change} of {name}", (access, change), _both, name)
    with opened("a.md") as fd:
        os.utime(fd, ns=(11, 12))
        see("by descriptor", (11, 12), _both, "a.md")
    see("missing", "ENOENT", os.utime, "x", (1, 1))


def _set_both(path: str, access: int, change: int) -> None:
    os.utime(path, ns=(access, change))


def _both(path: str) -> tuple[int, int]:
    s = os.lstat(path)
    return s.st_atime_ns, s.st_mtime_ns


@case()
def test_times_one_by_one(see: See) -> None:
    """UTIME_OMIT leaves a time, UTIME_NOW sets it to now, and the change is always stamped."""
    make("a.md")
    os.utime("a.md", ns=(5, 7))
    see("omit the first", None, utimensat, see.at / "a.md", (0, UTIME_OMIT), (3, 4))
    see("then", (5, 3_000_000_004), _both, "a.md")
    see("omit the second", None, utimensat, see.at / "a.md", (8, 9), (0, UTIME_OMIT))
    see("and then", (8_000_000_009, 3_000_000_004), _both, "a.md")
    before = times("a.md")[1]
    tick()
    see("omit both", None, utimensat, see.at / "a.md", (0, UTIME_OMIT), (0, UTIME_OMIT))
    see("nothing stamped", True, lambda: times("a.md")[1] == before)
    now = time.time_ns() - 10**9
    see("now", None, utimensat, see.at / "a.md", (0, UTIME_NOW), (0, UTIME_NOW))
    see("both are now", True, lambda: all(now < t < now + 60 * 10**9 for t in _both("a.md")))
    see("change stamped", True, changed_since, "a.md", before)
    see("one now", None, utimensat, see.at / "a.md", (1, 2), (0, UTIME_NOW))
    see("the other as told", 1_000_000_002, lambda: _both("a.md")[0])
    see("no nanoseconds", "EINVAL", utimensat, see.at / "a.md", (0, 10**9), (0, 0))


@case()
def test_set_times_stay(see: See) -> None:
    """Times that were set through a descriptor stay when it is closed after writing."""
    make("a.md")
    with opened("a.md") as fd:
        os.write(fd, b"content")
        os.utime(fd, ns=(5, 7))
    see("after close", (5, 7), _both, "a.md")
    read("a.md")
    see("modified, after reading", 7, lambda: _both("a.md")[1])
    os.rename("a.md", "b.md")
    os.chmod("b.md", 0o600)
    see("after rename and chmod", 7, lambda: _both("b.md")[1])


@case()
def test_change_is_stamped(see: See) -> None:
    """What changes the inode and not the content stamps the change alone."""
    make("a.md")
    os.utime("a.md", ns=(5, 7))
    changes: dict[str, Callable[[], object]] = {
        "chmod": lambda: os.chmod("a.md", 0o600),
        "chown": lambda: os.chown("a.md", os.geteuid(), os.getegid()),
        "link": lambda: os.link("a.md", "b.md"),
        "unlink": lambda: os.unlink("b.md"),
        "setxattr": lambda: os.setxattr("a.md", "user.a", b"1"),
        "removexattr": lambda: os.removexattr("a.md", "user.a"),
        "utime": lambda: os.utime("a.md", ns=(5, 7)),
    }
    for what, call in changes.items():
        before = times("a.md")[1]
        tick()
        call()
        see(what, True, changed_since, "a.md", before)
    see("content", (5, 7), _both, "a.md")


@case(root=True)
def test_times_by_others(see: See) -> None:
    """The owner sets any time, who may write sets now, others none."""
    make("a.md", mode=0o644)
    make("b.md")
    os.chmod("b.md", 0o666)
    make("c.md")
    os.chown("c.md", *ANNA[:2])
    a, b, c = see.at / "a.md", see.at / "b.md", see.at / "c.md"
    now, set_time = ((0, UTIME_NOW), (0, UTIME_NOW)), ((1, 1), (2, 2))
    see("another's", "EPERM", utimensat, a, *set_time, by=ANNA)
    see("another's, now", "EACCES", utimensat, a, *now, by=ANNA)
    see("a writable one", "EPERM", utimensat, b, *set_time, by=ANNA)
    see("a writable one, now", None, utimensat, b, *now, by=ANNA)
    see("one's own", None, utimensat, c, *set_time, by=ANNA)
    see("told", 2_000_000_002, lambda: times("c.md")[0])
    os.chmod("c.md", 0)
    see("one's own without rights", None, utimensat, c, *now, by=ANNA)


@case()
def test_file_system(see: See) -> None:
    """statvfs tells of the file system below."""
    vfs = os.statvfs(".")
    see("longest name", 255, lambda: vfs.f_namemax)
    see("blocks", ANY, lambda: (vfs.f_bsize, vfs.f_frsize, vfs.f_blocks, vfs.f_files))
    see("writable", 0, lambda: vfs.f_flag & os.ST_RDONLY)
    make("a.md")
    with opened("a.md") as fd:
        see("by descriptor", ANY, lambda: os.fstatvfs(fd).f_blocks)
    see("missing", "ENOENT", os.statvfs, "x")


@case()
def test_missing_then_made(see: See) -> None:
    """A name that was looked up in vain is there after its creation, by any call."""
    makers: dict[str, Callable[[], object]] = {
        "open.md": lambda: make("open.md"),
        "mkdir": lambda: os.mkdir("mkdir"),
        "symlink.md": lambda: os.symlink("mkdir", "symlink.md"),
        "mkfifo.md": lambda: os.mkfifo("mkfifo.md"),
        "link.md": lambda: os.link("mkfifo.md", "link.md"),
        "rename": lambda: os.rename("mkdir", "rename"),
    }
    for name, call in makers.items():
        see(f"before {name}", False, os.path.lexists, name)
        call()
        see(f"after {name}", True, os.path.lexists, name)
    see("what was renamed away", False, os.path.lexists, "mkdir")
    see("kinds", "-lppd", lambda: "".join(map(kind, ("open.md", "symlink.md", "mkfifo.md", "link.md", "rename"))))
