"""Who may do what: modes, groups, sticky and set-group-id directories, as users other than root."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tests.posix.harness import ANY, See, User, attempt, case
from tests.support.syscalls import (
    ANNA,
    BERT,
    CLUB,
    MEMBER,
    append,
    kind,
    make,
    mode,
    names,
    opened,
    opening,
    owner,
    read,
    reread,
    size,
)

WAYS = {"read": os.O_RDONLY, "write": os.O_WRONLY, "both": os.O_RDWR}


def _grants(number: int, user: User, uid: int, gid: int) -> int:
    """The three bits that a mode grants to a user."""
    if user.uid == uid:
        return number >> 6 & 7
    return number >> 3 & 7 if gid in (user.gid, *user.groups) else number & 7


def _ways(path: str) -> list[object]:
    """What comes of opening a file in each way, and what access(2) says."""
    asked = [os.access(path, way) for way in (os.R_OK, os.W_OK, os.R_OK | os.W_OK)]
    return [*(attempt(opening, path, way) for way in WAYS.values()), *asked]


@case(root=True)
def test_files(see: See) -> None:
    """Owner, group, member of the group and others get what the mode says, each their own part."""
    make("a.md", b"x")
    os.chown("a.md", ANNA.uid, CLUB)
    for number in (0o000, 0o400, 0o200, 0o600, 0o040, 0o020, 0o060, 0o004, 0o002, 0o006, 0o066, 0o604, 0o640, 0o466):
        os.chmod("a.md", number)
        for who, user in (("anna", ANNA), ("member", User(BERT.uid, BERT.gid, (CLUB,))), ("bert", BERT)):
            bits = _grants(number, user, ANNA.uid, CLUB)
            granted = [bool(bits & 4), bool(bits & 2), bits & 6 == 6]
            expected = [None if yes else "EACCES" for yes in granted] + granted
            see(f"{number:03o} for {who}", expected, _ways, str(see.at / "a.md"), by=user)
        see(f"{number:03o} for root", [None, None, None, True, True, True], _ways, "a.md")


@case()
def test_own_files(see: See) -> None:
    """The owner is bound by his own part of the mode."""
    make("a.md", b"x")
    free = os.geteuid() == 0
    for number in (0o000, 0o400, 0o200, 0o600, 0o066):
        os.chmod("a.md", number)
        granted = [free or bool(number & 0o400), free or bool(number & 0o200), free or number & 0o600 == 0o600]
        expected = [None if yes else "EACCES" for yes in granted] + granted
        see(f"{number:03o}", expected, _ways, "a.md")


def _in_directory(path: str) -> list[object]:
    """Listing, stat, reading, creating and removing in a directory."""
    return [
        attempt(os.listdir, path),
        attempt(lambda: os.stat(f"{path}/a.md").st_size),
        attempt(read, f"{path}/a.md"),
        attempt(make, f"{path}/b.md"),
        attempt(os.rename, f"{path}/b.md", f"{path}/c.md"),
        attempt(os.unlink, f"{path}/c.md"),
        attempt(os.chdir, path),
    ]


@case(root=True)
def test_directories(see: See) -> None:
    """Listing needs reading, passing needs searching, changing needs both writing and searching."""
    os.mkdir("d")
    make("d/a.md", b"x")
    os.chown("d", ANNA.uid, CLUB)
    for number in (0o000, 0o100, 0o200, 0o300, 0o400, 0o500, 0o600, 0o700, 0o010, 0o070, 0o001, 0o003, 0o005, 0o007):
        os.chmod("d", number)
        for who, user in (("anna", ANNA), ("member", User(BERT.uid, BERT.gid, (CLUB,))), ("bert", BERT)):
            bits = _grants(number, user, ANNA.uid, CLUB)
            reads, writes, passes = bits & 4, bits & 3 == 3, bits & 1
            expected = [
                ["a.md"] if reads else "EACCES",
                1 if passes else "EACCES",
                b"x" if passes else "EACCES",
                *([None if writes else "EACCES"] + [None if writes else "ENOENT" if passes else "EACCES"] * 2),
                None if passes else "EACCES",
            ]
            see(f"{number:03o} for {who}", ANY, _in_directory, str(see.at / "d"), by=user)
            seen = see.sights[-1].value
            see(f"{number:03o} for {who}, but for missing names", expected[:4] + expected[6:], _without_moves, seen)


def _without_moves(seen: list[object]) -> list[object]:
    """The outcomes, without those whose error depends on the order of the checks."""
    return seen[:4] + seen[6:]


@case()
def test_own_directories(see: See) -> None:
    """The owner of a directory is bound by its mode as well."""
    os.mkdir("d")
    make("d/a.md", b"x")
    free = os.geteuid() == 0
    for number in (0o000, 0o100, 0o300, 0o400, 0o500, 0o700):
        os.chmod("d", number)
        see(f"{number:03o} list", ["a.md"] if free or number & 0o400 else "EACCES", os.listdir, "d")
        see(f"{number:03o} pass", b"x" if free or number & 0o100 else "EACCES", read, "d/a.md")
        writes = free or number & 0o300 == 0o300
        see(f"{number:03o} create", None if writes else "EACCES", make, "d/b.md")
        see(f"{number:03o} remove", None if writes else ANY, os.unlink, "d/b.md")
    os.chmod("d", 0o700)


@case(root=True)
def test_closed_above(see: See) -> None:
    """What is open stays usable when the directory above it is closed. (A server without root cannot reach it then.)"""
    os.mkdir("d")
    make("d/a.md", b"content")
    with opened("d/a.md") as fd:
        os.chmod("d", 0)
        see("read", b"content", reread, fd, 10, 0)
        see("write", 3, os.pwrite, fd, b"CON", 0)
        see("cut", None, os.ftruncate, fd, 5)
        see("size", 5, size, fd)
        see("attribute", None, os.setxattr, fd, "user.a", b"1")
        os.chmod("d", 0o700)
        see("content", b"CONte", os.pread, fd, 10, 0)


@case()
def test_closed_directory_renamed(see: See) -> None:
    """The owner can rename a directory that no user may enter."""
    os.mkdir("d", 0o000)
    see("rename", None, os.rename, "d", "e")
    see("listed", ["e"], names, see.at)


@case(root=True)
def test_created_as_the_caller(see: See) -> None:
    """What a user makes is the user's, of every kind."""
    os.mkdir("d")
    os.chmod("d", 0o777)
    d = see.at / "d"
    see("file", None, make, d / "a.md", b"anna's", by=ANNA)
    see("directory", None, os.mkdir, d / "d", by=ANNA)
    see("symlink", None, os.symlink, "a.md", d / "l.md", by=ANNA)
    see("fifo", None, os.mkfifo, d / "p.md", by=ANNA)
    see("socket", None, _bind, d, "s.md", by=ANNA)
    see("link", None, os.link, d / "a.md", d / "b.md", by=ANNA)
    see("owners", [ANNA[:2]] * 6, lambda: [owner(d / name) for name in ("a.md", "d", "l.md", "p.md", "s.md", "b.md")])
    see("by bert", None, make, d / "bert.md", by=BERT)
    see("bert's", BERT[:2], owner, d / "bert.md")
    see("with another group", None, make, d / "club.md", by=User(ANNA.uid, CLUB))
    see("that group's", (ANNA.uid, CLUB), owner, d / "club.md")
    see("by root again", None, make, d / "root.md")
    see("root's", (0, 0), owner, d / "root.md")


