"""Handle the companion's messages: external changes, policies, leases, and changes to authorize.

A change that was authorized for the companion is in flight until ENDED. Until then, no new lease snapshot is
acknowledged, and the paths of the change are no suspects. If the companion dies, the outcomes of its changes are
unknown: the server records that, removes temporary files of theirs, and invalidates what the kernel caches.

Nothing here waits for the companion.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.audit import recovery, temp_cleanup
from bonobofs.audit.entry import TOUCHES
from bonobofs.audit.recovery import SourceDifference
from bonobofs.audit.temp_cleanup import Stray
from bonobofs.audit.writer import Trail
from bonobofs.enforcement.authorizer import Admission, Caller, RelatedChange
from bonobofs.enforcement.caller_processes import details_of
from bonobofs.errors import PolicyError, TrailError
from bonobofs.fuse.companion_supervisor import CompanionProcess
from bonobofs.fuse.diagnostics import Diagnostics
from bonobofs.fuse.external_changes import Suspect
from bonobofs.fuse.mount_context import UNCACHED_SECONDS, UNWATCHED_SECONDS, WATCHED_SECONDS, MountContext
from bonobofs.fuse.operator_answers import OperatorAnswers
from bonobofs.ipc.channel import CompanionStatus, Message, MessageKind
from bonobofs.ipc.codec import decode_denied, decode_request, encode_decision, encode_denied
from bonobofs.ipc.session_config import SessionConfig
from bonobofs.policy.compiled import Tracked
from bonobofs.policy.decision import Decision, Denied, Refused
from bonobofs.policy.engine import compile_policy, in_source
from bonobofs.policy.lease_set import compile_leases
from bonobofs.state.home import GUARD_SOCKET, INSIDE
from bonobofs.state.sessions import PARTLY, WATCHING, Live, PolicyMark, write_live
from bonobofs.undo.preimages import PathKeeper

_NO_COMPANION: Final = "no process watches it"
_KEEPS_ENDING: Final = (
    "the companion has ended {} times in a row and is started again in {:.0f} s; look at server.log in the "
    "session's directory"
)
_LEASES_NO_COMPANION: Final = "the process that follows them has ended"
_LEASES_NO_REASON: Final = "the process that follows them does not say"
_CLOSE_SECONDS: Final = 1.0
_CACHES_BLOCKED: Final = (
    "the kernel does not take an invalidation, because a program holds a directory of the mount; nothing is cached, "
    "names that were cached before may be stale, and calls that wait for an invalidation fail; abort the FUSE "
    "connection that the program serves"
)
_STALE: Final = (
    "the change is recorded, but the mount may not show it: the kernel does not take an invalidation, because some "
    "program holds a directory; look at bonobofs status"
)

Send = Callable[[MessageKind, Any], None]
Document = dict[str, Any]


class _InFlight(NamedTuple):
    """A change by the companion that has no outcome yet."""

    admission: Admission
    paths: frozenset[str]
    trees: tuple[str, ...]
    """Directories, each with a slash at its end, below which any path may be touched."""
    stray: Stray | None
    """The temporary file that the change leaves if it is interrupted."""


class RemoteAuthorization:
    """Answers the requests of the companion. Used by the serving thread."""

    def __init__(self, mount: MountContext, explain: Callable[[Document], Document], session: str) -> None:
        """`explain` answers EXPLAIN, `session` is the UUID."""
        self._explain_change: Final = explain
        self._enforcer: Final = mount.enforcer
        self._callers: Final = mount.callers
        self._grants: Final = mount.grants
        self.fds: list[int] = []
        """Descriptors that the companion has sent."""
        self._external: Final = mount.external_changes
        self._notifications: Final = mount.notifications
        self._root: Final = mount.source.root
        self._session: Final = session
        self._preimages: Final = mount.preimages
        self.keeper: PathKeeper | None = None
        self._in_flight: Final[dict[int, _InFlight]] = {}
        self._last_own = 0
        self._in_threads: Final[set[int]] = set()
        """Changes of the mount's own threads, by negative numbers."""
        self._snapshots: list[tuple[int, set[int], Send]] = []
        """Lease snapshots to acknowledge, each with the changes in flight that were judged by an earlier one."""
        self._handlers: Final[dict[MessageKind, Callable[[Document], Document]]] = {
            MessageKind.DECIDE: self._decide,
            MessageKind.DECIDE_EACH: self._decide_each,
            MessageKind.EXPLAIN: self._explain,
            MessageKind.GRANT: self._grant,
            MessageKind.REVOKE: self._revoke,
            MessageKind.AUTHORIZE: self._authorize,
            MessageKind.DENY: self._deny,
            MessageKind.RECORD_CALL: self._record_call,
            MessageKind.EVENT: self._event,
            MessageKind.TURN: self._begin_turn,
            MessageKind.LIST_IMAGES: lambda _: {"in_use": self._preimages.list_in_use()},
        }

    def __len__(self) -> int:
        return len(self._in_flight)

    def touches(self, path: str) -> bool:
        """Whether a change in flight may touch this path."""
        return any(path in change.paths or f"{path}/".startswith(change.trees) for change in self._in_flight.values())

    def needs(self, directory: str) -> bool:
        """Whether a change in flight needs this directory, or one below it, to stay in its place."""
        above = f"{directory}/"
        return self.touches(directory) or any(
            path.startswith(above) for change in self._in_flight.values() for path in (*change.paths, *change.trees)
        )

    def handle(self, kind: MessageKind, body: bytes, send: Send) -> bool:
        """Handle and answer a request. False: the message is not a request."""
        if kind is MessageKind.ENDED:
            self._end(json.loads(body), send)
        elif kind is MessageKind.BARRIER:
            self._reply_when_shown(json.loads(body)["id"], send)
        elif kind in self._handlers:
            request = json.loads(body)
            number = request["id"]
            try:
                reply = self._handlers[kind](request)
            except Refused as refused:
                reply = encode_denied(refused.decision)
            except TrailError as error:
                reply = {"failed": str(error)}
            except Exception as error:
                send(MessageKind.REPLY, {"id": number, "error": repr(error)})
                raise
            send(MessageKind.REPLY, {"id": number, **reply})
        else:
            return False
        return True

    def acknowledge(self, number: int, send: Send) -> None:
        """Acknowledge lease snapshot `number` once all changes authorized before it have ended."""
        if self._in_flight or self._in_threads:
            self._snapshots.append((number, {*self._in_flight, *self._in_threads}, send))
        else:
            send(MessageKind.LEASES_APPLIED, {"number": number})

    @contextmanager
    def own_change(self) -> Iterator[None]:
        """Context of a change that a thread of the mount makes. A new lease snapshot is acknowledged after its end."""
        self._last_own -= 1
        number = self._last_own
        self._in_threads.add(number)
        try:
            yield
        finally:
            self._in_threads.remove(number)
            self._acknowledge_after(number)

    def abort_all(self) -> None:
        """After the death of the companion: record that the outcomes of its changes are unknown. Never raises."""
        self._snapshots.clear()
        if taken := self._grants.end_all():
            with suppress(TrailError):
                self._enforcer.trail.event("checkout", {"files": len(taken), "paths": taken[:20], "end": "unknown"})
        for number in list(self._in_flight):
            change = self._in_flight.pop(number)
            change.admission.details = {"end": "unknown"}
            change.admission.end(errno.EOWNERDEAD)
            # If the trail cannot be written now, the next session records the outcome and removes the file.
            with suppress(TrailError):
                self._enforcer.write_outcomes()
                self._enforcer.trail.flush()
                if change.stray is not None:
                    temp_cleanup.remove(self._root, self._enforcer.trail, [change.stray])
            self._invalidate(change)

    def _decide_in_source(self, change: RelatedChange) -> Decision:
        return in_source(self._enforcer.decide(change.request, change.context), change.request)

    def _decide(self, request: Document) -> Document:
        if "question" not in request:
            leases = self._enforcer.policy.leases
            known = "none" if leases is None else "known" if leases.known else "unknown"
            answers = [self._enforcer.trail.identity[0], self._enforcer.answers]
            return {"generation": self._enforcer.state[0], "leases": known, "answers": answers}
        return encode_decision(self._decide_in_source(_change(request["question"])))

    def _explain(self, request: Document) -> Document:
        try:
            return self._explain_change(request)
        except OSError as error:
            return {"error": error.strerror}

    def _decide_each(self, request: Document) -> Document:
        denied = []
        for number, question in enumerate(request["questions"]):
            change = _change(question)
            if request["in_source"]:
                decision = self._decide_in_source(change)
            else:
                decision = self._enforcer.decide(change.request, change.context)
                published = self._enforcer.decide_published(change.request) if isinstance(decision, Denied) else None
                decision = published if isinstance(published, Denied) else decision
            if isinstance(decision, Denied):
                denied.append([number, encode_denied(decision)])
        return {"denied": denied}

    def _grant(self, request: Document) -> Document:
        buffer = self.fds.pop()
        assert os.fstat(buffer).st_ino == request["buffer"]
        self._grants.begin(request["grant"], buffer, request["at"], request["size"])
        return {}

    def _revoke(self, request: Document) -> Document:
        return {"taken": self._grants.end(request["grant"])}

    def _authorize(self, request: Document) -> Document:
        record = {name: request[name] for name in ("details", "size", "action", "guard", "sync") if name in request}
        details, guard = record.get("details") or {}, record.get("guard", "file")
        self._enforcer.expire_leases()
        if request.get("generation", self._enforcer.state[0]) != self._enforcer.state[0]:
            return {"stale": True}
        changes = [_change(question) for question in (request["question"], *request["related"])]
        caller = self._caller(request)
        permits = []
        for change in changes:
            decision = self._decide_in_source(change)
            if isinstance(decision, Denied):
                raise self._enforcer.deny(decision, caller, guard=guard)
            permits.append(decision)
        if answers := request.get("answers"):
            record["details"] = self._enforcer.use_answers(answers, record.get("details"))
        first = changes[0].request
        admission = self._enforcer.authorize(first, *permits, caller=caller, keeper=self.keeper, **record)
        self._enforcer.companion_changes += 1
        self._in_flight[request["id"]] = self._track(admission, changes, {**caller.details, **details})
        return encode_decision(admission.permit)

    def _track(self, admission: Admission, changes: list[RelatedChange], details: Document) -> _InFlight:
        paths = [*(change.request.path for change in changes), *details.get(TOUCHES, ())]
        stray = Stray.of(changes[0].request.path, self._session, admission.seq, details)
        if stray is not None:
            paths.append(stray.path)
        exact = frozenset(path for path in paths if not path.endswith("/"))
        return _InFlight(admission, exact, tuple(path for path in paths if path.endswith("/")), stray)

    def _deny(self, request: Document) -> Document:
        caller, count = self._caller(request), request["count"]
        refused = self._enforcer.deny(decode_denied(request), caller, guard=request["guard"], count=count)
        return encode_denied(refused.decision)

    def _record_call(self, request: Document) -> Document:
        del request["id"]
        change, caller = _change(request.pop("question")), self._caller(request)
        self._enforcer.record_call(change.request, change.context, caller=caller, **request)
        return {}

    def _event(self, request: Document) -> Document:
        caller = self._caller({**request, "caller": ("", request["details"])})
        self._enforcer.trail.event(request["operation"], details_of(caller, self._enforcer.trail))
        return {}

    def _caller(self, request: Document) -> Caller:
        """Remove and return the caller of a request, with the process that called the guard socket."""
        caller, peer = Caller(*request.pop("caller", ())), request.pop("peer", None)
        return caller if peer is None else caller._replace(process=self._callers.find_peer(*peer))

    def _begin_turn(self, request: Document) -> Document:
        return {"turn": self._enforcer.begin_turn(request["name"], request["by"])}

    def _end(self, request: Document, send: Send) -> None:
        change = self._in_flight.pop(request["admission"])
        change.admission.written, change.admission.details = request["written"], request["details"]
        change.admission.reason = request["reason"]
        change.admission.end(request["error"])
        with suppress(TrailError):  # the outcome stays queued; the next change is refused if the trail still fails
            self._enforcer.write_outcomes()
            self._enforcer.trail.flush()
        try:
            self._invalidate(change)
        finally:
            self._reply_when_shown(request["id"], send)
            self._acknowledge_after(request["admission"])

    def _invalidate(self, change: _InFlight) -> None:
        for path in change.paths:
            self._external.accept_own_change(path)
        if change.trees and not self._external.watched:
            self._external.compare_all(at_once=True)

    def _reply_when_shown(self, number: int, send: Send) -> None:
        """Reply when the kernel has taken all queued notifications."""
        self._notifications.after_pending(
            lambda shown: send(MessageKind.REPLY, {"id": number} if shown else {"id": number, "stale": _STALE})
        )

    def _acknowledge_after(self, number: int) -> None:
        for _, changes, _ in self._snapshots:
            changes.discard(number)
        while self._snapshots and not self._snapshots[0][1]:
            snapshot, _, send = self._snapshots.pop(0)
            send(MessageKind.LEASES_APPLIED, {"number": snapshot})


