"""Start the companion of the server, talk to it, and restart it when it dies.

The server waits for the first companion before the mount is made, and never while it serves. If the mount covers the
source, a new companion enters the mount namespace of the first, in which the source is visible.
"""

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
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from bonobofs.errors import MountError, ProtocolError, TrailError
from bonobofs.ipc.channel import Channel, CompanionStatus, Message, MessageKind
from bonobofs.ipc.session_config import CompanionConfig, CompanionProgram, SessionConfig, StartConfig
from bonobofs.system import mounts, syscalls
from bonobofs.system.processes import start_time, wait_for_end

if TYPE_CHECKING:
    from bonobofs.fuse.companion_requests import CompanionRequests
    from bonobofs.fuse.diagnostics import Diagnostics
    from bonobofs.fuse.transport import Transport

START_SECONDS: Final = 12.0
"""Seconds that a mount waits until its source is watched."""
_END_SECONDS: Final = 1.0
_ENDED: Final = "the companion has ended; another is being started"
_NO_COMPANION: Final = "it was mounted without the companion"
_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE)
_DELAYS: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds until a restart, by the number of deaths in a row; the last holds for all further deaths."""
_ALERT_DEATHS: Final = 6
"""Deaths in a row after which `status` and an alert report them."""
_STABLE_SECONDS: Final = 60.0
"""After a companion has run for this long, the count of deaths starts again at zero."""


class CompanionProcess:
    """The companion process, and the channel to it."""

    def __init__(self, program: CompanionProgram, fds: tuple[int, ...] = ()) -> None:
        """Fork the companion, which inherits `fds` under the same numbers, and waits for `configure`. OSError.

        The companion does not call exec: the kernel makes a process that calls exec traceable. Until such a process
        forbids tracing, another process of its user can take the channel from it (pidfd_getfd).
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            self._pid: Final = _fork(program, theirs.fileno(), fds)
        self._channel: Final = Channel(ours, blocking=False, peer=self._pid)
        self._early: list[Message] = []
        """Messages that came before its status."""

    def configure(self, config: CompanionConfig) -> None:
        """Send the configuration, as the first message."""
        self._channel.send(MessageKind.CONFIG, config.to_document())

    def fileno(self) -> int:
        """A descriptor that is readable when a message has come or the companion has ended."""
        return self._channel.fileno()

    def await_status(self) -> CompanionStatus:
        """Its status. If it ends or takes too long, return a status that says why the source is not watched."""
        try:
            deadline = time.monotonic() + START_SECONDS
            while messages := self._receive_until(deadline):
                self._early += [message for message in messages if message[0] is not MessageKind.STATUS]
                for kind, body in messages:
                    if kind is MessageKind.STATUS:
                        return CompanionStatus(**json.loads(body))
        except (EOFError, ProtocolError, ValueError, TypeError):
            return CompanionStatus(_ENDED)
        return CompanionStatus(f"the source is too large to be watched within {START_SECONDS:.0f} s")

    def receive(self) -> list[Message]:
        """The messages that have come. EOFError: it has ended; the error says why."""
        if self._early:
            early, self._early = self._early, []
            return early
        try:
            return self._channel.receive()
        except (EOFError, ProtocolError, ValueError) as error:
            raise EOFError(_ENDED) from error

    @property
    def namespaces(self) -> tuple[int, ...]:
        """Descriptors of its own namespaces, for the next companion; empty: it made none."""
        return tuple(self._channel.fds)

    def take_fd(self) -> int:
        """The descriptor that it has sent last."""
        return self._channel.fds.pop()

    def receive_within(self, seconds: float) -> list[Message]:
        """The next messages; [] after a timeout. EOFError."""
        try:
            return self._receive_until(time.monotonic() + seconds)
        except (ProtocolError, ValueError) as error:
            raise EOFError from error

    def flush(self) -> None:
        """Send pending messages."""
        self._channel.flush()

    def kill(self) -> int:
        """Kill it, and return a descriptor that is readable once it has ended; call `reap` then."""
        self._channel.socket.close()
        handle = os.pidfd_open(self._pid)
        os.kill(self._pid, signal.SIGKILL)
        return handle

    def reap(self) -> None:
        """Wait for the ended process."""
        os.waitpid(self._pid, 0)

    def send(self, kind: MessageKind, document: Any = None) -> None:
        """Send a message. A companion that has ended does not get it."""
        self._channel.send(kind, document)

    def send_list(self, kind: MessageKind, items: Iterable[Any]) -> int:
        """Send a list in several messages, and return how many items were not sent."""
        return self._channel.send_list(kind, items)

    def flush_messages(self) -> list[Message]:
        """Its pending messages, as far as they come within a second."""
        pending: list[Message] = []
        deadline = time.monotonic() + _END_SECONDS
        self._channel.send(MessageKind.FLUSH)
        with contextlib.suppress(EOFError, ProtocolError, ValueError):
            while messages := self._receive_until(deadline):
                pending += messages
                if messages[-1][0] is MessageKind.FLUSH:
                    break
        return pending

    def end(self) -> None:
        """Close the channel, so that it ends; kill it after a second."""
        self._channel.socket.close()
        if not wait_for_end(self._pid, start_time(self._pid) or 0, _END_SECONDS):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)

    def _receive_until(self, deadline: float) -> list[Message]:
        """The next messages; [] after the deadline. EOFError."""
        poll = select.poll()
        poll.register(self._channel.fileno(), select.POLLIN)
        while (left := deadline - time.monotonic()) > 0:
            self._channel.flush()
            if poll.poll(left * 1000):
                messages = self._channel.receive()
                if messages:
                    return messages
        return []


