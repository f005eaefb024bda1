"""The door, as the companion asks of it: what its entrances admit is judged, counted and recorded here.

A change that was admitted is under way until the companion says how it ended. Until then no new lease is said to bind
this session, and what the change touches is its own and not somebody's behind the mount. Should the companion die, how
its changes ended is not known: that is entered, what they may have left half done is taken away, and the kernel is made
to look again.

Nothing here waits for the companion.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, NamedTuple

from bonobofs.audit import temp_cleanup
from bonobofs.audit.entry import INODE, TOUCHES
from bonobofs.audit.temp_cleanup import Stray, by_way_of
from bonobofs.enforcement.enforcer import Admission, Enforcer, RelatedChange
from bonobofs.errors import TrailError
from bonobofs.fuse.external_changes import ExternalChanges
from bonobofs.fuse.git_grants import GitGrants
from bonobofs.fuse.mount_context import Notifications
from bonobofs.ipc.channel import Kind
from bonobofs.ipc.decision_codec import decision, plain_decision
from bonobofs.ipc.request_codec import caller, question
from bonobofs.policy.decision import Decision, Denied, Refused
from bonobofs.policy.engine import in_source

STALE: Final = (
    "the change is recorded, but the mount may not show it: the kernel does not take an invalidation, because some "
    "program holds a directory; look at bonobofs status"
)

Tell = Callable[[Kind, Any], None]


class _Open(NamedTuple):
    """A change that is under way."""

    admission: Admission
    paths: frozenset[str]
    below: tuple[str, ...]
    """Directories, each with a slash at its end, of which all that lies below may be touched."""
    stray: Stray | None
    """What it leaves where it is broken off."""


class Admissions:
    """What is asked over the line. Used by the thread that serves."""

    def __init__(
        self,
        guard: Enforcer,
        noticing: ExternalChanges,
        notices: Notifications,
        grants: GitGrants,
        root: int,
        session: str,
    ) -> None:
        """`root` is the source, open; `session` the UUID."""
        self._enforcer: Final = guard
        self._grants: Final = grants
        self.descriptors: list[int] = []
        """What the companion has handed over."""
        self._noticing: Final = noticing
        self._notices: Final = notices
        self._root: Final = root
        self._session: Final = session
        self._open: Final[dict[int, _Open]] = {}
        self._last_own = 0
        self._in_threads: Final[set[int]] = set()
        """Changes that threads make for the mount, by negative numbers."""
        self._bound: list[tuple[int, set[int], Tell]] = []
        """Looks at the leases that bind everybody once these changes are over."""
        self._acts: Final[dict[Kind, Callable[[dict[str, Any]], dict[str, Any]]]] = {
            Kind.DECIDE: self._decide,
            Kind.DECIDE_EACH: self._decide_each,
            Kind.GRANT: self._grant,
            Kind.WITHDRAW: self._withdraw,
            Kind.ADMIT: self._admit,
            Kind.REFUSE: self._refuse,
            Kind.NOTE: self._note,
            Kind.EVENT: self._event,
            Kind.SYNC: self._sync,
        }

    def __len__(self) -> int:
        return len(self._open)

    def touches(self, path: str) -> bool:
        """Whether a change that is under way may touch this path."""
        return any(path in one.paths or f"{path}/".startswith(one.below) for one in self._open.values())

    def needs(self, directory: str) -> bool:
        """Whether a change that is under way relies on this directory, or one below it, to stay where it is."""
        above = f"{directory}/"
        return self.touches(directory) or any(
            path.startswith(above) for one in self._open.values() for path in (*one.paths, *one.below)
        )

    def act(self, kind: Kind, body: bytes, tell: Tell) -> bool:
        """Do what is asked and answer it; False: it is nothing that is asked of the door."""
        if kind is Kind.ENDED:
            self._end(json.loads(body), tell)
        elif kind is Kind.SHOW:
            self._answer_when_shown(json.loads(body)["ask"], tell)
        elif kind in self._acts:
            asked = json.loads(body)
            number = asked.pop("ask")
            try:
                answer = self._acts[kind]({**asked, "number": number} if kind is Kind.ADMIT else asked)
            except Refused as refused:
                answer = plain_decision(refused.decision)
            except TrailError as error:
                answer = {"failed": str(error)}
            except Exception as error:
                tell(Kind.ANSWER, {"ask": number, "error": repr(error)})
                raise
            tell(Kind.ANSWER, {"ask": number, **answer})
        else:
            return False
        return True

    def bind(self, number: int, tell: Tell) -> None:
        """Say that every change is bound by that look at the leases, once those are over that began before it."""
        if self._open or self._in_threads:
            self._bound.append((number, {*self._open, *self._in_threads}, tell))
        else:
            tell(Kind.BOUND, {"number": number})

    @contextmanager
    def own_change(self) -> Iterator[None]:
        """A thread changes the content of a file for the mount: leases bind when it has ended."""
        self._last_own -= 1
        number = self._last_own
        self._in_threads.add(number)
        try:
            yield
        finally:
            self._in_threads.remove(number)
            self._release(number)

    def abandon(self) -> None:
        """The companion is dead: enter that nobody knows how its changes ended. Never raises."""
        self._bound.clear()
        if taken := self._grants.end_all():
            with suppress(TrailError):
                self._enforcer.trail.event("checkout", {"files": len(taken), "paths": taken[:20], "end": "unknown"})
        for number in list(self._open):
            one = self._open.pop(number)
            one.admission.details = {"end": "unknown"}
            one.admission.end(errno.EOWNERDEAD)
            # What cannot be entered now is not taken away now: the next session does both.
            with suppress(TrailError):
                self._enforcer.enter_outcomes()
                self._enforcer.trail.flush()
                if one.stray is not None:
                    temp_cleanup.remove(self._root, self._enforcer.trail, [one.stray])
            self._show(one)

    # -- what is asked

    def _judge(self, part: RelatedChange) -> Decision:
        return in_source(self._enforcer.decide(part.request, part.context), part.request)

    def _decide(self, asked: dict[str, Any]) -> dict[str, Any]:
        if "question" not in asked:
            leases = self._enforcer.policy.leases
            known = "none" if leases is None else "known" if leases.known else "unknown"
            return {"generation": self._enforcer.state[0], "leases": known}
        part = question(asked["question"])
        in_mount = asked.get("in_mount", False)
        return plain_decision(self._enforcer.explain(part.request, part.context) if in_mount else self._judge(part))

    def _decide_each(self, asked: dict[str, Any]) -> dict[str, Any]:
        denied = []
        for number, plain in enumerate(asked["questions"]):
            part = question(plain)
            verdict = self._enforcer.decide(part.request, part.context)
            if isinstance(verdict, Denied):
                published = self._enforcer.decide_published(part.request)
                denied.append([number, plain_decision(published if isinstance(published, Denied) else verdict)])
        return {"denied": denied}

    def _grant(self, asked: dict[str, Any]) -> dict[str, Any]:
        stage = self.descriptors.pop()
        assert os.fstat(stage).st_ino == asked["stage"]
        self._grants.begin(asked["grant"], stage, asked["at"], asked["size"])
        return {}

    def _withdraw(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {"taken": self._grants.end(asked["grant"])}

    def _admit(self, asked: dict[str, Any]) -> dict[str, Any]:
        number, details, guard = asked["number"], asked["details"], asked["guard"]
        self._enforcer.forget_in_time()
        if asked.get("generation", self._enforcer.state[0]) != self._enforcer.state[0]:
            return {"stale": True}
        first, parts = question(asked["question"]), [question(part) for part in asked["parts"]]
        who = caller(asked["caller"])
        for part in (first, *parts):
            denied = self._judge(part)
            if isinstance(denied, Denied):
                raise self._enforcer.refuse(denied, who, guard=guard)
        admission = self._enforcer.authorize(
            first.request,
            first.context,
            *parts,
            caller=who,
            details=details,
            size=asked["size"],
            action=asked["action"],
            guard=guard,
        )
        self._enforcer.beside += 1
        self._open[number] = self._under_way(admission, [first, *parts], {**who.details, **(details or {})})
        return plain_decision(admission.permit)

    def _under_way(self, admission: Admission, parts: list[RelatedChange], details: dict[str, Any]) -> _Open:
        path = parts[0].request.path
        named = [*(part.request.path for part in parts), *details.get(TOUCHES, ())]
        by, stray = by_way_of(path, details), None
        if by is not None:
            named.append(by)
            stray = Stray(by, self._session, admission.seq, details.get(INODE))
        exact = frozenset(name for name in named if not name.endswith("/"))
        return _Open(admission, exact, tuple(name for name in named if name.endswith("/")), stray)

    def _refuse(self, asked: dict[str, Any]) -> dict[str, Any]:
        denied = decision(asked)
        assert isinstance(denied, Denied)
        return plain_decision(self._enforcer.refuse(denied, caller(asked["caller"]), guard=asked["guard"]).decision)

    def _note(self, asked: dict[str, Any]) -> dict[str, Any]:
        part, who = question(asked.pop("question")), caller(asked.pop("caller"))
        self._enforcer.note(*part[:2], caller=who, **asked)
        return {}

    def _event(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._enforcer.trail.event(asked["operation"], asked["details"])
        return {}

    def _sync(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._enforcer.sync()
        return {}

    # -- how it ended

    def _end(self, asked: dict[str, Any], tell: Tell) -> None:
        one = self._open.pop(asked["admission"])
        one.admission.written, one.admission.details = asked["written"], asked["details"]
        one.admission.reason = asked["reason"]
        one.admission.end(asked["error"])
        with suppress(TrailError):  # it stays queued, and the next change is refused if it cannot be written then
            self._enforcer.enter_outcomes()
            self._enforcer.trail.flush()
        try:
            self._show(one)
        finally:
            self._answer_when_shown(asked["ask"], tell)
            self._release(asked["admission"])

    def _show(self, one: _Open) -> None:
        for path in one.paths:
            self._noticing.accept_own_change(path)
        if one.below and not self._noticing.watched:
            self._noticing.compare_all(at_once=True)

    def _answer_when_shown(self, ask: int, tell: Tell) -> None:
        self._notices.after_pending(
            lambda shown: tell(Kind.ANSWER, {"ask": ask} if shown else {"ask": ask, "stale": STALE})
        )

    def _release(self, number: int) -> None:
        for _, before, _ in self._bound:
            before.discard(number)
        while self._bound and not self._bound[0][1]:
            look, _, tell = self._bound.pop(0)
            tell(Kind.BOUND, {"number": look})
