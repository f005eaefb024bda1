"""One session from start to end: `mount`, `umount`, `status`, `why`, `policy show` and the Python session.

Each module is imported at its first use: `umount` needs neither the database nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bonobofs.git.kept_repository import all_kept
    from bonobofs.session.agent_shell import enter_shell
    from bonobofs.session.audit_index import about_sessions, agents_of, open_index, rebuild_index, rules_of_sessions
    from bonobofs.session.explanation import ask
    from bonobofs.session.mail_settings import Testimony, ask_witnesses
    from bonobofs.session.mount_setup import Mounted, Order, prepare_foreground, start
    from bonobofs.session.policy_in_force import InForce, in_force
    from bonobofs.session.python_session import OpenSession, open_session
    from bonobofs.session.registration import ChosenPolicy, choose_policy, identity_of
    from bonobofs.session.retention import Pruning, prune, verify_record
    from bonobofs.session.session_list import (
        SERVED,
        State,
        Status,
        around,
        mounted_around,
        settle,
        statuses,
        unreadable,
    )
    from bonobofs.session.socket_lookup import callable_around
    from bonobofs.session.unmount import Ended, stop
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
    "bonobofs.session.explanation": "ask",
    "bonobofs.session.unmount": "Ended stop",
    "bonobofs.session.session_list": "SERVED State Status around mounted_around settle statuses unreadable",
    "bonobofs.session.mail_settings": "Testimony ask_witnesses",
    "bonobofs.session.mount_setup": "Mounted Order prepare_foreground start",
    "bonobofs.session.python_session": "OpenSession open_session",
    "bonobofs.session.audit_index": "about_sessions agents_of open_index rebuild_index rules_of_sessions",
    "bonobofs.session.retention": "Pruning prune verify_record",
    "bonobofs.session.registration": "ChosenPolicy choose_policy identity_of",
    "bonobofs.session.agent_shell": "enter_shell",
    "bonobofs.session.socket_lookup": "callable_around",
    "bonobofs.session.policy_in_force": "InForce in_force",
    "bonobofs.state.home": "home",
    "bonobofs.state.sessions": "PARTLY WATCHING Session live_at",
}
_PART_OF: Final = {name: part for part, names in _PARTS.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name in _PART_OF:
        return getattr(import_module(_PART_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
