"""One session from start to end: `mount`, `umount`, `status`, `why`, `policy show` and the Python session.

Each module is imported at its first use: `umount` needs neither the database nor pydantic.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bonobofs.git.session_repository import all_kept
    from bonobofs.policy import document as policy_document
    from bonobofs.policy import examples as policy_examples
    from bonobofs.session import lease_service, project_policy, undo_service, worktrees
    from bonobofs.session.agent_shell import enter_shell
    from bonobofs.session.explanation import explain
    from bonobofs.session.files_explanation import PolicyInForce, in_force
    from bonobofs.session.launcher import ServerStart, build
    from bonobofs.session.mail_settings import WitnessReport, ask_witnesses
    from bonobofs.session.mount_setup import MountedSession, MountRequest, prepare_foreground, start, start_with
    from bonobofs.session.python_session import OpenSession, open_session
    from bonobofs.session.registration import ChosenPolicy, choose_policy, identity_of, note_on_audit
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
    from bonobofs.session.sandbox_run import RunRequest, run
    from bonobofs.session.session_list import (
        SERVED,
        CallableSession,
        SessionState,
        SessionStatus,
        callable_session,
        flush_servers,
        mount_around,
        root_around,
        session_around,
        statuses,
        unreadable,
    )
    from bonobofs.session.unmount import Unmounted, unmount_session
    from bonobofs.state import agent_registry
    from bonobofs.state.database import Database
    from bonobofs.state.home import home
    from bonobofs.state.sessions import PARTLY, WATCHING, Session, live_at

# The same names for run time, by module.
_NAMES: Final = {
    "bonobofs.git.session_repository": "all_kept",
    "bonobofs.session.agent_shell": "enter_shell",
    "bonobofs.session.explanation": "explain",
    "bonobofs.session.files_explanation": "PolicyInForce in_force",
    "bonobofs.session.launcher": "ServerStart build",
    "bonobofs.session.mail_settings": "WitnessReport ask_witnesses",
    "bonobofs.session.mount_setup": "MountedSession MountRequest prepare_foreground start start_with",
    "bonobofs.session.python_session": "OpenSession open_session",
    "bonobofs.session.registration": "ChosenPolicy choose_policy identity_of note_on_audit",
    "bonobofs.session.retention": (
        "Pruning about_sessions agents_of open_index prune rebuild_index rules_of_sessions verify_record"
    ),
    "bonobofs.session.sandbox_run": "RunRequest run",
    "bonobofs.session.session_list": (
        "CallableSession SERVED SessionState SessionStatus callable_session flush_servers mount_around root_around "
        "session_around statuses unreadable"
    ),
    "bonobofs.session.unmount": "Unmounted unmount_session",
    "bonobofs.state.database": "Database",
    "bonobofs.state.home": "home",
    "bonobofs.state.sessions": "PARTLY WATCHING Session live_at",
}
_MODULES: Final = {
    "agent_registry": "bonobofs.state.agent_registry",
    "lease_service": "bonobofs.session.lease_service",
    "policy_document": "bonobofs.policy.document",
    "policy_examples": "bonobofs.policy.examples",
    "project_policy": "bonobofs.session.project_policy",
    "undo_service": "bonobofs.session.undo_service",
    "worktrees": "bonobofs.session.worktrees",
}
"""Modules that callers name as `session.NAME`."""
_MODULE_OF: Final = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
