"""What egress must read of TLS, HTTP/1.1 and SOCKS 5, and the bytes by which it refuses in each protocol. Pure.

Each parser gets all bytes received so far. It returns None if it needs more, and raises MalformedError for bytes that
another parser could read in another way.
"""

from __future__ import annotations

import re
import struct
from typing import Final, NamedTuple

from bonobofs.policy.allow_list import canonical_host, parse_address, split_port

MAX_HELLO: Final = 17 << 10
"""Bytes of a TLS ClientHello with its record headers."""
MAX_HEAD: Final = 64 << 10
"""Bytes of the head of an HTTP request."""
TLS_RECORD: Final = 0x16
"""First byte of a TLS handshake."""
TLS_ALERT: Final = bytes.fromhex("15030300020231")
"""A fatal alert, access_denied."""
SOCKS_VERSION: Final = 5
SOCKS_NO_LOGIN: Final = b"\x05\x00"
SOCKS_NO_METHOD: Final = b"\x05\xff"
SOCKS_GRANTED, SOCKS_FORBIDDEN, SOCKS_UNREACHABLE, SOCKS_BAD_COMMAND = (
    bytes((5, code, 0, 1, 0, 0, 0, 0, 0, 0)) for code in (0, 2, 4, 7)
)

_TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET: Final = re.compile(rb"[\x21-\x7e]+")
_VALUE: Final = re.compile(rb"[\t\x20-\x7e\x80-\xff]*")
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
_REPLACED: Final = frozenset((b"connection", b"host", b"http2-settings", b"keep-alive", b"te"))
"""Hop-by-hop headers, and those that `http_request` writes itself. It also drops headers that begin with `proxy-`."""


class MalformedError(Exception):
    """The bytes are not plain messages of the protocol."""


# -- TLS


def tls_server_name(data: bytes) -> str | None:
    """Return the server name of a ClientHello; "" if it has none. `data` begins with TLS_RECORD."""
    hello = b""
    offset = 0
    while len(hello) < 4 or len(hello) < 4 + int.from_bytes(hello[1:4]):
        if hello[:1] not in (b"", b"\x01") or (len(hello) >= 4 and int.from_bytes(hello[1:4]) > MAX_HELLO):
            raise MalformedError
        header = data[offset : offset + 5]
        if header[:1] not in (b"", b"\x16") or header[1:2] not in (b"", b"\x03"):
            raise MalformedError
        size = int.from_bytes(header[3:5])
        if len(header) == 5 and not 0 < size <= 1 << 14:
            raise MalformedError
        body = data[offset + 5 : offset + 5 + size]
        if len(header) < 5 or len(body) < size:
            if len(data) > MAX_HELLO:
                raise MalformedError
            return None
        hello += body
        offset += 5 + size
    if hello[0] != 1:
        raise MalformedError
    return _name_in_hello(hello[4 : 4 + int.from_bytes(hello[1:4])])


def _name_in_hello(body: bytes) -> str:
    session, rest = _vector(body[34:], 1)
    ciphers, rest = _vector(rest, 2)
    compressions, rest = _vector(rest, 1)
    if len(body) < 34 or len(session) > 32 or not ciphers or not compressions:
        raise MalformedError
    if not rest:
        return ""
    extensions, rest = _vector(rest, 2)
    if rest:
        raise MalformedError
    names: list[bytes] = []
    while extensions:
        kind = extensions[:2]
        content, extensions = _vector(extensions[2:], 2)
        if kind == b"\0\0":
            names.append(content)
    if not names:
        return ""
    listed, rest = _vector(names[0], 2)
    name, more = _vector(listed[1:], 2)
    if len(names) > 1 or rest or more or listed[:1] != b"\0":
        raise MalformedError
    try:
        host = canonical_host(name.decode("ascii"))
    except UnicodeDecodeError:
        raise MalformedError from None
    if host is None:
        raise MalformedError
    return host


