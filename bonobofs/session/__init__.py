"""One session from its start to its end. The parts are wired together here and nowhere else.

Each is read when it is asked for first: who unmounts has no use for the database and for pydantic, and would wait for
both.

setup       whose it is, in which role, under which policy
transports  which of them serves a mount
mounting    from `mount` to a mount that answers; `launch` starts the serving process
guest       the other user whom `mount --user` lets in
sockets     which session a command calls
mail        where each session's record is carried, and asking there what it was
listing     how each session stands, and asking the servers to settle
ending      from `umount` to a closed record
shims       the programs in each session's `bin`
shell       `shell`: a shell in a mount, with those programs
showing     `policy show`: the policy that is in force somewhere
asking      `why`: what would be said of a change
retention   how long the record is kept: compressed, then pruned
record      the index over all sessions, and what a report tells of each
python      a session without a mount, for FileGuard and other Python callers
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bonobofs.git.kept_repository import all_kept
    from bonobofs.session.asking import ask
    from bonobofs.session.ending import Ended, stop
    from bonobofs.session.listing import SERVED, State, Status, around, mounted_around, settle, statuses, unreadable
    from bonobofs.session.mail import Testimony, ask_witnesses
    from bonobofs.session.mounting import Mounted, Order, prepare_foreground, start
    from bonobofs.session.python import OpenSession, open_session
    from bonobofs.session.record import about_sessions, agents_of, open_index, rebuild_index, rules_of_sessions
    from bonobofs.session.retention import Pruning, prune, verify_record
    from bonobofs.session.setup import ChosenPolicy, choose_policy, identity_of
    from bonobofs.session.shell import enter_shell
    from bonobofs.session.showing import InForce, in_force
    from bonobofs.session.sockets import callable_around
    from bonobofs.state.home import home
    from bonobofs.state.sessions import PARTLY, WATCHING, Session, live_at

__all__ = [
    "PARTLY",
    "SERVED",
    "WATCHING",
    "ChosenPolicy",
    "Ended",
    "InForce",
    "Mounted",
    "OpenSession",
    "Order",
    "Pruning",
    "Session",
    "State",
    "Status",
    "Testimony",
    "about_sessions",
    "agents_of",
    "all_kept",
    "around",
    "ask",
    "ask_witnesses",
    "callable_around",
    "choose_policy",
    "enter_shell",
    "home",
    "identity_of",
    "in_force",
    "live_at",
    "mounted_around",
    "open_index",
    "open_session",
    "prepare_foreground",
    "prune",
    "rebuild_index",
    "rules_of_sessions",
    "settle",
    "start",
    "statuses",
    "stop",
    "unreadable",
    "verify_record",
]

_PARTS: Final = {
    "bonobofs.git.kept_repository": "all_kept",
    "bonobofs.session.asking": "ask",
    "bonobofs.session.ending": "Ended stop",
    "bonobofs.session.listing": "SERVED State Status around mounted_around settle statuses unreadable",
    "bonobofs.session.mail": "Testimony ask_witnesses",
    "bonobofs.session.mounting": "Mounted Order prepare_foreground start",
    "bonobofs.session.python": "OpenSession open_session",
    "bonobofs.session.record": "about_sessions agents_of open_index rebuild_index rules_of_sessions",
    "bonobofs.session.retention": "Pruning prune verify_record",
    "bonobofs.session.setup": "ChosenPolicy choose_policy identity_of",
    "bonobofs.session.shell": "enter_shell",
    "bonobofs.session.sockets": "callable_around",
    "bonobofs.session.showing": "InForce in_force",
    "bonobofs.state.home": "home",
    "bonobofs.state.sessions": "PARTLY WATCHING Session live_at",
}
_PART_OF: Final = {name: part for part, names in _PARTS.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name in _PART_OF:
        return getattr(import_module(_PART_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
