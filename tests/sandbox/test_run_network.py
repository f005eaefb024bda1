"""A command that `bonobofs run` starts reaches listed hosts, and nothing in the sandbox opens others."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.sandbox.boxes import POLICY, Box
from tests.sandbox.network_world import internet_and_host
from tests.support.world import OrdinaryUser

PROGRAM = """
import json, os, socket, subprocess, sys

def fetch(*words):
    done = subprocess.run(["curl", "-q", "-sS", "-m", "20", *words], capture_output=True, text=True)
    return (done.stdout + done.stderr).strip()

def bind(port):
    try:
        socket.socket().bind(("", port))
        return "bound"
    except OSError as error:
        return error.errno

def call(name):
    end = socket.socket(socket.AF_UNIX)
    end.connect(os.environ["BONOBOFS_SOCKET"])
    end.sendall(json.dumps({"call": name, "key": ""}).encode() + b"\\n")
    return json.loads(end.makefile().readline())["ok"]

print(json.dumps({
    "proxied": fetch("http://good.test/proxied"),
    "captured": fetch("--noproxy", "*", "http://good.test/captured"),
    "refused": fetch("--noproxy", "*", "http://evil.test/"),
    "alert": fetch("--noproxy", "*", "https://evil.test/"),
    "ports": [bind(53), bind(80), bind(3128)],
    "list": os.path.exists(sys.argv[1]),
    "call": call("network.lists"),
}))
"""


@pytest.mark.root
@pytest.mark.parametrize("as_root", [False, True])
def test_a_command_has_the_network_of_its_lists(ordinary_user: OrdinaryUser, tmp_path: Path, as_root: bool) -> None:
    box = Box(ordinary_user, as_root=as_root)
    box.write_policy(f'{POLICY}[network]\nallow = ["good.test"]\n')
    (box.source / "program.py").write_text(PROGRAM)
    with internet_and_host(tmp_path / "world") as (_, host):
        box.network = host.enter()
        done = box.run("/usr/bin/python3", "program.py", box.state / "network.toml")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["proxied"] == "GET /proxied good.test 0"
        assert found["captured"] == "GET /captured good.test 0"
        assert "does not admit this host" in found["refused"]
        assert "denied" in found["alert"]
        assert found["ports"] == [13, 13, 98]
        assert not found["list"]
        assert not found["call"]
        connections = [entry for entry in box.entries() if entry["operation"] == "connect"]
    assert [entry["rule"] for entry in connections if entry["details"].get("host") == "good.test"] == ["network"] * 2
    assert {entry["details"]["port"] for entry in connections if entry["code"] == "NETWORK"} == {80, 443}


@pytest.mark.root
def test_a_silent_name_server_does_not_delay_the_end(ordinary_user: OrdinaryUser, tmp_path: Path) -> None:
    """`run` ends with its command, although a thread of egress waits for the host's name server for a minute."""
    box = Box(ordinary_user)
    box.write_policy(f'{POLICY}[network]\nallow = ["silent.test"]\n')
    with internet_and_host(tmp_path / "world") as (_, host):
        (tmp_path / "world/host/resolv.conf").write_text("nameserver 8.8.8.8\noptions timeout:30 attempts:2\n")
        box.network = host.enter()
        began = time.monotonic()
        done = box.run("curl", "-q", "-sS", "-m", "4", "http://silent.test/")
        assert time.monotonic() - began < 25
        assert (done.returncode, "timed out" in done.stderr) == (28, True)
        assert '"name": "silent.test"' in (tmp_path / "world/log.jsonl").read_text()


@pytest.mark.root
def test_a_low_limit_of_descriptors_leaves_connections(ordinary_user: OrdinaryUser, tmp_path: Path) -> None:
    box = Box(ordinary_user)
    box.write_policy(f'{POLICY}[network]\nallow = ["good.test"]\n')
    with internet_and_host(tmp_path / "world") as (_, host):
        box.network = ["prlimit", "--nofile=1024:1024", "--", *host.enter()]
        script = "for n in 1 2 3; do curl -q -sS -m 20 http://good.test/$n; done"
        done = box.run("sh", "-c", script)
    assert (done.returncode, done.stdout.count("good.test 0")) == (0, 3), done.stderr
