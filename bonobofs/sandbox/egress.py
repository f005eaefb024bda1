"""The network process of one `bonobofs run`: it accepts every connection of the sandbox, and makes the admitted ones.

    python -m bonobofs.sandbox.egress FD < {"session_dir": …, "user": uid or null}

FD is a stream socket to the launcher, with one JSON object in a line. The launcher sends {"pid": N}, the first process
of the sandbox. Egress answers {"ready": true} or {"error": "why"}. It ends when the launcher closes the socket.

A connection needs an entry in the policy and in the operator's list. Egress compares names before it resolves any, and
records an admitted connection before it makes it. If egress ends, the kernel refuses every connection of the sandbox.
"""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address
from typing import Any, Final, NoReturn

from bonobofs.errors import PolicyError
from bonobofs.policy.allow_list import AllowList, canonical_host, is_public, parse_address, split_port
from bonobofs.policy.denials import NETWORK
from bonobofs.sandbox import dns_stub
from bonobofs.sandbox import stream_protocols as protocols
from bonobofs.sandbox.network_namespace import MAX_PORTS, RECORDED_BYTES, Helper, NamespaceError
from bonobofs.sandbox.session_calls import RefusalCounter, SessionCalls, SessionError
from bonobofs.sandbox.stream_protocols import CHUNKED, MalformedError
from bonobofs.state.home import EGRESS_KEY, INSIDE
from bonobofs.system import syscalls

DNS_PORT: Final = 53
PROXY_PORT: Final = 3128
CAPTURED_PORTS: Final = (22, 80, 443)
"""Ports that egress listens on besides DNS_PORT, PROXY_PORT and the ports of the lists."""
MAX_CONNECTIONS: Final = 1000
_LEAST_CONNECTIONS: Final = 16
"""Limit of the connections if the ports could use all descriptors."""
HEAD_SECONDS: Final = 30.0
"""How long a client may take to send the first bytes, which name its destination."""
CONNECT_SECONDS: Final = 10.0
REASON_SECONDS: Final = 2.0
"""How long egress waits for the first bytes of a refused client, and for the end of its connection."""

_LIST_SECONDS: Final = 0.4
_MOST_ADDRESSES: Final = 4
_RESOLVER_THREADS: Final = 16
_BLOCK: Final = 128 << 10
_AT_ONCE: Final = 256
_LOG_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
_NO_LINGER: Final = struct.pack("ii", 1, 0)
_SOL_PACKET: Final = 263
_PACKET_STATISTICS: Final = 6


class RefusedError(Exception):
    """A connection is refused. `word` is a key of `policy.denials.NETWORK`."""

    def __init__(self, word: str, *, is_recorded: bool = False) -> None:
        super().__init__(NETWORK[word].reason)
        self.word: Final = word
        self.is_recorded: Final = is_recorded
        self.text: Final = f"{NETWORK[word].reason} {NETWORK[word].instead}"


class Client:
    """One connection from the sandbox."""

    def __init__(self, end: socket.socket, port: int) -> None:
        """`port` is that of the listener."""
        self.end: Final = end
        self.port: Final = port
        self.buffer = bytearray()
        """Bytes received and not yet used."""
        self.via = "capture"
        self.host = ""
        """Host of its destination, for the record; canonical once it is admitted."""
        self.host_port = port
        self.is_admitted = False
        self.refuse: Callable[[RefusedError], bytes] | None = None
        """Formats a refusal for a client of the proxy; None: another client, whose first bytes show its protocol."""
        self.task: asyncio.Task[None]
        self.cut = ""
        """The word of the refusal that cancelled the task."""

    async def fill(self) -> None:
        """Receive more. EOFError, OSError."""
        data = await asyncio.get_running_loop().sock_recv(self.end, _BLOCK)
        if not data:
            raise EOFError
        self.buffer += data

    async def parsed(self, parse: Callable[[bytes], Any]) -> Any:
        """Receive until `parse` returns a result. MalformedError, EOFError, TimeoutError, OSError."""
        async with asyncio.timeout(HEAD_SECONDS):
            while (result := parse(bytes(self.buffer))) is None:
                await self.fill()
        return result

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.end, data)

    def take(self, size: int) -> bytes:
        """Remove bytes from the buffer."""
        data = bytes(self.buffer[:size])
        del self.buffer[:size]
        return data


