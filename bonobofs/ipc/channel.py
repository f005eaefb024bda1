"""The socket pair between server and companion: framed messages and descriptors.

The server never waits for its companion. It keeps what the socket does not take at once, up to a limit.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterable
from typing import Any, Final

from bonobofs.errors import ProtocolError
from bonobofs.ipc.message_kinds import MessageKind

Message = tuple[MessageKind, bytes]

_HEADER: Final = struct.Struct("=IB")
_MAX_PENDING: Final = 32 << 20
_MAX_BODY: Final = 16 << 20
_LIST_BODY: Final = 1 << 20
"""Bytes of a message that carries a part of a list; more only if one item is longer."""
_MAX_FDS: Final = 4
_INT: Final = struct.Struct("=i")
_ANCILLARY: Final = socket.CMSG_SPACE(4 * _MAX_FDS) + socket.CMSG_SPACE(12)
"""Bytes for the descriptors, and for the credentials (pid, uid, gid) of the sender."""


class Channel:
    """One end of the socket pair. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket, *, blocking: bool, peer: int | None = None) -> None:
        """`blocking`: sending waits for the other end. `peer`: the only pid whose messages are accepted; None: any."""
        self.socket: Final = end
        self._blocking: Final = blocking
        self._received = bytearray()
        self._pending = bytearray()
        self.fds: Final[list[int]] = []
        """Descriptors that the other end has sent. The caller takes and closes them."""
        self._send_lock: Final = threading.Lock()
        self._peer: Final = peer
        if peer is not None:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        end.setblocking(blocking)

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, kind: MessageKind, document: Any = None) -> bool:
        """Send a message with a JSON body; as `send_bytes`."""
        return self.send_bytes(kind, b"" if document is None else json.dumps(document).encode())

    def send_list(self, kind: MessageKind, items: Iterable[Any]) -> int:
        """Send a list in messages of about 1 MiB, and return how many items were not sent; as `send_bytes`."""
        batch: list[str] = []
        size = unsent = 0
        for text in (*map(json.dumps, items), None):
            if batch and (text is None or size + len(text) > _LIST_BODY):
                unsent += 0 if self.send_bytes(kind, f"[{','.join(batch)}]".encode()) else len(batch)
                batch, size = [], 0
            if text is not None:
                batch.append(text)
                size += len(text) + 1
        return unsent

    def send_bytes(self, kind: MessageKind, body: bytes) -> bool:
        """Send a message. False: the other end is closed, or too many suspects are pending.

        Raises ProtocolError for a body over 16 MiB, and sends nothing.
        """
        if len(body) > _MAX_BODY:
            raise ProtocolError(f"a message of {len(body)} bytes is too long; server and companion take {_MAX_BODY}")
        message = _HEADER.pack(len(body), kind) + body
        with self._send_lock:
            if self._blocking:
                try:
                    self.socket.sendall(message)
                except OSError:
                    return False
                return True
            # Other messages are bounded by the requests of the other end.
            if len(self._pending) > _MAX_PENDING and kind is MessageKind.SUSPECTS:
                return False
            self._pending += message
            return self._flush()

    def send_fds(self, kind: MessageKind, document: Any, fds: list[int]) -> None:
        """Send a message together with descriptors. OSError."""
        body = json.dumps(document).encode()
        with self._send_lock:
            socket.send_fds(self.socket, [_HEADER.pack(len(body), kind) + body], fds)

    def flush(self) -> bool:
        """Send pending messages as far as the socket takes them. False: the other end is closed."""
        with self._send_lock:
            return self._flush()

    def _flush(self) -> bool:
        try:
            while self._pending:
                del self._pending[: self.socket.send(self._pending, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def receive(self) -> list[Message]:
        """Read once without waiting, and return the messages that are complete.

        Raises EOFError if the other end is closed, ProtocolError if a process other than the peer has sent.
        """
        try:
            data, ancillary, _, _ = self.socket.recvmsg(1 << 16, _ANCILLARY, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError from error
        sender = None
        for _, kind, content in ancillary:
            if kind == socket.SCM_RIGHTS:
                self.fds.extend(_INT.unpack_from(content, offset)[0] for offset in range(0, len(content), 4))
            elif kind == socket.SCM_CREDENTIALS:
                sender = _INT.unpack_from(content)[0]
        if not data:
            raise EOFError
        if self._peer not in (None, sender):
            raise ProtocolError(f"process {sender} wrote to the channel of the companion, process {self._peer}")
        self._received += data
        return self._split()

    def _split(self) -> list[Message]:
        """Take the complete messages off what was received."""
        received, messages, offset = self._received, [], 0
        while len(received) - offset >= _HEADER.size:
            length, kind = _HEADER.unpack_from(received, offset)
            if length > _MAX_BODY:
                raise ProtocolError("a message between server and companion is too long")
            start = offset + _HEADER.size
            if start + length > len(received):
                break
            offset = start + length
            messages.append((MessageKind(kind), bytes(received[start:offset])))
        del received[:offset]
        return messages
