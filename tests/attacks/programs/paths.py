"""Names that lead somewhere else than they seem to."""

from __future__ import annotations

import ctypes
import os
import struct
import tempfile
from functools import partial
from pathlib import Path

from bonobofs.policy.decision import Code
from tests.attacks.attack import Place, add, adding, attack, write
from tests.support.syscalls import make, opened

_AT_EMPTY_PATH = 0x1000


def _create(path: str, mode: int = 0o644) -> None:
    make(path, b"EVIL", mode)


@attack(Code.DEFAULT, "{closed}")
def dots_lead_out_of_an_allowed_directory(place: Place) -> None:
    write(f"{place.docs}/../../{place.closed}")


@attack(Code.DEFAULT, "{closed}")
def slashes_and_dots_change_nothing(place: Place) -> None:
    write(f".//{place.docs}/.//..///.././{place.closed}")


def _sibling(source: Path, place: Place) -> None:
    (source / f"{place.docs}-evil").mkdir()
    (source / "aidlc-docs-evil").mkdir(exist_ok=True)


@attack(Code.DEFAULT, "aidlc-docs-evil/plan.md", below=_sibling)
def a_sibling_shares_the_prefix_of_an_allowed_directory(place: Place) -> None:
    _create("aidlc-docs-evil/plan.md")


@attack(Code.DEFAULT, "tests-evil")
def a_sibling_of_an_allowed_directory_is_made(place: Place) -> None:
    os.mkdir("tests-evil")


# -- symlinks


def _link_to(target: str, place: Place) -> None:
    os.symlink(target, f"{place.docs}/link.md")


for label, target in {
    "absolute": "/etc/passwd",
    "above_the_root": "../../../outside",
    "far_above": "../../../../../../../../etc",
    "through_a_name": "../x/../../../../outside",
    "dots_after_a_name": "x/../y.md",
    "into_git": "../../.git/hooks",
    "into_git_by_detours": "../.././/.git/./hooks/",
    "to_git_itself": "../../.git",
    "into_beads": "../../.beads/issues.jsonl",
    "to_the_policy": "../../policy.toml",
    "into_ours": "../../.bonobofs/policy.md",
    "to_a_repository_that_is_not_there": "sub/.git/config",
    "to_proc": "/proc/self/root/etc",
}.items():
    add(f"symlink_{label}", partial(_link_to, target), Code.OUTSIDE, "{docs}/link.md")


@attack(Code.DEFAULT, "{closed}-link")
def symlink_in_a_closed_directory(place: Place) -> None:
    os.symlink("main.py", f"{place.closed}-link")


def _inner_link(source: Path, place: Place) -> None:
    (source / place.docs / "inner.md").symlink_to(f"../../{place.closed}")
    (source / place.docs / "hooks").symlink_to("../../.git/hooks")


@attack(Code.DEFAULT, "{closed}", below=_inner_link)
def a_symlink_that_is_there_leads_to_a_closed_file(place: Place) -> None:
    write(f"{place.docs}/inner.md")


@attack(Code.DEFAULT, "{closed}", below=_inner_link)
def a_symlink_that_is_there_leads_to_a_file_that_is_emptied(place: Place) -> None:
    write(f"{place.docs}/inner.md", flags=os.O_WRONLY | os.O_TRUNC)


@attack(Code.PROTECTED, "{hook}-new", below=_inner_link)
def a_symlink_that_is_there_leads_into_git(place: Place) -> None:
    _create(f"{place.docs}/hooks/{os.path.basename(place.hook)}-new")


@attack(Code.DEFAULT, "{closed}")
def a_symlink_of_ones_own_leads_to_a_closed_file(place: Place) -> None:
    os.symlink(f"../../{place.closed}", f"{place.docs}/mine.md")
    write(f"{place.docs}/mine.md")


def _deep(place: Place) -> str:
    os.makedirs(f"{place.docs}/a/b")
    os.symlink("../../../../src", f"{place.docs}/a/b/up.md")
    return f"{place.docs}/a/b/up.md"


@attack(Code.OUTSIDE, "aidlc-docs/moved-up.md")
def a_symlink_means_something_else_when_it_is_moved(place: Place) -> None:
    os.rename(_deep(place), "aidlc-docs/moved-up.md")


@attack(Code.OUTSIDE, "aidlc-docs/linked-up.md")
def a_symlink_means_something_else_under_a_second_name(place: Place) -> None:
    os.link(_deep(place), "aidlc-docs/linked-up.md", follow_symlinks=False)


@attack(Code.OUTSIDE, "aidlc-docs/{name}-b/up.md")
def a_symlink_means_something_else_when_its_directory_is_moved(place: Place) -> None:
    os.rename(os.path.dirname(_deep(place)), f"aidlc-docs/{os.path.basename(place.docs)}-b")


# -- /proc


@attack(Code.DEFAULT, "{closed}")
def by_the_working_directory_in_proc(place: Place) -> None:
    write(f"/proc/self/cwd/{place.closed}")


@attack(Code.DEFAULT, "{closed}")
def by_the_root_in_proc(place: Place) -> None:
    write(f"/proc/self/root{os.getcwd()}/{place.closed}")


@attack(Code.DEFAULT, "{closed}")
def by_a_directory_descriptor_in_proc(place: Place) -> None:
    with opened("src", os.O_RDONLY | os.O_DIRECTORY) as fd:
        write(f"/proc/self/fd/{fd}/{os.path.basename(place.closed)}")


