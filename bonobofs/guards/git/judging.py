"""A difference of two trees as what the door is asked: each path a part, judged by the rules for files.

What a commit, a merge or a checkout brings in is judged as if the agent had written it: a file by its suffix, size and
first bytes, a symlink by where it leads, a deletion as one. Nothing is taken for renamed, so what goes and what comes
are both judged. Which commit a submodule is at, and what git itself would take for its own, no rule can allow.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from typing import Final

from bonobofs.decision import Denied
from bonobofs.guard import Part
from bonobofs.guards.git import rules
from bonobofs.guards.git.modes import EXECUTABLE, SUBMODULE, SYMLINK, TREE
from bonobofs.guards.git.repository import Blob, Difference, Repository
from bonobofs.request import HEAD_BYTES, NO_FACTS, Facts, Kind, Operation, Request, WorkspacePath

_MODES: Final = {True: 0o755, False: 0o644}
_UNSEEN: Final = "\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u206a\u206b\u206c\u206d\u206e\u206f\ufeff"
"""What some file systems take no notice of in a name."""


def named(path: bytes) -> WorkspacePath:
    return WorkspacePath(path.decode("utf-8", "surrogateescape"))


def is_gits_own(name: bytes) -> bool:
    """Whether a component is `.git`, or some file system would take it for that."""
    # What a backslash is to some file systems, it may be to whoever has the commit next.
    return any(map(_is_own, name.decode("utf-8", "surrogateescape").split("\\")))


def _is_own(text: str) -> bool:
    text = unicodedata.normalize("NFC", "".join(letter for letter in text if letter not in _UNSEEN)).casefold()
    return text.split(":")[0].rstrip(" .") in (".git", "git~1") or text in ("", ".", "..")


def unfit(path: bytes) -> bool:
    """Whether no commit may hold the path at all."""
    return not path or b"\0" in path or any(is_gits_own(name) for name in path.split(b"/"))


def is_evil_link(path: bytes, mode: int) -> bool:
    """Whether it is a symlink where git reads which submodules there are: git calls such a tree broken."""
    return mode == SYMLINK and path.rpartition(b"/")[2].rstrip(b" .").lower() == b".gitmodules"


class Judging:
    """Makes the parts of differences between trees of one repository."""

    def __init__(self, repository: Repository, operation: Operation) -> None:
        self._repository: Final = repository
        self._operation: Final = operation
        self._directories: Final[set[bytes]] = set()

    def refusal(self, differences: Iterable[Difference]) -> Denied | None:
        """What refuses a difference before any rule for files is asked."""
        for path, old, new in differences:
            if new is not None and (unfit(path) or is_evil_link(path, new.mode)):
                return rules.NOT_OURS.of(self._operation, named(path))
            if any(each is not None and each.mode == SUBMODULE for each in (old, new)):
                return rules.SUBMODULE.of(self._operation, named(path))
        return None

    def parts(self, differences: Iterable[Difference], before: bytes | None) -> list[Part]:
        """What is asked about them; `before` is the tree that has the directories which are there already."""
        found: list[Part] = []
        for difference in differences:
            found.append(self.part(difference))
            if difference.old is None:
                found += self._new_directories(difference.path, before)
        return found

    def part(self, difference: Difference) -> Part:
        path, old, new = difference
        if new is None:
            kind = Kind.SYMLINK if old is not None and old.mode == SYMLINK else Kind.FILE
            return Part(Request(Operation.DELETE_FILE, named(path), kind), Facts(leaves=True, in_source=True))
        content = self._repository.blob(new.oid)
        if new.mode == SYMLINK:
            target = content.decode("utf-8", "surrogateescape")
            return Part(Request(Operation.SYMLINK, named(path), Kind.SYMLINK), Facts(target=target, in_source=True))
        return Part(
            Request(Operation.WRITE_FILE, named(path)), facts_of(old, new.mode, content, self._size(old, new), new.oid)
        )

    def _size(self, old: Blob | None, new: Blob) -> int:
        if old is None or old.mode == SYMLINK:
            return 0
        return len(self._repository.blob((new if old.oid == new.oid else old).oid))

    def _new_directories(self, path: bytes, before: bytes | None) -> Iterable[Part]:
        names = path.split(b"/")
        for depth in range(1, len(names)):
            directory = b"/".join(names[:depth])
            if directory in self._directories:
                continue
            self._directories.add(directory)
            if not self._is_directory(before, names[:depth]):
                yield Part(Request(Operation.MKDIR, named(directory), Kind.DIRECTORY), NO_FACTS)

    def _is_directory(self, tree: bytes | None, names: list[bytes]) -> bool:
        for name in names:
            found = self._repository.entries(tree).get(name)
            if found is None or found.mode != TREE:
                return False
            tree = found.oid
        return True


def facts_of(old: Blob | None, mode: int, content: bytes, size_before: int, oid: bytes | None) -> Facts:
    """What the rules for files must know of a file that a commit holds."""
    was_file = old is not None and old.mode != SYMLINK
    same_mode = was_file and old is not None and old.mode == mode
    return Facts(
        size=len(content),
        size_before=size_before if was_file else 0,
        mode=-1 if same_mode else _MODES[mode == EXECUTABLE],
        head=b"" if same_mode and old is not None and old.oid == oid else content[:HEAD_BYTES],
        in_source=True,
    )
