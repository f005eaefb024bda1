"""One command in the sandbox: start it blocked, release it, signal it, wait for it."""

from __future__ import annotations

import contextlib
import errno
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
from importlib.abc import InspectLoader
from pathlib import Path
from types import CodeType
from typing import Final, NamedTuple

from bonobofs.errors import MountError
from bonobofs.sandbox import bwrap_arguments, last_step, seccomp_filter
from bonobofs.sandbox.bwrap_arguments import Descriptors, View
from bonobofs.system import syscalls
from bonobofs.system.processes import plain_environment

SEE_DOCTOR: Final = "; run bonobofs doctor"
"""The remedy at the end of a message. The probe of `doctor` removes it."""
_SECONDS_TO_START: Final = 10.0
_SECONDS_TO_END: Final = 5.0
_POLL_SECONDS: Final = 0.001
_PROCESS_GROUP: Final = 4
"""Flag of pidfd_send_signal, from Linux 6.9: signal the process group of that number."""
_LAST_STEP: Final = (
    "import ctypes, marshal, resource, sys; data = open(int(sys.argv[1]), 'rb').read() or sys.exit(125); "
    "code, config = marshal.loads(data); exec(code); sys.exit(main(int(sys.argv[2]), *config))"
)
"""Program that waits for the compiled module `last_step` and its configuration, with the modules that it imports."""
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
    """The process at which every connection of the sandbox arrives. It ends with the launcher.

    It loads its modules while the launcher mounts.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process: Final = subprocess.Popen(
                [sys.executable, "-I", "-S", "-X", "utf8", "-c", _RUN_EGRESS, _ROOT, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                cwd="/",
                env=plain_environment(),
                start_new_session=True,
            )
        self.fd: Final = self._socket.fileno()
        """Readable when the process has ended."""

    def configure(self, session_directory: Path, user: int | None) -> None:
        """Name the session. `user`: the uid of the command, if it is another user."""
        config = json.dumps({"session_dir": str(session_directory), "user": user})
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(config.encode())

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
        assert self._process.stdin is not None
        self._process.stdin.close()
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
    ) -> None:
        """Start bubblewrap. MountError: it failed, with what it printed.

        `streams` become the standard streams of the command, and `terminal` its controlling terminal unless it is -1.
        """
        self._streams: Final = streams
        self._terminal: Final = terminal
        config_read, self._config = os.pipe()
        self._status, status_write = os.pipe()
        info_read, info_write = os.pipe()
        self._errors, errors_write = os.pipe()
        contents = {path: _memory_file(text.encode()) for path, text in bwrap_arguments.etc_files(view.account).items()}
        seccomp = _memory_file(seccomp_filter.build())
        options = bwrap_arguments.build(view, Descriptors(info_write, seccomp, contents))
        options_fd = _memory_file(b"".join(os.fsencode(option) + b"\0" for option in options))
        last = [sys.executable, "-I", "-S", "-c", _LAST_STEP, str(config_read), str(status_write)]
        passed = [config_read, status_write, info_write, seccomp, options_fd, *contents.values()]
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
                preexec_fn=_preparation(terminal),  # noqa: PLW1509 - the launcher has one thread
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
        """The process of the command, by its number outside; 0: bubblewrap has not made it."""
        self._command = -1

    def _read_info(self, fd: int) -> int:
        with os.fdopen(fd, "rb") as pipe:
            if not select.select([pipe], [], [], _SECONDS_TO_START)[0]:
                self._process.kill()
            text = pipe.read()
        if not text:
            raise self._failure()
        return int(json.loads(text)["child-pid"])

    def check(self, seconds: float = 0) -> None:
        """Raise MountError with the last words of bubblewrap if the sandbox has ended, or ends within that time."""
        if select.select([self._first], [], [], seconds)[0]:
            raise self._failure()

    def _failure(self) -> MountError:
        self._process.wait()
        return MountError(f"the sandbox cannot start: {self._error_output()}{SEE_DOCTOR}")

    def _error_output(self) -> str:
        os.set_blocking(self._errors, False)
        with contextlib.suppress(BlockingIOError):
            return os.fsdecode(os.read(self._errors, 4096)).strip() or "bubblewrap ended without a message"
        return "bubblewrap ended without a message"

    def release(self, view: View, command: Sequence[str], limits: ResourceLimits) -> str:
        """Let the command run. Returns "" when it runs, else the failure: an exit status, a space and a text.

        MountError: bubblewrap ended before.
        """
        self._find_command()
        paths = {
            "read": bwrap_arguments.readable(view),
            "write": bwrap_arguments.writable(view),
            "sockets": [view.inside],
            "command": list(command),
        }
        numbers = {**limits._asdict(), "terminal": int(self._terminal >= 0)}
        with contextlib.suppress(BrokenPipeError), os.fdopen(self._config, "wb") as pipe:
            pipe.write(marshal.dumps((_compiled_last_step(), (paths, numbers, list(self._streams)))))
        with os.fdopen(self._status, "rb") as pipe:
            text = pipe.read()
        if not text:  # the last step did not begin
            raise self._failure()
        return os.fsdecode(text).strip()

    def pids(self) -> list[int]:
        """Return all processes of the sandbox before `release`, by their numbers outside."""
        self._find_command()
        return [self._process.pid, self.pid, self.command_pid]

    def _find_command(self) -> None:
        """Wait for the process that becomes the command at `release`. MountError: bubblewrap ended without it."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        while self._command < 0:
            with contextlib.suppress(OSError, IndexError):
                self.command_pid = int(children.read_text(encoding="ascii").split()[0])
                self._command = os.pidfd_open(self.command_pid)
                return
            self.check(_POLL_SECONDS)

    def send(self, number: int) -> None:
        """Signal the command and its process group. After the end of the command, its number may be that of another."""
        if self._command < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            try:
                signal.pidfd_send_signal(self._command, number, None, _PROCESS_GROUP)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                if not select.select([self._command], [], [], 0)[0]:
                    os.killpg(self.command_pid, number)

    def kill(self) -> None:
        """Kill every process of the sandbox."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._first, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the end; return the exit status, or 128 and the number of the signal."""
        status: int = self._process.wait()
        return 128 - status if status < 0 else status


def _compiled_last_step() -> CodeType:
    spec = last_step.__spec__
    assert spec is not None
    assert isinstance(spec.loader, InspectLoader)
    code = spec.loader.get_code(spec.name)
    assert code is not None
    return code


def _preparation(terminal: int) -> Callable[[], None]:
    """Return what the new process does before it becomes bubblewrap."""
    launcher = os.getpid()

    def prepare() -> None:
        os.setsid()
        if terminal >= 0:
            fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
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
