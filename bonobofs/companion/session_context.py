"""The session as the calls of the guard socket use it, and the check of their arguments."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from inspect import Parameter, signature
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NewType, get_args, get_origin, get_type_hints

from bonobofs.audit.reader import RecentEntries
from bonobofs.companion.remote_authorizer import RemoteAuthorizer
from bonobofs.errors import UsageError
from bonobofs.ipc.session_config import SessionConfig

Content = NewType("Content", str)
"""A text without a limit of its own. The size of the call limits it."""

_MAX_TEXT: Final = 1 << 16
"""Characters of any other text."""
OTHERS: Final = "**"
"""Key of the type of all arguments that are not listed."""


@cache
def kinds_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the arguments of a call by name, each with its type. `T | None` is optional. `OTHERS` permits others.

    The parameters `session` and `descriptors` are not arguments of a call.
    """
    hints = get_type_hints(function)
    kinds = {}
    for name, parameter in signature(function).parameters.items():
        if parameter.kind is Parameter.VAR_KEYWORD:
            kinds[OTHERS] = Any
        elif name not in ("session", "descriptors"):
            kinds[name] = hints[name] if parameter.default is Parameter.empty else hints[name] | None
    return kinds


def check_arguments(arguments: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not null. Raises UsageError for missing, unknown and invalid arguments."""
    present = {name: value for name, value in arguments.items() if value is not None}
    for name, kind in kinds.items():
        if name in present:
            _check(name, present[name], kind)
        elif name != OTHERS and NoneType not in get_args(kind):
            raise UsageError(f"the call needs {name}")
    if OTHERS not in kinds and (unknown := present.keys() - kinds.keys()):
        raise UsageError(f"the call takes no {', '.join(sorted(unknown))}")
    return present


def _check(name: str, value: Any, kind: Any) -> None:
    if NoneType in get_args(kind):
        kind = get_args(kind)[0]
    wanted = get_origin(kind) or getattr(kind, "__supertype__", kind)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise UsageError(f"{name} is not of the type {wanted.__name__}")
    if isinstance(value, int) and abs(value) > sys.maxsize:
        raise UsageError(f"{name} is too large a number")
    if kind is str and len(value) > _MAX_TEXT:
        raise UsageError(f"{name} has more than {_MAX_TEXT} characters")
    if kind == list[str] and not all(isinstance(member, str) for member in value):
        raise UsageError(f"{name} must be a list of texts")


if TYPE_CHECKING:
    from bonobofs.companion.session_questions import SessionQuestions
    from bonobofs.files.file_guard import FileGuard
    from bonobofs.files.file_tools import FileTools
    from bonobofs.git.git_worker import GitWorker


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

    def __init__(self, config: SessionConfig, authorizer: RemoteAuthorizer) -> None:
        """The working directory is the source, even if its path has been replaced."""
        self.home: Final = Path(config.home)
        self.session: Final = config
        self.workspace: Final = config.workspace or config.mountpoint
        """Path under which the agent sees the mount."""
        self.guard: Final = authorizer
        self.log: Final = RecentEntries(Path(config.trail).parent, {config.agent: config.agent_id}.get)
        self.change_lock: Final = threading.Lock()
        self.commands: Final = GrantedCheckouts()
        self.git_worker: GitWorker
        """Set by the companion: the worker needs services of the companion."""
        self.questions: SessionQuestions
        """Set by the companion."""
        self.access_path: Final = "."
        self.tool_calls: Final[dict[str, str]] = {}
        """The tool calls of the client that have begun: the time of each, UTC in ISO 8601, by its id."""
        self.network_error = ""
        """Why the operator's network list cannot be read, as last recorded."""

    @cached_property
    def tools(self) -> FileTools:
        """The file tools of the session's role."""
        from bonobofs.files.file_tools import FileTools  # noqa: PLC0415 - after the mount is served

        return FileTools(self)

    @cached_property
    def files(self) -> FileGuard:
        """The guarded files of the session."""
        from bonobofs.files.file_guard import FileGuard  # noqa: PLC0415 - as above

        return FileGuard(self)
