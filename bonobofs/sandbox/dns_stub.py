"""The DNS server of a sandbox: each name gets an address of its own that only this sandbox knows.

The stub asks no other server, so no query leaves the machine. A connection to such an address tells egress the name.
"""

from __future__ import annotations

import struct
from ipaddress import IPv4Address, IPv4Network
from typing import Final

from bonobofs.policy.allow_list import Address, canonical_host, parse_address

FAKE_NETWORK: Final = IPv4Network("198.18.0.0/15")
"""Reserved for benchmarks (RFC 2544), so that no host of the Internet has these addresses."""
MAX_MESSAGE: Final = 4096

_FIRST: Final = int(FAKE_NETWORK.network_address) + 1
_LAST: Final = int(FAKE_NETWORK.broadcast_address) - 1
_TTL: Final = 300
_A, _CLASS_IN = 1, 1
_OK, _FORMAT_ERROR, _SERVER_FAILURE, _NO_NAME, _NOT_IMPLEMENTED = 0, 1, 2, 3, 4
_HEADER: Final = struct.Struct(">HHHHHH")


class FakeNames:
    """Names and their addresses. An address is never given to another name, because programs keep addresses."""

    def __init__(self, size: int = _LAST - _FIRST + 1) -> None:
        """`size` is the number of addresses."""
        self._size: Final = size
        self._addresses: Final[dict[str, int]] = {}
        self._names: Final[dict[int, str]] = {}

    def address_of(self, name: str) -> IPv4Address | None:
        """Return the address of a canonical name; None: no address is left."""
        number = self._addresses.get(name)
        if number is None:
            if len(self._addresses) >= self._size:
                return None
            number = _FIRST + len(self._addresses)
            self._addresses[name] = number
            self._names[number] = name
        return IPv4Address(number)

    def host_of(self, address: Address) -> str:
        """Return the name of an address, or the address itself."""
        named = self._names.get(int(address)) if isinstance(address, IPv4Address) else None
        return named or str(address)


def answer(query: bytes, names: FakeNames) -> bytes | None:
    """Answer a query: an address for A, nothing for other types. None: it is no query."""
    if not 12 < len(query) <= MAX_MESSAGE:
        return None
    number, flags, questions, *_ = _HEADER.unpack_from(query)
    if flags & 0x8000:
        return None
    labels, end = _question(query)
    question = query[12:end]
    if questions != 1 or not question:
        return _reply(number, flags, _FORMAT_ERROR)
    if flags & 0x7800:
        return _reply(number, flags, _NOT_IMPLEMENTED, question)
    kind, group = struct.unpack_from(">HH", query, end - 4)
    try:
        name = canonical_host(b".".join(labels).decode("ascii"))
    except UnicodeDecodeError:
        name = None
    if name is None or parse_address(name) is not None or b"." in b"".join(labels) or name.endswith(".arpa"):
        return _reply(number, flags, _NO_NAME, question)
    if kind != _A or group != _CLASS_IN:
        return _reply(number, flags, _OK, question)
    is_local = name == "localhost" or name.endswith(".localhost")
    address = IPv4Address("127.0.0.1") if is_local else names.address_of(name)
    if address is None:
        return _reply(number, flags, _SERVER_FAILURE, question)
    record = struct.pack(">HHHIH", 0xC00C, _A, _CLASS_IN, _TTL, 4) + address.packed
    return _reply(number, flags, _OK, question, record)


def _question(query: bytes) -> tuple[list[bytes], int]:
    """Return the labels of the question and the offset after it; an offset of 12 if it is malformed."""
    labels: list[bytes] = []
    offset = 12
    while offset < len(query) and (size := query[offset]):
        if size > 63 or offset - 12 > 255:
            return [], 12
        labels.append(query[offset + 1 : offset + 1 + size])
        offset += 1 + size
    return (labels, offset + 5) if offset + 5 <= len(query) else ([], 12)


def _reply(number: int, flags: int, code: int, question: bytes = b"", record: bytes = b"") -> bytes:
    head = _HEADER.pack(number, 0x8080 | (flags & 0x7900) | code, bool(question), bool(record), 0, 0)
    return head + question + record
