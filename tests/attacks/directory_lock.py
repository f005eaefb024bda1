"""A program that keeps the lock of a directory: getdents64 into a page of a FUSE file that is never read.

    with locked_directory(directory, place): ...
    hold(directory, place)

A server of the program's own answers all but READ, in a child process; another child calls getdents64. The end of the
block aborts the connection of that server, so that both children can end. After `hold` they end when their process
group is killed; `hold` needs no root.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NoReturn

from bonobofs.fuse import abi as p
from bonobofs.system import syscalls

_ATTR: Final = p.ATTR.pack(2, 4096, 8, 0, 0, 0, 0, 0, 0, 0o100666, 1, 0, 0, 0, 4096, 0)
_TOP: Final = p.ATTR.pack(1, 4096, 8, 0, 0, 0, 0, 0, 0, 0o040777, 2, 0, 0, 0, 4096, 0)
_FILE: Final = 2
_SYS_GETDENTS64: Final = 217
_MNT_FORCE: Final = 1


def _serve(fd: int, asked: int) -> NoReturn:
    """Answer the requests that map a file. At the first READ write to the pipe `asked`."""
    while True:
        try:
            request = os.read(fd, p.BUFFER_SIZE)
        except OSError:
            os._exit(0)
        opcode, unique = p.IN_HEADER.unpack_from(request)[1:3]
        body, error = b"", 0
        if opcode == p.Opcode.READ:
            os.write(asked, b"!")
            continue
        if opcode == p.Opcode.INIT:
            body = p.INIT_OUT.pack(7, 31, 65536, 0, 12, 9, p.MAX_WRITE, 1, 0, 0, 0, 0)
        elif opcode == p.Opcode.LOOKUP:
            body = p.ENTRY_OUT.pack(_FILE, 0, 3600, 3600, 0, 0) + _ATTR
        elif opcode == p.Opcode.GETATTR:
            body = p.ATTR_OUT.pack(3600, 0, 0) + (_ATTR if p.IN_HEADER.unpack_from(request)[3] == _FILE else _TOP)
        elif opcode in (p.Opcode.OPEN, p.Opcode.OPENDIR):
            body = p.OPEN_OUT.pack(1, 0, 0)
        elif opcode in (p.Opcode.FORGET, p.Opcode.BATCH_FORGET, p.Opcode.INTERRUPT):
            continue
        else:
            error = -errno.ENOSYS
        os.write(fd, p.OUT_HEADER.pack(p.OUT_SIZE + len(body), error, unique) + body)


def _read_directory(directory: Path, file: Path) -> NoReturn:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    with open(file, "r+b") as stream, mmap.mmap(stream.fileno(), 4096) as page:
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        libc = ctypes.CDLL(None, use_errno=True)
        libc.syscall(_SYS_GETDENTS64, fd, ctypes.c_void_p(address), 4096)
        os._exit(0)


def hold(directory: Path, place: Path) -> None:
    """Return when the kernel has locked the directory. An earlier mount at `place` is replaced."""
    subprocess.run(["fusermount3", "-u", "-z", "--", place], stderr=subprocess.DEVNULL, check=False)
    end, other = socket.socketpair()
    with end, other:
        command = ["fusermount3", "-o", "fsname=blocker", "--", str(place)]
        environment = {**os.environ, "_FUSE_COMMFD": str(other.fileno())}
        subprocess.run(command, env=environment, pass_fds=[other.fileno()], check=True)
        fd = socket.recv_fds(end, 1, 1)[1][0]
    reader, writer = os.pipe()
    if os.fork() == 0:
        _serve(fd, writer)
    if os.fork() == 0:
        os.close(fd)  # the connection ends with the last descriptor
        _read_directory(directory, place / "file")
    os.close(fd)
    os.close(writer)
    assert os.read(reader, 1) == b"!"
    os.close(reader)


@contextmanager
def locked_directory(directory: Path, place: Path) -> Iterator[None]:
    """Keep the directory locked; `place` is an empty directory for the program's own mount. Needs root."""
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    syscalls.mount(b"blocker", os.fsencode(place), b"fuse", 0, b"fd=%d,rootmode=40000,user_id=0,group_id=0" % fd)
    reader, writer = os.pipe()
    children: list[int] = []
    try:
        for number in range(2):
            child = os.fork()
            if child == 0:
                try:
                    signal.alarm(60)
                    if number == 0:
                        _serve(fd, writer)
                    os.close(fd)  # the connection ends with the last descriptor
                    _read_directory(directory, place / "file")
                finally:
                    os._exit(1)
            children.append(child)
        os.close(writer)
        assert os.read(reader, 1) == b"!"
        yield
    finally:
        syscalls.umount(os.fsencode(place), _MNT_FORCE | syscalls.MNT_DETACH)  # aborts the connection
        os.close(fd)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(reader)