def _bind(directory: Path, name: str) -> None:
    os.chdir(directory)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(name)


@case(root=True)
def test_kept_though_unwritable(see: See) -> None:
    """A user who creates a read-only file writes it through that descriptor, and cannot open it again."""
    os.mkdir("d")
    os.chmod("d", 0o777)

    def copy() -> list[object]:
        with opened(see.at / "d/a.md", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o444) as fd:
            outcomes: list[object] = [os.write(fd, b"data"), attempt(append, see.at / "d/a.md", b"x")]
            os.fchmod(fd, 0)
            outcomes += [os.write(fd, b"more"), reread(fd, 10, 0), attempt(read, see.at / "d/a.md")]
            os.fchmod(fd, 0o444)
        return outcomes

    see("outcomes", [4, "EACCES", 4, b"datamore", "EACCES"], copy, by=ANNA)
    see("content", b"datamore", read, "d/a.md")
    see("mode", "0444", mode, "d/a.md")


@case(root=True)
def test_descriptor_outlives_rights(see: See) -> None:
    """What a user has opened stays open to him when mode and owner change."""
    os.mkdir("d")
    os.chmod("d", 0o777)

    def hold() -> list[object]:
        make(see.at / "d/a.md", b"anna's")
        with opened(see.at / "d/a.md") as fd:
            os.chmod(see.at / "d/a.md", 0)
            outcomes = [attempt(opening, see.at / "d/a.md")]
            return [*outcomes, os.write(fd, b"ANNA"), reread(fd, 10, 0)]

    see("outcomes", ["EACCES", 4, b"ANNA's"], hold, by=ANNA)


@case(root=True)
def test_given_away_while_open(see: See) -> None:
    """root opens a file as a user would not be able to; a child that becomes the user may still use it."""
    make("a.md", b"root's")
    os.chmod("a.md", 0o600)
    with opened("a.md") as fd:
        see("read", b"root's", reread, fd, 10, 0, by=ANNA)
        see("write", 4, os.pwrite, fd, b"ROOT", 0, by=ANNA)
        see("by name", "EACCES", read, see.at / "a.md", by=ANNA)
    see("content", b"ROOT's", read, "a.md")


