"""Client of Agent Mail: MCP over HTTP (JSON-RPC without a session), in both dialects of its servers.

The fork trusts the name of a sender. The original returns a token when a name is registered, and requires it from then
on; the caller stores the tokens. The client reads the dialect from the parameters of the server's tools, and sends no
parameter that a tool does not have.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import threading
from collections.abc import Callable
from datetime import MAXYEAR, MINYEAR, UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from bonobofs.errors import MailError, error_text
from bonobofs.system.terminal import printable

SECONDS: Final = 15.0
"""Time limit for connecting, and again for the whole answer."""
_REFUSED: Final = frozenset({400, 413, 422, 500})
"""Status codes with which servers reject one request although they may accept another."""
LARGEST: Final = 256 * 1024 * 1024
"""Most bytes of an answer."""

_SCHEMES: Final[dict[str, type[http.client.HTTPConnection]]] = {
    "http": http.client.HTTPConnection,
    "https": http.client.HTTPSConnection,
}


class MailServer:
    """One server. Every request has a connection of its own.

    The server can close a kept connection at any time; the client then could not know if it executed the request.
    """

    def __init__(self, url: str, token: str, seconds: float = SECONDS) -> None:
        """`url` is as in a policy; `token` is a bearer token, "" for none. The first request connects."""
        self.url: Final = url
        self._parts = urlsplit(url)
        self._token = token
        self._seconds = seconds
        self._numbers = itertools.count(1)

    def tools(self) -> dict[str, frozenset[str]]:
        """Return the names of the server's tools and of their parameters."""
        found = self._request("tools/list", {}).get("tools")
        if not isinstance(found, list):
            raise MailError(f"{self.url} lists no tools; it is not an Agent Mail server")
        return {str(tool.get("name")): _parameters(tool) for tool in found if isinstance(tool, dict)}

    def call(self, tool: str, arguments: dict[str, Any]) -> Any:
        """Call a tool; return its result, an object or a list.

        MailError: `carried_out` says whether the server may have executed the call.
        """
        answer = self._request("tools/call", {"name": tool, "arguments": arguments})
        content = answer.get("content")
        parts = content if isinstance(content, list) else []
        texts = [str(part.get("text", "")) for part in parts if isinstance(part, dict)]
        if answer.get("isError"):
            message = " ".join(texts)
            for secret in (value for name, value in arguments.items() if name.endswith("_token")):
                message = message.replace(str(secret), "***")
            # A server can fail after it has stored a message.
            raise MailError(f"{self.url} refuses: {self._line(message)}", carried_out=None, refused=True)
        found = answer.get("structuredContent")
        if found is None:
            try:
                found = json.loads("".join(texts))
            except ValueError:
                raise MailError(f"{self.url} answers {tool} with invalid JSON", carried_out=None) from None
        if isinstance(found, dict) and set(found) == {"result"}:
            return found["result"]
        return found

    def read(self, uri: str) -> Any:
        """Read a resource that is JSON."""
        contents: Any = self._request("resources/read", {"uri": uri}).get("contents")
        try:
            return json.loads(contents[0]["text"])
        except (ValueError, TypeError, KeyError, IndexError):
            raise MailError(f"{self.url} answers {uri} with invalid JSON") from None

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
            raise MailError(f"{self.url} cannot be reached: {error_text(error)}", carried_out=False) from error
        watch = _Watch(connection.sock, self._seconds)
        try:
            target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
            connection.request("POST", target, body, headers)
            with connection.getresponse() as answer:  # an answer that was not read to its end keeps the socket open
                data = answer.read(LARGEST)
        except (OSError, http.client.HTTPException) as error:
            reason = watch.reason or error_text(error)
            raise MailError(f"{self.url} closed the connection: {self._line(reason)}", carried_out=None) from error
        finally:
            watch.end()
            connection.close()
        if watch.reason:
            raise MailError(f"{self.url} closed the connection: {watch.reason}", carried_out=None)
        return answer.status, answer.headers.get_content_type(), data

    def _line(self, text: str) -> str:
        """Return a server's text for an error message: one line of at most 300 characters, without the token."""
        return " ".join((text.replace(self._token, "***") if self._token else text).split())[:300]


