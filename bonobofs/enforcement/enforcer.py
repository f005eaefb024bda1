"""The one door. Whoever changes the source asks here first, and nobody else decides or writes the log.

    with enforcer.authorize(Request(Operation.DELETE_FILE, path), Context(leaves=True), caller=caller) as permit:
        backing.unlink(directory, name, leave)

`authorize` asks the engine, enters the intent in the trail, and only then lets the block run; how the block ends is the
outcome. A refusal is entered and raised as `Refused`. When the trail cannot be written, the change is refused as
UNRECORDED. No error becomes an allow: whatever goes wrong here is raised, and the block does not run.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime, monotonic
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol

from bonobofs.audit.entry import LAYER, object_of
from bonobofs.audit.writer import Trail
from bonobofs.enforcement.denial_log import DenialWindow, RefusalLimit
from bonobofs.enforcement.write_batches import ScratchCounter, ScratchCounters
from bonobofs.errors import BonobofsError, TrailError
from bonobofs.policy.compiled import is_never_held
from bonobofs.policy.decision import Code, Denied, Holding, Layer, Permit, Refused, as_document
from bonobofs.policy.engine import Policy, decide, decide_in_source, decide_published
from bonobofs.policy.lease_set import UNKNOWN, Leases
from bonobofs.policy.request import NO_FACTS, Context, Operation, Principal, Request, WorkspacePath

QUIET: Final = 1.0
"""Seconds after which a run of writes, or of equal denials, is settled."""
SETTLING: Final = 0.01
"""Seconds that `settle_quiet` takes at most for runs: requests wait meanwhile."""
SHOWN_DENIALS: Final = 100
"""How many of the last refusals `denials.jsonl` shows."""

_MOST_TOPS: Final = 4096
_LONGEST_REASON: Final = 500
"""Characters of a reason that are entered."""

ACTIONS: Final[dict[Operation, str]] = {
    Operation.CREATE_FILE: "create",
    Operation.MKDIR: "create",
    Operation.MKNOD: "create",
    Operation.SYMLINK: "create",
    Operation.LINK: "create",
    Operation.DELETE_FILE: "delete",
    Operation.RMDIR: "delete",
    Operation.CALL: "",
    Operation.READ_FILE: "",
    Operation.LIST_FILES: "",
    Operation.SEARCH_FILES: "",
    Operation.CREATE_BRANCH: "create",
    Operation.DELETE_BRANCH: "delete",
    Operation.TAG: "create",
    Operation.CREATE_WORKTREE: "create",
    Operation.REMOVE_WORKTREE: "delete",
    Operation.CREATE_ISSUE: "create",
    Operation.CREATE_EPIC: "create",
}
"""What becomes of the thing where the operation's name alone tells; modify is what is not here."""


class Caller(NamedTuple):
    """Which program asked: evidence, never identity."""

    tool: str = ""
    details: dict[str, Any] = {}  # noqa: RUF012 - never changed; a NamedTuple holds it as the shared default


class RelatedChange(NamedTuple):
    """A further name that the same change touches, judged with it."""

    request: Request
    context: Context = NO_FACTS
    layer: Layer | None = Layer.SOURCE
    """Where the bytes of this name are, or will be; None: where they are makes no difference to the change."""


_OPTIONAL_LOCKS: Final = frozenset(
    ("index.lock", "gc.pid.lock", "maintenance.lock", "commit-graph.lock", "commit-graph-chain.lock")
)
"""What git takes when it could keep something for later, and does without."""
NOBODY: Final = Caller()


class WrongLayerError(OSError):
    """A verdict allows a change, but speaks of another place than that to which the effect would go; EXDEV."""

    def __init__(self, permit: Permit) -> None:
        super().__init__(errno.EXDEV, os.strerror(errno.EXDEV))
        self.permit = permit


class WriteBatch:
    """Writes to one file under one intent: the beginning is recorded before, the rest when it settles."""

    __slots__ = ("count", "counter", "generation", "last", "limit", "permit", "request", "seq", "size", "written")

    def __init__(
        self,
        request: Request,
        permit: Permit,
        generation: int,
        seq: int,
        now: float,
        counter: ScratchCounter | None = None,
    ) -> None:
        self.request = request
        self.counter = counter
        self.extend(permit)
        self.generation = generation
        self.seq = seq
        self.last = now
        self.count = 0
        self.written = 0
        self.size = 0

    def extend(self, permit: Permit) -> None:
        """The run goes on under this verdict."""
        self.permit = permit
        self.limit = permit.max_size if permit.max_size is not None else 1 << 63


