"""Server of the guard socket: JSON calls, one per line, on `guard.sock` in the session's `inside` directory.

The kernel gives the uid of each caller. The session's user, root and the user of `mount --user` are accepted; all act
as the session's agent. A caller may be slow or hostile: one thread moves bytes and never waits, the memory of a
connection is bounded, and one connection too many drops the longest idle one. Other threads answer the calls, one at a
time for each connection. A call runs to its end and counts as a connection even if its caller has gone.
"""

from __future__ import annotations

import errno
import json
import os
import queue
import re
import selectors
import socket
import stat
import struct
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Final, Generic, TypeVar

from bonobofs.errors import BonobofsError, UsageError
from bonobofs.ipc.codec import encode_failure
from bonobofs.policy.decision import Refused, as_document
from bonobofs.state.home import GUARD_SOCKET
from bonobofs.system import syscalls

MAX_CONNECTIONS: Final = 64
MAX_LINE: Final = 16 << 20
"""Bytes of a call, its newline aside."""
_MAX_MEMORY: Final = 64 << 20
"""Bytes of all connections together."""
_TIMEOUT: Final = 10.0
"""Seconds in which a caller must complete a line that it has begun, and take an answer."""
_MAX_FDS: Final = 2
"""Descriptors that a connection may send with a call; the kernel closes further ones."""
_ENDING: Final = "the session is ending"
_BLOCK: Final = 1 << 16
_OVERFLOW_UID: Final = Path("/proc/sys/kernel/overflowuid")
_CREDENTIALS: Final = struct.Struct("=iII")
_SO_PEERGROUPS: Final = 59
"""From <asm-generic/socket.h>; the socket module does not have it."""
_MAX_GROUPS: Final = 256

_CONCURRENCY: Final = 4
"""Calls of one name that run at once, unless `concurrency` has another limit."""
_MAX_QUEUE: Final = 32
"""Queue limit of the names with a concurrency of their own. Connections bound the other queues."""
_MAX_CALL: Final = 1 << 20
"""Bytes of a call with neither the content of a file nor a list of paths."""
_MAX_LISTS: Final = 4 << 20
"""Bytes of a call with a list of paths; its trail entry has each of them, and readers accept 16 MiB."""
_MAX_CALLS: Final = {
    "write_file": MAX_LINE + (1 << 20),
    "git.preflight": _MAX_LISTS,
}
_MAX_STRUCTURE: Final = 1 << 18
"""Bytes of a call outside of its strings: each value takes much more memory once it is parsed."""
_NAME: Final = re.compile(rb'\s*\{\s*"call"\s*:\s*"([a-z_.]{1,64})"')
"""The beginning of a long call, which must give the name first."""
_MAX_LOGGED: Final = 200

Impersonate = Callable[[], AbstractContextManager[object]]
"""As `MAKER` of bonobofs.files.workspace: entered while a file is made, to make it as the caller."""
Handler = Callable[[Impersonate, str, dict[str, Any], list[int]], Any]
"""Called with the name, the arguments and the descriptors of a call, which the server closes afterwards."""
Caller = TypeVar("Caller")


class _Queue(Generic[Caller]):
    """The calls of one name."""

    def __init__(self) -> None:
        self.pending: Final[deque[tuple[Caller, dict[str, Any]]]] = deque()
        self.workers = 0


