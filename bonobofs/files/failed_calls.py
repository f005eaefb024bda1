"""Failed guard calls in the record: each unexpected exception is entered once, as `error`, and raised again."""

from __future__ import annotations

import errno
import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from bonobofs.enforcement.authorizer import Caller, failure_reason, is_recorded, mark_recorded
from bonobofs.errors import BonobofsError
from bonobofs.files.results import GuardedSession
from bonobofs.policy.decision import Refused
from bonobofs.policy.request import Operation, Request, WorkspacePath

NOWHERE: Final = WorkspacePath("")

_Guard = TypeVar("_Guard")


def enter_failure(
    session: GuardedSession,
    request: Request,
    error: Exception,
    caller: Caller,
    *,
    guard: str = "file",
    details: dict[str, Any] | None = None,
) -> None:
    """Enter that a call failed before its change was admitted, unless an entry tells of this error already.

    The caller is to see the error, not that the record cannot be written: that is refused with the next change.
    """
    if isinstance(error, Refused) or is_recorded(error):
        return
    code = (error.errno if isinstance(error, OSError | BonobofsError) else None) or errno.EIO
    about = {"error": type(error).__name__} if details is None else details
    with suppress(OSError), session.turn:
        session.guard.record_call(
            request, caller=caller, guard=guard, details=about, error=code, reason=failure_reason(error)
        )
    mark_recorded(error)


def recorded(guard: str, **operations: Operation) -> Callable[[type[_Guard]], type[_Guard]]:
    """Class decorator: enter the unexpected exceptions of these methods and of their `guarded_` twins.

    The class keeps its session as `_session`.
    """

    def decorate(of: type[_Guard]) -> type[_Guard]:
        for name, operation in operations.items():
            for method in {name, f"guarded_{name}"} & vars(of).keys():
                setattr(of, method, _recorded(vars(of)[method], guard, Caller(name), operation))
        return of

    return decorate


def _recorded(method: Callable[..., Any], guard: str, caller: Caller, operation: Operation) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return method(self, *arguments, **named)
        except Exception as error:
            enter_failure(self._session, Request(operation, NOWHERE), error, caller, guard=guard)
            raise

    return call
