"""The socket pair between server and companion: the kinds of messages, their frames, and descriptors.

The server never waits for its companion. It keeps what the socket does not take at once, up to a limit.
"""

from __future__ import annotations

import enum
import json
import socket
import struct
import threading
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from bonobofs.errors import ProtocolError


@enum.unique
class MessageKind(enum.IntEnum):
    """The number of a message in its header. The body is JSON unless its comment says otherwise."""

    # server to companion
    CONFIG = 1
    """`CompanionConfig`; the first message."""
    SUSPECTS = 5
    """[[path, kinds, size, is protected], …]: changes that did not come through this mount."""
    RELOAD = 7
    """Load the policy again, even if it is unchanged. No body."""
    FLUSH = 11
    """Send all pending messages, then send FLUSH back. No body."""
    LEASES_APPLIED = 13
    """{"number"}: every change is judged by that lease snapshot from now on."""
    ASKED = 19
    """{"question", "path", "operation", "rule", "count", "tool", "details"}: a change waits for an answer."""
    ANSWERS_APPLIED = 34
    """{"number", "live"}: the last answer that the server knows, and the numbers of those in force."""
    POLICY_APPLIED = 15
    """{"policy", "generation"}: the server judges by this policy from now on."""
    CLOSE_SOCKET = 16
    """Accept no more calls. No body."""
    STORE_FULL = 17
    """{"size"}: the store of pre-images has no room for a file of this size; make room, then send STORE_SIZE."""
    REPLY = 27
    """{"id", …}: the answer to a request; "failed" (trail error) or "error" (server error) on failure."""

    # companion to server
    STATUS = 2
    """`CompanionStatus`; sent once. Descriptors of its namespaces may come with it."""
    CHANGED = 3
    """Directories and names that changed, as `system.watcher_events` encodes them. Bytes."""
    CHANGES_LOST = 4
    """The watcher lost events. No body."""
    OUT_OF_BAND = 6
    """[{"path", "what", "protected", …}, …]: suspects that no session recorded."""
    POLICY = 8
    """{"origin", "policy", "tracked", "file"}: a new policy.

    "tracked" lists the paths that git tracks below its [[scratch]]; "file" is {"owner", "modified"} of the policy file.
    """
    POLICY_ERROR = 9
    """{"origin", "error"}: the policy file holds no valid policy."""
    WATCH = 10
    """{"reason", "part"}: why the source, or only a part of it, is not watched; "reason" is "" if all is watched."""
    LEASES = 12
    """{"number", "until", "leases"}: a lease snapshot and its expiry by CLOCK_BOOTTIME; null leases: unchanged."""
    ANSWERS = 35
    """{"number", "answers"}: every answer of the operator that is not revoked, and the number of the last change."""
    STORE_SIZE = 18
    """{"size"}: bytes of the pre-images of all sessions of the state directory."""
    LEASES_ERROR = 14
    """{"reason"}: why the leases cannot be read."""

    # requests of the companion, each with an "id" that REPLY repeats; a question is what `codec.encode_request` makes
    DECIDE = 20
    """{"question"}: the decision on a change of the source. Without a question, the reply is {"generation", "leases",
    "answers"}: the policy, leases and answers (session and list) by which the server judges now."""
    AUTHORIZE = 21
    """{"question", "related"} and the fields of `ChangeRecord`; a permitted change is in flight until ENDED. With
    "generation", the companion has judged the related changes, which "answers" permit; the reply is "stale" if the
    server has a newer one."""
    ENDED = 22
    """{"admission", "error", "reason", "written", "details"}: the outcome of a change. The reply comes when the mount
    shows it."""
    DENY = 23
    """A denial, "caller" and "guard": record it."""
    RECORD_CALL = 24
    """{"question"} and the fields of `CallRecord`: record a call that changes nothing."""
    EVENT = 25
    """{"operation", "details"}: record an event of the session."""
    TURN = 33
    """{"name", "by"}: begin a turn. The reply has its number as "turn"."""
    BARRIER = 28
    """The reply comes when the mount shows every earlier change, whatever process made it."""
    DECIDE_EACH = 30
    """{"questions"}: the reply's "denied" has the number and the denial of each question that the mount refuses."""
    EXPLAIN = 29
    """The fields of `PlannedChange`: the reply is the decision of the mount, and the "operation"."""
    GRANT = 31
    """{"grant", "buffer", "at", "size"} and a descriptor: published files that git may take in (`git_grants`).

    "buffer" is the inode number of the file behind the descriptor."""
    LIST_IMAGES = 36
    """The reply has as "in_use" the numbers of the pre-images that are files which the kernel still knows. The server
    begins another pack."""
    REVOKE = 32
    """{"grant"}: the command has ended. The reply has the paths that it has "taken" in."""


class CompanionStatus(NamedTuple):
    """The state of a companion after its start."""

    watch: str
    """Why the source is not watched; "" if it is."""
    refused: str = ""
    """Why the mount must not be made; "" if it may."""
    has_namespace: bool = False
    """The companion is in a mount namespace in which the mount does not cover the source."""
    part: bool = False
    """`watch` concerns a part of the source; the rest is watched."""


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
