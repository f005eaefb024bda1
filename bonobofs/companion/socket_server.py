"""Server of the guard socket: JSON calls, one per line, on `guard.sock` in the session's `inside` directory.

The kernel gives the uid of each caller. The session's user, root and the user of `mount --user` are accepted; all act
as the session's agent. A caller may be slow or hostile: each connection has its own thread, which has a time limit for
each line and each answer. The memory of all connections is bounded, and one connection too many drops the longest idle
one. A call runs to its end and counts as a connection even if its caller has gone.
"""

from __future__ import annotations

import errno
import json
import os
import re
import select
import socket
import stat
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final, NoReturn

from bonobofs.companion.remote_authorizer import PEER
from bonobofs.errors import BonobofsError, StateError, UsageError, reason
from bonobofs.ipc.codec import encode_failure
from bonobofs.policy.decision import Refused, as_document
from bonobofs.state.home import GUARD_SOCKET
from bonobofs.system import syscalls
from bonobofs.system.processes import start_time

MAX_CONNECTIONS: Final = 64
MAX_LINE: Final = 16 << 20
"""Bytes of a call, without its newline."""
_MAX_MEMORY: Final = 64 << 20
"""Maximum of bytes of all connections together."""
_TIMEOUT: Final = 10.0
"""Seconds within which a caller must complete a line, and must take an answer."""
_ACCEPT_PAUSE: Final = 0.1
"""Seconds until the next attempt if a connection cannot be accepted, for example without free descriptors."""
_LOAD_SECONDS: Final = 1.0
"""Seconds until the calls are loaded without a caller. Loading takes 40 ms of processor time, which the first programs
in the mount need.
"""
_MAX_FDS: Final = 2
"""Descriptors that a connection may send with a call; the kernel closes further ones."""
_BLOCK: Final = 1 << 16
_OVERFLOW_UID: Final = Path("/proc/sys/kernel/overflowuid")
_CREDENTIALS: Final = struct.Struct("=iII")
_SO_PEERGROUPS: Final = 59
"""From <asm-generic/socket.h>; the socket module does not have it."""
_MAX_GROUPS: Final = 256

_MAX_CALL: Final = 1 << 20
"""Maximum of bytes of a call without the content of a file and without a list of paths."""
_MAX_LISTS: Final = 4 << 20
"""Maximum of bytes of a call with a list of paths. Its trail entry has each path, and readers accept 16 MiB."""
_MAX_CALLS: Final = {
    "write_file": MAX_LINE + (1 << 20),
    "git.preflight": _MAX_LISTS,
}
_MAX_STRUCTURE: Final = 1 << 18
"""Maximum of bytes of a call outside of its strings. A parsed value takes much more memory than its text."""
_NAME: Final = re.compile(rb'\s*\{\s*"call"\s*:\s*"([a-z_.]{1,64})"')
"""The beginning of a long call, which must give the name first."""
_MAX_LOGGED: Final = 200

Impersonate = Callable[[], AbstractContextManager[object]]
"""Context in which a thread creates a file as the caller; see `MAKER` of bonobofs.files.workspace."""
Handler = Callable[[Impersonate, str, dict[str, Any], list[int]], Any]
"""Called with the name, the arguments and the descriptors of a call, which the server closes afterwards."""
Limits = Mapping[str, tuple[int, int]]
"""For each name, how many calls run and how many wait at once."""