@attack(Code.DEFAULT, "{closed}")
def by_opening_a_read_only_descriptor_again(place: Place) -> None:
    with opened(place.closed, os.O_RDONLY) as fd:
        write(f"/proc/self/fd/{fd}")


@attack(Code.DEFAULT, "{closed}")
def by_opening_a_path_descriptor_again(place: Place) -> None:
    with opened(place.closed, os.O_PATH) as fd:
        write(f"/proc/self/fd/{fd}")


@attack(Code.DEFAULT, "{closed}", root=True)
def by_file_handle(place: Place) -> None:
    """Root may open by handle, past every name."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128), 136)
    mount_id = ctypes.c_int()
    # The open file keeps its inode in the kernel, so the handle stays valid.
    with opened(place.closed, os.O_RDONLY) as kept, opened(".", os.O_RDONLY | os.O_DIRECTORY) as top:
        if libc.name_to_handle_at(kept, b"", handle, ctypes.byref(mount_id), _AT_EMPTY_PATH):
            raise OSError(ctypes.get_errno(), "no handle")
        fd = libc.open_by_handle_at(top, handle, os.O_WRONLY)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "no opening by handle")
        os.write(fd, b"EVIL")


# -- names that look like others


def _create_in_docs(name: str, place: Place) -> None:
    _create(f"{place.docs}/{name}")


def _create_in_code(name: str, place: Place) -> None:
    _create(f"{place.code}/{name}")


def _create_at_root(name: str, _: Place) -> None:
    _create(name)


def _mkdir_in_code(name: str, place: Place) -> None:
    os.mkdir(f"{place.code}/{name}")


def _mkdir_at_root(name: str, _: Place) -> None:
    os.mkdir(name)


_GIT = (".GIT", ".Git", ".git ", ".git.", ".gi\u200ct", ".g\u0131t")
_GIT_BELOW = (".GIT", ".git\u200b", ".g\u00edt", ".gi\u0307t")
_NO_DOT = ("\uff0egit", "git~1", "GIT~1")
_POLICY = ("POLICY.TOML", "policy.toml ", "policy.toml\u200b")
_KEPT = ("readme.md", "README.md.", "README\u200b.md")
_NOT_PY = (
    "x.py.",
    "x.PY",
    "x.py ",
    "x",
    "x.pyc",
    "py",
    "x.py.sh",
    "x.p\u0443",
    "x\uff0epy",
    "x.py\n",
    "%2e%2e%2fx%2epy%00.sh",
)
_NO_STEM = (".py", "..py", "...py", ".x.py")
_NOT_MD = ("x.md.py", "x.MD", "x.md~", "x.md.", "x\uff0emd", "x.m\u0501", "md", "x.md\t")
_FORGED = (
    "two\nlines.txt",
    "\x1b[2J\x1b[31mred.txt",
    'x","result":"allowed","hash":"0"}\n{"seq":1,"prev":"0"}.txt',
    "\\n\\u0000.txt",
    "\u202etxt.dm",
    "\r.txt",
    "\x7f\x9b31m.txt",
    "\udcff\udcfe.txt",
    "\udc80",
    "n" * 251 + ".txt",
)

adding("git_look_alike", _mkdir_at_root, Code.HIDDEN, _GIT, "")
adding("git_look_alike_below", _mkdir_in_code, Code.HIDDEN, _GIT_BELOW, "{code}/")
adding("git_without_a_dot", _mkdir_at_root, Code.DEFAULT, _NO_DOT, "")
adding("policy_look_alike", _create_at_root, Code.DEFAULT, _POLICY, "")
adding("readme_look_alike", _create_at_root, Code.DEFAULT, _KEPT, "")
adding("code_suffix", _create_in_code, Code.SUFFIX, _NOT_PY, "{code}/")
adding("code_without_stem", _create_in_code, Code.HIDDEN, _NO_STEM, "{code}/")
adding("document_suffix", _create_in_docs, Code.SUFFIX, _NOT_MD, "{docs}/")
adding("forged", _create_in_docs, Code.SUFFIX, _FORGED, "{docs}/")


_FAR = ("d" * 200,) * 24
"""Directories whose path is longer than PATH_MAX."""


def _go_far(place: Place) -> None:
    os.chdir(place.docs)
    for name in _FAR:
        os.mkdir(name)
        os.chdir(name)


@attack(Code.SUFFIX, f"{{docs}}/{'/'.join(_FAR)}/notes.txt")
def a_path_that_is_longer_than_paths_may_be(place: Place) -> None:
    _go_far(place)
    _create("notes.txt")


@attack(Code.EXECUTABLE, f"{{docs}}/{'/'.join(_FAR)}/plan.md")
def a_script_where_paths_are_too_long(place: Place) -> None:
    _go_far(place)
    write("plan.md", b"#!/bin/sh", os.O_WRONLY | os.O_CREAT)


# -- names without a file


@attack(Code.DEFAULT, "{closed}-late")
def a_nameless_file_gets_a_closed_name(place: Place) -> None:
    """The mount makes no nameless files; one from elsewhere cannot come in by a link."""
    try:
        os.close(os.open("aidlc-docs", os.O_TMPFILE | os.O_RDWR))
    except OSError:
        _create(f"{place.closed}-late")


@attack(Code.PROTECTED, "{hook}")
def through_a_directory_that_stands_outside(place: Place) -> None:
    """A symlink outside the mount leads in again; it is judged where it arrives."""
    with tempfile.TemporaryDirectory() as outside:
        os.symlink(os.getcwd(), f"{outside}/in")
        write(f"{outside}/in/{place.hook}")
