"""One session from start to end: `mount`, `umount`, `status`, `why`, `policy show` and the Python session.

Each module is imported at its first use: `umount` needs neither the database nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bonobofs.git.kept_repository import all_kept
    from bonobofs.session.agent_shell import enter_shell
    from bonobofs.session.explanation import InForce, ask, in_force
    from bonobofs.session.mail_settings import Testimony, ask_witnesses
    from bonobofs.session.mount_setup import Mounted, Order, prepare_foreground, start
    from bonobofs.session.python_session import OpenSession, open_session
    from bonobofs.session.registration import ChosenPolicy, choose_policy, identity_of
    from bonobofs.session.retention import (
        Pruning,
        about_sessions,
        agents_of,
        open_index,
        prune,
        rebuild_index,
        rules_of_sessions,
        verify_record,
    )
    from bonobofs.session.session_list import (
        SERVED,
        State,
        Status,
        around,
        callable_around,
        mounted_around,
        settle,
        statuses,
        unreadable,
    )
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
    "bonobofs.session.agent_shell": "enter_shell",
    "bonobofs.session.explanation": "InForce ask in_force",
    "bonobofs.session.mail_settings": "Testimony ask_witnesses",
    "bonobofs.session.mount_setup": "Mounted Order prepare_foreground start",
    "bonobofs.session.python_session": "OpenSession open_session",
    "bonobofs.session.registration": "ChosenPolicy choose_policy identity_of",
    "bonobofs.session.retention": (
        "Pruning about_sessions agents_of open_index prune rebuild_index rules_of_sessions verify_record"
    ),
    "bonobofs.session.session_list": (
        "SERVED State Status around callable_around mounted_around settle statuses unreadable"
    ),
    "bonobofs.session.unmount": "Ended stop",
    "bonobofs.state.home": "home",
    "bonobofs.state.sessions": "PARTLY WATCHING Session live_at",
}
_PART_OF: Final = {name: part for part, names in _PARTS.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name in _PART_OF:
        return getattr(import_module(_PART_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