def _change(question: list[Any]) -> RelatedChange:
    return RelatedChange(*decode_request(question))


def _watch_state(status: CompanionStatus) -> str:
    """Why the source is not watched, as `status` shows it; "" if it is."""
    return f"{PARTLY}{status.watch}" if status.part and status.watch else status.watch or status.refused


class CompanionRequests:
    """Receives the messages of the present companion. Used by the serving thread."""

    def __init__(
        self,
        companion: CompanionProcess | None,
        status: CompanionStatus,
        mount: MountContext,
        authorization: RemoteAuthorization,
        config: SessionConfig,
        diagnostics: Diagnostics,
    ) -> None:
        """`status` is that of `companion` when the mount is made."""
        self._companion = companion
        self._watch = _watch_state(status)
        self._authorization: Final = authorization
        self._policy = config.policy
        self._leases_error = ""
        """Why the companion cannot read the leases."""
        self._saved_leases_state: str | None = None
        self._images: tuple[int, int] | None = None
        """Bytes of all pre-images, and their limit; None: not measured yet."""
        self._is_restarted: Final = config.companion is not None
        self._reload_pending = False
        self._mount: Final = mount
        self._external: Final = mount.external_changes
        self._enforcer: Final = mount.enforcer
        self._trail: Final[Trail] = mount.enforcer.trail
        self._diagnostics: Final = diagnostics
        self._directory: Final = Path(config.session_dir)
        self._origin = config.policy_origin
        self._policy_error: str | None = None
        self.answers: Final = OperatorAnswers(mount.enforcer, self._send)
        self._unrecorded: list[SourceDifference] = []
        self._protected: set[str] = set()
        """The protected paths among `_unrecorded`."""
        self._external.watched = status.part or not status.watch
        self._caches: str | None = None
        """Why kernel caching is off; None: it is on."""
        if status.watch:
            mount.set_cache_timeout(UNWATCHED_SECONDS)
        if mount.preimages.store is not None:
            mount.preimages.store.on_full = lambda size: self._send(MessageKind.STORE_FULL, {"size": size})
        self._save()

    def on_readable(self) -> bool:
        """Handle the messages that have come; False: the companion has ended."""
        if self._companion is None:
            return False
        try:
            messages = self._companion.receive()
        except EOFError as error:
            self._companion = None
            self._on_end(str(error))
            return False
        self._handle_all(messages)
        return True

    @property
    def policy(self) -> dict[str, Any]:
        """The policy in force, as plain data."""
        return self._policy

    @property
    def policy_origin(self) -> str:
        """`preset:NAME` or the file of the policy in force."""
        return self._origin

    def report_deaths(self, deaths: int, delay: float, *, alert: bool) -> None:
        """Show in `status` that the companion keeps ending and is started in `delay` seconds. TrailError: the alert."""
        self._end_watch(_KEEPS_ENDING.format(deaths, delay))
        if alert:
            reason = "The companion keeps ending; it is started again every 30 seconds."
            self._trail.alert(reason, operation="companion", details={"deaths": deaths})

    def on_death(self) -> None:
        """End the changes of the companion, whose process is dead and can no longer make them."""
        self._authorization.abort_all()

    def attach(self, companion: CompanionProcess) -> None:
        """Receive from a new companion, which sends its status later."""
        self._companion = companion
        if self._reload_pending:
            self._reload_pending = False
            companion.send(MessageKind.RELOAD)

    def tidy(self) -> bool:
        """Do pending work; True: there is more."""
        if self._companion is not None:
            self._companion.flush()
        if self._leases_state() != self._saved_leases_state:
            self._save()
        self._external.compare_slice()
        self._send_suspects()
        self._record_differences()
        self.answers.tidy()
        return self._external.has_more

    def reload(self) -> None:
        """Have the companion load the policy, even if it is unchanged."""
        if self._companion is not None:
            self._companion.send(MessageKind.RELOAD)
        elif self._is_restarted:
            self._reload_pending = True
        else:
            self._reject_policy(self._origin, f"{_NO_COMPANION}: mount again to change the policy")

    def end(self) -> None:
        """Handle the last messages of the companion, and end it."""
        try:
            self._end()
        finally:
            (self._directory / INSIDE / GUARD_SOCKET).unlink(missing_ok=True)

    def _end(self) -> None:
        if self._companion is None:
            self._authorization.abort_all()
            return
        self._await_changes()
        # The first flush brings changes of the source. The second brings the result of attributing their suspects.
        for _ in range(2):
            self._handle_all(self._companion.flush_messages())
        self._companion.end()
        self._companion = None
        self._authorization.abort_all()

    def _await_changes(self) -> None:
        """Close the guard socket, and wait a second at most for changes in flight."""
        companion = self._companion
        assert companion is not None
        companion.send(MessageKind.CLOSE_SOCKET)
        deadline = time.monotonic() + _CLOSE_SECONDS
        with suppress(EOFError):
            while self._authorization and (left := deadline - time.monotonic()) > 0:
                self._handle_all(companion.receive_within(left))

    def _handle_all(self, messages: list[Message]) -> None:
        for kind, body in messages:
            try:
                if not self._handle_request(kind, body):
                    self._handle_report(kind, body)
            except TrailError as error:
                self._diagnostics.log(str(error))
            except Exception as error:  # noqa: BLE001 - as for a handler: the mount serves on
                self._diagnostics.failed(f"a message of the companion ({kind.name})", error)
        self._send_suspects()

    def _handle_request(self, kind: MessageKind, body: bytes) -> bool:
        if kind is MessageKind.AUTHORIZE or kind is MessageKind.ENDED:
            self._send_suspects()  # before the set of changes in flight changes, which decides about suspects
        companion = self._companion
        if kind is MessageKind.GRANT and companion is not None:
            self._authorization.fds.append(companion.take_fd())
        # A later reply goes to this companion, even if another one has replaced it.
        return companion is not None and self._authorization.handle(kind, body, companion.send)

    def _handle_report(self, kind: MessageKind, body: bytes) -> None:
        if kind is MessageKind.CHANGED:
            self._external.compare_changes(body)
        elif kind is MessageKind.CHANGES_LOST:
            self._external.compare_all()
        elif kind is MessageKind.OUT_OF_BAND:
            differences = json.loads(body)
            self._protected |= {each["path"] for each in differences if each.pop("protected")}
            self._unrecorded += [SourceDifference(each.pop("path"), each.pop("what"), each) for each in differences]
            self._record_differences()
        elif kind is MessageKind.WATCH:
            self._change_watch(**json.loads(body))
        elif kind is MessageKind.POLICY:
            self._change_policy(**json.loads(body))
        elif kind is MessageKind.POLICY_ERROR:
            self._reject_policy(**json.loads(body))
        elif kind is MessageKind.LEASES:
            self._apply_leases(**json.loads(body))
        elif kind is MessageKind.ANSWERS:
            self.answers.change(**json.loads(body))
        elif kind is MessageKind.LEASES_ERROR:
            self._leases_error = json.loads(body)["reason"]
        elif kind is MessageKind.STORE_SIZE:
            self._note_store_size(**json.loads(body))
        elif kind is MessageKind.STATUS:
            self._on_status(CompanionStatus(**json.loads(body)))

    def _note_store_size(self, size: int) -> None:
        store = self._mount.preimages.store
        if store is not None:
            store.size = size
            self._images = size, store.limits.max_total
            self._save()

    def _send(self, kind: MessageKind, document: Document) -> None:
        """Send a message, if there is a companion."""
        if self._companion is not None:
            self._companion.send(kind, document)

    def _send_suspects(self) -> None:
        if self._companion is not None:
            self._external.report_suspects(self._send_to_companion, self._authorization.touches)

    def _send_to_companion(self, suspects: list[Suspect]) -> None:
        """Have the companion attribute the suspects; record the number of those that cannot be sent. TrailError."""
        companion = self._companion
        assert companion is not None
        items = ([*suspect, self._is_protected(suspect.path)] for suspect in suspects)
        unsent = companion.send_list(MessageKind.SUSPECTS, items)
        if unsent:
            self._trail.event(recovery.OUT_OF_BAND, {"more": unsent})

    def _record_differences(self) -> None:
        """Record out-of-band changes. TrailError: they stay pending."""
        if self._unrecorded:
            differences, self._unrecorded = self._unrecorded, []
            try:
                recovery.enter(self._trail, differences, self._protected.__contains__)
            except TrailError:
                self._unrecorded = differences
                raise
            self._protected.clear()

    def _is_protected(self, path: str) -> bool:
        return bool(self._enforcer.policy.protect.find(path.split("/")))

    def _on_end(self, reason: str) -> None:
        self._end_watch(reason)
        try:
            self._trail.alert("The companion has ended.", operation="companion")
        except TrailError as error:
            self._diagnostics.log(str(error))

    def _change_watch(self, reason: str, part: bool) -> None:
        if reason and not part:
            self._end_watch(reason)
            self._trail.alert("The source is not watched any more.", operation="watch", details={"reason": reason})
            return
        was_partial = self._watch.startswith(PARTLY)
        self._resume_watch(CompanionStatus(reason, part=part))
        if not reason:
            self._trail.event("watch", {"watch": WATCHING})
        elif not was_partial:
            self._trail.alert("A part of the source is not watched.", operation="watch", details={"reason": reason})

    def _resume_watch(self, status: CompanionStatus) -> None:
        self._watch = _watch_state(status)
        self._external.watched = status.part or not self._watch
        self._set_cache_timeout()
        # The kernel may cache what changed while nothing watched it.
        self._external.compare_all()
        self._save()

    def _end_watch(self, reason: str) -> None:
        if self._external.watched:
            self._external.watched = False
            self._watch = reason
            self._set_cache_timeout()
            self._external.compare_all()
        self._watch = reason
        self._save()

    def _set_cache_timeout(self) -> None:
        self._mount.set_cache_timeout(
            UNCACHED_SECONDS if self._caches else UNWATCHED_SECONDS if self._watch else WATCHED_SECONDS
        )

    def update_caching(self, blocked: int) -> None:
        """Turn kernel caching off while `blocked`, the number of blocked notifications, is not 0. TrailError."""
        if (self._caches is None) == (blocked == 0):
            return
        self._caches = _CACHES_BLOCKED if blocked else None
        self._set_cache_timeout()
        # Queue the notifications again that were dropped or wait behind a blocked one.
        self._external.compare_all()
        self._save()
        if blocked:
            self._trail.alert("The kernel does not take an invalidation; nothing is cached.", operation="caches")
        else:
            self._trail.event("caches")

    def _on_status(self, status: CompanionStatus) -> None:
        """Handle the status of a new companion: compare the whole source with what the kernel caches."""
        self._resume_watch(status)
        self._trail.event("companion", {"watch": self._watch or WATCHING})

    def _change_policy(self, origin: str, policy: dict[str, Any], tracked: list[str], file: dict[str, Any]) -> None:
        previous, secrets = self._enforcer.policy.digest, self._enforcer.policy.document.get("secrets")
        try:
            compiled = compile_policy(policy, self._enforcer.policy.generation + 1)
        except PolicyError as error:
            self._reject_policy(origin, str(error))
            return
        compiled = compiled.with_tracked(Tracked(tracked) if tracked else None)
        self._enforcer.change_policy(compiled if self._mount.repository is None else compiled.with_repository())
        self._policy = policy
        if compiled.secrets or secrets:
            self._external.compare_all(at_once=True)  # the kernel caches names that are hidden now, or not any more
        self._send(MessageKind.POLICY_APPLIED, {"policy": policy, "generation": compiled.generation})
        self.answers.apply()
        self._origin = origin
        self._policy_error = None
        self._save()
        digests = {"policy": compiled.digest, "previous": previous, "generation": compiled.generation}
        self._trail.event("policy", {"origin": origin, "file": file, **digests})

    def _apply_leases(self, number: int, until: float, leases: list[dict[str, Any]] | None) -> None:
        # Between two requests of the kernel, only changes of the companion are in flight.
        self._enforcer.set_leases(until, None if leases is None else compile_leases(leases))
        self._leases_error = ""
        if self._companion is not None:
            self._authorization.acknowledge(number, self._companion.send)

    def _reject_policy(self, origin: str, error: str) -> None:
        self._policy_error = error
        self._save()
        reason = "The policy could not be loaded; the last good one stays in force."
        self._trail.alert(reason, operation="policy", details={"origin": origin, "error": error})

    def _leases_state(self) -> str | None:
        """Why the leases are unknown; None: they are known."""
        leases = self._enforcer.policy.leases
        if leases is None or (leases.known and not self._enforcer.leases_expired()):
            return None
        return self._leases_error or (_LEASES_NO_REASON if self._companion is not None else _LEASES_NO_COMPANION)

    def _save(self) -> None:
        """Write live.json for `status`."""
        policy = self._enforcer.policy
        mark = PolicyMark(self._origin, policy.digest, policy.generation)
        self._saved_leases_state = self._leases_state()
        live = Live(
            self._watch or WATCHING,
            mark,
            self._policy_error,
            self._saved_leases_state,
            self._caches,
            policy.observe,
            self._images,
            self._mount.device,
        )
        try:
            write_live(self._directory, live)
        except OSError as error:
            self._diagnostics.log(f"live.json cannot be written: {error}")
