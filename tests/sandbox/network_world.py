"""The network of a test: an Internet, a host with egress, and a sandbox, each in a network namespace of its own.

Nothing leaves the machine: the namespaces have no way out. The host's processes use the Internet's names.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bonobofs.sandbox import network_list
from tests.support.commands import ROOT
from tests.support.wait import until
from tests.support.world import World

GOOD, EVIL, PRIVATE, METADATA = "93.184.216.34", "93.184.216.35", "10.9.9.9", "169.254.169.254"
GOOD_V6 = "2606:2800:220:1::34"
HOST = "81.2.69.142"
ADDRESSES = (GOOD, EVIL, PRIVATE, METADATA, "8.8.8.8", "1.1.1.1", "100.64.0.9", "192.168.7.7")
NAMES = {
    "good.test": [[GOOD]],
    "sub.good.test": [[GOOD]],
    "six.test": [[GOOD_V6]],
    "evil.test": [[EVIL]],
    "db.test": [[PRIVATE]],
    "local.test": [["127.0.0.1"]],
    "private.test": [[PRIVATE]],
    "metadata.test": [[METADATA]],
    "nat64.test": [["64:ff9b::a09:909"]],
    "sixtofour.test": [["2002:a09:909::1"]],
    "own.test": [[HOST]],
    "mixed.test": [[PRIVATE, GOOD]],
    "rebound.test": [[GOOD], [PRIVATE]],
}
POLICY = """
default = "allow"
[network]
allow = [
  "good.test", "*.good.test", "good.test:5432", "good.test:22", "good.test:8080", "six.test", "local.test",
  "private.test", "metadata.test", "nat64.test", "sixtofour.test", "own.test", "mixed.test", "rebound.test",
  {host = "db.test:5432", private = true},
]
"""

_HOLD = """
import os, subprocess, sys
sys.path.insert(0, {root!r})
from bonobofs.companion.main import _detach_copies
_detach_copies()
subprocess.run(["mount", "--bind", {resolver!r}, os.path.realpath("/etc/resolv.conf")], check=True)
subprocess.run(["mount", "--bind", {services!r}, os.path.realpath("/etc/nsswitch.conf")], check=True)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
print("ready", flush=True)
sys.stdin.read()
"""


class Namespace:
    """A network and a mount namespace, held by a process."""

    def __init__(self, directory: Path, nameserver: str, around: Namespace | None = None, *, user: bool) -> None:
        """With `user` also a user namespace, as bwrap makes."""
        directory.mkdir(exist_ok=True)
        (directory / "resolv.conf").write_text(f"nameserver {nameserver}\noptions timeout:2 attempts:1\n")
        (directory / "nsswitch.conf").write_text("hosts: files dns\npasswd: files\ngroup: files\nservices: files\n")
        hold = _HOLD.format(
            root=str(ROOT), resolver=str(directory / "resolv.conf"), services=str(directory / "nsswitch.conf")
        )
        options = ["-n", "-m", *(["-U", "-r"] if user else [])]
        self.user = user
        self._holder = subprocess.Popen(
            [*(around.enter() if around else ()), "unshare", *options, sys.executable, "-c", textwrap.dedent(hold)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == "ready\n"
        self.pid = self._holder.pid

    def enter(self) -> list[str]:
        """The beginning of a command that runs in it."""
        return ["nsenter", "-t", str(self.pid), *(["-U", "--preserve-credentials"] if self.user else []), "-n", "-m"]

    def run(self, *command: str, timeout: float = 40, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a program to its end."""
        return subprocess.run(
            [*self.enter(), *command], capture_output=True, text=True, timeout=timeout, check=False, **options
        )

    def python(self, program: str, *arguments: str, timeout: float = 40) -> str:
        """Run a Python program; its output."""
        done = self.run(sys.executable, "-c", textwrap.dedent(program), *arguments, timeout=timeout)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def close(self) -> None:
        self._holder.communicate()


def certificate(directory: Path) -> None:
    """A certificate for every name of the Internet, which is its own authority."""
    names = ",".join(f"DNS:{name}" for name in [*NAMES, "*.good.test"])
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj /CN=test"
    files = ["-keyout", str(directory / "key.pem"), "-out", str(directory / "cert.pem")]
    subprocess.run([*command.split(), "-addext", f"subjectAltName={names}", *files], check=True, capture_output=True)


