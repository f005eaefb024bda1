"""mkdir(2), rmdir(2), readdir(3): directories made, removed, and read while they change."""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from tests.posix.harness import ANY, See, case
from tests.support.syscalls import (
    Stream,
    changed_since,
    entries,
    inode,
    kind,
    links,
    make,
    mode,
    names,
    opened,
    read,
    tick,
    times,
)

CROWD = 100_000
"""Entries of the directory `crowd` at the top of every world, called entry-000000.md and so on."""


@case()
def test_mkdir(see: See) -> None:
    """A new directory is empty, has two links, and adds one to its parent's."""
    before = links(".")
    see("mkdir", None, os.mkdir, "d", 0o750)
    see("mode", "0750", mode, "d")
    see("kind", "d", kind, "d")
    see("links", 2, links, "d")
    see("links of the parent", 1, lambda: links(".") - before)
    see("empty", [], names, see.at / "d")
    see("again", "EEXIST", os.mkdir, "d")
    make("a.md")
    os.symlink("nowhere", "l.md")
    see("onto a file", "EEXIST", os.mkdir, "a.md")
    see("onto a dangling link", "EEXIST", os.mkdir, "l.md")
    see("below a file", "ENOTDIR", os.mkdir, "a.md/d")
    see("in a missing directory", "ENOENT", os.mkdir, "x/y")
    see("with a slash", None, os.mkdir, "e/")
    see("dot", "EEXIST", os.mkdir, ".")
    see("a long name", "ENAMETOOLONG", os.mkdir, "x" * 256)
    see("255 bytes", None, os.mkdir, "x" * 255)


@case()
def test_mkdir_modes(see: See) -> None:
    """Directories get the requested mode; mkdir does not set set-id bits."""
    os.umask(0)
    for number in (0o000, 0o111, 0o500, 0o700, 0o755, 0o777, 0o1777):
        os.mkdir(f"{number:o}", number)
        see(f"{number:o}", f"{number:04o}", mode, f"{number:o}")
    os.mkdir("set", 0o6755)
    see("6755", ANY, mode, "set")
    for number in (0o000, 0o111, 0o500):
        os.chmod(f"{number:o}", 0o700)
        see(f"list {number:o} once it may be", [], names, see.at / f"{number:o}")


@case()
def test_rmdir(see: See) -> None:
    """Only an empty directory is removed."""
    os.makedirs("d/e")
    before = links(".")
    see("with a directory in it", "ENOTEMPTY", os.rmdir, "d")
    see("the inner one", None, os.rmdir, "d/e")
    make("d/a.md")
    see("with a file in it", "ENOTEMPTY", os.rmdir, "d")
    os.unlink("d/a.md")
    see("dot", "EINVAL", os.rmdir, "d/.")
    see("dot-dot", "ENOTEMPTY", os.rmdir, "d/..")
    see("empty", None, os.rmdir, "d")
    see("links of the parent", -1, lambda: links(".") - before)
    see("again", "ENOENT", os.rmdir, "d")
    make("a.md")
    see("a file", "ENOTDIR", os.rmdir, "a.md")
    os.mkfifo("p.md")
    see("a fifo", "ENOTDIR", os.rmdir, "p.md")
    see("below a file", "ENOTDIR", os.rmdir, "a.md/d")
    os.mkdir("s")
    see("with a slash", None, os.rmdir, "s/")


@case()
def test_stamps(see: See) -> None:
    """Making and removing in a directory stamps it."""
    os.mkdir("d")
    changes: dict[str, Callable[[], object]] = {
        "mkdir": lambda: os.mkdir("d/e"),
        "rmdir": lambda: os.rmdir("d/e"),
        "create": lambda: make("d/a.md"),
        "unlink": lambda: os.unlink("d/a.md"),
        "symlink": lambda: os.symlink("x", "d/l.md"),
        "mkfifo": lambda: os.mkfifo("d/p.md"),
        "rename": lambda: os.rename("d/p.md", "d/q.md"),
    }
    for what, call in changes.items():
        os.utime("d", ns=(0, 0))
        before = times("d")[1]
        tick()
        call()
        see(f"{what} stamps the content", True, lambda: times("d")[0] > 0)
        see(f"{what} stamps the change", True, changed_since, "d", before)


