"""Two rules for one file: once it comes under the stricter rule, in any way, that rule applies."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attacks.attack import CONTENT
from tests.attacks.ground import build
from tests.support.syscalls import (
    FALLOC_KEEP_SIZE,
    FALLOC_PUNCH_HOLE,
    RENAME_EXCHANGE,
    fallocate,
    make,
    opened,
    renameat2,
)
from tests.support.users import NOBODY, outcome, run_in_child
from tests.support.world import ALLOW_ALL, Mounted

TWO_RULES = """
[[rule]]
name = "wide"
paths = ["wide/"]

[[rule]]
name = "narrow"
paths = ["narrow/"]
suffixes = [".md"]
max_size = "1KB"
executable = false

[role.author]
write = ["wide/", "narrow/"]
"""
_TRIES = 20
"""How often a trick is tried that needs some luck."""
_FIRST, _MORE = b"a beginning\n", b"x" * 2000


@pytest.fixture
def source(source: Path) -> Path:
    for directory in ("wide/sub/deep", "narrow"):
        (source / directory).mkdir(parents=True)
    return source


def _write_on_after(top: Path, path: str, moved: str, act: str) -> object:
    """Begin to write under the wide rule, let the file come under the narrow one, and write on."""
    os.chdir(top)
    make("narrow/other.md")
    with opened(path, os.O_RDWR | os.O_CREAT) as fd:
        os.write(fd, _FIRST)
        if act == "exchange":
            renameat2(moved, "narrow/other.md", RENAME_EXCHANGE)
        elif act == "exchanged":
            renameat2("narrow/other.md", moved, RENAME_EXCHANGE)
        elif act == "link":
            os.link(moved, "narrow/file.md")
        else:
            os.rename(moved, f"narrow/{os.path.basename(moved)}")
        return outcome(os.write, fd, _MORE), outcome(os.pwrite, fd, b"#!", 0)


@pytest.mark.parametrize(
    ("path", "moved", "act", "codes"),
    [
        ("wide/file.md", "wide/file.md", "rename", (errno.EFBIG, errno.EACCES)),
        ("wide/sub/file.md", "wide/sub", "rename", (errno.EFBIG, errno.EACCES)),
        ("wide/sub/deep/file.md", "wide/sub", "rename", (errno.EFBIG, errno.EACCES)),
        ("wide/file.md", "wide/file.md", "exchange", (errno.EFBIG, errno.EACCES)),
        ("wide/file.md", "wide/file.md", "exchanged", (errno.EFBIG, errno.EACCES)),
        ("wide/file.md", "wide/file.md", "link", (errno.EFBIG, errno.EACCES)),
    ],
    ids=["file", "directory", "directory_above", "exchange", "exchanged", "link"],
)
def test_a_write_batch_does_not_outlive_its_rule(
    mounted: Mounted, path: str, moved: str, act: str, codes: tuple[int, int]
) -> None:
    """After a move of the file or a directory above, further writes are judged at the new path."""
    world = mounted(policy=TWO_RULES, role="author")
    came = run_in_child(_write_on_after, world.path, path, moved, act)
    # Either of two names may be reported: the narrow one by its rule, the wide one because it has another.
    assert came == codes or (act, came) == ("link", (errno.EPERM, errno.EPERM))
    for file in (world.source / "narrow").rglob("*.md"):
        assert file.read_bytes() in (_FIRST, b"")
    denied = {entry.code for entry in world.entries() if entry.result == "denied"}
    assert denied == {"SIZE", "EXECUTABLE"} or (act, denied) == ("link", {"HARDLINK"})


def _write(path: Path) -> object:
    with opened(path, os.O_RDWR) as fd:
        return outcome(os.write, fd, b"EVIL")


@pytest.mark.root
def test_a_name_that_the_kernel_forgot_does_not_count_twice(mounted: Mounted, source: Path) -> None:
    """A hard link to a hook stays protected, however often its one allowed name is looked up."""
    build(source)
    hook = source / ".git/hooks/pre-commit"
    hook.write_bytes(CONTENT)
    os.link(hook, source / "aidlc-docs/linked.md")
    world = mounted()
    linked = world.path / "aidlc-docs/linked.md"
    assert run_in_child(_write, linked) == errno.EPERM
    for _ in range(3):
        # What memory pressure does sooner or later: the kernel drops every name of the mount that is not in use.
        subprocess.run(["mount", "-i", "-o", "remount,rw", world.path], check=True)
        assert run_in_child(_write, linked) == errno.EPERM
    assert hook.read_bytes() == CONTENT
    assert [entry.path for entry in world.entries() if entry.code == "HARDLINK"][:1] == ["aidlc-docs/linked.md"]


def _lose_a_second_name(first: Path, second: Path, number: int) -> object:
    """By one mount a file gets a second name, by the other it loses that again; then by the first its own."""
    linked, again = f"aidlc-docs/linked-{number}.md", f"aidlc-docs/again-{number}.md"
    os.link(first / linked, first / again)
    with opened(first / linked, os.O_RDWR) as fd, opened(second / "aidlc-docs", os.O_RDONLY):
        outcome(os.pwrite, fd, b"EVIL", 0)
        os.unlink(second / again)
        os.unlink(first / linked)
        return outcome(os.pwrite, fd, b"EVIL", 0)


def _lose_the_name(first: Path, second: Path, number: int) -> object:
    """A file that is open by one mount loses its name by the other."""
    linked = f"aidlc-docs/linked-{number}.md"
    with opened(first / linked, os.O_RDWR) as fd, opened(second / linked, os.O_RDONLY):
        outcome(os.pwrite, fd, b"EVIL", 0)
        os.unlink(second / linked)
        return outcome(os.pwrite, fd, b"EVIL", 0)


def _lose_the_name_and_cut(first: Path, second: Path, number: int) -> object:
    linked = f"aidlc-docs/linked-{number}.md"
    with opened(first / linked, os.O_RDWR) as fd, opened(second / linked, os.O_RDONLY):
        outcome(os.ftruncate, fd, 0)
        os.unlink(second / linked)
        return outcome(os.ftruncate, fd, 0)


def _over_and_over(trick: Callable[[Path, Path, int], object], first: Path, second: Path) -> list[object]:
    return [trick(first, second, number) for number in range(_TRIES)]


@pytest.mark.parametrize("trick", [_lose_a_second_name, _lose_the_name, _lose_the_name_and_cut])
def test_a_name_removed_by_another_mount_permits_no_change(
    mounted: Mounted, source: Path, trick: Callable[[Path, Path, int], object]
) -> None:
    """The remaining name is a hook. A name that only this mount has cached does not count."""
    build(source)
    hooks = [source / f".git/hooks/{number}" for number in range(_TRIES)]
    for number, hook in enumerate(hooks):
        hook.write_bytes(CONTENT)
        os.link(hook, source / f"aidlc-docs/linked-{number}.md")
    first, second = mounted(), mounted(agent="bob")
    came = run_in_child(_over_and_over, trick, first.path, second.path)
    assert {hook.read_bytes() for hook in hooks} == {CONTENT}
    assert set(came) <= {errno.EPERM, errno.ESTALE, errno.ENOENT}


def _become_a_script(first: Path, second: Path, number: int) -> object:
    """A program that is written by one mount becomes a document by the other, in two steps that are each allowed."""
    module, document = f"tests/{number}.py", f"aidlc-docs/{number}.md"
    with opened(first / module, os.O_RDWR | os.O_CREAT) as fd, opened(second / "aidlc-docs", os.O_RDONLY):
        os.pwrite(fd, b"text", 0)
        os.link(second / module, second / document)
        os.unlink(second / module)
        return outcome(os.pwrite, fd, b"#!/bin/sh\n", 0)


def _become_executable(first: Path, second: Path, number: int) -> object:
    module, document = f"tests/{number}.py", f"aidlc-docs/{number}.md"
    with opened(first / module, os.O_RDWR | os.O_CREAT) as fd, opened(second / "aidlc-docs", os.O_RDONLY):
        os.fchmod(fd, 0o640)
        os.link(second / module, second / document)
        os.unlink(second / module)
        return outcome(os.fchmod, fd, 0o755)


@pytest.mark.parametrize("trick", [_become_a_script, _become_executable])
def test_a_file_moved_by_another_mount_is_judged_by_its_new_rule(
    mounted: Mounted, source: Path, trick: Callable[[Path, Path, int], object]
) -> None:
    """No write is judged by the rule of a removed name."""
    build(source)
    first, second = mounted(), mounted(agent="bob")
    run_in_child(_over_and_over, trick, first.path, second.path)
    documents = list((source / "aidlc-docs").iterdir())
    assert len(documents) == _TRIES
    assert not [path for path in documents if path.read_bytes().startswith(b"#!")]
    assert not [path for path in documents if path.stat().st_mode & 0o111]


def _inject(top: Path, how: str) -> None:
    os.chdir(top)
    with opened("payload", os.O_RDONLY) as payload, opened("program", os.O_RDWR) as fd:
        if how == "write":
            os.write(fd, b"EVIL")
        elif how == "copy":
            os.copy_file_range(payload, fd, 4)
        elif how == "allocate":
            fallocate(fd, 0, 0, 4096)
        elif how == "punch":
            fallocate(fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, 0, 8)
        else:
            os.ftruncate(fd, 10)


@pytest.mark.root
@pytest.mark.parametrize("how", ["write", "copy", "allocate", "punch", "truncate"])
def test_a_change_of_a_set_id_program_clears_its_set_id_bits(open_directory: Path, mounted: Mounted, how: str) -> None:
    """In a mount of root for other users, each change of content clears the set-id bits, as on a bare directory."""
    source, mountpoint = open_directory / "source", open_directory / "mount"
    source.mkdir()
    mountpoint.mkdir()
    (source / "payload").write_bytes(b"#!/bin/sh\n")
    (source / "program").write_bytes(CONTENT)
    os.chmod(source / "program", 0o6777)
    run_in_child(_inject, source, how, user=NOBODY)
    assert os.stat(source / "program").st_mode & 0o7777 == 0o777
    os.chmod(source / "program", 0o6777)

    world = mounted(policy=ALLOW_ALL, source=source, mountpoint=mountpoint, allow_other=True)
    run_in_child(_inject, world.path, how, user=NOBODY)
    assert os.stat(source / "program").st_mode & 0o7777 == 0o777
