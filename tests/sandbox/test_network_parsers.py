"""The parsers of the network: total on any bytes, and strict where two parsers could disagree."""

from __future__ import annotations

import ssl
import struct
from ipaddress import ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bonobofs.errors import PolicyError
from bonobofs.policy.allow_list import AllowList, canonical_host, is_public, parse_address, parse_entry
from bonobofs.policy.decision import Denied, Permit
from bonobofs.policy.document import parse
from bonobofs.policy.engine import compile_policy, decide
from bonobofs.policy.request import Context, Operation, Principal, Request, WorkspacePath
from bonobofs.sandbox import dns_stub
from bonobofs.sandbox.dns_stub import FakeNames, answer
from bonobofs.sandbox.stream_protocols import (
    CHUNKED,
    ChunkedBody,
    HttpRequest,
    MalformedError,
    http_request,
    socks_greeting,
    socks_request,
    ssh_refusal,
    tls_server_name,
)

LABEL = st.from_regex(r"[a-z0-9_]([a-z0-9_-]{0,10}[a-z0-9_])?", fullmatch=True)
NAME = st.lists(LABEL, min_size=1, max_size=4).map(".".join).filter(lambda name: canonical_host(name) is not None)


# -- names and lists


@given(st.text(max_size=300))
def test_a_canonical_host_is_its_own_canonical_form_and_is_plain(text: str) -> None:
    host = canonical_host(text)
    if host is not None:
        assert canonical_host(host) == host
        assert host.isascii()
        assert not set(host) & set("\0\t\n\r #%/?@[\\] *")
        assert len(host) <= 253


@given(NAME, NAME)
def test_a_list_admits_its_names_and_no_others(listed: str, other: str) -> None:
    single, below = AllowList([listed]), AllowList([f"*.{listed}"])
    assert single.admits(listed, 443)
    assert single.admits(listed, 80)
    assert not single.admits(listed, 22)
    assert single.admits(other, 443) == (other == listed)
    assert not below.admits(listed, 443)
    assert below.admits(f"x.{listed}", 443) == (canonical_host(f"x.{listed}") is not None)
    assert not below.admits(f"x{listed}", 443)
    assert not AllowList([]).admits(listed, 443)
    assert AllowList(["*"]).admits(other, 1)


@pytest.mark.parametrize(
    "entry",
    [
        *("", "*.*", "a*.b", "http://a.b", "a.b/", "1.2.3.4", "10.0.0.1:80", "[::1]:80", "a.b:0", "a.b:65536", "a b"),
        *("é.fr", "0x7f000001", "2130706433:80", "*.1.2.3.4:80", 5, {"host": "a.b", "public": True}, {"private": True}),
    ],
)
def test_an_entry_that_means_no_host_is_rejected(entry: object) -> None:
    with pytest.raises(PolicyError):
        parse_entry(entry)


@pytest.mark.parametrize(
    "text",
    [
        *("127.0.0.1", "10.0.0.1", "100.64.0.1", "169.254.169.254", "192.0.0.1", "0.0.0.0", "255.255.255.255"),
        *("64:ff9b::808:808", "64:ff9b:1::1", "2002:808:808::1", "::8.8.8.8", "fec0::1", "fd00::1", "fe80::1"),
        *("::1", "::", "::ffff:10.0.0.1", "198.18.0.5", "240.0.0.1", "2001::1", "168.63.129.16", "192.88.99.1"),
        *("224.0.0.1", "ff02::1"),
    ],
)
def test_an_address_that_leads_elsewhere_is_not_public(text: str) -> None:
    assert not is_public(ip_address(text))


def test_an_address_of_the_internet_is_public() -> None:
    assert all(is_public(ip_address(text)) for text in ("8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"))
    assert str(parse_address("::ffff:8.8.8.8")) == "8.8.8.8"