_Mark = tuple[Operation, str, Code, str, str]
"""By what a refusal is known as the same: operation, path, code, entrance, and at a gate the details of the call."""


class _Repeat:
    """A refusal that has been entered once and is counted until it falls quiet."""

    __slots__ = ("count", "denied", "guard", "last", "seq")

    def __init__(self, denied: Denied, guard: str, seq: int, now: float) -> None:
        self.denied = denied
        self.guard = guard
        self.seq = seq
        self.last = now
        self.count = 0


class Outcome(NamedTuple):
    """How an admitted change ended, not yet entered."""

    seq: int
    request: Request
    action: str
    error: int
    written: int
    details: dict[str, Any] | None
    guard: str = "file"
    reason: str = ""
    """Why it failed; "": the errno says so."""


class Admission:
    """Leave for one change, as a context: entering it gives the leave, leaving it enters the outcome."""

    __slots__ = ("_action", "_end", "_enforcer", "_request", "details", "permit", "reason", "seq", "written")

    def __init__(
        self, end: Callable[[Outcome], None], request: Request, permit: Permit, seq: int, action: str, guard: str
    ) -> None:
        self._end = end
        self._enforcer = guard
        self._request = request
        self.seq = seq
        self._action = action
        self.permit = permit
        self.written = 0
        self.details: dict[str, Any] | None = None
        self.reason = ""

    def __enter__(self) -> Permit:
        return self.permit

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = 0
        if error is not None:
            failed = (error.errno if isinstance(error, OSError | BonobofsError) else None) or errno.EIO
            self.reason = reason_of_exception(error)
            mark_entered(error)
        self.end(failed)

    def end(self, error: int) -> None:
        """Enter the outcome; `error` is an errno, 0 where the change was made."""
        self._end(
            Outcome(
                self.seq, self._request, self._action, error, self.written, self.details, self._enforcer, self.reason
            )
        )


def reason_of_exception(error: BaseException) -> str:
    """Why a call failed, for the record; "" for an OSError with a number, which says so by itself."""
    if isinstance(error, OSError) and error.errno is not None:
        return ""
    text = str(error)[:_LONGEST_REASON]
    return text if isinstance(error, BonobofsError) else f"{type(error).__name__}: {text}".removesuffix(": ")


def mark_entered(error: BaseException) -> None:
    """Say that the record has an entry of this error, so that no caller of the callers enters it again."""
    with suppress(AttributeError):
        error.is_in_trail = True  # type: ignore[attr-defined]


def is_entered(error: BaseException) -> bool:
    """Whether the record has an entry of this error."""
    return getattr(error, "is_in_trail", False)


