"""POSIX access control lists, as the kernel keeps them in system.posix_acl_access and system.posix_acl_default."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final

from tests.posix.harness import ANY, See, case
from tests.support.syscalls import ANNA, BERT, CLUB, MEMBER, append, make, mode, names, opened, opening, owner, read

ACCESS: Final = "system.posix_acl_access"
DEFAULT: Final = "system.posix_acl_default"
_TAGS: Final = {"u": 0x01, "g": 0x04, "m": 0x10, "o": 0x20}


def acl(text: str) -> bytes:
    """A list such as `u::rw-,u:12345:r--,g::r--,m::r--,o::---` in the kernel's form; sorted as it wants them."""
    entries = []
    for entry in text.split(","):
        kind, name, bits = entry.split(":")
        tag = _TAGS[kind] << bool(name)
        number = sum(4 >> at for at, bit in enumerate(bits) if bit != "-")
        entries.append((tag, number, int(name) if name else 0xFFFFFFFF))
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in sorted(entries, key=_order))


def _order(entry: tuple[int, int, int]) -> tuple[int, int]:
    return entry[0], entry[2]


@case()
def test_list_and_mode(see: See) -> None:
    """A list is returned as it was set, and its mask is the group part of the mode."""
    make("a.md", mode=0o600)
    given = acl(f"u::rw-,u:{ANNA.uid}:rw-,g::r--,g:{CLUB}:r--,m::rw-,o::---")
    see("none at first", "ENODATA", os.getxattr, "a.md", ACCESS)
    see("set", None, os.setxattr, "a.md", ACCESS, given)
    see("told", given, os.getxattr, "a.md", ACCESS)
    see("listed", [ACCESS], os.listxattr, "a.md")
    see("mode", "0660", mode, "a.md")
    see("chmod", None, os.chmod, "a.md", 0o644)
    changed = acl(f"u::rw-,u:{ANNA.uid}:rw-,g::r--,g:{CLUB}:r--,m::r--,o::r--")
    see("mask and others follow", changed, os.getxattr, "a.md", ACCESS)
    see("remove", None, os.removexattr, "a.md", ACCESS)
    see("gone", "ENODATA", os.getxattr, "a.md", ACCESS)
    see("mode after", "0644", mode, "a.md")
    see("remove again", ANY, os.removexattr, "a.md", ACCESS)


@case()
def test_no_more_than_a_mode(see: See) -> None:
    """A list that says no more than a mode becomes the mode."""
    make("a.md")
    see("set", None, os.setxattr, "a.md", ACCESS, acl("u::rw-,g::r--,o::---"))
    see("mode", "0640", mode, "a.md")
    see("no list", "ENODATA", os.getxattr, "a.md", ACCESS)
    see("none listed", [], os.listxattr, "a.md")


@case()
def test_executable(see: See) -> None:
    """A list can make a file executable."""
    make("a.md")
    see("set", None, os.setxattr, "a.md", ACCESS, acl(f"u::rwx,u:{ANNA.uid}:r-x,g::r-x,m::r-x,o::---"))
    see("mode", "0750", mode, "a.md")
    make("b.md")
    see("for one user alone", None, os.setxattr, "b.md", ACCESS, acl(f"u::rw-,u:{ANNA.uid}:r-x,g::r--,m::r-x,o::---"))
    see("its mode", "0650", mode, "b.md")


@case()
def test_lists_that_cannot_be(see: See) -> None:
    """Malformed lists are refused, and defaults belong to directories."""
    make("a.md")
    os.mkdir("d")
    os.symlink("a.md", "l.md")
    see("without a mask", "EINVAL", os.setxattr, "a.md", ACCESS, acl(f"u::rw-,u:{ANNA.uid}:rw-,g::r--,o::---"))
    see("without others", "EINVAL", os.setxattr, "a.md", ACCESS, acl("u::rw-,g::r--"))
    see("another version", ANY, os.setxattr, "a.md", ACCESS, struct.pack("<I", 3))
    see("cut short", "EINVAL", os.setxattr, "a.md", ACCESS, acl("u::rw-,g::r--,o::---")[:-3])
    see("a default of a file", "EACCES", os.setxattr, "a.md", DEFAULT, acl("u::rw-,g::r--,o::---"))
    see("no default of a file", "ENODATA", os.getxattr, "a.md", DEFAULT)
    see("no default of a directory", "ENODATA", os.getxattr, "d", DEFAULT)
    given = acl("u::rw-,g::r--,o::---")
    see("of a symlink", "EOPNOTSUPP", lambda: os.setxattr("l.md", ACCESS, given, follow_symlinks=False))