class Egress:
    """The listeners of one sandbox and its connections."""

    def __init__(self, helper: Helper, calls: SessionCalls) -> None:
        self._helper: Final = helper
        self._calls: Final = calls
        self._refusals: Final = RefusalCounter(calls, _log)
        self._names: Final = dns_stub.FakeNames()
        self._resolver: Final = ThreadPoolExecutor(_RESOLVER_THREADS, "bonobofs-resolver")
        self._policy = AllowList(())
        self._operator = AllowList(())
        self._entries: tuple[list[Any], list[Any]] = ([], [])
        self._list_error = ""
        self._live: Final[dict[Client, None]] = {}
        """The connections, the one with the oldest transfer first."""
        descriptors = syscalls.raise_limit() - 2 * MAX_PORTS
        self._limit: Final = max(_LEAST_CONNECTIONS, min(MAX_CONNECTIONS, descriptors // 2))
        self._listeners: Final[dict[int, asyncio.Task[None]]] = {}
        self._tasks: Final[list[asyncio.Task[None]]] = []
        self._recorder: socket.socket

    # -- start and end

    async def start(self, pid: int) -> None:
        """Open everything for the sandbox with this process. NamespaceError, SessionError: the sandbox cannot start."""
        loop = asyncio.get_running_loop()
        dns, self._recorder = self._helper.enter(pid)
        await self._read_lists()
        if self._list_error:
            _log(f"the operator's list cannot be read, so every connection is refused: {self._list_error}")
        for port in (DNS_PORT, PROXY_PORT, *CAPTURED_PORTS):
            self._listen(port)
        self._listen_on_listed_ports()
        loop.add_reader(dns, self._answer_queries, dns)
        loop.add_reader(self._recorder, self._read_packets)
        self._tasks.extend((loop.create_task(self._follow_lists()), loop.create_task(self._refusals.run())))

    async def stop(self) -> None:
        """Cut all connections, and record what is not yet recorded."""
        asyncio.get_running_loop().remove_reader(self._recorder)
        self._read_packets()
        tasks = [*self._listeners.values(), *self._tasks, *(client.task for client in self._live)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(SessionError):
            await self._refusals.flush()
        await self._calls.close()
        self._resolver.shutdown(wait=False, cancel_futures=True)

    def _listen(self, port: int) -> None:
        listener = self._helper.listen(port)
        self._listeners[port] = asyncio.get_running_loop().create_task(self._accept(listener, port))

    def _listen_on_listed_ports(self) -> None:
        for port in sorted(self._policy.ports | self._operator.ports):
            if port in self._listeners or len(self._listeners) >= MAX_PORTS:
                continue
            try:
                self._listen(port)
            except NamespaceError as error:  # a server of the agent may have the port
                _log(f"{error}; programs reach it through the proxy only")

    # -- the lists

    async def _follow_lists(self) -> None:
        while True:
            await asyncio.sleep(_LIST_SECONDS)
            try:
                changed = await self._read_lists()
            except SessionError as error:
                self._log_list_error(str(error))
                continue
            if changed:
                self._listen_on_listed_ports()
                for client in [each for each in self._live if each.is_admitted]:
                    if self._verdict(client.host, client.host_port):
                        self._cut(client, "removed")

    async def _read_lists(self) -> bool:
        """Read both lists; True if one has changed. A list that cannot be read stays as it was. SessionError."""
        answer = await self._calls.call("network.lists")
        self._log_list_error(answer["error"])
        operator = self._entries[1] if answer["error"] else answer["operator"]
        entries = answer["policy"], operator
        if entries == self._entries:
            return False
        try:
            self._policy, self._operator = AllowList(entries[0]), AllowList(entries[1])
        except PolicyError as error:
            self._log_list_error(str(error))
            return False
        self._entries = entries
        return True

    def _log_list_error(self, error: str) -> None:
        if error and error != self._list_error:
            _log(f"the lists cannot be read, so the last ones stay in force: {error}")
        self._list_error = error

    def _verdict(self, host: str, port: int) -> str:
        """Return the word of the refusal of a canonical host; "" if both lists admit it."""
        if not self._policy.admits(host, port):
            return "policy"
        return "" if self._operator.admits(host, port) else "list"

    # -- names and packets

    def _answer_queries(self, dns: socket.socket) -> None:
        with suppress(BlockingIOError):
            for _ in range(_AT_ONCE):
                query, sender = dns.recvfrom(dns_stub.MAX_MESSAGE)
                reply = dns_stub.answer(query, self._names)
                if reply is not None:
                    with suppress(OSError):
                        dns.sendto(reply, sender)

    def _read_packets(self) -> None:
        """Record attempts at ports without a listener, and packets that are not TCP."""
        with suppress(BlockingIOError):
            for _ in range(_AT_ONCE):
                self._record_packet(self._recorder.recv(RECORDED_BYTES))
        statistics = self._recorder.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8)
        lost = struct.unpack("II", statistics)[1]
        if lost:
            self._refusals.add("", 0, "other", "protocol", lost)

    def _record_packet(self, packet: bytes) -> None:
        if packet[0] >> 4 == 4:
            size, protocol = 4 * (packet[0] & 15), packet[9]
            address: IPv4Address | IPv6Address = IPv4Address(packet[16:20])
        else:
            size, protocol, address = 40, packet[6], IPv6Address(packet[24:40])
        has_ports = protocol in (socket.IPPROTO_TCP, socket.IPPROTO_UDP)
        port = int.from_bytes(packet[size + 2 : size + 4]) if has_ports else 0
        host = self._names.host_of(address)
        if protocol != socket.IPPROTO_TCP:
            self._refusals.add(host, port, "other", "protocol")
        elif port not in self._listeners:
            self._refusals.add(host, port, "other", self._verdict(host, port) or "port")

    # -- connections

    async def _accept(self, listener: socket.socket, port: int) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    end, _ = await loop.sock_accept(listener)
                except OSError:  # no descriptors are left, or the client has gone
                    await asyncio.sleep(0.01)
                    continue
                end.setblocking(False)
                while len(self._live) >= self._limit:
                    self._cut(next(iter(self._live)), "limit")
                client = Client(end, port)
                self._live[client] = None
                client.task = loop.create_task(self._serve(client))
                await asyncio.sleep(0)  # sock_accept may return without a wait, and no other task would run

    def _cut(self, client: Client, word: str) -> None:
        """Reset a connection, so that its client cannot take partial data for the whole."""
        self._live.pop(client, None)
        client.cut = word
        client.task.cancel()

    async def _serve(self, client: Client) -> None:
        """Serve one connection to its end."""
        try:
            address = parse_address(client.end.getsockname()[0])
            assert address is not None
            client.host = self._names.host_of(address)
            if client.port == DNS_PORT:
                await self._serve_dns(client)
            elif client.port == PROXY_PORT and address.is_loopback:
                await self._serve_proxy(client)
            else:
                await self._exchange(client)
            await self._finish(client)
        except RefusedError as refused:
            if not refused.is_recorded:
                self._refusals.add(client.host[:300], client.host_port, client.via, refused.word)
            with suppress(OSError, EOFError):
                await self._send_reason(client, refused)
                await self._finish(client)
        except (OSError, EOFError):
            client.end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        except asyncio.CancelledError:
            client.end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            if not client.cut:
                raise
            self._refusals.add(client.host[:300], client.host_port, client.via, client.cut)
        finally:
            self._live.pop(client, None)
            client.end.close()

    async def _finish(self, client: Client) -> None:
        """Read to the end before the close: with unread bytes, the kernel would send a reset and drop sent data."""
        client.end.shutdown(socket.SHUT_WR)
        client.buffer.clear()
        with suppress(OSError, EOFError):
            async with asyncio.timeout(REASON_SECONDS):
                while True:
                    await client.fill()
                    client.buffer.clear()

    async def _send_reason(self, client: Client, refused: RefusedError) -> None:
        """Say in the protocol of the client why it is refused."""
        if client.refuse is not None:
            reason = client.refuse(refused)
        elif client.host_port == 22:
            reason = protocols.ssh_refusal(refused.text)
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(REASON_SECONDS):
                    while len(client.buffer) < 2:
                        await client.fill()
            if client.buffer[:1] == bytes([protocols.TLS_RECORD]):
                reason = protocols.TLS_ALERT
            elif client.host_port == 80 or client.buffer[:1].isalpha():
                reason = protocols.http_refusal("403 Forbidden", refused.text)
            else:
                reason = b""
        await client.send(reason)

    async def _serve_dns(self, client: Client) -> None:
        def message(data: bytes) -> bytes | None:
            size = int.from_bytes(data[:2])
            return data[2 : 2 + size] if len(data) >= 2 + size > 2 else None

        with suppress(EOFError):
            while True:
                query = await client.parsed(message)
                client.take(2 + len(query))
                reply = dns_stub.answer(query, self._names)
                if reply is None:
                    return
                await client.send(len(reply).to_bytes(2) + reply)

    # -- the proxy

    async def _serve_proxy(self, client: Client) -> None:
        await client.parsed(lambda data: data[:1] or None)
        client.via = "socks" if client.buffer[0] in (4, protocols.SOCKS_VERSION) else "proxy"
        try:
            await (self._serve_socks(client) if client.via == "socks" else self._serve_http_proxy(client))
        except MalformedError as error:
            raise self._malformed(client, error) from None

    async def _serve_socks(self, client: Client) -> None:
        client.refuse = lambda _: protocols.SOCKS_FORBIDDEN
        if client.buffer[0] != protocols.SOCKS_VERSION:
            raise RefusedError("protocol")
        needs_no_login, size = await client.parsed(protocols.socks_greeting)
        client.take(size)
        if not needs_no_login:
            await client.send(protocols.SOCKS_NO_METHOD)
            return
        await client.send(protocols.SOCKS_NO_LOGIN)
        command, host, port, size = await client.parsed(protocols.socks_request)
        client.take(size)
        client.host, client.host_port = host, port
        if command != 1:
            client.refuse = lambda _: protocols.SOCKS_BAD_COMMAND
            raise RefusedError("protocol")
        try:
            server = await self._connect(client, self._named(host), port)
        except OSError:
            await client.send(protocols.SOCKS_UNREACHABLE)
            return
        with server:
            await client.send(protocols.SOCKS_GRANTED)
            client.refuse = None
            await self._exchange(client, server)

    async def _serve_http_proxy(self, client: Client) -> None:
        client.refuse = lambda refused: protocols.http_refusal("403 Forbidden", refused.text)
        request: protocols.HttpRequest = await client.parsed(protocols.http_request)
        is_tunnel = request.method == "CONNECT"
        client.host, client.host_port = request.raw, request.port or (0 if is_tunnel else 80)
        if not request.is_absolute or client.host_port == 0:
            raise MalformedError
        client.take(request.size)
        try:
            server = await self._connect(client, self._named(request.host), client.host_port)
        except OSError as error:
            await client.send(protocols.http_refusal("502 Bad Gateway", f"{request.raw}: {_why(error)}"))
            return
        with server:
            if not is_tunnel:
                await self._forward(client, server, request)
                return
            await client.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
            client.refuse = None
            await self._exchange(client, server)

    def _named(self, host: str) -> str:
        """Return the canonical host that a proxy's client names. RefusedError."""
        canonical = canonical_host(host)
        if canonical is None:
            raise RefusedError("host")
        address = parse_address(canonical)
        return canonical if address is None else self._names.host_of(address)

    def _malformed(self, client: Client, error: MalformedError) -> RefusedError:
        if isinstance(error, protocols.HostError):
            client.host, client.host_port = split_port(error.host)
            return RefusedError("host")
        return RefusedError("http" if client.via != "socks" else "host")

    # -- what both ways share

    async def _exchange(self, client: Client, server: socket.socket | None = None) -> None:
        """Serve a stream to `client.host`. `server` is its connection if the client used the proxy, else None."""
        host, port = client.host, client.host_port
        request = None
        if server is None:
            word = self._verdict(host, port)
            if word:
                raise RefusedError(word)
        if port in (80, 443):  # the client of these protocols speaks first
            is_tls = await self._check_server_name(client, host)
            if port == 80 and not is_tls:
                request = await self._plain_request(client, host)
        if server is None:
            server = await self._connect(client, host, port)
        with server:
            if request is not None:
                await self._forward(client, server, request)
            else:
                await self._relay(client, server, host)

    async def _check_server_name(self, client: Client, host: str) -> bool:
        """True for TLS. RefusedError: its server name is another one than `host`."""

        def first(data: bytes) -> bytes | None:
            return data[:2] if len(data) > 1 or data[:1] not in (b"", b"\x16") else None

        try:
            if await client.parsed(first) != b"\x16\x03":
                return False
            name = await client.parsed(protocols.tls_server_name)
        except MalformedError:
            raise RefusedError("server_name") from None
        if name and name != host:
            raise RefusedError("server_name")
        return True

    async def _plain_request(self, client: Client, host: str) -> protocols.HttpRequest:
        """Return the request of a captured connection. RefusedError: it is for another host."""
        try:
            request: protocols.HttpRequest = await client.parsed(protocols.http_request)
        except MalformedError:
            raise RefusedError("http") from None
        named = self._named(request.host) if request.host else host
        if request.method == "CONNECT" or named != host or request.port not in (0, client.host_port):
            raise RefusedError("http")
        client.take(request.size)
        return request

    async def _connect(self, client: Client, host: str, port: int) -> socket.socket:
        """Connect to an admitted host, once that is recorded. RefusedError; OSError: it cannot be reached."""
        client.host, client.host_port = host, port
        word = self._verdict(host, port)
        if word:
            raise RefusedError(word)
        client.is_admitted = True
        try:
            addresses = await self._resolve(host, port)
            await self._record(client, "network.allowed")
            return await _dial_first(addresses[:_MOST_ADDRESSES], port)
        except OSError as error:
            await self._record(client, "network.failed", reason=_why(error))
            raise

    async def _record(self, client: Client, call: str, **more: str) -> None:
        """Record a connection. RefusedError: the session refuses it, or cannot record it."""
        try:
            await self._calls.call(call, host=client.host, port=client.host_port, via=client.via, **more)
        except SessionError as error:
            word = error.word if error.word in NETWORK else "record"
            raise RefusedError(word, is_recorded=error.word in NETWORK) from None

    async def _resolve(self, host: str, port: int) -> list[str]:
        """Return the addresses of a host to which egress may connect. RefusedError: all are private. OSError."""
        private = self._policy.admits_private(host, port)
        literal = parse_address(host)
        found = [host] if literal is not None else await self._lookup(host)
        parsed = [(text, parse_address(text)) for text in found]
        usable = [
            text
            for text, address in parsed
            if address is not None and (private or (is_public(address) and not _is_own(text)))
        ]
        if not usable:
            raise RefusedError("address")
        return usable

    async def _lookup(self, host: str) -> list[str]:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_SECONDS):
            answers = await loop.run_in_executor(self._resolver, _addresses_of, host)
        return list(dict.fromkeys(str(answer[4][0]) for answer in answers))

    async def _forward(self, client: Client, server: socket.socket, request: protocols.HttpRequest) -> None:
        """Send one request and its body, then the response to its end."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(server, request.head)
        answer = b""
        if request.is_upgrade:
            # The bytes after the request are for the WebSocket. They may be sent only after the server's 101.
            while b"\r\n" not in answer and len(answer) < protocols.MAX_HEAD:
                data = await loop.sock_recv(server, _BLOCK)
                if not data:
                    break
                answer += data
            await client.send(answer)
            if answer.startswith(b"HTTP/1.1 101 "):
                await self._relay(client, server, None)
                return
        body = loop.create_task(self._send_body(client, server, request.length))
        try:
            await self._pump(client, server, client.end)
        finally:
            body.cancel()
            result = (await asyncio.gather(body, return_exceptions=True))[0]
        if isinstance(result, MalformedError):
            raise RefusedError("http")

    async def _send_body(self, client: Client, server: socket.socket, length: int) -> None:
        """Send the body of a request, and nothing that follows it."""
        loop = asyncio.get_running_loop()
        chunked = protocols.ChunkedBody()
        try:
            while length > 0 or (length == CHUNKED and not chunked.is_complete):
                if not client.buffer:
                    await client.fill()
                if length == CHUNKED:
                    data = client.take(chunked.feed(bytes(client.buffer)))
                else:
                    data = client.take(length)
                    length -= len(data)
                await loop.sock_sendall(server, data)
                self._touch(client)
                await asyncio.sleep(0)
        except (MalformedError, EOFError):
            server.shutdown(socket.SHUT_RDWR)
            raise

    async def _relay(self, client: Client, server: socket.socket, host: str | None) -> None:
        """Move bytes both ways to the end. With `host`, a TLS server name must equal it."""
        await _all_or_none(self._send_stream(client, server, host), self._pump(client, server, client.end))

    async def _send_stream(self, client: Client, server: socket.socket, host: str | None) -> None:
        if host is not None:
            if not client.buffer:  # without a time limit: in some protocols the server speaks first
                with suppress(EOFError):
                    await client.fill()
            if client.buffer:
                await self._check_server_name(client, host)
        await asyncio.get_running_loop().sock_sendall(server, client.take(len(client.buffer)))
        await self._pump(client, client.end, server)

    async def _pump(self, client: Client, source: socket.socket, target: socket.socket) -> None:
        """Move bytes one way to the end, and pass the end on."""
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(source, _BLOCK):
            await loop.sock_sendall(target, data)
            self._touch(client)
            await asyncio.sleep(0)  # transfers may need no wait, and no other task would run
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _touch(self, client: Client) -> None:
        """Make the client the last of `_live`, because it has transferred bytes."""
        if client in self._live:
            del self._live[client]
            self._live[client] = None


async def _all_or_none(*jobs: Coroutine[Any, Any, None]) -> None:
    """Wait for all jobs; if one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _addresses_of(host: str) -> list[Any]:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)