class _Watch:
    """Closes a connection after a time limit. The timeout of a socket limits each call only."""

    def __init__(self, connected: socket.socket, seconds: float) -> None:
        self.reason = ""
        """Why it closed the connection; "" if it did not."""
        self._socket = connected
        self._seconds = seconds
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        self._timer.cancel()

    def _cut(self) -> None:
        self.reason = f"the request took more than {self._seconds:.0f} s"
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _parameters(tool: dict[str, Any]) -> frozenset[str]:
    schema = tool.get("inputSchema")
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return frozenset(properties) if isinstance(properties, dict) else frozenset()


def _from_events(data: bytes) -> bytes:
    """Return the message of a stream with one event."""
    lines = data.decode(errors="replace").splitlines()
    return "\n".join(line[5:].lstrip() for line in lines if line.startswith("data:")).encode()


THREAD: Final = "ops"
_FIRST_LIMIT: Final = 500
_MOST: Final = 1_000_000


class Address(NamedTuple):
    """The address of [agent_mail] in a policy."""

    url: str
    project: str
    sender: str
    to: tuple[str, ...] = ()


class Sent(NamedTuple):
    """A message of this sender in the thread."""

    subject: str
    moment: str
    """The server's time, in the server's format."""


class OutgoingMessage(NamedTuple):
    """A message to send. `importance`: low, normal, high or urgent."""

    to: tuple[str, ...]
    subject: str
    body: str
    importance: str
    thread: str | None = None


class Reservation(NamedTuple):
    """A reservation of files on the server."""

    id: int
    agent: str
    pattern: str
    exclusive: bool
    reason: str
    expires: datetime
    created: str
    """The server's time of its creation, in the server's format."""


class Tokens(Protocol):
    """The store of the tokens of registered names."""

    def find(self, address: Address, /) -> str | None:
        """Return the token of the sender, or None."""

    def keep(self, address: Address, token: str, /) -> None:
        """Store a token. The server returns it only once."""

    def registration(self, address: Address, /) -> contextlib.AbstractContextManager[object]:
        """Return a lock of the sender among processes: one registers the name and keeps the token, others wait."""


