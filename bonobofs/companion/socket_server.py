"""The guard socket: `guard.sock` in the session's `inside` directory, which takes calls as JSON, one document a line.

Only the session's user, root and the user of `mount --user` are let in, by the uid that the kernel gives for the other
end; all of them act as the session's agent. Anybody among them may be slow, silent or hostile: one thread moves bytes
and waits for nobody, what a connection may hold is bounded, and of too many the one that has been idle longest gives
way. Calls are answered by other threads, of each connection one at a time. A call whose caller has gone is made all the
same, and counts until then.
"""

from __future__ import annotations

import errno
import os
import queue
import selectors
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Final

from bonobofs.companion.call_executor import Answering, failure
from bonobofs.errors import UsageError
from bonobofs.state.home import GUARD_SOCKET
from bonobofs.system import syscalls

LONGEST_LINE: Final = 16 << 20
"""Bytes of a call, its newline aside."""
MOST_CONNECTIONS: Final = 64
_MOST_HELD: Final = 64 << 20
"""Bytes that all connections may hold together."""
_SECONDS_FOR_A_LINE: Final = 10.0
"""Seconds in which a line must be there once it has begun, and an answer taken."""
_ENDING: Final = "the session is ending"
_BLOCK: Final = 1 << 16
_OVERFLOW: Final = Path("/proc/sys/kernel/overflowuid")
_CREDENTIALS: Final = struct.Struct("=iII")
_SO_PEERGROUPS: Final = 59
"""Of <asm-generic/socket.h>; the socket module does not name it."""
_MOST_GROUPS: Final = 256
MOST_DESCRIPTORS: Final = 2
"""Descriptors that a connection may hand over with a call; the kernel closes further ones."""


Maker = Callable[[], AbstractContextManager[object]]
"""As `MAKER` of bonobofs.files.workspace."""
Answer = Callable[[Maker, str, dict[str, Any], list[int]], Any]
"""The last argument: the descriptors that came with the call. The entrance closes them once the call is answered."""


class _Connection:
    """One caller."""

    def __init__(self, end: socket.socket, now: float, maker: Maker) -> None:
        self.end: Final = end
        self.maker: Final = maker
        self.incoming = bytearray()
        self.looked = 0
        """So much of it holds no newline."""
        self.outgoing = bytearray()
        self.calling = 0
        """Bytes of its call that is being answered."""
        self.descriptors: list[int] = []
        """What it has handed over for its next call."""
        self.lent: list[int] = []
        """What it has handed over for the call that is being answered."""
        self.ending = False
        """It is let go when what is to be said to it is said."""
        self.since = now
        """When it last did something, and by when the line or answer that is under way began."""

    @property
    def is_idle(self) -> bool:
        return not self.calling and not self.outgoing

    @property
    def size(self) -> int:
        return len(self.incoming) + len(self.outgoing) + self.calling


