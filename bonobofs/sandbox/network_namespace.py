"""The helper process that enters the network namespace of a sandbox and opens sockets there for egress.

All addresses are made local there, so that each connection arrives at a listener of egress. The helper hands the
sockets to egress, which stays in the namespace of the host. The helper stays in the namespace to open further ports.
The sandbox cannot reach it: it has another PID namespace.
"""

from __future__ import annotations

import array
import errno
import fcntl
import json
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

from bonobofs.system import syscalls

MAX_PORTS: Final = 1024
"""Ports that egress listens on."""
BACKLOG: Final = 4096

_NS_GET_USERNS: Final = 0xB701
_SIOCGIFFLAGS: Final = 0x8913
_IFF_UP: Final = 1
_SECONDS_FOR_LOOPBACK: Final = 10.0
_POLL_SECONDS: Final = 0.001
_MESSAGE: Final = 1 << 12

_RTM_NEWROUTE: Final = 24
_REQUEST_ACK_CREATE: Final = 0x1 | 0x4 | 0x400
_RTA_OIF: Final = 4
_TABLE_LOCAL: Final = 255
_PROTOCOL_STATIC: Final = 4
_SCOPE_HOST: Final = 254
_TYPE_LOCAL: Final = 2

_ETH_P_ALL: Final = 3
_ETH_P_IP: Final = 0x0800
_ETH_P_IPV6: Final = 0x86DD
_SO_ATTACH_FILTER: Final = 26
_SO_RCVBUFFORCE: Final = 33
_SOL_PACKET: Final = 263
_PACKET_IGNORE_OUTGOING: Final = 23
_RECORDER_BUFFER: Final = 32 << 20
RECORDED_BYTES: Final = 96
"""First bytes of each packet that the recorder gets, from its IP header on."""

_LD_BYTE, _LD_HALF, _LD_WORD, _LD_BYTE_X, _LD_HALF_X, _LDX_LENGTH, _AND, _JEQ, _RET = (
    0x30,
    0x28,
    0x20,
    0x50,
    0x48,
    0xB1,
    0x54,
    0x15,
    0x06,
)
_NEXT: Final = ""
_SYN, _SYN_ACK = 0x02, 0x12
_FILTER: Final = (
    # label, code, operand, label if equal, label if not
    ("", _LD_HALF, 0xFFFFF000, _NEXT, _NEXT),  # the protocol of the frame
    ("", _JEQ, _ETH_P_IP, "v4", _NEXT),
    ("", _JEQ, _ETH_P_IPV6, "v6", "drop"),
    ("v4", _LD_BYTE, 16, _NEXT, _NEXT),  # the loopback network is the sandbox's own
    ("", _JEQ, 127, "drop", _NEXT),
    ("", _LDX_LENGTH, 0, _NEXT, _NEXT),
    ("", _LD_BYTE, 9, _NEXT, _NEXT),
    ("", _JEQ, socket.IPPROTO_ICMP, "drop", _NEXT),
    ("", _JEQ, socket.IPPROTO_UDP, "udp4", _NEXT),
    ("", _JEQ, socket.IPPROTO_TCP, _NEXT, "accept"),
    ("", _LD_BYTE_X, 13, _NEXT, _NEXT),
    ("", _AND, _SYN_ACK, _NEXT, _NEXT),
    ("", _JEQ, _SYN, "accept", "drop"),
    ("udp4", _LD_HALF_X, 0, _NEXT, _NEXT),  # the port 53 is that of the stub
    ("", _JEQ, 53, "drop", _NEXT),
    ("", _LD_HALF_X, 2, _NEXT, _NEXT),
    ("", _JEQ, 53, "drop", "accept"),
    ("v6", _LD_WORD, 24, _NEXT, _NEXT),  # ::1 is the sandbox's own
    ("", _JEQ, 0, _NEXT, "v6 out"),
    ("", _LD_WORD, 28, _NEXT, _NEXT),
    ("", _JEQ, 0, _NEXT, "v6 out"),
    ("", _LD_WORD, 32, _NEXT, _NEXT),
    ("", _JEQ, 0, _NEXT, "v6 out"),
    ("", _LD_WORD, 36, _NEXT, _NEXT),
    ("", _JEQ, 1, "drop", _NEXT),
    ("v6 out", _LD_BYTE, 6, _NEXT, _NEXT),
    ("", _JEQ, socket.IPPROTO_ICMPV6, "drop", _NEXT),
    ("", _JEQ, socket.IPPROTO_UDP, "udp6", _NEXT),
    ("", _JEQ, socket.IPPROTO_TCP, _NEXT, "accept"),
    ("", _LD_BYTE, 53, _NEXT, _NEXT),
    ("", _AND, _SYN_ACK, _NEXT, _NEXT),
    ("", _JEQ, _SYN, "accept", "drop"),
    ("udp6", _LD_HALF, 40, _NEXT, _NEXT),
    ("", _JEQ, 53, "drop", _NEXT),
    ("", _LD_HALF, 42, _NEXT, _NEXT),
    ("", _JEQ, 53, "drop", "accept"),
    ("accept", _RET, RECORDED_BYTES, _NEXT, _NEXT),
    ("drop", _RET, 0, _NEXT, _NEXT),
)
"""Classic BPF: each TCP SYN without ACK, and each packet that is neither TCP nor ICMP, out of the loopback network."""


class NamespaceError(Exception):
    """The namespace cannot be set up. The message says what failed, why, and what to do."""


