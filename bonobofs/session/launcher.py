"""The process that serves a mount: started with nothing of ours around it, and waited for until it serves."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn, Self

from bonobofs.ipc.session_config import CompanionProgram, SessionConfig
from bonobofs.system.paths import is_within
from bonobofs.system.processes import plain_environment, start_time

SECONDS_TO_START = 20.0
SERVER = "bonobofs.fuse.main"
COMPANION = "bonobofs.companion.main"

_ROOT = str(Path(__file__).resolve().parent.parent.parent)
# What is loaded stays: looking through it for garbage, again and again and once more at the end, would take a third of
# the time until a mount is there, and most of that until it is gone.
_RUN = (
    "import gc, sys; gc.set_threshold(50_000); sys.path.insert(0, sys.argv.pop(1)); "
    "from importlib import import_module; code = import_module(sys.argv.pop(1)).main(); gc.freeze(); sys.exit(code)"
)
# The parent ends at once, so that the server is nobody's child: whoever starts a mount need not stay to bury it.
_RUN_DETACHED = (
    "import os, sys; os.fork() and os._exit(0); os.write(int(sys.argv.pop(1)), b'%d\\n' % os.getpid()); " + _RUN
)


class Starting:
    """A server that has been started and waits for its configuration."""

    def __init__(self, log: Path, mountpoint: str) -> None:
        self._log = log
        self._ready, ready_end = os.pipe()
        # The server waits for its configuration until its process is on record.
        config, self._config = os.pipe()
        self.ready_fd = ready_end
        """The number that the descriptor for its word has in the server."""
        try:
            with open(log, "ab", opener=_private) as errors:
                subprocess.run(
                    _command(_RUN_DETACHED, str(ready_end), _ROOT, SERVER, mountpoint),
                    stdin=config,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    pass_fds=(ready_end,),
                    cwd="/",
                    env=plain_environment(),
                    start_new_session=True,
                    check=True,
                )
        finally:
            os.close(config)
            os.close(ready_end)
        self.pid = int(self._line())
        self.starttime = start_time(self.pid) or 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._ready)
        if self._config >= 0:
            os.close(self._config)

    def serve(self, config: SessionConfig) -> str:
        """Hand over the configuration; "" when the mount is served, else what the server said, in one line."""
        handle, self._config = self._config, -1
        # A server that has ended reads nothing; what it said last is read below.
        with contextlib.suppress(BrokenPipeError), os.fdopen(handle, "wb") as pipe:
            pipe.write(config.to_json().encode())
        try:
            said = os.fsdecode(self._line()).strip()
        except TimeoutError:
            return f"the server did not start in {SECONDS_TO_START:.0f} s; run bonobofs doctor"
        if said == "ready":
            return ""
        return said.removeprefix("error: ") or self._last_words() or "the server ended at once; run bonobofs doctor"

    def _last_words(self) -> str:
        lines = os.fsdecode(self._log.read_bytes()).strip().splitlines()
        return lines[-1] if lines else ""

    def _line(self) -> bytes:
        """The next line, read byte by byte as what follows it may be long in coming; TimeoutError."""
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


def companion_program(source: str, mountpoint: str) -> CompanionProgram:
    """The companion's module, and the directories of the libraries that it needs beyond the standard one."""
    places = []
    for name in ("watchdog", "pydantic", "sqlalchemy", "psycopg", "pygit2", "cffi"):
        found = importlib.util.find_spec(name)
        if found is not None and found.origin is not None:
            places.append(Path(found.origin).resolve().parent.parent)
    # The agent must not be able to change a library, so none is loaded from the source or the mount.
    writable = (Path(source), Path(mountpoint))
    safe = {str(place): None for place in places if not any(is_within(place, one) for one in writable)}
    return CompanionProgram(COMPANION, list(safe))


def look(mountpoint: str) -> str:
    """Look into the mount from a process that can be given up; "" when it answers, else what went wrong."""
    try:
        ran = subprocess.run(
            _command(_RUN, _ROOT, "bonobofs.session.mount_probe", mountpoint),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd="/",
            env=plain_environment(),
            check=False,
            timeout=SECONDS_TO_START,
        )
    except subprocess.TimeoutExpired:
        return "no answer in time"
    if ran.returncode == 0:
        return ""
    return os.fsdecode(ran.stderr).strip() or "no answer in time"


def is_dead(mountpoint: str) -> bool:
    """Whether the server of a mount is gone; not so where it is slow, or does not let this user in."""
    return look(mountpoint) == os.strerror(errno.ENOTCONN)


def become(config: SessionConfig, earlier: list[str]) -> NoReturn:
    """Turn this process into the server. A small process, started before, looks into the mount once it is there."""
    mountpoint = config.mountpoint
    ready, ready_end = os.pipe()
    subprocess.run(
        _command(
            _RUN,
            _ROOT,
            "bonobofs.session.mount_probe",
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
    os.write(stdin, config._replace(ready_fd=ready_end).to_json().encode())
    os.lseek(stdin, 0, os.SEEK_SET)
    os.dup2(stdin, 0)
    os.chdir("/")
    sys.stdout.flush()
    sys.stderr.flush()
    command = _command(_RUN, _ROOT, SERVER, mountpoint)
    os.execve(command[0], command, plain_environment())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _command(program: str, *arguments: str) -> list[str]:
    """Python without site, user and environment: what serves a mount depends on nothing but the package itself."""
    return [sys.executable, "-I", "-S", "-X", "utf8", "-c", program, *arguments]
