"""kill -9 exactly between the intent and its change, between the change and its outcome, and before the intent.

A tracer holds the serving process at the entry or at the exit of the one system call, and there it is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from bonobofs.audit.reader import read
from bonobofs.system import processes
from tests.crash.conftest import Examine, open_intents
from tests.support import proc
from tests.support.syscalls import RENAME_EXCHANGE, fallocate, make, opened, renameat2
from tests.support.trees import Tree, differences, snapshot
from tests.support.users import run_in_child
from tests.support.wait import PATIENCE, until
from tests.support.world import ALLOW_ALL, Mounted, World

pytestmark = pytest.mark.root

_FOREVER: Final = 60_000_000
"""Microseconds for which the tracer would hold the process, were it not killed."""


def _write(path: Path) -> None:
    with opened(path, os.O_WRONLY) as fd:
        os.write(fd, b"EVIL")


def _append(path: Path) -> None:
    with opened(path, os.O_WRONLY | os.O_APPEND) as fd:
        os.write(fd, b"more")


def _allocate(path: Path) -> None:
    with opened(path, os.O_RDWR) as fd:
        fallocate(fd, 0, 0, 100_000)


def _copy(top: Path) -> None:
    with opened(top / "other.md", os.O_RDONLY) as source, opened(top / "file.md") as fd:
        os.copy_file_range(source, fd, 3)


class Change(NamedTuple):
    """One change: the operation on record, the system calls of which one makes it, and who asks for it."""

    operation: str
    calls: str
    act: Callable[[Path], object]
    path: str = ""
    """The path that the call has, if the server makes the same call for others: it reads who asks from /proc."""
    when: int = 1
    """Which of these calls it is."""


CHANGES: Final = {
    "create": Change("create_file", "openat", lambda top: make(top / "new.md"), path="new.md"),
    "mknod": Change("create_file", "mknodat", lambda top: os.mknod(top / "new.md", 0o644 | stat.S_IFREG)),
    "mkdir": Change("mkdir", "mkdirat", lambda top: os.mkdir(top / "new")),
    "symlink": Change("symlink", "symlinkat", lambda top: os.symlink("file.md", top / "new")),
    "link": Change("link", "linkat", lambda top: os.link(top / "file.md", top / "new.md")),
    # the server moves the file into its store of old contents
    "unlink": Change("delete_file", "renameat,renameat2", lambda top: os.unlink(top / "file.md")),
    "rmdir": Change("rmdir", "unlinkat", lambda top: os.rmdir(top / "empty")),
    "rename": Change("rename", "renameat,renameat2", lambda top: os.rename(top / "file.md", top / "new.md")),
    "rename_over": Change("rename", "renameat,renameat2", lambda top: os.rename(top / "file.md", top / "other.md")),
    "exchange": Change(
        "rename", "renameat2", lambda top: renameat2(top / "file.md", top / "other.md", RENAME_EXCHANGE)
    ),
    "rename_directory": Change("rename", "renameat,renameat2", lambda top: os.rename(top / "full", top / "new")),
    "write": Change("write_file", "pwrite64", lambda top: _write(top / "file.md")),
    "append": Change("write_file", "pwritev2", lambda top: _append(top / "file.md")),
    "truncate": Change("truncate", "ftruncate", lambda top: os.truncate(top / "file.md", 2)),
    "allocate": Change("allocate", "fallocate", lambda top: _allocate(top / "file.md")),
    "copy_range": Change("copy_range", "copy_file_range", _copy),
    "chmod": Change("set_mode", "?chmod,?fchmodat,?fchmodat2", lambda top: os.chmod(top / "file.md", 0o600)),
    "chown": Change("set_owner", "?chown,?fchownat", lambda top: os.chown(top / "file.md", 1, 1)),
    "utimens": Change("set_times", "utimensat", lambda top: os.utime(top / "file.md", ns=(1, 1))),
    "setxattr": Change("set_xattr", "setxattr", lambda top: os.setxattr(top / "file.md", "user.new", b"1")),
    "removexattr": Change("remove_xattr", "removexattr", lambda top: os.removexattr(top / "file.md", "user.mark")),
}


@pytest.fixture
def source(source: Path) -> Path:
    for name in ("file.md", "other.md", "keep.md"):
        (source / name).write_text(f"this is {name}")
    (source / "empty").mkdir()
    (source / "full/deep").mkdir(parents=True)
    (source / "full/deep/file.md").write_text("deep")
    os.setxattr(source / "file.md", "user.mark", b"1")
    return source


@contextlib.contextmanager
def killed_at(world: World, change: Change, delay: str) -> Iterator[None]:
    """A program requests the change, and a tracer stops the server at the call that makes it; then both are killed."""
    inject = f"inject={change.calls}:{delay}={_FOREVER}:when={change.when}"
    only = ["-P", change.path] if change.path else []
    with subprocess.Popen(
        [
            "strace",
            "-f",
            "-qq",
            "-o",
            "/dev/null",
            *only,
            "-e",
            f"trace={change.calls}",
            "-e",
            inject,
            "-p",
            str(world.pid),
        ]
    ) as tracer:
        child = 0
        try:
            until(lambda: proc.is_traced(world.pid), "the tracer took hold of every thread")
            child = os.fork()
            if child == 0:
                with contextlib.suppress(OSError):
                    change.act(world.path)
                os._exit(0)
            yield
        finally:
            # First the server, which then goes no further, then the tracer, which would hold even what is dead.
            os.kill(world.pid, signal.SIGKILL)
            tracer.kill()
            assert processes.wait_for_end(world.pid, world.session.starttime or 0, PATIENCE)
            if child:
                os.waitpid(child, 0)


def _intents(world: World) -> list[str]:
    return [entry.operation for entry in read(world.trail) if entry.kind == "intent"]


def _go_on(mounted: Mounted, world: World) -> None:
    """A mount over the dead one serves, and ends with its record closed."""
    again = mounted(policy=ALLOW_ALL, mountpoint=world.path)
    run_in_child(make, again.path / "after.md", b"text")
    assert (again.source / "after.md").read_bytes() == b"text"
    assert again.umount().closed


@pytest.mark.parametrize("name", CHANGES)
def test_a_kill_after_the_intent_leaves_no_change(mounted: Mounted, source: Path, examine: Examine, name: str) -> None:
    """The intent has no outcome."""
    change = CHANGES[name]
    before = snapshot(source)
    world = mounted(policy=ALLOW_ALL)
    with killed_at(world, change, "delay_enter"):
        until(lambda: _intents(world) == [change.operation], "the intent was entered")
    assert snapshot(source) == before
    entries = examine(world, before)
    assert [entry.operation for entry in open_intents(entries).values()] == [change.operation]
    _go_on(mounted, world)


def _has_changed(source: Path, before: Tree) -> bool:
    try:
        return bool(_changed(before, snapshot(source)))
    except FileNotFoundError:
        return False  # it changed under the look: the next one tells


@pytest.mark.parametrize("name", CHANGES)
def test_a_kill_after_the_change_leaves_an_open_intent(
    mounted: Mounted, source: Path, examine: Examine, name: str
) -> None:
    """The change exists, and an intent without an outcome explains it."""
    change = CHANGES[name]
    before = snapshot(source)
    world = mounted(policy=ALLOW_ALL)
    with killed_at(world, change, "delay_exit"):
        until(lambda: _has_changed(source, before), "the change was made")
    assert _changed(before, snapshot(source))
    entries = examine(world, before)
    assert [entry.operation for entry in open_intents(entries).values()] == [change.operation]
    _go_on(mounted, world)


@pytest.mark.parametrize("name", ["create", "unlink", "write", "rename"])
def test_a_kill_before_the_intent_leaves_no_change(mounted: Mounted, source: Path, examine: Examine, name: str) -> None:
    """A change without a record does not exist."""
    change = CHANGES[name]._replace(calls="write", path="")
    before = snapshot(source)
    world = mounted(policy=ALLOW_ALL)
    with killed_at(world, change, "delay_enter"):
        until(lambda: proc.state(world.pid) == "t", "the server was about to write the intent")
    assert snapshot(source) == before
    assert open_intents(examine(world, before)) == {}
    _go_on(mounted, world)


def _changed(before: Tree, after: Tree) -> bool:
    return bool(differences(before, after))