class Helper:
    """Egress's end of the helper process."""

    def __init__(self) -> None:
        """Fork the helper. This process must have one thread."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            _serve(theirs.detach())
        theirs.close()
        self._channel: Final = ours

    def enter(self, pid: int) -> tuple[socket.socket, socket.socket]:
        """Enter the namespace of a process; the UDP socket of the DNS stub and the recorder. NamespaceError."""
        dns, recorder = self._ask({"enter": pid})
        return dns, recorder

    def listen(self, port: int) -> socket.socket:
        """Open a listening socket in the namespace. NamespaceError."""
        return self._ask({"listen": port})[0]

    def _ask(self, request: dict[str, Any]) -> list[socket.socket]:
        try:
            self._channel.send(json.dumps(request).encode())
            data, fds, _, _ = socket.recv_fds(self._channel, _MESSAGE, 2, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise NamespaceError(f"the helper in the network namespace has ended: {error.strerror}") from None
        sockets = [socket.socket(fileno=fd) for fd in fds]
        if not sockets:
            raise NamespaceError(data.decode() or "the helper in the network namespace has ended")
        for one in sockets:
            one.setblocking(False)
        return sockets


def _serve(fd: int) -> None:
    """Run the helper until egress ends. Never returns."""
    status = 1
    try:
        syscalls.die_with_parent()
        syscalls.close_all_but({2, fd})
        channel = socket.socket(fileno=fd)
        while data := channel.recv(_MESSAGE):
            request = json.loads(data)
            try:
                sockets = _enter(request["enter"]) if "enter" in request else [_listen(request["listen"])]
            except NamespaceError as error:
                channel.send(str(error).encode())
                continue
            socket.send_fds(channel, [b"ok"], [one.fileno() for one in sockets])
            for one in sockets:
                one.close()
        status = 0
    except ConnectionError:
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def _enter(pid: int) -> list[socket.socket]:
    """Enter the network namespace, with the rights of its owner, and set it up."""
    step = "enter it"
    try:
        network = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        owner = fcntl.ioctl(network, _NS_GET_USERNS)
        try:
            syscalls.enter_namespace(owner)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: the process is in it already
                raise
        os.close(owner)
        syscalls.enter_namespace(network)
        os.close(network)
        step = "wait for its loopback interface"
        _wait_for_loopback()
        step = "make all addresses local"
        families = [socket.AF_INET, socket.AF_INET6] if _has_ipv6() else [socket.AF_INET]
        for family in families:
            _add_route(family)
        step = "open the DNS port"
        dns = _open(socket.SOCK_DGRAM, 53)
        step = "record refused connections (AF_PACKET; the kernel needs CONFIG_PACKET)"
        return [dns, _open_recorder()]
    except OSError as error:
        raise NamespaceError(
            f"the sandbox's network namespace cannot be set up: {step}: {error.strerror}; see bonobofs doctor"
        ) from None


def _wait_for_loopback() -> None:
    """Wait until bwrap has brought `lo` up. bwrap fails if another process does it first."""
    until = time.monotonic() + _SECONDS_FOR_LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        while True:
            answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0))
            if struct.unpack("16sh14x", answer)[1] & _IFF_UP:
                return
            if time.monotonic() > until:
                raise TimeoutError(errno.ETIMEDOUT, "it stays down")
            time.sleep(_POLL_SECONDS)


def _has_ipv6() -> bool:
    try:
        socket.socket(socket.AF_INET6, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return os.path.exists("/proc/self/net/if_inet6")


def _add_route(family: int) -> None:
    """Add `local default dev lo`: every address is one of this host."""
    route = struct.pack(
        "=BBBBBBBBI", family, 0, 0, 0, _TABLE_LOCAL, _PROTOCOL_STATIC, _SCOPE_HOST, _TYPE_LOCAL, 0
    ) + struct.pack("=HHi", 8, _RTA_OIF, socket.if_nametoindex("lo"))
    header = struct.pack("=IHHII", 16 + len(route), _RTM_NEWROUTE, _REQUEST_ACK_CREATE, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        netlink.send(header + route)
        answer = netlink.recv(_MESSAGE)
    code = -struct.unpack_from("=i", answer, 16)[0]
    if code not in (0, errno.EEXIST):
        raise OSError(code, os.strerror(code))


def _listen(port: int) -> socket.socket:
    try:
        listener = _open(socket.SOCK_STREAM, port)
        listener.listen(BACKLOG)
    except OSError as error:
        raise NamespaceError(f"port {port} cannot be opened in the sandbox: {error.strerror}") from None
    return listener


def _open(kind: int, port: int) -> socket.socket:
    """Open a socket for IPv4 and, if the host has it, IPv6."""
    family = socket.AF_INET6 if _has_ipv6() else socket.AF_INET
    opened = socket.socket(family, kind)
    if family == socket.AF_INET6:
        opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    opened.bind(("::" if family == socket.AF_INET6 else "0.0.0.0", port))  # noqa: S104 - of the sandbox
    return opened


def _open_recorder() -> socket.socket:
    recorder = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
    program = array.array("B", _assembled(_FILTER))
    address, size = program.buffer_info()
    recorder.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", size // 8, address))
    recorder.setsockopt(_SOL_PACKET, _PACKET_IGNORE_OUTGOING, 1)
    try:
        recorder.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECORDER_BUFFER)
    except OSError:  # not in a user namespace
        recorder.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECORDER_BUFFER)
    recorder.bind(("lo", _ETH_P_ALL))
    return recorder


def _assembled(lines: Sequence[tuple[str, int, int, str, str]]) -> bytes:
    """Return the `struct sock_filter` of each line."""
    indices = {line[0]: index for index, line in enumerate(lines) if line[0]}
    return b"".join(
        struct.pack(
            "=HBBI", code, indices[yes] - index - 1 if yes else 0, indices[no] - index - 1 if no else 0, operand
        )
        for index, (_, code, operand, yes, no) in enumerate(lines)
    )
