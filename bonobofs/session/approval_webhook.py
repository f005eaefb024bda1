"""Send a question to an HTTP service and read its answer: the unsigned form of nono's approval webhook, version 1.

One POST holds the connection until the service answers or the timeout passes. Redirects are not followed. Source:
docs/protocols/approval-webhook-v1.md of nolabs-ai/nono.
"""

from __future__ import annotations

import http.client
import json
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from bonobofs import __version__
from bonobofs.errors import UsageError
from bonobofs.state.question_files import Question

_GRANTED: Final = frozenset({"grant", "granted", "approve", "approved", "allow", "allowed"})
_DENIED: Final = frozenset({"deny", "denied", "reject", "rejected", "block", "blocked"})
_LARGEST: Final = 1 << 16
"""Bytes of an answer."""
_LONGEST_NOTE: Final = 500
_SCHEMES: Final[dict[str, type[http.client.HTTPConnection]]] = {
    "http": http.client.HTTPConnection,
    "https": http.client.HTTPSConnection,
}


class WebhookAnswer(NamedTuple):
    """The decision of a service."""

    allows: bool | None
    """None: no decision. `note` has the reason."""
    note: str = ""


class ApprovalWebhook:
    """One service. Each question has a connection of its own."""

    def __init__(self, url: str, seconds: float) -> None:
        """`seconds`: how long the service may hold a question. UsageError: the URL names no service."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        if parts.scheme not in _SCHEMES or not parts.hostname or port == 0:
            raise UsageError(f"{url} is no service; write http://HOST:PORT/PATH or https://")
        self._kind: Final = _SCHEMES[parts.scheme]
        self._host: Final = parts.hostname
        self._port: Final = port
        self._path: Final = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._seconds: Final = seconds

    def ask(self, question: Question, path: str, reason: str) -> WebhookAnswer:
        """Send a question about the absolute `path`. An error is no decision, so the question stays open."""
        request = {
            "capability_type": "capability",
            "request_id": question.question,
            "session_id": question.session,
            "path": path,
            "access": "Write",
            "reason": reason,
            "child_pid": question.details.get("pid", 0),
        }
        headers = {
            "Content-Type": "application/json",
            "User-Agent": f"bonobofs/{__version__}",
            "X-Nono-Timeout-Secs": str(int(self._seconds)),
        }
        connection = self._kind(self._host, self._port, timeout=self._seconds)
        try:
            connection.request("POST", self._path, json.dumps({"backend": "bonobofs", "request": request}), headers)
            response = connection.getresponse()
            body = response.read(_LARGEST + 1)
            status = response.status
        except TimeoutError:
            return WebhookAnswer(None, f"no answer within {self._seconds:.0f} s")
        except (OSError, http.client.HTTPException) as error:
            return WebhookAnswer(None, f"the service cannot be reached: {error}")
        finally:
            connection.close()
        if not 200 <= status < 300:
            return WebhookAnswer(None, f"the service answers with the status {status}")
        return _parse(body)


def _parse(body: bytes) -> WebhookAnswer:
    try:
        answer: Any = json.loads(body) if len(body) <= _LARGEST else None
    except (ValueError, RecursionError):
        answer = None
    decision = answer.get("decision") if isinstance(answer, dict) else None
    if decision in _GRANTED or decision in _DENIED:
        note = answer.get("reason")
        note = " ".join(note.split())[:_LONGEST_NOTE] if isinstance(note, str) else ""
        return WebhookAnswer(decision in _GRANTED, note)
    if decision in ("timeout", "timed_out"):
        return WebhookAnswer(None, "the service had no decision in time")
    return WebhookAnswer(None, "the answer of the service has no decision")
