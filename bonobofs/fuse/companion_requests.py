"""What the server does with what its companion says: changes behind the mount, policies, leases, and what is asked."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any, Final

from bonobofs.audit import recovery
from bonobofs.audit.recovery import Difference
from bonobofs.audit.writer import Trail
from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.errors import PolicyError, TrailError
from bonobofs.fuse.companion_supervisor import Companion, Standing
from bonobofs.fuse.diagnostics import Diagnostics
from bonobofs.fuse.dispatch import Operations
from bonobofs.fuse.external_changes import Suspect
from bonobofs.fuse.mount_context import UNCACHED_SECONDS, UNWATCHED_SECONDS, WATCHED_SECONDS
from bonobofs.fuse.remote_authorization import Admissions
from bonobofs.ipc.channel import Kind
from bonobofs.policy.compiled import Tracked
from bonobofs.policy.engine import compile_policy
from bonobofs.policy.lease_set import compile_leases
from bonobofs.state.home import GUARD_SOCKET, INSIDE
from bonobofs.state.sessions import PARTLY, WATCHING, Live, PolicyMark, write_live

_NOBODY: Final = "no process watches it"
_KEEPS_ENDING: Final = (
    "the process that watches has ended {} times in a row and is started again in {:.0f} s; look at server.log in the "
    "session's directory"
)
_NOBODY_FOLLOWS: Final = "the process that follows them has ended"
_SECONDS_TO_FINISH: Final = 1.0
_BLOCKED: Final = (
    "the kernel does not take an invalidation, because a program holds a directory of the mount; nothing is cached, "
    "names that were cached before may be stale, and calls that wait for an invalidation fail; abort the FUSE "
    "connection that the program serves"
)
_UNTOLD: Final = "the process that follows them does not say"


def _watch_of(standing: Standing) -> str:
    return f"{PARTLY}{standing.watch}" if standing.part and standing.watch else standing.watch or standing.refused


class Hearing:
    """The server's ear. Used by the thread that serves."""

    def __init__(
        self,
        companion: Companion | None,
        standing: Standing,
        operations: Operations,
        admissions: Admissions,
        guard: Enforcer,
        config: dict[str, Any],
        diagnostics: Diagnostics,
    ) -> None:
        """`standing` is how the companion stands when the mount is made."""
        self._companion = companion
        self._watch = _watch_of(standing)
        self._admissions: Final = admissions
        self._plain: dict[str, Any] = config["policy"]
        self._unknown = ""
        """Why the leases cannot be known, as the companion has it."""
        self._told_leases: str | None = None
        self._is_restarted: bool = config.get("companion") is not None
        """Where there is no companion, another is about to be started."""
        self._reload_asked = False
        self._operations: Final = operations
        self._noticing: Final = operations.external_changes
        self._enforcer: Final = guard
        self._trail: Final[Trail] = guard.trail
        self._diagnostics: Final = diagnostics
        self._directory: Final = Path(config["session_dir"])
        self._origin: str = config["policy_origin"]
        self._policy_error: str | None = None
        self._unentered: list[Difference] = []
        self._protected: set[str] = set()
        """Those of them that lie under protection."""
        self._noticing.watched = standing.part or not standing.watch
        self._caches: str | None = None
        if standing.watch:
            operations.set_cache_timeout(UNWATCHED_SECONDS)
        self._keep()

    def heard(self) -> bool:
        """Take in what the companion has said; False: it has ended, and there is nothing to listen to any more."""
        if self._companion is None:
            return False
        try:
            messages = self._companion.heard()
        except EOFError as error:
            self._companion = None
            self._lose(str(error))
            return False
        self._take(messages)
        return True

    @property
    def policy(self) -> dict[str, Any]:
        """The policy in force, as plain data."""
        return self._plain

    @property
    def policy_origin(self) -> str:
        """`preset:NAME` or the file of the policy in force."""
        return self._origin

    def report_deaths(self, deaths: int, seconds: float, *, alert: bool) -> None:
        """Say in `status` that the companion keeps ending and is started in `seconds`. TrailError from the alert."""
        self._end_watch(_KEEPS_ENDING.format(deaths, seconds))
        if alert:
            reason = "The process beside the mount keeps ending; it is started again every 30 seconds."
            self._trail.alert(reason, operation="companion", details={"deaths": deaths})

    def buried(self) -> None:
        """The companion is dead, and nothing that it did goes on."""
        self._admissions.abandon()

    def begin(self, companion: Companion) -> None:
        """Listen to another one. It will say how it stands."""
        self._companion = companion
        if self._reload_asked:
            self._reload_asked = False
            companion.tell(Kind.RELOAD)

    def tidy(self) -> bool:
        """Do what waits; True: there is more of it."""
        if self._companion is not None:
            self._companion.flush()
        if self._leases() != self._told_leases:
            self._keep()
        self._noticing.compare_slice()
        self._give_suspects()
        self._enter()
        return self._noticing.has_more

    def reload(self) -> None:
        """Have the policy loaded anew, changed or not."""
        if self._companion is not None:
            self._companion.tell(Kind.RELOAD)
        elif self._is_restarted:
            self._reload_asked = True
        else:
            self._refuse_policy(self._origin, f"{_NOBODY}: mount again to change the policy")

    def end(self) -> None:
        """Take in the last that the companion has to say, and let it go."""
        try:
            self._end()
        finally:
            (self._directory / INSIDE / GUARD_SOCKET).unlink(missing_ok=True)

    def _end(self) -> None:
        if self._companion is None:
            self._admissions.abandon()
            return
        self._finish()
        # First what has changed, then what it makes of that.
        for _ in range(2):
            self._take(self._companion.settle())
        self._companion.end()
        self._companion = None
        self._admissions.abandon()

    def _finish(self) -> None:
        """Let the companion end what it is in the middle of, for as long as may be."""
        companion = self._companion
        assert companion is not None
        companion.tell(Kind.CLOSING)
        deadline = time.monotonic() + _SECONDS_TO_FINISH
        with contextlib.suppress(EOFError):
            while self._admissions and (left := deadline - time.monotonic()) > 0:
                self._take(companion.next_heard(left))

    def _take(self, messages: list[tuple[Kind, bytes]]) -> None:
        for kind, body in messages:
            try:
                if not self._is_of_the_door(kind, body):
                    self._act(kind, body)
            except TrailError as error:
                self._diagnostics.say(str(error))
            except Exception as error:  # noqa: BLE001 - as for a handler: the mount serves on
                self._diagnostics.failed(f"what the companion said ({kind.name})", error)
        self._give_suspects()

    def _is_of_the_door(self, kind: Kind, body: bytes) -> bool:
        if kind is Kind.ADMIT or kind is Kind.ENDED:
            self._give_suspects()  # by what is under way at this moment
        companion = self._companion
        if kind is Kind.GRANT and companion is not None:
            self._admissions.descriptors.append(companion.take_descriptor())
        # What it is answered later goes to this one, and not to one that comes after it.
        return companion is not None and self._admissions.act(kind, body, companion.tell)

    def _act(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.CHANGED:
            self._noticing.compare_changes(body)
        elif kind is Kind.LOST:
            self._noticing.compare_all()
        elif kind is Kind.OUT_OF_BAND:
            found = json.loads(body)
            self._protected |= {each["path"] for each in found if each.pop("protected")}
            self._unentered += [Difference(each.pop("path"), each.pop("what"), each) for each in found]
            self._enter()
        elif kind is Kind.UNWATCHED:
            self._change_watch(**json.loads(body))
        elif kind is Kind.POLICY:
            self._change_policy(**json.loads(body))
        elif kind is Kind.BROKEN:
            self._refuse_policy(**json.loads(body))
        elif kind is Kind.LEASES:
            self._follow(**json.loads(body))
        elif kind is Kind.UNKNOWN:
            self._unknown = json.loads(body)["reason"]
        elif kind is Kind.STANDING:
            self._stand(Standing(**json.loads(body)))

    def _give_suspects(self) -> None:
        if self._companion is not None:
            self._noticing.report_suspects(self._send_suspects, self._admissions.touches)

    def _send_suspects(self, found: list[Suspect]) -> None:
        """Have the companion judge them; those that it does not take are entered by their number. TrailError."""
        companion = self._companion
        assert companion is not None
        unsent = companion.tell_list(Kind.SUSPECTS, ([*one, self._is_protected(one.path)] for one in found))
        if unsent:
            self._trail.event(recovery.OUT_OF_BAND, {"more": unsent})

    def _enter(self) -> None:
        """Enter what was found behind the mount. TrailError: it waits until it can be."""
        if self._unentered:
            found, self._unentered = self._unentered, []
            try:
                recovery.enter(self._trail, found, self._protected.__contains__)
            except TrailError:
                self._unentered = found
                raise
            self._protected.clear()

    def _is_protected(self, path: str) -> bool:
        return bool(self._enforcer.policy.protect.find(path.split("/")))

    def _lose(self, reason: str) -> None:
        self._end_watch(reason)
        try:
            self._trail.alert("The process beside the mount has ended.", operation="companion")
        except TrailError as error:
            self._diagnostics.say(str(error))

    def _change_watch(self, reason: str, part: bool) -> None:
        if reason and not part:
            self._end_watch(reason)
            self._trail.alert("The source is not watched any more.", operation="watch", details={"reason": reason})
            return
        was = self._watch
        self._resume_watch(Standing(reason, part=part))
        if not reason:
            self._trail.event("watch", {"watch": WATCHING})
        elif not was.startswith(PARTLY):
            self._trail.alert("A part of the source is not watched.", operation="watch", details={"reason": reason})

    def _resume_watch(self, standing: Standing) -> None:
        self._watch = _watch_of(standing)
        self._noticing.watched = standing.part or not self._watch
        self._believe()
        # What changed while nothing watched it is among what the kernel knows, or it is looked up from now on.
        self._noticing.compare_all()
        self._keep()

    def _end_watch(self, reason: str) -> None:
        if self._noticing.watched:
            self._noticing.watched = False
            self._watch = reason
            self._believe()
            self._noticing.compare_all()
        self._watch = reason
        self._keep()

    def _believe(self) -> None:
        self._operations.set_cache_timeout(
            UNCACHED_SECONDS if self._caches else UNWATCHED_SECONDS if self._watch else WATCHED_SECONDS
        )

    def trust_caches(self, blocked: int) -> None:
        """Let the kernel cache nothing while `blocked` notifications have not returned. TrailError: not entered."""
        if (self._caches is None) == (blocked == 0):
            return
        self._caches = _BLOCKED if blocked else None
        self._believe()
        # Notifications that were left out, or wait behind a blocked one, come by another thread.
        self._noticing.compare_all()
        self._keep()
        if blocked:
            self._trail.alert("The kernel does not take an invalidation; nothing is cached.", operation="caches")
        else:
            self._trail.event("caches")

    def _stand(self, standing: Standing) -> None:
        """Another companion stands: everything is looked at anew."""
        self._resume_watch(standing)
        self._trail.event("companion", {"watch": self._watch or WATCHING})

    def _change_policy(self, origin: str, policy: dict[str, Any], tracked: list[str], file: dict[str, Any]) -> None:
        previous = self._enforcer.policy.digest
        try:
            compiled = compile_policy(policy, self._enforcer.policy.generation + 1)
        except PolicyError as error:
            self._refuse_policy(origin, str(error))
            return
        compiled = compiled.with_tracked(Tracked(tracked) if tracked else None)
        self._enforcer.change_policy(compiled if self._operations.repository is None else compiled.with_repository())
        self._plain = policy
        if self._companion is not None:
            self._companion.tell(Kind.IN_FORCE, {"policy": policy, "generation": compiled.generation})
        self._origin = origin
        self._policy_error = None
        self._keep()
        digests = {"policy": compiled.digest, "previous": previous, "generation": compiled.generation}
        self._trail.event("policy", {"origin": origin, "file": file, **digests})

    def _follow(self, number: int, until: float, leases: list[dict[str, Any]] | None) -> None:
        # Between two requests: nothing is under way that was admitted before.
        self._enforcer.follow(until, None if leases is None else compile_leases(leases))
        self._unknown = ""
        if self._companion is not None:
            self._admissions.bind(number, self._companion.tell)

    def _refuse_policy(self, origin: str, error: str) -> None:
        self._policy_error = error
        self._keep()
        reason = "The policy could not be loaded; the last good one stays in force."
        self._trail.alert(reason, operation="policy", details={"origin": origin, "error": error})

    def _leases(self) -> str | None:
        """Why it is not known what is leased; None where it is."""
        leases = self._enforcer.policy.leases
        if leases is None or (leases.known and not self._enforcer.is_forgetting()):
            return None
        return self._unknown or (_UNTOLD if self._companion is not None else _NOBODY_FOLLOWS)

    def _keep(self) -> None:
        policy = self._enforcer.policy
        mark = PolicyMark(self._origin, policy.digest, policy.generation)
        self._told_leases = self._leases()
        try:
            write_live(
                self._directory,
                Live(self._watch or WATCHING, mark, self._policy_error, self._told_leases, self._caches),
            )
        except OSError as error:
            self._diagnostics.say(f"live.json cannot be written: {error}")
