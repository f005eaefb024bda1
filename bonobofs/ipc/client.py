"""Client of a session's guard socket; loads the standard library alone.

    call(directory, "lease.acquire", patterns=["docs/**"])
    call(None, "whoami")    # the session of the shell that runs this program

Each call opens its own connection. It retries for 3 s while the companion restarts.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bonobofs.errors import StateError
from bonobofs.ipc.codec import decode_denied, decode_failure
from bonobofs.policy.decision import Refused
from bonobofs.state.home import GUARD_SOCKET

SOCKET_VARIABLE: Final = "BONOBOFS_SOCKET"
"""Set in `bonobofs shell`: the path of the session's guard.sock."""
_CONNECT_SECONDS: Final = 3.0
_RETRY_SECONDS: Final = 0.05
_BLOCK: Final = 1 << 16
_ABSENT: Final = (errno.ENOENT, errno.ECONNREFUSED)


def call(directory: Path | None, name: str, /, **arguments: Any) -> Any:
    """Call a session and return the result. `directory` holds its guard.sock; None: that of $BONOBOFS_SOCKET.

    The socket alone decides as which agent the caller acts.
    Raises Refused for a denial, the session's BonobofsError or OSError, StateError if the session does not answer.
    """
    if directory is None:
        path = os.environ.get(SOCKET_VARIABLE)
        if not path:
            raise StateError(f"{SOCKET_VARIABLE} is not set; run this in `bonobofs shell MOUNTPOINT`")
        directory = Path(path).parent
    return call_within(None, directory, name, **arguments)


def call_with(descriptors: Sequence[int], directory: Path, name: str, /, **arguments: Any) -> Any:
    """As `call`, and send descriptors with the call."""
    return _call(None, directory, name, arguments, descriptors)


def call_within(seconds: float | None, directory: Path, name: str, /, **arguments: Any) -> Any:
    """As `call`, with a timeout for each read and write once connected. TimeoutError."""
    return _call(seconds, directory, name, arguments, ())


def _call(
    seconds: float | None, directory: Path, name: str, arguments: dict[str, Any], descriptors: Sequence[int]
) -> Any:
    with _connect(directory) as connection:
        connection.settimeout(seconds)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the answer says why
            line = json.dumps({"call": name, **arguments}).encode() + b"\n"
            if descriptors:
                line = line[socket.send_fds(connection, [line], list(descriptors)) :]
            connection.sendall(line)
        answer = _read_answer(connection)
    if answer["ok"]:
        return answer["result"]
    if "denied" in answer:
        raise Refused(decode_denied(answer["denied"]))
    raise decode_failure(answer["error"])


def _connect(directory: Path) -> socket.socket:
    deadline = time.monotonic() + _CONNECT_SECONDS
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # A socket address holds at most 107 bytes; the path of the state directory may be longer.
            handle = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                connection.connect(f"/proc/self/fd/{handle}/{GUARD_SOCKET}")
            finally:
                os.close(handle)
        except OSError as error:
            connection.close()
            if error.errno in _ABSENT and time.monotonic() < deadline and directory.exists():
                time.sleep(_RETRY_SECONDS)
                continue
            raise StateError(
                f"the session does not answer at {directory / GUARD_SOCKET} ({error.strerror}); look at bonobofs status"
            ) from error
        return connection


def _read_answer(connection: socket.socket) -> dict[str, Any]:
    received = bytearray()
    while not received.endswith(b"\n"):
        try:
            data = connection.recv(_BLOCK)
        except ConnectionResetError:
            data = b""
        if not data:
            raise StateError("the session closed the connection; retry, or run `bonobofs status`")
        received += data
    answer: dict[str, Any] = json.loads(received)
    return answer
