"""The server's enforcer, for the companion: each method sends a request over the channel and waits for the reply.

The server alone keeps the session's trail, its count of denials and its lease snapshot. The companion's event loop
hands each reply to the thread that waits for it.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import queue
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final, Unpack

from bonobofs.audit.entry import shortened
from bonobofs.enforcement.authorizer import (
    NO_CALLER,
    Admission,
    Caller,
    CallRecord,
    ChangeRecord,
    Outcome,
    RelatedChange,
)
from bonobofs.errors import ProtocolError, TrailError, UsageError
from bonobofs.ipc.channel import Channel, MessageKind
from bonobofs.ipc.codec import decode_decision, decode_denied, encode_denied, encode_request
from bonobofs.policy.decision import Denied, Permit, Refused
from bonobofs.policy.engine import Policy, compile_policy
from bonobofs.policy.request import NO_FACTS, Context, Operation, PlannedChange, Principal, Request

_BATCH: Final = 128
"""Questions in one message: the server answers them before it serves another request."""
_OUTCOME_LIMITS: Final = 1000, 1000
"""Items of a list, and characters of a text, that an outcome sends to the server."""

PEER: Final[ContextVar[tuple[int, int] | None]] = ContextVar("PEER", default=None)
"""Pid and start time of the process whose call this thread answers."""
_RECORDED: Final = (
    MessageKind.AUTHORIZE,
    MessageKind.DENY,
    MessageKind.RECORD_CALL,
    MessageKind.EVENT,
)
"""Requests with the PEER of the thread."""

Reply = dict[str, Any]
SendLater = Callable[[MessageKind, dict[str, Any]], None]


class RemoteAuthorizer:
    """An `Authorizer` for many threads. The event loop calls `on_reply` and `change_policy`."""

    def __init__(self, channel: Channel, agent: Principal, policy: dict[str, Any], send_later: SendLater) -> None:
        """`send_later` sends a message after every change that the watcher has seen by then."""
        self.agent: Final = agent
        self.plain_policy = policy
        self._policy: Policy | None = None
        self._policy_lock: Final = threading.Lock()
        self._channel: Final = channel
        self._send_later: Final = send_later
        self._ids: Final = itertools.count(1)
        self._pending: Final[dict[int, queue.SimpleQueue[Reply]]] = {}
        self._grant_lock: Final = threading.Lock()

    @property
    def policy(self) -> Policy:
        """The policy in force. It is compiled at its first use: the mount does not wait for it."""
        with self._policy_lock:
            if self._policy is None:
                self._policy = compile_policy(self.plain_policy)
            return self._policy

    def change_policy(self, policy: dict[str, Any], generation: int) -> None:
        """Use the policy that the server has installed."""
        with self._policy_lock:
            self._policy = compile_policy(policy, generation)
            self.plain_policy = policy

    def on_reply(self, body: bytes) -> None:
        """Hand a reply to the thread that waits for it."""
        reply = json.loads(body)
        pending = self._pending.pop(reply.pop("id"), None)
        if pending is not None:
            pending.put(reply)

    def decide(self, request: Request, context: Context = NO_FACTS) -> Permit | Denied:
        """As `Authorizer.decide`."""
        return decode_decision(self._ask(MessageKind.DECIDE, {"question": encode_request(request, context)})[1])

    def explain(self, change: PlannedChange) -> tuple[Operation, Permit | Denied]:
        """Return the operation and the decision of the mount. OSError: the path cannot be looked up."""
        reply = self._ask(MessageKind.EXPLAIN, change._asdict())[1]
        return Operation(reply["operation"]), decode_decision(reply)

    def decide_each(self, questions: list[tuple[Request, Context]], *, in_source: bool = False) -> dict[int, Denied]:
        """Return the denials of the mount, by the index of the question.

        `in_source`: the files are or will be in the source. A temporary name is not staged then.
        """
        denied = {}
        for offset in range(0, len(questions), _BATCH):
            encoded = [encode_request(*question) for question in questions[offset : offset + _BATCH]]
            message = {"questions": encoded, "in_source": in_source}
            for number, document in self._ask(MessageKind.DECIDE_EACH, message)[1]["denied"]:
                denied[offset + number] = decode_denied(document)
        return denied

    def grant(self, buffer: int, at: int, size: int) -> int:
        """Grant published files to a git command. Return the number of the grant, for `withdraw`. OSError.

        `buffer` is a file with their content and, `size` bytes at `at`, their list (`fuse.git_grants`).
        """
        with self._grant_lock:  # the server takes one descriptor at a time
            number, pending = self._register()
            document = {"id": number, "grant": number, "buffer": os.fstat(buffer).st_ino, "at": at, "size": size}
            self._channel.send_fds(MessageKind.GRANT, document, [buffer])
            _check_error(pending.get())
        return number

    def withdraw(self, number: int) -> list[str]:
        """End a grant. Return the paths that the command has brought to their published content."""
        taken: list[str] = self._ask(MessageKind.REVOKE, {"grant": number})[1]["taken"]
        return taken

    def authorize(
        self, request: Request, context: Context = NO_FACTS, *related: RelatedChange, **record: Unpack[ChangeRecord]
    ) -> Admission:
        """As `Authorizer.authorize`. Leaving the admission returns when the mount shows what was changed.

        Leaving it raises OSError, ETIMEDOUT, if the change is made and recorded but the mount may not show it.
        """
        documents = [encode_request(change.request, change.context) for change in related]
        document = {"question": encode_request(request, context), "related": documents, **record}
        admission = self.authorize_judged(request, document)
        assert admission is not None
        return admission

    def authorize_judged(self, request: Request, document: dict[str, Any]) -> Admission | None:
        """As `authorize`, with the fields of AUTHORIZE. Return None if the `generation` of `document` is outdated."""
        number, reply = self._ask(MessageKind.AUTHORIZE, document)
        if "stale" in reply:
            return None
        decision = decode_decision(reply)
        if isinstance(decision, Denied):
            raise Refused(decision)
        return Admission(
            self._end_change, request, decision, number, document.get("action", ""), document.get("guard", "file")
        )

    def generation(self) -> dict[str, Any]:
        """Return {"generation", "leases", "answers"} of the server.

        "leases" is "none", "known" or "unknown". "answers" has the arguments of `compile_answers`.
        """
        return self._ask(MessageKind.DECIDE, {})[1]

    def record_call(self, request: Request, context: Context = NO_FACTS, /, **record: Unpack[CallRecord]) -> None:
        """As `Authorizer.record_call`."""
        _, reply = self._ask(MessageKind.RECORD_CALL, {"question": encode_request(request, context), **record})
        if "code" in reply:
            raise Refused(decode_denied(reply))

    def deny(self, denied: Denied, caller: Caller = NO_CALLER, *, guard: str = "file", count: int = 1) -> Refused:
        """As `Authorizer.deny`."""
        document = {**encode_denied(denied), "caller": list(caller), "guard": guard, "count": count}
        self._ask(MessageKind.DENY, document)
        return Refused(denied)

    def event(self, operation: str, details: dict[str, Any]) -> None:
        """Record an event of the session. TrailError."""
        _check_trail(self._ask(MessageKind.EVENT, {"operation": operation, "details": details})[1])

    def begin_turn(self, name: str, by: str) -> int:
        """Begin a turn and return its number. TrailError."""
        reply = self._ask(MessageKind.TURN, {"name": name, "by": by})[1]
        _check_trail(reply)
        return int(reply["turn"])

    def images_in_use(self) -> set[int]:
        """Return the numbers of the pre-images that are files which the kernel still knows. OSError."""
        return set(self._ask(MessageKind.LIST_IMAGES, {})[1]["in_use"])

    def show(self) -> None:
        """Return when the mount shows every earlier change, whatever process made it. OSError as for `authorize`."""
        self._ask_later(MessageKind.BARRIER, {})

    def _end_change(self, outcome: Outcome) -> None:
        document = {
            "admission": outcome.seq,
            "error": outcome.error,
            "reason": shortened(outcome.reason, *_OUTCOME_LIMITS),
            "written": outcome.written,
            "details": shortened(outcome.details, *_OUTCOME_LIMITS),
        }
        self._ask_later(MessageKind.ENDED, document)

    def _ask_later(self, kind: MessageKind, document: dict[str, Any]) -> None:
        number, pending = self._register()
        self._send_later(kind, {**document, "id": number})
        stale = pending.get().get("stale")
        if stale is not None:
            raise OSError(errno.ETIMEDOUT, stale)

    def _ask(self, kind: MessageKind, document: dict[str, Any]) -> tuple[int, Reply]:
        """Send a request. Return its number and the reply. OSError: the server is gone, or failed."""
        number, pending = self._register()
        peer = PEER.get()
        if peer is not None and kind in _RECORDED:
            document = {**document, "peer": peer}
        try:
            sent = self._channel.send(kind, {**document, "id": number})
        except ProtocolError as error:
            self._pending.pop(number)
            raise UsageError("the call names too many paths, or too long ones; send less in one call") from error
        if not sent:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return number, _check_error(pending.get())

    def _register(self) -> tuple[int, queue.SimpleQueue[Reply]]:
        number = next(self._ids)
        pending = self._pending[number] = queue.SimpleQueue()
        return number, pending


def _check_error(reply: Reply) -> Reply:
    if "error" in reply:
        raise OSError(errno.EPROTO, reply["error"])
    return reply


def _check_trail(reply: Reply) -> None:
    if "failed" in reply:
        raise TrailError(reply["failed"])
