"""Escapes from the sandbox that are safe to try on any host, as a program: `doctor` runs it in the sandbox.

It imports the standard library alone. Files of /proc/sys are opened and never written, and no packet is sent.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import socket
import sys
from collections.abc import Callable, Sequence

_libc = ctypes.CDLL(None, use_errno=True)
_COLUMN = 1 if platform.machine() == "aarch64" else 0


def _call(x86_64: int, aarch64: int, *arguments: object) -> Callable[[], int]:
    number = (x86_64, aarch64)[_COLUMN]
    return lambda: 0 if _libc.syscall(number, *arguments) >= 0 else ctypes.get_errno()


def _open(path: str, flags: int = os.O_RDONLY) -> Callable[[], int]:
    return lambda: _error_of(lambda: os.close(os.open(path, flags | os.O_CLOEXEC)))


def _socket(family: int, kind: int, protocol: int = 0) -> Callable[[], int]:
    return lambda: _error_of(lambda: socket.socket(family, kind, protocol).close())


def _error_of(function: Callable[[], None]) -> int:
    try:
        function()
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _signals_a_process_outside() -> int:
    outside = [name for name in os.listdir("/proc") if name.isdigit() and int(name) > 64]
    return 0 if outside else errno.ESRCH


_ABSENT = (errno.ENOENT, errno.EACCES, errno.EROFS, errno.ESRCH, errno.ECONNREFUSED, errno.ENETUNREACH, errno.EPERM)
_ATTEMPTS: dict[str, tuple[tuple[str, Callable[[], int], Sequence[int]], ...]] = {
    "namespaces": (
        ("read /etc/shadow", _open("/etc/shadow"), (errno.ENOENT,)),
        ("list /root", _open("/root"), (errno.ENOENT,)),
        ("look at /sys", _open("/sys"), (errno.ENOENT,)),
        ("open /dev/fuse", _open("/dev/fuse", os.O_RDWR), (errno.ENOENT,)),
        ("write /usr", _open("/usr/bonobofs-probe", os.O_WRONLY | os.O_CREAT), _ABSENT),
        ("see processes outside", _signals_a_process_outside, (errno.ESRCH,)),
        ("bind port 80", lambda: _error_of(lambda: socket.socket().bind(("127.0.0.1", 80))), (errno.EACCES,)),
    ),
    "Landlock": (
        ("open core_pattern for writing", _open("/proc/sys/kernel/core_pattern", os.O_WRONLY), (errno.EACCES,)),
        ("trace process 1", _call(101, 117, 0x4206, 1, 0, 0), (errno.EPERM,)),
        ("read the root of process 1", _open("/proc/1/root/etc/passwd"), (errno.EACCES,)),
    ),
    "seccomp": (
        ("make a user namespace", _call(272, 97, 0x10000000), (errno.EPERM,)),
        ("mount", _call(165, 40, b"none", b"/tmp", b"tmpfs", 0, None), (errno.EPERM,)),
        ("open a vsock", _socket(40, socket.SOCK_STREAM), (errno.EAFNOSUPPORT,)),
        ("open a packet socket", _socket(socket.AF_PACKET, socket.SOCK_RAW), (errno.EAFNOSUPPORT,)),
        ("open a netlink audit socket", _socket(socket.AF_NETLINK, socket.SOCK_RAW, 9), (errno.EAFNOSUPPORT,)),
        ("use io_uring", _call(425, 425, 1, None), (errno.ENOSYS,)),
        ("read a keyring", _call(250, 219, 0, -3, 0), (errno.EPERM,)),
        ("use bpf", _call(321, 280, 0, None, 0), (errno.EPERM,)),
        ("use userfaultfd", _call(323, 282, 0), (errno.EPERM,)),
    ),
}
"""By layer: name, attempt, and the errnos that show that the layer stopped it."""


def main() -> int:
    """Print one JSON object: by layer, the number of attempts and the names of those that were not stopped."""
    found = {
        layer: [len(attempts), [name for name, attempt, expected in attempts if attempt() not in expected]]
        for layer, attempts in _ATTEMPTS.items()
    }
    print(json.dumps(found))  # noqa: T201 - a program
    return 0


if __name__ == "__main__":
    sys.exit(main())
