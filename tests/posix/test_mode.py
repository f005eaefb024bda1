"""chmod(2) and chown(2): bits and owners, who may change them, and the set-id bits that go by themselves."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

from tests.posix.harness import ANY, See, User, case, in_child
from tests.support.syscalls import (
    ANNA,
    BERT,
    CLUB,
    FALLOC_KEEP_SIZE,
    FALLOC_PUNCH_HOLE,
    MEMBER,
    append,
    fallocate,
    make,
    mode,
    opened,
    opening,
    owner,
    read,
    times,
    write,
)

PLAIN = (0o000, 0o200, 0o400, 0o600, 0o644, 0o666, 0o604, 0o640, 0o066)
EXECUTABLE = (0o100, 0o755, 0o777, 0o711, 0o610, 0o601)


@case()
def test_bits(see: See) -> None:
    """stat returns every bit that is set."""
    make("a.md")
    for number in PLAIN:
        see(f"chmod {number:o}", None, os.chmod, "a.md", number)
        see(f"mode {number:o}", f"{number:04o}", mode, "a.md")
    os.chmod("a.md", 0o640)
    with opened("a.md") as fd:
        see("fchmod", None, os.fchmod, fd, 0o604)
        see("told to fstat", "0604", mode, fd)
    os.symlink("a.md", "l.md")
    see("through a symlink", None, os.chmod, "l.md", 0o600)
    see("the target", "0600", mode, "a.md")
    see("missing", "ENOENT", os.chmod, "x", 0o600)
    see("below a file", "ENOTDIR", os.chmod, "a.md/x", 0o600)


@case()
def test_executable_bits(see: See) -> None:
    """The executable bits of files are as free as the others."""
    for number in EXECUTABLE:
        make(f"{number:o}.md")
        see(f"chmod {number:o}", None, os.chmod, f"{number:o}.md", number)
        see(f"mode {number:o}", f"{number:04o}", mode, f"{number:o}.md")
    make("f.md")
    with opened("f.md") as fd:
        see("fchmod", None, os.fchmod, fd, 0o755)
        see("told", "0755", mode, fd)


@case()
def test_bits_of_directories(see: See) -> None:
    """Directories take every bit, set-group-id and sticky included."""
    os.mkdir("d")
    for number in (0o000, 0o700, 0o755, 0o777, 0o1777, 0o2755, 0o3775, 0o4755, 0o500):
        see(f"chmod {number:o}", None, os.chmod, "d", number)
        see(f"mode {number:o}", f"{number:04o}", mode, "d")
    os.chmod("d", 0o755)


@case()
def test_set_id_bits(see: See) -> None:
    """Set-id and sticky bits of files without executable bits."""
    for number in (0o4644, 0o2644, 0o1644, 0o6600, 0o7640):
        make(f"{number:o}.md")
        see(f"chmod {number:o}", None, os.chmod, f"{number:o}.md", number)
        see(f"mode {number:o}", f"{number:04o}", mode, f"{number:o}.md")


@case()
def test_mode_without_rights(see: See) -> None:
    """The owner gets back the rights that he took from himself."""
    make("a.md", b"content")
    os.chmod("a.md", 0)
    see("chmod back", None, os.chmod, "a.md", 0o600)
    see("read", b"content", read, "a.md")
    os.mkdir("d")
    make("d/a.md")
    os.chmod("d", 0)
    see("chmod a directory back", None, os.chmod, "d", 0o700)
    see("listed", ["a.md"], os.listdir, "d")


@case()
def test_owner_given_to_itself(see: See) -> None:
    """An owner may set what is already set, and -1 leaves everything."""
    make("a.md")
    ids = os.geteuid(), os.getegid()
    see("itself", None, os.chown, "a.md", *ids)
    see("nothing", None, os.chown, "a.md", -1, -1)
    see("group alone", None, os.chown, "a.md", -1, ids[1])
    see("told", True, lambda: owner("a.md") == ids)
    see("missing", "ENOENT", os.chown, "x", -1, -1)
    see("below a file", "ENOTDIR", os.chown, "a.md/x", -1, -1)


@case(root=True)
def test_owners(see: See) -> None:
    """root gives files, directories, symlinks and FIFOs to any user."""
    make("a.md")
    os.mkdir("d")
    os.symlink("a.md", "l.md")
    os.mkfifo("p.md")
    for name in ("a.md", "d", "p.md"):
        see(f"chown {name}", None, os.chown, name, 1, 2)
        see(f"owner of {name}", (1, 2), owner, name)
        see(f"user of {name} alone", None, os.chown, name, 3, -1)
        see(f"then {name}", (3, 2), owner, name)
        see(f"group of {name} alone", None, os.chown, name, -1, 4)
        see(f"and then {name}", (3, 4), owner, name)
    see("lchown", None, os.lchown, "l.md", 5, 6)
    see("owner of the symlink", (5, 6), owner, "l.md")
    see("the target's stays", (3, 4), owner, "a.md")
    see("through the symlink", None, os.chown, "l.md", 7, 8)
    see("the target", (7, 8), owner, "a.md")
    with opened("a.md") as fd:
        see("fchown", None, os.fchown, fd, 4_000_000_000, 4_000_000_001)
        see("large ids", (4_000_000_000, 4_000_000_001), owner, fd)


@case(root=True)
def test_mode_by_others(see: See) -> None:
    """Only the owner and root change a mode."""
    for name, user in (("root.md", 0), ("anna.md", ANNA.uid)):
        make(name)
        os.chmod(name, 0o666)
        os.chown(name, user, -1)
    see("root's", "EPERM", os.chmod, see.at / "root.md", 0o600, by=ANNA)
    see("another's", "EPERM", os.chmod, see.at / "anna.md", 0o600, by=BERT)
    see("one's own", None, os.chmod, see.at / "anna.md", 0o640, by=ANNA)
    see("modes", ["0666", "0640"], lambda: [mode("root.md"), mode("anna.md")])
    os.mkdir("d", 0o700)
    see("out of reach", "EACCES", os.chmod, see.at / "d/x.md", 0o600, by=ANNA)


@case(root=True)
def test_owner_by_others(see: See) -> None:
    """An owner may give a file to one of the owner's groups, and to no other group."""
    make("a.md")
    os.chown("a.md", *ANNA[:2])
    path = see.at / "a.md"
    see("to another user", "EPERM", os.chown, path, BERT.uid, -1, by=ANNA)
    see("to a foreign group", "EPERM", os.chown, path, -1, CLUB, by=ANNA)
    see("to a group of one's own", None, os.chown, path, -1, CLUB, by=MEMBER)
    see("told", (ANNA.uid, CLUB), owner, "a.md")
    see("by another", "EPERM", os.chown, path, -1, BERT.gid, by=BERT)
    see("taken by another", "EPERM", os.chown, path, BERT.uid, -1, by=BERT)
    see("-1 by another", ANY, os.chown, path, -1, -1, by=BERT)
    see("back to the first group", None, os.chown, path, ANNA.uid, ANNA.gid, by=MEMBER)
    see("in the end", ANNA[:2], owner, "a.md")


