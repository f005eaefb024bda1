"""FIFOs, sockets and device nodes."""

from __future__ import annotations

import os
import socket
import stat

from tests.posix.harness import ANY, See, attempt, case
from tests.support.syscalls import ANNA, kind, links, make, mode, names, opened, opening, read


@case()
def test_fifo(see: See) -> None:
    """A FIFO carries bytes between processes, and none of them to disk."""
    see("mkfifo", None, os.mkfifo, "p.md", 0o640)
    see("kind", "p", kind, "p.md")
    see("mode", "0640", mode, "p.md")
    see("again", "EEXIST", os.mkfifo, "p.md")
    see("writing with no reader", "ENXIO", opening, "p.md", os.O_WRONLY | os.O_NONBLOCK)
    reader = os.open("p.md", os.O_RDONLY | os.O_NONBLOCK)
    if (child := os.fork()) == 0:
        with opened("p.md", os.O_WRONLY) as fd:
            os.write(fd, b"through")
        os._exit(0)
    os.waitpid(child, 0)
    see("read", b"through", os.read, reader, 100)
    see("end", b"", os.read, reader, 100)
    os.close(reader)
    see("size", 0, lambda: os.stat("p.md").st_size)
    see("rename", None, os.rename, "p.md", "q.md")
    see("link", None, os.link, "q.md", "r.md")
    see("links", 2, links, "r.md")
    with opened("q.md", os.O_RDWR) as fd, opened("r.md", os.O_RDONLY | os.O_NONBLOCK) as other:
        os.write(fd, b"one pipe")
        see("by its other name", b"one pipe", os.read, other, 100)
        os.unlink("q.md")
        os.unlink("r.md")
        os.write(fd, b"nameless")
        see("without a name", b"nameless", os.read, other, 100)
        see("fstat", True, lambda: stat.S_ISFIFO(os.fstat(fd).st_mode))
        see("its links", 0, links, fd)
    see("listed", [], names, see.at)


@case()
def test_fifo_errors(see: See) -> None:
    """Where a FIFO cannot be made."""
    make("a.md")
    see("onto a file", "EEXIST", os.mkfifo, "a.md")
    see("below a file", "ENOTDIR", os.mkfifo, "a.md/p.md")
    see("in a missing directory", "ENOENT", os.mkfifo, "x/p.md")
    os.mkfifo("p.md")
    see("seek", "ESPIPE", _seek)
    see("as a directory", "ENOTDIR", os.stat, "p.md/x")


def _seek() -> int:
    with opened("p.md", os.O_RDWR) as fd:
        return os.lseek(fd, 0, os.SEEK_SET)


@case()
def test_socket(see: See) -> None:
    """A socket that is bound to a name is found by it."""
    os.umask(0o077)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        see("bind", None, server.bind, "s.md")
        see("kind", "s", kind, "s.md")
        see("mode", "0700", mode, "s.md")
        see("before it listens", "ECONNREFUSED", client.connect, "s.md")
        server.listen()
        see("connect", None, client.connect, "s.md")
        peer, _ = server.accept()
        with peer:
            client.sendall(b"hello")
            see("receive", b"hello", peer.recv, 100)
            see("its name", "s.md", client.getpeername)
        with socket.socket(socket.AF_UNIX) as second:
            see("bind to a name that exists", "EADDRINUSE", second.bind, "s.md")
        see("open", "ENXIO", opening, "s.md", os.O_RDWR)
        os.rename("s.md", "t.md")
        with socket.socket(socket.AF_UNIX) as second:
            see("connect to the new name", None, second.connect, "t.md")
            see("the old name", "ENOENT", lambda: attempt(socket.socket(socket.AF_UNIX).connect, "s.md"))
    with socket.socket(socket.AF_UNIX) as late:
        see("after it closed", "ECONNREFUSED", late.connect, "t.md")
    see("unlink", None, os.unlink, "t.md")
    with socket.socket(socket.AF_UNIX) as late:
        see("after unlink", "ENOENT", late.connect, "t.md")
    make("a.md")
    with socket.socket(socket.AF_UNIX) as late:
        see("to a file", "ECONNREFUSED", late.connect, "a.md")


