"""The door of the process that serves the mount, as the entrances of the companion ask of it: over their line.

One session has one trail, one count of denials and one view of the leases, and they are the server's. A thread that
asks waits for the answer; the loop of the companion hands it over.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Final

from bonobofs.audit.entry import shortened
from bonobofs.enforcement.enforcer import NOBODY, Admission, Caller, Outcome, RelatedChange
from bonobofs.errors import ProtocolError, TrailError, UsageError
from bonobofs.ipc.channel import Kind, Line
from bonobofs.ipc.decision_codec import decision, plain_decision
from bonobofs.ipc.request_codec import plain_question
from bonobofs.policy.decision import Denied, Permit, Refused
from bonobofs.policy.engine import Policy, compile_policy
from bonobofs.policy.request import NO_FACTS, Context, Principal, Request

_AT_A_TIME: Final = 128
"""Questions that the server answers before it serves another request."""
_OF_OUTCOME: Final = 1000, 1000
"""Items of a list, and characters of a text, that the server is sent of an outcome."""

TellLater = Callable[[Kind, dict[str, Any]], None]


class RemoteAuthorizer:
    """A `Authorizer`. Used by many threads; `answered` and `change_policy` by the one that listens to the line."""

    def __init__(self, line: Line, agent: Principal, policy: dict[str, Any], tell_later: TellLater) -> None:
        """`tell_later` tells the server what is to be told once it knows all that has changed by now."""
        self.agent: Final = agent
        self.policy: Policy = compile_policy(policy)
        self.plain_policy = policy
        self._line: Final = line
        self._tell_later: Final = tell_later
        self._numbers: Final = itertools.count(1)
        self._waiting: Final[dict[int, queue.SimpleQueue[dict[str, Any]]]] = {}
        self._granting: Final = threading.Lock()

    def change_policy(self, policy: dict[str, Any], generation: int) -> None:
        """The server judges by this policy now."""
        self.policy = compile_policy(policy, generation)
        self.plain_policy = policy

    def answered(self, body: bytes) -> None:
        """Hand over an answer to the thread that waits for it."""
        answer = json.loads(body)
        waiting = self._waiting.pop(answer.pop("ask"), None)
        if waiting is not None:
            waiting.put(answer)

    def decide(self, request: Request, context: Context = NO_FACTS) -> Permit | Denied:
        """As `Authorizer.decide`."""
        return decision(self._ask(Kind.DECIDE, {"question": plain_question(request, context)})[1])

    def decide_in_mount(self, request: Request, context: Context) -> Permit | Denied:
        """What the mount would say of it, which can hold apart what a gate cannot."""
        return decision(self._ask(Kind.DECIDE, {"question": plain_question(request, context), "in_mount": True})[1])

    def decide_each(self, questions: list[tuple[Request, Context]]) -> dict[int, Denied]:
        """By number, what the mount refuses of these."""
        refused = {}
        for at in range(0, len(questions), _AT_A_TIME):
            plain = [plain_question(*each) for each in questions[at : at + _AT_A_TIME]]
            for number, answer in self._ask(Kind.DECIDE_EACH, {"questions": plain})[1]["denied"]:
                denied = decision(answer)
                assert isinstance(denied, Denied)
                refused[at + number] = denied
        return refused

    def grant(self, stage: int, at: int, size: int) -> int:
        """Let a git command take in published files; the number for `withdraw`. OSError.

        `stage` is a file with their content and, `size` bytes at `at`, their list (`fuse.grants`).
        """
        with self._granting:  # the server takes one descriptor at a time
            number, waiting = self._wait()
            document = {"ask": number, "grant": number, "stage": os.fstat(stage).st_ino, "at": at, "size": size}
            self._line.hand_over(Kind.GRANT, document, [stage])
            self._said(waiting.get())
        return number

    def withdraw(self, number: int) -> list[str]:
        """End what `grant` gave; the paths that were taken in."""
        taken: list[str] = self._ask(Kind.WITHDRAW, {"grant": number})[1]["taken"]
        return taken

    def authorize(
        self,
        request: Request,
        context: Context = NO_FACTS,
        *parts: RelatedChange,
        caller: Caller = NOBODY,
        details: dict[str, Any] | None = None,
        size: int = 0,
        action: str = "",
        guard: str = "file",
    ) -> Admission:
        """As `Authorizer.authorize`. Leaving the admission returns when the mount shows what was changed.

        Leaving it raises OSError, ETIMEDOUT, where the change is made and recorded and the mount may not show it.
        """
        document = {
            "question": plain_question(request, context),
            "parts": [plain_question(part.request, part.context) for part in parts],
            "caller": list(caller),
            "details": details,
            "size": size,
            "action": action,
            "guard": guard,
        }
        admission = self.admit_judged(request, document)
        assert admission is not None
        return admission

    def admit_judged(self, request: Request, document: dict[str, Any]) -> Admission | None:
        """`authorize` in the form of `Kind.ADMIT`. None: the parts were judged by a `generation` that is over."""
        number, answer = self._ask(Kind.ADMIT, document)
        if "stale" in answer:
            return None
        permit = decision(answer)
        if isinstance(permit, Denied):
            raise Refused(permit)
        return Admission(self._ended, request, permit, number, document["action"], document["guard"])

    def generation(self) -> dict[str, Any]:
        """{"generation", "leases"} by which the server judges now; "leases" is "none", "known" or "unknown"."""
        return self._ask(Kind.DECIDE, {})[1]

    def note(  # noqa: PLR0913 - as for `Authorizer.note`
        self,
        request: Request,
        context: Context = NO_FACTS,
        *,
        guard: str = "file",
        caller: Caller = NOBODY,
        details: dict[str, Any] | None = None,
        size: int = 0,
        error: int = 0,
        reason: str = "",
    ) -> None:
        """As `Authorizer.note`."""
        document = {
            "question": plain_question(request, context),
            "caller": list(caller),
            "details": details,
            "size": size,
            "error": error,
            "reason": reason,
            "guard": guard,
        }
        _, answer = self._ask(Kind.NOTE, document)
        if "denied" in answer:
            denied = decision(answer)
            assert isinstance(denied, Denied)
            raise Refused(denied)

    def refuse(self, denied: Denied, caller: Caller = NOBODY, *, guard: str = "file") -> Refused:
        """As `Authorizer.refuse`."""
        self._ask(Kind.REFUSE, {**plain_decision(denied), "caller": list(caller), "guard": guard})
        return Refused(denied)

    def event(self, operation: str, details: dict[str, Any]) -> None:
        """Enter what happened to the session. TrailError."""
        self._check(self._ask(Kind.EVENT, {"operation": operation, "details": details})[1])

    def sync(self) -> None:
        """As `Authorizer.sync`."""
        self._check(self._ask(Kind.SYNC, {})[1])

    def show(self) -> None:
        """Return when the mount shows all that was changed by now, by whomever. OSError: as for `authorize`."""
        self._ask_later(Kind.SHOW, {})

    def _check(self, answer: dict[str, Any]) -> None:
        if "failed" in answer:
            raise TrailError(answer["failed"])

    def _ended(self, outcome: Outcome) -> None:
        document = {
            "admission": outcome.seq,
            "error": outcome.error,
            "reason": shortened(outcome.reason, *_OF_OUTCOME),
            "written": outcome.written,
            "details": shortened(outcome.details, *_OF_OUTCOME),
        }
        self._ask_later(Kind.ENDED, document)

    def _ask_later(self, kind: Kind, document: dict[str, Any]) -> None:
        number, waiting = self._wait()
        self._tell_later(kind, {**document, "ask": number})
        stale = waiting.get().get("stale")
        if stale is not None:
            raise OSError(errno.ETIMEDOUT, stale)

    def _ask(self, kind: Kind, document: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """The number of what is asked, and the answer. OSError: the server is gone, or has failed at it."""
        number, waiting = self._wait()
        try:
            sent = self._line.tell(kind, {**document, "ask": number})
        except ProtocolError as error:
            self._waiting.pop(number)
            raise UsageError("the call names too many paths, or too long ones; send less in one call") from error
        if not sent:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return number, self._said(waiting.get())

    def _said(self, answer: dict[str, Any]) -> dict[str, Any]:
        if "error" in answer:
            raise OSError(errno.EPROTO, answer["error"])
        return answer

    def _wait(self) -> tuple[int, queue.SimpleQueue[dict[str, Any]]]:
        number = next(self._numbers)
        waiting = self._waiting[number] = queue.SimpleQueue()
        return number, waiting
