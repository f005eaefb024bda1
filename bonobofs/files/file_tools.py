"""The four file tools of an agent outside the mount: read_file, write_file, list_files and search_files.

    with open_session("project", agent="alice", role="impl") as session:
        tools = FileTools(session)
        print(tools.guarded_read_file("aidlc-docs/plan.md", offset=10, limit=20).content)

`[role.NAME] tools` lists the tools of a role. A path is relative to the workspace or absolute in it. The tools follow
symlinks that stay in the workspace, and refuse one that leads out as OUTSIDE, with an alert. The paths that can be read
in a mount can be read here, also `.git` and `.beads`. The tools see the source only: scratch and staged files of a
mount are not visible.

The trail records every call, also reads: the tool, the number of bytes returned, the decision, and the lease that was
met. A call that cannot be recorded returns nothing. Denials are as in `FileGuard`: the plain methods return a false
`ValidationResult`, the `guarded_` methods raise `Refused`. Both raise UsageError (an invalid argument, a binary file)
and OSError, which the trail records with result `error`.

Results are limited in number, size and time for every file, tree and expression. `cut` says if something is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from bonobofs.enforcement.authorizer import Authorizer, Caller
from bonobofs.files.bounded_reader import (
    SECONDS,
    FileDigest,
    FileList,
    FileMatches,
    FileText,
    OutsideError,
    Read,
    WorkspaceReader,
)
from bonobofs.files.file_guard import FileGuard, PathLike
from bonobofs.files.results import (
    Closing,
    GuardedSession,
    as_result,
    bounded,
    leads_outside,
    record_failure,
    recorded,
)
from bonobofs.files.workspace import Workspace
from bonobofs.policy.decision import Denied
from bonobofs.policy.request import Operation, Request, WorkspacePath

_Result = TypeVar("_Result", FileText, FileList, FileMatches, FileDigest)


@recorded(
    "file",
    read_file=Operation.READ_FILE,
    write_file=Operation.WRITE_FILE,
    list_files=Operation.LIST_FILES,
    search_files=Operation.SEARCH_FILES,
)
class FileTools(Closing):
    """The tools of one workspace, for the agent of one session. May be used by several threads."""

    def __init__(self, session: GuardedSession, *, seconds: float = SECONDS) -> None:
        """Make the tools of an open session. `seconds`: time limit of a call that reads."""
        self._session: Final = session
        self._authorizer: Final[Authorizer] = session.guard
        self._change_lock: Final = session.change_lock
        self._workspace: Final = Workspace(Path(session.session.source), session.access_path)
        self._reader: Final = WorkspaceReader(self._workspace, lambda: self._authorizer.policy, seconds)
        self._files: Final = FileGuard(session, tool=True)

    def close(self) -> None:
        """Close the workspace's directory. The session stays open."""
        self._files.close()
        self._workspace.close()

    def guarded_read_file(self, path: PathLike, offset: int = 1, limit: int | None = None) -> FileText:
        """Read `limit` lines of a text file, or all, starting with line `offset`, counted from 1."""
        return self._answer(
            Operation.READ_FILE,
            path,
            {"offset": offset, "limit": limit},
            lambda real: self._reader.text(real, offset, limit),
        )

    read_file = as_result(guarded_read_file)

    def guarded_hash_file(self, path: PathLike) -> FileDigest:
        """Return the SHA-256 of a file. It needs the tool `read_file`."""
        return self._answer(Operation.READ_FILE, path, {"digest": "sha256"}, self._reader.digest)

    def guarded_write_file(
        self,
        path: PathLike,
        content: str,
        createOnly: bool = False,  # noqa: N803 - the published name of the argument
    ) -> Path:
        """Write a whole file in UTF-8, create missing directories, and return the absolute path.

        Raises FileExistsError if the file exists and `createOnly` is true.
        """
        return self._files.guarded_write_file(path, content, self._authorizer.agent.id, overwrite=not createOnly)

    write_file = as_result(guarded_write_file)

    def guarded_list_files(self, path: PathLike = "", pattern: str | None = None, recursive: bool = False) -> FileList:
        """List the entries of a directory, sorted by name; with `recursive`, of its subdirectories too.

        A pattern without a slash matches the last name, one with a slash the path from that directory. `.git`, `.beads`
        and scratch directories are listed, but not entered.
        """
        return self._answer(
            Operation.LIST_FILES,
            path,
            {"pattern": pattern, "recursive": recursive},
            lambda real: self._reader.entries(real, pattern, recursive=recursive),
        )

    list_files = as_result(guarded_list_files)

    def guarded_search_files(
        self, query: str, path: PathLike = "", include: str | None = None, exclude: str | None = None
    ) -> FileMatches:
        """Search one file, or all files below a directory, for lines that match an expression of Python's `re`.

        `include` and `exclude` are patterns as for `list_files`. Excluded directories are not entered. The search
        follows no symlinks below the directory.
        """
        return self._answer(
            Operation.SEARCH_FILES,
            path,
            {"query": query, "include": include, "exclude": exclude},
            lambda real: self._reader.matches(real, query, include, exclude),
        )

    search_files = as_result(guarded_search_files)

    def _answer(
        self,
        operation: Operation,
        path: PathLike,
        arguments: dict[str, Any],
        read: Callable[[WorkspacePath], Read[_Result]],
    ) -> _Result:
        """Make a call that reads, record it, and return its result. Raises Refused for a recorded denial."""
        request = Request(operation, self._workspace.relative(path))
        caller = Caller(operation.value, bounded(arguments))
        with self._change_lock:
            decision = self._authorizer.decide(request)
            if isinstance(decision, Denied):
                raise self._authorizer.deny(decision, caller)
        # The change lock is free here: a long read must not delay changes, or leases that take effect.
        try:
            answer = read(request.path)
        except OutsideError:
            with self._change_lock:
                raise self._authorizer.deny(leads_outside(request.path, operation), caller) from None
        except Exception as error:
            record_failure(self._session, request, error, caller, details={})
            raise
        with self._change_lock:
            self._authorizer.record_call(request._replace(path=answer.path), caller=caller, size=answer.size)
        return answer.result
