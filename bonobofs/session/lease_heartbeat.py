"""The leases, followed by a session of a Python caller: in a thread beside its changes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Final

from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.errors import BonobofsError, TrailError
from bonobofs.policy.lease_set import compile_leases
from bonobofs.state import heartbeats
from bonobofs.state.database import Database
from bonobofs.state.lease_follower import BEAT, LAPSE, Follower, Seen
from bonobofs.state.leases import Holder
from bonobofs.state.sessions import Session

_SECONDS_TO_RENEW: Final = 1.0
_PAUSE: Final = 0.01


class Turn:
    """Held for each change of a session, from its intent to its outcome, as a context; only one change holds it.

    `with` calls the methods that the two properties return. They are the lock's own, written in C: the interpreter
    runs no signal handler between them and the block. A Python method would hold the lock after an exception that a
    handler raises before the method returns.
    """

    def __init__(self, guard: Enforcer) -> None:
        self._guard: Final = guard
        self._lock: Final = threading.Lock()

    @property
    def __enter__(self) -> Callable[[], bool]:
        # Before a change is refused, the thread that follows the leases may only be late. An Event has a Python lock.
        end = monotonic() + _SECONDS_TO_RENEW
        while self._guard.is_forgetting() and monotonic() < end:
            sleep(_PAUSE)
        return self._lock.__enter__

    @property
    def __exit__(self) -> Callable[..., None]:  # noqa: PLE0302, PYI036 - a property
        return self._lock.__exit__

    def bind(self, seen: Seen, follower: Follower) -> None:
        """Bind the guard by what was seen, once no change is under way. StateError."""
        found = None if seen.leases is None else compile_leases(seen.leases)
        # Whoever waits for us must wait for the change that is under way too.
        while not self._lock.acquire(timeout=BEAT):
            follower.beat()
        try:
            self._guard.follow(seen.until, found)
            # The entry that counts repeated denials waits for the next beat if it cannot be written now.
            with contextlib.suppress(TrailError):
                self._guard.settle_quiet(monotonic())
        finally:
            self._lock.release()


@contextlib.contextmanager
def following(home: Path, session: Session, guard: Enforcer) -> Iterator[Turn]:
    """Bind the guard by the leases for the length of a `with` block; gives what each change must hold. StateError."""
    holder = Holder(session.agent, session.agent_id, session.chain).key
    turn, ended = Turn(guard), threading.Event()
    guard.follow(0.0)
    with contextlib.ExitStack() as until_followed:
        # The thread's own: it may still wait for an answer when the session is over.
        database = until_followed.enter_context(Database(home))
        follower = Follower(database, session.session, holder, session.source)
        _look(follower, turn)
        thread = threading.Thread(
            target=_follow,
            args=(database, session.session, follower, turn, ended),
            name="bonobofs-leases",
            daemon=True,
        )
        thread.start()
        until_followed.pop_all()
    try:
        yield turn
    finally:
        ended.set()
        # If it cannot say that it ends, its heartbeat expires for the other sessions.
        thread.join(LAPSE)


def _follow(database: Database, session: str, follower: Follower, turn: Turn, ended: threading.Event) -> None:
    with database:
        while not ended.wait(BEAT):
            # While the leases cannot be read, nothing is renewed, and the guard refuses by itself.
            with contextlib.suppress(BonobofsError, OSError):
                _look(follower, turn)
        with contextlib.suppress(BonobofsError, OSError):
            heartbeats.detach(database, session)


def _look(follower: Follower, turn: Turn) -> None:
    seen = follower.look()
    turn.bind(seen, follower)
    follower.acknowledge(seen)
