"""An MCP server over HTTP, as Agent Mail is one: requests of JSON-RPC, without a session."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import threading
from typing import Any, Final
from urllib.parse import urlsplit

from bonobofs.errors import MailError

SECONDS: Final = 15.0
"""How long a server may take to answer, and twice that for being reached first; however slowly it speaks."""
_REFUSED: Final = frozenset({400, 413, 422, 500})
"""What servers answer to a request that is not to their liking, where another may be."""
LARGEST: Final = 256 * 1024 * 1024
"""Bytes of an answer that are read."""

_SCHEMES: Final[dict[str, type[http.client.HTTPConnection]]] = {
    "http": http.client.HTTPConnection,
    "https": http.client.HTTPSConnection,
}


class Server:
    """One server. Every request has a connection of its own.

    On one that was kept, the other side may have closed it meanwhile, and whether a request was carried out could not
    be told.
    """

    def __init__(self, url: str, token: str, seconds: float = SECONDS) -> None:
        """Nothing is connected yet. `url` is as a policy has it; `token` is a bearer token, "" for none."""
        self.url: Final = url
        self._parts = urlsplit(url)
        self._token = token
        self._seconds = seconds
        self._numbers = itertools.count(1)

    def tools(self) -> dict[str, frozenset[str]]:
        """Give the tools that it offers, and of each the names of its parameters."""
        found = self._request("tools/list", {}).get("tools")
        if not isinstance(found, list):
            raise MailError(f"{self.url} lists no tools; it is no Agent Mail server")
        return {str(tool.get("name")): _parameters(tool) for tool in found if isinstance(tool, dict)}

    def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Call a tool, and give what it answers: an object or a list.

        MailError, which says whether the call may have been carried out all the same.
        """
        answer = self._request("tools/call", {"name": tool, "arguments": arguments})
        content = answer.get("content")
        parts = content if isinstance(content, list) else []
        texts = [str(part.get("text", "")) for part in parts if isinstance(part, dict)]
        if answer.get("isError"):
            said = " ".join(texts)
            for secret in (value for name, value in arguments.items() if name.endswith("_token")):
                said = said.replace(str(secret), "***")
            # The servers are known to fail after they have stored a message.
            raise MailError(f"{self.url} refuses: {self._line(said)}", carried_out=None, refused=True)
        found = answer.get("structuredContent")
        if found is None:
            try:
                found = json.loads("".join(texts))
            except ValueError:
                raise MailError(f"{self.url} answers to {tool} what is no JSON", carried_out=None) from None
        if isinstance(found, dict) and set(found) == {"result"}:
            return found["result"]
        return found

    def read(self, uri: str) -> Any:
        """Read a resource that is JSON."""
        contents: Any = self._request("resources/read", {"uri": uri}).get("contents")
        try:
            return json.loads(contents[0]["text"])
        except (ValueError, TypeError, KeyError, IndexError):
            raise MailError(f"{self.url} has for {uri} what is no JSON") from None

    def _request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        body = json.dumps({"jsonrpc": "2.0", "id": next(self._numbers), "method": method, "params": params}).encode()
        status, kind, data = self._post(body)
        if status != http.client.OK:
            sent_away = http.client.MULTIPLE_CHOICES <= status < http.client.INTERNAL_SERVER_ERROR
            raise MailError(
                f"{self.url} answers {status}: {self._line(data[:3000].decode(errors='replace'))}",
                carried_out=False if sent_away else None,
                refused=status in _REFUSED,
            )
        try:
            answer = json.loads(_from_events(data) if kind.startswith("text/event-stream") else data)
            if "error" in answer:
                message = self._line(str(answer["error"].get("message")))
                raise MailError(f"{self.url} refuses: {message}", carried_out=None, refused=True)
            result = answer["result"]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            result = None
        if not isinstance(result, dict):
            raise MailError(f"{self.url} does not speak MCP; look at the url in [agent_mail]", carried_out=None)
        return result

    def _post(self, body: bytes) -> tuple[int, str, bytes]:
        headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        parts = self._parts
        connection = _SCHEMES[parts.scheme](parts.hostname or "", parts.port, timeout=self._seconds)
        try:
            connection.connect()
        except OSError as error:
            raise MailError(f"{self.url} cannot be reached: {_said(error)}", carried_out=False) from error
        watch = _Watch(connection.sock, self._seconds)
        try:
            target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
            connection.request("POST", target, body, headers)
            answer = connection.getresponse()
            data = answer.read(LARGEST)
        except (OSError, http.client.HTTPException) as error:
            said = watch.said or _said(error)
            raise MailError(f"{self.url} broke off: {self._line(said)}", carried_out=None) from error
        finally:
            watch.end()
            connection.close()
        if watch.said:
            raise MailError(f"{self.url} broke off: {watch.said}", carried_out=None)
        return answer.status, answer.headers.get_content_type(), data

    def _line(self, text: str) -> str:
        """What a server says, as a part of a message: one line, not too long, without the token."""
        return " ".join((text.replace(self._token, "***") if self._token else text).split())[:300]


class _Watch:
    """Cuts a connection off when its time is up: the timeout of a socket is that of each of its parts."""

    def __init__(self, connected: socket.socket, seconds: float) -> None:
        self.said = ""
        """Why it was cut off; "" while it was not."""
        self._socket = connected
        self._seconds = seconds
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        self._timer.cancel()

    def _cut(self) -> None:
        self.said = f"it took more than {self._seconds:.0f} s"
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _parameters(tool: dict[str, Any]) -> frozenset[str]:
    schema = tool.get("inputSchema")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return frozenset(properties) if isinstance(properties, dict) else frozenset()


def _from_events(data: bytes) -> bytes:
    """The message in a stream of one event."""
    lines = data.decode(errors="replace").splitlines()
    return "\n".join(line[5:].lstrip() for line in lines if line.startswith("data:")).encode()


def _said(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or type(error).__name__