class CallExecutor(Generic[Caller]):
    """Runs calls in threads, a few of each name at once, so that slow calls do not delay those of other names."""

    def __init__(
        self,
        handle: Callable[[Caller, str, dict[str, Any]], Any],
        concurrency: Mapping[str, int],
        on_answer: Callable[[Caller, bytes], None],
    ) -> None:
        """`concurrency` has the limits of some names. `on_answer` is called from the worker threads."""
        self._handle: Final = handle
        self._concurrency: Final = concurrency
        self._on_answer: Final = on_answer
        self._lock: Final = threading.Lock()
        self._queues: Final[dict[str, _Queue[Caller]]] = {}
        self._logged: Final[set[tuple[str, type[Exception]]]] = set()

    def submit(self, caller: Caller, line: bytes) -> None:
        """Queue a call. A line that is no call is answered at once."""
        try:
            name, arguments = _parse_call(line)
        except UsageError as error:
            self._on_answer(caller, _failure(error))
            return
        with self._lock:
            waiting = self._queues.setdefault(name, _Queue())
            is_full = name in self._concurrency and len(waiting.pending) >= _MAX_QUEUE
            starts = not is_full and waiting.workers < self._concurrency.get(name, _CONCURRENCY)
            waiting.workers += starts
            if not is_full:
                waiting.pending.append((caller, arguments))
        if is_full:
            busy = f"{_MAX_QUEUE} calls of {name} wait to be answered; try again"
            self._on_answer(caller, _failure(OSError(errno.EAGAIN, busy)))
        elif starts:
            try:
                threading.Thread(target=self._work, args=(name, waiting), name="bonobofs-call", daemon=True).start()
            except RuntimeError:
                self._abandon(name, waiting)

    def _abandon(self, name: str, waiting: _Queue[Caller]) -> None:
        """No thread can be started: fail the pending calls, unless another worker will take them."""
        failed = []
        with self._lock:
            waiting.workers -= 1
            if not waiting.workers:
                failed = list(waiting.pending)
                del self._queues[name]
        for caller, _ in failed:
            self._on_answer(caller, _failure(OSError(errno.EAGAIN, "there can be no more threads; try again")))

    def _work(self, name: str, waiting: _Queue[Caller]) -> None:
        while True:
            with self._lock:
                if not waiting.pending:
                    waiting.workers -= 1
                    if not waiting.workers:
                        del self._queues[name]
                    return
                caller, arguments = waiting.pending.popleft()
            self._on_answer(caller, self._answer(caller, name, arguments))

    def _answer(self, caller: Caller, name: str, arguments: dict[str, Any]) -> bytes:
        try:
            return _encode({"ok": True, "result": self._handle(caller, name, arguments)})
        except Refused as refused:
            denied = refused.decision
            return _encode({"ok": False, "denied": as_document(denied, denied.path, denied.operation)})
        except UnicodeError as error:
            return _failure(UsageError(f"a text of this call is not valid: {getattr(error, 'reason', error)}"))
        except (BonobofsError, OSError) as error:
            return _failure(error)
        except Exception as error:  # noqa: BLE001 - the edge at which an unknown failure becomes an answer and a record
            self._log(name, error)
            return _failure(error)

    def _log(self, name: str, error: Exception) -> None:
        """Log a failure, once for each name and type: callers must not fill the disk."""
        if (name, type(error)) not in self._logged:
            self._logged.add((name, type(error)))
            sys.stderr.write(f"bonobofs: a call of {name} has failed: {error!r:.{_MAX_LOGGED}}\n")
            sys.stderr.flush()