@case()
def test_entries(see: See) -> None:
    """readdir gives each name once, with the inode and the kind that stat gives, and dot and dot-dot."""
    make("a.md")
    os.mkdir("d")
    os.symlink("a.md", "l.md")
    os.mkfifo("p.md")
    stream = Stream(see.at)
    found = {}
    while (entry := stream.read()) is not None:
        found[entry.name] = entry
    stream.close()
    see("names", [".", "..", "a.md", "d", "l.md", "p.md"], lambda: sorted(found))
    see("inodes", True, lambda: all(found[name].inode == inode(name) for name in ("a.md", "d", "l.md", "p.md", ".")))
    kinds = [stat.S_IFMT(os.lstat(name).st_mode) >> 12 for name in sorted(found)]
    see("kinds", kinds, lambda: [found[name].kind for name in sorted(found)])
    see("dot-dot", True, lambda: found[".."].inode == inode(".."))
    see("by scandir", True, lambda: all(e.inode() == e.stat(follow_symlinks=False).st_ino for e in os.scandir(".")))


@case()
def test_crowd(see: See) -> None:
    """Of a hundred thousand entries each comes once, and positions can be returned to."""
    crowd = see.top / "crowd"
    stream = Stream(crowd)
    order, positions = [], {}
    for entry in stream:
        order.append(entry.name)
        if len(order) % 997 == 0:
            positions[len(order)] = stream.tell()
    see("entries", CROWD, lambda: len(order))
    see("different names", CROWD, lambda: len(set(order)))
    dice = random.Random(5)
    wrong = []
    for index in dice.sample(sorted(positions), 60):
        stream.seek(positions[index])
        following = [entry.name for entry in islice(stream, 3)]
        if following != order[index : index + 3]:
            wrong.append(index)
    see("positions that lead elsewhere", [], lambda: wrong)
    stream.rewind()
    see("from the start", ANY, lambda: next(iter(stream)).name in order[:3])
    stream.close()
    see("stat of some", True, lambda: all((crowd / name).lstat().st_size == 0 for name in dice.sample(order, 200)))
    see("a missing name among them", "ENOENT", os.stat, crowd / "entry-x.md")


@case()
def test_small_buffers(see: See) -> None:
    """A listing is the same for every buffer size."""
    os.mkdir("d")
    made = [f"{'n' * (number % 90)}-{number}.md" for number in range(200)]
    for name in made:
        make(f"d/{name}")
    for room in (160, 512, 4096, 1 << 20):
        with opened("d", os.O_RDONLY | os.O_DIRECTORY) as fd:
            see(f"{room} bytes", sorted([".", "..", *made]), entries, fd, room)
    with opened("d", os.O_RDONLY | os.O_DIRECTORY) as fd:
        see("too little room", "EINVAL", entries, fd, 20)


@case()
def test_two_streams(see: See) -> None:
    """Two readers of one directory do not disturb each other."""
    os.mkdir("d")
    for number in range(500):
        make(f"d/{number}.md")
    one, two = Stream(see.at / "d"), Stream(see.at / "d")
    first, second = [], []
    for entry in one:
        first.append(entry.name)
        if len(first) % 3 == 0 and (other := two.read()) is not None:
            second.append(other.name)
    second += [entry.name for entry in two]
    see("one", sorted(f"{n}.md" for n in range(500)), lambda: sorted(first))
    see("two", sorted(f"{n}.md" for n in range(500)), lambda: sorted(set(second) - {".", ".."}))
    one.close()
    two.close()


@case()
def test_interrupted_reader(see: See) -> None:
    """A reader that pauses continues at its position, after other files were opened and read."""
    os.mkdir("d")
    made = sorted(f"{'n' * 100}-{number}.md" for number in range(800))
    for name in made:
        make(f"d/{name}")
    for number in range(150):
        os.mkdir(str(number))
    stream = Stream(see.at / "d")
    found = [entry.name for entry in islice(stream, 400)]
    others = [names(see.at / str(number)) for number in range(150)]
    found += [entry.name for entry in islice(stream, 1000)]
    stream.close()
    see("entries", made, lambda: sorted(found))
    see("others", [[]] * 150, lambda: others)


