"""The leases, followed by a session of a Python caller: in a thread beside its changes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from bonobofs.errors import StateError
from bonobofs.guard import Guard
from bonobofs.policy.leases import compile_leases
from bonobofs.state import presence
from bonobofs.state.database import Database
from bonobofs.state.following import BEAT, Follower
from bonobofs.state.leases import Holder
from bonobofs.state.sessions import Session


@contextlib.contextmanager
def following(database: Database, session: Session, guard: Guard) -> Iterator[threading.Lock]:
    """Bind the guard by the leases for the length of a `with` block; gives the lock that each change must hold."""
    holder = Holder(session.agent, session.agent_id, session.chain).key
    follower = Follower(database, session.session, holder, session.source)
    turn, ended = threading.Lock(), threading.Event()
    guard.follow(0.0)
    _look(follower, guard, turn)
    thread = threading.Thread(target=_follow, args=(follower, guard, turn, ended), name="bonobofs-leases", daemon=True)
    thread.start()
    try:
        yield turn
    finally:
        ended.set()
        thread.join()
        # It ends for the others when it falls silent, if it cannot say so.
        with contextlib.suppress(StateError):
            presence.leave(database, session.session)


def _follow(follower: Follower, guard: Guard, turn: threading.Lock, ended: threading.Event) -> None:
    while not ended.wait(BEAT):
        # While the leases cannot be read, nothing is renewed, and the guard refuses by itself.
        with contextlib.suppress(StateError):
            _look(follower, guard, turn)


def _look(follower: Follower, guard: Guard, turn: threading.Lock) -> None:
    seen = follower.look()
    found = None if seen.leases is None else compile_leases(seen.leases)
    # Whoever waits for us must wait for the change that is under way too.
    while not turn.acquire(timeout=BEAT):
        follower.beat()
    try:
        guard.follow(seen.until, found)
    finally:
        turn.release()
    follower.acknowledge(seen)
