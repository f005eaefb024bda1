"""What the serving process and its companion say to each other: kinds of messages, framed on one socket pair.

The server never waits for its companion: what cannot be sent at once is kept, up to a limit, and sent later.
"""

from __future__ import annotations

import enum
import json
import socket
import struct
import threading
from collections.abc import Iterable
from typing import Any, Final

from bonobofs.errors import ProtocolError

_HEAD: Final = struct.Struct("=IB")
_MOST_WAITING: Final = 32 << 20
_LONGEST: Final = 16 << 20
"""Bytes of a message without its head. `send` refuses a longer one, so that the other end never has to."""
_PIECE: Final = 1 << 20
"""Bytes of a message that carries a part of a list; more only where one item is longer."""
_MOST_HANDED: Final = 4
_NUMBERS: Final = struct.Struct("=i")
_ANCILLARY: Final = socket.CMSG_SPACE(4 * _MOST_HANDED) + socket.CMSG_SPACE(12)
"""Bytes for the descriptors, and for the credentials (pid, uid, gid) of the sender."""


class Kind(enum.IntEnum):
    """What a message says. JSON unless it is said otherwise."""

    BEGIN = 1
    """To the companion, once: its configuration."""
    STANDING = 2
    """From it, once: {"watch": "" or why the source is not watched, "refused": "" or why nothing may be mounted}."""
    CHANGED = 3
    """From it: names below which something changed, as `noticing` reads them. Bytes."""
    LOST = 4
    """From it: changes were lost. Nothing follows."""
    SUSPECTS = 5
    """To it: what was changed, and not through this mount: [[path, what is there], …]."""
    OUT_OF_BAND = 6
    """From it: those of them that nobody admitted: [{"path", "what", …}, …]."""
    RELOAD = 7
    """To it: load the policy, changed or not. Nothing follows."""
    POLICY = 8
    """From it: {"origin", "policy", "tracked", "file"}, a new policy.

    "tracked" lists the paths that git tracks below its [[scratch]]; "file" is {"owner", "modified"} of the policy file.
    """
    BROKEN = 9
    """From it: {"origin", "error"}, a policy that cannot be enforced."""
    UNWATCHED = 10
    """From it: {"reason", "part"}, why the source, or only a part of it, is not watched; "reason" is "" if all is."""
    LEASES = 12
    """From it: {"number", "until", "leases"}: what was seen of the leases, which is known until then."""
    BOUND = 13
    """To it: {"number"}: every change is bound by that from now on."""
    SETTLE = 11
    """To it: say what is still to be said, and then the same. Nothing follows."""
    UNKNOWN = 14
    """From it: {"reason"}, why the leases cannot be read."""
    IN_FORCE = 15
    """To it: {"policy", "generation"}, the policy by which the door judges from now on."""
    CLOSING = 16
    """To it: take no more calls. Nothing follows."""

    # From it, each with its number as "ask": what an entrance asks of the door. `asked` has the forms.
    DECIDE = 20
    """{"question"}; with "in_mount", as the mount itself is answered, which can hold names apart. Without a question,
    the answer is {"generation", "leases"}: by which policy and leases the server judges now."""
    ADMIT = 21
    """{"question", "parts", "caller", "details", "size", "action", "guard"}; allowed, it is under way until ENDED.
    With "generation", whose parts the companion has judged by it: "stale" if the server judges by another one."""
    ENDED = 22
    """{"admission", "error", "written", "details"}: the change of that number has been made, or not. It is answered
    when the mount shows it."""
    REFUSE = 23
    """{"denied", "caller", "guard"}."""
    NOTE = 24
    """{"question", "caller", "details", "size", "error", "guard"}."""
    EVENT = 25
    """{"operation", "details"}: something that happened to the session."""
    SYNC = 26
    """Bring the record to the disk."""
    SHOW = 28
    """{}: it is answered when the mount shows all that was changed before it was asked, by whomever."""
    DECIDE_EACH = 30
    """{"questions"}: "denied" has the number and the refusal of each that the mount refuses."""
    GRANT = 31
    """{"grant", "stage", "at", "size"}, and a descriptor: published files that a git command may take in (`grants`).

    "stage" is the inode number of the file that comes with it."""
    WITHDRAW = 32
    """{"grant"}: the command has ended. The answer has the paths that it has "taken" in."""
    ANSWER = 27
    """To it: {"ask"}, and "allowed", "denied", "failed" (the trail) or "error" (the server) with what is to be said."""