@case()
def test_removal_while_reading(see: See) -> None:
    """A directory whose entries are removed as they are read ends empty, none of them missed."""
    os.mkdir("d")
    for number in range(1000):
        make(f"d/entry-number-{number}.md")
    stream, removed = Stream(see.at / "d"), 0
    for entry in stream:
        os.unlink(f"d/{entry.name}")
        removed += 1
    see("removed", 1000, lambda: removed)
    stream.rewind()
    see("left in the stream", [], lambda: [entry.name for entry in stream])
    see("left", [], names, see.at / "d")
    stream.close()
    see("rmdir", None, os.rmdir, "d")


@case()
def test_changes_while_reading(see: See) -> None:
    """Each remaining entry is read once while others are created and removed."""
    os.mkdir("d")
    for number in range(400):
        make(f"d/stays-{number}.md")
        make(f"d/goes-{number}.md")
    stream, found = Stream(see.at / "d"), []
    for number, entry in enumerate(stream):
        found.append(entry.name)
        if number < 400:
            os.unlink(f"d/goes-{number}.md")
            make(f"d/comes-{number}.md")
    stream.close()
    staying = sorted(name for name in found if name.startswith("stays"))
    see("what stays", sorted(f"stays-{n}.md" for n in range(400)), lambda: staying)
    see("afterwards", 800, lambda: len(os.listdir("d")))


@case()
def test_rewind(see: See) -> None:
    """After rewinddir a stream shows what has been made meanwhile."""
    os.mkdir("d")
    stream = Stream(see.at / "d")
    see("at first", [], lambda: [entry.name for entry in stream])
    make("d/a.md")
    stream.rewind()
    see("after one", ["a.md"], lambda: [entry.name for entry in stream])
    os.rename("d/a.md", "d/b.md")
    stream.rewind()
    see("after a rename", ["b.md"], lambda: [entry.name for entry in stream])
    os.unlink("d/b.md")
    stream.rewind()
    see("after removal", [], lambda: [entry.name for entry in stream])
    stream.close()


@case()
def test_listing_follows_changes(see: See) -> None:
    """Each listing shows what was done just before it."""
    os.mkdir("d")
    found = []
    for number in range(50):
        make(f"d/{number:02}.md")
        found.append(len(os.listdir("d")))
    for number in range(50):
        os.unlink(f"d/{number:02}.md")
        found.append(len(os.listdir("d")))
    see("lengths", [*range(1, 51), *range(49, -1, -1)], lambda: found)


