"""Attacks on the network wall, as programs in the sandbox: none reaches a host that the lists do not name."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from bonobofs.sandbox import network_list
from tests.sandbox.network_world import EVIL, GOOD, HOST, METADATA, PRIVATE, Network
from tests.support.wait import until

CONNECT = """
import socket, sys
s = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
s.settimeout(10)
try:
    s.connect((sys.argv[1], int(sys.argv[2])))
    s.sendall(sys.argv[3].encode("latin-1").decode("unicode_escape").encode("latin-1"))
    got = b""
    while data := s.recv(65536):
        got += data
    print("got", repr(got[:400]))
except OSError as error:
    print("error", error.errno)
"""


def connect(network: Network, host: str, port: int, data: str = "") -> str:
    return network.sandbox.python(CONNECT, host, str(port), data)


def proxy(network: Network, data: bytes) -> bytes:
    """Send bytes to the proxy; all that it answers."""
    program = """
        import socket, sys
        s = socket.create_connection(("127.0.0.1", 3128)); s.settimeout(20)
        s.sendall(bytes.fromhex(sys.argv[1])); s.shutdown(socket.SHUT_WR); got = b""
        try:
            while data := s.recv(65536): got += data
        except OSError: pass
        print(got.hex())
    """
    return bytes.fromhex(network.sandbox.python(program, data.hex()).strip())


def socks(host: bytes, port: int) -> bytes:
    return b"\x05\x01\x00\x05\x01\x00\x03" + bytes([len(host)]) + host + port.to_bytes(2)


def reached_evil(network: Network) -> list[Any]:
    return [line for line in network.reached() if line.get("local", "").endswith(EVIL)]


def test_a_server_of_the_host_is_not_reached(network: Network) -> None:
    program = """
        import socket, sys
        server = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
        abstract = socket.socket(socket.AF_UNIX); abstract.bind("\\0bonobofs-test"); abstract.listen()
        print(server.getsockname()[1], flush=True); sys.stdin.read()
    """
    server = subprocess.Popen(
        [*network.host.enter(), sys.executable, "-c", "\n".join(line[8:] for line in program.splitlines())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    port = int(server.stdout.readline())
    for address in ("127.0.0.1", "::1", HOST):
        assert connect(network, address, port) == "error 111\n"
    network.recorded(HOST, port, "network:policy")
    program = (
        "import socket\ntry: socket.socket(socket.AF_UNIX).connect('\\0bonobofs-test')\nexcept OSError as e: print(e)"
    )
    assert "refused" in network.sandbox.python(program)
    server.communicate()


@pytest.mark.parametrize("address", [METADATA, "fd00:ec2::254", PRIVATE, "192.168.7.7", "100.64.0.9", EVIL, "8.8.8.8"])
def test_an_address_that_is_not_listed_is_refused_with_a_reason(network: Network, address: str) -> None:
    answer = connect(network, address, 80, "GET / HTTP/1.1\\r\\nHost: good.test\\r\\n\\r\\n")
    assert "403 Forbidden" in answer, answer
    assert connect(network, address, 9999) == "error 111\n"
    network.recorded(address, 80, "network:policy")
    network.recorded(address, 9999, "network:policy")
    assert not network.reached(kind="connection", local=f"::ffff:{address}")


@pytest.mark.parametrize("text", ["::ffff:93.184.216.35", "1572395043", "0x5db8d823", "0135.0270.0330.043", "0.0.0.0"])
def test_no_notation_of_an_address_passes(network: Network, text: str) -> None:
    assert "403 Forbidden" in connect(network, text, 80, "GET / HTTP/1.1\\r\\n\\r\\n")
    refused = proxy(network, f"CONNECT {text if ':' not in text else f'[{text}]'}:443 HTTP/1.1\r\n\r\n".encode())
    assert b"403 Forbidden" in refused
    assert proxy(network, socks(text.encode(), 443)).startswith(b"\x05\x00\x05\x02")
    assert not reached_evil(network)


@pytest.mark.parametrize(
    "name", ["local.test", "private.test", "metadata.test", "nat64.test", "sixtofour.test", "own.test"]
)
def test_a_listed_name_that_leads_to_a_private_address_is_not_dialled(network: Network, name: str) -> None:
    assert "no public address" in network.curl(f"http://{name}/").stdout
    network.recorded(name, 80, "network:address")
    assert not [entry for entry in network.entries() if entry.details.get("host") == name and entry.rule == "network"]
    assert not network.reached(kind="connection", local=f"::ffff:{PRIVATE}", port=80)


def test_a_name_with_public_and_private_addresses_leads_to_the_public_one(network: Network) -> None:
    assert network.curl("http://mixed.test/m").stdout.startswith("GET /m mixed.test")
    assert network.reached(kind="request", path="/m", local=f"::ffff:{GOOD}")


def test_a_name_that_changes_its_address_is_judged_each_time(network: Network) -> None:
    assert network.curl("http://rebound.test/1").stdout.startswith("GET /1 ")
    assert "no public address" in network.curl("http://rebound.test/2").stdout
    assert not network.reached(kind="connection", local=f"::ffff:{PRIVATE}", port=80)


def test_a_private_entry_admits_a_private_address(network: Network) -> None:
    assert connect_named(network, "db.test", 5432) == "b'hello\\nping'\n"
    assert network.reached(kind="connection", local=f"::ffff:{PRIVATE}", port=5432)


def connect_named(network: Network, name: str, port: int) -> str:
    """Talk with a server that speaks first."""
    program = """
        import socket, sys
        s = socket.create_connection((sys.argv[1], int(sys.argv[2]))); s.settimeout(10)
        got = s.recv(6); s.sendall(b"ping"); got += s.recv(4); print(got)
    """
    return network.sandbox.python(program, name, str(port))


def test_no_query_leaves_the_machine(network: Network) -> None:
    program = """
        import socket
        for resolver in ("127.0.0.1", "8.8.8.8", "1.1.1.1"):
            q = b"\\0\\1\\1\\0\\0\\1\\0\\0\\0\\0\\0\\0\\4data\\4evil\\4test\\0\\0\\1\\0\\1"
            u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.settimeout(5)
            u.connect((resolver, 53)); u.send(q); answer = u.recv(512)
            t = socket.create_connection((resolver, 53)); t.sendall(len(q).to_bytes(2) + q)
            assert t.recv(512)[2:] == answer
            print(socket.inet_ntoa(answer[-4:])[:6])
    """
    assert network.sandbox.python(program) == "198.18\n" * 3
    assert not network.reached(kind="query", name="data.evil.test")
    assert not network.reached(port=53)
    assert "403" in connect(network, "data.evil.test", 80, "GET / HTTP/1.1\\r\\n\\r\\n")
    network.recorded("data.evil.test", 80, "network:policy")


def test_other_ways_to_a_resolver_and_quic_are_refused(network: Network) -> None:
    assert connect(network, "1.1.1.1", 853) == "error 111\n"
    assert "got b'\\x15\\x03\\x03" in connect(network, "8.8.8.8", 443, "\\x16\\x03\\x01")
    program = """
        import socket
        u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); u.connect(("8.8.8.8", 443)); u.send(b"quic")
        try: u.send(b"again"); print("sent")
        except OSError as error: print(error.errno)
    """
    assert network.sandbox.python(program) == "111\n"
    network.recorded("1.1.1.1", 853, "network:policy")
    network.recorded("8.8.8.8", 443, "network:protocol")
    assert not network.reached(local="::ffff:1.1.1.1")


BAD_NAMES = [
    b"evil.test\0.good.test",
    b"good.test@evil.test",
    b"evil.test#.good.test",
    b"good.test.evil.test",
    b"xgood.test",
    b"xn--good.test\xe9",
    b"a" * 300 + b".good.test",
    b"a..good.test",
    b".good.test",
    b"evil.test/.good.test",
    b"evil.test\\.good.test",
    b"evil.test%00.good.test",
    b"evil.test:80.good.test",
    b"*.good.test",
    b"",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_no_spelling_of_a_name_passes_the_proxy(network: Network, name: bytes) -> None:
    before = len(network.reached())
    for request in (
        b"CONNECT %b:443 HTTP/1.1\r\nHost: good.test\r\n\r\n",
        b"GET http://%b/ HTTP/1.1\r\n\r\n",
        b"GET http://%b/ HTTP/1.1\r\nHost: good.test\r\n\r\n",
    ):
        assert proxy(network, request % name).startswith(b"HTTP/1.1 403 Forbidden")
    assert proxy(network, socks(name[:255], 443))[2:4] == b"\x05\x02"
    assert len(network.reached()) == before


def test_case_and_a_final_dot_do_not_matter(network: Network) -> None:
    assert network.curl("http://GOOD.TEST./dot").stdout.startswith("GET /dot GOOD.TEST.")
    assert b"200 Connection established" in proxy(network, b"CONNECT GOOD.TEST.:8080 HTTP/1.1\r\n\r\n")
    assert proxy(network, socks(b"Good.Test", 5432)).startswith(b"\x05\x00\x05\x00")


def test_another_port_of_a_listed_name_is_refused_and_recorded(network: Network) -> None:
    assert connect(network, "good.test", 9998) == "error 111\n"
    network.recorded("good.test", 9998, "network:policy")
    assert "403 Forbidden" in connect(network, "evil.test", 8080, "GET / HTTP/1.1\\r\\n\\r\\n")
    network.recorded("evil.test", 8080, "network:policy")
    assert b"403" in proxy(network, b"CONNECT good.test:9998 HTTP/1.1\r\n\r\n")
    assert "Received disconnect" in ssh(network, "evil.test") or "does not admit" in ssh(network, "evil.test")


def ssh(network: Network, host: str) -> str:
    return connect(network, host, 22)


HELLO = """
import socket, ssl, sys, time
name, sni, way = sys.argv[1:]
incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT); context.check_hostname = False; context.verify_mode = ssl.CERT_NONE
tls = context.wrap_bio(incoming, outgoing, server_hostname=sni or None)
try: tls.do_handshake()
except ssl.SSLWantReadError: pass
hello = outgoing.read()
if way == "records":
    body = hello[5:]
    hello = b"".join(b"\\x16\\x03\\x01" + len(body[i:i+7]).to_bytes(2) + body[i:i+7] for i in range(0, len(body), 7))
