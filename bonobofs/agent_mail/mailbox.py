"""What a courier needs of Agent Mail, in both dialects that there are.

The fork takes whoever says a name for its bearer. The original gives a token when a name is registered and demands it
from then on; tokens are kept by whoever opens the mailbox. Which dialect a server speaks is read from the parameters
of its tools, and nothing is sent that it does not name.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import MAXYEAR, MINYEAR, UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, Protocol

from bonobofs.agent_mail.mcp_client import Server
from bonobofs.errors import MailError

THREAD: Final = "ops"
_FIRST_LIMIT: Final = 500
_MOST: Final = 1_000_000


class Address(NamedTuple):
    """Where letters go, as a policy's [agent_mail] says it."""

    url: str
    project: str
    sender: str
    to: tuple[str, ...] = ()


class Sent(NamedTuple):
    """A message in the thread that is ours."""

    subject: str
    moment: str
    """The server's own time of it, as it writes it."""


class Reservation(NamedTuple):
    """A reservation of files that stands on the server."""

    id: int
    agent: str
    pattern: str
    exclusive: bool
    reason: str
    expires: datetime
    made: str
    """The server's own time of it, as it writes it."""


class Tokens(Protocol):
    """Where the tokens of registered names are kept."""

    def find(self, address: Address, /) -> str | None:
        """The token of the sender there; None where it has none."""

    def keep(self, address: Address, token: str, /) -> None:
        """Keep it: it is said once only."""


class Mailbox:
    """One sender on one server. Nothing is asked before it is used."""

    def __init__(self, server: Server, address: Address, tokens: Tokens) -> None:
        """Nothing is sent yet."""
        self._server = server
        self._address = address
        self._tokens = tokens
        self._tools: dict[str, frozenset[str]] = {}
        self._name = ""
        self._slug = ""

    def open(self) -> str:
        """Make sure of project and name, and give the name that the server has for the sender."""
        if self._name:
            return self._name
        server, address = self._server, self._address
        self._tools = server.tools()
        if "send_message" not in self._tools:
            raise MailError(f"{server.url} offers no send_message; it is no Agent Mail server")
        project = _made(lambda: server.call("ensure_project", {"human_key": address.project}))
        self._slug = str(project.get("slug", ""))
        arguments = {
            "project_key": address.project,
            "program": "bonobofs",
            "model": "none",
            "name": address.sender,
            "task_description": "Carries the record of bonobofs.",
        }
        made = _made(lambda: self._call("register_agent", arguments, registration_token=self._token()))
        name = made.get("name")
        if not isinstance(name, str):
            raise MailError(f"{server.url} registers {address.sender} without saying its name")
        token = made.get("registration_token")
        if isinstance(token, str) and self._token() != token:
            self._tokens.keep(address, token)
        self._name = name
        return name

    def send(self, subject: str, body: str, importance: str) -> str:
        """Send one message to the thread, and give the server's moment of it. The sender has a copy in its inbox."""
        name = self.open()
        arguments = {
            "project_key": self._address.project,
            "sender_name": name,
            "to": list(dict.fromkeys((*self._address.to, name))),
            "subject": subject,
            "body_md": body,
            "importance": importance,
            "thread_id": THREAD,
        }
        done = _object(
            self._call(
                "send_message",
                arguments,
                sender_token=self._token(),
                topic=THREAD,
                convert_images=False,
                auto_contact_if_blocked=True,
            )
        )
        try:
            return str(done["deliveries"][0]["payload"]["created_ts"])
        except (KeyError, IndexError, TypeError):
            raise MailError(f"{self._server.url} does not say what it did with a message", carried_out=None) from None

    def sent(self, since: str = "") -> list[Sent]:
        """Give what this sender has in the thread since a moment of the server's, the oldest first.

        There may be more, from shortly before it.
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
                raise MailError(f"{self._server.url} answers to fetch_inbox with what is no list")
            if len(found) < limit or limit >= _MOST:
                break
            limit *= 10
        ours = [
            one for one in found if isinstance(one, dict) and (one.get("from"), one.get("thread_id")) == (name, THREAD)
        ]
        return [Sent(str(one.get("subject")), str(one.get("created_ts"))) for one in reversed(ours)]

    def reservations(self) -> list[Reservation]:
        """Give the reservations that stand in the project, the oldest first."""
        self.open()
        try:
            found = self._server.read(f"resource://file_reservations/{self._slug}")
        except MailError:
            self._name = ""
            raise
        try:
            reserved = [_reservation(one) for one in found if not one.get("released_ts")]
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
            raise MailError(f"{self._server.url} lists reservations in a form of its own") from None
        now = datetime.now(UTC)
        return sorted(one for one in reserved if one.expires > now)

    def _token(self) -> str | None:
        return self._tokens.find(self._address)

    def _call(self, tool: str, arguments: dict[str, Any], **optional: Any) -> Any:
        """Call a tool with those of the optional arguments that have a value and that it has a parameter for.

        After a failure project and name are made sure of anew: the server may have been set up afresh.
        """
        known = self._tools.get(tool)
        if known is None:
            raise MailError(f"{self._server.url} offers no {tool}; it is no Agent Mail server")
        more = {name: value for name, value in optional.items() if value is not None and name in known}
        try:
            return self._server.call(tool, {**arguments, **more})
        except MailError:
            self._name = ""
            raise


def _made(call: Callable[[], Any]) -> dict[str, Any]:
    """What is there after a call that makes it unless it is.

    Of two who call so at the same moment the server refuses one, and knows what it is asked for then.
    """
    try:
        return _object(call())
    except MailError as error:
        if not error.refused:
            raise
        return _object(call())


def _before(moment: str) -> str:
    """An hour before a moment of the server's: its clock may have been set back meanwhile, or count seconds only."""
    try:
        return (datetime.fromisoformat(moment) - timedelta(hours=1)).isoformat()
    except (ValueError, OverflowError):
        return ""


def _reservation(one: dict[str, Any]) -> Reservation:
    expires = datetime.fromisoformat(one["expires_ts"])
    if not MINYEAR < expires.year < MAXYEAR:
        raise ValueError("it has no end that can be written down")
    return Reservation(
        int(one["id"]),
        _text(one["agent"]),
        str(one["path_pattern"]),
        bool(one["exclusive"]),
        _text(one.get("reason") or ""),
        expires if expires.tzinfo is not None else expires.replace(tzinfo=UTC),
        str(one.get("created_ts") or ""),
    )


def _text(value: Any) -> str:
    """Text that every database and every terminal takes: JSON may hold what is none."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in str(value))


def _object(answer: Any) -> dict[str, Any]:
    return answer if isinstance(answer, dict) else {}
