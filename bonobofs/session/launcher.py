"""Start the server process of a mount, wait until it serves, and probe the mount."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib.util
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple, NoReturn, Self

from bonobofs.errors import MountError, UsageError
from bonobofs.ipc.session_config import CompanionProgram, SessionConfig, StartConfig
from bonobofs.system.mount_probe import SECONDS_TO_ANSWER, read_mount
from bonobofs.system.paths import is_within
from bonobofs.system.processes import plain_environment, start_time

SECONDS_TO_START = 20.0
_LATE: Final = f"the server did not start in {SECONDS_TO_START:.0f} s; run bonobofs doctor"
SERVER = "bonobofs.fuse.main"
COMPANION = "bonobofs.companion.main"

ROOT = str(Path(__file__).resolve().parent.parent.parent)
"""The directory to add to sys.path."""
# Garbage collection of the loaded modules would take a third of the time of a mount, and most of an unmount.
RUN = (
    "import gc, sys; gc.set_threshold(50_000); sys.path.insert(0, sys.argv.pop(1)); "
    "from importlib import import_module; code = import_module(sys.argv.pop(1)).main(); gc.freeze(); sys.exit(code)"
)
"""Program that runs `main` of a module. Arguments: ROOT, the module, those of `main`."""


class Probe:
    """A child process that reads a mount, with a timeout. It is started before the mount, because it takes a while."""

    def __init__(self, mountpoint: str) -> None:
        self._start("bonobofs.system.mount_probe", mountpoint)

    def _start(self, module: str, *arguments: str, fds: tuple[int, ...] = ()) -> None:
        self._process = subprocess.Popen(
            _command(RUN, ROOT, module, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            pass_fds=fds,
            cwd="/",
            env=plain_environment(),
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def read(self) -> str:
        """Read the mount. Return "" if it answers, else the error."""
        try:
            _, error = self._process.communicate(timeout=SECONDS_TO_START)
        except subprocess.TimeoutExpired:
            return "no answer in time"
        return "" if self._process.returncode == 0 else os.fsdecode(error).strip() or "no answer in time"


class ServerStart(Probe):
    """A server that loads its modules and waits for its configuration.

    Its parent is the probe. When the probe exits, init adopts the server.
    """

    def __init__(self, mountpoint: str) -> None:
        self._ready, ready_end = os.pipe()
        # The server waits for its configuration until session.json has its pid.
        config, self._config = os.pipe()
        os.set_blocking(self._config, False)
        self._errors: Final = os.memfd_create("bonobofs-errors")
        self._is_configured = False
        self.ready_fd = ready_end
        """Descriptor number, in the server, of the pipe on which it reports that it is ready."""
        fds = (config, ready_end, self._errors)
        try:
            self._start(SERVER, mountpoint, *map(str, fds), fds=fds)
        finally:
            os.close(config)
            os.close(ready_end)

    def __exit__(self, *_: object) -> None:
        if not self._is_configured:
            # The server is in the process group of the probe, and a signal reaches it also before it has its pid.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        super().__exit__()
        for fd in (self._ready, self._config, self._errors):
            os.close(fd)

    @functools.cached_property
    def process(self) -> tuple[int, int]:
        """Pid and start time of the server. MountError: it has ended."""
        try:
            line = self._line()
        except TimeoutError:
            line = b""
        if not line:
            raise MountError(self._error_output() or "the server ended at once; run bonobofs doctor")
        return int(line), start_time(int(line)) or 0

    def begin(self, config: StartConfig) -> None:
        """Send what the server needs to start the companion. MountError: it does not read that in time."""
        self._send(config.to_line())

    def serve(self, config: SessionConfig) -> str:
        """Send the configuration. Return "" when the server is ready, else its error in one line. MountError."""
        self._send(config.to_json().encode())
        self._is_configured = True
        handle = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        os.dup2(handle, self._config, inheritable=False)  # closes the pipe
        os.close(handle)
        try:
            said = os.fsdecode(self._line()).strip()
        except TimeoutError:
            return _LATE
        if said == "ready":
            return ""
        return (
            said.removeprefix("error: ")
            or self._error_output(config.log)
            or "the server ended at once; run bonobofs doctor"
        )

    def _send(self, data: bytes) -> None:
        deadline = time.monotonic() + SECONDS_TO_START
        poll = select.poll()
        poll.register(self._config, select.POLLOUT)
        # A server that has ended does not read this. Its error is read later.
        with contextlib.suppress(BrokenPipeError):
            while data:
                if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    raise MountError(_LATE)
                data = data[os.write(self._config, data) :]

    def _error_output(self, log: str = "") -> str:
        """Return the last line of standard error: the probe's, the server's, and the `log` that it opens later."""
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        text = self._process.stderr.read() or b""
        text += os.pread(self._errors, os.fstat(self._errors).st_size, 0)
        with contextlib.suppress(OSError):
            text += Path(log).read_bytes()
        lines = os.fsdecode(text).strip().splitlines()
        return lines[-1] if lines else ""

    def _line(self) -> bytes:
        """Read the next line byte by byte, because the line after it may come much later. TimeoutError."""
        deadline = time.monotonic() + SECONDS_TO_START
        poll = select.poll()
        poll.register(self._ready, select.POLLIN)
        line = b""
        while not line.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            byte = os.read(self._ready, 1)
            if not byte:
                break
            line += byte
        return line


def companion_program(source: str, mountpoint: str, module: str = COMPANION) -> CompanionProgram:
    """The companion's module, and the directories of the libraries that it needs beyond the standard one."""
    directories = []
    for name in ("watchdog", "pydantic", "sqlalchemy", "psycopg", "pygit2", "cffi"):
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None:
            directories.append(Path(found.origin).resolve().parent.parent)
    # A library in the source or the mount could be changed by the agent. So no library is loaded from there.
    writable = (Path(source), Path(mountpoint))
    safe = {str(each): None for each in directories if not any(is_within(each, one) for one in writable)}
    return CompanionProgram(module, list(safe))