@case(root=True)
def test_chmod_outside_the_group(see: See) -> None:
    """Who is not in the file's group loses set-group-id when he changes the mode."""
    make("a.md")
    os.chown("a.md", ANNA.uid, CLUB)
    see("by the owner", None, os.chmod, see.at / "a.md", 0o2644, by=ANNA)
    see("bit is gone", "0644", mode, "a.md")
    see("by the owner in the group", None, os.chmod, see.at / "a.md", 0o2644, by=MEMBER)
    see("bit stays", "2644", mode, "a.md")
    os.mkdir("d")
    os.chown("d", ANNA.uid, CLUB)
    see("a directory", None, os.chmod, see.at / "d", 0o2755, by=ANNA)
    see("its bit is gone", "0755", mode, "d")


def _privileged(name: str, number: int) -> None:
    make(name, b"x" * 10_000)
    os.chmod(name, number)


def _changes() -> dict[str, Callable[[Path], object]]:
    """The ways to change a file's content."""
    return {
        "write": lambda path: write(path, b"y"),
        "append": lambda path: append(path, b"y"),
        "truncate": lambda path: os.truncate(path, 5),
        "to the same size": lambda path: os.truncate(path, 10_000),
        "open with O_TRUNC": lambda path: opening(path, os.O_WRONLY | os.O_TRUNC),
        "allocate": _allocate,
        "punch": _punch,
        "copy a range": _copy,
    }


