"""A FUSE server that answers each request at once from a table in memory, without source, policy and log.

No server in this interpreter is faster, so its time is the part of an operation that no server can save: the program,
the kernel, and the wake-up of the server and of the program. It knows only the requests of the workloads, and keeps
no content that is written.

Usage: floor.py SOURCE MOUNTPOINT polls|sleeps (it stays in the foreground). It reads SOURCE before it mounts. Between
requests it polls, or sleeps.
"""

from __future__ import annotations

import errno
import gc
import mmap
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
NOTHING = memoryview(b"")
LARGE = 1 << 20
NO_ENTRY = p.ENTRY_OUT.pack(0, 0, *FOREVER) + bytes(p.ATTR.size)


def content_of(path: bytes, size: int) -> memoryview:
    """The content of a file. A large one stays in the page cache."""
    with open(path, "rb") as file:
        if size < LARGE:
            return memoryview(file.read())
        return memoryview(mmap.mmap(file.fileno(), 0, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ))


class Floor:
    """The names, attributes and contents of the files by node id."""

    def __init__(self) -> None:
        self.attrs: dict[int, bytes] = {}
        self.kinds: dict[int, int] = {}
        self.names: dict[int, dict[bytes, int]] = {p.ROOT_ID: {}}
        self.contents: dict[int, memoryview] = {}
        self.last = p.ROOT_ID

    def load(self, node: int, directory: bytes) -> None:
        """Add the attributes of a directory as those of `node`, and all that is in the directory."""
        self.attrs[node] = p.pack_attr(os.stat(directory))
        for name in sorted(os.listdir(directory)):
            path = os.path.join(directory, name)
            status = os.lstat(path)
            self.add(node, name, status.st_mode, p.pack_attr(status))
            if stat.S_ISDIR(status.st_mode):
                self.load(self.last, path)
            elif stat.S_ISLNK(status.st_mode):
                self.contents[self.last] = memoryview(os.readlink(path))
            else:
                self.contents[self.last] = content_of(path, status.st_size)

    def read(self, node: int, body: memoryview) -> memoryview:
        _, offset, size, *_ = p.READ_IN.unpack_from(body)
        return self.contents.get(node, NOTHING)[offset : offset + size]

    def entry(self, node: int) -> bytes:
        return p.ENTRY_OUT.pack(node, 0, *FOREVER) + self.attrs[node]

    def create(self, form: Struct, index: int, kind: int, node: int, body: memoryview) -> bytes:
        """Serve a request with the structure `form`, whose value `index` is the mode."""
        return self.make(node, body[form.size :], form.unpack_from(body)[index] | kind)

    def make(self, parent: int, names: memoryview, mode: int) -> bytes:
        """Add an empty file, directory or symlink with the first of `names`."""
        owner = os.geteuid(), os.getegid()
        attr = p.ATTR.pack(self.last + 1, 0, 0, 1, 1, 1, 0, 0, 0, mode, 1, *owner, 0, 4096, 0)
        return self.add(parent, p.strings(names, 1)[0], mode, attr)

    def add(self, parent: int, name: bytes, mode: int, attr: bytes) -> bytes:
        self.last += 1
        self.attrs[self.last], self.kinds[self.last] = attr, mode >> 12
        self.names[parent][name] = self.last
        if stat.S_ISDIR(mode):
            self.names[self.last] = {}
        return self.entry(self.last)

    def list(self, node: int, body: memoryview) -> bytes:
        """The names of a directory from the requested index on, as READDIRPLUS returns them."""
        begin, size = p.READ_IN.unpack_from(body)[1:3]
        found, length = [], 0
        for at, (name, number) in enumerate(list(self.names[node].items())[begin:], begin + 1):
            entry = p.DIRENT.pack(number, at, len(name), self.kinds[number]) + name
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
        return p.ATTR_OUT.pack(FOREVER[0], 0, 0) + self.attrs[node]

    def rename(self, form: Struct, node: int, body: memoryview) -> bytes:
        old, new = p.strings(body[form.size :], 2)
        self.names[form.unpack_from(body)[0]][new] = self.names[node].pop(old)
        return b""

    def remove(self, node: int, body: memoryview) -> bytes:
        del self.names[node][p.strings(body, 1)[0]]
        return b""


def handlers(floor: Floor) -> dict[int, Callable[[int, memoryview], bytes | memoryview]]:
    o = p.Opcode
    create = partial(floor.create, p.CREATE_IN, 1, 0)
    return {
        o.LOOKUP: floor.look_up,
        o.GETATTR: floor.show,
        o.SETATTR: floor.show,
        o.CREATE: lambda node, body: create(node, body) + OPENED,
        o.MKDIR: partial(floor.create, p.MKDIR_IN, 0, stat.S_IFDIR),
        o.SYMLINK: lambda node, body: floor.make(node, body, stat.S_IFLNK | 0o777),
        o.READLINK: lambda node, _: floor.contents[node],
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
            os.writev(fd, [p.OUT_HEADER.pack(p.OUT_SIZE + len(reply), 0, unique), reply])


def main(source: str, mountpoint: str, between: str) -> None:
    floor = Floor()
    floor.load(p.ROOT_ID, os.fsencode(source))
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
