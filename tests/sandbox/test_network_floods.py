"""Floods from the sandbox: each attempt is counted, and many connections do not keep others out."""

from __future__ import annotations

import os
import signal

import pytest

from tests.sandbox.network_world import Network
from tests.support import proc
from tests.support.wait import until

ATTEMPTS = """
import socket
for index in range(20000):
    s = socket.socket(); s.connect_ex(("8.8.4.4", 10000 + index)); s.close()
"""


def _refused(network: Network) -> int:
    """How many attempts are recorded. One that egress had no time to read is counted, without its address."""
    return network.count("network:policy") + network.count("network:protocol")


@pytest.mark.parametrize("stopped", [False, True])
def test_every_refused_connect_is_counted(network: Network, stopped: bool) -> None:
    before, unread = _refused(network), network.count("network:protocol")
    if stopped:
        os.kill(network.egress.process.pid, signal.SIGSTOP)
    try:
        network.sandbox.python(ATTEMPTS, timeout=110)
    finally:
        os.kill(network.egress.process.pid, signal.SIGCONT)
    until(lambda: _refused(network) - before >= 20000, "20,000 attempts are recorded")
    assert _refused(network) - before == 20000
    if stopped:
        assert network.count("network:protocol") > unread


def test_idle_connections_do_not_keep_others_out(network: Network) -> None:
    program = """
        import resource, socket, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(20000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
        count = min(10000, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 50)
        silent = []
        for index in range(count):
            s = socket.socket(); s.settimeout(20)
            s.connect(("127.0.0.1", 3128) if index % 2 else ("93.184.216.34", 443)); silent.append(s)
            if index % 3 == 0: s.send(b"C" if index % 2 else b"\\x16")
        s = socket.create_connection(("good.test", 80)); s.settimeout(20)
        s.sendall(b"GET /crowd HTTP/1.1\\r\\nHost: good.test\\r\\n\\r\\n"); print(count, s.recv(15))
    """
    count, *answer = network.sandbox.python(program, timeout=110).split()
    assert int(count) > 2000
    assert " ".join(answer) == "b'HTTP/1.1 200 OK'"
    # nsenter executes the program, so that its process is egress.
    assert proc.memory(network.egress.process.pid) < 150e6, "egress has more than 150 MB"
