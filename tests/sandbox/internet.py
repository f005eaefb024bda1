"""A small Internet in a network namespace of the test: names, web servers and others, which log what reaches them.

    python internet.py DIRECTORY

DIRECTORY has `names.json` ({name: [[address, ...] of the first answer, ...]}), `cert.pem` and `key.pem`. Each query and
each connection is a line of JSON in `log.jsonl`.
"""

from __future__ import annotations

import json
import socket
import ssl
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

DIRECTORY = Path(sys.argv[1])
NAMES: dict[str, list[list[str]]] = json.loads((DIRECTORY / "names.json").read_text())
LOCK = threading.Lock()


def log(**fields: object) -> None:
    with LOCK, (DIRECTORY / "log.jsonl").open("a") as file:
        file.write(json.dumps(fields) + "\n")


class Web(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        if self.headers.get("Transfer-Encoding") == "chunked":
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
        host = self.headers.get("Host", "")
        log(kind="request", local=self.request.getsockname()[0], method=self.command, path=self.path, host=host)
        if self.headers.get("Upgrade") == "websocket":
            head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n"
            self.request.sendall(head.encode())
            while data := self.request.recv(4096):
                self.request.sendall(data)
            self.close_connection = True
            return
        if self.path == "/endless":
            self.send_response(200)
            self.end_headers()
            try:
                while True:
                    self.wfile.write(b"x" * 65536)
            except OSError:
                self.close_connection = True
            return
        text = f"{self.command} {self.path} {host} {len(body)}\n".encode()
        if self.path.startswith("/bytes/"):
            text = b"x" * int(self.path.rpartition("/")[2])
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = _answer  # noqa: N815 - names of BaseHTTPRequestHandler

    def log_message(self, *_: object) -> None:
        pass


class WebServer(ThreadingHTTPServer):
    address_family = socket.AF_INET6
    daemon_threads = True
    request_queue_size = 1000

    def get_request(self) -> tuple[Any, Any]:
        end, address = super().get_request()
        log(kind="connection", port=self.server_port, local=end.getsockname()[0])
        return end, address

    def handle_error(self, *_: object) -> None:
        pass


class SecureServer(WebServer):
    context: ssl.SSLContext

    def finish_request(self, request: Any, client_address: Any) -> None:
        def note(_: object, name: str | None, __: object) -> None:
            log(kind="hello", name=name)

        self.context.sni_callback = note
        request.settimeout(10)
        try:
            secure = self.context.wrap_socket(request, server_side=True)
        except (OSError, ValueError):
            return
        super().finish_request(secure, client_address)


def names() -> None:
    """Answer A and AAAA queries, except those for silent.test."""
    given: Counter[str] = Counter()
    server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    server.bind(("8.8.8.8", 53))
    while True:
        query, sender = server.recvfrom(4096)
        labels, offset = [], 12
        while size := query[offset]:
            labels.append(query[offset + 1 : offset + 1 + size].decode("latin-1"))
            offset += 1 + size
        name, kind = ".".join(labels), query[offset + 2]
        log(kind="query", name=name)
        if name == "silent.test":
            continue
        wanted = {1: 4, 28: 6}.get(kind)
        answers = NAMES.get(name, [])
        found: list[bytes] = []
        if answers and wanted:
            choice = answers[min(given[name], len(answers) - 1)]
            given[name] += kind == 1
            family = socket.AF_INET if wanted == 4 else socket.AF_INET6
            found = [socket.inet_pton(family, one) for one in choice if (":" in one) == (wanted == 6)]
        records = b"".join(b"\xc0\x0c\0" + bytes([kind]) + b"\0\1\0\0\0\0\0" + bytes([len(one)]) + one for one in found)
        code = 0 if answers else 3
        head = query[:2] + bytes([0x81, 0x80 | code]) + b"\0\1\0" + bytes([len(found)]) + b"\0\0\0\0"
        server.sendto(head + query[12 : offset + 5] + records, sender)


def greeter(port: int) -> None:
    """A protocol in which the server speaks first, then echoes."""

    def serve(end: socket.socket) -> None:
        with end:
            end.sendall(b"hello\n")
            while data := end.recv(4096):
                end.sendall(data)

    listener = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1000)
    while True:
        end, _ = listener.accept()
        log(kind="connection", port=port, local=end.getsockname()[0])
        threading.Thread(target=serve, args=(end,), daemon=True).start()


def main() -> None:
    web = WebServer(("", 80), Web)
    other = WebServer(("", 8080), Web)
    secure = SecureServer(("", 443), Web)
    secure.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secure.context.load_cert_chain(DIRECTORY / "cert.pem", DIRECTORY / "key.pem")
    jobs: list[Any] = [names, web.serve_forever, other.serve_forever, secure.serve_forever]
    for job in jobs:
        threading.Thread(target=job, daemon=True).start()
    for port in (22, 53, 853, 5432):
        threading.Thread(target=greeter, args=(port,), daemon=True).start()
    print("ready", flush=True)
    sys.stdin.read()


main()
