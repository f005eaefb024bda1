"""Calling a session through its guard socket; needs nothing but the standard library.

    call(directory, "lease.acquire", patterns=["docs/**"])
    call(None, "whoami")    # the session of the shell that this program runs in

Each call has a connection of its own. A companion that is just being started anew is waited for.
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

from bonobofs import errors
from bonobofs.errors import BonobofsError, StateError
from bonobofs.policy.decision import Code, Denied, Holding, Refused
from bonobofs.policy.request import Operation, WorkspacePath
from bonobofs.state.home import GUARD_SOCKET

SOCKET_VARIABLE: Final = "BONOBOFS_SOCKET"
"""Set in `bonobofs shell`: the path of the session's guard.sock."""
_SECONDS_TO_BE_THERE: Final = 3.0
_BETWEEN: Final = 0.05
_BLOCK: Final = 1 << 16
_ABSENT: Final = (errno.ENOENT, errno.ECONNREFUSED)


def call(directory: Path | None, name: str, /, **arguments: Any) -> Any:
    """Call a session and return the result. `directory` holds its guard.sock; None: that of $BONOBOFS_SOCKET.

    The socket alone decides as which agent the caller acts.
    Refused where it is denied; BonobofsError or OSError as they are told; StateError where nobody answers.
    """
    if directory is None:
        named = os.environ.get(SOCKET_VARIABLE)
        if not named:
            raise StateError(f"{SOCKET_VARIABLE} is not set; run this in `bonobofs shell MOUNTPOINT`")
        directory = Path(named).parent
    return call_within(None, directory, name, **arguments)


def call_with(descriptors: Sequence[int], directory: Path, name: str, /, **arguments: Any) -> Any:
    """As `call`, with descriptors that are handed over."""
    return _call(None, directory, name, arguments, descriptors)


def call_within(seconds: float | None, directory: Path, name: str, /, **arguments: Any) -> Any:
    """As `call`, with a limit to each wait once there is a connection. TimeoutError: nothing was said for so long."""
    return _call(seconds, directory, name, arguments, ())


def _call(
    seconds: float | None, directory: Path, name: str, arguments: dict[str, Any], descriptors: Sequence[int]
) -> Any:
    with _connected(directory) as end:
        end.settimeout(seconds)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # why, is said in the answer
            line = json.dumps({"call": name, **arguments}).encode() + b"\n"
            if descriptors:
                line = line[socket.send_fds(end, [line], list(descriptors)) :]
            end.sendall(line)
        answer = _answer(end)
    if answer["ok"]:
        return answer["result"]
    if "denied" in answer:
        raise Refused(_denied(answer["denied"]))
    raise _failed(answer["error"])


def _connected(directory: Path) -> socket.socket:
    deadline = time.monotonic() + _SECONDS_TO_BE_THERE
    while True:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The path of a socket has at most 107 bytes, and that of the state directory may be longer.
            handle = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                end.connect(f"/proc/self/fd/{handle}/{GUARD_SOCKET}")
            finally:
                os.close(handle)
        except OSError as error:
            end.close()
            if error.errno in _ABSENT and time.monotonic() < deadline and directory.exists():
                time.sleep(_BETWEEN)
                continue
            raise StateError(
                f"the session does not answer at {directory / GUARD_SOCKET} ({error.strerror}); look at bonobofs status"
            ) from error
        return end


def _answer(end: socket.socket) -> dict[str, Any]:
    said = bytearray()
    while not said.endswith(b"\n"):
        try:
            data = end.recv(_BLOCK)
        except ConnectionResetError:
            data = b""
        if not data:
            raise StateError("the session has let go of the call; try again, and look at bonobofs status")
        said += data
    answer: dict[str, Any] = json.loads(said)
    return answer


def _denied(told: dict[str, Any]) -> Denied:
    holding = Holding(told["holder"], told["chain"], told["until"]) if "holder" in told else None
    return Denied(
        Code(told["code"]),
        told["rule"],
        told["reason"],
        told["instead"],
        WorkspacePath(told["path"]),
        Operation(told["operation"]),
        holding,
        told.get("about", ""),
    )


def _failed(told: dict[str, Any]) -> Exception:
    """The failure of that type, if it is one of ours or of the system's."""
    if "errno" in told:
        return OSError(told["errno"], told["message"])
    kind = getattr(errors, told["type"], None)
    if isinstance(kind, type) and issubclass(kind, BonobofsError):
        return kind(told["message"])
    return StateError(f"the session has failed at it: {told['type']}: {told['message']}")
