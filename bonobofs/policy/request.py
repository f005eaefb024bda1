"""What is asked: an operation by an agent on a workspace path, and what the engine must know of the world."""

from __future__ import annotations

import enum
import stat
from typing import Final, NamedTuple, NewType, TypeVar

WorkspacePath = NewType("WorkspacePath", str)
"""A path below the workspace's root: components joined by `/`, no leading slash, the root is "".

Names that are not UTF-8 are carried by surrogateescape (`os.fsdecode`).
"""

_E = TypeVar("_E", bound=enum.Enum)


def at_hand(kinds: type[_E]) -> type[_E]:
    """The same Enum with its members as plain attributes.

    Python 3.11 finds each by a property written in Python, at 0.13 us, and a change names some thirty of them.
    """
    for name, member in kinds.__members__.items():
        type.__setattr__(kinds, name, member)
    return kinds


HEAD_BYTES: Final = 8
"""How many first bytes of a file decide whether its content is executable."""


@at_hand
class Operation(enum.StrEnum):
    """Everything there is a word for: in the engine, in `--op` and in records."""

    __hash__ = str.__hash__  # an Enum's own is written in Python, and each change looks things up by it four times

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
    """What reached the guard socket and is none of these."""

    # Tools that read. Reading in a mount is free, and no operation.
    READ_FILE = "read_file"
    LIST_FILES = "list_files"
    SEARCH_FILES = "search_files"

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


@at_hand
class Kind(enum.Enum):
    """What the path names, or will name after the change."""

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
    """Who asks. The label is for people; the UUID is the identity; the role is the session's."""

    label: str
    id: str
    role: str


class Request(NamedTuple):
    """One name that an operation would change. A rename is two requests under one admission."""

    operation: Operation
    path: WorkspacePath
    kind: Kind = Kind.FILE


class Context(NamedTuple):
    """What the engine cannot know by itself. Sizes are bytes; -1 says that the change does not touch it."""

    size: int = -1
    """Size of the regular file after the change; -1: the content stays."""
    size_before: int = 0
    mode: int = -1
    """Permission bits (07777) of the regular file after the change; -1: they stay."""
    head: bytes = b""
    """First HEAD_BYTES of the regular file after the change, where the change brings or alters them."""
    target: str | None = None
    """Text of the symlink that appears under the path."""
    leaves: bool = False
    """The name goes away: deletion, or the old name of a rename."""
    foreign_names: int = 0
    """Names of the file (hard links) beyond those that are known and allowed."""
    privileged: bool = False
    """The serving process runs as root, so that devices could be made at all."""
    in_source: bool = False
    """What stands under the name, or comes to stand there, is a file of the source: a temporary name is not held."""
    held: bool = False
    """What stands under the temporary name is held already, and stays held whatever the rules admit."""
    carried: bool = False
    """A symlink of the source that its directory takes along: it stays in the source, also at a scratch path."""
    tool: bool = False
    """It is asked through the tool of the operation's name, which the role must have too."""


NO_FACTS: Final = Context()
EXISTS: Final = Context(in_source=True)
"""Something of the source, of which nothing else is to be known."""
HELD: Final = Context(held=True)
"""Something that is held under a temporary name, of which nothing else is to be known."""