class EgressProcess:
    """Egress for one sandbox, as the launcher starts it."""

    def __init__(self, host: Namespace, session_directory: Path) -> None:
        ours, theirs = socket.socketpair()
        start = "import sys; sys.path.insert(0, sys.argv.pop(1)); from bonobofs.sandbox import egress; egress.main()"
        with theirs:
            self.process = subprocess.Popen(
                [*host.enter(), sys.executable, "-I", "-S", "-c", start, str(ROOT), str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
            )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"session_dir": str(session_directory), "user": None}).encode())
        self.process.stdin.close()
        self.control = ours

    def start(self, pid: int) -> dict[str, Any]:
        """Name the sandbox's first process; the answer."""
        self.control.sendall(json.dumps({"pid": pid}).encode() + b"\n")
        answer: dict[str, Any] = json.loads(self.control.makefile("rb").readline())
        return answer

    def close(self) -> None:
        self.control.close()
        assert self.process.wait(20) is not None


class Network:
    """A session, its egress, its sandbox and the Internet."""

    def __init__(self, directory: Path, internet: Namespace, host: Namespace, sandbox: Namespace, world: World) -> None:
        self.directory = directory
        self.internet = internet
        self.host = host
        self.sandbox = sandbox
        self.world = world
        self.egress: EgressProcess

    def reached(self, **fields: Any) -> list[dict[str, Any]]:
        """What the Internet has logged with these fields."""
        log = self.directory / "log.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return [line for line in lines if all(line.get(key) == value for key, value in fields.items())]

    def entries(self) -> list[Any]:
        """The network entries of the trail."""
        return [entry for entry in self.world.entries() if entry.guard == "network"]

    def recorded(self, host: str, port: int, rule: str) -> Any:
        """Wait for the entry of a connection. `rule` is `network` for an allowed one, else `network:WORD`."""

        def find() -> list[Any]:
            return [
                entry
                for entry in self.entries()
                if (entry.details.get("host"), entry.details.get("port")) == (host, port) and entry.rule == rule
            ]

        return until(find, f"{host}:{port} is recorded as {rule}")[-1]

    def count(self, rule: str) -> int:
        """How often connections were refused by a rule, those included that are only counted."""
        refused = [entry for entry in self.entries() if entry.rule == rule]
        return sum(entry.details["count"] if entry.kind == "outcome" else 1 for entry in refused)

    def curl(self, *arguments: str, timeout: float = 40) -> subprocess.CompletedProcess[str]:
        """Run curl in the sandbox, without its configuration."""
        certificate = ["--cacert", str(self.directory / "cert.pem")]
        return self.sandbox.run("curl", "-q", "-sS", "-m", "20", *certificate, *arguments, timeout=timeout)

    def allow_only(self, *entries: str) -> None:
        """Replace the operator's general list."""
        network_list.reset(self.world.home, None)
        network_list.disallow(self.world.home, None, ["*"])
        network_list.allow(self.world.home, None, [*entries])


@contextmanager
def internet_and_host(directory: Path) -> Iterator[tuple[Namespace, Namespace]]:
    """The Internet and a host that is connected with it."""
    directory.mkdir(exist_ok=True)
    certificate(directory)
    (directory / "names.json").write_text(json.dumps(NAMES))
    host = Namespace(directory / "host", "8.8.8.8", user=os.geteuid() != 0)
    internet = Namespace(directory / "internet", "8.8.8.8", host, user=False)
    for command in (
        f"ip link add out type veth peer name in netns {internet.pid}",
        f"ip addr add {HOST}/32 dev out",
        f"ip addr add {HOST.replace('.142', '.143')}/32 dev out",
        "ip -6 addr add 2606:2800:220:1::2/128 dev out nodad",
        "ip link set out up",
        "ip route add default dev out",
        "ip -6 route add default dev out",
    ):
        done = host.run(*command.split())
        assert done.returncode == 0, f"{command}: {done.stderr}"
    for command in (
        *(f"ip addr add {address}/32 dev in" for address in ADDRESSES),
        f"ip -6 addr add {GOOD_V6}/128 dev in nodad",
        "ip link set in up",
        "ip route add default dev in",
        "ip -6 route add default dev in",
    ):
        done = internet.run(*command.split())
        assert done.returncode == 0, f"{command}: {done.stderr}"
    server = subprocess.Popen(
        [*internet.enter(), sys.executable, str(Path(__file__).with_name("internet.py")), str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        yield internet, host
    finally:
        server.communicate()
        internet.close()
        host.close()
