"""Run bonobofs commands, as an operator does."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent.parent
"""The checkout."""
_SECONDS: Final = 60.0
_OF_TESTS: Final = ("BONOBOFS_", "PYTEST_")
"""Variables that tests change. Nothing reads them when modules are imported."""


def environment(**more: str) -> dict[str, str]:
    """The environment for a program that uses bonobofs of this checkout."""
    path = ":".join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **more}


def bonobofs(
    *arguments: str | Path, cwd: Path = Path("/"), env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one command and return what it printed. It has an interpreter of its own if its environment is changed."""
    global _server  # noqa: PLW0603 - one server for each test process
    if _server is None:
        _server = _Server()
    if env is None and _server.serves():
        return _server.run([str(argument) for argument in arguments], str(cwd))
    return subprocess.run(
        [sys.executable, "-m", "bonobofs", *arguments],
        cwd=cwd,
        env=environment(**(env or {})),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="surrogateescape",
        check=False,
        timeout=_SECONDS,
    )


def close() -> None:
    """End the process that runs the commands."""
    global _server  # noqa: PLW0603 - as above
    if _server is not None and _server.serves_this_process():
        _server.close()
    _server = None


class _Server:
    """See tests/support/command_server.py."""

    def __init__(self) -> None:
        self._pid: Final = os.getpid()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process: Final = subprocess.Popen(
                [sys.executable, "-m", "tests.support.command_server", str(theirs.fileno())],
                cwd="/",
                env={**_ENVIRONMENT, "PYTHONPATH": environment()["PYTHONPATH"]},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def serves_this_process(self) -> bool:
        """Return False in a process that a test has forked."""
        return os.getpid() == self._pid

    def serves(self) -> bool:
        """Return whether a command runs as it would in an interpreter of its own."""
        return self.serves_this_process() and _unchanged() == _ENVIRONMENT

    def run(self, arguments: list[str], cwd: str) -> subprocess.CompletedProcess[str]:
        mask = os.umask(0o077)
        os.umask(mask)
        request = {"arguments": arguments, "cwd": cwd, "umask": mask, "environment": environment()}
        null = os.open(os.devnull, os.O_RDONLY)
        pipes = [os.pipe() for _ in range(3)]
        try:
            socket.send_fds(self._channel, [json.dumps(request).encode()], [null, *(end for _, end in pipes)])
        finally:
            for descriptor in (null, *(end for _, end in pipes)):
                os.close(descriptor)
        output, errors, status = _read_all([end for end, _ in pipes])
        pid, _, code = status.partition(b"\n")
        if not code:
            os.kill(int(pid), signal.SIGKILL)
            raise subprocess.TimeoutExpired(arguments, _SECONDS, output, errors)
        text = [_decode(each) for each in (output, errors)]
        return subprocess.CompletedProcess(arguments, int(code), *text)

    def close(self) -> None:
        self._channel.close()
        self._process.wait(_SECONDS)


def _unchanged() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_TESTS)}


_ENVIRONMENT: Final = _unchanged()
"""Of the server. A command that has another one might load modules in another way."""
_server: _Server | None = None


def _read_all(descriptors: list[int]) -> list[bytes]:
    """Read all pipes to their ends, for _SECONDS at most, and close them."""
    found = dict.fromkeys(descriptors, b"")
    deadline = time.monotonic() + _SECONDS
    with selectors.DefaultSelector() as selector:
        for descriptor in descriptors:
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                data = os.read(key.fd, 1 << 16)
                found[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
    for descriptor in descriptors:
        os.close(descriptor)
    return list(found.values())


def _decode(data: bytes) -> str:
    """Decode as `subprocess` does with text=True."""
    return data.decode(errors="surrogateescape").replace("\r\n", "\n").replace("\r", "\n")