@case(root=True)
def test_sticky(see: See) -> None:
    """In a sticky directory only the owners of the name, or of the directory, remove and rename."""
    os.mkdir("d")
    os.chmod("d", 0o1777)
    d = see.at / "d"
    for name in ("a.md", "b.md", "c.md"):
        make(d / name)
        os.chown(d / name, *ANNA[:2])
    os.mkdir(d / "e")
    os.chown(d / "e", *ANNA[:2])
    make(d / "bert.md")
    os.chown(d / "bert.md", *BERT[:2])
    see("unlink another's", "EPERM", os.unlink, d / "a.md", by=BERT)
    see("rename another's", "EPERM", os.rename, d / "a.md", d / "x.md", by=BERT)
    see("rename over another's", "EPERM", os.rename, d / "bert.md", d / "a.md", by=BERT)
    see("rmdir another's", "EPERM", os.rmdir, d / "e", by=BERT)
    see("rename another's directory", "EPERM", os.rename, d / "e", d / "x", by=BERT)
    see("create", None, make, d / "new.md", by=BERT)
    see("rename one's own", None, os.rename, d / "new.md", d / "newer.md", by=BERT)
    see("unlink one's own", None, os.unlink, d / "newer.md", by=BERT)
    see("owner of the file", None, os.unlink, d / "a.md", by=ANNA)
    os.chown(d, *BERT[:2])
    see("owner of the directory", None, os.unlink, d / "b.md", by=BERT)
    see("he renames as well", None, os.rename, d / "c.md", d / "x.md", by=BERT)
    see("root", None, os.unlink, d / "x.md")
    see("listed", ["bert.md", "e"], names, d)


@case(root=True)
def test_sticky_and_foreign_files(see: See) -> None:
    """Opening others' files and FIFOs with O_CREAT in a sticky directory is as the host has it."""
    os.mkdir("d")
    os.chmod("d", 0o1777)
    d = see.at / "d"
    make(d / "a.md")
    os.chmod(d / "a.md", 0o666)
    os.chown(d / "a.md", *ANNA[:2])
    os.symlink("a.md", d / "l.md")
    os.lchown(d / "l.md", *ANNA[:2])
    see("a file", ANY, opening, d / "a.md", os.O_WRONLY | os.O_CREAT, by=BERT)
    see("through a symlink", ANY, opening, d / "l.md", os.O_RDONLY, by=BERT)
    see("a link to another's", ANY, os.link, d / "a.md", d / "b.md", by=BERT)


@case(root=True)
def test_group_of_the_directory(see: See) -> None:
    """In a set-group-id directory everything gets its group, and directories the bit as well."""
    os.mkdir("d")
    os.chown("d", 0, CLUB)
    os.chmod("d", 0o2777)
    d = see.at / "d"
    see("file", None, make, d / "a.md", by=ANNA)
    see("directory", None, os.mkdir, d / "d", by=ANNA)
    see("symlink", None, os.symlink, "x", d / "l.md", by=ANNA)
    see("fifo", None, os.mkfifo, d / "p.md", by=ANNA)
    see("owners", [(ANNA.uid, CLUB)] * 4, lambda: [owner(d / name) for name in ("a.md", "d", "l.md", "p.md")])
    see("bit of the directory", "2755", mode, d / "d")
    see("no bit of the file", "0644", mode, d / "a.md")
    see("one level down", None, make, d / "d/b.md", by=ANNA)
    see("group there", (ANNA.uid, CLUB), owner, d / "d/b.md")
    see("by a member", None, make, d / "m.md", by=MEMBER)
    see("member's", (MEMBER.uid, CLUB), owner, d / "m.md")
    see("by root", None, make, d / "r.md")
    see("root's", (0, CLUB), owner, d / "r.md")
    see("set-group-id without execution", None, make, d / "s.md", b"", 0o2644, by=ANNA)
    see("its mode", ANY, mode, d / "s.md")
    see("with execution", ANY, make, d / "x.md", b"", 0o2755, by=ANNA)
    see("its mode too", ANY, lambda: mode(d / "x.md"))
    make("in.md")
    see("renamed in", None, os.rename, "in.md", d / "in.md")
    see("keeps its group", (0, 0), owner, d / "in.md")


