"""One command in the sandbox: start it blocked, release it, signal it, wait for it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import marshal
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.errors import MountError
from bonobofs.sandbox import bwrap_arguments, last_step, seccomp_filter
from bonobofs.sandbox.bwrap_arguments import Descriptors, View
from bonobofs.system import syscalls
from bonobofs.system.processes import plain_environment

_SECONDS_TO_START: Final = 10.0
_SECONDS_TO_END: Final = 5.0
_LAST_STEP: Final = last_step.__file__
_ROOT: Final = str(Path(__file__).resolve().parent.parent.parent)
_RUN_EGRESS: Final = "import sys; sys.path.insert(0, sys.argv.pop(1)); from bonobofs.sandbox.egress import main; main()"


class ResourceLimits(NamedTuple):
    """Limits of the command; 0: none."""

    processes: int = 0
    memory: int = 0
    """Bytes of writable private memory of each process."""


class CommandUser(NamedTuple):
    """The user as whom root starts the command."""

    uid: int
    gid: int
    groups: Sequence[int]


def find_bwrap() -> str:
    """Return the path of bubblewrap. MountError: it is not installed."""
    program = shutil.which("bwrap")
    if program is None:
        raise MountError("bubblewrap is missing; install the package bubblewrap (0.8 or later)")
    return program


class EgressProcess:
    """The process at which every connection of the sandbox arrives. It ends with the launcher."""

    def __init__(self, session_directory: Path, user: int | None) -> None:
        """`user`: the uid of the command, if it is another user."""
        self._socket, theirs = socket.socketpair()
        with theirs, open(session_directory / "egress.log", "ab", opener=_private) as errors:
            self._process: Final = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", "-c", _RUN_EGRESS, _ROOT, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(theirs.fileno(),),
                cwd="/",
                env=plain_environment(),
                start_new_session=True,
            )
        config = json.dumps({"session_dir": str(session_directory), "user": user})
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(config.encode())
        self.fd: Final = self._socket.fileno()
        """Readable when the process has ended."""

    def attach(self, pid: int) -> None:
        """Serve the network namespace of a process. MountError: it failed."""
        self._socket.sendall(json.dumps({"pid": pid}).encode() + b"\n")
        self._socket.settimeout(_SECONDS_TO_START)
        try:
            line = self._socket.makefile("rb").readline()
        except TimeoutError:
            line = b""
        answer = json.loads(line or "{}")
        if "ready" not in answer:
            raise MountError(f"the network of the sandbox cannot start: {answer.get('error', 'egress ended')}")

    def close(self) -> None:
        """End the process. Every connection of the sandbox ends."""
        self._socket.close()
        try:
            self._process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class SandboxProcess:
    """A command in its namespaces. It waits until `release`."""

    def __init__(
        self,
        view: View,
        environment: Mapping[str, str],
        *,
        streams: Sequence[int],
        terminal: int,
        identity: CommandUser | None = None,
        group: int = -1,
    ) -> None:
        """Start bubblewrap. MountError: it failed, with what it printed.

        `streams` become the standard streams of the command, and `terminal` its controlling terminal unless it is -1.
        `group` is the open `cgroup.procs` of a control group, or -1.
        """
        self._streams: Final = streams
        self._terminal: Final = terminal
        config_read, self._config = os.pipe()
        self._status, status_write = os.pipe()
        info_read, info_write = os.pipe()
        block_read, self._block = os.pipe()
        self._errors, errors_write = os.pipe()
        contents = {path: _memory_file(text.encode()) for path, text in bwrap_arguments.etc_files(view.account).items()}
        seccomp = _memory_file(seccomp_filter.build())
        options = bwrap_arguments.build(view, Descriptors(info_write, block_read, seccomp, contents))
        options_fd = _memory_file(b"".join(os.fsencode(option) + b"\0" for option in options))
        last = [sys.executable, "-I", "-S", _LAST_STEP, str(config_read), str(status_write)]
        passed = [config_read, status_write, info_write, block_read, seccomp, options_fd, *contents.values()]
        ids = {} if identity is None else {"user": identity.uid, "group": identity.gid, "extra_groups": identity.groups}
        try:
            self._process: Final = subprocess.Popen(  # type: ignore[call-overload]
                [find_bwrap(), "--args", str(options_fd), "--", *last],
                stdin=subprocess.DEVNULL,
                stdout=terminal if terminal >= 0 else subprocess.DEVNULL,
                stderr=errors_write,
                pass_fds=tuple({*passed, *streams}),
                cwd="/",
                env=dict(environment),
                preexec_fn=_preparation(terminal, group),  # noqa: PLW1509 - the launcher has one thread
                **ids,
            )
        finally:
            for fd in (*passed, errors_write):
                os.close(fd)
        self.exit_fd: Final = os.pidfd_open(self._process.pid)
        """Readable when the sandbox has ended."""
        self.pid: Final = self._read_info(info_read)
        """Process 1 of the sandbox, by its number outside."""
        try:
            self._first: Final = os.pidfd_open(self.pid)
        except ProcessLookupError:
            raise self._failure() from None
        self.command_pid = 0

    def _read_info(self, fd: int) -> int:
        with os.fdopen(fd, "rb") as pipe:
            if not select.select([pipe], [], [], _SECONDS_TO_START)[0]:
                self._process.kill()
            text = pipe.read()
        if not text:
            raise self._failure()
        return int(json.loads(text)["child-pid"])

    def check(self) -> None:
        """Raise MountError with the last words of bubblewrap if the sandbox has ended."""
        if select.select([self._first], [], [], 0)[0]:
            raise self._failure()

    def _failure(self) -> MountError:
        self._process.wait()
        return MountError(f"the sandbox cannot start: {self._error_output()}; run bonobofs doctor")

    def _error_output(self) -> str:
        os.set_blocking(self._errors, False)
        with contextlib.suppress(BlockingIOError):
            return os.fsdecode(os.read(self._errors, 4096)).strip() or "bubblewrap ended without a message"
        return "bubblewrap ended without a message"

    def release(self, view: View, command: Sequence[str], limits: ResourceLimits) -> str:
        """Let the command run. Returns "" when it runs, else the failure: an exit status, a space and a text."""
        paths = {
            "read": bwrap_arguments.readable(view),
            "write": bwrap_arguments.writable(view),
            "sockets": [view.inside],
            "command": list(command),
        }
        numbers = {**limits._asdict(), "terminal": int(self._terminal >= 0)}
        with contextlib.suppress(BrokenPipeError):
            os.write(self._block, b"1")
        os.close(self._block)
        with contextlib.suppress(BrokenPipeError), os.fdopen(self._config, "wb") as pipe:
            pipe.write(marshal.dumps((paths, numbers, list(self._streams))))
        with os.fdopen(self._status, "rb") as pipe:
            said = os.fsdecode(pipe.read()).strip()
        if not said:
            with contextlib.suppress(OSError, IndexError):  # the command may have ended
                text = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text(encoding="ascii")
                self.command_pid = int(text.split()[0])
            # Without a child the first process ends: the command has ended, or bubblewrap failed before it.
            ended = not self.command_pid and select.select([self.exit_fd], [], [], _SECONDS_TO_START)[0]
            if ended and (words := self._error_output()).startswith("bwrap:"):
                said = f"125 {words}"
        return said

    def send(self, number: int) -> None:
        """Signal the command and its process group."""
        if self.command_pid:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.command_pid, number)

    def kill(self) -> None:
        """Kill every process of the sandbox."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._first, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the end; return the exit status, or 128 and the number of the signal."""
        status: int = self._process.wait()
        return 128 - status if status < 0 else status


def _preparation(terminal: int, group: int) -> Callable[[], None]:
    """Return what the new process does before it becomes bubblewrap."""
    launcher = os.getpid()

    def prepare() -> None:
        os.setsid()
        if terminal >= 0:
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        if group >= 0:
            os.write(group, b"0")
        # The kernel kills this process with the launcher, also before bubblewrap asks for that.
        syscalls.die_with_parent()
        if os.getppid() != launcher:
            os._exit(1)

    return prepare


def _memory_file(content: bytes) -> int:
    fd = os.memfd_create("bonobofs", os.MFD_CLOEXEC)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
