"""A server that records the kernel's requests and its own calls of fsync: `python -m tests.mount.traffic_server NOTES`.

It is the real server in a process of its own, with its configuration on standard input. What it reads from and writes
to the connection is recorded. A subclass of the transport would exclude the compiled build.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from bonobofs.fuse import abi as p
from bonobofs.fuse import main as process

_write, _readv = os.write, os.readv
_notes = -1


@cache
def _is_connection(fd: int) -> bool:
    """The first use of a number decides: the server keeps its connection to the end."""
    return os.readlink(f"/proc/self/fd/{fd}") == "/dev/fuse"


def _note(**what: Any) -> None:
    _write(_notes, json.dumps(what).encode() + b"\n")


def _noted(call: Callable[[int], None]) -> Callable[[int], None]:
    def noted(fd: int) -> None:
        _note(disk=call.__name__, path=os.readlink(f"/proc/self/fd/{fd}"))
        call(fd)

    return noted


def _read_request(fd: int, buffers: list[bytearray]) -> int:
    length = _readv(fd, buffers)
    if length >= p.IN_SIZE and _is_connection(fd):
        _, opcode, unique, node, uid, gid, pid, extensions, _ = p.IN_HEADER.unpack_from(buffers[0])
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
    return length


def _write_reply(fd: int, data: bytes) -> int:
    """Note an error, a notification or the flags of INIT before the kernel has it."""
    if len(data) >= p.OUT_SIZE and _is_connection(fd):
        _, error, unique = p.OUT_HEADER.unpack_from(data)
        if unique and error:
            _note(refused=unique, error=-error)
        elif error == p.NOTIFY_INVAL_INODE:
            _note(notice="inode", node=p.INVAL_INODE_OUT.unpack_from(data, p.OUT_SIZE)[0])
        elif error == p.NOTIFY_INVAL_ENTRY:
            parent, size, _ = p.INVAL_ENTRY_OUT.unpack_from(data, p.OUT_SIZE)
            begin = p.OUT_SIZE + p.INVAL_ENTRY_OUT.size
            _note(notice="entry", node=parent, name=os.fsdecode(data[begin : begin + size]))
        elif error == p.NOTIFY_INC_EPOCH:
            _note(notice="names")
        elif unique and len(data) == p.OUT_SIZE + p.INIT_OUT.size:
            _, _, _, flags, *_, more, _ = p.INIT_OUT.unpack_from(data, p.OUT_SIZE)
            _note(flags=flags | more << 32)
    return _write(fd, data)


def main(notes: str) -> int:
    """Serve, noting everything in the file `notes`."""
    global _notes  # noqa: PLW0603 - one server for each process
    _notes = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.readv = _read_request  # type: ignore[assignment] # only the server's calls need to fit
    os.write = _write_reply  # type: ignore[assignment] # as above
    os.fsync = _noted(os.fsync)  # type: ignore[assignment] # descriptors are all that the server gives it
    os.fdatasync = _noted(os.fdatasync)  # type: ignore[assignment] # as above
    return process.main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
