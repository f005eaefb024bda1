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
    entries: list[DirectoryEntry]
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


class WorkspaceReader:
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
        entries: list[DirectoryEntry] = []
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


MOST_BYTES: Final = 1_000_000
"""Of the lines that are given at once, newlines too."""
_CHUNK: Final = 1 << 20
_HEAD: Final = 8192
"""Bytes in which a NUL makes a file binary."""
_SECONDS_TO_COUNT: Final = 1.0


class Lines(NamedTuple):
    """Lines of a file, without their newlines."""

    lines: list[bytes]
    total: int | None
    """How many lines the whole file has; None where counting them would have taken too long."""
    whole: bool
    """These are all that was asked for. Else there are more; one that stands alone may be a part of its line."""


def lines_of(file: BinaryIO, first: int, limit: int | None, deadline: float) -> Lines:
    """Read `limit` lines, or all, from the line `first` on. A newline ends a line; the last one may have none.

    `deadline` is of the monotonic clock. UsageError: a binary file. TimeoutError: `first` was not reached.
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
    """A file that is read on, and how many lines that was."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: Final = file
        self._ended = 0
        """Newlines in what was read."""
        self._last = b"\n"
        self._head = file.read(_HEAD)
        if b"\0" in self._head:
            raise UsageError("this is a binary file; read_file gives lines of text")

    def more(self) -> bytes:
        """The next of the file; empty at its end."""
        chunk, self._head = self._head or self._file.read(_CHUNK), b""
        self._ended += chunk.count(b"\n")
        self._last = chunk[-1:] or self._last
        return chunk

    def skip_to(self, first: int, deadline: float) -> bytes:
        """The beginning of what follows where a line begins; empty where there is none."""
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
        """How many lines the file has."""
        while self.more():
            if monotonic() > deadline:
                return None
        return self._ended + (self._last != b"\n")


MOST_NAMES: Final = 200_000
"""Names of one directory that are looked at."""

_MOST_BYTES: Final = 16 << 20
"""Of the paths in one directory: below long ones fewer names are looked at."""
_LONGEST_PATTERN: Final = 1000
_MOST_PATTERNS: Final = 64
_BRACES: Final = re.compile(r"\{([^{}]*,[^{}]*)\}")

Test = Callable[[str], object]
"""A test for a path that is relative to where the walk began."""


class DirectoryEntry(NamedTuple):
    """Something below a directory."""

    path: str
    """From where the walk began."""
    kind: Kind
    size: int
    """In bytes, of a regular file; else -1."""


class Walk:
    """One walk, which ends when its time is over, and then says so."""

    def __init__(self, workspace: Workspace, start: str, deadline: float, *, shows: Test, enters: Test) -> None:
        """`start` is a directory from the workspace's root, `deadline` of the monotonic clock.

        `shows` says what is there at all, `enters` which directories are entered; both of paths from `start`.
        """
        self.is_whole = True
        """Whether everything was looked at, so far."""
        self._workspace: Final = workspace
        self._start: Final = start
        self._deadline: Final = deadline
        self._shows: Final = shows
        self._enters: Final = enters

    def found(self, *, recursive: bool, wanted: Test) -> Iterator[DirectoryEntry]:
        """What is wanted, in the order of the names; what a directory holds follows it.

        Directories that cannot be read are empty. OSError: where it begins cannot be read.
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
        """What a directory holds, the last name first, and whether it is wanted."""
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
    """A test for a glob: without a slash for the last name at any depth, else for the whole path. UsageError.

    `*.{md,py}` is either.
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
