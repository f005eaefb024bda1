"""One call of the Beads gate: check the agent and the role, judge, change, and record the outcome.

    with gate.call(IssueCall(Operation.CLOSE_ISSUE, "guarded_close", {"issue": id}), agent) as call:
        call.judged(judge_close(call.issues, ...))
        with call.session_turn, call.changing() as change:
            call.turn.close_issue(id, change.permit)

The gate checks the agent and the role before it runs bd. The call then holds the lock of the issues until its end. It
holds the session's change lock for the change only, so that changes of files do not wait for the lock of the issues.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, NamedTuple, TypeVar

from bonobofs.audit.entry import TOUCHES
from bonobofs.beads.bd_client import BdClient, Beads
from bonobofs.beads.issue import Actor, Issues
from bonobofs.beads.refusals import Fault
from bonobofs.enforcement.authorizer import Admission, Caller, RelatedChange
from bonobofs.errors import BeadsError, BonobofsError
from bonobofs.files.results import GuardedSession, enter_failure, is_session_agent, with_claimed_agent, wrong_agent
from bonobofs.policy.decision import Decision, Denied, Permit
from bonobofs.policy.grants import Conventions, conventions
from bonobofs.policy.request import NO_FACTS, Operation, Request, WorkspacePath

GUARD: Final = "beads"
BEADS: Final = ".beads"
"""The directory of bd's database."""
NOWHERE: Final = WorkspacePath("")
"""The path in every entry, because an issue is not a file of the workspace."""
_TOLD: Final = 200
"""Limit in characters of a text in the trail. A longer argument is recorded as its length."""
_MOST: Final = 20
"""Limit of fields, and of members of a list, in the trail."""

_T = TypeVar("_T")


class IssueCall(NamedTuple):
    """The operation and the arguments of a call."""

    operation: Operation
    tool: str
    details: dict[str, Any]
    also: tuple[Operation, ...] = ()
    """Further operations that the role must permit."""

    @property
    def caller(self) -> Caller:
        return Caller(self.tool, self.details)


class InFlight:
    """A change in progress. `note` adds details to its outcome."""

    def __init__(self, permit: Permit, admission: Admission) -> None:
        self.permit: Final = permit
        self._admission: Final = admission

    def note(self, **details: Any) -> None:
        self._admission.details = {**(self._admission.details or {}), **details}


class LockedCall:
    """A call that has passed the checks of agent and role, and holds the lock of the issues."""

    def __init__(self, session: GuardedSession, asked: IssueCall, turn: BdClient) -> None:
        self._session: Final = session
        self._asked: Final = asked
        self.turn: Final = turn
        self.is_entered = False

    @property
    def issues(self) -> Issues:
        """All issues, before the change."""
        return self.turn.everything()

    def judged(self, verdict: _T | Fault) -> _T:
        """Return the verdict. If it is a fault, record it and raise Refused."""
        if isinstance(verdict, Fault):
            self.is_entered = True
            with self._session.change_lock:
                raise self._session.guard.deny(denied(verdict, self._asked.operation), self._asked.caller, guard=GUARD)
        return verdict

    def answer(self) -> Decision:
        """Record that the change would be permitted, and return the decision. Raises Refused if it no longer is."""
        request = _request(self._asked.operation)
        self.is_entered = True
        with self._session.change_lock:
            self._session.guard.record_call(request, caller=self._asked.caller, guard=GUARD)
            return self._session.guard.decide(request)

    @property
    def session_turn(self) -> AbstractContextManager[object]:
        """Hold this around `changing`: an interrupted generator would keep the lock until its traceback is freed."""
        return self._session.change_lock

    @contextmanager
    def changing(self) -> Iterator[InFlight]:
        """Authorize the change that the block makes, and record the result of the block as the outcome."""
        request, *more = (_request(each) for each in (self._asked.operation, *self._asked.also))
        self.is_entered = True
        admission = self._session.guard.authorize(
            request,
            NO_FACTS,
            *map(RelatedChange, more),
            caller=self._asked.caller,
            details={TOUCHES: [f"{BEADS}/"]},
            guard=GUARD,
        )
        with admission as permit:
            change = InFlight(permit, admission)
            try:
                yield change
            except BonobofsError as error:
                change.note(**_told_of(error))
                raise


class IssueGate:
    """The issues of one workspace, for the agent of one session. May be used by several threads."""

    def __init__(self, session: GuardedSession, beads: Beads) -> None:
        self._session: Final = session
        self._beads: Final = beads

    @property
    def who(self) -> Actor:
        agent = self._session.guard.agent
        return Actor(agent.label, agent.id)

    @property
    def known(self) -> Conventions:
        """The conventions for issues in the policy in force."""
        return conventions(self._session.guard.policy.document)

    @contextmanager
    def call(self, asked: IssueCall, agent: str, fault: Fault | None = None) -> Iterator[LockedCall]:
        """Hold the lock of the issues for one call by `agent`.

        Raises Refused, and records it, for an agent other than the session's, for an operation that the role lacks, and
        for `fault`, which the caller found without the issues. Other errors before the change are recorded with result
        `error`, and raised.
        """
        self._enter(asked, agent, fault)
        call: LockedCall | None = None
        try:
            with self._beads.turn() as turn:
                call = LockedCall(self._session, asked, turn)
                yield call
        except Exception as error:
            if call is None or not call.is_entered:
                request = _request(asked.operation)
                enter_failure(self._session, request, error, asked.caller, guard=GUARD, details=_told_of(error))
            raise

    def _enter(self, asked: IssueCall, agent: str, fault: Fault | None) -> None:
        guard = self._session.guard
        if not is_session_agent(agent, guard.agent):
            with self._session.change_lock:
                raise guard.deny(
                    wrong_agent(NOWHERE, asked.operation), with_claimed_agent(asked.caller, agent), guard=GUARD
                )
        for operation in (asked.operation, *asked.also):
            decision = guard.decide(_request(operation))
            if isinstance(decision, Denied):
                with self._session.change_lock:
                    raise guard.deny(decision, asked.caller, guard=GUARD)
        if fault is not None:
            with self._session.change_lock:
                raise guard.deny(denied(fault, asked.operation), asked.caller, guard=GUARD)


def denied(fault: Fault, operation: Operation) -> Denied:
    """Return the denial of an operation because of a fault."""
    about = fault.about if len(fault.about) <= _TOLD else f"{fault.about[:_TOLD]}…"
    return Denied(*fault.refusal, NOWHERE, operation, about=about)


def shown(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call for the trail, with limits for number and length."""
    details = {
        _short(name): _shown(value) for name, value in itertools.islice(given.items(), _MOST) if value is not None
    }
    return details if len(given) <= _MOST else {**details, "fields": len(given)}


def _shown(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _TOLD else {"characters": len(value)}
    if isinstance(value, list | tuple):
        few = [_shown(each) for each in value[:_MOST] if isinstance(each, str)]
        return few if len(few) == len(value) else {"members": len(value), "first": few}
    return value if value is None or (isinstance(value, int) and -1 << 63 <= value < 1 << 63) else type(value).__name__


def _short(name: str) -> str:
    return name if len(name) <= _TOLD else f"{name[:_TOLD]}…"


def _request(operation: Operation) -> Request:
    return Request(operation, NOWHERE)


def _told_of(error: Exception) -> dict[str, Any]:
    if not isinstance(error, BeadsError):
        return {"error": type(error).__name__}
    parts = {"done": [*error.done], "missing": [*error.missing]} if error.done or error.missing else {}
    return {"error": str(error), "carried_out": error.carried_out, **parts}