class _Gate:
    """Limits the calls of one name, so that slow calls do not delay those of other names."""

    def __init__(self, running: int, waiting: int) -> None:
        self._free: Final = threading.Semaphore(running)
        self._places: Final = threading.Semaphore(running + waiting)
        self._waiting: Final = waiting

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Wait until a call may run. OSError, EAGAIN: the queue is full."""
        if not self._places.acquire(blocking=False):
            raise OSError(errno.EAGAIN, f"{self._waiting} calls of {name} wait to be answered; try again")
        try:
            with self._free:
                yield
        finally:
            self._places.release()


class _Connection:
    """One caller."""

    def __init__(self, end: socket.socket, impersonate: Impersonate, peer: tuple[int, int]) -> None:
        self.end: Final = end
        self.impersonate: Final = impersonate
        self.peer: Final = peer
        """Pid and start time of the process that connected."""
        self.incoming = bytearray()
        self.held = 0
        """Bytes of `incoming` and of the call that is being answered."""
        self.running = 0
        """Bytes of the call that is being answered; 0: none."""
        self.outgoing = 0
        """Bytes of the answer that is being sent; 0: none."""
        self.is_dropped = False
        self.fds: list[int] = []
        """Descriptors for the next call."""
        self.active_since = monotonic()
        """When it was accepted, or took its last answer."""

    def drop(self) -> None:
        """End the connection; its thread closes it."""
        self.is_dropped = True
        with suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)

    @property
    def freed_by_drop(self) -> int:
        """Bytes that a drop of the connection would free."""
        return 0 if self.is_dropped else self.held - self.running + self.outgoing

    def receive_line(self, on_receive: Callable[[int], None]) -> bytes | None:
        """Return the next line; None if the connection ends or the line is too long. OSError.

        `on_receive` is called with the number of bytes that were received.
        """
        deadline = monotonic() + _TIMEOUT if self.incoming else None
        searched = 0
        while (end := self.incoming.find(b"\n", searched)) < 0:
            searched = len(self.incoming)
            if searched > MAX_LINE:
                self.send(_failure(UsageError(f"a call has at most {MAX_LINE} bytes")))
                return None
            self.end.settimeout(None if deadline is None else max(0.001, deadline - monotonic()))
            data, fds, _, _ = socket.recv_fds(self.end, _BLOCK, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            self.fds += fds
            _close_all(self.fds[_MAX_FDS:])
            del self.fds[_MAX_FDS:]
            if not data:
                return None
            deadline = deadline or monotonic() + _TIMEOUT
            self.incoming += data
            on_receive(len(data))
            if self.is_dropped:
                return None
        line = bytes(self.incoming[:end])
        del self.incoming[: end + 1]
        return line

    def send(self, answer: bytes) -> None:
        """Send an answer. OSError: the caller is gone or too slow."""
        self.end.settimeout(_TIMEOUT)
        self.end.sendall(answer)
        self.active_since = monotonic()


class SocketServer:
    """Listens until `close`."""

    def __init__(self, directory: Path, load: Callable[[], tuple[Handler, Limits]], guest: int | None = None) -> None:
        """Listen in `directory`, and replace the socket of an earlier companion. OSError.

        The thread that accepts calls runs `load` when the first caller connects, or a second after the mount. `guest`
        is the uid of a further user who is accepted.
        """
        self._path: Final = directory / GUARD_SOCKET
        self._listener: Final = _listen(directory, guest)
        self._accepted_uids: Final = _accepted_uids(guest)
        self._guest: Final = guest
        self._lock: Final = threading.Lock()
        self._connections: Final[set[_Connection]] = set()
        self._logged: Final[set[tuple[str, type[Exception]]]] = set()
        self._is_closing = False
        self._handler: Handler
        self._gates: dict[str, _Gate] = {}
        threading.Thread(target=self._run, args=(load,), name="bonobofs-socket", daemon=True).start()

    def close(self) -> None:
        """Stop listening. Running calls continue."""
        self._is_closing = True
        self._path.unlink(missing_ok=True)

    def _run(self, load: Callable[[], tuple[Handler, Limits]]) -> None:
        poll = select.poll()
        poll.register(self._listener, select.POLLIN)
        poll.poll(_LOAD_SECONDS * 1000)
        try:
            self._handler, limits = load()
            self._gates = {name: _Gate(*limit) for name, limit in limits.items()}
        except Exception as error:  # noqa: BLE001 - as for a call: callers get an answer, and the log a record
            self._handler = _broken(reason(error))
            _log(f"the calls of the session cannot be loaded: {error!r:.{_MAX_LOGGED}}")
        while True:
            try:
                end, _ = self._listener.accept()
                self._accept(end)
            except OSError:
                sleep(_ACCEPT_PAUSE)

    def _accept(self, end: socket.socket) -> None:
        pid, uid, gid = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if uid not in self._accepted_uids:
            _refuse(end, OSError(errno.EACCES, "this socket belongs to another user"))
            return
        impersonate = partial(_acting_as, uid, gid, _peer_groups(end)) if uid == self._guest else nullcontext
        connection = _Connection(end, impersonate, (pid, start_time(pid) or 0))
        if not self._add(connection):
            _refuse(end, OSError(errno.EAGAIN, f"{MAX_CONNECTIONS} calls are being answered; try again"))
            return
        try:
            threading.Thread(target=self._serve, args=(connection,), name="bonobofs-call", daemon=True).start()
        except RuntimeError:
            self._remove(connection)
            _refuse(end, OSError(errno.EAGAIN, "there can be no more threads; try again"))

    def _add(self, connection: _Connection) -> bool:
        """Drop the connection that is idle for the longest time if there are too many. False: none is idle."""
        with self._lock:
            if len(self._connections) >= MAX_CONNECTIONS:
                idle = [other for other in self._connections if not other.running]
                if not idle:
                    return False
                oldest = min(idle, key=lambda other: other.active_since)
                self._connections.remove(oldest)
                oldest.drop()
            self._connections.add(connection)
            return True

    def _remove(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)

    def _serve(self, connection: _Connection) -> None:
        """Answer the calls of a connection, one at a time, until it ends."""
        PEER.set(connection.peer)
        try:
            with suppress(OSError), connection.end:
                while self._serve_next(connection):
                    pass
        finally:
            self._remove(connection)
            _close_all(connection.fds)

    def _serve_next(self, connection: _Connection) -> bool:
        """Answer the next call. False: the connection ends. OSError."""
        line = connection.receive_line(lambda size: self._hold(connection, size))
        if line is None or not self._begin(connection, len(line) + 1):
            return False
        if self._is_closing:
            connection.send(_failure(OSError(errno.EAGAIN, "the session is ending")))
            return False
        fds, connection.fds = connection.fds, []
        try:
            name, arguments = _parse_call(line)
            del line
            answer = self._answer(connection, name, arguments, fds)
        except UsageError as error:
            answer = _failure(error)
        finally:
            _close_all(fds)
        self._hold(connection, outgoing=len(answer))
        connection.send(answer)
        with self._lock:
            connection.held -= connection.running
            connection.running = connection.outgoing = 0
        return True

    def _begin(self, connection: _Connection, size: int) -> bool:
        """Mark a connection as busy, so that it is not dropped. False: it is dropped."""
        with self._lock:
            connection.running = size
            return not connection.is_dropped

    def _hold(self, connection: _Connection, received: int = 0, outgoing: int = 0) -> None:
        """Count bytes. If all connections hold too many, drop the one that frees the most; its call still runs."""
        with self._lock:
            connection.held += received
            connection.outgoing = outgoing
            if sum(each.freed_by_drop + each.running for each in self._connections) > _MAX_MEMORY:
                max(self._connections, key=lambda each: each.freed_by_drop).drop()

    def _answer(self, connection: _Connection, name: str, arguments: dict[str, Any], fds: list[int]) -> bytes:
        gate = self._gates.get(name)
        try:
            with nullcontext() if gate is None else gate.hold(name):
                return _encode({"ok": True, "result": self._handler(connection.impersonate, name, arguments, fds)})
        except Refused as refused:
            denied = refused.decision
            return _encode({"ok": False, "denied": as_document(denied, denied.path, denied.operation)})
        except UnicodeError as error:
            return _failure(UsageError(f"a text of this call is not valid: {getattr(error, 'reason', error)}"))
        except (BonobofsError, OSError) as error:
            return _failure(error)
        except Exception as error:  # noqa: BLE001 - the edge at which an unknown failure becomes an answer and a record
            self._log_once(name, error)
            return _failure(error)

    def _log_once(self, name: str, error: Exception) -> None:
        """Log a failure, once for each name and type: callers must not fill the disk."""
        if (name, type(error)) not in self._logged:
            self._logged.add((name, type(error)))
            _log(f"a call of {name} has failed: {error!r:.{_MAX_LOGGED}}")


def _log(text: str) -> None:
    sys.stderr.write(f"bonobofs: {text}\n")
    sys.stderr.flush()


def _broken(failure: str) -> Handler:
    """Return a handler that reports why there are no calls."""

    def refuse(*_: object) -> NoReturn:
        raise StateError(f"the session cannot answer calls: {failure}; repair the installation, and mount again")

    return refuse


def _refuse(end: socket.socket, error: OSError) -> None:
    with suppress(OSError), end:
        end.setblocking(False)
        end.send(_failure(error))


def _parse_call(line: bytes) -> tuple[str, dict[str, Any]]:
    """Return name and arguments of a call. UsageError."""
    if len(line) > _MAX_CALL:
        start = _NAME.match(line)
        if start is None:
            raise UsageError(f"a call of more than {_MAX_CALL} bytes must begin with its name")
        _check_size(start[1].decode(), line)
    if len(line) > _MAX_STRUCTURE and _exceeds_structure(line):
        raise UsageError(f"a call has at most {_MAX_STRUCTURE} bytes outside of its strings")
    try:
        document = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"this is no JSON document: {error}") from None
    if not isinstance(document, dict) or not isinstance(document.get("call"), str):
        raise UsageError('a call is an object such as {"call": "whoami"}')
    _check_size(document["call"], line)
    return document.pop("call"), document


def _check_size(name: str, line: bytes) -> None:
    """Raise UsageError if the call is longer than calls of its name may be."""
    limit = _MAX_CALLS.get(name, _MAX_CALL)
    if len(line) > limit:
        raise UsageError(f"a call of {name:.{_MAX_LOGGED}} has at most {limit} bytes; send less in one call")


def _exceeds_structure(line: bytes) -> bool:
    unescaped = line.replace(rb"\\", b"").replace(rb"\"", b"")
    if unescaped.count(b'"') > _MAX_STRUCTURE:
        return True
    return sum(map(len, unescaped.split(b'"')[::2])) > _MAX_STRUCTURE


def _failure(error: Exception) -> bytes:
    return _encode({"ok": False, "error": encode_failure(error)})


def _encode(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode() + b"\n"


@contextmanager
def _acting_as(uid: int, gid: int, groups: tuple[int, ...]) -> Iterator[None]:
    """Make this thread create files as another user with that user's rights, as the mount does. Needs root."""
    syscalls.set_file_identity(uid, gid, groups)
    try:
        yield
    finally:
        syscalls.set_file_identity(0, 0, ())


