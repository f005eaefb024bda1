"""Ordinary programs reach listed hosts, with and without proxy variables, and show the reason of a refusal."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sandbox.network_world import Network
from tests.support.wait import until

PROXY = "http://127.0.0.1:3128"
MODES = {
    "captured": {},
    "proxied": {"HTTPS_PROXY": PROXY, "https_proxy": PROXY, "HTTP_PROXY": PROXY, "NODE_USE_ENV_PROXY": "1"},
    "socks": {"ALL_PROXY": "socks5h://127.0.0.1:3128"},
}
GO = """
package main
import ("fmt"; "net/http"; "os")
func main() {
  r, err := http.Get(os.Args[1])
  if err != nil { fmt.Println(err); os.Exit(1) }
  fmt.Println(r.StatusCode)
}
"""
JAVA = """
class Fetch { public static void main(String[] a) throws Exception {
  System.out.println(new String(new java.net.URL(a[0]).openStream().readAllBytes())); } }
"""
TRUST = ["-Djavax.net.ssl.trustStore=TOOLS/trust.p12", "-Djavax.net.ssl.trustStorePassword=testing"]
PYTHON = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).status)"
NODE = "fetch(process.argv[1]).then(r => console.log(r.status), e => { console.log(e.cause); process.exit(1) })"

Command = Callable[[str], list[str]]
CLIENTS: dict[str, Command] = {
    "curl": lambda url: ["curl", "-q", "-sS", "-m", "20", url],
    "wget": lambda url: ["wget", "--ca-certificate", "TOOLS/../cert.pem", "-O", "-", "-t", "1", "-T", "20", url],
    "git": lambda url: ["git", "ls-remote", url],
    "node": lambda url: ["node", "-e", NODE, url],
    "python": lambda url: ["/usr/bin/python3", "-c", PYTHON, url],
    "go": lambda url: ["TOOLS/fetch", url],
    "java": lambda url: ["java", *TRUST, "-cp", "TOOLS", "Fetch", url],
    "npm": lambda url: ["npm", "view", "x", "--fetch-retries=0", "--registry", f"{url}/"],
    "pip": lambda url: ["/usr/bin/python3", "-m", "pip", "download", "--retries", "0", "-i", url, "x"],
    "cargo": lambda url: ["cargo", "search", "x", "--index", f"sparse+{url}/"],
}
"""TOOLS stands for the directory of `tools`."""
NEEDS_NO_MODES = {"npm", "pip", "cargo", "git", "wget", "go", "java"}
"""Clients that one mode shows to be served: their libraries are those of the others, or know no proxy variables."""


def modes() -> list[tuple[str, str]]:
    return [
        (client, mode)
        for client in CLIENTS
        for mode in MODES
        if mode == "captured"
        or (client not in NEEDS_NO_MODES and (mode, client) not in (("socks", "node"), ("socks", "python")))
    ]


@pytest.fixture(scope="module")
def tools(network: Network) -> Path:
    """A directory with the programs, the certificate and a home."""
    directory = network.directory / "tools"
    directory.mkdir()
    (directory / "fetch.go").write_text(GO)
    (directory / "Fetch.java").write_text(JAVA)
    certificate = str(network.directory / "cert.pem")
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-mod=mod", "GO111MODULE": "off"}
    for command in (
        ["go", "build", "-o", "fetch", "fetch.go"],
        ["javac", "Fetch.java"],
        [
            "keytool",
            "-importcert",
            "-noprompt",
            "-storepass",
            "testing",
            "-keystore",
            "trust.p12",
            "-file",
            certificate,
        ],
    ):
        done = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return directory


@pytest.mark.parametrize(("client", "mode"), modes())
def test_a_client_is_served_and_shows_a_refusal(network: Network, tools: Path, client: str, mode: str) -> None:
    certificate = str(network.directory / "cert.pem")
    variables = dict.fromkeys(
        (
            *("CURL_CA_BUNDLE", "SSL_CERT_FILE", "GIT_SSL_CAINFO", "NODE_EXTRA_CA_CERTS", "PIP_CERT"),
            *("CARGO_HTTP_CAINFO", "npm_config_cafile"),
        ),
        certificate,
    )
    cargo = Path(shutil.which("cargo") or "").parent
    fixed = {"PATH": f"{cargo}:{os.environ['PATH']}", "HOME": str(tools), "GIT_TERMINAL_PROMPT": "0"}
    fixed["RUSTUP_HOME"] = os.environ.get("RUSTUP_HOME", str(Path.home() / ".rustup"))

    def run(url: str) -> str:
        command = [word.replace("TOOLS", str(tools)) for word in CLIENTS[client](url)]
        done = network.sandbox.run(*command, env={**fixed, **variables, **MODES[mode]}, timeout=100)
        return done.stdout + done.stderr

    place = f"/{client}-{mode}"
    output = run(f"https://good.test{place}")
    served = [line for line in network.reached(kind="request", host="good.test") if line["path"].startswith(place)]
    assert served, output
    refused = run(f"https://evil.test{place}")
    assert any(word in refused.lower() for word in ("denied", "403", "forbidden", "socks", "proxy")), refused
    assert not network.reached(kind="query", name="evil.test")
    network.recorded("evil.test", 443, "network:policy")


def test_ssh_shows_the_reason(network: Network, tools: Path) -> None:
    options = ["-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={tools}/known", "-F", "none"]
    done = network.sandbox.run("ssh", *options, "git@evil.test", "true")
    assert "Received disconnect" in done.stderr
    assert "does not admit this host" in done.stderr
    network.recorded("evil.test", 22, "network:policy")


def test_a_large_download_is_whole(network: Network, tools: Path) -> None:
    size = 200_000_000
    done = network.curl(
        "-o", "/dev/null", "-w", "%{size_download} %{speed_download}", f"https://good.test/bytes/{size}"
    )
    assert done.stdout.split()[0] == str(size), done.stderr


def test_a_large_upload_is_whole(network: Network, tools: Path) -> None:
    (tools / "upload").write_bytes(bytes(5_000_000))
    for form in ([], ["-H", "Transfer-Encoding: chunked"]):
        done = network.curl("-T", str(tools / "upload"), *form, "http://good.test/up")
        assert done.stdout == "PUT /up good.test 5000000\n", done.stderr


def test_ipv6_hosts_are_reached(network: Network, tools: Path) -> None:
    assert network.curl("http://six.test/six").stdout.startswith("GET /six six.test")


def test_egress_ends_with_its_launcher_and_then_nothing_connects(network: Network, tools: Path) -> None:
    network.egress.process.kill()
    network.egress.process.wait()
    program = "import socket; print(socket.socket().connect_ex(('93.184.216.34', 80)))"
    until(lambda: network.sandbox.python(program) == "111\n", "the listeners close")
    program = """
        import socket
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(5)
        s.connect(("127.0.0.1", 53)); s.send(b"x")
        try: s.recv(9); print("answered")
        except OSError as error: print(error.errno)
    """
    assert network.sandbox.python(program) == "111\n"
