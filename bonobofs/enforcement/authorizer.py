"""The interface of enforcement: the Authorizer protocol, the callers, the admissions and their outcomes."""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypedDict, Unpack

from bonobofs.errors import BonobofsError
from bonobofs.policy.decision import Code, Denied, Layer, Permit, Refused
from bonobofs.policy.engine import Policy
from bonobofs.policy.request import NO_FACTS, Context, Operation, Principal, Request

if TYPE_CHECKING:
    from bonobofs.enforcement.caller_processes import CallerProcess

_LONGEST_REASON: Final = 500
"""Characters of a failure's reason that the trail keeps."""

ACTIONS: Final[dict[Operation, str]] = {
    **dict.fromkeys(
        (Operation.CREATE_FILE, Operation.MKDIR, Operation.MKNOD, Operation.SYMLINK, Operation.LINK), "create"
    ),
    **dict.fromkeys((Operation.CREATE_BRANCH, Operation.TAG, Operation.CREATE_WORKTREE), "create"),
    **dict.fromkeys((Operation.CREATE_ISSUE, Operation.CREATE_EPIC), "create"),
    **dict.fromkeys((Operation.DELETE_FILE, Operation.RMDIR), "delete"),
    **dict.fromkeys((Operation.DELETE_BRANCH, Operation.REMOVE_WORKTREE), "delete"),
    **dict.fromkeys(
        (Operation.CALL, Operation.UNDO, Operation.READ_FILE, Operation.LIST_FILES, Operation.SEARCH_FILES), ""
    ),
    Operation.CONNECT: "",
}
"""`action` recorded for each operation. Operations not listed are `modify`."""


class Caller(NamedTuple):
    """The program that makes a request: evidence, never an identity."""

    tool: str = ""
    details: dict[str, Any] = {}  # noqa: RUF012 - never changed; a NamedTuple holds it as the shared default
    process: CallerProcess | None = None
    """Its process, if the kernel named it."""


NO_CALLER: Final = Caller()


Head = Callable[[], bytes]
"""Returns the first HEAD_BYTES of a file after a change."""


class CallRecord(TypedDict, total=False):
    """The record of a call that changes nothing; `Enforcer.record_call` explains the fields."""

    caller: Caller
    details: dict[str, Any] | None
    size: int
    error: int
    reason: str
    guard: str


class ChangeRecord(TypedDict, total=False):
    """The record of a change; `Enforcer.authorize` explains the fields."""

    caller: Caller
    details: dict[str, Any] | None
    size: int
    action: str
    guard: str
    sync: bool


class RelatedChange(NamedTuple):
    """A further name that the same change touches. The engine judges it together with the change."""

    request: Request
    context: Context = NO_FACTS
    layer: Layer | None = Layer.SOURCE
    """The layer that holds or will hold the bytes of this name. None: any layer."""
    head: Head | None = None
    """Reads the first bytes of the file, if the context does not have them."""


class Outcome(NamedTuple):
    """How an authorized change ended. It is not yet in the trail."""

    seq: int
    request: Request
    action: str
    error: int
    written: int
    details: dict[str, Any] | None
    guard: str = "file"
    reason: str = ""
    """Why the change failed; "" if the errno says it."""


class Admission:
    """The permit for one change, as a context manager. Its entry returns the permit; its exit records the outcome."""

    __slots__ = ("_action", "_end", "_guard", "_request", "details", "on_failure", "permit", "reason", "seq", "written")

    def __init__(
        self, end: Callable[[Outcome], None], request: Request, permit: Permit, seq: int, action: str, guard: str
    ) -> None:
        self._end = end
        self._guard = guard
        self._request = request
        self.seq = seq
        self._action = action
        self.permit = permit
        self.written = 0
        self.details: dict[str, Any] | None = None
        self.on_failure: Callable[[Admission], None] | None = None
        """Called if the block of the change fails, before the outcome is recorded."""
        self.reason = ""

    def call_at_end(self, end: Callable[[Outcome], None]) -> None:
        """Pass the outcome to `end`."""
        self._end = end

    def __enter__(self) -> Permit:
        return self.permit

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = 0
        if error is not None:
            failed = (error.errno if isinstance(error, OSError | BonobofsError) else None) or errno.EIO
            self.reason = failure_reason(error)
            mark_recorded(error)
            if self.on_failure is not None:
                self.on_failure(self)
        self.end(failed)

    def end(self, error: int) -> None:
        """Record the outcome. `error` is an errno, or 0 if the change was made."""
        self._end(
            Outcome(self.seq, self._request, self._action, error, self.written, self.details, self._guard, self.reason)
        )


class Keeper(Protocol):
    """Keeps the pre-images of changes by path (`undo.preimages`)."""

    def before(self, request: Request, details: dict[str, Any]) -> dict[str, Any]:
        """Return more details for the intent of a change."""

    def keep(self, number: int, request: Request, details: dict[str, Any]) -> str:
        """Keep the old content for the intent `number`; return why it is not kept, or ""."""

    def after(self, number: int, request: Request, details: dict[str, Any]) -> dict[str, Any]:
        """Return the details for the outcome of a change."""

    def drop(self, number: int) -> None:
        """Remove what was kept for the intent `number`, whose change failed."""


class Authorizer(Protocol):
    """The enforcer as guards, tools and gates use it: an `Enforcer`, or a proxy of the server's `Enforcer`.

    If a change touches more names than those of its requests, `details[TOUCHES]` lists them.
    """

    @property
    def agent(self) -> Principal: ...

    @property
    def policy(self) -> Policy: ...

    def decide(self, request: Request, context: Context = NO_FACTS) -> Permit | Denied:
        """Return the engine's decision. The trail records nothing."""

    def authorize(
        self, request: Request, context: Context = NO_FACTS, *related: RelatedChange, **record: Unpack[ChangeRecord]
    ) -> Admission:
        """Authorize a change of the source, as `Enforcer.authorize` does. Raises Refused like it."""

    def record_call(self, request: Request, context: Context = NO_FACTS, /, **record: Unpack[CallRecord]) -> None:
        """Record a call that changed nothing, as `Enforcer.record_call` does. Raises Refused like it."""

    def deny(self, denied: Denied, caller: Caller = NO_CALLER, *, guard: str = "file") -> Refused:
        """Record a denial; return the exception to raise."""


def failure_reason(error: BaseException) -> str:
    """Return why a call failed, for the trail; "" for an OSError with an errno, which is the reason."""
    if isinstance(error, OSError) and error.errno is not None:
        return ""
    text = str(error)[:_LONGEST_REASON]
    return text if isinstance(error, BonobofsError) else f"{type(error).__name__}: {text}".removesuffix(": ")


def mark_recorded(error: BaseException) -> None:
    """Mark an error as recorded, so that no outer caller records it again."""
    with suppress(AttributeError):
        error.is_in_trail = True  # type: ignore[attr-defined]


def is_recorded(error: BaseException) -> bool:
    """True if the trail has an entry of this error."""
    return getattr(error, "is_in_trail", False)


def unrecorded(request: Request) -> Denied:
    """Return the denial (UNRECORDED) of a permitted change that the trail cannot record."""
    return Denied(
        Code.UNRECORDED,
        "trail",
        "The change cannot be recorded, so it is not made.",
        "Ask the operator to free space for the state directory or to look at `bonobofs status`.",
        request.path,
        request.operation,
    )