def _vector(data: bytes, width: int) -> tuple[bytes, bytes]:
    """Split a vector of TLS, which begins with its length, from what follows it."""
    end = width + int.from_bytes(data[:width])
    if len(data) < width or len(data) < end:
        raise MalformedError
    return data[width:end], data[end:]


# -- HTTP/1.1


class HttpRequest(NamedTuple):
    """The head of a request."""

    method: str
    host: str
    """Canonical host of the target or of the Host header; "" if neither names one."""
    port: int
    """0: the target and the Host header name none."""
    raw: str
    """The host as the request names it, for the record."""
    is_absolute: bool
    """The target is a URL, as for a proxy."""
    head: bytes
    """The head to send to the server: with the path as target, for one request on the connection."""
    length: int
    """Bytes of the body; CHUNKED."""
    is_upgrade: bool
    """It asks for a WebSocket."""
    size: int
    """Bytes of the head as received."""


CHUNKED: Final = -1


def http_request(data: bytes) -> HttpRequest | None:
    """Parse the head of a request."""
    end = data.find(b"\r\n\r\n")
    if end < 0:
        first = data.partition(b"\r\n")[0]
        if len(data) > MAX_HEAD or (first and not re.match(rb"[A-Za-z-]{1,32}(?: |$)", first)) or b"\n\n" in data:
            raise MalformedError
        return None
    if end > MAX_HEAD:
        raise MalformedError
    line, *lines = data[:end].split(b"\r\n")
    parts = line.split(b" ")
    if len(parts) != 3 or not _TOKEN.fullmatch(parts[0]) or not _TARGET.fullmatch(parts[1]):
        raise MalformedError
    if parts[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise MalformedError
    headers = [_header(each) for each in lines]
    method, target = parts[0].decode(), parts[1].decode()
    named = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(named) > 1:
        raise MalformedError
    authority, path, is_absolute = _split_target(method, target)
    if is_absolute and named and named[0] and _endpoint(named[0]) != _endpoint(authority):
        # RFC 9112 lets a proxy replace the Host header. Equal hosts are safe whichever one the server reads.
        raise MalformedError
    raw = authority or (named[0] if named else "")
    host, port = _endpoint(raw) if raw else ("", 0)
    # WebSocket is the only upgrade: HTTP/2 would carry requests that egress does not parse.
    is_upgrade = [value.lower() for name, value in headers if name == b"upgrade"] == [b"websocket"]
    left_out = _REPLACED if is_upgrade else _REPLACED | {b"upgrade"}
    kept = [b"%b: %b" % one for one in headers if one[0] not in left_out and not one[0].startswith(b"proxy-")]
    kept += [b"host: " + raw.encode("latin-1")] if raw else []
    kept.append(b"connection: upgrade" if is_upgrade else b"connection: close")
    head = b"%b %b HTTP/1.1\r\n%b\r\n\r\n" % (parts[0], path.encode(), b"\r\n".join(kept))
    return HttpRequest(method, host, port, raw[:300], is_absolute, head, _body_length(headers), is_upgrade, end + 4)


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, colon, value = line.partition(b":")
    if not colon or not _TOKEN.fullmatch(name) or not _VALUE.fullmatch(value):
        raise MalformedError  # also a folded line, and a bare CR or LF
    return name.lower(), value.strip(b" \t")


def _split_target(method: str, target: str) -> tuple[str, str, bool]:
    """Split a target into authority and path."""
    if method == "CONNECT":
        return target, "", True
    if target.startswith("/") or (target == "*" and method == "OPTIONS"):
        return "", target, False
    if target[:7].lower() != "http://":
        raise MalformedError
    authority, slash, rest = target[7:].partition("/")
    if not authority or re.search(r"[@?#\\]", authority):
        raise MalformedError
    return authority, slash + rest or "/", True


def _endpoint(authority: str) -> tuple[str, int]:
    named, port = split_port(authority)
    host = canonical_host(named)
    if host is None or "#" in authority:
        raise HostError(authority)
    return host, port


class HostError(MalformedError):
    """A host that is neither a plain name nor an address."""

    def __init__(self, host: str) -> None:
        super().__init__(host)
        self.host: Final = host


def _body_length(headers: list[tuple[bytes, bytes]]) -> int:
    lengths = [value for name, value in headers if name == b"content-length"]
    encodings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if encodings:
        if lengths or encodings != [b"chunked"]:
            raise MalformedError
        return CHUNKED
    if not lengths:
        return 0
    if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0]):
        raise MalformedError
    return int(lengths[0])


