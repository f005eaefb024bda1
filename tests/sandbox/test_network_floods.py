"""Floods from the sandbox: each attempt is counted, and many connections do not keep others out."""

from __future__ import annotations

from pathlib import Path

from tests.sandbox.network_world import Network
from tests.support.wait import until


def test_every_refused_connect_is_counted(network: Network) -> None:
    before = network.count("network:policy")
    program = """
        import socket
        for index in range(20000):
            s = socket.socket(); s.connect_ex(("8.8.4.4", 10000 + index)); s.close()
    """
    network.sandbox.python(program, timeout=110)
    until(lambda: network.count("network:policy") - before >= 20000, "20,000 attempts are recorded", seconds=60)
    assert network.count("network:policy") - before == 20000


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
    status = Path(f"/proc/{network.egress.process.pid}/status").read_text().split("VmRSS:")[1].split()[0]
    assert int(status) < 150_000, "egress has more than 150 MB"
