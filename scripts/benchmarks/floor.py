"""A FUSE server that answers each request at once from a table in memory, without source, policy and log.

No server in this interpreter is faster, so its time is the part of an operation that no server can save: the program,
the kernel, and the wake-up of the server and of the program. It knows only the requests of the rows of the breakdown.

Usage: floor.py SOURCE MOUNTPOINT polls|sleeps (it stays in the foreground). It reads `tree` and `out` of SOURCE before
it mounts. Between requests it polls, or sleeps.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from struct import Struct

from bonobofs.fuse import abi as p
from bonobofs.fuse.cpu_latency import CpuLatency
from bonobofs.fuse.kernel_transport import KernelTransport, mount

FOREVER = (86_400, 86_400, 0, 0)
OPENED = p.OPEN_OUT.pack(0, p.OPEN_KEEP_CACHE | p.OPEN_NOFLUSH, 0)
NO_ENTRY = p.ENTRY_OUT.pack(0, 0, *FOREVER) + bytes(p.ATTR.size)


class Floor:
    """The names, modes and contents of the files by node id."""

    def __init__(self) -> None:
        self.modes = {p.ROOT_ID: stat.S_IFDIR | 0o755}
        self.names: dict[int, dict[bytes, int]] = {p.ROOT_ID: {}}
        self.contents: dict[int, bytes] = {}
        self.last = p.ROOT_ID

    def load(self, node: int, directory: bytes) -> None:
        """Add the files below `directory`, except symlinks."""
        for name in sorted(os.listdir(directory)):
            path = os.path.join(directory, name)
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                continue
            self.add(node, name, mode)
            number = self.last
            if stat.S_ISDIR(mode):
                self.load(number, path)
            else:
                with open(path, "rb") as file:
                    self.contents[number] = file.read()

    def read(self, node: int, body: memoryview) -> bytes:
        _, offset, size, *_ = p.READ_IN.unpack_from(body)
        return self.contents.get(node, b"")[offset : offset + size]

    def attr(self, node: int) -> bytes:
        size, owner = len(self.contents.get(node, b"")), (os.geteuid(), os.getegid())
        return p.ATTR.pack(node, size, 0, 1, 1, 1, 0, 0, 0, self.modes[node], 1, *owner, 0, 4096, 0)

    def entry(self, node: int) -> bytes:
        return p.ENTRY_OUT.pack(node, 0, *FOREVER) + self.attr(node)

    def create(self, form: Struct, index: int, kind: int, node: int, body: memoryview) -> bytes:
        """Serve a request with the structure `form`, whose value `index` is the mode."""
        (name,) = p.strings(body[form.size :], 1)
        return self.add(node, name, form.unpack_from(body)[index] | kind)

    def add(self, parent: int, name: bytes, mode: int) -> bytes:
        self.last += 1
        self.modes[self.last] = mode
        self.names[parent][name] = self.last
        if stat.S_ISDIR(mode):
            self.names[self.last] = {}
        return self.entry(self.last)

    def list(self, node: int, body: memoryview) -> bytes:
        """The names of a directory from the requested index on, as READDIRPLUS returns them."""
        begin, size = p.READ_IN.unpack_from(body)[1:3]
        found, length = [], 0
        for at, (name, number) in enumerate(list(self.names[node].items())[begin:], begin + 1):
            entry = p.DIRENT.pack(number, at, len(name), self.modes[number] >> 12) + name
            entry = self.entry(number) + entry + bytes(-len(entry) % 8)
            length += len(entry)
            if length > size:
                break
            found.append(entry)
        return b"".join(found)

    def look_up(self, node: int, body: memoryview) -> bytes:
        number = self.names[node].get(p.strings(body, 1)[0])
        return NO_ENTRY if number is None else self.entry(number)

    def show(self, node: int, _: memoryview) -> bytes:
        return p.ATTR_OUT.pack(FOREVER[0], 0, 0) + self.attr(node)

    def rename(self, form: Struct, node: int, body: memoryview) -> bytes:
        old, new = p.strings(body[form.size :], 2)
        self.names[form.unpack_from(body)[0]][new] = self.names[node].pop(old)
        return b""

    def remove(self, node: int, body: memoryview) -> bytes:
        del self.names[node][p.strings(body, 1)[0]]
        return b""


def handlers(floor: Floor) -> dict[int, Callable[[int, memoryview], bytes]]:
    o = p.Opcode
    create = partial(floor.create, p.CREATE_IN, 1, 0)
    return {
        o.LOOKUP: floor.look_up,
        o.GETATTR: floor.show,
        o.SETATTR: floor.show,
        o.CREATE: lambda node, body: create(node, body) + OPENED,
        o.MKDIR: partial(floor.create, p.MKDIR_IN, 0, stat.S_IFDIR),
        o.SYMLINK: lambda node, body: floor.add(node, p.strings(body, 1)[0], stat.S_IFLNK | 0o777),
        o.READ: floor.read,
        o.WRITE: lambda _, body: p.WRITE_OUT.pack(p.WRITE_IN.unpack_from(body)[2], 0),
        o.RENAME: partial(floor.rename, p.RENAME_IN),
        o.RENAME2: partial(floor.rename, p.RENAME2_IN),
        o.UNLINK: floor.remove,
        o.RMDIR: floor.remove,
        o.READDIRPLUS: floor.list,
    }


def serve(fd: int, poll: select.poll, wait: int | None, floor: Floor) -> None:
    """Answer until the mount ends. `wait`: milliseconds of each poll; None: until there is a request."""
    buffer = bytearray(p.BUFFER_SIZE)
    buffers, view = [buffer], memoryview(buffer)
    known = handlers(floor)
    silent = [opcode for opcode, role in p.ROLES.items() if role is p.RequestEffect.SILENT]
    while True:
        while not poll.poll(wait):
            continue
        try:
            length = os.readv(fd, buffers)
        except OSError as error:
            if error.errno == errno.ENODEV:
                return
            continue
        _, opcode, unique, node, *_ = p.IN_HEADER.unpack_from(buffer)
        if opcode in silent:
            continue
        handler = known.get(opcode)
        if handler is None:
            error = errno.ENODATA if opcode == p.Opcode.GETXATTR else errno.ENOSYS
            os.write(fd, p.OUT_HEADER.pack(p.OUT_SIZE, -error, unique))
        else:
            reply = handler(node, view[p.IN_SIZE : length])
            os.write(fd, p.OUT_HEADER.pack(p.OUT_SIZE + len(reply), 0, unique) + reply)


def main(source: str, mountpoint: str, between: str) -> None:
    floor = Floor()
    for name in (b"tree", b"out"):
        floor.add(p.ROOT_ID, name, stat.S_IFDIR | 0o755)
        floor.load(floor.last, os.path.join(os.fsencode(source), name))
    gc.freeze()
    gc.disable()
    fd = mount(source, mountpoint, os.open(source, os.O_RDONLY), allow_other=False, devices=False)
    transport = KernelTransport(fd)
    transport.handshake(watched=True)
    latency = CpuLatency()
    latency.disallow_halt()
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    serve(fd, poll, 0 if between == "polls" else None, floor)
    latency.close()
    transport.close()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main(*sys.argv[1:])