def _peer_groups(end: socket.socket) -> tuple[int, ...]:
    """Return the supplementary groups of the caller when it connected."""
    data = end.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MAX_GROUPS)
    return struct.unpack(f"={len(data) // 4}I", data)


def _listen(directory: Path, guest: int | None) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    (directory / GUARD_SOCKET).unlink(missing_ok=True)
    # A socket address holds at most 107 bytes; the path of the state directory may be longer.
    handle = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{handle}/{GUARD_SOCKET}")
    finally:
        os.close(handle)
    os.chmod(directory / GUARD_SOCKET, stat.S_IRUSR | stat.S_IWUSR)
    if guest is not None:
        os.chown(directory / GUARD_SOCKET, guest, -1)
    listener.listen(4 * MAX_CONNECTIONS)
    return listener


def _accepted_uids(guest: int | None) -> frozenset[int]:
    """Return the uids of the session, of root and of the guest.

    In a user namespace without root, the kernel shows root's uid as the overflow uid, as it does every unmapped uid.
    Other unmapped users cannot connect: only their owner may open the socket and its directory.
    """
    accepted = {os.geteuid(), 0} if guest is None else {os.geteuid(), 0, guest}
    if all(int(line.split()[0]) for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()):
        accepted.add(int(_OVERFLOW_UID.read_text(encoding="ascii")))
    return frozenset(accepted)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