class Mailbox:
    """One sender on one server. It connects at the first use."""

    def __init__(self, server: MailServer, address: Address, tokens: Tokens) -> None:
        """The first call connects."""
        self._server = server
        self._address = address
        self._tokens = tokens
        self._tools: dict[str, frozenset[str]] = {}
        self._name = ""
        self._slug = ""

    def open(self, task: str = "Sends the audit log of bonobofs.") -> str:
        """Register project and sender; return the server's name of the sender. `task` describes the sender."""
        if self._name:
            return self._name
        server, address = self._server, self._address
        self._tools = server.tools()
        if "send_message" not in self._tools:
            raise MailError(f"{server.url} has no tool send_message; it is not an Agent Mail server")
        project = _made(lambda: server.call("ensure_project", {"human_key": address.project}))
        self._slug = str(project.get("slug", ""))
        arguments = {
            "project_key": address.project,
            "program": "bonobofs",
            "model": "none",
            "name": address.sender,
            "task_description": task,
        }
        with contextlib.nullcontext() if self._token() else self._tokens.registration(address):
            created = _made(lambda: self._call("register_agent", arguments, registration_token=self._token()))
            name = created.get("name")
            if not isinstance(name, str):
                raise MailError(f"{server.url} registers {address.sender} without returning its name")
            token = created.get("registration_token")
            if isinstance(token, str) and self._token() != token:
                self._tokens.keep(address, token)
        self._name = name
        return name

    def send(self, subject: str, body: str, importance: str) -> str:
        """Send one message to the thread; return the server's time of it. The sender gets a copy in its inbox."""
        to = tuple(dict.fromkeys((*self._address.to, self.open())))
        return str(self.post(OutgoingMessage(to, subject, body, importance, THREAD), topic=THREAD)["sent"])

    def post(self, message: OutgoingMessage, topic: str | None = None) -> dict[str, Any]:
        """Send a message; return {"id", "sent"}: the server's number and time of it."""
        name = self.open()
        arguments = {
            "project_key": self._address.project,
            "sender_name": name,
            "to": list(message.to),
            "subject": message.subject,
            "body_md": message.body,
            "importance": message.importance,
        }
        done = _object(
            self._call(
                "send_message",
                arguments,
                thread_id=message.thread,
                sender_token=self._token(),
                topic=topic,
                convert_images=False,
                auto_contact_if_blocked=True,
            )
        )
        try:
            payload = done["deliveries"][0]["payload"]
            return {"id": payload.get("id"), "sent": str(payload["created_ts"])}
        except (KeyError, IndexError, TypeError, AttributeError):
            raise MailError(f"{self._server.url} does not confirm a message", carried_out=None) from None

    def inbox(self, limit: int, since: str | None, *, urgent_only: bool) -> list[dict[str, Any]]:
        """Return the newest messages to this sender with their bodies, the newest first."""
        found = self._call(
            "fetch_inbox",
            {"project_key": self._address.project, "agent_name": self.open(), "limit": limit, "include_bodies": True},
            since_ts=since,
            urgent_only=urgent_only or None,
            registration_token=self._token(),
        )
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise MailError(f"{self._server.url} does not answer fetch_inbox with a list")
        return found[:limit]  # some servers ignore the limit

    def sent(self, since: str = "") -> list[Sent]:
        """Return the messages of this sender in the thread since a time of the server, oldest first.

        The result can have earlier messages, too.
        """
        name = self.open()
        since = _before(since)
        limit = _FIRST_LIMIT
        while True:
            found = self._call(
                "fetch_inbox",
                {"project_key": self._address.project, "agent_name": name, "limit": limit, "include_bodies": False},
                since_ts=since or None,
                registration_token=self._token(),
            )
            if not isinstance(found, list):
                raise MailError(f"{self._server.url} does not answer fetch_inbox with a list")
            if len(found) < limit or limit >= _MOST:
                break
            limit *= 10
        ours = [
            one for one in found if isinstance(one, dict) and (one.get("from"), one.get("thread_id")) == (name, THREAD)
        ]
        return [Sent(str(one.get("subject")), str(one.get("created_ts"))) for one in reversed(ours)]

    def reservations(self) -> list[Reservation]:
        """Return the present reservations of the project, oldest first."""
        self.open()
        try:
            found = self._server.read(f"resource://file_reservations/{self._slug}")
        except MailError:
            self._name = ""
            raise
        try:
            reserved = [_reservation(one) for one in found if not one.get("released_ts")]
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            raise MailError(f"{self._server.url} lists reservations in an unknown format") from None
        now = datetime.now(UTC)
        return sorted(one for one in reserved if one.expires > now)

    def _token(self) -> str | None:
        return self._tokens.find(self._address)

    def _call(self, tool: str, arguments: dict[str, Any], **optional: Any) -> Any:
        """Call a tool with the optional arguments that have a value and that are parameters of the tool.

        After a failure the next call registers project and sender again, because the server may have been reset.
        """
        known = self._tools.get(tool)
        if known is None:
            raise MailError(f"{self._server.url} has no tool {tool}; it is not an Agent Mail server")
        more = {name: value for name, value in optional.items() if value is not None and name in known}
        try:
            return self._server.call(tool, {**arguments, **more})
        except MailError:
            self._name = ""
            raise


def _made(call: Callable[[], Any]) -> dict[str, Any]:
    """Call a tool that creates something if it is missing; return it.

    The server rejects one of two such calls at the same time. The second try finds what the other call created.
    """
    try:
        return _object(call())
    except MailError as error:
        if not error.refused:
            raise
        return _object(call())


def _before(moment: str) -> str:
    """Return a time one hour earlier: the server's clock may have been set back, or have a resolution of seconds."""
    try:
        return (datetime.fromisoformat(moment) - timedelta(hours=1)).isoformat()
    except (ValueError, OverflowError):
        return ""


def _reservation(one: dict[str, Any]) -> Reservation:
    expires = datetime.fromisoformat(one["expires_ts"])
    if not MINYEAR < expires.year < MAXYEAR:
        raise ValueError("its expiry is out of range")
    return Reservation(
        int(one["id"]),
        printable(str(one["agent"])),
        str(one["path_pattern"]),
        bool(one["exclusive"]),
        printable(str(one.get("reason") or "")),
        expires if expires.tzinfo is not None else expires.replace(tzinfo=UTC),
        str(one.get("created_ts") or ""),
    )


def _object(answer: Any) -> dict[str, Any]:
    return answer if isinstance(answer, dict) else {}