@case()
def test_datagrams(see: See) -> None:
    """Datagram sockets send to names too."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as two,
    ):
        one.bind("one.md")
        two.bind("two.md")
        see("send", 5, two.sendto, b"hello", "one.md")
        see("receive", (b"hello", "two.md"), one.recvfrom, 100)


@case()
def test_mknod(see: See) -> None:
    """mknod makes files, FIFOs and sockets for everybody."""
    see("a file", None, os.mknod, "a.md", stat.S_IFREG | 0o640)
    see("its kind and mode", ("-", "0640"), lambda: (kind("a.md"), mode("a.md")))
    see("write to it", 1, lambda: os.write(os.open("a.md", os.O_WRONLY), b"x"))
    see("read it", b"x", read, "a.md")
    see("without a kind", None, os.mknod, "b.md", 0o600)
    see("is a file", "-", kind, "b.md")
    see("a fifo", None, os.mknod, "p.md", stat.S_IFIFO | 0o600)
    see("is a fifo", "p", kind, "p.md")
    see("a socket", None, os.mknod, "s.md", stat.S_IFSOCK | 0o600)
    see("is a socket", "s", kind, "s.md")
    see("a directory", "EPERM", os.mknod, "d", stat.S_IFDIR | 0o700)
    see("again", "EEXIST", os.mknod, "a.md", stat.S_IFREG | 0o600)
    see("listed", ["a.md", "b.md", "p.md", "s.md"], names, see.at)


@case(root=True)
def test_devices(see: See) -> None:
    """root makes device nodes, and they work."""
    see("character", None, os.mknod, "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    see("block", None, os.mknod, "loop", stat.S_IFBLK | 0o600, os.makedev(7, 4000))
    see("large numbers", None, os.mknod, "large", stat.S_IFCHR | 0o600, os.makedev(4000, 900_000))
    see("kinds", ["c", "b", "c"], lambda: [kind("null"), kind("loop"), kind("large")])
    see("modes", ["0644", "0600", "0600"], lambda: [mode("null"), mode("loop"), mode("large")])
    see("number", (1, 3), _number, "null")
    see("block's number", (7, 4000), _number, "loop")
    see("large number", (4000, 900_000), _number, "large")
    see("write", 5, lambda: os.write(os.open("null", os.O_WRONLY), b"12345"))
    see("read", b"", lambda: os.read(os.open("null", os.O_RDONLY), 10))
    see("rename", None, os.rename, "null", "nil")
    see("chmod", None, os.chmod, "nil", 0o600)
    see("its mode", "0600", mode, "nil")
    see("chown", None, os.chown, "nil", 1, 2)
    see("link", None, os.link, "nil", "nihil")
    see("unlink", None, os.unlink, "nil")
    see("under its other name", (1, 3), _number, "nihil")
    see("no such device", ANY, opening, "large")


def _number(name: str) -> tuple[int, int]:
    device = os.lstat(name).st_rdev
    return os.major(device), os.minor(device)


@case(root=True)
def test_devices_of_others(see: See) -> None:
    """Others make FIFOs and sockets, and no devices."""
    os.mkdir("d")
    os.chmod("d", 0o777)
    d = see.at / "d"
    see("a character device", "EPERM", os.mknod, d / "c", stat.S_IFCHR | 0o600, os.makedev(1, 3), by=ANNA)
    see("a block device", "EPERM", os.mknod, d / "b", stat.S_IFBLK | 0o600, os.makedev(7, 0), by=ANNA)
    see("a fifo", None, os.mknod, d / "p.md", stat.S_IFIFO | 0o600, by=ANNA)
    see("a socket", None, os.mknod, d / "s.md", stat.S_IFSOCK | 0o600, by=ANNA)
    see("a file", None, os.mknod, d / "a.md", stat.S_IFREG | 0o600, by=ANNA)
    see("listed", ["a.md", "p.md", "s.md"], names, d)
