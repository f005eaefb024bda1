"""The companion of the serving process, as this sees it: started before the mount, and not waited for while serving."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

from bonobofs.errors import ProtocolError
from bonobofs.ipc.channel import Kind, Line
from bonobofs.system import mounts, syscalls
from bonobofs.system.processes import start_time, wait_for_end

SECONDS_TO_STAND: Final = 12.0
"""Seconds that a mount waits until its source is watched."""
_SECONDS_TO_SETTLE: Final = 1.0
_TOLD: Final = (
    "source",
    "mountpoint",
    "home",
    "session",
    "session_dir",
    "policy_file",
    "database",
    "holder",
    "agent",
    "role",
    "team",
    "chain",
    "issue",
    "trail",
    "umask",
    "user",
)
_ENDED: Final = "the process that watches has ended; another is being started"


class Standing(NamedTuple):
    """How the companion stands before the mount is made."""

    watch: str
    """Why the source is not watched; "" where it is."""
    refused: str = ""
    """Why nothing may be mounted; "" where it may."""
    layer: bool = False
    """It stands where a mount over the source does not cover the source."""
    part: bool = False
    """`watch` concerns a part of the source; the rest is watched."""


class Companion:
    """The process, and the line to it."""

    def __init__(self, program: dict[str, Any], config: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        """Fork the companion. `program`: {"module", "packages"}, as `session.launch.beside` gives it. OSError.

        The companion is forked and does not call exec. The kernel makes each process that calls exec traceable again:
        until such a process forbids tracing, another process of its user can take the line from it (pidfd_getfd).
        The descriptors have the same numbers in the companion.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._pid: Final = _fork(program, theirs.fileno(), descriptors)
        self._line: Final = Line(ours, waits=False, peer=self._pid)
        self._early: list[tuple[Kind, bytes]] = []
        """What it said before it was asked how it stands."""
        self._line.tell(Kind.BEGIN, config)

    def fileno(self) -> int:
        """What can be read when it has said something, or has ended."""
        return self._line.fileno()

    def wait(self) -> Standing:
        """How it stands. One that ends, or takes too long, watches nothing."""
        try:
            deadline = time.monotonic() + SECONDS_TO_STAND
            while said := self._next(deadline):
                self._early += [one for one in said if one[0] is not Kind.STANDING]
                for kind, body in said:
                    if kind is Kind.STANDING:
                        return Standing(**json.loads(body))
        except (EOFError, ProtocolError, ValueError, TypeError):
            return Standing(_ENDED)
        return Standing(f"the source is too large to be watched within {SECONDS_TO_STAND:.0f} s")

    def heard(self) -> list[tuple[Kind, bytes]]:
        """What it has said. EOFError: it has ended, for the reason that is given."""
        if self._early:
            early, self._early = self._early, []
            return early
        try:
            return self._line.receive()
        except (EOFError, ProtocolError, ValueError) as error:
            raise EOFError(_ENDED) from error

    @property
    def namespaces(self) -> tuple[int, ...]:
        """The namespaces in which it stands apart, by descriptors; one that comes after it can stand there too."""
        return tuple(self._line.descriptors)

    def take_descriptor(self) -> int:
        """What it has handed over last."""
        return self._line.descriptors.pop()

    def next_heard(self, seconds: float) -> list[tuple[Kind, bytes]]:
        """What it says next; [] when it says nothing for so long. EOFError."""
        try:
            return self._next(time.monotonic() + seconds)
        except (ProtocolError, ValueError) as error:
            raise EOFError from error

    def flush(self) -> None:
        """Say what could not be said at once."""
        self._line.flush()

    def kill(self) -> int:
        """Have it end, and give a descriptor that can be read when it has; `bury` comes then."""
        self._line.socket.close()
        handle = os.pidfd_open(self._pid)
        os.kill(self._pid, signal.SIGKILL)
        return handle

    def bury(self) -> None:
        """It has ended: take its process off the system's table."""
        os.waitpid(self._pid, 0)

    def tell(self, kind: Kind, document: Any = None) -> None:
        """Say something to it; it may be deaf by now."""
        self._line.tell(kind, document)

    def tell_list(self, kind: Kind, items: Iterable[Any]) -> int:
        """Send it a list in pieces, and return how many items it did not take."""
        return self._line.tell_list(kind, items)

    def settle(self) -> list[tuple[Kind, bytes]]:
        """Have it say what it has still to say, within a second."""
        said: list[tuple[Kind, bytes]] = []
        deadline = time.monotonic() + _SECONDS_TO_SETTLE
        self._line.tell(Kind.SETTLE)
        with contextlib.suppress(EOFError, ProtocolError, ValueError):
            while found := self._next(deadline):
                said += found
                if found[-1][0] is Kind.SETTLE:
                    break
        return said

    def end(self) -> None:
        """Let it go, by force if it does not go by itself."""
        self._line.socket.close()
        if not wait_for_end(self._pid, start_time(self._pid) or 0, _SECONDS_TO_SETTLE):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _next(self, deadline: float) -> list[tuple[Kind, bytes]]:
        """What it says next; [] when it says nothing until then. EOFError."""
        poll = select.poll()
        poll.register(self._line.fileno(), select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            self._line.flush()
            if poll.poll(left * 1000):
                found = self._line.receive()
                if found:
                    return found
        return []


_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE)


