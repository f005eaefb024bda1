"""Every way to change the content of a file, except write()."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Final

from bonobofs.policy.decision import Code
from tests.attacks.attack import CONTENT, DRAFT, Place, add, attack, draft, draft_path, linked, module, on, write
from tests.support.syscalls import (
    FALLOC_KEEP_SIZE,
    FALLOC_PUNCH_HOLE,
    FALLOC_ZERO_RANGE,
    fallocate,
    make,
    opened,
    read,
)

LIMIT: Final = 1_000_000
"""Largest size in bytes of a document under the default policy."""
_PATIENCE: Final = 10.0

# -- a file that no rule admits


def append(path: str) -> None:
    write(path, flags=os.O_WRONLY | os.O_APPEND)


def pwrite(path: str) -> None:
    with opened(path, os.O_RDWR) as fd:
        os.pwrite(fd, b"EVIL", 3)


def pwritev_append(path: str) -> None:
    with opened(path, os.O_RDWR) as fd:
        os.pwritev(fd, [b"EV", b"IL"], 0, os.RWF_APPEND)


def write_past_the_cache(path: str) -> None:
    with opened(path, os.O_RDWR | os.O_DIRECT) as fd, mmap.mmap(-1, 4096) as page:
        os.write(fd, page)


def open_truncating(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))


def open_creating(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))


def truncate(path: str) -> None:
    os.truncate(path, 5)


def ftruncate(path: str) -> None:
    with opened(path, os.O_RDWR) as fd:
        os.ftruncate(fd, 10_000)


def allocate(path: str) -> None:
    with opened(path, os.O_RDWR) as fd:
        fallocate(fd, 0, 0, 8192)


def allocate_beyond_the_end(path: str) -> None:
    with opened(path, os.O_RDWR) as fd:
        fallocate(fd, FALLOC_KEEP_SIZE, 0, 8192)


def punch_a_hole(path: str) -> None:
    with opened(path, os.O_RDWR) as fd:
        fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 0, 16)


def zero_a_range(path: str) -> None:
    with opened(path, os.O_RDWR) as fd:
        fallocate(fd, FALLOC_ZERO_RANGE, 0, 16)


def copy_a_range_into(path: str) -> None:
    with opened("README.md", os.O_RDONLY) as source, opened(path, os.O_RDWR) as fd:
        os.copy_file_range(source, fd, 4)


def splice_into(path: str) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"EVIL")
    with opened(path, os.O_RDWR) as fd:
        os.splice(reader, fd, 4)


def sendfile_into(path: str) -> None:
    with opened("README.md", os.O_RDONLY) as source, opened(path, os.O_RDWR) as fd:
        os.sendfile(fd, source, 0, 4)


def map_shared(path: str) -> None:
    """The kernel takes the bytes into the mapping and asks later; then readers must see the old bytes again."""
    old = read(path)
    with opened(path, os.O_RDWR) as fd, mmap.mmap(fd, 0) as view:
        view[:4] = b"EVIL"
        try:
            view.flush()
        finally:
            deadline = time.monotonic() + _PATIENCE
            while read(path) != old or view[: len(old)] != old:
                assert time.monotonic() < deadline, "readers of the mount still see the refused bytes"


_WAYS = (
    write,
    append,
    pwrite,
    pwritev_append,
    write_past_the_cache,
    open_truncating,
    open_creating,
    truncate,
    ftruncate,
    allocate,
    allocate_beyond_the_end,
    punch_a_hole,
    zero_a_range,
    copy_a_range_into,
    splice_into,
    sendfile_into,
    map_shared,
)


for way in _WAYS:
    kernel = way is map_shared
    for label, path, code, below in (
        ("closed", "{closed}", Code.DEFAULT, None),
        ("hook", "{hook}", Code.PROTECTED, None),
        ("linked", "{docs}/linked.md", Code.HARDLINK, linked),
    ):
        add(f"{label}_{way.__name__}", on(path, way), code, path, below=below, by_kernel=kernel)


# -- a descriptor that was opened before


@attack(Code.HARDLINK, "{docs}/linked.md", below=linked, spends=("linked.md",))
def a_linked_file_is_removed_and_written_by_its_descriptor(place: Place) -> None:
    """The last name that is known goes; the descriptor still leads to the hook."""
    with opened(f"{place.docs}/linked.md", os.O_RDWR) as fd:
        os.unlink(f"{place.docs}/linked.md")
        os.write(fd, b"EVIL")


@attack(Code.HARDLINK, "{docs}/linked.md", below=linked, spends=("linked.md",))
def a_linked_file_is_replaced_and_written_by_its_descriptor(place: Place) -> None:
    with opened(f"{place.docs}/linked.md", os.O_RDWR) as fd:
        os.rename(draft(place), f"{place.docs}/linked.md")
        os.write(fd, b"EVIL")


@attack(Code.HARDLINK, "{docs}/linked.md", below=linked, spends=("linked.md",))
def a_linked_file_is_removed_and_cut_by_its_descriptor(place: Place) -> None:
    with opened(f"{place.docs}/linked.md", os.O_RDWR) as fd:
        os.unlink(f"{place.docs}/linked.md")
        os.ftruncate(fd, 0)


@attack(Code.HARDLINK, "{docs}/linked.md", below=linked, spends=("linked.md",))
def a_linked_file_is_removed_and_made_executable_by_its_descriptor(place: Place) -> None:
    with opened(f"{place.docs}/linked.md", os.O_RDWR) as fd:
        os.unlink(f"{place.docs}/linked.md")
        os.fchmod(fd, 0o666)


@attack(Code.HARDLINK, "{docs}/linked.md", below=linked, spends=("linked.md",))
def a_linked_file_is_renamed_and_written(place: Place) -> None:
    os.rename(f"{place.docs}/linked.md", f"{place.docs}/renamed.md")
    os.rename(f"{place.docs}/renamed.md", f"{place.docs}/linked.md")
    write(f"{place.docs}/linked.md")


@attack(Code.HARDLINK, "{docs}/linked.md", instead=(Code.HARDLINK, "{docs}/more.md"), below=linked)
def a_linked_file_gets_one_more_allowed_name(place: Place) -> None:
    os.link(f"{place.docs}/linked.md", f"{place.docs}/more.md")
    write(f"{place.docs}/linked.md")


@attack(Code.HARDLINK, DRAFT)
def a_name_that_appears_behind_the_mount_ends_a_run_of_writes(place: Place) -> None:
    with opened(draft(place), os.O_RDWR) as fd:
        os.write(fd, b"one")
        os.link(f"{place.source}/{draft_path(place)}", f"{place.source}/{place.code}/alias")
        os.write(fd, b"two")


# -- one inode under two rules: what only the other name forbids


def _alias(place: Place, content: bytes = b"") -> str:
    path = module(place, content)
    os.link(path, f"{place.docs}/alias.md")
    return path


@attack(Code.HARDLINK, "{code}/module.py", instead=(Code.EXECUTABLE, "{docs}/alias.md"))
def an_alias_makes_a_script_of_a_document(place: Place) -> None:
    write(_alias(place), b"#!/bin/sh\n")


@attack(Code.HARDLINK, "{code}/module.py", instead=(Code.EXECUTABLE, "{docs}/alias.md"))
def an_alias_gives_a_document_execute_permission(place: Place) -> None:
    os.chmod(_alias(place), 0o755)


@attack(Code.HARDLINK, "{code}/module.py", instead=(Code.EXECUTABLE, "{docs}/alias.md"))
def an_alias_punches_a_document_into_a_program(place: Place) -> None:
    with opened(_alias(place, b"Xasm\1\0\0\0"), os.O_RDWR) as fd:
        fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 0, 1)


@attack(Code.HARDLINK, "{code}/module.py", instead=(Code.EXECUTABLE, "{docs}/alias.md"))
def an_alias_copies_a_program_into_a_document(place: Place) -> None:
    make(f"{place.code}/script.py", b"#!/bin/sh\n")
    with opened(f"{place.code}/script.py", os.O_RDONLY) as script, opened(_alias(place), os.O_RDWR) as fd:
        os.copy_file_range(script, fd, 10)


# -- executable content, whatever the order of its bytes


@attack(Code.EXECUTABLE, DRAFT)
def a_script_at_once(place: Place) -> None:
    write(draft(place, b""), b"#!/bin/sh\n")


@attack(Code.EXECUTABLE, DRAFT)
def a_script_byte_by_byte(place: Place) -> None:
    with opened(draft(place, b""), os.O_RDWR) as fd:
        os.write(fd, b"#")
        os.write(fd, b"!")


@attack(Code.EXECUTABLE, DRAFT)
def a_script_from_its_end(place: Place) -> None:
    with opened(draft(place, b""), os.O_RDWR) as fd:
        os.pwrite(fd, b"/bin/sh\n", 2)
        os.pwrite(fd, b"!", 1)
        os.pwrite(fd, b"#", 0)


@attack(Code.EXECUTABLE, DRAFT)
def a_script_by_appending(place: Place) -> None:
    path = draft(place, b"")
    for byte in b"#!/bin/sh\n":
        write(path, bytes([byte]), os.O_WRONLY | os.O_APPEND)


@attack(Code.EXECUTABLE, DRAFT)
def a_script_by_two_programs(place: Place) -> None:
    path = draft(place, b" !/bin/sh")
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    write(path, b"#")


@attack(Code.EXECUTABLE, DRAFT)
def a_binary_byte_by_byte(place: Place) -> None:
    with opened(draft(place, b"????"), os.O_RDWR) as fd:
        for at in (3, 1, 0, 2):
            os.pwrite(fd, b"\x7fELF"[at : at + 1], at)


@attack(Code.EXECUTABLE, DRAFT)
def a_program_through_a_hole_at_its_start(place: Place) -> None:
    with opened(draft(place, b""), os.O_RDWR) as fd:
        os.ftruncate(fd, 8)
        os.pwrite(fd, b"asm", 1)


@attack(Code.EXECUTABLE, DRAFT)
def a_program_by_punching_a_hole(place: Place) -> None:
    with opened(draft(place, b"Xasm\1\0\0\0"), os.O_RDWR) as fd:
        fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 0, 1)


@attack(Code.EXECUTABLE, DRAFT)
def a_program_by_zeroing(place: Place) -> None:
    with opened(draft(place, b"Xasm\1\0\0\0"), os.O_RDWR) as fd:
        fallocate(fd, FALLOC_ZERO_RANGE, 0, 1)


@attack(Code.EXECUTABLE, DRAFT)
def a_script_by_copying_a_range(place: Place) -> None:
    make(f"{place.code}/script.py", b"x#!/bin/sh\n")
    with opened(f"{place.code}/script.py", os.O_RDONLY) as script, opened(draft(place, b""), os.O_RDWR) as fd:
        os.copy_file_range(script, fd, 10, 1)


@attack(Code.EXECUTABLE, DRAFT)
def a_script_by_splicing(place: Place) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"#!/bin/sh\n")
    with opened(draft(place, b""), os.O_RDWR) as fd:
        os.splice(reader, fd, 10)


@attack(Code.EXECUTABLE, DRAFT, by_kernel=True)
def a_script_through_a_mapping(place: Place) -> None:
    """Refused when the page comes; then readers see the draft again."""
    path = draft(place)
    old = read(path)
    with opened(path, os.O_RDWR) as fd, mmap.mmap(fd, 0) as view:
        view[:2] = b"#!"
        try:
            view.flush()
        finally:
            deadline = time.monotonic() + _PATIENCE
            while read(path) != old:
                assert time.monotonic() < deadline, "readers of the mount still see the refused bytes"


# -- the size rule


def _full(place: Place) -> str:
    path = draft(place)
    os.truncate(path, LIMIT)
    return path


def grow_by_writing(place: Place) -> None:
    with opened(_full(place), os.O_RDWR) as fd:
        os.pwrite(fd, b"xy", LIMIT - 1)


def grow_by_appending(place: Place) -> None:
    write(_full(place), b"x", os.O_WRONLY | os.O_APPEND)


def grow_in_one_run(place: Place) -> None:
    with opened(draft(place), os.O_RDWR) as fd:
        for _ in range(LIMIT // 100_000 + 1):
            os.write(fd, bytes(100_000))


def grow_far_away(place: Place) -> None:
    with opened(draft(place), os.O_RDWR) as fd:
        os.pwrite(fd, b"x", 1 << 40)


def grow_by_truncating(place: Place) -> None:
    os.truncate(draft(place), LIMIT + 1)


def grow_by_truncating_a_descriptor(place: Place) -> None:
    with opened(draft(place), os.O_RDWR) as fd:
        os.ftruncate(fd, 1 << 40)


def grow_by_allocating(place: Place) -> None:
    with opened(draft(place), os.O_RDWR) as fd:
        fallocate(fd, 0, LIMIT, 1)


def grow_unseen_by_allocating(place: Place) -> None:
    """The size stays, the disk fills."""
    with opened(draft(place), os.O_RDWR) as fd:
        fallocate(fd, FALLOC_KEEP_SIZE, 0, LIMIT + 8_000_000)


def grow_by_zeroing(place: Place) -> None:
    with opened(draft(place), os.O_RDWR) as fd:
        fallocate(fd, FALLOC_ZERO_RANGE, 10, LIMIT)


def grow_by_copying_a_range(place: Place) -> None:
    with opened("README.md", os.O_RDONLY) as source, opened(draft(place), os.O_RDWR) as fd:
        os.copy_file_range(source, fd, 4, 0, LIMIT)


def grow_by_splicing(place: Place) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"EVIL")
    with opened(_full(place), os.O_RDWR) as fd:
        os.splice(reader, fd, 4, offset_dst=LIMIT)


def grow_by_sendfile(place: Place) -> None:
    with opened("README.md", os.O_RDONLY) as source, opened(_full(place), os.O_RDWR) as fd:
        os.lseek(fd, 0, os.SEEK_END)
        os.sendfile(fd, source, 0, 4)


for grow in (
    grow_by_writing,
    grow_by_appending,
    grow_in_one_run,
    grow_far_away,
    grow_by_truncating,
    grow_by_truncating_a_descriptor,
    grow_by_allocating,
    grow_unseen_by_allocating,
    grow_by_zeroing,
    grow_by_copying_a_range,
    grow_by_splicing,
    grow_by_sendfile,
):
    add(grow.__name__, grow, Code.SIZE, DRAFT)


def _large(source: Path, place: Place) -> None:
    with open(source / place.code / "large.py", "wb") as file:
        file.truncate(LIMIT)


@attack(Code.SIZE, "{code}/renamed.py", below=_large)
def a_file_that_is_too_large_is_renamed(place: Place) -> None:
    os.rename(f"{place.code}/large.py", f"{place.code}/renamed.py")


@attack(Code.SIZE, "{code}/large.py", below=_large)
def a_file_that_is_too_large_is_written_in_place(place: Place) -> None:
    with opened(f"{place.code}/large.py", os.O_RDWR) as fd:
        os.pwrite(fd, CONTENT, 0)


# -- flags that no rule can judge are not there at all


@attack(Code.DEFAULT, "{closed}")
def make_it_immutable_by_ioctl(place: Place) -> None:
    """chattr, clone and the like are not offered by the mount: nothing happens before the write that is refused."""
    with opened(place.closed, os.O_RDWR) as fd, opened("README.md", os.O_RDONLY) as source:
        for request, argument in ((0x40086602, struct.pack("l", 0x10)), (0x40049409, source)):
            try:
                fcntl.ioctl(fd, request, argument)
            except OSError:
                continue
            raise AssertionError("the mount passed an ioctl down")
        os.write(fd, b"EVIL")
