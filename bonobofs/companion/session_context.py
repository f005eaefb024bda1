"""The session as it is called through the guard socket: whose it is, its door, its files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bonobofs.audit.reader import Record
from bonobofs.companion.remote_authorizer import RemoteAuthorizer
from bonobofs.files.file_guard import FileGuard
from bonobofs.files.file_tools import FileTools

if TYPE_CHECKING:
    from bonobofs.companion.git_worker import GitWorker


_SECONDS_TO_SHOW: Final = 5.0


class Who(NamedTuple):
    """Whose session it is. The field names are those of whoami.json."""

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
        """As whoami.json has it, but for the policy."""
        return {name: value for name, value in self._asdict().items() if name not in ("mountpoint", "issue")}


class Taken(NamedTuple):
    """What a command takes in."""

    commit: str
    """Where it leads."""
    head: str
    """Where HEAD was before."""
    command: list[str]
    before: dict[str, tuple[int, str]]
    """By path, mode and blob id of what the source had there."""


class Commands:
    """The commands of one session that take in published files. Used by the threads that answer calls."""

    def __init__(self) -> None:
        self.open: Final[dict[int, Taken]] = {}
        """By the number of the grant."""
        self.replaced: Final[dict[str, tuple[str, list[Any]]]] = {}
        """By path, what the last command replaced there (mode, blob id), and at which HEAD."""


class CalledSession:
    """A `GuardedSession`, used by the threads that answer calls."""

    def __init__(self, config: dict[str, Any], authorizer: RemoteAuthorizer, note_index: Callable[[], None]) -> None:
        """The working directory is the source, whatever its path leads to now.

        `note_index` is called when a publication may have written the index of the source.
        """
        self.note_index: Final = note_index
        self.home: Final = Path(config["home"])
        self.who: Final = Who(
            config["agent"]["label"],
            config["agent"]["id"],
            config["team"],
            config["role"],
            config["chain"],
            config["session"],
            config["source"],
            config["mountpoint"],
            config["issue"],
        )
        self.guard: Final = authorizer
        self.log: Final = Record(Path(config["trail"]).parent, {self.who.agent: self.who.agent_id}.get)
        self.turn: Final = threading.Lock()
        self.commands: Final = Commands()
        self.git_worker: GitWorker
        """Set by the companion, whose services the worker needs."""
        self.place: Final = "."

    @property
    def session(self) -> Who:
        """What a guard needs to know of it."""
        return self.who

    @cached_property
    def tools(self) -> FileTools:
        """Those of its tools that its role has."""
        return FileTools(self)

    @cached_property
    def files(self) -> FileGuard:
        """Its guarded files."""
        return FileGuard(self)
