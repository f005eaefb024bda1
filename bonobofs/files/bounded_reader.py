"""Read the workspace within limits of size and time: lines of a file, entries of a directory, matching lines.

This module does not ask the policy and writes no audit entries; `file_tools` does both.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from time import monotonic
from typing import BinaryIO, Final, Generic, NamedTuple, TypeVar

from bonobofs.errors import PolicyError, UsageError
from bonobofs.files.search import MOST, Match, search
from bonobofs.files.workspace import Place, Workspace
from bonobofs.policy.engine import Policy
from bonobofs.policy.pattern import Matcher, Names, parse
from bonobofs.policy.request import Kind, WorkspacePath, kind_of

SECONDS: Final = 10.0
"""Time limit of one call."""
MOST_ENTRIES: Final = 10_000
"""Limit of the entries in one list."""
MOST_SEARCHED: Final = 200_000
"""Limit of the files in one search."""

_TRIES: Final = 100
_RESERVED: Final = ".bonobofs"
_NOT_ENTERED: Final = frozenset({".git", ".beads"})


@dataclass(frozen=True, slots=True)
class FileText:
    """Lines of a file."""

    path: str
    content: str
    """Numbered lines in the format of `cat -n`. Bytes that are not UTF-8 are U+FFFD."""
    start_line: int
    end_line: int
    """Number of the last line in `content`; `start_line` - 1 if the file has no such lines."""
    total_lines: int | None
    """None if the count reached its time limit."""
    cut: str = ""
    """A sentence on what is missing and how to get it; "" if complete."""


@dataclass(frozen=True, slots=True)
class FileList:
    """Entries of a directory. Their paths are relative to it."""

    path: str
    entries: list[DirectoryEntry]
    cut: str = ""
    """A sentence on what is missing and how to get it; "" if complete."""


@dataclass(frozen=True, slots=True)
class FileMatches:
    """Lines that match."""

    matches: list[Match]
    searched: int
    """Number of files that were read; -1 if the search was stopped at a limit."""
    skipped: int
    """Number of files that are binary, too large or unreadable."""
    cut: str = ""
    """A sentence on what is missing and how to get it; "" if complete."""


_Looked = TypeVar("_Looked")
_Result = TypeVar("_Result", FileText, FileList, FileMatches)


class Read(NamedTuple, Generic[_Result]):
    """The result of a call, the resolved path, and the number of bytes of file content in the result."""

    result: _Result
    path: WorkspacePath
    size: int


class LedOutError(Exception):
    """A symlink on the way leads out of the workspace."""


class WorkspaceReader:
    """Reads one workspace. Calls raise LedOutError, UsageError and OSError."""

    def __init__(self, workspace: Workspace, policy: Callable[[], Policy]) -> None:
        """`policy` returns the policy in force, whose scratch directories are not entered."""
        self._workspace: Final = workspace
        self._policy: Final = policy

    def text(self, named: WorkspacePath, offset: int, limit: int | None) -> Read[FileText]:
        """Read lines of a text file, starting with line `offset`, counted from 1."""
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
        """List the entries of a directory; with `recursive`, of its subdirectories too."""
        wanted = _any if pattern is None else matching(pattern)
        start, kind = _in_rest(lambda: self._found(named))
        if kind is not Kind.DIRECTORY:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), named)
        walk = self._walk(start, SECONDS)
        entries: list[DirectoryEntry] = []
        for found in walk.found(recursive=recursive, wanted=wanted):
            if len(entries) == MOST_ENTRIES:
                cut = f"Only the first {MOST_ENTRIES:,} entries are given; name a directory below, or a pattern."
                return Read(FileList(start, entries, cut), start, 0)
            entries.append(found)
        return Read(FileList(start, entries, _left_out(walk)), start, 0)

    def matches(self, named: WorkspacePath, query: str, include: str | None, exclude: str | None) -> Read[FileMatches]:
        """Search one file, or all files below a directory, for matching lines."""
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
        """Return the files to search, and a sentence on files that are missing, or ""."""
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
        """Open a regular file. Return its resolved path and its descriptor, which the caller closes."""
        with self._place(named) as place:
            if place.kind is Kind.DIRECTORY:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), named)
            if place.kind is not Kind.FILE:
                raise UsageError("this is no regular file; read_file gives lines of text")
            return place.path, place.open_file()

    def _found(self, named: WorkspacePath) -> tuple[WorkspacePath, Kind]:
        """Return the resolved path of a name, and its kind."""
        with self._place(named) as place:
            return place.path, place.kind

    def _place(self, named: WorkspacePath) -> Place:
        """Resolve a name, with its directory open. Raises FileNotFoundError, and LedOutError for a link out."""
        place = self._workspace.locate(named, follow=True)
        if place is None:
            raise LedOutError
        # A mount hides a source entry of this name too.
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
    """Call `look`, and retry while it raises ESTALE because the path changed during the look-up."""
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


MOST_BYTES: Final = 1_000_000
"""Limit in bytes of the lines that one call returns, with their newlines."""
_CHUNK: Final = 1 << 20
_HEAD: Final = 8192
"""A file with a NUL in this many first bytes is binary."""
_SECONDS_TO_COUNT: Final = 1.0


class Lines(NamedTuple):
    """Lines of a file, without their newlines."""

    lines: list[bytes]
    total: int | None
    """Number of lines of the whole file; None if the count reached its time limit."""
    whole: bool
    """True if all requested lines are here. If false and there is only one line, it may be cut."""


def lines_of(file: BinaryIO, first: int, limit: int | None, deadline: float) -> Lines:
    """Read `limit` lines, or all, starting with line `first`. A newline ends a line; the last one may have none.

    `deadline` is on the monotonic clock. Raises UsageError for a binary file, TimeoutError if `first` is not reached.
    """
    reading = _LineReader(file)
    held = bytearray(reading.skip_to(first, deadline))
    count = held.count(b"\n")
    while len(held) <= MOST_BYTES and (limit is None or count < limit):
        chunk = reading.more()
        if not chunk:
            break
        held += chunk
        count += chunk.count(b"\n")
    asked = bytes(held).split(b"\n")
    if not asked[-1]:
        asked.pop()
    asked = asked[:limit]
    given = _that_fit(asked)
    total = reading.count(min(deadline, monotonic() + _SECONDS_TO_COUNT))
    return Lines(given, total, whole=given == asked)


def _that_fit(asked: list[bytes]) -> list[bytes]:
    room = MOST_BYTES
    for index, line in enumerate(asked):
        room -= len(line) + 1
        if room < 0:
            return asked[:index] or [line[: MOST_BYTES - 1]]
    return asked


class _LineReader:
    """Reads a file sequentially and counts its lines."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: Final = file
        self._ended = 0
        """Number of newlines read so far."""
        self._last = b"\n"
        self._head = file.read(_HEAD)
        if b"\0" in self._head:
            raise UsageError("this is a binary file; read_file gives lines of text")

    def more(self) -> bytes:
        """Return the next chunk; empty at the end of the file."""
        chunk, self._head = self._head or self._file.read(_CHUNK), b""
        self._ended += chunk.count(b"\n")
        self._last = chunk[-1:] or self._last
        return chunk

    def skip_to(self, first: int, deadline: float) -> bytes:
        """Read up to line `first`. Return the rest of its chunk from there; empty if the file has fewer lines."""
        before = 0
        while chunk := self.more():
            if self._ended >= first - 1:
                at = 0
                for _ in range(first - 1 - before):
                    at = chunk.index(b"\n", at) + 1
                return chunk[at:]
            before = self._ended
            if monotonic() > deadline:
                raise TimeoutError("the line lies too far into the file to be reached in time")
        return b""

    def count(self, deadline: float) -> int | None:
        """Read to the end and return the number of lines; None at the deadline."""
        while self.more():
            if monotonic() > deadline:
                return None
        return self._ended + (self._last != b"\n")


