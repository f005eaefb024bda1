"""The network's allow list: which hosts and ports a session may connect to. Pure; the standard library alone.

    "api.example.com"       the host, at the ports 80 and 443
    "*.example.com:443"     each name below example.com, but not example.com itself
    "93.184.216.34:5432"    an address, which needs a port
    {"host": "db.example.com:5432", "private": true}    the name may lead to a private address
    "*"                     each host and port; stands alone

A host is compared in its canonical form (`canonical_host`), label by label.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Final, NamedTuple

from bonobofs.errors import PolicyError

DEFAULT_PORTS: Final = (80, 443)
"""The ports of an entry without a port."""
EVERYTHING: Final = "*"

_LONGEST: Final = 253
_LABEL: Final = re.compile(r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?")
_NUMBER: Final = re.compile(r"[0-9]+|0x[0-9a-f]*")
"""A last label with which getaddrinfo(3) reads a name as an IPv4 address: `2130706433`, `0x7f000001`, `0177.1`."""
_PORT: Final = re.compile(r"[1-9][0-9]{0,4}")
_RESERVED: Final = tuple(
    ip_network(text)
    for text in (
        "::/96",
        "64:ff9b::/96",
        "64:ff9b:1::/48",
        "2001::/32",
        "2002::/16",
        "fec0::/10",
        "192.88.99.0/24",
        "168.63.129.16/32",
    )
)
"""Not public, although `ipaddress` calls them global: IPv4-compatible, NAT64, Teredo, 6to4, site-local, and the
metadata service of Azure."""

Address = IPv4Address | IPv6Address


class AllowEntry(NamedTuple):
    """One entry of a list."""

    host: str
    """Canonical name or address. For a wildcard, the name after `*.`."""
    port: int
    """0: the ports DEFAULT_PORTS."""
    wildcard: bool
    private: bool
    """The name may lead to a private address."""


class AllowList:
    """A list, for lookups."""

    def __init__(self, entries: Iterable[object]) -> None:
        """`entries` as in a policy. PolicyError: an entry is invalid, or `*` does not stand alone."""
        entries = list(entries)
        self.admits_all: Final = EVERYTHING in entries
        if self.admits_all and len(entries) > 1:
            raise PolicyError('"*" admits every host; remove the other entries, or remove "*"')
        parsed = [] if self.admits_all else [parse_entry(entry) for entry in entries]
        self._entries: Final[dict[tuple[str, bool], list[AllowEntry]]] = {}
        for entry in sorted(parsed, key=lambda one: not one.private):
            self._entries.setdefault((entry.host, entry.wildcard), []).append(entry)
        self.ports: Final = frozenset(entry.port for entry in parsed if entry.port)
        """The ports that entries name."""

    def admits(self, host: str, port: int) -> bool:
        """True if the list admits a canonical host at a port."""
        return self.admits_all or bool(self._matching(host, port))

    def admits_private(self, host: str, port: int) -> bool:
        """True if the host may also lead to a private address."""
        return any(entry.private for entry in self._matching(host, port))

    def _matching(self, host: str, port: int) -> list[AllowEntry]:
        keys = [(host, False)]
        labels = host.split(".")
        if parse_address(host) is None:
            keys += [(".".join(labels[depth:]), True) for depth in range(1, len(labels))]
        found = [entry for key in keys for entry in self._entries.get(key, ())]
        return [entry for entry in found if port in ((entry.port,) if entry.port else DEFAULT_PORTS)]


def parse_entry(value: object) -> AllowEntry:
    """Parse an entry other than `*`. PolicyError: it is invalid; the message says what to write."""
    private = False
    if isinstance(value, Mapping):
        table: Mapping[Any, Any] = value
        private = table.get("private", False)
        if {*table} - {"host", "private"} or not isinstance(private, bool):
            raise PolicyError('an entry has the keys host and private = true: {host = "db.example.com:5432", …}')
        value = table.get("host")
    if not isinstance(value, str):
        raise PolicyError('an entry is a text such as "api.example.com" or "*.example.com:443"')
    wildcard = value.startswith("*.")
    text = value[2:] if wildcard else value
    named, port = split_port(text)
    host = canonical_host(named)
    if host is None:
        raise PolicyError(f'{value!a} is no host; write a name such as "api.example.com" without a scheme or path')
    address = parse_address(host)
    if address is not None and (wildcard or not port):
        raise PolicyError(f'{value!a} is an address, which needs a port and no wildcard, such as "192.0.2.1:443"')
    if address is not None and not private and not is_public(address):
        raise PolicyError(f"{value!a} is a private address; write {{host = {value!a}, private = true}}")
    return AllowEntry(host, port, wildcard, private)


def split_port(text: str) -> tuple[str, int]:
    """Split `HOST:PORT` or `[ADDRESS]:PORT`. The port is 0 if there is none; an invalid one stays in the host."""
    host, colon, port = text.rpartition(":")
    if not colon or not _PORT.fullmatch(port) or int(port) > 65535:
        host, port = text, "0"
    if host.startswith("[") and host.endswith("]") and ":" in host:
        return host[1:-1], int(port)
    return (host, int(port)) if ":" not in host else (text, 0)


def canonical_host(text: str) -> str | None:
    """Return a name in lower case without its final dot, or an address in its shortest form.

    A name has letters, digits, `-` and `_`. None: neither, or a name that getaddrinfo(3) would read as an address.
    """
    address = parse_address(text)
    if address is not None:
        return str(address)
    if not text.isascii():
        return None
    name = text.lower().removesuffix(".")
    labels = name.split(".")
    if not 0 < len(name) <= _LONGEST or not all(map(_LABEL.fullmatch, labels)) or _NUMBER.fullmatch(labels[-1]):
        return None
    return name


def parse_address(text: str) -> Address | None:
    """Parse an IPv4 or IPv6 address in its usual notation. An IPv4-mapped address becomes the IPv4 address."""
    if "%" in text:
        return None
    try:
        address = ip_address(text)
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, IPv6Address) else address


def is_public(address: Address) -> bool:
    """True if an address belongs to a host of the Internet: not private, local, reserved, multicast or a tunnel."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    same = [network for network in _RESERVED if isinstance(network, IPv6Network) == isinstance(address, IPv6Address)]
    return not any(address in network for network in same)
