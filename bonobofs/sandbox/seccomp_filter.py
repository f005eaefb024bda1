"""The seccomp filter of the sandbox, as classic BPF for the option --seccomp of bubblewrap.

Network namespaces do not separate AF_VSOCK and NETLINK_AUDIT, and no namespace separates keyrings. Only this filter
closes them.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct
from typing import Final

from bonobofs.errors import MountError

_AUDIT_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT: Final = 0x40000000
_DENIED: Final[dict[str, tuple[int | None, int | None]]] = {
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "create_module": (174, None),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "vhangup": (153, 58),
    "move_pages": (279, 239),
    "process_madvise": (440, 440),
}
"""System calls that answer EPERM, with their numbers on x86_64 and aarch64."""
_ABSENT: Final = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "clone3": 435}
"""System calls that answer ENOSYS: programs then use others. The filter cannot read the arguments of clone3."""
_CLONE: Final = (56, 220)
_IOCTL: Final = (16, 29)
_SOCKET: Final = (41, 198)
_NEW_NAMESPACES: Final = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET. clone(2) does not know NEWTIME."""
_TIOCSTI: Final = 0x5412
_TIOCLINUX: Final = 0x541C
_TIOCSETD: Final = 0x5423
"""Selects a line discipline, whose module the kernel may load."""

_LOAD: Final = 0x20
_EQUAL: Final = 0x15
_AT_LEAST: Final = 0x35
_ANY_BIT: Final = 0x45
_RETURN: Final = 0x06
_ALLOW: Final = 0x7FFF0000
_ERRNO: Final = 0x00050000
_NUMBER: Final = 0
_ARCHITECTURE: Final = 4


def _argument(index: int) -> int:
    """Return the offset in struct seccomp_data of the low 32 bits of an argument."""
    return 16 + 8 * index


class _Assembler:
    """A program of instructions with forward jumps to labels."""

    def __init__(self) -> None:
        self._code: list[tuple[int, str, int]] = []
        self._labels: dict[str, int] = {}

    def load(self, offset: int) -> None:
        self._code.append((_LOAD, "", offset))

    def jump_if(self, test: int, value: int, label: str) -> None:
        self._code.append((test, label, value))

    def label(self, name: str) -> None:
        self._labels[name] = len(self._code)

    def exit(self, action: int) -> None:
        self._code.append((_RETURN, "", action))

    def bytes(self) -> bytes:
        """Return the program as an array of struct sock_filter."""
        packed = b""
        for at, (code, label, value) in enumerate(self._code):
            jump = self._labels[label] - at - 1 if label else 0
            packed += struct.pack("=HBBI", code, jump, 0, value)
        return packed


def build(machine: str | None = None) -> bytes:
    """Return the filter for a machine, by default this one. MountError: there is no table for it."""
    machine = machine or platform.machine()
    if machine not in _AUDIT_ARCH:
        raise MountError(f"bonobofs has no seccomp filter for {machine}; run works on x86_64 and aarch64")
    column = 0 if machine == "x86_64" else 1
    code = _Assembler()
    code.load(_ARCHITECTURE)
    code.jump_if(_EQUAL, _AUDIT_ARCH[machine], "native")
    code.exit(_ERRNO | errno.ENOSYS)
    code.label("native")
    code.load(_NUMBER)
    if machine == "x86_64":
        code.jump_if(_AT_LEAST, _X32_BIT, "absent")
    for number in _ABSENT.values():
        code.jump_if(_EQUAL, number, "absent")
    for denied in _DENIED.values():
        if (denied_number := denied[column]) is not None:
            code.jump_if(_EQUAL, denied_number, "denied")
    for numbers, label in ((_CLONE, "clone"), (_IOCTL, "ioctl"), (_SOCKET, "socket")):
        code.jump_if(_EQUAL, numbers[column], label)
    code.exit(_ALLOW)
    _check_arguments(code)
    code.label("allowed")
    code.exit(_ALLOW)
    code.label("denied")
    code.exit(_ERRNO | errno.EPERM)
    code.label("absent")
    code.exit(_ERRNO | errno.ENOSYS)
    return code.bytes()


def _check_arguments(code: _Assembler) -> None:
    """Add the parts for the calls that are denied by an argument."""
    code.label("clone")
    code.load(_argument(0))
    code.jump_if(_ANY_BIT, _NEW_NAMESPACES, "denied")
    code.exit(_ALLOW)
    code.label("ioctl")
    code.load(_argument(1))
    for number in (_TIOCSTI, _TIOCLINUX, _TIOCSETD):
        code.jump_if(_EQUAL, number, "denied")
    code.exit(_ALLOW)
    code.label("socket")
    code.load(_argument(0))
    for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
        code.jump_if(_EQUAL, family, "allowed")
    code.jump_if(_EQUAL, socket.AF_NETLINK, "netlink")
    code.exit(_ERRNO | errno.EAFNOSUPPORT)
    code.label("netlink")
    code.load(_argument(2))
    code.jump_if(_EQUAL, 0, "allowed")
    code.exit(_ERRNO | errno.EAFNOSUPPORT)