def _fork(program: CompanionProgram, channel: int, fds: tuple[int, ...]) -> int:
    """Fork a process that becomes the companion, and return its pid. OSError."""
    # A signal between fork and the reset of the handlers would run a handler of the server in the companion.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
    try:
        pid = os.fork()
        if pid == 0:
            _run_program(program, channel, fds, blocked)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return pid


def _run_program(
    program: CompanionProgram, channel: int, fds: tuple[int, ...], mask: set[signal.Signals | int]
) -> NoReturn:
    """Run the companion in this forked process, without the server's descriptors except standard error."""
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
        syscalls.close_all_but({0, 1, 2, channel, *fds})
        syscalls.set_process_name(b"bfs-companion")
        gc.enable()  # the server switches collection off
        sys.path += program.packages
        status = import_module(program.module).main(channel)
    except BaseException:  # noqa: BLE001 - an exception must not reach the server's frames, which lie above this one
        from traceback import print_exc  # noqa: PLC0415 - the server waits while it loads

        print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


class EarlyStart(NamedTuple):
    """The source and the first companion of a server, before the rest of it is loaded."""

    root: int
    """Descriptor of the source; -1: it cannot be opened."""
    companion: CompanionProcess | None
    """It may not have sent its status yet."""
    failure: OSError | None
    """Why the source cannot be opened or the companion cannot be started."""

    def configure(self, config: SessionConfig) -> None:
        """Send the companion its configuration."""
        if self.companion is not None:
            self.companion.configure(CompanionConfig(config, self.root, (), is_first=True))


def start_server(config: StartConfig) -> EarlyStart:
    """Open the source, and start the first companion if the configuration has one."""
    root = -1
    try:
        root = _open_source(config.source, config.source_identity)
        if config.companion is None:
            return EarlyStart(root, None, None)
        return EarlyStart(root, CompanionProcess(config.companion, (root,)), None)
    except OSError as error:
        return EarlyStart(root, None, error)


def _open_source(source: str, expected: Sequence[int] | None) -> int:
    """Open the source without following a symlink. OSError (ESTALE: it is not the directory that was checked)."""
    directory = mounts.open_directory(Path(source))
    try:
        if expected is not None and mounts.identity(directory) != tuple(expected):
            raise OSError(errno.ESTALE, f"the source {source} was replaced while it was checked; mount again")
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    finally:
        os.close(directory)


