"""The input of the engine: an operation of a principal on a workspace path, and its context."""

from __future__ import annotations

import enum
import stat
from typing import Final, NamedTuple, NewType, TypeVar

WorkspacePath = NewType("WorkspacePath", str)
"""A path below the workspace's root: components joined by `/`, no leading slash, the root is "".

Names that are not UTF-8 are decoded with surrogateescape (`os.fsdecode`).
"""

_E = TypeVar("_E", bound=enum.Enum)


def with_plain_members(kinds: type[_E]) -> type[_E]:
    """Return the Enum with its members as plain attributes.

    Python 3.11 looks up each member through a property in 0.13 us, and one change looks up about thirty members.
    """
    for name, member in kinds.__members__.items():
        type.__setattr__(kinds, name, member)
    return kinds


HEAD_BYTES: Final = 8
"""Number of first bytes that decide whether the content of a file is executable."""


@with_plain_members
class Operation(enum.StrEnum):
    """The operations of the engine, of `--op` and of trails."""

    __hash__ = str.__hash__  # Enum's own is written in Python, and each change needs the hash four times

    WRITE_FILE = "write_file"
    CREATE_FILE = "create_file"
    DELETE_FILE = "delete_file"
    RENAME = "rename"
    LINK = "link"
    SYMLINK = "symlink"
    MKDIR = "mkdir"
    RMDIR = "rmdir"
    MKNOD = "mknod"
    TRUNCATE = "truncate"
    ALLOCATE = "allocate"
    COPY_RANGE = "copy_range"
    SET_MODE = "set_mode"
    SET_OWNER = "set_owner"
    SET_TIMES = "set_times"
    SET_XATTR = "set_xattr"
    REMOVE_XATTR = "remove_xattr"

    CALL = "call"
    """A call of the guard socket without an operation of its own."""

    # Tools that read. A read in a mount is always permitted, and is not an operation.
    READ_FILE = "read_file"
    LIST_FILES = "list_files"
    SEARCH_FILES = "search_files"

    UNDO = "undo"
    """The call that takes back changes. Each change that it makes has an operation of its own."""

    ADD = "add"
    COMMIT = "commit"
    RM = "rm"
    MV = "mv"
    RESTORE = "restore"
    CREATE_BRANCH = "create_branch"
    DELETE_BRANCH = "delete_branch"
    CHECKOUT_BRANCH = "checkout_branch"
    MERGE = "merge"
    STASH = "stash"
    RESET = "reset"
    TAG = "tag"
    CREATE_WORKTREE = "create_worktree"
    REMOVE_WORKTREE = "remove_worktree"
    PUBLISH = "publish"

    CREATE_ISSUE = "create_issue"
    CREATE_EPIC = "create_epic"
    UPDATE_ISSUE = "update_issue"
    CLOSE_ISSUE = "close_issue"
    REOPEN_ISSUE = "reopen_issue"
    ADD_DEPENDENCY = "add_dependency"
    REMOVE_DEPENDENCY = "remove_dependency"
    LABEL_ISSUE = "label_issue"
    COMMENT_ISSUE = "comment_issue"

    CONNECT = "connect"
    """A connection out of the sandbox. Its path is "", its `Context.endpoint` the destination."""


