r"""Write and delete files from Python, under the same policy and in the same audit log as the mount.

    with open_session("project", agent="alice") as session:
        guard = FileGuard(session)
        written = guard.write_file("aidlc-docs/plan.md", "# The plan\n", agent="alice")

Paths: the guard follows symlinks that stay in the workspace, as the kernel does in a mount, and the policy judges the
resolved path. A symlink that leads out is refused as OUTSIDE with an alert, as `..` and NUL are. `delete_file` removes
a symlink itself.

Denials: `write_file` and `delete_file` return a false `ValidationResult`; `guarded_write_file` and
`guarded_delete_file` raise `Refused`, a PermissionError. Both forms raise other errors (FileExistsError, a full disk),
which the trail records with result `error`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, NoReturn

from bonobofs.audit import temp_cleanup
from bonobofs.audit.entry import BY
from bonobofs.enforcement.authorizer import Authorizer, Caller
from bonobofs.errors import UsageError
from bonobofs.files.atomic_write import MODE, put
from bonobofs.files.results import (
    Closing,
    GuardedSession,
    ValidationResult,
    as_result,
    is_session_agent,
    leads_outside,
    recorded,
    result_of,
    with_claimed_agent,
    wrong_agent,
)
from bonobofs.files.workspace import Location, Workspace
from bonobofs.policy.decision import Code, Decision, Denied, Refused
from bonobofs.policy.engine import allowed_directories, decide
from bonobofs.policy.request import HEAD_BYTES, NO_FACTS, Context, Kind, Operation, Request, WorkspacePath

PathLike = str | os.PathLike[str]

_LEAVES: Final = Context(leaves=True)
_OF_A_NAME: Final = frozenset(
    {
        Operation.DELETE_FILE,
        Operation.RENAME,
        Operation.LINK,
        Operation.SYMLINK,
        Operation.MKDIR,
        Operation.RMDIR,
        Operation.MKNOD,
    }
)
"""Operations that act on a symlink itself. The others follow it."""
_OF_CONTENT: Final = frozenset({Operation.WRITE_FILE, Operation.CREATE_FILE})
_KINDS: Final = {
    Operation.WRITE_FILE: Kind.FILE,
    Operation.CREATE_FILE: Kind.FILE,
    Operation.MKDIR: Kind.DIRECTORY,
    Operation.RMDIR: Kind.DIRECTORY,
    Operation.SYMLINK: Kind.SYMLINK,
    Operation.MKNOD: Kind.DEVICE,
}


@recorded(
    "file",
    validate_path=Operation.CALL,
    write_file=Operation.WRITE_FILE,
    delete_file=Operation.DELETE_FILE,
    list_allowed_directories=Operation.CALL,
)
class FileGuard(Closing):
    """The guarded files of one workspace, for the agent of one session. May be used by several threads."""

    def __init__(self, session: GuardedSession, *, tool: bool = False) -> None:
        """Guard an open session. `tool`: the role must also have the tool of the operation's name."""
        self._plain: Final = Context(tool=tool)
        self._session: Final = session
        self.audit: Final = session.log
        self._guard: Final[Authorizer] = session.guard
        self._workspace: Final = Workspace(Path(session.session.source), session.access_path)
        # One change at a time, from intent to outcome: the trail has the order of the changes. All guards of a session
        # share this lock, so its holder knows that no other change is in progress.
        self._change_lock: Final = session.change_lock

    def close(self) -> None:
        """Close the workspace's directory, which this guard otherwise holds open. The session stays open."""
        with self._change_lock:
            self._workspace.close()

    def validate_path(self, path: PathLike, operation: str = Operation.WRITE_FILE) -> ValidationResult:
        """Return whether the agent may make this change, as far as the policy can decide without the content.

        `operation` is a value of `Operation`, such as write_file or delete_file. A denial is recorded, like the denial
        of the change itself. Nothing is changed. Raises UsageError for an unknown operation.
        """
        parsed = operation_of(operation)
        caller = Caller("validate_path")
        try:
            with self._change_lock:
                return result_of(self._check(self._questions(parsed, path, caller), caller))
        except Refused as refused:
            return result_of(refused.decision)

    def _questions(self, operation: Operation, path: PathLike, caller: Caller) -> list[tuple[Request, Context]]:
        """Return the changes that an operation on a path consists of. Raises Refused for a path outside."""
        request = Request(operation, self._workspace.relative(path), _KINDS.get(operation, Kind.FILE))
        try:
            with self._locate(request, NO_FACTS, caller) as location:
                above = [(Request(Operation.MKDIR, path, Kind.DIRECTORY), NO_FACTS) for path in location.missing]
                return [_question(operation, location), *above]
        except Refused:
            raise
        except OSError:
            return [(request, NO_FACTS)]

    def guarded_write_file(self, path: PathLike, content: str, agent: str, *, overwrite: bool = False) -> Path:
        """Write a whole file in UTF-8, and return its absolute path.

        The write is atomic, synced when this returns, and creates missing directories. `path` is relative to the
        workspace or absolute in it; `agent` is the session's agent, by label or UUID. Raises FileExistsError if the
        file exists and `overwrite` is false, UnicodeEncodeError, OSError; new directories may then remain.
        """
        caller = Caller("write_file", {"overwrite": overwrite})
        with self._change_lock:
            request = Request(Operation.WRITE_FILE, self._relative(path, agent, Operation.WRITE_FILE, caller))
            try:
                data = str.encode(content, "utf-8")
                caller = Caller("write_file", {"overwrite": overwrite, "size": len(data)})
                location = self._locate(request, self._plain, caller)
            except Refused:
                raise
            except Exception as error:  # noqa: BLE001 - `_fail` records and raises it
                self._fail(request, self._plain, caller, error)
            with location:
                self._write(location, data, caller, overwrite=overwrite)
                return self._workspace.root / location.path

    write_file = as_result(guarded_write_file)

    def guarded_delete_file(self, path: PathLike, agent: str) -> None:
        """Remove a file, or a symlink itself.

        `path` and `agent` as for `write_file`. Raises FileNotFoundError, IsADirectoryError, OSError.
        """
        caller = Caller("delete_file")
        with self._change_lock:
            request = Request(Operation.DELETE_FILE, self._relative(path, agent, Operation.DELETE_FILE, caller))
            try:
                location = self._locate(request, _LEAVES, caller)
            except Refused:
                raise
            except Exception as error:  # noqa: BLE001 - `_fail` records and raises it
                self._fail(request, _LEAVES, caller, error)
            with location:
                request = Request(Operation.DELETE_FILE, location.path, location.kind)
                with self._guard.authorize(request, _LEAVES, caller=caller) as permit:
                    location.unlink(permit)

    delete_file = as_result(guarded_delete_file)

    def list_allowed_directories(self) -> list[str]:
        """Return the directories that the agent may write, with their limits, as `aidlc-docs/ (.md, 1 MB)`."""
        return allowed_directories(self._guard.policy, self._guard.agent.role)

    def _relative(self, path: PathLike, agent: str, operation: Operation, caller: Caller) -> WorkspacePath:
        """Return the path below the root, unresolved. Raises Refused if `agent` is not the session's agent."""
        relative = self._workspace.relative(path)
        if not is_session_agent(agent, self._guard.agent):
            raise self._guard.deny(wrong_agent(relative, operation), with_claimed_agent(caller, agent))
        return relative

    def _locate(self, request: Request, context: Context, caller: Caller) -> Location:
        """Resolve the path. Raises Refused (recorded) if it leads outside, OSError (not recorded)."""
        # Here, and not by the authorizer: whether a path is outside depends neither on leases nor on the mount.
        decision = decide(self._guard.policy, self._guard.agent, request, context)
        if isinstance(decision, Denied) and decision.code is Code.OUTSIDE:
            # The path itself is invalid or outside: do not look it up.
            raise self._guard.deny(decision, caller)
        location = self._workspace.locate(request.path, follow=request.operation not in _OF_A_NAME)
        if location is not None:
            return location
        raise self._guard.deny(leads_outside(request.path, request.operation), caller)

    def _fail(self, request: Request, context: Context, caller: Caller, error: Exception) -> NoReturn:
        """Record that a change failed before its path was resolved, and raise `error`."""
        admission = self._guard.authorize(request, context, caller=caller)
        with admission:
            if not isinstance(error, OSError):
                admission.details = {"error": type(error).__name__}
            raise error

    def _write(self, location: Location, data: bytes, caller: Caller, *, overwrite: bool) -> None:
        request = Request(Operation.WRITE_FILE, location.path)
        context = self._plain._replace(
            size=len(data),
            size_before=location.status.st_size if location.status is not None else 0,
            mode=MODE if location.status is None else -1,
            head=data[:HEAD_BYTES],
        )
        directories = [Request(Operation.MKDIR, above, Kind.DIRECTORY) for above in location.missing]
        if directories:
            # Judge everything before the first change: a refused file must not leave new directories.
            self._check([(request, context), *((directory, NO_FACTS) for directory in directories)], caller)
        for directory in directories:
            with self._guard.authorize(directory, caller=Caller(caller.tool)) as permit:
                location.make_directory(permit)
        temporary = temp_cleanup.stray_name()
        admission = self._guard.authorize(
            request,
            context,
            caller=caller,
            details={BY: temporary},
            size=len(data),
            action="create" if location.status is None else "modify",
            sync=True,
        )
        with admission as permit:
            put(location, data, temporary, overwrite=overwrite, permit=permit)
            admission.written = len(data)
            admission.details = {"size": len(data)}
            os.fsync(location.directory)  # if this fails, the file is replaced nevertheless

    def _check(self, questions: list[tuple[Request, Context]], caller: Caller) -> Decision:
        """Return the decision on the first question. Raises Refused for the first denial, which is recorded."""
        decisions = [self._guard.decide(request, context) for request, context in questions]
        for decision in decisions:
            if isinstance(decision, Denied):
                raise self._guard.deny(decision, caller)
        return decisions[0]


def operation_of(word: str) -> Operation:
    """Parse the name of an operation. Raises UsageError."""
    try:
        return Operation(word)
    except ValueError:
        raise UsageError(f"there is no operation {word!r}; use one of {', '.join(Operation)}") from None


def _question(operation: Operation, location: Location) -> tuple[Request, Context]:
    """Return the request and the context of a change of `location`, without its content."""
    kind = _KINDS.get(operation, location.kind)
    status = location.status
    context = Context(
        mode=MODE if operation in _OF_CONTENT and status is None else -1,
        leaves=operation is Operation.DELETE_FILE or (operation is Operation.RENAME and status is not None),
        # A write replaces the file under this name only. Other changes of a file are visible under all its names.
        foreign_names=status.st_nlink - 1 if status is not None and operation not in _OF_CONTENT else 0,
        privileged=os.geteuid() == 0,
    )
    return Request(operation, location.path, kind), context