def _parse_call(line: bytes) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call. UsageError."""
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
    """UsageError if the call is longer than calls of that name may be."""
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


class _Connection:
    """One caller."""

    def __init__(self, end: socket.socket, now: float, impersonate: Impersonate) -> None:
        self.end: Final = end
        self.impersonate: Final = impersonate
        self.incoming = bytearray()
        self.searched = 0
        """Bytes at the start of `incoming` without a newline."""
        self.outgoing = bytearray()
        self.running = 0
        """Bytes of the call that is being answered; 0: none."""
        self.fds: list[int] = []
        """Descriptors for the next call."""
        self.running_fds: list[int] = []
        """Descriptors of the call that is being answered."""
        self.is_closing = False
        """Close once `outgoing` is sent."""
        self.active_since = now
        """When it last sent or took something, or when the present line or answer began."""

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.outgoing

    @property
    def is_in_transfer(self) -> bool:
        """Whether a line has begun or an answer is being sent, for which the timeout runs."""
        return bool(self.outgoing or (self.incoming and self.is_idle))

    @property
    def size(self) -> int:
        return len(self.incoming) + len(self.outgoing) + self.running


class SocketServer:
    """Listens from its construction to `close`."""

    def __init__(
        self, directory: Path, handler: Handler, concurrency: Mapping[str, int], guest: int | None = None
    ) -> None:
        """Listen in `directory`, and replace the socket of an earlier companion. OSError.

        `concurrency` as for `CallExecutor`. `guest` is the uid of a further user who is accepted.
        """
        self._path: Final = directory / GUARD_SOCKET
        self._executor: Final[CallExecutor[_Connection]] = CallExecutor(
            lambda caller, name, arguments: handler(caller.impersonate, name, arguments, caller.running_fds),
            concurrency,
            self._on_answer,
        )
        self._listener: Final = _listen(directory, guest)
        self._accepted_uids: Final = _accepted_uids(guest)
        self._guest: Final = guest
        self._selector: Final = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._connections: Final[dict[int, _Connection]] = {}
        self._orphaned: Final[set[_Connection]] = set()
        """Closed connections whose call still runs."""
        self._answers: Final[queue.SimpleQueue[tuple[_Connection, bytes]]] = queue.SimpleQueue()
        self._is_closing = False
        threading.Thread(target=self._run, name="bonobofs-socket", daemon=True).start()

    def close(self) -> None:
        """Accept no more calls; running calls go on."""
        self._is_closing = True
        self._path.unlink(missing_ok=True)
        self._wake()

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def _on_answer(self, connection: _Connection, line: bytes) -> None:
        """Queue the answer of a call. From any thread."""
        self._answers.put((connection, line))
        self._wake()

    # -- the thread that moves bytes

    def _run(self) -> None:
        while True:
            for key, events in self._selector.select(self._seconds_to_timeout()):
                if key.fileobj is self._listener:
                    self._accept_all()
                elif key.fd == self._wake_read:
                    with suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                else:
                    connection = self._connections.get(key.fd)
                    if connection is not None:
                        self._transfer(connection, events)
            self._send_answers()
            self._drop_expired(monotonic())

    def _seconds_to_timeout(self) -> float | None:
        starts = [one.active_since for one in self._connections.values() if one.is_in_transfer]
        return None if not starts else max(0.0, min(starts) + _TIMEOUT - monotonic())

    def _accept_all(self) -> None:
        with suppress(OSError):
            while True:
                end, _ = self._listener.accept()
                self._accept(end)

    def _accept(self, end: socket.socket) -> None:
        end.setblocking(False)
        _, uid, gid = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        impersonate = partial(_acting_as, uid, gid, _peer_groups(end)) if uid == self._guest else nullcontext
        connection = _Connection(end, monotonic(), impersonate)
        refusal = "" if uid in self._accepted_uids else "this socket belongs to another user"
        if not refusal and self._is_closing:
            refusal = _ENDING
        if not refusal and len(self._connections) + len(self._orphaned) >= MAX_CONNECTIONS:
            idle = [one for one in self._connections.values() if one.is_idle]
            if idle:
                self._drop(min(idle, key=lambda one: one.active_since))
            else:
                refusal = f"{MAX_CONNECTIONS} calls are being answered; try again"
        if refusal:
            code = errno.EACCES if uid not in self._accepted_uids else errno.EAGAIN
            with suppress(OSError), end:
                end.send(_failure(OSError(code, refusal)))
            return
        self._connections[end.fileno()] = connection
        self._selector.register(end, selectors.EVENT_READ)

    def _transfer(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                del connection.outgoing[: connection.end.send(connection.outgoing)]
            if events & selectors.EVENT_READ:
                self._receive(connection)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        if connection.is_closing and not connection.outgoing:
            self._drop(connection)
        elif connection.end.fileno() >= 0:
            self._submit_next(connection)

    def _receive(self, connection: _Connection) -> None:
        data, fds, _, _ = socket.recv_fds(connection.end, _BLOCK, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
        connection.fds += fds
        while len(connection.fds) > _MAX_FDS:
            os.close(connection.fds.pop())
        if not data:
            self._drop(connection)
            return
        if not connection.incoming:
            connection.active_since = monotonic()
        connection.incoming += data
        self._limit_memory()

    def _limit_memory(self) -> None:
        """If all connections together hold too much, drop the one that frees the most. Its call still runs."""
        if sum(one.size for one in (*self._connections.values(), *self._orphaned)) > _MAX_MEMORY:
            self._drop(max(self._connections.values(), key=lambda one: one.size - one.running))

    def _submit_next(self, connection: _Connection) -> None:
        """Submit the next line of a connection whose last call is answered."""
        if connection.is_idle and not connection.is_closing:
            end = connection.incoming.find(b"\n", connection.searched)
            if end >= 0 and self._is_closing:
                self._refuse(connection, OSError(errno.EAGAIN, _ENDING))
            elif end >= 0:
                line = bytes(connection.incoming[:end])
                del connection.incoming[: end + 1]
                connection.searched = 0
                connection.running = end + 1
                connection.active_since = monotonic()
                connection.running_fds, connection.fds = connection.fds, []
                self._executor.submit(connection, line)
            else:
                connection.searched = len(connection.incoming)
                if connection.searched > MAX_LINE:
                    self._refuse(connection, UsageError(f"a call has at most {MAX_LINE} bytes"))
        self._select(connection)

    def _refuse(self, connection: _Connection, error: Exception) -> None:
        """Answer with an error, and close the connection then."""
        self._queue(connection, _failure(error))
        connection.is_closing = True
        connection.incoming.clear()

    def _select(self, connection: _Connection) -> None:
        """Wait for input if there is room for it, and for output if there is any."""
        events = selectors.EVENT_WRITE if connection.outgoing else 0
        if not connection.is_closing and len(connection.incoming) <= MAX_LINE:
            events |= selectors.EVENT_READ
        key = self._selector.get_map().get(connection.end.fileno())
        if key is None:
            if events:
                self._selector.register(connection.end, events)
        elif not events:
            self._selector.unregister(connection.end)
        elif key.events != events:
            self._selector.modify(connection.end, events)

    def _send_answers(self) -> None:
        with suppress(queue.Empty):
            while True:
                connection, line = self._answers.get_nowait()
                connection.running = 0
                _close_all(connection.running_fds)
                self._orphaned.discard(connection)
                if connection.end.fileno() >= 0:
                    self._queue(connection, line)
                    self._limit_memory()
                    self._transfer(connection, selectors.EVENT_WRITE)

    def _queue(self, connection: _Connection, line: bytes) -> None:
        connection.active_since = monotonic()
        connection.outgoing += line

    def _drop_expired(self, now: float) -> None:
        for connection in list(self._connections.values()):
            if connection.is_in_transfer and now - connection.active_since >= _TIMEOUT:
                self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        fd = connection.end.fileno()
        if self._connections.pop(fd, None) is not None:
            if fd in self._selector.get_map():
                self._selector.unregister(connection.end)
            connection.end.close()
            _close_all(connection.fds)
            connection.incoming.clear()
            connection.outgoing.clear()
            if connection.running:
                self._orphaned.add(connection)


@contextmanager
def _acting_as(uid: int, gid: int, groups: tuple[int, ...]) -> Iterator[None]:
    """Make this thread create files as another user, with that user's rights, as the mount does. For root."""
    syscalls.set_file_identity(uid, gid, groups)
    try:
        yield
    finally:
        syscalls.set_file_identity(0, 0, ())


def _peer_groups(end: socket.socket) -> tuple[int, ...]:
    """The supplementary groups of the caller when it connected."""
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
    listener.setblocking(False)
    return listener


def _accepted_uids(guest: int | None) -> frozenset[int]:
    """The session's own uid, root's and the guest's.

    In a user namespace without root, the kernel shows root's uid as the overflow uid, as it does every unmapped uid.
    Other unmapped users cannot connect: the socket and its directory are open to their owner alone.
    """
    accepted = {os.geteuid(), 0} if guest is None else {os.geteuid(), 0, guest}
    if all(int(line.split()[0]) for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()):
        accepted.add(int(_OVERFLOW_UID.read_text(encoding="ascii")))
    return frozenset(accepted)


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
