"""Running the installed bd: never through a shell, with an environment made from nothing.

Its time is limited: bd itself waits without end for its lock.
"""

from __future__ import annotations

import errno
import os
import re
import select
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from bonobofs.beads.bd_binary import INSTALL
from bonobofs.beads.bd_environment import Surroundings
from bonobofs.beads.bd_lock import Lock
from bonobofs.beads.bd_output import Output, complaint, payload
from bonobofs.errors import BeadsError, UsageError
from bonobofs.policy.request import Principal

GRACE: Final = 2.0
"""Seconds between asking a bd that is out of time to end, which it does without a half-stored issue, and ending it."""
OLDEST: Final = (1, 0, 4)
"""The first version that keeps everything in its database alone; before, files beside it changed issues."""
BEFORE: Final = (2,)
_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")


class Program:
    """bd, for one `.beads` and one agent, where `around` lets it run."""

    def __init__(self, path: Path, beads: Path, around: Surroundings, agent: Principal, limit: float) -> None:
        """`limit`: seconds for one call."""
        self.path: Final = path
        self._around: Final = around
        self._limit: Final = limit
        self._bare: Final = {
            "PATH": around.path,
            "HOME": str(around.home),
            "LC_ALL": "C.UTF-8",
            "BEADS_DIR": str(beads),
            "BD_NON_INTERACTIVE": "1",
            "BD_NO_HOOKS": "1",
            "BD_NO_PAGER": "1",
            # bd takes this for the owner of what it creates.
            "GIT_AUTHOR_EMAIL": f"{agent.id}@bonobofs.invalid",
            "GIT_CEILING_DIRECTORIES": str(around.cwd.parent),
            "GIT_CONFIG_GLOBAL": str(around.configuration),
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_TERMINAL_PROMPT": "0",
        }
        self._environment: Final = {**self._bare, "BD_JSON_ENVELOPE": "1"}

    def run(self, arguments: Sequence[str], lock: Lock, *, bare: bool = False) -> Output:
        """One call; `bare`: its JSON is as people's tools read it. When this returns no process of it is left.

        bd holds the lock too. UsageError: the arguments are too long, or hold NUL; BeadsError: it cannot be started.
        """
        with _Stream() as stdout, _Stream() as stderr:
            try:
                started = subprocess.Popen(
                    [self.path, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=stdout.descriptor,
                    stderr=stderr.descriptor,
                    cwd=self._around.cwd,
                    env=self._bare if bare else self._environment,
                    pass_fds=(lock.descriptor,),
                    start_new_session=True,
                    **self._around.ids,
                )
            except ValueError as error:
                raise UsageError(f"bd cannot be told that: {error}") from error
            except OSError as error:
                if error.errno == errno.E2BIG:
                    raise UsageError("bd cannot be told so long a text; shorten it to 100 KB") from error
                raise BeadsError(f"{self.path} cannot be started: {error.strerror}; {INSTALL}") from error
            in_time = _await_end(started, self._limit, lock)
            return Output(started.returncode if in_time else None, stdout.text(), stderr.text())

    def check_version(self, lock: Lock) -> str:
        """The version, once it is known to be one that keeps what we rely on; else BeadsError."""
        output = self.run(["version", "--json"], lock)
        told = payload(output)
        word = told.get("version") if isinstance(told, dict) else output.stdout
        numbers = _VERSION.search(word) if isinstance(word, str) and output.status == 0 else None
        if numbers is None:
            why = complaint(output) or "it does not say"
            raise BeadsError(f"{self.path} does not tell its version ({why}); {INSTALL}")
        version = tuple(map(int, numbers.groups()))
        if not OLDEST <= version < BEFORE:
            raise BeadsError(f"{self.path} is bd {numbers.group()}, which is not supported; {INSTALL}")
        return numbers.group()


class _Stream:
    """Where bd writes. Not a pipe: a program that outlived bd would keep that open, and we would wait for it."""

    def __init__(self) -> None:
        self.descriptor: Final = os.memfd_create("bd")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def text(self) -> str:
        return os.pread(self.descriptor, os.fstat(self.descriptor).st_size, 0).decode("utf-8", "replace")


def _await_end(started: subprocess.Popen[bytes], limit: float, lock: Lock) -> bool:
    """Wait for it and end its process group, in any case; false when it took too long."""
    try:
        lock.note(started.pid, limit + GRACE)
        in_time = _has_ended(started.pid, limit)
        if not in_time:
            _signal_group(started.pid, signal.SIGTERM)
            _has_ended(started.pid, GRACE)
    finally:
        # Its number is not free for others before it is waited for, so no other group can be meant.
        _signal_group(started.pid, signal.SIGKILL)
        started.wait()
    return in_time


def _has_ended(pid: int, seconds: float) -> bool:
    handle = os.pidfd_open(pid)
    try:
        poll = select.poll()
        poll.register(handle, select.POLLIN)
        return bool(poll.poll(seconds * 1000))
    finally:
        os.close(handle)


def _signal_group(group: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