class Entrance:
    """Listens from its making to `close`."""

    def __init__(self, directory: Path, answer: Answer, at_once: Mapping[str, int], guest: int | None = None) -> None:
        """Listen in this directory, and replace the socket of an earlier companion. OSError.

        `at_once` as for `Answering`.
        `guest` is the uid of a further user who is admitted.
        """
        self._path: Final = directory / GUARD_SOCKET
        self._answering: Final[Answering[_Connection]] = Answering(
            lambda caller, name, arguments: answer(caller.maker, name, arguments, caller.lent), at_once, self._answered
        )
        self._listener: Final = _listen(directory, guest)
        self._admitted: Final = _admitted(guest)
        self._guest: Final = guest
        self._selector: Final = selectors.DefaultSelector()
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._connections: Final[dict[int, _Connection]] = {}
        self._gone: Final[set[_Connection]] = set()
        """Those that have gone away from a call that is not yet answered."""
        self._answers: Final[queue.SimpleQueue[tuple[_Connection, bytes]]] = queue.SimpleQueue()
        self._closing = False
        threading.Thread(target=self._run, name="bonobofs-socket", daemon=True).start()

    def close(self) -> None:
        """Take no more calls; what is being answered goes on."""
        self._closing = True
        self._path.unlink(missing_ok=True)
        with suppress(BlockingIOError):
            os.write(self._waker, b"\0")

    # -- the thread that moves bytes

    def _run(self) -> None:
        while True:
            for key, events in self._selector.select(self._until_due()):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fd == self._wake:
                    with suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                else:
                    connection = self._connections.get(key.fd)
                    if connection is not None:
                        self._move(connection, events)
            self._hand_back()
            self._let_go_of_the_slow(monotonic())

    def _until_due(self) -> float | None:
        begun = [one.since for one in self._connections.values() if one.outgoing or (one.incoming and one.is_idle)]
        return None if not begun else max(0.0, min(begun) + _SECONDS_FOR_A_LINE - monotonic())

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                end, _ = self._listener.accept()
                self._admit(end)

    def _admit(self, end: socket.socket) -> None:
        end.setblocking(False)
        _, uid, gid = _CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        now = monotonic()
        maker: Maker = partial(_acting_as, uid, gid, _groups(end)) if uid == self._guest else nullcontext
        connection = _Connection(end, now, maker)
        refusal = "" if uid in self._admitted else "this socket belongs to another user"
        if not refusal and self._closing:
            refusal = _ENDING
        if not refusal and len(self._connections) + len(self._gone) >= MOST_CONNECTIONS:
            idle = min((one for one in self._connections.values() if one.is_idle), key=_since, default=None)
            if idle is None:
                refusal = f"{MOST_CONNECTIONS} calls are being answered; try again"
            else:
                self._drop(idle)
        if refusal:
            code = errno.EACCES if uid not in self._admitted else errno.EAGAIN
            with suppress(OSError), end:
                end.send(failure(OSError(code, refusal)))
            return
        self._connections[end.fileno()] = connection
        self._selector.register(end, selectors.EVENT_READ)

    def _move(self, connection: _Connection, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                del connection.outgoing[: connection.end.send(connection.outgoing)]
            if events & selectors.EVENT_READ:
                self._read(connection)
        except BlockingIOError:
            pass  # it is listened to for when there is room again
        except OSError:
            self._drop(connection)
            return
        if connection.ending and not connection.outgoing:
            self._drop(connection)
        elif connection.end.fileno() >= 0:
            self._next(connection)

    def _read(self, connection: _Connection) -> None:
        data, descriptors, _, _ = socket.recv_fds(connection.end, _BLOCK, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        connection.descriptors += descriptors
        while len(connection.descriptors) > MOST_DESCRIPTORS:
            os.close(connection.descriptors.pop())
        if not data:
            self._drop(connection)
            return
        if not connection.incoming:
            connection.since = monotonic()
        connection.incoming += data
        self._shed()

    def _shed(self) -> None:
        """Let go of whoever holds the most, if all together hold too much."""
        if sum(one.size for one in (*self._connections.values(), *self._gone)) > _MOST_HELD:
            self._drop(max(self._connections.values(), key=_let_go))

    def _next(self, connection: _Connection) -> None:
        """Hand on the next line of a connection, if there is one and it is its turn."""
        if connection.is_idle and not connection.ending:
            at = connection.incoming.find(b"\n", connection.looked)
            if at >= 0 and self._closing:
                self._say(connection, failure(OSError(errno.EAGAIN, _ENDING)))
                connection.ending = True
                connection.incoming.clear()
            elif at >= 0:
                line = bytes(connection.incoming[:at])
                del connection.incoming[: at + 1]
                connection.looked = 0
                connection.calling = at + 1
                connection.since = monotonic()
                connection.lent, connection.descriptors = connection.descriptors, []
                self._answering.take(connection, line)
            else:
                connection.looked = len(connection.incoming)
                if connection.looked > LONGEST_LINE:
                    self._say(connection, failure(UsageError(f"a call has at most {LONGEST_LINE} bytes")))
                    connection.ending = True
                    connection.incoming.clear()
        self._listen_to(connection)

    def _listen_to(self, connection: _Connection) -> None:
        """Read where there is room for more, write where there is something to be said."""
        wanted = selectors.EVENT_WRITE if connection.outgoing else 0
        if not connection.ending and len(connection.incoming) <= LONGEST_LINE:
            wanted |= selectors.EVENT_READ
        key = self._selector.get_map().get(connection.end.fileno())
        if key is None:
            if wanted:
                self._selector.register(connection.end, wanted)
        elif not wanted:
            self._selector.unregister(connection.end)
        elif key.events != wanted:
            self._selector.modify(connection.end, wanted)

    def _hand_back(self) -> None:
        with suppress(queue.Empty):
            while True:
                connection, line = self._answers.get_nowait()
                connection.calling = 0
                _close(connection.lent)
                self._gone.discard(connection)
                if connection.end.fileno() >= 0:
                    self._say(connection, line)
                    self._shed()
                    self._move(connection, selectors.EVENT_WRITE)

    def _answered(self, connection: _Connection, line: bytes) -> None:
        """A call is answered. From whatever thread."""
        self._answers.put((connection, line))
        with suppress(BlockingIOError):
            os.write(self._waker, b"\0")

    def _say(self, connection: _Connection, line: bytes) -> None:
        connection.since = monotonic()
        connection.outgoing += line

    def _let_go_of_the_slow(self, now: float) -> None:
        for connection in list(self._connections.values()):
            begun = connection.outgoing or (connection.incoming and connection.is_idle)
            if begun and now - connection.since >= _SECONDS_FOR_A_LINE:
                self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        fd = connection.end.fileno()
        if self._connections.pop(fd, None) is not None:
            if fd in self._selector.get_map():
                self._selector.unregister(connection.end)
            connection.end.close()
            _close(connection.descriptors)
            connection.incoming.clear()
            connection.outgoing.clear()
            if connection.calling:
                self._gone.add(connection)


@contextmanager
def _acting_as(uid: int, gid: int, groups: tuple[int, ...]) -> Iterator[None]:
    """Let this thread make files as another user, with that user's rights, as the mount does. For root."""
    syscalls.set_file_identity(uid, gid, groups)
    try:
        yield
    finally:
        syscalls.set_file_identity(0, 0, ())


def _groups(end: socket.socket) -> tuple[int, ...]:
    """The supplementary groups of the caller when it connected."""
    data = end.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _MOST_GROUPS)
    return struct.unpack(f"={len(data) // 4}I", data)


def _listen(directory: Path, guest: int | None) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    (directory / GUARD_SOCKET).unlink(missing_ok=True)
    # The path of a socket has at most 107 bytes, and that of the state directory may be longer.
    handle = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        listener.bind(f"/proc/self/fd/{handle}/{GUARD_SOCKET}")
    finally:
        os.close(handle)
    os.chmod(directory / GUARD_SOCKET, stat.S_IRUSR | stat.S_IWUSR)
    if guest is not None:
        os.chown(directory / GUARD_SOCKET, guest, -1)
    listener.listen(4 * MOST_CONNECTIONS)
    listener.setblocking(False)
    return listener


def _admitted(guest: int | None) -> frozenset[int]:
    """The users whom this socket serves: its own, root and the guest.

    In a user namespace in which root has no number, the kernel gives root's the one that stands for all such. Others
    who have none do not come this far: socket and directory are open to their owner alone.
    """
    admitted = {os.geteuid(), 0} if guest is None else {os.geteuid(), 0, guest}
    if all(int(line.split()[0]) for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()):
        admitted.add(int(_OVERFLOW.read_text(encoding="ascii")))
    return frozenset(admitted)


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _since(connection: _Connection) -> float:
    return connection.since


def _let_go(connection: _Connection) -> int:
    """Bytes that are held no longer once it is let go; its call is made in any case."""
    return connection.size - connection.calling