def is_dead(mountpoint: str) -> bool:
    """Return whether the server of a mount is gone; False if it is slow or refuses this user."""
    with Probe(mountpoint) as probe:
        return probe.read() == os.strerror(errno.ENOTCONN)


def exec_server(config: SessionConfig, earlier: list[str]) -> NoReturn:
    """Replace this process by the server. A child that was started before probes the mount."""
    mountpoint = config.mountpoint
    ready, ready_end = os.pipe()
    subprocess.run(
        _command(
            RUN,
            ROOT,
            "bonobofs.session.launcher",
            mountpoint,
            str(ready),
            config.home,
            config.session,
            *earlier,
        ),
        stdin=subprocess.DEVNULL,
        pass_fds=(ready,),
        cwd="/",
        env=plain_environment(),
        check=True,
    )
    os.close(ready)
    os.set_inheritable(ready_end, True)
    stdin = os.memfd_create("bonobofs-config")
    os.write(stdin, config.start.to_line() + config._replace(ready_fd=ready_end).to_json().encode())
    os.lseek(stdin, 0, os.SEEK_SET)
    os.dup2(stdin, 0)
    os.chdir("/")
    sys.stdout.flush()
    sys.stderr.flush()
    command = _command(RUN, ROOT, SERVER, mountpoint)
    os.execve(command[0], command, plain_environment())


def _command(program: str, *arguments: str) -> list[str]:
    """Return a command that runs a Python program without site-packages and environment: the server needs neither."""
    return [sys.executable, "-I", "-S", "-X", "utf8", "-c", program, *arguments]


def main() -> int:
    """Probe a mount in the foreground, as a program: MOUNTPOINT READY_FD HOME SESSION EARLIER...

    Wait until the server reports on READY_FD. Then record the end of the EARLIER sessions; if the server failed, remove
    the directory of SESSION, because the command itself has become the server.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    import shutil  # noqa: PLC0415

    from bonobofs.state.home import session_directory  # noqa: PLC0415
    from bonobofs.state.sessions import note_ends  # noqa: PLC0415
    from bonobofs.system import mounts  # noqa: PLC0415

    mountpoint, ready, home, session, *earlier = sys.argv[1:]
    # The command waits for this process only. Its child probes the mount, and init reaps it.
    if os.fork():
        return 0
    with os.fdopen(int(ready), "rb") as pipe:
        said = os.fsdecode(pipe.readline()).strip()
    if said != "ready":
        # The server has printed its error on the same terminal.
        shutil.rmtree(session_directory(Path(home), session), ignore_errors=True)
        return 0
    note_ends(Path(home), earlier)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    signal.alarm(SECONDS_TO_ANSWER)
    failure = read_mount(os.fsencode(mountpoint))
    if failure and mounts.at(Path(mountpoint)):
        print(f"bonobofs: the mount does not answer: {failure}; press Ctrl-C to unmount", file=sys.stderr)
    return 0


TRANSPORTS: Final = ("auto", "kernel", "portable")
OLDEST_KERNEL: Final = (5, 12)
"""The first Linux with FUSE 7.33, which the kernel transport needs."""


class TransportChoice(NamedTuple):
    """The transport for a mount. `packages`: directory of mfusepy; `notes`: sentences for the operator."""

    name: str
    packages: str | None = None
    notes: tuple[str, ...] = ()


def build() -> str:
    """Return whether the modules that each request runs were compiled by mypyc: `compiled` or `pure Python`."""
    found = importlib.util.find_spec("bonobofs.fuse.dispatch")
    is_pure = found is None or found.origin is None or found.origin.endswith(".py")
    return "pure Python" if is_pure else "compiled"


def choose_transport(name: str) -> TransportChoice:
    """Return the named transport; for `auto`, the kernel transport if available. UsageError, MountError."""
    if name not in TRANSPORTS:
        raise UsageError(f"there is no transport {name!r}; use one of {', '.join(TRANSPORTS)}")
    missing = lacks_kernel(os.uname().sysname, os.uname().release)
    if name == "kernel" or (name == "auto" and not missing):
        return TransportChoice("kernel")
    absent = lacks_portable()
    if absent:
        raise MountError(f"the portable transport {absent}")
    notes = (f"Served by the portable transport, as {missing}.",) if name == "auto" else ()
    return TransportChoice("portable", str(_packages()), notes)


def lacks_kernel(name: str, release: str) -> str:
    """Return why the kernel transport cannot run on this system; "" if it can."""
    number = re.match(r"(\d+)\.(\d+)", release)
    if name != "Linux" or number is None:
        return f"this is {name} {release} and not Linux"
    if (int(number[1]), int(number[2])) < OLDEST_KERNEL:
        return f"Linux {release} is older than {'.'.join(map(str, OLDEST_KERNEL))}"
    return ""


def lacks_portable() -> str:
    """Return what the portable transport lacks; "" if it can run."""
    if _packages() is None:
        return "needs the Python package mfusepy; install it: pip install mfusepy"
    from bonobofs.system.syscalls import libfuse  # noqa: PLC0415 - loads ctypes

    if libfuse() is None:
        return "needs libfuse 3; install the package fuse3"
    return ""


def _packages() -> Path | None:
    """Return the directory of mfusepy. The server imports it, not this process."""
    found = importlib.util.find_spec("mfusepy")
    return None if found is None or found.origin is None else Path(found.origin).resolve().parent
