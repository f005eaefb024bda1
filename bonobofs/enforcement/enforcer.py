"""The policy enforcement point: the enforcer authorizes and records each change of the source.

    with enforcer.authorize(Request(Operation.DELETE_FILE, path), Context(leaves=True), caller=caller) as permit:
        layer.unlink(directory, name, permit)

`authorize` asks the engine and records the intent in the trail; then the block runs, and its end is the outcome.
`authorize` records a denial and raises it as `Refused`. If the trail cannot be written, it denies the change as
UNRECORDED. If `authorize` raises any error, the block does not run.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import inf
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime, monotonic
from typing import Any, Final

from bonobofs.audit.entry import LAYER, NOT_KEPT, object_of
from bonobofs.audit.writer import Trail
from bonobofs.enforcement.authorizer import (
    ACTIONS,
    NO_CALLER,
    Admission,
    Caller,
    Head,
    Keeper,
    Outcome,
    RelatedChange,
    unrecorded,
)
from bonobofs.enforcement.caller_processes import details_of
from bonobofs.enforcement.denial_recorder import DenialRecorder, lock_of
from bonobofs.enforcement.write_batches import ScratchCounter, ScratchCounters, WriteBatch, WriteBatches
from bonobofs.errors import TrailError
from bonobofs.policy.answers import compile_answers
from bonobofs.policy.decision import Denied, Layer, Permit, Refused, WrongLayerError
from bonobofs.policy.engine import EXECUTABLE_HEADS, Policy, decide, decide_in_source, decide_published
from bonobofs.policy.lease_set import UNKNOWN, LeaseSet
from bonobofs.policy.request import NO_FACTS, Context, Principal, Request, WorkspacePath

FLUSHING: Final = 0.01
"""Seconds after which `flush_idle` stops closing batches, because requests wait for it."""

USE_SECONDS: Final = 5.0
"""Seconds for which an answer "once" permits further changes after its first: a program writes a file in several."""
_MOST_TOPS: Final = 4096


class Enforcer:
    """The enforcer of one session: one agent, one policy at a time, one trail."""

    def __init__(
        self,
        policy: Policy,
        agent: Principal,
        trail: Trail,
        *,
        outcomes_later: bool = False,
        has_layers: bool = False,
        denials: Path | None = None,
    ) -> None:
        """Create the enforcer of a session.

        `outcomes_later`: the server calls `write_outcome` while no request waits, so that none waits for it. The next
        intent comes after all outcomes.
        Otherwise an outcome is in the trail before the call returns. `has_layers`: the caller obeys each permit's
        `layer`. Without layers, the enforcer denies a change in another layer than the source. `denials` is the file in
        which all sessions of the agent count denials (`denials_path`).
        """
        self.policy = policy
        self.agent: Final = agent
        self.trail: Final = trail
        self.denial_recorder: Final = DenialRecorder(trail, denials)
        self._decide = decide if has_layers else decide_in_source
        self._counters: Final = ScratchCounters(trail)
        self._scratch_tops: Final[dict[str, WorkspacePath]] = {}
        """Topmost scratch path of each directory below it."""
        self._ended: Final[deque[Outcome]] = deque()
        self._end: Final[Callable[[Outcome], None]] = self._ended.append if outcomes_later else self._write_now
        self._batches: Final = WriteBatches(self._end)
        self._leases = UNKNOWN
        self.leases_expire_at = inf
        """CLOCK_BOOTTIME at which the lease snapshot expires; inf if this session tracks no leases."""
        self._answers: dict[int, dict[str, Any]] = {}
        """The operator's answers that are not revoked, by number, also those that have ended."""
        self.answers_expire_at = inf
        """CLOCK_BOOTTIME at which the first of them expires."""
        self.on_question: Callable[[Denied, Caller], None] = lambda *_: None
        """Called with each denial that asks the operator."""
        self.generation = 0
        """Incremented with each new policy or lease snapshot. Permits and batches of earlier ones are not current."""
        self.companion_changes = 0
        """Number of changes for which the companion got a permit."""
        self.take_space: Callable[[Request], Denied | None] = lambda _: None
        """Returns the denial of a change for which the scratch layer has no room, or None."""
        self.keeper: Keeper | None = None
        """Keeps the old content of files that this process changes by path."""
        self._last_caller = NO_CALLER
        self._last_details = "{}"
        """The details of `_last_caller` as JSON."""

    def change_policy(self, policy: Policy) -> None:
        """Install a policy and keep the lease snapshot."""
        self._install_policy(policy.bound_by(self.policy.leases))
        self.expire_answers()

    def set_leases(self, expires_at: float, leases: LeaseSet | None = None) -> None:
        """Install a lease snapshot (None: the present one) that expires at `expires_at` of CLOCK_BOOTTIME.

        After the expiry the engine denies every change of the source. During the call no change may be in progress.
        """
        if leases is not None:
            self._leases = leases
        self.leases_expire_at = expires_at
        if self.policy.leases is not self._leases:
            self._install_policy(self.policy.bound_by(self._leases))

    def set_answers(self, documents: Iterable[dict[str, Any]]) -> None:
        """Install the operator's answers, those of the policy in force alone. `compile_answers` names their keys.

        `expires_at` is of CLOCK_BOOTTIME. An answer `once` ends USE_SECONDS after the first change that it permits.
        """
        old = self._answers
        self._answers = {each["number"]: old.get(each["number"], each) for each in documents}
        self.expire_answers()

    def expire_answers(self) -> None:
        """Judge without the answers that have expired, or that were given under another policy."""
        answers = self.answers
        self.answers_expire_at = min((each["expires_at"] for each in answers), default=inf)
        session = self.trail.identity[0]
        self._install_policy(self.policy.with_answers(compile_answers(session, answers)))

    @property
    def answers(self) -> list[dict[str, Any]]:
        """The answers in force."""
        now, digest = clock_gettime(CLOCK_BOOTTIME), self.policy.digest
        return [each for each in self._answers.values() if each["expires_at"] > now and each["policy"] == digest]

    def use_answers(self, answers: list[int], details: dict[str, Any] | None) -> dict[str, Any]:
        """Return the details of a change that answers permit, and begin the end of those that permit it once."""
        for number in answers:
            answer = self._answers.get(number)
            if answer is not None and answer["once"] and not answer.get("used"):
                answer["used"] = True
                answer["expires_at"] = min(answer["expires_at"], clock_gettime(CLOCK_BOOTTIME) + USE_SECONDS)
                self.answers_expire_at = min(self.answers_expire_at, answer["expires_at"])
        return {**(details or {}), "answers": answers}

    def leases_expired(self) -> bool:
        """True if the lease snapshot is past its expiry."""
        return clock_gettime(CLOCK_BOOTTIME) >= self.leases_expire_at

    def expire_leases(self) -> None:
        """Discard the lease snapshot and the answers that are past their expiry.

        Without a lease snapshot, the engine denies every change of the source.
        """
        now = clock_gettime(CLOCK_BOOTTIME)
        if now >= self.answers_expire_at:
            self.expire_answers()
        if now >= self.leases_expire_at:
            self.leases_expire_at = inf
            self._install_policy(self.policy.bound_by(UNKNOWN))

    def _install_policy(self, policy: Policy) -> None:
        self.policy = policy
        self.generation += 1
        self._scratch_tops.clear()

    def decide(self, request: Request, context: Context = NO_FACTS) -> Permit | Denied:
        """Return the engine's decision. The trail records nothing. A change needs `authorize`."""
        now = clock_gettime(CLOCK_BOOTTIME)
        if now >= self.leases_expire_at or now >= self.answers_expire_at:
            self.expire_leases()
        return self._decide(self.policy, self.agent, request, context)

    def permit(
        self,
        request: Request,
        context: Context,
        caller: Caller = NO_CALLER,
        *,
        head: Head | None = None,
        guard: str = "file",
    ) -> Permit:
        """Return the engine's permit, for `authorize` or `open_batch`.

        `head` is called if the decision needs the first bytes; not every file can be read. The engine decides again
        only if they are those of an executable file. Refused: the engine denies the change. The trail gets the denial.
        """
        decision = self.decide(request, context)
        if head is not None and isinstance(decision, Permit) and decision.judges_content:
            found = head()
            if found.startswith(EXECUTABLE_HEADS):
                decision = self.decide(request, context._replace(head=found))
        if isinstance(decision, Denied):
            raise self.deny(decision, caller, guard=guard)
        return decision

    def explain(
        self, request: Request, context: Context, role: str | None = None, head: Head | None = None
    ) -> Permit | Denied:
        """Return the decision that `why` shows: that of `decide`, or a denial without room in scratch or in the trail.

        `role` replaces the role of the session. `head` is called if the decision depends on the first bytes.
        """
        self.expire_leases()
        agent = self.agent if role is None else self.agent._replace(role=role)
        decision = self._decide(self.policy, agent, request, context)
        if head is not None and isinstance(decision, Permit) and decision.judges_content:
            decision = self._decide(self.policy, agent, request, context._replace(head=head()))
        if isinstance(decision, Denied):
            return decision
        try:
            self.trail.flush()
        except TrailError:
            return unrecorded(request)
        return (self.take_space(request) if decision.layer is Layer.SCRATCH else None) or decision

    def authorize(  # noqa: PLR0913, PLR0915 - the request, and the fields of its record
        self,
        request: Request,
        context: Context | Permit = NO_FACTS,
        *related: RelatedChange | Permit,
        caller: Caller = NO_CALLER,
        details: dict[str, Any] | None = None,
        size: int = 0,
        action: str = "",
        layer: Layer | None = Layer.SOURCE,
        guard: str = "file",
        sync: bool = False,
        keeper: Keeper | None = None,
    ) -> Admission:
        """Authorize the change that `request` and all of `related` describe together, and record its intent.

        A `Permit` in place of a context or part must be from `permit`, under the present policy and leases. `size` is
        the number of bytes of the change, for the record. `action` is create, modify or delete; "" means the action of
        the operation. `layer` is the layer that the caller is about to change; None: the layer of the permit. `guard`
        is file, git or beads. `sync`: the intent is on the disk when this returns. `keeper` keeps the old content; by
        default that of the session.

        Raises:
            Refused: the engine denies the request or a part, or the trail cannot be written. The trail gets the denial.
            WrongLayerError: a decision is for another layer. The trail gets no entry.
        """
        permit = context if isinstance(context, Permit) else self.permit(request, context, caller, guard=guard)
        elsewhere = permit if layer is not None and permit.layer is not layer else None
        layers, answers = [permit.layer], [permit.answer]
        for part in related:
            if isinstance(part, Permit):
                other = part
            else:
                other = self.permit(part.request, part.context, caller, head=part.head, guard=guard)
                if part.layer is not None and other.layer is not part.layer:
                    elsewhere = other
            layers.append(other.layer)
            answers.append(other.answer)
        if elsewhere is not None:
            raise WrongLayerError(elsewhere)
        action = action or ACTIONS.get(request.operation, "modify")
        if layers.count(Layer.SCRATCH) == len(layers):
            counter = self._counter(request, permit, caller)
            return Admission(counter.count, request, permit, counter.seq, action, guard)
        if Layer.SOURCE not in layers:
            details = {**(details or {}), LAYER: layers[-1].value}
        if any(answers):
            details = self.use_answers([each for each in answers if each], details)
        keeper = (keeper or self.keeper) if guard == "file" else None
        if keeper is not None:
            details = details or {}
            details = {**details, **keeper.before(request, details)}
        seq = self._intend(request, permit, caller, details, size, action, guard)
        admission = Admission(self._end, request, permit, seq, action, guard)
        if keeper is not None and details is not None:
            self._keep(keeper, admission, request, details)
        if sync:
            try:
                self.trail.sync()
            except TrailError as error:
                admission.end(errno.EIO)
                raise self.deny(unrecorded(request), caller, guard=guard) from error
        return admission

    def _keep(self, keeper: Keeper, admission: Admission, request: Request, details: dict[str, Any]) -> None:
        more: dict[str, Any] = {}

        def end(outcome: Outcome) -> None:
            try:
                if outcome.error not in (0, errno.EOWNERDEAD) and not outcome.written:
                    keeper.drop(admission.seq)
                else:
                    more.update(keeper.after(admission.seq, request, details))
            finally:  # a Ctrl-C leaves no intent without an outcome
                self._end(outcome._replace(details={**(outcome.details or {}), **more}))

        admission.call_at_end(end)
        try:
            if not_kept := keeper.keep(admission.seq, request, details):
                more[NOT_KEPT] = not_kept
        except BaseException:
            admission.end(errno.EINTR)
            raise

    def decide_published(self, request: Request) -> Permit | Denied:
        """Return the decision on a change that brings a path to its published content."""
        self.expire_leases()
        return decide_published(self.policy, request)

    def authorize_published(self, request: Request, caller: Caller, details: dict[str, Any] | None = None) -> Admission:
        """Authorize a change that brings a path to its published content. The caller checks the grant.

        Refused: another holder has a lease on the path, the lease snapshot has expired, or the trail cannot be written.
        """
        permit = self.decide_published(request)
        if isinstance(permit, Denied):
            raise self.deny(permit, caller)
        action = ACTIONS.get(request.operation, "modify")
        seq = self._intend(request, permit, caller, details, 0, action)
        return Admission(self._end, request, permit, seq, action, "file")

    def record_call(  # noqa: PLR0913 - as for `authorize`
        self,
        request: Request,
        context: Context = NO_FACTS,
        *,
        guard: str = "file",
        caller: Caller = NO_CALLER,
        details: dict[str, Any] | None = None,
        size: int = 0,
        error: int = 0,
        reason: str = "",
    ) -> None:
        """Record, in one entry, a call that changed nothing. The caller returns no result before this returns.

        `size` is the number of bytes of the result, `error` an errno. The engine does not judge a failed call; its
        entry has the `reason`. Refused: the engine denies the call, or the trail cannot be written.
        """
        permit = None if error else self.decide(request, context)
        if isinstance(permit, Denied):
            raise self.deny(permit, caller, guard=guard)
        try:
            self.trail.call(
                request.operation,
                request.path,
                permit.rule if permit is not None else "",
                guard=guard,
                tool=caller.tool,
                bytes=size,
                lock=self._lock_on(request.path),
                details={**details_of(caller, self.trail), **(details or {})},
                error=error,
                reason=reason,
            )
        except TrailError as failure:
            raise self.deny(unrecorded(request), caller, guard=guard) from failure

    @property
    def state(self) -> tuple[int, int]:
        """Version of the inputs of a decision: the policy and the leases, and the companion's changes."""
        return self.generation, self.companion_changes

    def open_batch(
        self,
        key: int,
        request: Request,
        context: Context | Permit,
        now: float,
        *,
        caller: Caller = NO_CALLER,
        details: dict[str, Any] | None = None,
        layer: Layer | None = Layer.SOURCE,
    ) -> WriteBatch:
        """Authorize a batch of writes to the file `key`, up to the batch's `limit` in size.

        An open batch of the key is closed first. Takes a permit, and raises, as `authorize` does.
        """
        self._batches.close(key)
        permit = context if isinstance(context, Permit) else self.permit(request, context, caller)
        if layer is not None and permit.layer is not layer:
            raise WrongLayerError(permit)
        if permit.layer is Layer.SCRATCH:
            counter = self._counter(request, permit, caller)
            return self._batches.add(
                key, WriteBatch(request, permit, self.generation, counter.seq, now, caller, counter)
            )
        if permit.layer is not Layer.SOURCE:
            details = {LAYER: permit.layer.value}
        if permit.answer:
            details = self.use_answers([permit.answer], details)
        seq = self._intend(request, permit, caller, details, 0, ACTIONS.get(request.operation, "modify"))
        return self._batches.add(key, WriteBatch(request, permit, self.generation, seq, now, caller))

    def rename_batch(self, key: int, new: int) -> None:
        """Change the key of a batch."""
        self._batches.rename(key, new)

    def close_batch(self, key: int, error: int = 0) -> None:
        """Close the batch of the file `key`, if there is one, and queue its outcome. `error` is an errno, or 0."""
        self._batches.close(key, error)

    def close_batches(self) -> None:
        """Close every batch. The next write to each file needs a new permit and a new intent."""
        self._batches.close_all()

    def close_counters(self) -> None:
        """Close every counter of scratch changes."""
        for counter in self._counters:
            self._close_counter(counter)

    def write_outcomes(self) -> None:
        """Queue in the trail the outcomes of the changes that have ended since the last call."""
        while self._ended:
            self._write(self._ended.popleft())

    def write_outcome(self) -> bool:
        """Queue the oldest of these outcomes, if there is one. True: there are more."""
        if self._ended:
            self._write(self._ended.popleft())
        return bool(self._ended)

    def _write(self, outcome: Outcome) -> None:
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

    def _write_now(self, outcome: Outcome) -> None:
        self._write(outcome)
        # If the trail cannot be written, the outcome stays queued and the next change is denied.
        with suppress(TrailError):
            self.trail.flush()

    def flush_idle(self, now: float) -> bool:
        """Close the batches, scratch counters and counts of denials that have been idle for a second. TrailError.

        True: the call stopped after FLUSHING seconds, and the next call continues.
        """
        until = monotonic() + FLUSHING
        for key in self._batches.idle(now):
            if monotonic() >= until:
                return True
            self._batches.close(key)
            self.write_outcomes()
        for counter in self._counters.due(now):
            self._close_counter(counter)
        self.write_outcomes()
        self.denial_recorder.flush_idle(now)
        return False

    def flush_all(self) -> None:
        """Close all batches, scratch counters and counts of denials, and write the trail. TrailError."""
        self.close_batches()
        self.close_counters()
        self.write_outcomes()
        self.denial_recorder.flush_all()
        self.trail.flush()

    @property
    def turn(self) -> int:
        """Number of the present turn: the `seq` of its entry; 0 before the first."""
        return self.trail.turn

    def begin_turn(self, name: str, by: str = "mark") -> int:
        """Begin a turn and return its number. Changes that have begun belong to the turn before. TrailError."""
        self.close_batches()
        self.close_counters()
        self.write_outcomes()
        return self.trail.begin_turn(name, by)

    def deny(self, denied: Denied, caller: Caller = NO_CALLER, *, guard: str = "file", count: int = 1) -> Refused:
        """Record a denial that occurred `count` times; return the exception to raise."""
        if denied.question:
            self.on_question(denied, caller)
        return self.denial_recorder.deny(denied, caller, guard=guard, count=count)

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
            self.write_outcomes()
        if caller is not self._last_caller:
            self._last_caller, self._last_details = caller, object_of(details_of(caller, self.trail))
        leases = self.policy.leases
        own = leases is not None and not leases.matcher.is_empty and leases.owns(request.path.split("/"))
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
                caller=self._last_details,
                lock="own" if own else "none",
            )
        except TrailError as error:
            raise self.deny(unrecorded(request), caller, guard=guard) from error

    def _counter(self, request: Request, permit: Permit, caller: Caller) -> ScratchCounter:
        """Return the counter of a change in scratch. Refused: the trail cannot record its intent."""
        above = request.path.rpartition("/")[0]
        top = self._scratch_tops.get(above)
        if top is None:
            top = self.policy.scratch_top(request.path)
            if top != request.path:
                if len(self._scratch_tops) >= _MOST_TOPS:
                    self._scratch_tops.clear()
                self._scratch_tops[above] = top
        if self._ended:
            self.write_outcomes()
        try:
            return self._counters.find(caller.tool, top, permit.rule, object_of(details_of(caller, self.trail)))
        except TrailError as error:
            raise self.deny(unrecorded(request), caller) from error

    def _close_counter(self, counter: ScratchCounter) -> None:
        self._batches.close_counted(counter)
        self._end(self._counters.close(counter))

    def _lock_on(self, path: str) -> str:
        """Return the `lock` of the entry of a call that reads a path: `none`, `own`, or the lease's holder."""
        leases = self.policy.leases
        if leases is None or not leases.matcher:
            return "none"
        parts = path.split("/")
        return "own" if leases.owns(parts) else lock_of(leases.held_by_other(parts))
