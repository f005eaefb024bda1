"""Reading the workspace within bounds: lines of a file, what lies in a directory, lines that match.

Nothing here asks the door or writes the record; `tools` does both.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import Final, Generic, NamedTuple, TypeVar

from bonobofs.errors import UsageError
from bonobofs.files.line_reader import lines_of
from bonobofs.files.search import MOST, Match, search
from bonobofs.files.tree_walk import Found, Test, Walk, matching
from bonobofs.files.workspace import Place, Workspace
from bonobofs.policy.engine import Policy
from bonobofs.policy.request import Kind, WorkspacePath

SECONDS: Final = 10.0
"""For one call."""
MOST_ENTRIES: Final = 10_000
"""That are listed."""
MOST_SEARCHED: Final = 200_000
"""Files that are searched."""

_TRIES: Final = 100
_RESERVED: Final = ".bonobofs"
_NOT_ENTERED: Final = frozenset({".git", ".beads"})


@dataclass(frozen=True, slots=True)
class FileText:
    """Lines of a file."""

    path: str
    content: str
    """Each line with its number before it, as `cat -n` has it; bytes that are not UTF-8 as U+FFFD."""
    start_line: int
    end_line: int
    """The last that is given; one less than `start_line` where the file has none there."""
    total_lines: int | None
    """None where counting them would have taken too long."""
    cut: str = ""
    """What was left out; "" where that is nothing."""


@dataclass(frozen=True, slots=True)
class FileList:
    """What lies in a directory. The paths of the entries are from there."""

    path: str
    entries: list[Found]
    cut: str = ""
    """What was left out; "" where that is nothing."""


@dataclass(frozen=True, slots=True)
class FileMatches:
    """Lines that match."""

    matches: list[Match]
    searched: int
    """Files that were read; -1 where the search was ended before."""
    skipped: int
    """Files that are binary, too large or not to be read."""
    cut: str = ""
    """What was left out; "" where that is nothing."""


_Looked = TypeVar("_Looked")
_Result = TypeVar("_Result", FileText, FileList, FileMatches)


class Read(NamedTuple, Generic[_Result]):
    """What a call gives, about which path, and how many bytes of files that is."""

    result: _Result
    path: WorkspacePath
    size: int


class LedOutError(Exception):
    """A symlink on the way leads out of the workspace."""


class Reading:
    """Reads one workspace. Every call raises LedOutError, UsageError and OSError as they come."""

    def __init__(self, workspace: Workspace, policy: Callable[[], Policy]) -> None:
        """`policy` gives the one in force, which says what is scratch."""
        self._workspace: Final = workspace
        self._policy: Final = policy

    def text(self, named: WorkspacePath, offset: int, limit: int | None) -> Read[FileText]:
        """Lines of a text file, from the line `offset` on."""
        if offset < 1 or (limit is not None and limit < 1):
            raise UsageError("offset and limit are numbers of lines, from 1 on")
        path, descriptor = _in_rest(lambda: self._opened(named))
        with open(descriptor, "rb", buffering=0) as file:
            found = lines_of(file, offset, limit, monotonic() + SECONDS)
        end = offset + len(found.lines) - 1
        numbered = [f"{number:6}\t{line.decode('utf-8', 'replace')}" for number, line in enumerate(found.lines, offset)]
        cut = "" if found.whole else f"Only a part is given, because it is much; go on with offset {end + 1}."
        result = FileText(path, "\n".join(numbered), offset, end, found.total, cut)
        return Read(result, path, sum(len(line) for line in found.lines))

    def entries(self, named: WorkspacePath, pattern: str | None, *, recursive: bool) -> Read[FileList]:
        """What lies in a directory and, where it is recursive, below."""
        wanted = _any if pattern is None else matching(pattern)
        start, kind = _in_rest(lambda: self._found(named))
        if kind is not Kind.DIRECTORY:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), named)
        walk = self._walk(start, SECONDS)
        entries: list[Found] = []
        for found in walk.found(recursive=recursive, wanted=wanted):
            if len(entries) == MOST_ENTRIES:
                cut = f"Only the first {MOST_ENTRIES:,} entries are given; name a directory below, or a pattern."
                return Read(FileList(start, entries, cut), start, 0)
            entries.append(found)
        return Read(FileList(start, entries, _left_out(walk)), start, 0)

    def matches(self, named: WorkspacePath, query: str, include: str | None, exclude: str | None) -> Read[FileMatches]:
        """Lines that match, in one file or in all files below a directory."""
        deadline = monotonic() + SECONDS
        included = _any if include is None else matching(include)
        excluded = _none if exclude is None else matching(exclude)
        start, kind = _in_rest(lambda: self._found(named))
        if kind is Kind.DIRECTORY:
            paths, cut = self._below(start, included, excluded)
        else:
            paths, cut = [start], ""
        done = search(self._workspace.descriptor, query, paths, deadline)
        if not done.in_time:
            cut = "It took too long or too much memory, and was ended; name a directory below, or a simpler query."
        elif done.more:
            cut = f"Only the first {MOST:,} matches are given; name a directory below, or a narrower query."
        size = sum(len(match.text.encode()) for match in done.matches)
        return Read(FileMatches(done.matches, done.searched, done.skipped, cut), start, size)

    def _below(self, start: str, included: Test, excluded: Test) -> tuple[list[str], str]:
        """The files that are to be searched, and what of them was left out."""
        walk = self._walk(start, SECONDS / 2, excluded)
        above = f"{start}/" if start else ""
        paths: list[str] = []
        for found in walk.found(recursive=True, wanted=lambda path: included(path) and not excluded(path)):
            if found.kind is not Kind.FILE:
                continue
            if len(paths) == MOST_SEARCHED:
                return paths, f"Only the first {MOST_SEARCHED:,} files were searched; name a directory below."
            paths.append(above + found.path)
        return paths, _left_out(walk)

    def _opened(self, named: WorkspacePath) -> tuple[WorkspacePath, int]:
        """Where a regular file really lies, and the file, for the caller to close."""
        with self._place(named) as place:
            if place.kind is Kind.DIRECTORY:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), named)
            if place.kind is not Kind.FILE:
                raise UsageError("this is no regular file; read_file gives lines of text")
            return place.path, place.open_file()

    def _found(self, named: WorkspacePath) -> tuple[WorkspacePath, Kind]:
        """Where a name really leads, and to what."""
        with self._place(named) as place:
            return place.path, place.kind

    def _place(self, named: WorkspacePath) -> Place:
        """What is there, its directory held open."""
        place = self._workspace.locate(named, follow=True)
        if place is None:
            raise LedOutError
        # What a source has under this name cannot be reached in a mount either.
        is_there = place.found is not None and place.kind is not Kind.SYMLINK
        if not is_there or place.path.partition("/")[0] == _RESERVED:
            with place:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), named)
        return place

    def _walk(self, start: str, seconds: float, excluded: Test | None = None) -> Walk:
        policy = self._policy()
        from_scratch = policy.scratch_table(start) is not None

        def shows(path: str) -> bool:
            return bool(start) or path != _RESERVED

        def enters(path: str) -> bool:
            if path.rpartition("/")[2] in _NOT_ENTERED or (excluded is not None and excluded(path)):
                return False
            return from_scratch or policy.scratch_table(f"{start}/{path}" if start else path) is None

        return Walk(self._workspace, start, monotonic() + seconds, shows=shows, enters=enters)


def _in_rest(look: Callable[[], _Looked]) -> _Looked:
    """What is seen once nobody moves the way there or puts another file in its place while it is looked at."""
    for _ in range(_TRIES):
        try:
            return look()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return look()


def _left_out(walk: Walk) -> str:
    return "" if walk.is_whole else "It would take too long to look at everything; name a directory below."


def _any(_: str) -> bool:
    return True


def _none(_: str) -> bool:
    return False
