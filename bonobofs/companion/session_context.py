"""The session as the calls of the guard socket use it: its identity, authorizer, trail and files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bonobofs.audit.reader import RecentEntries
from bonobofs.companion.remote_authorizer import RemoteAuthorizer
from bonobofs.files.file_guard import FileGuard
from bonobofs.files.file_tools import FileTools
from bonobofs.ipc.session_config import SessionConfig

if TYPE_CHECKING:
    from bonobofs.companion.git_worker import GitWorker


class SessionIdentity(NamedTuple):
    """The session and its agent. The field names are those of whoami.json."""

    agent: str
    agent_id: str
    team: str | None
    role: str
    chain: str | None
    session: str
    source: str
    mountpoint: str | None
    issue: str | None

    def plain(self) -> dict[str, Any]:
        """The fields of whoami.json that do not depend on the policy."""
        return {name: value for name, value in self._asdict().items() if name not in ("mountpoint", "issue")}


class GrantedCheckout(NamedTuple):
    """A git command that takes published files into the mount."""

    commit: str
    """The commit that the command checks out."""
    head: str
    """HEAD before the command."""
    command: list[str]
    before: dict[str, tuple[int, str]]
    """Mode and blob id of each path in the source before the command."""


class GrantedCheckouts:
    """The commands of one session that take in published files. Used by the threads that answer calls."""

    def __init__(self) -> None:
        self.open: Final[dict[int, GrantedCheckout]] = {}
        """By the number of the grant."""
        self.replaced: Final[dict[str, tuple[str, list[Any]]]] = {}
        """By path, the HEAD before the last command that replaced it, and mode and blob id of the old content."""


class SessionContext:
    """A `GuardedSession`, used by the threads that answer calls."""

    def __init__(self, config: SessionConfig, authorizer: RemoteAuthorizer, note_index: Callable[[], None]) -> None:
        """The working directory is the source, even if its path has been replaced.

        `note_index` is called when a publication may have written the index of the source.
        """
        self.note_index: Final = note_index
        self.home: Final = Path(config.home)
        self.who: Final = SessionIdentity(
            config.agent,
            config.agent_id,
            config.team,
            config.role,
            config.chain,
            config.session,
            config.source,
            config.mountpoint,
            config.issue,
        )
        self.guard: Final = authorizer
        self.log: Final = RecentEntries(Path(config.trail).parent, {self.who.agent: self.who.agent_id}.get)
        self.change_lock: Final = threading.Lock()
        self.commands: Final = GrantedCheckouts()
        self.git_worker: GitWorker
        """Set by the companion, whose services the worker needs."""
        self.place: Final = "."

    @property
    def session(self) -> SessionIdentity:
        """As `GuardedSession.session`."""
        return self.who

    @cached_property
    def tools(self) -> FileTools:
        """The file tools of its role."""
        return FileTools(self)

    @cached_property
    def files(self) -> FileGuard:
        """Its guarded files."""
        return FileGuard(self)