def _is_own(address: str) -> bool:
    """True if an address is one of this host. Connecting a UDP socket sends nothing."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return False
        own: str = probe.getsockname()[0]
        return own == address


async def _dial_first(addresses: list[str], port: int) -> socket.socket:
    """Connect to the first address that answers. OSError: that of the last one."""
    failure = OSError("it has no address")
    for address in addresses:
        try:
            return await _dial(address, port)
        except OSError as error:
            failure = error
    raise failure


async def _dial(address: str, port: int) -> socket.socket:
    server = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        server.setblocking(False)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(CONNECT_SECONDS):
            await asyncio.get_running_loop().sock_connect(server, (address, port))
    except BaseException:
        server.close()
        raise
    return server


def _why(error: OSError) -> str:
    return error.strerror or str(error) or "it does not answer"


def _log(text: str) -> None:
    sys.stderr.write(f"bonobofs: {text}\n")
    sys.stderr.flush()


def _make_key(session_directory: str) -> str:
    """Write the key by which this process proves itself to the companion."""
    key = secrets.token_hex(16)
    path = os.path.join(session_directory, EGRESS_KEY)
    with suppress(FileNotFoundError):
        os.unlink(path)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(key)
    return key


def _become(uid: int) -> None:
    """Drop the rights of root before untrusted bytes are read."""
    account = pwd.getpwuid(uid)
    os.setgroups(os.getgrouplist(account.pw_name, account.pw_gid))
    os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
    os.setresuid(uid, uid, uid)


async def _run(helper: Helper, control: socket.socket, inside: str, key: str) -> int:
    reader, writer = await asyncio.open_connection(sock=control)
    line = await reader.readline()
    if not line:
        return 0
    egress = Egress(helper, SessionCalls(inside, key))
    try:
        await egress.start(json.loads(line)["pid"])
        answer: dict[str, Any] = {"ready": True}
    except (NamespaceError, SessionError) as error:
        answer = {"error": str(error)}
    writer.write(json.dumps(answer).encode() + b"\n")
    with suppress(OSError):
        await writer.drain()
        while await reader.read(_BLOCK):
            pass
    if "ready" in answer:
        await egress.stop()
    return 0 if "ready" in answer else 1


def main() -> NoReturn:
    """Serve the sandbox of the launcher at the socket of the command line, and exit."""
    control = socket.socket(fileno=int(sys.argv[-1]))
    config = sys.stdin.buffer.read()
    if not config:
        os._exit(0)  # the launcher has ended
    document = json.loads(config)
    log = os.open(os.path.join(document["session_dir"], "egress.log"), _LOG_FLAGS, 0o600)
    os.dup2(log, 2)
    os.close(log)
    helper = Helper()
    key = _make_key(document["session_dir"])
    if document.get("user") is not None and os.geteuid() == 0:
        _become(document["user"])
    syscalls.forbid_tracing()
    code = asyncio.run(_run(helper, control, os.path.join(document["session_dir"], INSIDE), key))
    sys.stderr.flush()
    # The interpreter's own exit would wait for the resolver's threads, and so for the host's name server.
    os._exit(code)


if __name__ == "__main__":
    main()