def _after(see: See, what: str, number: int, user: User) -> str:
    """The mode after a user has changed a file of that mode."""
    name = f"{what}-{number:o}-{len(user.groups)}.md"
    _privileged(name, number)
    in_child(_changes()[what], see.at / name, by=user)
    return mode(name)


@case(root=True)
def test_set_id_bits_go_with_writing(see: See) -> None:
    """Every change by an ordinary user clears set-user-id and set-group-id, and keeps the sticky bit."""
    make("source.md", b"z" * 100)
    for what in _changes():
        see(what, "0777", _after, see, what, 0o6777, ANNA)
        see(f"{what}, sticky", "1777", _after, see, what, 0o1777, ANNA)


@case(root=True)
def test_set_id_bits_without_execution_go_with_writing(see: See) -> None:
    """Set-user-id is cleared; set-group-id stays for members of the group, and since Linux 6.2 for no other user."""
    make("source.md", b"z" * 100)
    for what in _changes():
        see(what, ANY, _after, see, what, 0o6666, ANNA)
        see(f"{what}, by a member", "2666", _after, see, what, 0o6666, ANNA._replace(groups=(0,)))


def _allocate(path: Path) -> None:
    with opened(path) as fd:
        os.posix_fallocate(fd, 0, 20_000)


def _punch(path: Path) -> None:
    with opened(path) as fd:
        fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 0, 100)


def _copy(path: Path) -> int:
    with opened("source.md", os.O_RDONLY) as source, opened(path) as target:
        return os.copy_file_range(source, target, 50)


@case(root=True)
def test_set_id_bits_stay_for_root(see: See) -> None:
    """Writing by root leaves the set-id bits."""
    _privileged("a.md", 0o6644)
    see("write", 1, write, "a.md", b"y")
    see("after write", "6644", mode, "a.md")
    os.truncate("a.md", 5)
    see("after truncate", "6644", mode, "a.md")
    opening("a.md", os.O_WRONLY | os.O_TRUNC)
    see("after O_TRUNC", "6644", mode, "a.md")


@case(root=True)
def test_set_id_bits_go_with_the_owner(see: See) -> None:
    """chown takes set-id bits of files, and not of directories."""
    for number in (0o6755, 0o6711, 0o4700):
        _privileged(f"{number:o}.md", 0o600)
        see(f"chmod {number:o}", None, os.chmod, f"{number:o}.md", number)
        see(f"chown {number:o}", None, os.chown, f"{number:o}.md", ANNA.uid, ANNA.gid)
        see(f"{number:o} by root", f"{number & 0o777:04o}", mode, f"{number:o}.md")
    _privileged("plain.md", 0o6644)
    os.chown("plain.md", ANNA.uid, CLUB)
    see("without executable bits", ANY, mode, "plain.md")
    os.chmod("plain.md", 0o4644)
    see("by the owner", None, os.chown, see.at / "plain.md", -1, ANNA.gid, by=ANNA)
    see("after the owner", "0644", mode, "plain.md")
    os.mkdir("d")
    os.chmod("d", 0o6755)
    os.chown("d", ANNA.uid, ANNA.gid)
    see("a directory", "6755", mode, "d")


@case(root=True)
def test_capabilities_go_with_writing(see: See) -> None:
    """A write by any user clears a file's capabilities."""
    capability = struct.pack("<IIIII", 0x02000001, 1 << 10, 0, 0, 0)
    for what, change in (
        ("write", lambda: write("a.md", b"x")),
        ("truncate", lambda: os.truncate("a.md", 3)),
        ("chown", lambda: os.chown("a.md", 1, 1)),
    ):
        make("a.md", b"content")
        see(f"set before {what}", None, os.setxattr, "a.md", "security.capability", capability)
        see(f"told before {what}", capability, os.getxattr, "a.md", "security.capability")
        change()
        see(f"after {what}", "ENODATA", os.getxattr, "a.md", "security.capability")
        os.unlink("a.md")


@case(root=True)
def test_content_stays(see: See) -> None:
    """Changes of mode and owner leave content and time of modification."""
    make("a.md", b"content")
    os.utime("a.md", ns=(5, 7))
    os.chmod("a.md", 0o640)
    os.chown("a.md", 1, 2)
    see("content", b"content", read, "a.md")
    see("time", 7, lambda: times("a.md")[0])