def test_a_policy_names_hosts_and_the_engine_decides_by_them() -> None:
    text = '[network]\nallow = ["a.test", {host = "10.0.0.1:5432", private = true}]\n'
    policy = compile_policy(parse(text, "policy.toml").model_dump(mode="json"))
    agent, request = Principal("alice", "id", "agent"), Request(Operation.CONNECT, WorkspacePath(""))
    admitted = decide(policy, agent, request, Context(endpoint=("a.test", 443)))
    assert isinstance(admitted, Permit)
    assert admitted.rule == "network"
    refused = decide(policy, agent, request, Context(endpoint=("b.test", 443)))
    assert isinstance(refused, Denied)
    assert (refused.code, refused.rule) == ("NETWORK", "network:policy")
    assert policy.network.admits_private("10.0.0.1", 5432)
    assert not compile_policy({}).network.admits("a.test", 443)


@pytest.mark.parametrize(
    "entry", ['"http://a"', '"*", "a.test"', "5", '{host = "a.test", private = 1}', '"10.0.0.1:80"']
)
def test_a_policy_with_another_entry_is_rejected_with_its_line(entry: str) -> None:
    with pytest.raises(PolicyError, match=r"policy\.toml:2: network\.allow"):
        parse(f"[network]\nallow = [{entry}]\n", "policy.toml")


# -- TLS


def client_hello(name: str | None) -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    tls = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


@settings(max_examples=30)
@given(NAME.filter(lambda name: not name.startswith("-") and "_" not in name), st.integers(1, 400))
def test_a_server_name_is_found_in_any_division(name: str, size: int) -> None:
    hello = client_hello(name)
    body = hello[5:]
    records = b"".join(
        b"\x16\x03\x01" + len(part).to_bytes(2) + part
        for part in (body[index : index + size] for index in range(0, len(body), size))
    )
    for data in (hello, records):
        assert tls_server_name(data) == name
        assert tls_server_name(data + b"more") == name
        for cut in range(1, len(data), 17):
            assert tls_server_name(data[:cut]) is None


def test_a_hello_without_a_name_has_none() -> None:
    assert tls_server_name(client_hello(None)) == ""


@given(st.binary(max_size=600), st.integers(0, 599), st.integers(0, 255))
def test_no_bytes_break_the_parser_of_tls(data: bytes, place: int, value: int) -> None:
    hello = bytearray(client_hello("good.test"))
    hello[place % len(hello)] = value
    for sample in (b"\x16\x03\x01" + data, bytes(hello)):
        try:
            name = tls_server_name(sample)
        except MalformedError:
            continue
        assert name is None or name == "" or canonical_host(name) == name


def test_a_hello_without_end_is_refused() -> None:
    endless = b"".join(b"\x16\x03\x01\x00\x01" + byte for byte in (b"\x01", b"\x00", b"\xff", b"\xff", *[b"\0"] * 9000))
    with pytest.raises(MalformedError):
        tls_server_name(endless)
    with pytest.raises(MalformedError):
        tls_server_name(b"\x16\x03\x01\x40\x00" * 4000)


# -- HTTP


def parsed(head: bytes) -> HttpRequest:
    request = http_request(head)
    assert request is not None
    return request


def test_the_head_for_the_server_has_one_host_and_no_proxy_headers() -> None:
    request = parsed(
        b"GET http://Good.Test:8080/a?b HTTP/1.1\r\nHost: good.test:8080\r\nProxy-Authorization: secret\r\n"
        b"Connection: keep-alive, Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: x\r\nX-Kept: yes\r\n\r\nrest"
    )
    assert (request.host, request.port, request.is_absolute, request.is_upgrade) == ("good.test", 8080, True, False)
    assert request.head == (b"GET /a?b HTTP/1.1\r\nx-kept: yes\r\nhost: Good.Test:8080\r\nconnection: close\r\n\r\n")


@given(st.binary(max_size=300))
def test_no_bytes_break_the_parser_of_http(data: bytes) -> None:
    for sample in (data, data + b"\r\n\r\n", b"GET / HTTP/1.1\r\nHost: " + data + b"\r\n\r\n"):
        try:
            request = http_request(sample)
        except MalformedError:
            continue
        if request is not None:
            assert request.host == "" or canonical_host(request.host) == request.host
            assert request.head.count(b"\r\n\r\n") == 1
            assert b"\n" not in request.head.replace(b"\r\n", b"")


