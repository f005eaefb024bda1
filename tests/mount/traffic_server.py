"""A server that records the kernel's requests and its own calls of fsync: `python -m tests.mount.traffic_server NOTES`.

It is the real server in a process of its own, with its configuration on standard input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from bonobofs.fuse import abi as p
from bonobofs.fuse import main as process
from bonobofs.fuse import server
from bonobofs.fuse.kernel_transport import KernelTransport
from bonobofs.fuse.mount_context import Handler


class _Noted(KernelTransport):
    """A connection that writes down each request before it is served."""

    notes = -1

    def handshake(self, *, watched: bool) -> None:
        super().handshake(watched=watched)
        _note(flags=int(self.flags))

    def _handle(self, length: int, handlers: dict[int, Handler], failed: Callable[[int, Exception], None]) -> None:
        _, opcode, unique, node, uid, gid, pid, extensions, _ = p.IN_HEADER.unpack_from(self._buffer)
        _note(
            opcode=p.Opcode(opcode).name,
            unique=unique,
            node=node,
            size=length - p.IN_SIZE,
            uid=uid,
            gid=gid,
            pid=pid,
            extensions=extensions,
        )
        super()._handle(length, handlers, failed)

    def invalidate(self, node_id: int, offset: int, length: int) -> None:
        _note(notice="inode", node=node_id)
        super().invalidate(node_id, offset, length)

    def invalidate_entry(self, parent_id: int, name: bytes) -> None:
        _note(notice="entry", node=parent_id, name=os.fsdecode(name))
        super().invalidate_entry(parent_id, name)

    def invalidate_names(self) -> bool:
        _note(notice="names")
        return super().invalidate_names()

    def _error(self, unique: int, code: int) -> None:
        _note(refused=unique, error=code)
        super()._error(unique, code)


def _note(**what: Any) -> None:
    os.write(_Noted.notes, json.dumps(what).encode() + b"\n")


def _noted(call: Callable[[int], None]) -> Callable[[int], None]:
    def noted(fd: int) -> None:
        _note(disk=call.__name__, path=os.readlink(f"/proc/self/fd/{fd}"))
        call(fd)

    return noted


def main(notes: str) -> int:
    """Serve, noting everything in the file `notes`."""
    _Noted.notes = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    vars(server)["KernelTransport"] = _Noted
    os.fsync = _noted(os.fsync)  # type: ignore[assignment] # descriptors are all that the server gives it
    os.fdatasync = _noted(os.fdatasync)  # type: ignore[assignment] # as above
    return process.main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
