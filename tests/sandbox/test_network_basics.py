"""Programs reach listed hosts without knowing of a proxy, and learn why another host is refused."""

from __future__ import annotations

from tests.sandbox.network_world import Network


def test_an_admitted_host_is_reached_by_plain_http_and_https(network: Network) -> None:
    plain = network.curl("http://good.test/a")
    assert plain.stdout == "GET /a good.test 0\n", plain.stderr
    secure = network.curl("https://good.test/b")
    assert secure.stdout == "GET /b good.test 0\n", secure.stderr
    assert network.recorded("good.test", 443, "network").result == "allowed"


def test_a_refused_host_is_explained_and_recorded(network: Network) -> None:
    plain = network.curl("http://evil.test/a")
    assert "bonobofs: The policy does not admit this host" in plain.stdout
    secure = network.curl("https://evil.test/a")
    assert "access denied" in secure.stderr
    entry = network.recorded("evil.test", 443, "network:policy")
    assert (entry.result, entry.code, entry.operation) == ("denied", "NETWORK", "connect")
    assert not network.reached(kind="query", name="evil.test")
