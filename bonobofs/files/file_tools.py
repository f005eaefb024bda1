"""The four tools that an agent is given beside the mount: read_file, write_file, list_files and search_files.

    with open_session("project", agent="alice", role="impl") as session:
        tools = FileTools(session)
        print(tools.guarded_read_file("aidlc-docs/plan.md", offset=10, limit=20).content)

Which of them a role has is said by `[role.NAME] tools`. A path is relative to the workspace or absolute in it, and is
followed through the symlinks that stay in the workspace; one that leads out is refused as OUTSIDE, with an alert. What
may be read in a mount may be read here, `.git` and `.beads` too. They see the workspace itself, and so nothing of what
a mount keeps apart.

Every call is in the record, also one that reads: the tool, the bytes that it gave, what the policy said, and whose
lease it met. Nothing is given that could not be entered. A denial is told as by `FileGuard`: the plain functions give a
`ValidationResult` that is false, the `guarded_` ones raise `Refused`. UsageError (an argument that cannot be meant, a
binary file) and OSError are entered with result `error` and raised by both.

No file, no tree and no expression holds up the caller for long: what is given is bounded in number, size and time, and
`cut` says so where something was left out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from bonobofs.enforcement.authorizer import Authorizer, Caller
from bonobofs.files.bounded_reader import FileList, FileMatches, FileText, LedOutError, Read, WorkspaceReader
from bonobofs.files.file_guard import FileGuard, PathLike
from bonobofs.files.results import (
    Closing,
    GuardedSession,
    as_result,
    enter_failure,
    leads_outside,
    recorded,
)
from bonobofs.files.workspace import Workspace
from bonobofs.policy.decision import Denied
from bonobofs.policy.request import Operation, Request, WorkspacePath

_LONGEST_NOTED: Final = 200
"""Characters of an argument that are entered."""

_Result = TypeVar("_Result", FileText, FileList, FileMatches)


@recorded(
    "file",
    read_file=Operation.READ_FILE,
    write_file=Operation.WRITE_FILE,
    list_files=Operation.LIST_FILES,
    search_files=Operation.SEARCH_FILES,
)
class FileTools(Closing):
    """The tools of one workspace, for the agent of one session. May be used by several threads."""

    def __init__(self, session: GuardedSession) -> None:
        """Stand on an open session."""
        self._session: Final = session
        self._authorizer: Final[Authorizer] = session.guard
        self._turn: Final = session.change_lock
        self._workspace: Final = Workspace(Path(session.session.source), session.place)
        self._reading: Final = WorkspaceReader(self._workspace, lambda: self._authorizer.policy)
        self._files: Final = FileGuard(session, tool=True)

    def close(self) -> None:
        """Let go of the workspace's directory; the session goes on."""
        self._files.close()
        self._workspace.close()

    def guarded_read_file(self, path: PathLike, offset: int = 1, limit: int | None = None) -> FileText:
        """Lines of a text file from the line `offset` on, counted from 1: `limit` of them, or all."""
        return self._answer(
            Operation.READ_FILE,
            path,
            {"offset": offset, "limit": limit},
            lambda named: self._reading.text(named, offset, limit),
        )

    read_file = as_result(guarded_read_file)

    def guarded_write_file(
        self,
        path: PathLike,
        content: str,
        createOnly: bool = False,  # noqa: N803 - the name that callers of the tool know
    ) -> Path:
        """Write a whole file, UTF-8, make the directories above it, and give its absolute path.

        FileExistsError: it is there and `createOnly` is true.
        """
        return self._files.guarded_write_file(path, content, self._authorizer.agent.id, overwrite=not createOnly)

    write_file = as_result(guarded_write_file)

    def guarded_list_files(self, path: PathLike = "", pattern: str | None = None, recursive: bool = False) -> FileList:
        """What lies in a directory, in the order of the names; `recursive`: and below it.

        A pattern without a slash is for the last name, one with a slash for the path from that directory. Directories
        `.git` and `.beads`, and what the policy calls scratch, are listed and not entered.
        """
        return self._answer(
            Operation.LIST_FILES,
            path,
            {"pattern": pattern, "recursive": recursive},
            lambda named: self._reading.entries(named, pattern, recursive=recursive),
        )

    list_files = as_result(guarded_list_files)

    def guarded_search_files(
        self, query: str, path: PathLike = "", include: str | None = None, exclude: str | None = None
    ) -> FileMatches:
        """Lines of text files that match an expression of Python's `re`, in one file or in all files below a directory.

        `include` and `exclude` are patterns as for `list_files`; what is excluded is not entered either. Symlinks are
        not followed.
        """
        return self._answer(
            Operation.SEARCH_FILES,
            path,
            {"query": query, "include": include, "exclude": exclude},
            lambda named: self._reading.matches(named, query, include, exclude),
        )

    search_files = as_result(guarded_search_files)

    def _answer(
        self,
        operation: Operation,
        path: PathLike,
        asked: dict[str, Any],
        read: Callable[[WorkspacePath], Read[_Result]],
    ) -> _Result:
        """The result of a call that reads, once it is entered. Refused, once that is entered."""
        request = Request(operation, self._workspace.named(path))
        caller = Caller(operation.value, {name: _short(value) for name, value in asked.items() if value is not None})
        with self._turn:
            decision = self._authorizer.decide(request)
            if isinstance(decision, Denied):
                raise self._authorizer.deny(decision, caller)
        # No turn is held meanwhile: whoever reads for long keeps nobody from changing, and no lease from binding.
        try:
            found = read(request.path)
        except LedOutError:
            with self._turn:
                raise self._authorizer.deny(leads_outside(request.path, operation), caller) from None
        except Exception as error:
            enter_failure(self._session, request, error, caller, details={})
            raise
        with self._turn:
            self._authorizer.record_call(request._replace(path=found.path), caller=caller, size=found.size)
        return found.result


def _short(value: object) -> object:
    return value[:_LONGEST_NOTED] if isinstance(value, str) else value