@with_plain_members
class Kind(enum.Enum):
    """Kind of the file at the path, or of the file that will be there after the change."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    FIFO = "fifo"
    SOCKET = "socket"
    DEVICE = "device"


_KINDS: Final = {
    stat.S_IFREG: Kind.FILE,
    stat.S_IFDIR: Kind.DIRECTORY,
    stat.S_IFLNK: Kind.SYMLINK,
    stat.S_IFIFO: Kind.FIFO,
    stat.S_IFSOCK: Kind.SOCKET,
    stat.S_IFCHR: Kind.DEVICE,
    stat.S_IFBLK: Kind.DEVICE,
}


def kind_of(mode: int) -> Kind:
    """Return the kind of a file with this `st_mode`. No type in it means a regular file, as for mknod(2)."""
    return _KINDS.get(mode & 0o170000, Kind.FILE)


class Principal(NamedTuple):
    """The agent of a request: its label for people, its UUID as identity, and the role of the session."""

    label: str
    id: str
    role: str


class Request(NamedTuple):
    """One name that an operation is about to change. A rename has two requests under one admission."""

    operation: Operation
    path: WorkspacePath
    kind: Kind = Kind.FILE


class Context(NamedTuple):
    """State of the file system that a decision depends on. Sizes are in bytes; -1: the change keeps the value."""

    size: int = -1
    """Size of the regular file after the change."""
    size_before: int = 0
    mode: int = -1
    """Permission bits (07777) of the regular file after the change."""
    head: bytes = b""
    """First HEAD_BYTES of the regular file after the change, if the change sets them."""
    target: str | None = None
    """Text of the symlink that the change creates at the path."""
    leaves: bool = False
    """The change removes the name: a deletion, or the old name of a rename."""
    foreign_names: int = 0
    """Number of the file's names (hard links) that are unknown or not permitted."""
    privileged: bool = False
    """The server runs as root, so that it can create devices."""
    in_source: bool = False
    """The file at the name is or will be in the source: a temporary name is not staged."""
    staged: bool = False
    """The file at the temporary name is already staged, and stays staged even if a rule permits the name."""
    carried: bool = False
    """The file moves with its directory in the source, even at a scratch path: leases bind it."""
    tool: bool = False
    """The request is a call of the tool with the operation's name, so the role must have that tool, too."""
    endpoint: tuple[str, int] = ("", 0)
    """Canonical host and port of a connection."""


NO_FACTS: Final = Context()
EXISTS: Final = Context(in_source=True)
"""Context of an existing source file when only its existence matters."""
STAGED: Final = Context(staged=True)
"""Context of a staged file when only its existence matters."""

CHANGES: Final = frozenset(list(Operation)[: list(Operation).index(Operation.CALL)])
"""Operations that change a path."""
OF_CONTENT: Final = frozenset(
    {Operation.WRITE_FILE, Operation.TRUNCATE, Operation.ALLOCATE, Operation.COPY_RANGE, Operation.CREATE_FILE}
)
"""Operations that write the content of a regular file."""
_KIND_MADE: Final = {
    Operation.MKDIR: Kind.DIRECTORY,
    Operation.RMDIR: Kind.DIRECTORY,
    Operation.SYMLINK: Kind.SYMLINK,
    Operation.MKNOD: Kind.DEVICE,
}


class PlannedChange(NamedTuple):
    """A change of one name. The guard socket's `why` has these fields as arguments."""

    path: str
    """A slash at its end means a directory."""
    operation: Operation | None = None
    """None: the one that writing at `path` needs."""
    size: int | None = None
    """Bytes of the file after the change; None: as before."""
    to: str | None = None
    """The new path of a rename or link; None: only the old one is judged."""
    role: str | None = None
    """None: the role of the session."""

    def request(self, kind: Kind | None, size: int, context: Context, *, privileged: bool) -> tuple[Request, Context]:
        """Return the request and its context. `kind`, `size`, `context`: the file at `path`; `kind` None: no file."""
        is_directory = kind is Kind.DIRECTORY or self.path.endswith("/")
        operation = self.operation or (
            Operation.MKDIR if is_directory else Operation.CREATE_FILE if kind is None else Operation.WRITE_FILE
        )
        before = size if kind is Kind.FILE else 0
        context = (NO_FACTS if kind is None else context)._replace(
            size_before=before,
            mode=0o644 if operation is Operation.CREATE_FILE and kind is None else -1,
            leaves=operation is Operation.RENAME and kind is not None,
            target=self.path.rstrip("/").rpartition("/")[2] if operation is Operation.SYMLINK else None,
            privileged=privileged,
        )
        if operation in OF_CONTENT:
            context = context._replace(size=before if self.size is None else self.size)
        kind = _KIND_MADE.get(operation) or kind or (Kind.DIRECTORY if is_directory else Kind.FILE)
        return Request(operation, WorkspacePath(self.path.rstrip("/")), kind), context