def _fork(program: dict[str, Any], line: int, descriptors: tuple[int, ...]) -> int:
    """Fork a process that becomes the companion, and return its pid. OSError."""
    # A signal between fork and the reset of the handlers would run a handler of the server in the companion.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    try:
        pid = os.fork()
        if pid == 0:
            _become(program, line, descriptors, blocked)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return pid


def _become(
    program: dict[str, Any], line: int, descriptors: tuple[int, ...], mask: set[signal.Signals | int]
) -> NoReturn:
    """Run the companion in this forked process, without anything of the server but standard error."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        for number in _HANDLED:
            signal.signal(number, signal.SIG_IGN if number == signal.SIGPIPE else signal.SIG_DFL)
        # The terminal sends Ctrl-C to server and companion, and the companion ends with the server. A handler, because
        # the programs that the companion runs would inherit an ignored signal.
        signal.signal(signal.SIGINT, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        null = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1):
            os.dup2(null, standard)
        syscalls.close_all_but({0, 1, 2, line, *descriptors})
        syscalls.set_process_name(b"bonobofs-beside")
        gc.enable()  # the server switches collection off
        sys.path += program["packages"]
        status = import_module(program["module"]).main(line)
    except BaseException:  # noqa: BLE001 - nothing may reach the frames of the server, which lie above this one
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


class Beginning(NamedTuple):
    """What a server begins with."""

    root: int
    """The source, open; -1: it cannot be opened."""
    companion: Companion | None
    """The first; it may not stand yet."""
    failure: OSError | None
    """Why there is none, or no source."""


def begin(config: dict[str, Any]) -> Beginning:
    """Open the source and start the first companion, where there is to be one."""
    root = -1
    try:
        root = _open_source(config["source"], config.get("source_identity"))
        if config.get("companion") is None:
            return Beginning(root, None, None)
        return Beginning(root, start(config, config["policy"], root, (), first=True), None)
    except OSError as error:
        return Beginning(root, None, error)


def _open_source(source: str, expected: Sequence[int] | None) -> int:
    """Open the source without following a symlink. OSError (ESTALE: it is not the directory that was checked)."""
    place = mounts.open_directory(Path(source))
    try:
        if expected is not None and mounts.identity(place) != tuple(expected):
            raise OSError(errno.ESTALE, f"the source {source} was replaced while it was checked; mount again")
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)
    finally:
        os.close(place)


def start(
    config: dict[str, Any], policy: dict[str, Any], root: int, namespaces: tuple[int, ...], *, first: bool
) -> Companion:
    """Start one. `root` is the source, open; `namespaces` are those of one before it. OSError."""
    told = {name: config[name] for name in _TOLD}
    told |= {"policy": policy, "root": root, "namespaces": namespaces, "first": first}
    return Companion(config["companion"], told, (root, *namespaces))