@given(st.binary(max_size=200))
def test_no_name_passes_through_connect_in_another_spelling(name: bytes) -> None:
    try:
        request = http_request(b"CONNECT " + name + b":443 HTTP/1.1\r\n\r\n")
    except MalformedError:
        return
    assert request is not None
    assert request.host in (name.decode().lower().removesuffix("."), str(parse_address(name.decode().strip("[]"))))


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=4), st.binary(max_size=30), st.integers(1, 30))
def test_a_chunked_body_ends_at_its_end(chunks: list[bytes], rest: bytes, step: int) -> None:
    body = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\nTrailer: x\r\n\r\n"
    data, reader, used = body + rest, ChunkedBody(), 0
    while not reader.is_complete:
        used += reader.feed(data[used : used + step])
    assert used == len(body)


@given(st.binary(max_size=200), st.integers(1, 50))
def test_no_bytes_break_the_parser_of_chunks(data: bytes, step: int) -> None:
    reader, whole = ChunkedBody(), ChunkedBody()

    def feed(body: ChunkedBody, size: int) -> int | None:
        used = 0
        try:
            while used < len(data) and not body.is_complete:
                used += body.feed(data[used : used + size])
        except MalformedError:
            return None
        return used

    assert feed(reader, step) == feed(whole, len(data) or 1)


def test_the_length_of_a_body_is_unambiguous() -> None:
    assert parsed(b"POST / HTTP/1.1\r\nContent-Length: 12\r\n\r\n").length == 12
    assert parsed(b"POST / HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n\r\n").length == CHUNKED


# -- SOCKS, SSH, DNS


@given(st.binary(max_size=300))
def test_no_bytes_break_the_parser_of_socks(data: bytes) -> None:
    socks_greeting(data)
    try:
        request = socks_request(data)
    except MalformedError:
        return
    if request is not None:
        assert request[3] <= len(data)


def test_a_nul_stays_in_a_name_of_socks() -> None:
    name = b"evil\0.good"
    request = socks_request(b"\x05\x01\x00\x03" + bytes([len(name)]) + name + b"\x01\xbb")
    assert request == (1, "evil\0.good", 443, 17)
    assert canonical_host(request[1]) is None


@given(st.text(max_size=100))
def test_the_refusal_of_ssh_is_one_packet(text: str) -> None:
    banner, _, packet = ssh_refusal(text).partition(b"\r\n")
    size, padding = struct.unpack_from(">IB", packet)
    assert banner.startswith(b"SSH-2.0-")
    assert len(packet) == 4 + size
    assert len(packet) % 8 == 0
    assert padding >= 4


def query(name: str, kind: int = 1) -> bytes:
    labels = b"".join(bytes([len(label)]) + label for label in (part.encode() for part in name.split(".")))
    return b"\x12\x34\x01\x00\0\1\0\0\0\0\0\0" + labels + b"\0" + kind.to_bytes(2) + b"\0\1"


@given(st.lists(NAME.filter(lambda name: not name.endswith(("arpa", "localhost"))), min_size=1, max_size=30))
def test_each_name_has_one_address_that_leads_to_it_alone(names: list[str]) -> None:
    table = FakeNames()
    found = {}
    for name in names:
        reply = answer(query(name.upper()), table)
        assert reply is not None
        found[name] = ip_address(reply[-4:])
        assert found[name] in dns_stub.FAKE_NETWORK
    assert len({*found.values()}) == len({*names})
    for name, address in found.items():
        assert table.host_of(address) == name


def test_other_types_are_empty_and_all_addresses_are_given_once() -> None:
    table = FakeNames()
    for kind in (28, 65, 16, 255):
        reply = answer(query("a.test", kind), table)
        assert reply is not None
        assert reply[3] & 15 == 0
        assert reply[6:8] == b"\0\0"
    table = FakeNames(1)
    assert table.address_of("a.test") is not None
    assert table.address_of("b.test") is None
    assert table.address_of("a.test") is not None


@given(st.binary(max_size=600))
def test_no_bytes_break_the_stub(data: bytes) -> None:
    for sample in (data, b"\0\0\1\0\0\1\0\0\0\0\0\0" + data):
        reply = answer(sample, FakeNames())
        assert reply is None or len(reply) < 600
