"""What the server does with what its companion says: changes behind the mount, and new policies."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any, Final

from bonobofs.audit import recovery
from bonobofs.audit.log import Trail
from bonobofs.audit.recovery import Difference
from bonobofs.errors import PolicyError, TrailError
from bonobofs.fuse.companion import Companion
from bonobofs.fuse.control import Kind
from bonobofs.fuse.core import SHORT
from bonobofs.fuse.diagnostics import Diagnostics
from bonobofs.fuse.operations import Operations
from bonobofs.guard import Guard
from bonobofs.policy.engine import compile_policy
from bonobofs.policy.leases import compile_leases
from bonobofs.state.sessions import WATCHING, Live, PolicyMark, write_live

_NOBODY: Final = "no process watches it"


class Hearing:
    """The server's ear. Used by the thread that serves."""

    def __init__(
        self,
        companion: Companion | None,
        watch: str,
        operations: Operations,
        guard: Guard,
        config: dict[str, Any],
        diagnostics: Diagnostics,
    ) -> None:
        """`watch` is why the source is not watched; "" where it is."""
        self._companion = companion
        self._watch = watch
        self._operations: Final = operations
        self._noticing: Final = operations.noticing
        self._guard: Final = guard
        self._trail: Final[Trail] = guard.trail
        self._diagnostics: Final = diagnostics
        self._directory: Final = Path(config["session_dir"])
        self._origin: str = config["policy_origin"]
        self._policy_error: str | None = None
        self._unentered: list[Difference] = []
        self._protected: set[str] = set()
        """Those of them that lie under protection."""
        self._noticing.watched = not watch
        if watch:
            operations.believe(SHORT)
        self._keep()

    def heard(self) -> bool:
        """Take in what the companion has said; False: it has ended, and there is nothing to listen to any more."""
        if self._companion is None:
            return False
        try:
            messages = self._companion.heard()
        except EOFError as error:
            self._companion.end()
            self._companion = None
            self._watch_no_more(str(error))
            return False
        self._take(messages)
        return True

    def tidy(self) -> bool:
        """Do what waits; True: there is more of it."""
        self._noticing.go_on()
        self._give_suspects()
        self._enter()
        return self._noticing.has_more

    def reload(self) -> None:
        """Have the policy loaded anew, changed or not."""
        if self._companion is not None:
            self._companion.tell(Kind.RELOAD)
        else:
            self._refuse_policy(self._origin, f"{_NOBODY}: mount again to change the policy")

    def end(self) -> None:
        """Take in the last that the companion has to say, and let it go."""
        if self._companion is None:
            return
        # First what has changed, then what it makes of that.
        for _ in range(2):
            self._take(self._companion.settle())
        self._companion.end()
        self._companion = None

    def _take(self, messages: list[tuple[Kind, bytes]]) -> None:
        for kind, body in messages:
            try:
                self._act(kind, body)
            except TrailError as error:
                self._diagnostics.say(str(error))
            except Exception as error:  # noqa: BLE001 - as for a handler: the mount serves on
                self._diagnostics.failed(f"what the companion said ({kind.name})", error)
        self._give_suspects()

    def _act(self, kind: Kind, body: bytes) -> None:
        if kind is Kind.CHANGED:
            self._noticing.changed(body)
        elif kind is Kind.LOST:
            self._noticing.lost()
        elif kind is Kind.OUT_OF_BAND:
            found = json.loads(body)
            self._protected |= {each["path"] for each in found if each.pop("protected")}
            self._unentered += [Difference(each.pop("path"), each.pop("what"), each) for each in found]
            self._enter()
        elif kind is Kind.UNWATCHED:
            self._watch_no_more(json.loads(body)["reason"])
        elif kind is Kind.POLICY:
            self._change_policy(**json.loads(body))
        elif kind is Kind.BROKEN:
            self._refuse_policy(**json.loads(body))
        elif kind is Kind.LEASES:
            self._follow(**json.loads(body))

    def _give_suspects(self) -> None:
        companion = self._companion
        if companion is not None:
            self._noticing.give_suspects(
                lambda found: companion.tell(Kind.SUSPECTS, [[*one, self._is_protected(one[0])] for one in found])
            )

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
        return bool(self._guard.policy.protect.find(path.split("/")))

    def _watch_no_more(self, reason: str) -> None:
        if self._watch:
            return
        self._watch = reason
        self._noticing.watched = False
        self._operations.believe(SHORT)
        self._noticing.lost()
        self._keep()
        self._trail.alert("The source is not watched any more.", operation="watch", details={"reason": reason})

    def _change_policy(self, origin: str, policy: dict[str, Any]) -> None:
        try:
            compiled = compile_policy(policy, self._guard.policy.generation + 1)
        except PolicyError as error:
            self._refuse_policy(origin, str(error))
            return
        self._guard.change_policy(compiled)
        gc.collect()  # the old one's automaton is made of cycles, and nobody else collects them here
        self._origin = origin
        self._policy_error = None
        self._keep()
        details = {"origin": origin, "policy": compiled.digest, "generation": compiled.generation}
        self._trail.event("policy", details)

    def _follow(self, number: int, until: float, leases: list[dict[str, Any]] | None) -> None:
        # Between two requests: nothing is under way that was admitted before.
        self._guard.follow(until, None if leases is None else compile_leases(leases))
        if self._companion is not None:
            self._companion.tell(Kind.BOUND, {"number": number})

    def _refuse_policy(self, origin: str, error: str) -> None:
        self._policy_error = error
        self._keep()
        reason = "The policy could not be loaded; the last good one stays in force."
        self._trail.alert(reason, operation="policy", details={"origin": origin, "error": error})

    def _keep(self) -> None:
        policy = self._guard.policy
        mark = PolicyMark(self._origin, policy.digest, policy.generation)
        try:
            write_live(self._directory, Live(self._watch or WATCHING, mark, self._policy_error))
        except OSError as error:
            self._diagnostics.say(f"live.json cannot be written: {error}")