class ChunkedBody:
    """Finds the end of a chunked body."""

    def __init__(self) -> None:
        self._line = b""
        self._left = 0
        self._in_trailer = False
        self.is_complete = False

    def feed(self, data: bytes) -> int:
        """Return how many of these bytes belong to the body. MalformedError."""
        used = 0
        while used < len(data) and not self.is_complete:
            if self._left > 2:
                step = min(self._left - 2, len(data) - used)
                self._left -= step
                used += step
                continue
            if self._left:  # the line end after a chunk
                if data[used] != b"\r\n"[2 - self._left]:
                    raise MalformedError
                self._left -= 1
                used += 1
                continue
            end = data.find(b"\n", used)
            step = (end + 1 if end >= 0 else len(data)) - used
            self._line += data[used : used + step]
            used += step
            if len(self._line) > MAX_HEAD:
                raise MalformedError
            if end >= 0:
                self._end_line()
        return used

    def _end_line(self) -> None:
        line, self._line = self._line, b""
        if not line.endswith(b"\r\n"):
            raise MalformedError
        line = line[:-2]
        if self._in_trailer:
            self.is_complete = not line
            if line:
                _header(line)
            return
        match = _CHUNK.fullmatch(line)
        if match is None:
            raise MalformedError
        size = int(match[1], 16)
        self._in_trailer = size == 0
        self._left = size + 2 if size else 0


def http_refusal(status: str, text: str) -> bytes:
    """Return a response with a text that says why."""
    body = f"bonobofs: {text}\n".encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    return head.encode() + body


# -- SOCKS 5


def socks_greeting(data: bytes) -> tuple[bool, int] | None:
    """Parse the first message: whether the client needs no login, and the length of the message."""
    if len(data) < 2 or len(data) < 2 + data[1]:
        return None
    return 0 in data[2 : 2 + data[1]], 2 + data[1]


def socks_request(data: bytes) -> tuple[int, str, int, int] | None:
    """Parse a request: command, host as sent, port, length of the message."""
    if len(data) < 5:
        return None
    if data[0] != SOCKS_VERSION or data[2] != 0 or data[3] not in (1, 3, 4):
        raise MalformedError
    start, size = (5, data[4]) if data[3] == 3 else (4, 4 if data[3] == 1 else 16)
    end = start + size + 2
    if len(data) < end:
        return None
    host = data[start : end - 2]
    if data[3] == 3:
        text = host.decode("latin-1")
    elif data[3] == 1:
        text = ".".join(map(str, host))
    else:
        text = ":".join(host[index : index + 2].hex() for index in range(0, 16, 2))
        text = str(parse_address(text))
    return data[1], text, int.from_bytes(data[end - 2 : end]), end


# -- SSH


def ssh_refusal(text: str) -> bytes:
    """Return a banner and a disconnect message (RFC 4253) that says why."""
    reason = text.encode()
    payload = struct.pack(">BII", 1, 14, len(reason)) + reason + struct.pack(">I", 0)
    padding = 4 + (8 - (len(payload) + 5 + 4) % 8) % 8
    packet = struct.pack(">IB", len(payload) + padding + 1, padding) + payload + bytes(padding)
    return b"SSH-2.0-bonobofs\r\n" + packet
