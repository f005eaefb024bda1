"""Serve a session over stdio, or over HTTP on loopback with a token."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import anyio
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from bonobofs.errors import StateError
from bonobofs.mcp.mcp_server import SessionServer
from bonobofs.mcp.session_link import link_around

_HOST: Final = "127.0.0.1"
_LONGEST_TOKEN: Final = 4096
_LARGEST_BODY: Final = 16 << 20
"""Bytes of one request over HTTP: as much as guard.sock takes."""


def serve_stdio(directory: Path) -> None:
    """Serve until stdin ends. MountError: `directory` is in no mount."""
    _server(directory).run("stdio")


def serve_http(directory: Path, port: int, token_file: Path, announce: Callable[[str], None]) -> None:
    """Serve HTTP on 127.0.0.1 until a signal. Port 0: a free port. MountError, StateError.

    `announce` gets the address.
    """
    token = read_token(token_file)
    server = _server(directory)
    try:
        listener = socket.create_server((_HOST, port))
    except OSError as error:
        raise StateError(f"port {port} of {_HOST} cannot be used: {error.strerror}; choose another port") from error
    app = server.streamable_http_app(host=_HOST, max_request_body_size=_LARGEST_BODY)
    config = uvicorn.Config(RequireToken(app, token), log_level="error", lifespan="on")
    announce(f"http://{_HOST}:{listener.getsockname()[1]}/mcp")
    anyio.run(uvicorn.Server(config).serve, [listener])


def _server(directory: Path) -> SessionServer:
    """Return the server. The process leaves the mount, which it would keep busy."""
    server = SessionServer(link_around(directory))
    os.chdir("/")
    return server


def read_token(file: Path) -> str:
    """Return the token in a file; create a missing file (0600). StateError: other users can read it, or no token."""
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "w", encoding="ascii") as new:
            new.write(f"{secrets.token_urlsafe(32)}\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise StateError(f"the token file {file} cannot be created: {error.strerror}") from error
    try:
        with open(file, encoding="ascii") as known:
            mode = os.fstat(known.fileno()).st_mode
            token = known.read(_LONGEST_TOKEN).strip()
    except (OSError, ValueError) as error:
        raise StateError(f"the token file {file} cannot be read: {error}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise StateError(f"other users can read the token file {file}; run: chmod 600 {file}")
    if len(token) < 16 or not token.isprintable() or " " in token:
        raise StateError(f"{file} holds no token of at least 16 characters; remove it, and bonobofs creates one")
    return token


class RequireToken:
    """Answers 401 to a request without `Authorization: Bearer TOKEN`."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app: Final = app
        self._expected: Final = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection of ASGI."""
        headers: list[Any] = scope.get("headers", []) if scope["type"] != "lifespan" else []
        shown = [value for name, value in headers if name == b"authorization"]
        is_admitted = len(shown) == 1 and hmac.compare_digest(shown[0], self._expected)
        if scope["type"] == "lifespan" or (scope["type"] == "http" and is_admitted):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"www-authenticate", b"Bearer"), (b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1008})