class Authorizer(Protocol):
    """What the file guard, the tools and the gates ask of a door, be it of their own process or of the one that mounts.

    A change that touches more names than those of the request and its parts says which in the details, as TOUCHES.
    """

    @property
    def agent(self) -> Principal: ...

    @property
    def policy(self) -> Policy: ...

    def decide(self, request: Request, context: Context = NO_FACTS) -> Permit | Denied:
        """What the engine says, with nothing recorded."""

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
        """Leave for a change of the source, as of `Enforcer.authorize`; raises Refused as that does."""

    def note(  # noqa: PLR0913 - as for `authorize`
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
        """Enter a call that changed nothing, as `Enforcer.note`; raises Refused as that does."""

    def refuse(self, denied: Denied, caller: Caller = NOBODY, *, guard: str = "file") -> Refused:
        """Enter a refusal, and give the exception to raise."""

    def sync(self) -> None:
        """Bring the record to the disk. TrailError."""


class Enforcer:
    """The door of one session: one agent, one policy at a time, one trail."""

    def __init__(
        self,
        policy: Policy,
        agent: Principal,
        trail: Trail,
        *,
        outcomes_later: bool = False,
        holds_apart: bool = False,
        denials: Path | None = None,
    ) -> None:
        """`outcomes_later`: whoever serves calls `enter_outcomes` after each reply, so that no caller waits for it.
        Otherwise an outcome is in the trail before the call returns.

        `holds_apart`: whoever asks looks at each verdict's `layer` and keeps such bytes out of the source. To others
        those changes are refused. `denials` is the file in which all sessions of the agent count them (`denials_path`).
        """
        self.policy = policy
        self.agent: Final = agent
        self.trail: Final = trail
        self.denials: Final[deque[tuple[object, dict[str, Any]]]] = deque(maxlen=SHOWN_DENIALS)
        """The uid of the caller, where there is one, and the refusal."""
        self.denials_seen = 0
        self._decide: Final = decide if holds_apart else decide_in_source
        self._runs: dict[int, WriteBatch] = {}
        self._repeats: dict[_Mark, _Repeat] = {}
        self._counters: Final = ScratchCounters(trail)
        self._scratch_tops: Final[dict[str, WorkspacePath]] = {}
        """By directory below a scratch path, that path."""
        self._ended: Final[list[Outcome]] = []
        self._end: Final[Callable[[Outcome], None]] = self._ended.append if outcomes_later else self._enter_now
        self._denial_window: Final = DenialWindow(denials)
        self._refusal_limit: Final = RefusalLimit(trail)
        self._leases = UNKNOWN
        self.known_until = inf
        """When what is known of leases is known no longer, by CLOCK_BOOTTIME; never, where none are followed."""
        self._generation = 0
        """Counts policies and leases: what was admitted under an earlier one is judged anew."""
        self.beside = 0
        """Counts the changes that the companion was permitted to make beside the mount."""
        self.room: Callable[[Request], Denied | None] = lambda _: None
        """The refusal of a change in scratch that has no room."""
        self._asking = NOBODY
        self._asked = "{}"
        """The details of `_asking`, as the trail takes them."""

    def change_policy(self, policy: Policy) -> None:
        """Judge by another policy from now on, under the same leases."""
        self._turn_to(policy.bound_by(self.policy.leases))

    def follow(self, until: float, leases: Leases | None = None) -> None:
        """Be bound by these leases (None: those of before) until that moment of CLOCK_BOOTTIME.

        From then on nothing is known of leases, and every change is refused. Who calls must let nobody be in the middle
        of a change meanwhile: what is admitted after this is bound, and what was before is over.
        """
        if leases is not None:
            self._leases = leases
        self.known_until = until
        if self.policy.leases is not self._leases:
            self._turn_to(self.policy.bound_by(self._leases))

    def is_current(self, run: WriteBatch) -> bool:
        """Whether the verdict of a run of writes still speaks, under this policy and these leases.

        Whoever serves has called `forget_in_time` since the request came.
        """
        return run.generation == self._generation

    def is_forgetting(self) -> bool:
        """Whether the time is over until which the leases are known."""
        return clock_gettime(CLOCK_BOOTTIME) >= self.known_until

    def forget_in_time(self) -> None:
        """Know nothing of leases when that time is over, so that every change is refused."""
        if clock_gettime(CLOCK_BOOTTIME) >= self.known_until:
            self.known_until = inf
            self._turn_to(self.policy.bound_by(UNKNOWN))

    def _turn_to(self, policy: Policy) -> None:
        self.policy = policy
        self._generation += 1
        self._scratch_tops.clear()

    def _judged(self, request: Request, context: Context) -> Permit | Denied:
        if clock_gettime(CLOCK_BOOTTIME) >= self.known_until:
            self.forget_in_time()
        return self._decide(self.policy, self.agent, request, context)

    def decide(self, request: Request, context: Context = NO_FACTS) -> Permit | Denied:
        """What the engine says, with nothing recorded: for questions (`why`), never for changes."""
        return self._judged(request, context)

    def explain(self, request: Request, context: Context) -> Permit | Denied:
        """Return what `why` shows: as `decide`, or the refusal of a change in scratch that has no room."""
        verdict = self._judged(request, context)
        if isinstance(verdict, Permit) and verdict.layer is Layer.SCRATCH:
            return self.room(request) or verdict
        return verdict

    def authorize(  # noqa: PLR0913 - what is judged, and what the record tells
        self,
        request: Request,
        context: Context = NO_FACTS,
        *parts: RelatedChange,
        caller: Caller = NOBODY,
        details: dict[str, Any] | None = None,
        size: int = 0,
        action: str = "",
        layer: Layer | None = Layer.SOURCE,
        guard: str = "file",
    ) -> Admission:
        """Leave for the change that `request` and all `parts` describe together; `size` is its bytes, for the record.

        `action` is create, modify or delete, where the operation's name alone does not tell. `layer` is where the
        effect will go, None where the caller goes by what the leave says. `guard` is file, git or beads: the entrance
        that the record names.
        Raises Refused, once the refusal is entered, when the engine denies any of them or the trail cannot be written;
        Elsewhere, unrecorded, when the verdict speaks of another place than that to which the effect would go.
        """
        permit = self._judged(request, context)
        if isinstance(permit, Denied):
            raise self.refuse(permit, caller, guard=guard)
        elsewhere = permit if layer is not None and permit.layer is not layer else None
        leaves_source = permit.layer
        in_scratch = permit.layer is Layer.SCRATCH
        for part in parts:
            other = self._judged(part.request, part.context)
            if isinstance(other, Denied):
                raise self.refuse(other, caller, guard=guard)
            if part.layer is not None and other.layer is not part.layer:
                elsewhere = other
            leaves_source = leaves_source and other.layer
            in_scratch = in_scratch and other.layer is Layer.SCRATCH
        if elsewhere is not None:
            raise WrongLayerError(elsewhere)
        action = action or ACTIONS.get(request.operation, "modify")
        if in_scratch:
            counter = self._counter(request, permit, caller)
            return Admission(_count_in(counter), request, permit, counter.seq, action, guard)
        if leaves_source:
            details = {**(details or {}), LAYER: leaves_source.value}
        seq = self._intend(request, permit, caller, details, size, action, guard)
        return Admission(self._end, request, permit, seq, action, guard)

    def decide_published(self, request: Request) -> Permit | Denied:
        """What the engine says of a change that brings a path to its published content."""
        self.forget_in_time()
        return decide_published(self.policy, request)

    def admit_published(self, request: Request, caller: Caller, details: dict[str, Any] | None = None) -> Admission:
        """Leave for a change that brings a path to its published content. The caller has the grant for it.

        Raises Refused where another holder has a lease on the path, or the leases are unknown.
        """
        permit = self.decide_published(request)
        if isinstance(permit, Denied):
            raise self.refuse(permit, caller)
        action = ACTIONS.get(request.operation, "modify")
        seq = self._intend(request, permit, caller, details, 0, action)
        return Admission(self._end, request, permit, seq, action, "file")

    def note(  # noqa: PLR0913 - as for `authorize`
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
        """Enter, in one entry, a call that changed nothing; `size` is the bytes that it is to give, `error` an errno.

        A call that failed is entered without being judged, with `reason`. The caller must give nothing before this has
        returned. Raises Refused, once the refusal is entered, when the engine denies the call or the trail cannot be
        written.
        """
        permit = None if error else self._judged(request, context)
        if isinstance(permit, Denied):
            raise self.refuse(permit, caller, guard=guard)
        try:
            self.trail.called(
                request.operation,
                request.path,
                permit.rule if permit is not None else "",
                guard=guard,
                tool=caller.tool,
                bytes=size,
                lock=self._seen_lock(request.path),
                details={**caller.details, **(details or {})},
                error=error,
                reason=reason,
            )
        except TrailError as failure:
            raise self.refuse(unrecorded(request), caller, guard=guard) from failure

    @property
    def state(self) -> tuple[int, int]:
        """What a judgement relies on that is made in several steps: policy and leases, and changes beside the mount."""
        return self._generation, self.beside

    def judge(self, part: RelatedChange, caller: Caller) -> WrongLayerError | None:
        """Judge one part of a change ahead of `authorize`; the verdict, where it speaks of another place than the part.

        Raises Refused, once the refusal is entered. The verdict holds while `state` stays what it is.
        """
        verdict = self._judged(part.request, part.context)
        if isinstance(verdict, Denied):
            raise self.refuse(verdict, caller)
        return WrongLayerError(verdict) if part.layer is not None and verdict.layer is not part.layer else None

    def begin(
        self,
        key: int,
        request: Request,
        context: Context,
        now: float,
        *,
        caller: Caller = NOBODY,
        layer: Layer | None = Layer.SOURCE,
    ) -> WriteBatch:
        """Leave for a run of writes to the file `key`, up to the run's `limit` in size. An older run of it is settled.

        Raises as `authorize` does.
        """
        self.settle(key)
        permit = self._judged(request, context)
        if isinstance(permit, Denied):
            raise self.refuse(permit, caller)
        if layer is not None and permit.layer is not layer:
            raise WrongLayerError(permit)
        if permit.layer is Layer.SCRATCH:
            counter = self._counter(request, permit, caller)
            counter.runs += 1
            run = self._runs[key] = WriteBatch(request, permit, self._generation, counter.seq, now, counter)
            return run
        details = {LAYER: permit.layer.value} if permit.layer else None
        seq = self._intend(request, permit, caller, details, 0, ACTIONS.get(request.operation, "modify"))
        run = self._runs[key] = WriteBatch(request, permit, self._generation, seq, now)
        return run

    def rekey(self, key: int, new: int) -> None:
        """The file of the run `key` is now known as `new`."""
        self.settle(new)
        self._runs[new] = self._runs.pop(key)

    def settle(self, key: int, error: int = 0) -> None:
        """End the run of writes to the file `key`, if there is one, and queue its outcome."""
        run = self._runs.pop(key, None)
        if run is None:
            return
        run.generation = -1  # whoever still holds it must begin anew
        details = {"writes": run.count, "size": run.size}
        action = ACTIONS.get(run.request.operation, "modify")
        if run.counter is not None:
            run.counter.runs -= 1
            run.counter.add(action, error, run.written)
            return
        self._end(Outcome(run.seq, run.request, action, error, run.written, details))

    def end_runs(self) -> None:
        """Settle every run: what is written next must be recorded anew, and is refused where that cannot be."""
        for key in list(self._runs):
            self.settle(key)

    def end_counters(self) -> None:
        """Settle every counter of scratch changes, as `end_runs` settles runs."""
        for counter in self._counters:
            self._settle_counter(counter)

    def enter_outcomes(self) -> None:
        """Queue the outcomes of what has ended since the last call."""
        for outcome in self._ended:
            self._enter(outcome)
        self._ended.clear()

    def _enter(self, outcome: Outcome) -> None:
        seq, request, action, error, written, details, guard, reason = outcome
        self.trail.outcome(
            seq,
            request.operation,
            request.path,
            guard=guard,
            action=action,
            error=error,
            reason=reason,
            bytes=written,
            details=details,
        )

    def _enter_now(self, outcome: Outcome) -> None:
        self._enter(outcome)
        # If the trail cannot be written, the outcome stays queued and the next change is refused.
        with suppress(TrailError):
            self.trail.flush()

    def settle_quiet(self, now: float) -> bool:
        """Settle the runs, scratch counters and repeated denials that have been quiet for a second.

        True: it has taken SETTLING, and some are left for the next call.
        """
        until = monotonic() + SETTLING
        for key in [key for key, run in self._runs.items() if now - run.last >= QUIET]:
            if monotonic() >= until:
                return True
            self.settle(key)
            self.enter_outcomes()
        for counter in self._counters.due(now):
            self._settle_counter(counter)
        self.enter_outcomes()
        for mark in [mark for mark, repeat in self._repeats.items() if now - repeat.last >= QUIET]:
            self._settle_repeat(mark)
        self._refusal_limit.settle(now)
        return False

    def settle_all(self) -> None:
        """Settle all runs, scratch counters and repeated denials, and write what waits. TrailError when it cannot."""
        self.end_runs()
        self.end_counters()
        self.enter_outcomes()
        for mark in list(self._repeats):
            self._settle_repeat(mark)
        self._refusal_limit.settle()
        self.trail.flush()

    def sync(self) -> None:
        """Bring the record to the disk. TrailError."""
        self.trail.sync()

    def refuse(self, denied: Denied, caller: Caller = NOBODY, *, guard: str = "file") -> Refused:
        """Enter a refusal, or count it where it repeats or comes too fast, and give the exception to raise.

        A refused lock that git does without is shown in `denials.jsonl` and not entered: `git status` asks for it.
        """
        if denied.operation is Operation.CREATE_FILE and _is_optional_lock(denied.path):
            self.show_denial(denied, caller)
            return Refused(denied)
        now = monotonic()
        # At a gate the path tells nothing: that the same was asked, of the same issue, the details say.
        asked = "" if guard == "file" else object_of(caller.details)
        mark = (denied.operation, denied.path, denied.code, guard, asked)
        repeat = self._repeats.get(mark)
        try:
            if repeat is not None:
                repeat.count += 1
                repeat.last = now
            elif not self._refusal_limit.admits(now):
                self._refusal_limit.count(denied, guard, now)
            else:
                action = ACTIONS.get(denied.operation, "modify")
                details = caller.details if denied.holding is None else {**caller.details, **denied.holding._asdict()}
                if denied.about:
                    details = {**details, "about": denied.about}
                seq = self.trail.denied(
                    denied, action, guard=guard, tool=caller.tool, lock=_lock(denied.holding), details=details
                )
                if denied.code is Code.OUTSIDE or denied.code is Code.IDENTITY:
                    left = denied.code is Code.OUTSIDE
                    self._alert(denied, guard, "an attempt to leave the workspace" if left else denied.reason)
                self._repeats[mark] = _Repeat(denied, guard, seq, now)
            if not _is_done_without(denied.path) and self._denial_window.add():
                self._alert(denied, guard, "three denials of one agent within five minutes")
        except TrailError:
            pass  # the refusal stands though it cannot be recorded; the next sync enters that the trail failed
        self.show_denial(denied, caller)
        return Refused(denied)

    def show_denial(self, denied: Denied, caller: Caller) -> None:
        """Add a refusal to `denials.jsonl`. The trail has it only where `refuse` enters it."""
        timestamp = datetime.now(UTC).isoformat(timespec="milliseconds")
        document = {"timestamp": timestamp, **as_document(denied, denied.path, denied.operation)}
        self.denials.append((caller.details.get("uid"), document))
        self.denials_seen += 1

    def _intend(
        self,
        request: Request,
        permit: Permit,
        caller: Caller,
        details: dict[str, Any] | None,
        size: int,
        action: str,
        guard: str = "file",
    ) -> int:
        if self._ended:
            self.enter_outcomes()
        if caller is not self._asking:
            self._asking, self._asked = caller, object_of(caller.details)
        leases = self.policy.leases
        own = leases is not None and bool(leases.held) and leases.owns(request.path.split("/"))
        try:
            return self.trail.intent(
                request.operation,
                request.path,
                action,
                permit.rule,
                guard=guard,
                tool=caller.tool,
                bytes=size,
                details=details,
                asked=self._asked,
                lock="own" if own else "none",
            )
        except TrailError as error:
            raise self.refuse(unrecorded(request), caller, guard=guard) from error

    def _counter(self, request: Request, permit: Permit, caller: Caller) -> ScratchCounter:
        """Return the counter of a change in scratch. Raises Refused where its intent cannot be entered."""
        above = request.path.rpartition("/")[0]
        top = self._scratch_tops.get(above)
        if top is None:
            top = self.policy.scratch_top(request.path)
            if top != request.path:
                if len(self._scratch_tops) >= _MOST_TOPS:
                    self._scratch_tops.clear()
                self._scratch_tops[above] = top
        if self._ended:
            self.enter_outcomes()
        try:
            return self._counters.find(caller.tool, top, permit.rule, object_of(caller.details))
        except TrailError as error:
            raise self.refuse(unrecorded(request), caller) from error

    def _settle_counter(self, counter: ScratchCounter) -> None:
        if counter.runs:
            for key in [key for key, run in self._runs.items() if run.counter is counter]:
                self.settle(key)
        request = Request(Operation.WRITE_FILE, counter.path)
        self._end(Outcome(counter.seq, request, "modify", 0, counter.bytes, self._counters.close(counter)))

    def _seen_lock(self, path: str) -> str:
        """Whose lock a path is under that is only looked at, as records have it."""
        leases = self.policy.leases
        if leases is None or not leases.held:
            return "none"
        parts = path.split("/")
        return "own" if leases.owns(parts) else _lock(leases.against(parts))

    def _settle_repeat(self, mark: _Mark) -> None:
        repeat = self._repeats.pop(mark)
        if repeat.count:
            try:
                self.trail.repeated(repeat.seq, repeat.denied, repeat.count, guard=repeat.guard)
            except TrailError:
                self._repeats[mark] = repeat
                raise

    def _alert(self, denied: Denied, guard: str, reason: str) -> None:
        self.trail.alert(reason, operation=denied.operation, guard=guard, path=denied.path, code=denied.code)


def _count_in(counter: ScratchCounter) -> Callable[[Outcome], None]:
    return lambda outcome: counter.add(outcome.action, outcome.error, outcome.written)


def _lock(holding: Holding | None) -> str:
    """Whose lock it is, as records have it."""
    return "none" if holding is None else holding.chain or holding.holder


def unrecorded(request: Request) -> Denied:
    """The refusal of a change that is admitted and cannot be recorded."""
    return Denied(
        Code.UNRECORDED,
        "trail",
        "The change cannot be recorded, so it is not made.",
        "Ask the operator to free space for the state directory or to look at `bonobofs status`.",
        request.path,
        request.operation,
    )


def _is_done_without(path: str) -> bool:
    """Whether a program only tried what it can do without: git at every `git status`, an editor whenever it saves."""
    return is_never_held(path.rpartition("/")[2]) or _is_optional_lock(path)


def _is_optional_lock(path: str) -> bool:
    return f"/{path}".rpartition("/")[2] in _OPTIONAL_LOCKS and "/.git/" in f"/{path}"