@case()
def test_defaults(see: See) -> None:
    """What is made in a directory with a default list gets that list, and no umask."""
    os.mkdir("d")
    given = acl(f"u::rwx,u:{ANNA.uid}:rw-,g::r-x,m::rwx,o::---")
    see("set", None, os.setxattr, "d", DEFAULT, given)
    see("told", given, os.getxattr, "d", DEFAULT)
    see("mode of the directory", "0755", mode, "d")
    os.umask(0o077)
    make("d/a.md", mode=0o666)
    see("a file's mode", "0660", mode, "d/a.md")
    inherited = acl(f"u::rw-,u:{ANNA.uid}:rw-,g::r-x,m::rw-,o::---")
    see("a file's list", inherited, os.getxattr, "d/a.md", ACCESS)
    os.mkdir("d/d")
    see("a directory's mode", "0770", mode, "d/d")
    see("a directory's list", acl(f"u::rwx,u:{ANNA.uid}:rw-,g::r-x,m::rwx,o::---"), os.getxattr, "d/d", ACCESS)
    see("a directory's default", given, os.getxattr, "d/d", DEFAULT)
    os.mkfifo("d/p.md", 0o644)
    see("a fifo's mode", "0640", mode, "d/p.md")
    os.symlink("x", "d/l.md")
    see("a symlink's list", [], lambda: os.listxattr("d/l.md", follow_symlinks=False))
    make("d/d/b.md", mode=0o600)
    see("one level down", "0600", mode, "d/d/b.md")
    see("its list", ANY, os.getxattr, "d/d/b.md", ACCESS)
    os.rename("d/a.md", "a.md")
    see("moved out", inherited, os.getxattr, "a.md", ACCESS)
    see("remove", None, os.removexattr, "d", DEFAULT)
    make("d/c.md", mode=0o666)
    see("umask again", "0600", mode, "d/c.md")


@case()
def test_plain_defaults(see: See) -> None:
    """A default list that says no more than a mode still takes the place of the umask."""
    os.mkdir("d")
    os.setxattr("d", DEFAULT, acl("u::rwx,g::rw-,o::r--"))
    os.umask(0o077)
    make("d/a.md", mode=0o666)
    see("mode", "0664", mode, "d/a.md")
    see("no list", "ENODATA", os.getxattr, "d/a.md", ACCESS)
    make("d/b.md", mode=0o600)
    see("what was not asked is not given", "0600", mode, "d/b.md")


@case()
def test_by_descriptor(see: See) -> None:
    """Lists are set and read through descriptors too."""
    make("a.md")
    given = acl(f"u::rw-,u:{ANNA.uid}:---,g::r--,m::r--,o::r--")
    with opened("a.md") as fd:
        see("set", None, os.setxattr, fd, ACCESS, given)
        see("told", given, os.getxattr, fd, ACCESS)
        see("chmod", None, os.fchmod, fd, 0o600)
        see("mask", acl(f"u::rw-,u:{ANNA.uid}:---,g::r--,m::---,o::---"), os.getxattr, "a.md", ACCESS)


