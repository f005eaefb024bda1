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
    from bonobofs.companion.session_questions import SessionQuestions


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

    def __init__(self, config: SessionConfig, authorizer: RemoteAuthorizer, note_index: Callable[[], object]) -> None:
        """The working directory is the source, even if its path has been replaced.

        `note_index` is called when a publication may have written the index of the source.
        """
        self.note_index: Final = note_index
        self.home: Final = Path(config.home)
        self.session: Final = config
        self.workspace: Final = config.workspace or config.mountpoint
        """Path under which the agent sees the mount."""
        self.guard: Final = authorizer
        self.log: Final = RecentEntries(Path(config.trail).parent, {config.agent: config.agent_id}.get)
        self.change_lock: Final = threading.Lock()
        self.commands: Final = GrantedCheckouts()
        self.git_worker: GitWorker
        """Set by the companion, whose services the worker needs."""
        self.questions: SessionQuestions
        """Set by the companion, too."""
        self.access_path: Final = "."
        self.network_error = ""
        """Why the operator's network list cannot be read, as last recorded."""

    @cached_property
    def tools(self) -> FileTools:
        """The file tools of its role."""
        return FileTools(self)

    @cached_property
    def files(self) -> FileGuard:
        """Its guarded files."""
        return FileGuard(self)
