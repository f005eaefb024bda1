"""What the serving process and its companion say to each other: kinds of messages, framed on one socket pair.

The server never waits for its companion: what cannot be sent at once is kept, up to a limit, and sent later.
"""

from __future__ import annotations

import enum
import json
import socket
import struct
import threading
from typing import Any, Final

from bonobofs.errors import ProtocolError

_HEAD: Final = struct.Struct("=IB")
_MOST_WAITING: Final = 4 << 20
_LONGEST: Final = 64 << 20


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
    """From it: {"origin", "policy"}, a new policy."""
    BROKEN = 9
    """From it: {"origin", "error"}, a policy that cannot be enforced."""
    UNWATCHED = 10
    """From it: {"reason"}, the source cannot be watched any more."""
    LEASES = 12
    """From it: {"number", "until", "leases"}: what was seen of the leases, which is known until then."""
    BOUND = 13
    """To it: {"number"}: every change is bound by that from now on."""
    SETTLE = 11
    """To it: say what is still to be said, and then the same. Nothing follows."""


class Line:
    """One end of the socket pair."""

    def __init__(self, end: socket.socket, *, waits: bool) -> None:
        """`waits`: `send` blocks until the other end takes it."""
        self.socket: Final = end
        self._waits: Final = waits
        self._received = bytearray()
        self._waiting = bytearray()
        # The companion speaks from two threads.
        self._speaking: Final = threading.Lock()
        end.setblocking(waits)

    def fileno(self) -> int:
        return self.socket.fileno()

    def tell(self, kind: Kind, document: Any = None) -> bool:
        """Send a message whose body is JSON; see `send`."""
        return self.send(kind, b"" if document is None else json.dumps(document).encode())

    def send(self, kind: Kind, body: bytes) -> bool:
        """Send a message. False: the other end is gone, or takes nothing and too much waits for it already."""
        if len(self._waiting) > _MOST_WAITING:
            return False
        message = _HEAD.pack(len(body), kind) + body
        if self._waits:
            try:
                with self._speaking:
                    self.socket.sendall(message)
            except OSError:
                return False
            return True
        self._waiting += message
        return self.flush()

    def flush(self) -> bool:
        """Send what waits, as far as it is taken; False: the other end is gone."""
        try:
            while self._waiting:
                del self._waiting[: self.socket.send(self._waiting, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def receive(self) -> list[tuple[Kind, bytes]]:
        """The messages that have arrived whole, one read's worth. EOFError: the other end is gone."""
        try:
            data = self.socket.recv(1 << 18, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError as error:
            raise EOFError from error
        if not data:
            raise EOFError
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