@case(root=True)
def test_supplementary_groups(see: See) -> None:
    """Any group of the caller counts, for reading, writing, creating and searching."""
    os.mkdir("d")
    os.chown("d", 0, CLUB)
    os.chmod("d", 0o770)
    make("d/a.md", b"club's")
    os.chown("d/a.md", 0, CLUB)
    os.chmod("d/a.md", 0o660)
    d = see.at / "d"
    see("read", b"club's", read, d / "a.md", by=MEMBER)
    see("append", 1, append, d / "a.md", b"!", by=MEMBER)
    see("create", None, make, d / "b.md", by=MEMBER)
    see("own group", (MEMBER.uid, MEMBER.gid), owner, d / "b.md")
    see("mkdir", None, os.mkdir, d / "e", by=MEMBER)
    see("unlink", None, os.unlink, d / "a.md", by=MEMBER)
    see("listed", ["b.md", "e"], names, d, by=MEMBER)
    see("without the group", "EACCES", names, d, by=ANNA)
    see("create without", "EACCES", make, d / "c.md", by=ANNA)
    many = User(ANNA.uid, ANNA.gid, (*range(50_000, 50_100), CLUB))
    see("as the last of a hundred", None, make, d / "many.md", by=many)
    see("a group of its own choice", None, os.chown, d / "many.md", -1, 50_050, by=many)
    see("told", (ANNA.uid, 50_050), owner, d / "many.md")


@case(root=True)
def test_needed_on_both_sides(see: See) -> None:
    """Renaming and linking need rights in both directories; moving a directory, in itself as well."""
    for name, user in (("anna", ANNA), ("root", User(0, 0))):
        os.mkdir(name)
        os.chown(name, user.uid, user.gid)
        make(f"{name}/a.md")
        os.chown(f"{name}/a.md", *ANNA[:2])
        os.mkdir(f"{name}/d")
        os.chown(f"{name}/d", *ANNA[:2])
    anna, root = see.at / "anna", see.at / "root"
    see("out", "EACCES", os.rename, anna / "a.md", root / "b.md", by=ANNA)
    see("in", "EACCES", os.rename, root / "a.md", anna / "b.md", by=ANNA)
    see("link out", "EACCES", os.link, anna / "a.md", root / "b.md", by=ANNA)
    see("link in", None, os.link, root / "a.md", anna / "b.md", by=ANNA)
    see("within", None, os.rename, anna / "b.md", anna / "c.md", by=ANNA)
    os.mkdir(anna / "other")
    see("another's directory within", None, os.rename, anna / "other", anna / "renamed", by=ANNA)
    see("another's directory elsewhere", "EACCES", os.rename, anna / "renamed", anna / "d/moved", by=ANNA)
    see("mkdir", "EACCES", os.mkdir, root / "e", by=ANNA)
    see("symlink", "EACCES", os.symlink, "x", root / "l", by=ANNA)
    see("mkfifo", "EACCES", os.mkfifo, root / "p", by=ANNA)
    see("rmdir", "EACCES", os.rmdir, root / "d", by=ANNA)
    see("truncate", None, os.truncate, root / "a.md", 5, by=ANNA)
    see("truncate by another", "EACCES", os.truncate, root / "a.md", 0, by=BERT)
    see("listed", [["a.md", "c.md", "d", "renamed"], ["a.md", "d"]], lambda: [names(anna), names(root)])


@case(root=True)
def test_real_and_effective(see: See) -> None:
    """access(2) asks for the real user, open for the effective one."""
    make("a.md")
    os.chmod("a.md", 0o600)

    def disguised() -> list[object]:
        os.setresuid(ANNA.uid, 0, 0)
        return [os.access("a.md", os.R_OK), os.access("a.md", os.R_OK, effective_ids=True), attempt(opening, "a.md")]

    see("as anna with root's rights", [False, True, None], disguised, by=User(0, 0))

    def half() -> list[object]:
        os.setresuid(0, ANNA.uid, 0)
        return [os.access("a.md", os.R_OK), attempt(opening, see.at / "a.md"), attempt(make, see.at / "b.md")]

    see("as root with anna's rights", [True, "EACCES", "EACCES"], half, by=User(0, 0))


@case(root=True)
def test_out_of_reach(see: See) -> None:
    """No call returns information on files below a directory without search permission."""
    os.makedirs("d/e")
    make("d/e/a.md")
    os.chmod("d", 0o700)
    d = see.at / "d"
    for what, call in (("stat", os.stat), ("open", opening), ("unlink", os.unlink), ("readlink", os.readlink)):
        see(what, "EACCES", call, d / "e/a.md", by=ANNA)
    see("a missing name", "EACCES", os.stat, d / "x", by=ANNA)
    see("kind for root", "-", kind, d / "e/a.md")
    os.chmod("d", 0o711)
    see("once it can", 0, lambda: os.stat(d / "e/a.md").st_size, by=ANNA)
    os.chmod("d", 0o700)
    see("and cannot again", "EACCES", os.stat, d / "e/a.md", by=ANNA)