@case(root=True)
def test_rights_of_named_users_and_groups(see: See) -> None:
    """Named users and groups get what the list says, under its mask."""
    make("a.md", b"x")
    os.chmod("a.md", 0o600)
    path = see.at / "a.md"
    see("nobody", "EACCES", read, path, by=ANNA)
    os.setxattr(path, ACCESS, acl(f"u::rw-,u:{ANNA.uid}:rw-,u:{BERT.uid}:---,g::---,g:{CLUB}:r--,m::rw-,o::r--"))
    see("anna reads", b"x", read, path, by=ANNA)
    see("anna writes", 1, append, path, b"y", by=ANNA)
    see("bert is named and gets nothing", "EACCES", read, path, by=BERT)
    club = BERT._replace(uid=777, gid=CLUB)
    see("the club reads", b"xy", read, path, by=club)
    see("the club does not write", "EACCES", append, path, b"z", by=club)
    see("others read", b"xy", read, path, by=BERT._replace(uid=778, gid=778))
    see("others in a group that has nothing", "EACCES", append, path, b"z", by=BERT._replace(uid=778, gid=778))
    os.chmod(path, 0o600)
    see("nobody through the mask", "EACCES", read, path, by=ANNA)
    os.chmod(path, 0o640)
    see("anna reads through the mask", b"xy", read, path, by=ANNA)
    see("and does not write", "EACCES", append, path, b"z", by=ANNA)
    see("access agrees", [True, False], lambda: [os.access(path, os.R_OK), os.access(path, os.W_OK)], by=ANNA)
    os.removexattr(path, ACCESS)
    see("nobody again", "EACCES", read, path, by=ANNA)


@case(root=True)
def test_directories(see: See) -> None:
    """A list lets a user into a directory, and lets him change it."""
    os.mkdir("d")
    os.chmod("d", 0o700)
    d = see.at / "d"
    see("closed", "EACCES", names, d, by=ANNA)
    os.setxattr(d, ACCESS, acl(f"u::rwx,u:{ANNA.uid}:rwx,u:{BERT.uid}:r-x,g::---,m::rwx,o::---"))
    see("anna makes", None, make, d / "a.md", by=ANNA)
    see("owner", ANNA[:2], owner, d / "a.md")
    see("bert lists", ["a.md"], names, d, by=BERT)
    see("bert makes nothing", "EACCES", make, d / "b.md", by=BERT)
    see("bert removes nothing", "EACCES", os.unlink, d / "a.md", by=BERT)
    see("others", "EACCES", names, d, by=BERT._replace(uid=778, gid=778))
    os.chmod(d, 0o750)
    see("masked", "EACCES", make, d / "c.md", by=ANNA)


@case(root=True)
def test_inherited_rights(see: See) -> None:
    """A default list gives its users rights on what others make."""
    os.mkdir("d")
    os.chmod("d", 0o777)
    d = see.at / "d"
    os.setxattr(d, DEFAULT, acl(f"u::rw-,u:{BERT.uid}:rw-,g::---,m::rw-,o::---"))
    os.umask(0o077)
    see("anna makes", None, make, d / "a.md", b"anna's", 0o666, by=ANNA)
    see("mode", "0660", mode, d / "a.md")
    see("bert reads", b"anna's", read, d / "a.md", by=BERT)
    see("bert writes", 1, append, d / "a.md", b"!", by=BERT)
    see("a member of nothing", "EACCES", read, d / "a.md", by=MEMBER._replace(uid=999, gid=999))
    see("anna makes a closed one", None, make, d / "b.md", b"anna's", 0o600, by=ANNA)
    see("closed", "EACCES", read, d / "b.md", by=BERT)


@case(root=True)
def test_only_owner_and_root_set_a_list(see: See) -> None:
    """Only the owner and root set a list; setting it outside the group takes set-group-id."""
    make("a.md")
    os.chmod("a.md", 0o666)
    path: Path = see.at / "a.md"
    given = acl(f"u::rw-,u:{BERT.uid}:rw-,g::rw-,m::rw-,o::rw-")
    see("another", "EPERM", os.setxattr, path, ACCESS, given, by=ANNA)
    see("another removes", "EPERM", os.removexattr, path, ACCESS, by=ANNA)
    os.chown(path, ANNA.uid, CLUB)
    see("the owner", None, os.setxattr, path, ACCESS, given, by=ANNA)
    see("told to another", given, os.getxattr, path, ACCESS, by=BERT)
    os.chmod(path, 0o2664)
    see("the owner outside the group", None, os.setxattr, path, ACCESS, given, by=ANNA)
    see("set-group-id", ANY, mode, path)
    see("opening", None, opening, path, os.O_RDWR, by=BERT)
