"""Servers of Agent Mail for tests: the fork, from its package, and a small world that speaks the original's dialect."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

TOKEN = "sekret"
_SECONDS_TO_START = 90.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Fork:
    """The server of the package, which can be stopped and started again over the same store."""

    def __init__(self, python: Path, directory: Path) -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}/mcp/"
        self._python, self._directory, self._port = python, directory, port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self._directory),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LLM_ENABLED": "false",
            "HTTP_BEARER_TOKEN": TOKEN,
            "HTTP_ALLOW_LOCALHOST_UNAUTHENTICATED": "false",
            "HTTP_RBAC_ENABLED": "false",
            "DATABASE_URL": f"sqlite+aiosqlite:///{self._directory}/mail.sqlite3",
            "STORAGE_ROOT": str(self._directory / "store"),
        }
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._python, "-m", "mcp_agent_mail.http", "--host", "127.0.0.1", "--port", str(self._port)],
                cwd=self._directory,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + _SECONDS_TO_START
        while not self._answers():
            assert self._process.poll() is None, (self._directory / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the server of Agent Mail did not start"
            time.sleep(0.05)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health/liveness", timeout=1) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False


class Original:
    """The other dialect: a name gets a token that later calls must have, and the server checks threads and names.

    On request it executes a call without a reply, or replies with an event stream.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.agents: dict[str, str] = {}
        self.reservations: list[dict[str, Any]] = []
        self.refusals: list[str] = []
        self.silent_after = -2
        """How many more messages are answered; then one is stored and the connection closed. Below zero: all are."""
        self.when_stored: Callable[[], None] | None = None
        """Called when the next message is stored, which then is not answered."""
        self.events = False
        self.status = 200
        self.detail = "not now"
        """What is said with another status; {} is the token that was given."""
        self.largest = 2**62
        """Bytes of a request that are taken."""
        self.hangs = threading.Event()
        """Nothing is answered while it is set."""
        self._lock = threading.Lock()
        world = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                body = json.loads(self.rfile.read(length))
                while world.hangs.is_set() and world._server is not None:
                    time.sleep(0.01)
                if world.status != 200:
                    detail = world.detail.replace("{}", str(self.headers["Authorization"]))
                    self._say(world.status, json.dumps({"detail": detail}, ensure_ascii=False).encode())
                elif length > world.largest:
                    self._say(413, b"too large")
                elif self.headers["Authorization"] != f"Bearer {TOKEN}":
                    self._say(401, b'{"detail":"Unauthorized"}')
                else:
                    with world._lock:
                        answer = world.answer(body["method"], body["params"])
                    if answer is None:
                        return
                    data = json.dumps({"jsonrpc": "2.0", "id": body["id"], "result": answer})
                    self._say(200, data.encode())

            def _say(self, status: int, data: bytes) -> None:
                self.send_response(status)
                if world.events and status == 200:
                    data = b"event: message\ndata: " + data + b"\n\n"
                    self.send_header("Content-Type", "text/event-stream")
                else:
                    self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self._handler = Handler
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}/api/"
        self._server: ThreadingHTTPServer | None = None

    def start(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), self._handler)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def subjects(self) -> list[str]:
        with self._lock:
            return [message["subject"] for message in self.messages]

    def answer(self, method: str, params: dict[str, Any]) -> dict[str, Any] | None:
        if method == "tools/list":
            return {"tools": [_tool(name, words) for name, words in _TOOLS.items()]}
        if method == "resources/read":
            return {"contents": [{"uri": params["uri"], "text": json.dumps(self.reservations)}]}
        arguments = params["arguments"]
        unknown = set(arguments) - set(_TOOLS[params["name"]].split())
        try:
            if unknown:
                raise ValueError(f"unexpected {unknown}")
            found = getattr(self, f"_{params['name']}")(arguments)
        except (ValueError, KeyError) as error:
            self.refusals.append(str(error))
            return {"isError": True, "content": [{"type": "text", "text": f"Error calling tool: {error}"}]}
        if found is None:
            return None
        return {"content": [{"type": "text", "text": json.dumps(found)}], "isError": False}

    def _ensure_project(self, given: dict[str, Any]) -> dict[str, Any]:
        key = given["human_key"]
        if not key.startswith("/"):
            raise ValueError("human_key must be an absolute path")
        return {"id": 1, "slug": re.sub("[^a-z0-9]+", "-", key.lower()).strip("-"), "human_key": key}

    def _register_agent(self, given: dict[str, Any]) -> dict[str, Any]:
        name = given["name"]
        if name in self.agents and given.get("registration_token") != self.agents[name]:
            raise ValueError("registration_token required to register an existing name")
        if not re.fullmatch(r"[A-Za-z0-9]+[-_][A-Za-z0-9_-]+", name):
            name = "PearlEagle"
        self.agents.setdefault(name, f"token-of-{name}")
        return {"name": name, "registration_token": self.agents[name]}

    def _send_message(self, given: dict[str, Any]) -> dict[str, Any] | None:
        sender, to = given["sender_name"], given["to"]
        if given.get("sender_token") != self.agents.get(sender):
            raise ValueError("sender_token required")
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", given["thread_id"]):
            raise ValueError("INVALID_THREAD_ID")
        if missing := [name for name in to if name not in self.agents]:
            raise ValueError(f"local recipients {missing} are not registered")
        message = {
            **{key: given[key] for key in ("thread_id", "importance", "body_md", "to")},
            "id": len(self.messages) + 1,
            "subject": given["subject"][:200],
            "created_ts": datetime.now(UTC).isoformat(),
            "from": sender,
        }
        self.messages.append(message)
        self.silent_after -= 1
        if self.when_stored is not None:
            strike, self.when_stored = self.when_stored, None
            strike()
            return None
        if self.silent_after == -1:
            return None
        return {"deliveries": [{"project": given["project_key"], "payload": message}], "count": 1}

    def _fetch_inbox(self, given: dict[str, Any]) -> list[dict[str, Any]]:
        name, since = given["agent_name"], given.get("since_ts", "")
        if given.get("registration_token") != self.agents.get(name):
            raise ValueError("registration_token required")
        found = [one for one in self.messages if name in one["to"] and one["created_ts"] > since]
        left_out = ("to",) if given.get("include_bodies") else ("body_md", "to")
        return [
            {key: value for key, value in one.items() if key not in left_out}
            for one in reversed(found[-given["limit"] :])
        ]


_TOOLS = {
    "ensure_project": "human_key identity_mode format",
    "register_agent": "project_key program model name task_description registration_token",
    "send_message": "project_key sender_name to subject body_md importance thread_id sender_token topic convert_images "
    "auto_contact_if_blocked",
    "fetch_inbox": "project_key agent_name limit include_bodies since_ts registration_token",
}


def _tool(name: str, words: str) -> dict[str, Any]:
    return {"name": name, "inputSchema": {"type": "object", "properties": {word: {} for word in words.split()}}}


Server = TypeVar("Server", Fork, Original)


@contextlib.contextmanager
def running(server: Server) -> Iterator[Server]:
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def answering(*parts: bytes, between: float = 0.0) -> Iterator[str]:
    """A server that answers every request with these bytes, with `between` seconds between them; its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            with contextlib.suppress(OSError):
                for part in parts:
                    self.wfile.write(part)
                    if ended.wait(between):
                        break

        def log_message(self, *_: object) -> None:
            pass

    ended = threading.Event()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