if way == "garbage":
    hello = hello[:60] + b"\\xff" * (len(hello) - 60)
s = socket.create_connection((name, 443)); s.settimeout(10); s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
step = 1 if way == "bytes" else len(hello)
try:
    for i in range(0, len(hello), step): s.sendall(hello[i:i + step])
    print(s.recv(7).hex())
except OSError as error: print("error", error.errno)
"""


@pytest.mark.parametrize("way", ["whole", "bytes", "records"])
def test_another_server_name_gets_an_alert(network: Network, way: str) -> None:
    assert network.sandbox.python(HELLO, "good.test", "evil.test", way) == "15030300020231\n"
    network.recorded("good.test", 443, "network:server_name")
    assert not network.reached(kind="hello", name="evil.test")
    assert network.sandbox.python(HELLO, "good.test", "good.test", way).startswith("1603")


def test_without_a_server_name_the_name_decides_and_garbage_is_refused(network: Network) -> None:
    assert network.sandbox.python(HELLO, "good.test", "", "whole").startswith("1603")
    assert network.sandbox.python(HELLO, "evil.test", "", "whole") == "15030300020231\n"
    assert network.sandbox.python(HELLO, "good.test", "good.test", "garbage") == "15030300020231\n"


def test_a_server_name_on_another_port_is_checked_too(network: Network) -> None:
    program = HELLO.replace("443", "8080")
    assert network.sandbox.python(program, "good.test", "evil.test", "bytes") == "15030300020231\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET http://evil.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n",
        b"GET http://good.test/ HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: good.test\r\nHost: evil.test\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: good.test\r\n Host: evil.test\r\n\r\n",
        b"GET / HTTP/1.1\nHost: evil.test\n\n",
        b"CONNECT evil.test:443 HTTP/1.1\r\nHost: good.test\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: good.test\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: good.test\r\nTransfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: good.test\r\nContent-Length: +3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: good.test\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: good.test\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: good.test\r\nX: a\rb\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: good.test\r\nX: a\0b\r\n\r\n",
        b"GET  / HTTP/1.1\r\nHost: good.test\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"hello\r\n\r\n",
    ],
)
def test_an_ambiguous_request_is_refused(network: Network, request_bytes: bytes) -> None:
    before = len(network.reached(kind="request"))
    escaped = "".join(f"\\x{byte:02x}" for byte in request_bytes)
    assert "403 Forbidden" in connect(network, "good.test", 80, escaped)
    tunnelled = proxy(network, b"CONNECT good.test:80 HTTP/1.1\r\n\r\n" + request_bytes)
    assert b"403 Forbidden" in tunnelled
    assert len(network.reached(kind="request")) == before
    assert not reached_evil(network)


def test_one_connection_carries_one_request(network: Network) -> None:
    second = b"GET /second HTTP/1.1\r\nHost: evil.test\r\n\r\n"
    for first in (
        b"GET /first HTTP/1.1\r\nHost: good.test\r\n\r\n",
        b"POST /first HTTP/1.1\r\nHost: good.test\r\nContent-Length: 3\r\n\r\nabc",
        b"POST /first HTTP/1.1\r\nHost: good.test\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3;x=y\r\nabc\r\n0\r\nT: v\r\n\r\n",
    ):
        answer = connect(network, "good.test", 80, "".join(f"\\x{byte:02x}" for byte in first + second))
        assert answer.count("HTTP/1.1 200") == 1, answer
        target = first.replace(b"/first", b"http://good.test/first")
        assert proxy(network, target + second.replace(b"/second", b"http://evil.test/second")).count(b"HTTP/1.1") == 1
    assert not network.reached(kind="request", path="/second")
    assert not reached_evil(network)


def test_a_chunked_body_that_hides_a_request_ends_the_connection(network: Network) -> None:
    body = b"3\r\nabcGET /hidden HTTP/1.1\r\nHost: evil.test\r\n\r\n"
    head = b"POST /x HTTP/1.1\r\nHost: good.test\r\nTransfer-Encoding: chunked\r\n\r\n"
    connect(network, "good.test", 80, "".join(f"\\x{byte:02x}" for byte in head + body))
    assert not network.reached(kind="request", path="/hidden")


def test_a_websocket_passes_after_the_server_agrees(network: Network) -> None:
    program = """
        import socket
        s = socket.create_connection(("good.test", 80)); s.settimeout(10)
        s.sendall(b"GET /ws HTTP/1.1\\r\\nHost: good.test\\r\\nConnection: Upgrade\\r\\nUpgrade: websocket\\r\\n\\r\\n")
        head = b""
        while b"\\r\\n\\r\\n" not in head: head += s.recv(100)
        s.sendall(b"frame"); print(head[:12], s.recv(5))
    """
    assert network.sandbox.python(program) == "b'HTTP/1.1 101' b'frame'\n"


def test_a_relay_in_the_sandbox_is_judged_like_the_rest(network: Network) -> None:
    program = """
        import socket, threading
        relay = socket.create_server(("127.0.0.1", 0))
        def serve():
            end, _ = relay.accept()
            out = socket.create_connection(("127.0.0.1", 3128))
            out.sendall(end.recv(4096)); end.sendall(out.recv(4096))
        threading.Thread(target=serve, daemon=True).start()
        s = socket.create_connection(relay.getsockname()); s.sendall(b"CONNECT evil.test:443 HTTP/1.1\\r\\n\\r\\n")
        print(s.recv(12))
    """
    assert network.sandbox.python(program) == "b'HTTP/1.1 403'\n"


def test_egress_keeps_its_ports(network: Network) -> None:
    program = """
        import socket
        for port in (53, 80, 3128):
            try: socket.socket().bind(("", port)); print("bound")
            except OSError as error: print(error.errno)
    """
    assert set(network.sandbox.python(program).split()) <= {"98", "13"}


def test_socks_4_and_other_commands_are_refused(network: Network) -> None:
    assert proxy(network, b"\x04\x01\x00\x50\x5d\xb8\xd8\x22\0")[:2] == b"\x05\x02"
    assert proxy(network, b"\x05\x01\x00\x05\x03\x00\x01\x5d\xb8\xd8\x22\x00\x50").endswith(
        b"\x05\x07\x00\x01" + bytes(6)
    )
    assert proxy(network, b"\x05\x01\x02") == b"\x05\xff"


def test_the_agent_cannot_forge_a_record(network: Network) -> None:
    program = """
        import json, os, socket, sys
        os.chdir(sys.argv[1])  # an address of AF_UNIX has at most 107 bytes
        allowed = {"call": "network.allowed", "host": "a.test", "port": 1, "via": "proxy"}
        for call in ({"call": "network.lists"}, allowed):
            for key in ({}, {"key": ""}, {"key": "0" * 32}):
                s = socket.socket(socket.AF_UNIX); s.connect("guard.sock")
                s.sendall(json.dumps({**call, **key}).encode() + b"\\n")
                print(json.loads(s.makefile().readline())["ok"])
    """
    directory = network.world.home / "sessions" / network.world.session.session / "inside"
    assert network.sandbox.python(program, str(directory)) == "False\n" * 6
    assert not [entry for entry in network.entries() if entry.details.get("host") == "a.test"]


def test_a_removed_entry_cuts_a_running_download(network: Network) -> None:
    home = network.world.home
    download = subprocess.Popen(
        [*network.sandbox.enter(), "curl", "-q", "-sS", "-o", "/dev/null", "http://sub.good.test/endless"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: network.reached(kind="request", path="/endless"), "the download starts")
        network_list.disallow(home, None, ["*"])
        _, errors = download.communicate(timeout=10)
        assert download.returncode != 0, errors
        network.recorded("sub.good.test", 80, "network:removed")
        assert "operator's list" in network.curl("http://sub.good.test/").stdout
        network_list.allow(home, None, ["good.test"])
        until(lambda: "GET / " in network.curl("http://good.test/").stdout, "the new entry holds")
        (home / "network.toml").write_text("allow = [")
        entry = until(
            lambda: [
                one for one in network.world.entries() if one.operation == "network_list" and one.details["error"]
            ],
            "the broken list is recorded",
        )[-1]
        assert "network.toml" in entry.details["error"]
        assert "GET / " in network.curl("http://good.test/").stdout
        assert "operator's list" in network.curl("http://sub.good.test/").stdout
    finally:
        download.kill()
        download.wait()
        network_list.reset(home, None)
    until(lambda: "GET / " in network.curl("http://sub.good.test/").stdout, "the reset list holds")


def test_a_new_port_of_the_list_is_captured(network: Network) -> None:
    home = network.world.home
    program = "import socket; print(socket.socket().connect_ex(('evil.test', 7070)))"
    assert network.sandbox.python(program) == "111\n"
    network_list.disallow(home, None, ["*"])
    try:
        network_list.allow(home, None, ["good.test:7070"])
        until(lambda: network.sandbox.python(program) == "0\n", "the new port is captured")
    finally:
        network_list.reset(home, None)


def test_the_record_shows_the_reasons_to_the_agent(network: Network) -> None:
    network.curl("http://evil.test/shown")
    network.recorded("evil.test", 80, "network:policy")
    lines = [json.loads(line) for line in (network.world.path / ".bonobofs" / "denials.jsonl").read_text().splitlines()]
    shown = [line for line in lines if line.get("code") == "NETWORK" and "evil.test:80" in line.get("about", "")]
    assert shown
    assert shown[-1]["operation"] == "connect"


def test_an_admitted_host_that_cannot_be_reached_is_recorded(network: Network) -> None:
    """Its name has no address, so egress cannot connect. The client gets the reason.

    Requests before egress follows the list are denied, and recorded too.
    """
    until(
        lambda: (
            "missing.good.test: " in network.curl("-x", "http://127.0.0.1:3128", "http://missing.good.test/").stdout
        ),
        "egress follows the list, and cannot connect",
    )
    entry = until(
        lambda: [
            one for one in network.entries() if one.details.get("host") == "missing.good.test" and one.result == "error"
        ],
        "the failure is recorded",
    )[-1]
    assert entry.operation == "connect"
    assert entry.reason
