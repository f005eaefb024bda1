"""A session of a Python caller, without a mount: the same register, the same record, the same door."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.audit import temp_cleanup
from bonobofs.audit.reader import AuditLog
from bonobofs.audit.writer import Identity, Trail
from bonobofs.enforcement.enforcer import Enforcer
from bonobofs.errors import StateError, TrailError
from bonobofs.policy.request import Principal
from bonobofs.session.lease_heartbeat import Turn, following
from bonobofs.session.mount_checks import check_source
from bonobofs.session.registration import SessionRequest, choose_policy, register_session
from bonobofs.state import agent_registry
from bonobofs.state.database import Database
from bonobofs.state.home import denials_path, head_path, home, trail_path
from bonobofs.state.sessions import Session, note_ends, save
from bonobofs.system.processes import start_time

_SYNCED_EVERY: Final = 1.0
"""Seconds: the most of the record that power loss, or whoever cuts it, can take unnoticed."""


class OpenSession(NamedTuple):
    """What a Python caller works with while its session is open."""

    session: Session
    guard: Enforcer
    log: AuditLog
    turn: Turn
    """Held by whoever makes a change, from its intent to its outcome."""
    home: Path
    """The state directory."""

    @property
    def place(self) -> str:
        """Where the source lies."""
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
    """A session on `source` for the length of a `with` block; its record is closed at the end.

    What a killed session of this source left half done is taken away first.
    Agent, role and policy are chosen as by `mount`; `policy` is a file or the name of a preset. Without one, and
    without a policy of the project or of the state directory, `preset` is taken; None takes the one that `mount` would.
    Raises MountError for a source that cannot be guarded, and PolicyError, UsageError, StateError and TrailError as
    they come.
    """
    state = home()
    root = Path(os.path.realpath(source))
    check_source(root, state)
    drawn = register_session(
        state,
        source=root,
        mountpoint=None,
        who=SessionRequest(agent, role),
        policy=choose_policy(state, policy, root, preset=preset, store=True),
        transport="none",
    )
    session = dataclasses.replace(drawn.session, pid=os.getpid(), starttime=start_time(os.getpid()))
    save(state, session)
    name = session.session
    trail = Trail.create(
        trail_path(state, name), head_path(state, name), Identity(name, session.agent, session.agent_id)
    )
    ended = threading.Event()
    keeper = threading.Thread(target=_keep_synced, args=(trail, ended), name="bonobofs-trail", daemon=True)
    try:
        keeper.start()
        _tidy(state, root, trail)
        guard = Enforcer(
            drawn.policy.compiled,
            Principal(session.agent, session.agent_id, session.role),
            trail,
            denials=denials_path(state, session.agent_id),
        )
        with Database.open(state) as database, following(state, session, guard) as turn:
            log = AuditLog(trail, lambda label: agent_registry.identity_of(database, label))
            yield OpenSession(session, guard, log, turn, state)
        guard.settle_all()
    finally:
        ended.set()
        trail.close()
        with contextlib.suppress(StateError, OSError):
            note_ends(state, [name])


def _tidy(state: Path, root: Path, trail: Trail) -> None:
    directory = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        temp_cleanup.remove(directory, trail, temp_cleanup.left_in(state, root))
    finally:
        os.close(directory)


def _keep_synced(trail: Trail, ended: threading.Event) -> None:
    while not ended.wait(_SYNCED_EVERY):
        # A trail that cannot be synced refuses the next change, and says why.
        with contextlib.suppress(TrailError):
            if not trail.is_synced:
                trail.sync()