def await_ready(config: SessionConfig, start: EarlyStart) -> tuple[CompanionProcess | None, CompanionStatus]:
    """The first companion with its status. MountError if this mount must not be made without it."""
    if config.companion is None:
        return None, CompanionStatus(_NO_COMPANION)
    companion = start.companion
    if companion is None:
        reason = start.failure.strerror if start.failure is not None else ""
        status = CompanionStatus(f"the companion cannot be started: {reason}")
    else:
        status = companion.await_status()
    if status.refused:
        raise MountError(status.refused)
    if config.source == config.mountpoint and not status.has_namespace:
        raise MountError(f"mounting over the source itself needs the companion, but {status.watch}")
    return companion, status


class CompanionSupervisor:
    """Restarts the companion after each death, with a growing delay. Used by the serving thread."""

    def __init__(
        self,
        config: SessionConfig,
        companion: CompanionProcess | None,
        root: int,
        transport: Transport,
        requests: CompanionRequests,
        diagnostics: Diagnostics,
    ) -> None:
        self._config: Final = config
        self._companion = companion
        self._root: Final = root
        self._transport: Final = transport
        self._requests: Final = requests
        self._diagnostics: Final = diagnostics
        self._namespaces: Final = () if companion is None else companion.namespaces
        self._fd = -1
        self._deaths = 0
        self._started_at = 0.0
        self._restart_at = 0.0 if companion is None and config.companion is not None else float("inf")

    def fileno(self) -> int:
        """A descriptor that is readable when a message has come or the companion has ended; -1: there is none."""
        return self._fd

    def listen(self) -> None:
        """Have the transport call `on_readable` for the present companion."""
        if self._companion is not None:
            self._fd = self._companion.fileno()
            self._transport.add_reader(self._fd, self.on_readable)

    def on_readable(self) -> None:
        """Handle the messages that have come. Never raises."""
        try:
            if not self._requests.on_readable() and self._fd >= 0:
                self._transport.remove_reader(self._fd)
                self._fd = -1
                self._end_companion()
        except Exception as error:  # noqa: BLE001 - as for a handler: the mount serves on
            self._diagnostics.failed("a message of the companion", error)

    def tidy(self, now: float) -> None:
        """Start another companion if the delay before it has passed."""
        program = self._config.companion
        if now >= self._restart_at and program is not None:
            self._restart_at = float("inf")
            self._started_at = now
            session = self._config._replace(policy=self._requests.policy)
            try:
                self._companion = CompanionProcess(program, (self._root, *self._namespaces))
                self._companion.configure(CompanionConfig(session, self._root, self._namespaces, is_first=False))
            except OSError as error:
                self._diagnostics.log(f"the companion cannot be started: {error.strerror}")
                self._schedule(now)
            else:
                self._requests.attach(self._companion)
                self.listen()

    def _end_companion(self) -> None:
        companion, self._companion = self._companion, None
        if companion is None:
            return
        handle = companion.kill()

        def on_death() -> None:
            self._transport.remove_reader(handle)
            os.close(handle)
            companion.reap()
            self._requests.on_death()
            self._schedule(time.monotonic())
            self.tidy(time.monotonic())

        # Until its death, the companion may still change files.
        self._transport.add_reader(handle, self._guarded(on_death))

    def _guarded(self, callback: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                callback()
            except Exception as error:  # noqa: BLE001 - as for a handler: the mount serves on
                self._diagnostics.failed("the end of the companion", error)

        return run

    def _schedule(self, now: float) -> None:
        self._deaths = 1 if now - self._started_at >= _STABLE_SECONDS else self._deaths + 1
        delay = _DELAYS[min(self._deaths, len(_DELAYS)) - 1]
        self._restart_at = now + delay
        if self._deaths >= _ALERT_DEATHS:
            try:
                self._requests.report_deaths(self._deaths, delay, alert=self._deaths == _ALERT_DEATHS)
            except TrailError as error:
                self._diagnostics.log(str(error))
