"""If a process of the session ends, nothing opens: connections that cannot be recorded are refused."""

from __future__ import annotations

import os
import signal

from tests.sandbox.network_world import Network
from tests.support.observe import companion_of
from tests.support.wait import until


def test_connections_need_the_record(network: Network) -> None:
    assert network.curl("http://good.test/1").stdout.startswith("GET /1 ")
    first = companion_of(network.world.pid)
    os.kill(first, signal.SIGKILL)
    until(lambda: network.curl("http://good.test/2").stdout.startswith("GET /2 "), "the companion returns", seconds=30)
    assert companion_of(network.world.pid) != first
    network.world.kill()
    answer = network.curl("http://good.test/3").stdout
    assert "cannot be recorded" in answer
    assert "403" in network.curl("-I", "http://evil.test/3").stdout
    assert not network.reached(kind="request", path="/3")