class Line:
    """One end of the socket pair."""

    def __init__(self, end: socket.socket, *, waits: bool, peer: int | None = None) -> None:
        """`waits`: `send` blocks until the other end takes it. `peer`: the pid from which alone messages are taken."""
        self.socket: Final = end
        self._waits: Final = waits
        self._received = bytearray()
        self._waiting = bytearray()
        self.descriptors: Final[list[int]] = []
        """What the other end has handed over, to be closed by whoever takes it."""
        # Several threads send.
        self._speaking: Final = threading.Lock()
        self._peer: Final = peer
        if peer is not None:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        end.setblocking(waits)

    def fileno(self) -> int:
        return self.socket.fileno()

    def tell(self, kind: Kind, document: Any = None) -> bool:
        """Send a message whose body is JSON; see `send`."""
        return self.send(kind, b"" if document is None else json.dumps(document).encode())

    def tell_list(self, kind: Kind, items: Iterable[Any]) -> int:
        """Send a list in messages of at most 1 MiB each, and return how many items were not sent; see `send`."""
        piece: list[str] = []
        size = unsent = 0
        for text in (*map(json.dumps, items), None):
            if piece and (text is None or size + len(text) > _PIECE):
                unsent += 0 if self.send(kind, f"[{','.join(piece)}]".encode()) else len(piece)
                piece, size = [], 0
            if text is not None:
                piece.append(text)
                size += len(text) + 1
        return unsent

    def send(self, kind: Kind, body: bytes) -> bool:
        """Send a message. False: the other end is gone, or takes nothing and too many suspects wait for it already.

        ProtocolError: the message is longer than the other end takes; nothing was sent.
        """
        if len(body) > _LONGEST:
            raise ProtocolError(f"a message of {len(body)} bytes is too long; server and companion take {_LONGEST}")
        message = _HEAD.pack(len(body), kind) + body
        with self._speaking:
            if self._waits:
                try:
                    self.socket.sendall(message)
                except OSError:
                    return False
                return True
            if len(self._waiting) > _MOST_WAITING and kind is Kind.SUSPECTS:
                return False  # of all else there is no more than the other end has asked for
            self._waiting += message
            return self._flush()

    def hand_over(self, kind: Kind, document: Any, descriptors: list[int]) -> None:
        """Send a message, and descriptors with it. OSError."""
        body = json.dumps(document).encode()
        with self._speaking:
            socket.send_fds(self.socket, [_HEAD.pack(len(body), kind) + body], descriptors)

    def flush(self) -> bool:
        """Send what waits, as far as it is taken; False: the other end is gone."""
        with self._speaking:
            return self._flush()

    def _flush(self) -> bool:
        try:
            while self._waiting:
                del self._waiting[: self.socket.send(self._waiting, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def receive(self) -> list[tuple[Kind, bytes]]:
        """The messages that have arrived whole, one read's worth.

        Raises EOFError if the other end is gone, ProtocolError if a process other than the peer has sent.
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
                self.descriptors.extend(_NUMBERS.unpack_from(content, at)[0] for at in range(0, len(content), 4))
            elif kind == socket.SCM_CREDENTIALS:
                sender = _NUMBERS.unpack_from(content)[0]
        if not data:
            raise EOFError
        if self._peer not in (None, sender):
            raise ProtocolError(f"process {sender} wrote to the channel of the companion, process {self._peer}")
        received = self._received
        received += data
        found = []
        at = 0
        while len(received) - at >= _HEAD.size:
            length, kind = _HEAD.unpack_from(received, at)
            if length > _LONGEST:
                raise ProtocolError("a message between server and companion is too long")
            end = at + _HEAD.size + length
            if end > len(received):
                break
            found.append((Kind(kind), bytes(received[at + _HEAD.size : end])))
            at = end
        del received[:at]
        return found