@case()
def test_removed_while_open(see: See) -> None:
    """A directory that is removed while it is open is empty, counts no links, and takes nothing in."""
    os.mkdir("d")
    with opened("d", os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.rmdir("d")
        see("links", 0, links, fd)
        see("listed", ANY, lambda: os.listdir(fd))
        see("create", "ENOENT", lambda: os.open("a.md", os.O_WRONLY | os.O_CREAT, 0o644, dir_fd=fd))
        see("mkdir", "ENOENT", lambda: os.mkdir("e", dir_fd=fd))
        see("lookup", "ENOENT", lambda: os.stat("e", dir_fd=fd))
        see("its parent", ANY, lambda: os.stat("..", dir_fd=fd).st_ino == inode("."))
        see("its mode", "0755", mode, fd)
        os.mkdir("d")
        see("another one", False, lambda: os.fstat(fd).st_ino == inode("d") and links(fd) == 2)
        make("d/a.md")
        see("not in the old one", "ENOENT", lambda: os.stat("a.md", dir_fd=fd))


@case()
def test_removed_under_the_feet(see: See) -> None:
    """The working directory can be removed; then nothing can be made in it."""
    os.mkdir("d")
    os.chdir("d")
    os.rmdir(see.at / "d")
    see("where", "ENOENT", os.getcwd)
    see("create", "ENOENT", make, "a.md")
    see("listed", ANY, os.listdir, ".")
    see("upwards", ANY, lambda: os.path.samefile("..", see.at))
    os.chdir(see.at)


@case()
def test_replaced_while_open(see: See) -> None:
    """A directory renamed over an open, empty one takes its name and not its descriptor."""
    os.mkdir("d")
    os.mkdir("e")
    make("e/a.md")
    with opened("d", os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.rename("e", "d")
        see("links of the old one", 0, links, fd)
        see("nothing in the old one", "ENOENT", lambda: os.stat("a.md", dir_fd=fd))
        see("the new one", ["a.md"], names, see.at / "d")


@case()
def test_working_directory_that_moves(see: See) -> None:
    """A process stays in its directory when that is renamed or moved."""
    os.makedirs("d/e")
    os.mkdir("f")
    os.chdir("d/e")
    os.rename(see.at / "d", see.at / "f/g")
    see("where", "f/g/e", lambda: str(Path.cwd().relative_to(see.at)))
    see("create", None, make, "a.md", b"here")
    see("by its path", b"here", read, see.at / "f/g/e/a.md")
    see("upwards", ["e"], lambda: os.listdir(".."))
    os.chdir(see.at)


@case()
def test_deep(see: See) -> None:
    """A tree deeper than PATH_MAX is made, read and removed step by step."""
    depth, name = 60, "d" * 100
    for _ in range(depth):
        os.mkdir(name)
        os.chdir(name)
    see("create at the bottom", None, make, "a.md", b"deep")
    see("where", True, lambda: len(os.getcwd()) > 4096)
    see("read", b"deep", read, "a.md")
    see("by its whole path", "ENAMETOOLONG", os.stat, os.path.join(see.at, *[name] * depth, "a.md"))
    with opened("../../..", os.O_RDONLY | os.O_DIRECTORY) as fd:
        see("from further up", 4, lambda: os.stat("/".join([name] * 3) + "/a.md", dir_fd=fd).st_size)
    os.unlink("a.md")
    for _ in range(depth):
        os.chdir("..")
        os.rmdir(name)
    see("nothing left", [], names, see.at)


@case()
def test_trees(see: See) -> None:
    """A tree of hundreds of names is copied, compared and removed by ordinary means."""
    for number in range(12):
        os.makedirs(f"one/{number}/sub")
        for leaf in range(12):
            make(f"one/{number}/{leaf}.md", b"%d" % leaf)
            make(f"one/{number}/sub/{leaf}.md", b"%d" % number)
    see("copy", "two", lambda: shutil.copytree("one", "two"))
    walked = [sorted(str(p.relative_to(top)) for p in Path(top).rglob("*")) for top in ("one", "two")]
    see("as many", 312, lambda: len(walked[0]))
    see("the same", True, lambda: walked[0] == walked[1])
    see("contents", True, lambda: all(read(f"one/{p}") == read(f"two/{p}") for p in walked[0] if p.endswith(".md")))
    see("remove", None, shutil.rmtree, "one")
    see("left", ["two"], names, see.at)


@case()
def test_random_names(see: See) -> None:
    """A thousand random operations on names give the same outcomes and the same tree everywhere."""
    dice = random.Random(6)
    pool = [f"{d}{n}" for d in ("", "d/", "e/", "d/f/") for n in ("a.md", "b.md", "c.md")]
    directories = ["d", "e", "d/f", "e/g", "d/f/h"]
    outcomes: list[str] = []
    for _ in range(1000):
        one, two = dice.choice(pool), dice.choice(pool)
        here, there = dice.choice(directories), dice.choice(directories)
        what = dice.randrange(10)
        try:
            if what == 0:
                os.mkdir(here)
            elif what == 1:
                os.rmdir(here)
            elif what == 2:
                os.rename(here, there)
            elif what == 3:
                os.rename(one, two)
            elif what == 4:
                os.link(one, two, follow_symlinks=False)
            elif what == 5:
                os.unlink(one)
            elif what == 6:
                os.symlink(os.path.basename(one), two)
            elif what == 7:
                outcomes.append(repr(read(one)))
            else:
                with opened(one, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as fd:
                    os.write(fd, two.encode())
            outcomes.append("ok")
        except OSError as error:
            outcomes.append(str(error.errno))
    see("outcomes", ANY, lambda: outcomes)
    see("most kinds occurred", True, lambda: len(set(outcomes)) > 8)
    tree = [(str(p), kind(p), links(p), os.lstat(p).st_size) for p in sorted(Path().rglob("*"))]
    see("tree", ANY, lambda: tree)
