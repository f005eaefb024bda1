"""The session protocol and the results that all Python guards share, and the recording of failed calls."""

from __future__ import annotations

import abc
import errno
import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, ParamSpec, Protocol, Self, TypeVar

from bonobofs.audit.entry import AuditEntry, shortened
from bonobofs.enforcement.authorizer import Authorizer, Caller, failure_reason, is_recorded, mark_recorded
from bonobofs.errors import BonobofsError
from bonobofs.policy.decision import Code, Decision, Denied, Permit, Refused
from bonobofs.policy.request import Operation, Principal, Request, WorkspacePath

_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """The policy's decision on one change. It is true if the change is allowed."""

    allowed: bool
    reason: str = ""
    """One sentence, constant for each rule; "" if the change is allowed."""
    code: Code | None = None
    rule: str = ""
    """Name of the rule that made the decision."""
    instead: str = ""
    """Advice: what the agent can do instead."""
    about: str = ""
    """Details for people, such as the holder of the lease."""

    def __bool__(self) -> bool:
        return self.allowed


class _Session(Protocol):
    @property
    def source(self) -> str: ...


class Log(Protocol):
    """The queries of the session's trail that `FileGuard.audit` offers."""

    def recent(self, limit: int = 50) -> list[AuditEntry]: ...
    def filter_by_agent(self, agent: str) -> list[AuditEntry]: ...


class GuardedSession(Protocol):
    """The parts of a session that a guard needs. `bonobofs.session.python_session` opens one."""

    @property
    def session(self) -> _Session: ...
    @property
    def guard(self) -> Authorizer: ...
    @property
    def log(self) -> Log: ...
    @property
    def home(self) -> Path:
        """The state directory."""

    @property
    def access_path(self) -> str:
        """Path by which to open the source. It is not the source's own path if that leads elsewhere by now."""

    @property
    def change_lock(self) -> AbstractContextManager[object]:
        """Held for each change, from its intent to its outcome."""


def result_of(decision: Decision) -> ValidationResult:
    """The decision as a ValidationResult."""
    if isinstance(decision, Permit):
        return ValidationResult(True, rule=decision.rule)
    about = decision.about if decision.holding is None else str(decision.holding)
    return ValidationResult(False, decision.reason, decision.code, decision.rule, decision.instead, about)


def as_result(guarded: Callable[_P, _T]) -> Callable[_P, _T | ValidationResult]:
    """Derive a plain method from its `guarded_` twin: it returns a denial as a ValidationResult instead of raising."""

    @functools.wraps(guarded)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T | ValidationResult:
        try:
            return guarded(*args, **kwargs)
        except Refused as refused:
            return result_of(refused.decision)

    return call


def is_session_agent(agent: str, own: Principal) -> bool:
    """True if `agent` is the label or the UUID of the session's agent."""
    return agent in (own.label, own.id)


def wrong_agent(path: WorkspacePath, operation: Operation) -> Denied:
    """The refusal of a call that names another agent than the session's."""
    return Denied(
        Code.IDENTITY,
        "identity",
        "The call names another agent than the session's.",
        "Name the session's agent, or open a session for the other agent.",
        path,
        operation,
    )


def leads_outside(path: WorkspacePath, operation: Operation) -> Denied:
    """The refusal of a path with a symlink that leads out of the workspace."""
    return Denied(
        Code.OUTSIDE,
        "outside",
        "A symlink on the way to this path leads out of the workspace.",
        "Name a file in the workspace itself.",
        path,
        operation,
    )


def with_claimed_agent(caller: Caller, agent: str) -> Caller:
    """Return the caller with the claimed agent added to its details."""
    return caller._replace(details={**caller.details, "claimed": str(agent)})


class Closing(abc.ABC):
    """A context manager that calls `close` at its end."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Close the descriptors of this object."""


NOWHERE: Final = WorkspacePath("")
_MEMBERS: Final = 20
_ARGUMENT: Final = 200
"""Members of a list, and characters of a text, that the trail keeps of a call's arguments."""
_INTEGER: Final = (1 << 63) - 1

_Guard = TypeVar("_Guard")


def bounded(value: Any, depth: int = 2) -> Any:
    """Return the arguments of a call for the trail: at most 20 members of a list or object, 200 characters of a text.

    Members that are None are left out. A value without an exact form in JSON becomes the name of its type.
    """
    if isinstance(value, Mapping) and depth:
        value = {str(key)[:_ARGUMENT]: bounded(each, depth - 1) for key, each in value.items() if each is not None}
    elif isinstance(value, list | tuple) and depth:
        value = [bounded(each, depth - 1) for each in value]
    elif not (value is None or isinstance(value, str) or (isinstance(value, int) and abs(value) <= _INTEGER)):
        return type(value).__name__
    return shortened(value, _MEMBERS, _ARGUMENT)


def record_failure(
    session: GuardedSession,
    request: Request,
    error: Exception,
    caller: Caller,
    *,
    guard: str = "file",
    details: dict[str, Any] | None = None,
) -> None:
    """Record that a call failed before its change was authorized, unless the error is already recorded.

    An error of the trail is suppressed, so that the caller gets the original error. The next change is then refused.
    """
    if isinstance(error, Refused) or is_recorded(error):
        return
    code = (error.errno if isinstance(error, OSError | BonobofsError) else None) or errno.EIO
    about = {"error": type(error).__name__} if details is None else details
    with suppress(OSError), session.change_lock:
        session.guard.record_call(
            request, caller=caller, guard=guard, details=about, error=code, reason=failure_reason(error)
        )
    mark_recorded(error)


def recorded(guard: str, **operations: Operation) -> Callable[[type[_Guard]], type[_Guard]]:
    """Class decorator: record the exceptions of these methods and of their `guarded_` twins.

    The class must have its session as `_session`.
    """

    def decorate(of: type[_Guard]) -> type[_Guard]:
        for name, operation in operations.items():
            for method in {name, f"guarded_{name}"} & vars(of).keys():
                setattr(of, method, _recorded(vars(of)[method], guard, Caller(name), operation))
        return of

    return decorate


def _recorded(method: Callable[..., Any], guard: str, caller: Caller, operation: Operation) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            record_failure(self._session, Request(operation, NOWHERE), error, caller, guard=guard)
            raise

    return call
