"""Mode, owner, times, extended attributes, ACLs."""

from __future__ import annotations

import errno
import os
import struct
from functools import partial

from bonobofs.policy.decision import Code
from tests.attacks.attack import DRAFT, Place, add, attack, draft, draft_path, linked, notes, on
from tests.support.syscalls import make, opened

_ACL = "system.posix_acl_access"
_DEFAULT_ACL = "system.posix_acl_default"
_OPEN = struct.pack("<I" + "HHI" * 3, 2, 1, 7, 0xFFFFFFFF, 4, 7, 0xFFFFFFFF, 32, 7, 0xFFFFFFFF)
"""u::rwx,g::rwx,o::rwx"""


def chmod(path: str) -> None:
    os.chmod(path, 0o666)


def fchmod(path: str) -> None:
    with opened(path, os.O_RDONLY) as fd:
        os.fchmod(fd, 0o666)


def chown(path: str) -> None:
    os.chown(path, -1, os.getegid())


def utimens(path: str) -> None:
    os.utime(path, ns=(1, 1))


def touch(path: str) -> None:
    os.utime(path)


def setxattr(path: str) -> None:
    os.setxattr(path, "user.evil", b"1")


def removexattr(path: str) -> None:
    os.removexattr(path, "user.good")


def set_acl(path: str) -> None:
    os.setxattr(path, _ACL, _OPEN.replace(b"\7\0", b"\6\0"))


_WAYS = (chmod, fchmod, chown, utimens, touch, setxattr, removexattr, set_acl)


for way in _WAYS:
    for label, path, code, below in (
        ("closed", "{closed}", Code.DEFAULT, None),
        ("hook", "{hook}", Code.PROTECTED, None),
        ("linked", "{docs}/linked.md", Code.HARDLINK, linked),
    ):
        add(f"{label}_{way.__name__}", on(path, way), code, path, below=below)


@attack(Code.DEFAULT, "{closed}", root=True)
def give_a_closed_file_away(place: Place) -> None:
    os.chown(place.closed, 1, 1)


@attack(Code.DEFAULT, "{closed}")
def give_a_closed_file_set_id_bits(place: Place) -> None:
    os.chmod(place.closed, 0o4755)


def _make_executable(mode: int, place: Place) -> None:
    os.chmod(draft(place), mode)


for mode in (0o100, 0o010, 0o001, 0o4755, 0o2755, 0o777):
    add(f"make_a_document_executable_{mode:o}", partial(_make_executable, mode), Code.EXECUTABLE, DRAFT)


@attack(Code.EXECUTABLE, DRAFT)
def make_a_document_executable_by_its_acl(place: Place) -> None:
    os.setxattr(draft(place), _ACL, _OPEN)


@attack(Code.EXECUTABLE, DRAFT)
def make_a_document_executable_for_one_user(place: Place) -> None:
    """A named user's x counts by the mask, which stands where the group's bits do."""
    entries = (1, 6, 0xFFFFFFFF, 2, 1, 65534, 4, 4, 0xFFFFFFFF, 16, 1, 0xFFFFFFFF, 32, 4, 0xFFFFFFFF)
    os.setxattr(draft(place), _ACL, struct.pack("<I" + "HHI" * 5, 2, *entries))


@attack(Code.EXECUTABLE, DRAFT)
def make_an_executable_document_by_a_default_acl(place: Place) -> None:
    """Where a directory has a default ACL, the kernel below takes no account of the umask."""
    os.setxattr(place.docs, _DEFAULT_ACL, _OPEN)
    os.umask(0o111)
    make(draft_path(place), b"", 0o777)


@attack(Code.EXECUTABLE, DRAFT)
def make_an_executable_document_by_a_default_acl_and_mknod(place: Place) -> None:
    os.setxattr(place.docs, _DEFAULT_ACL, _OPEN)
    os.umask(0o111)
    os.mknod(draft_path(place), 0o100777)


def _set_our_attribute(name: str, place: Place) -> None:
    os.setxattr(draft(place), f"user.bonobofs.{name}", b"{}")


def _remove_our_attribute(name: str, place: Place) -> None:
    os.removexattr(draft(place), f"user.bonobofs.{name}")


for name in ("why", "anything"):
    for act in (_set_our_attribute, _remove_our_attribute):
        add(f"{act.__name__[1:]}_{name}", partial(act, name), Code.PROTECTED, DRAFT, error=errno.EPERM)


@attack(Code.DEFAULT, "")
def change_the_mode_of_the_root(place: Place) -> None:
    os.chmod(".", 0o777)


@attack(Code.DEFAULT, "src")
def change_the_times_of_a_closed_directory(place: Place) -> None:
    os.utime("src", ns=(1, 1))


@attack(Code.PROTECTED, ".git")
def set_a_default_acl_on_git(place: Place) -> None:
    os.setxattr(".git", _DEFAULT_ACL, _OPEN)


@attack(Code.SUFFIX, "{docs}/notes.txt", below=notes)
def change_the_mode_of_a_denied_file_in_an_allowed_directory(place: Place) -> None:
    os.chmod(f"{place.docs}/notes.txt", 0o600)