MOST_NAMES: Final = 200_000
"""Limit of the names that are read of one directory."""

_MOST_BYTES: Final = 16 << 20
"""Limit in bytes of the path prefixes of one directory's names: a long path reduces the number of names."""
_LONGEST_PATTERN: Final = 1000
_MOST_PATTERNS: Final = 64
_BRACES: Final = re.compile(r"\{([^{}]*,[^{}]*)\}")

Test = Callable[[str], object]
"""A predicate for a path relative to the start of the walk."""


class DirectoryEntry(NamedTuple):
    """A file or directory below the start of a walk."""

    path: str
    """Relative to the start of the walk."""
    kind: Kind
    size: int
    """Size of a regular file in bytes; -1 for other kinds and if unknown."""


class Walk:
    """One walk of a directory tree, until its deadline."""

    def __init__(self, workspace: Workspace, start: str, deadline: float, *, shows: Test, enters: Test) -> None:
        """`start` is a directory relative to the workspace's root; `deadline` is on the monotonic clock.

        `shows` is false for paths to hide, `enters` is true for directories to enter. Their paths are from `start`.
        """
        self.is_whole = True
        """False once a name was left out because of a limit."""
        self._workspace: Final = workspace
        self._start: Final = start
        self._deadline: Final = deadline
        self._shows: Final = shows
        self._enters: Final = enters

    def found(self, *, recursive: bool, wanted: Test) -> Iterator[DirectoryEntry]:
        """Yield the entries for which `wanted` is true, sorted by name; the content of a directory follows it.

        Unreadable subdirectories count as empty. Raises OSError if `start` cannot be read.
        """
        waiting = self._names("", wanted)
        while waiting:
            each, is_wanted = waiting.pop()
            if monotonic() > self._deadline:
                self.is_whole = False
                return
            if is_wanted:
                yield each
            if recursive and each.kind is Kind.DIRECTORY and self._enters(each.path):
                with suppress(OSError):
                    waiting += self._names(each.path, wanted)

    def _names(self, path: str, wanted: Test) -> list[tuple[DirectoryEntry, bool]]:
        """Return the entries of a directory, sorted by name in reverse, each with the result of `wanted`."""
        above = f"{path}/" if path else ""
        directory = self._workspace.open_directory("/".join(filter(None, (self._start, path))))
        try:
            most = min(MOST_NAMES, _MOST_BYTES // (len(above) + 1))
            with os.scandir(directory) as names:
                listed = list(islice(names, most + 1))
            if len(listed) > most:
                self.is_whole = False
            listed.sort(key=lambda entry: entry.name, reverse=True)
            found = []
            for entry in listed:
                name = above + entry.name
                if not self._shows(name):
                    continue
                is_wanted = bool(wanted(name))
                found.append((_entry_of(entry, name, measured=is_wanted), is_wanted))
            return found
        finally:
            os.close(directory)


def matching(text: str) -> Test:
    """Compile a glob to a predicate. A glob without a slash matches the last name, another one the whole path.

    `*.{md,py}` matches both suffixes. Raises UsageError for an invalid glob.
    """
    if len(text) > _LONGEST_PATTERN:
        raise UsageError(f"a pattern has at most {_LONGEST_PATTERN} characters")
    spelled = _spelled_out(text)
    try:
        patterns = {one: parse(one) for one in spelled}
    except PolicyError as error:
        raise UsageError(f"{text!a} is no pattern: {error}") from None
    names = Names(one.rstrip("/") for one in spelled if "/" not in one.rstrip("/"))
    paths = Matcher((pattern, True) for one, pattern in patterns.items() if "/" in one.rstrip("/"))
    return lambda path: names.match(path.rpartition("/")[2]) or (paths and paths.find(path.split("/")))


def _spelled_out(text: str) -> list[str]:
    pending, done = [text], list[str]()
    while pending:
        one = pending.pop()
        braces = _BRACES.search(one)
        if braces is None:
            done.append(one)
        else:
            pending += [one[: braces.start()] + each + one[braces.end() :] for each in braces[1].split(",")]
        if len(pending) + len(done) > _MOST_PATTERNS:
            raise UsageError(f"a pattern stands for at most {_MOST_PATTERNS} without its braces")
    return done


def _entry_of(entry: os.DirEntry[str], path: str, *, measured: bool) -> DirectoryEntry:
    if entry.is_symlink():
        return DirectoryEntry(path, Kind.SYMLINK, -1)
    if entry.is_dir(follow_symlinks=False):
        return DirectoryEntry(path, Kind.DIRECTORY, -1)
    if not measured:
        return DirectoryEntry(path, Kind.FILE, -1)
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return DirectoryEntry(path, Kind.FILE, -1)
    kind = kind_of(status.st_mode)
    return DirectoryEntry(path, kind, status.st_size if kind is Kind.FILE else -1)
