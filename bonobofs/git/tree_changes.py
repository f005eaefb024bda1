"""Convert the difference of two commits into related changes of one request, which the file rules judge.

The rules judge a file by suffix, size and first bytes, and a symlink by its target. A rename is a deletion and a
creation. Every policy refuses paths that git or a file system resolves to `.git`.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from typing import Final

from bonobofs.enforcement.authorizer import RelatedChange
from bonobofs.errors import GitError
from bonobofs.git import branch_rules
from bonobofs.git.repository import Entry, GitRepository, TreeDifference
from bonobofs.git.source_refs import EXECUTABLE, FILE, SUBMODULE, SYMLINK
from bonobofs.policy.decision import Denied
from bonobofs.policy.request import NO_FACTS, Context, Kind, Operation, Request, WorkspacePath

GITMODULES: Final = b".gitmodules"
_LONGEST_GITMODULES: Final = 1 << 20
_LONGEST_TARGET: Final = 4096
_MODES: Final = {True: 0o755, False: 0o644}
_UNSEEN: Final = "\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u206a\u206b\u206c\u206d\u206e\u206f\ufeff"
"""Characters that some file systems ignore in names."""


def workspace_path(path: bytes) -> WorkspacePath:
    return WorkspacePath(path.decode("utf-8", "surrogateescape"))


def is_gits_own(name: bytes) -> bool:
    """True if a path component is `.git`, or a file system may resolve it to `.git`."""
    # Some file systems read a backslash as a slash.
    return any(map(_is_own, name.decode("utf-8", "surrogateescape").split("\\")))


def _is_own(text: str) -> bool:
    text = unicodedata.normalize("NFC", "".join(letter for letter in text if letter not in _UNSEEN)).casefold()
    return text.split(":")[0].rstrip(" .") in (".git", "git~1") or text in ("", ".", "..")


def is_refused_path(path: bytes) -> bool:
    """True if every policy refuses the path in a commit."""
    return not path or b"\0" in path or any(is_gits_own(name) for name in path.split(b"/"))


def is_evil_link(path: bytes, mode: int) -> bool:
    """True for a symlink named .gitmodules, which git rejects."""
    return mode == SYMLINK and path.rpartition(b"/")[2].rstrip(b" .").lower() == GITMODULES


class TreeChanges:
    """Converts differences between commits of one repository. Equal differences are converted once."""

    def __init__(self, repository: GitRepository, operation: Operation) -> None:
        """`operation` is the operation of the denials that `refusal` returns."""
        self._repository: Final = repository
        self._operation: Final = operation
        self._seen: Final[set[TreeDifference]] = set()
        self._directories: Final[set[bytes]] = set()

    def refusal(self, differences: Iterable[TreeDifference]) -> Denied | None:
        """Return a denial that does not depend on the policy, or None."""
        for path, _, new in differences:
            if new is None:
                continue
            if (
                is_refused_path(path)
                or is_evil_link(path, new.mode)
                or new.mode not in (FILE, EXECUTABLE, SYMLINK, SUBMODULE)
            ):
                return branch_rules.NOT_OURS.of(self._operation, workspace_path(path))
            if new.mode == SUBMODULE and not self._repository.has_submodule_commit(new.oid):
                return branch_rules.SUBMODULE.of(self._operation, workspace_path(path))
            if path == GITMODULES and self._leads_out(new.oid):
                return branch_rules.SUBMODULE.of(self._operation, workspace_path(path))
        return None

    def related(self, differences: Iterable[TreeDifference], before: str) -> Iterator[RelatedChange]:
        """Yield the changes for the policy. The directories of the commit `before` ("" for none) already exist."""
        for difference in differences:
            if difference in self._seen:
                continue
            self._seen.add(difference)
            old, new = difference.old, difference.new
            if old and old.mode in (FILE, EXECUTABLE) and new and new.mode in (SYMLINK, SUBMODULE):
                yield self._part(difference._replace(new=None))  # the file leaves its name to another kind
            yield self._part(difference)
            if difference.old is None:
                yield from self._new_directories(difference.path, before)

    def _part(self, difference: TreeDifference) -> RelatedChange:
        path, old, new = difference
        if new is None:
            kind = Kind.SYMLINK if old is not None and old.mode == SYMLINK else Kind.FILE
            return RelatedChange(
                Request(Operation.DELETE_FILE, workspace_path(path), kind), Context(leaves=True, in_source=True)
            )
        if new.mode == SUBMODULE:
            return RelatedChange(Request(Operation.MKDIR, workspace_path(path), Kind.DIRECTORY), NO_FACTS)
        if new.mode == SYMLINK:
            # A longer target is invalid. The engine refuses NUL.
            long = self._repository.size(new.oid) > _LONGEST_TARGET
            target = "\0" if long else self._repository.bytes_of(new.oid).decode("utf-8", "surrogateescape")
            return RelatedChange(
                Request(Operation.SYMLINK, workspace_path(path), Kind.SYMLINK), Context(target=target, in_source=True)
            )
        return RelatedChange(Request(Operation.WRITE_FILE, workspace_path(path)), self._facts(old, new))

    def _facts(self, old: Entry | None, new: Entry) -> Context:
        was_file = old is not None and old.mode not in (SYMLINK, SUBMODULE)
        same_mode = was_file and old is not None and old.mode == new.mode
        same_content = was_file and old is not None and old.oid == new.oid
        return Context(
            size=self._repository.size(new.oid),
            size_before=self._size_before(old) if was_file and old is not None else 0,
            mode=-1 if same_mode else _MODES[new.mode == EXECUTABLE],
            head=b"" if same_content else self._repository.first_bytes(new.oid),
            in_source=True,
        )

    def _size_before(self, old: Entry) -> int:
        try:
            return self._repository.size(old.oid)
        except GitError:  # missing in a partial clone
            return 0

    def _new_directories(self, path: bytes, before: str) -> Iterator[RelatedChange]:
        names = path.split(b"/")
        for depth in range(1, len(names)):
            directory = b"/".join(names[:depth])
            if directory not in self._directories:
                self._directories.add(directory)
                if not self._repository.is_directory(before, directory):
                    yield RelatedChange(Request(Operation.MKDIR, workspace_path(directory), Kind.DIRECTORY), NO_FACTS)

    def _leads_out(self, oid: str) -> bool:
        """True if a .gitmodules names a path or URL outside the workspace, or exceeds 1 MiB."""
        if self._repository.size(oid) > _LONGEST_GITMODULES:
            return True
        text = self._repository.bytes_of(oid).decode("utf-8", "surrogateescape").replace("\\\n", "")
        for line in text.splitlines():
            word, equals, value = line.rpartition("]")[2].partition("=")
            value = value.split("#")[0].split(";")[0].strip().strip('"').strip().replace("\\", "/")
            if equals and word.strip().lower() in ("path", "url") and _leads_out(value, word.strip().lower()):
                return True
        return False


def _leads_out(value: str, word: str) -> bool:
    steps = [step for step in value.split("/") if step not in ("", ".")]
    if value.startswith(("/", "-", "~")) or ".." in steps:
        return True
    if word == "path":
        return any(is_gits_own(step.encode("utf-8", "surrogateescape")) for step in steps)
    return "::" in value or value.lower().startswith("file:")
