"""A session of the Python API, without a mount. It uses the same register, trail and enforcer as a mount."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Final, NamedTuple

from bonobofs.audit import temp_cleanup
from bonobofs.audit.reader import AuditLog
from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.errors import StateError, TrailError
from bonobofs.policy.lease_set import compile_leases
from bonobofs.policy.request import Principal
from bonobofs.session.mount_checks import check_source
from bonobofs.session.registration import SessionRequest, choose_policy, register_session
from bonobofs.state import agent_registry
from bonobofs.state.database import Database
from bonobofs.state.home import denials_path, head_path, home, trail_path
from bonobofs.state.lease_follower import BEAT, LAPSE, LeaseFollower, LeaseSnapshot
from bonobofs.state.session_rows import Holder
from bonobofs.state.sessions import Session, note_ends, save
from bonobofs.system.processes import start_time
from bonobofs.undo.image_expiry import usage
from bonobofs.undo.preimages import PathKeeper, PreimageStore, StoreLimits, store_place

_SYNCED_EVERY: Final = 1.0
"""Seconds between syncs of the trail. Power loss or truncation can remove at most the entries of this time undetected.
"""

_RENEW_SECONDS: Final = 1.0
"""Seconds that a change waits for an expired lease snapshot to be renewed."""
_PAUSE: Final = 0.01


class ChangeLock:
    """Lock for each change of a session, held from its intent to its outcome.

    `with` calls the methods that the two properties return. They are the lock's own C methods: the interpreter runs no
    signal handler between them and the block. If a handler raised an exception in a Python method after it acquired
    the lock, the lock would stay held.
    """

    def __init__(self, enforcer: Enforcer) -> None:
        self._enforcer: Final = enforcer
        self._lock: Final = threading.Lock()

    @property
    def __enter__(self) -> Callable[[], bool]:
        # Only the lease thread polls here: an Event has a lock written in Python.
        deadline = monotonic() + _RENEW_SECONDS
        while self._enforcer.leases_expired() and monotonic() < deadline:
            sleep(_PAUSE)
        return self._lock.__enter__

    @property
    def __exit__(self) -> Callable[..., None]:  # noqa: PLE0302, PYI036 - a property
        return self._lock.__exit__

    def apply(self, snapshot: LeaseSnapshot, heartbeat: Callable[[], None]) -> bool:
        """Install `snapshot` once no change is in flight, sending heartbeats until then; return True. StateError."""
        leases = None if snapshot.leases is None else compile_leases(snapshot.leases)
        # Heartbeats continue, so that a session that waits for this one also waits for the change in flight.
        while not self._lock.acquire(timeout=BEAT):
            heartbeat()
        try:
            self._enforcer.set_leases(snapshot.expires_at, leases)
            # If the entry with repeated denials cannot be written now, the next snapshot retries it.
            with contextlib.suppress(TrailError):
                self._enforcer.flush_idle(monotonic())
        finally:
            self._lock.release()
        return True


class OpenSession(NamedTuple):
    """An open session of the Python API."""

    session: Session
    guard: Enforcer
    log: AuditLog
    change_lock: ChangeLock
    """Held for each change, from its intent to its outcome."""
    home: Path
    """The state directory."""

    @property
    def access_path(self) -> str:
        """Path by which to open the source."""
        return self.session.source


@contextlib.contextmanager
def open_session(
    source: Path | str,
    *,
    agent: str | None = None,
    role: str | None = None,
    policy: Path | None = None,
    preset: str | None = "aidlc",
) -> Iterator[OpenSession]:
    """Open a session on `source` for a `with` block; its trail is closed at the end.

    First it removes temporary files that killed sessions of this source left there.
    Agent, role and policy are chosen as by `mount`. `policy` is a file or the name of a preset. Without it, and without
    a policy of the project or the state directory, `preset` is used; None uses the preset that `mount` would use.
    Raises MountError if the source cannot be guarded, ForbiddenError if the agent may not use the role, PolicyError,
    UsageError, StateError and TrailError.
    """
    state = home()
    root = Path(os.path.realpath(source))
    check_source(root, state)
    registered = register_session(
        state,
        source=root,
        mountpoint=None,
        request=SessionRequest(agent, role),
        policy=choose_policy(state, policy, root, preset=preset, store=True),
        transport="none",
    )
    session = registered.session._replace(pid=os.getpid(), starttime=start_time(os.getpid()))
    name = session.session
    trail = Trail.create(
        trail_path(state, name), head_path(state, name), TrailIdentity(name, session.agent, session.agent_id)
    )
    ended = threading.Event()
    keeper = threading.Thread(target=_keep_synced, args=(trail, ended), name="bonobofs-trail", daemon=True)
    try:
        save(state, session)  # from now on, `audit verify` expects the trail
        keeper.start()
        remove_strays(state, root, trail)
        guard = Enforcer(
            registered.policy.compiled,
            Principal(session.agent, session.agent_id, session.role),
            trail,
            denials=denials_path(state, session.agent_id),
        )
        with (
            keeping(state, session, registered.policy.plain, guard),
            Database.open(state) as database,
            _following_leases(state, session, guard) as change_lock,
        ):
            log = AuditLog(trail, lambda label: agent_registry.identity_of(database, label))
            yield OpenSession(session, guard, log, change_lock, state)
        guard.flush_all()
    finally:
        ended.set()
        trail.close()
        with contextlib.suppress(StateError, OSError):
            note_ends(state, [name])


@contextlib.contextmanager
def keeping(state: Path, session: Session, policy: dict[str, Any], enforcer: Enforcer) -> Iterator[None]:
    """Keep the old content of files that the enforcer's process changes, during a `with` block."""
    limits = StoreLimits.of(policy)
    if limits is None:
        yield
        return
    source = Path(session.source)
    with contextlib.ExitStack() as stack:
        try:
            stores = store_place(state, source)
            store = PreimageStore(stores / session.session, limits)
            store.size = usage([stores]).bytes
            stack.callback(store.close)
            root = os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, root)
            enforcer.keeper = PathKeeper(root, store)
        except OSError:
            pass  # the changes are recorded without an old content, which the record says
        yield


def remove_strays(state: Path, root: Path, trail: Trail) -> None:
    """Remove the temporary names that ended sessions left in a source; record it in `trail`. OSError, TrailError."""
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        temp_cleanup.remove(directory, trail, temp_cleanup.strays_of(state, root))
    finally:
        os.close(directory)


@contextlib.contextmanager
def _following_leases(home: Path, session: Session, enforcer: Enforcer) -> Iterator[ChangeLock]:
    """Enforce the leases during a `with` block; give the lock that each change must hold. StateError."""
    holder = Holder(session.agent, session.agent_id, session.chain).key
    lock, ended = ChangeLock(enforcer), threading.Event()
    enforcer.set_leases(0.0)
    follower = LeaseFollower(home, session.session, holder, session.source, lock.apply, ended)
    follower.read_first()
    # Errors need no report: once the snapshot has expired, every change of the source is refused with the reason.
    thread = threading.Thread(target=follower.run, args=(lambda _: None,), name="bonobofs-leases", daemon=True)
    thread.start()
    try:
        yield lock
    finally:
        ended.set()
        thread.join(LAPSE)


def _keep_synced(trail: Trail, ended: threading.Event) -> None:
    while not ended.wait(_SYNCED_EVERY):
        # A failed sync makes the trail refuse the next change with the reason.
        with contextlib.suppress(TrailError):
            if not trail.is_synced:
                trail.sync()
