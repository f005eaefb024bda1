"""Mail calls of the guard socket: the mailbox of the session's agent on the Agent Mail server of the policy.

The companion has the server's token; the agent never sees it. The sender is the agent's own label, always.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

from bonobofs.agent_mail.mail_client import Mailbox, OutgoingMessage
from bonobofs.companion.session_context import Content, SessionContext
from bonobofs.enforcement.authorizer import Caller
from bonobofs.errors import ForbiddenError, MailError, UsageError
from bonobofs.files.results import bounded, record_failure
from bonobofs.policy.decision import Denied
from bonobofs.policy.request import Operation, Request, WorkspacePath
from bonobofs.session.mail_settings import open_mailbox, settings_in
from bonobofs.state.home import home_id

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""A name of an agent, and an id of a thread. A server uses both as names of files."""
_IMPORTANCE: Final = ("low", "normal", "high", "urgent")
_LONGEST_SUBJECT: Final = 200
_LARGEST_BODY: Final = 1 << 20
_MOST_NAMES: Final = 100
_MOST_MESSAGES: Final = 200
_CALL: Final = Request(Operation.CALL, WorkspacePath(""))
_MESSAGE: Final = ("id", "thread_id", "subject", "importance", "ack_required", "created_ts", "from", "body_md")


def _send(
    session: SessionContext,
    to: list[str],
    subject: str,
    body: Content,
    thread: str | None = None,
    importance: str = "normal",
) -> Any:
    """Send a message. The call is recorded before it is sent."""
    if not 1 <= len(to) <= _MOST_NAMES or not all(map(_NAME.fullmatch, to)):
        raise UsageError("to lists 1 to 100 names of agents: letters, digits, dots and dashes")
    if thread is not None and not _NAME.fullmatch(thread):
        raise UsageError("a thread is letters, digits, dots and dashes, at most 128, such as gt-17")
    if importance not in _IMPORTANCE:
        raise UsageError(f"importance is one of {', '.join(_IMPORTANCE)}")
    if not subject.strip() or len(subject) > _LONGEST_SUBJECT or not subject.isprintable():
        raise UsageError(f"a subject is one line of 1 to {_LONGEST_SUBJECT} characters")
    if len(body.encode(errors="surrogatepass")) > _LARGEST_BODY:
        raise UsageError(f"a body has at most {_LARGEST_BODY} bytes; put more into a file and name it")
    message = OutgoingMessage(tuple(dict.fromkeys(to)), subject, body, importance, thread)
    record = {"to": to, "subject": subject, "thread": thread, "importance": importance, "bytes": len(body)}
    return _mailed(session, "mail.send", record, lambda mailbox: mailbox.post(message))


def _inbox(session: SessionContext, limit: int = 20, since: str | None = None, urgent: bool = False) -> Any:
    """Return the newest messages to the agent, the newest first."""
    if not 1 <= limit <= _MOST_MESSAGES:
        raise UsageError(f"limit is a number from 1 to {_MOST_MESSAGES}")
    record = {"limit": limit, "since": since, "urgent": urgent}
    found = _mailed(session, "mail.inbox", record, lambda mailbox: mailbox.inbox(limit, since, urgent_only=urgent))
    return [{name: message.get(name) for name in _MESSAGE} for message in found]


def _mailed(session: SessionContext, name: str, record: dict[str, Any], act: Callable[[Mailbox], Any]) -> Any:
    """Record a call, and make it with the agent's mailbox. MailError, ForbiddenError, Refused, TrailError."""
    caller = Caller(name, bounded(record))
    policy = session.guard.policy
    if session.session.role not in policy.roles:
        denied = Denied(*policy.unknown_role, _CALL.path, _CALL.operation)
        raise session.guard.deny(denied, caller)
    session.guard.event(name.replace(".", "_"), dict(caller.details))
    try:
        return act(_mailbox(session))
    except Exception as error:
        record_failure(session, _CALL, error, caller)
        raise


def _mailbox(session: SessionContext) -> Mailbox:
    settings = settings_in(session.guard.plain_policy, home_id(session.home), session.session.source)
    if settings is None:
        raise MailError("the policy names no server; the operator adds it as [agent_mail]", carried_out=False)
    label = session.session.agent
    if not _NAME.fullmatch(label):
        raise MailError(f"{label!a} cannot be a name in Agent Mail; use an agent of letters, digits and dashes")
    if _plain(label) == _plain(settings.address.sender):
        # Letters of this name carry the audit log's heads, which `audit verify --witness` believes.
        raise ForbiddenError(f"{label} is the sender of the audit log; an agent of this name has no mailbox")
    address = settings.address._replace(sender=label, to=())
    mailbox = open_mailbox(session.home, settings._replace(address=address))
    if _plain(known := mailbox.open(f"An agent in {session.session.role}.")) != _plain(label):
        raise MailError(f"the server calls {label} {known}; use an agent with a name that it keeps, such as {label}-1")
    return mailbox


def _plain(name: str) -> str:
    """Return a name as servers compare names: some keep letters and digits only, and ignore case."""
    return "".join(character for character in name.casefold() if character.isalnum())


MAIL_CALLS: Final[dict[str, Callable[..., Any]]] = {"mail.send": _send, "mail.inbox": _inbox}
