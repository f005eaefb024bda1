"""kill -9 of a server while it sends a notification about a directory that a program has locked.

The program waits for the server, and the thread that sends waits for the program. The kernel interrupts neither.
"""

from __future__ import annotations

import errno
import os
import platform
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from bonobofs.session import SessionState
from bonobofs.system import mounts
from tests.support import proc
from tests.support.observe import companion_of, status
from tests.support.tracing import traced
from tests.support.users import outcome
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted, World, bonobofs

pytestmark = pytest.mark.root

_LATER: Final = 2_000_000
"""Microseconds between the start of the notification and its call; the program begins its call meanwhile."""
_FOREVER: Final = 60_000_000
_WRITE: Final = "1 " if platform.machine() == "x86_64" else "64 "
"""The number of write(), with which /proc/PID/syscall begins."""


@pytest.fixture
def world(mounted: Mounted, source: Path) -> World:
    (source / "d").mkdir()
    for name in ("removed", "removed outside"):
        (source / "d" / name).write_text("text")
    world = mounted(policy=ALLOW_ALL)
    assert {(world.path / "d" / name).read_text() for name in ("removed", "removed outside")} == {"text"}
    return world


def _is_sending(pid: int, state: str = "") -> bool:
    """True if a thread other than the main one is in write(), and in that state, such as D."""
    status = proc.threads(pid, "status")
    return any(
        thread != pid and call.startswith(_WRITE) and f"State:\t{state}" in status.get(thread, "")
        for thread, call in proc.threads(pid, "syscall").items()
    )


@contextmanager
def _blocked(world: World, log: Path, *also: int) -> Iterator[int]:
    """Yield the pid of a program that unlinks a file, while a notification of the server waits for it.

    Then kill the server, and the processes `also`.
    """
    calls = "renameat,renameat2"
    inject = f"inject=write:delay_enter={_LATER}", f"inject={calls}:delay_enter={_FOREVER}"
    options = [option for each in (f"trace=write,{calls}", *inject) for option in ("-e", each)]
    with traced(world, log, "-P", "/dev/fuse", "-P", "removed", *options) as tracer:
        (world.source / "d" / "removed outside").unlink()
        until(lambda: _is_sending(world.pid), "a notification is about to be sent")
        program = os.fork()
        if program == 0:
            os._exit(outcome(os.unlink, world.path / "d" / "removed") == errno.ECONNABORTED)
        try:
            until(lambda: _is_sending(world.pid, "D"), "the notification waits for the lock")
            yield program
        finally:
            for number, pids in ((signal.SIGSTOP, also), (signal.SIGKILL, (world.pid, *also))):
                for pid in pids:
                    os.kill(pid, number)
            tracer.kill()  # it would wait for the blocked thread


def _check_end(program: int) -> None:
    """Wait until the program has ended: its call fails with ECONNABORTED."""
    until(lambda: os.waitid(os.P_PID, program, os.WEXITED | os.WNOHANG | os.WNOWAIT), "the program ended")
    assert os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]) == 1


def test_the_companion_of_a_killed_server_frees_the_program(mounted: Mounted, world: World, tmp_path: Path) -> None:
    """The server and its companion end, and a new mount serves."""
    companion = companion_of(world.pid)
    with _blocked(world, tmp_path / "strace") as program:
        pass
    _check_end(program)
    until(lambda: not world.is_alive, "the server ended")
    until(lambda: not Path(f"/proc/{companion}/cwd").exists(), "the companion ended")
    assert status(world).state is SessionState.DEAD
    again = mounted(policy=ALLOW_ALL, mountpoint=world.path)
    assert os.listdir(again.path / "d") == ["removed"]


def test_another_mount_on_the_mountpoint_serves_on(mounted: Mounted, world: World, tmp_path: Path) -> None:
    """The killed server's own mount was detached before, so that the kernel's mount table lacks it."""
    with _blocked(world, tmp_path / "strace") as program:
        mounts.detach(world.path, lazy=True)
        again = mounted(policy=ALLOW_ALL, mountpoint=world.path)
    _check_end(program)
    until(lambda: not world.is_alive, "the server ended")
    assert os.listdir(again.path / "d") == ["removed"]


def test_umount_frees_the_program_if_the_companion_is_killed_too(world: World, tmp_path: Path) -> None:
    """Until then `status` shows the mount as dead."""
    with _blocked(world, tmp_path / "strace", companion_of(world.pid)) as program:
        pass
    until(lambda: status(world).state is SessionState.DEAD, "status shows the death")
    assert world.is_alive
    ended = bonobofs("umount", str(world.path))
    assert (ended.returncode, world.is_alive) == (0, False), ended
    _check_end(program)
