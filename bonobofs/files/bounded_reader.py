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
from hashlib import sha256
from itertools import islice
from time import monotonic
from typing import BinaryIO, Final, Generic, NamedTuple, TypeVar

from bonobofs.errors import PolicyError, UsageError
from bonobofs.files.search import MOST, Match, search
from bonobofs.files.workspace import Location, Workspace
from bonobofs.policy.engine import Policy
from bonobofs.policy.pattern import Matcher, NameGlobs, parse
from bonobofs.policy.request import Kind, WorkspacePath, kind_of

SECONDS: Final = 10.0
"""Time limit of one call."""
MOST_ENTRIES: Final = 10_000
"""Limit of the entries in one list."""
MOST_SEARCHED: Final = 200_000
"""Limit of the files in one search."""

_TRIES: Final = 100
_BLOCK: Final = 1 << 20
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


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The SHA-256 of a file, in hex, and its size in bytes."""

    path: str
    sha256: str
    size: int


_Value = TypeVar("_Value")
_Result = TypeVar("_Result", FileText, FileList, FileMatches, FileDigest)


class Read(NamedTuple, Generic[_Result]):
    """The result of a call, the resolved path, and the number of bytes of file content in the result."""

    result: _Result
    path: WorkspacePath
    size: int


class OutsideError(Exception):
    """A symlink on the way leads out of the workspace."""


class WorkspaceReader:
    """Reads one workspace. Calls raise OutsideError, UsageError and OSError."""

    def __init__(self, workspace: Workspace, policy: Callable[[], Policy], seconds: float = SECONDS) -> None:
        """`policy` returns the policy in force, whose scratch directories are not entered.

        `seconds`: time limit of one call.
        """
        self._workspace: Final = workspace
        self._policy: Final = policy
        self._seconds: Final = seconds

    def text(self, path: WorkspacePath, offset: int, limit: int | None) -> Read[FileText]:
        """Read lines of a text file, starting with line `offset`, counted from 1."""
        if offset < 1 or (limit is not None and limit < 1):
            raise UsageError("offset and limit are numbers of lines, from 1 on")
        real, descriptor = _retry_stale(lambda: self._open_file(path))
        with open(descriptor, "rb", buffering=0) as file:
            part = lines_of(file, offset, limit, monotonic() + self._seconds)
        end = offset + len(part.lines) - 1
        numbered = [f"{number:6}\t{line.decode('utf-8', 'replace')}" for number, line in enumerate(part.lines, offset)]
        cut = "" if part.whole else f"Only a part is given, because of its size; go on with offset {end + 1}."
        result = FileText(real, "\n".join(numbered), offset, end, part.total, cut)
        return Read(result, real, sum(len(line) for line in part.lines))

    def digest(self, path: WorkspacePath) -> Read[FileDigest]:
        """Hash a whole file. UsageError: that takes longer than the limit."""
        real, descriptor = _retry_stale(lambda: self._open_file(path))
        deadline, found, size = monotonic() + self._seconds, sha256(), 0
        with open(descriptor, "rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                found.update(block)
                size += len(block)
                if monotonic() > deadline:
                    raise UsageError(f"{real} is too large to hash in {self._seconds:.0f} s")
        return Read(FileDigest(real, found.hexdigest(), size), real, size)

    def entries(self, path: WorkspacePath, pattern: str | None, *, recursive: bool) -> Read[FileList]:
        """List the entries of a directory; with `recursive`, of its subdirectories too."""
        matches = _any if pattern is None else matching(pattern)
        start, kind = _retry_stale(lambda: self._resolve(path))
        if kind is not Kind.DIRECTORY:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
        walk = self._walk(start, self._seconds)
        entries: list[DirectoryEntry] = []
        for entry in walk.entries(recursive=recursive, matches=matches):
            if len(entries) == MOST_ENTRIES:
                cut = f"Only the first {MOST_ENTRIES:,} entries are given; name a directory below, or a pattern."
                return Read(FileList(start, entries, cut), start, 0)
            entries.append(entry)
        return Read(FileList(start, entries, _gap(walk)), start, 0)

    def matches(self, path: WorkspacePath, query: str, include: str | None, exclude: str | None) -> Read[FileMatches]:
        """Search one file, or all files below a directory, for matching lines."""
        deadline = monotonic() + self._seconds
        included = _any if include is None else matching(include)
        excluded = _none if exclude is None else matching(exclude)
        start, kind = _retry_stale(lambda: self._resolve(path))
        if kind is Kind.DIRECTORY:
            paths, cut = self._below(start, included, excluded)
        else:
            paths, cut = [start], ""
        result = search(self._workspace.descriptor, query, paths, deadline)
        if not result.in_time:
            cut = "The search reached its limit of time or memory; name a directory below, or a simpler query."
        elif result.more:
            cut = f"Only the first {MOST:,} matches are given; name a directory below, or a narrower query."
        size = sum(len(match.text.encode()) for match in result.matches)
        return Read(FileMatches(result.matches, result.searched, result.skipped, cut), start, size)

    def _below(self, start: str, included: Test, excluded: Test) -> tuple[list[str], str]:
        """Return the files to search, and a sentence on files that are missing, or ""."""
        walk = self._walk(start, self._seconds / 2, excluded)
        above = f"{start}/" if start else ""
        paths: list[str] = []
        for entry in walk.entries(recursive=True, matches=lambda path: included(path) and not excluded(path)):
            if entry.kind is not Kind.FILE:
                continue
            if len(paths) == MOST_SEARCHED:
                return paths, f"Only the first {MOST_SEARCHED:,} files were searched; name a directory below."
            paths.append(above + entry.path)
        return paths, _gap(walk)

    def _open_file(self, path: WorkspacePath) -> tuple[WorkspacePath, int]:
        """Open a regular file. Return its resolved path and its descriptor, which the caller closes."""
        with self._location(path) as location:
            if location.kind is Kind.DIRECTORY:
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
            if location.kind is not Kind.FILE:
                raise UsageError("not a regular file; read_file returns lines of text files")
            return location.path, location.open_file()

    def _resolve(self, path: WorkspacePath) -> tuple[WorkspacePath, Kind]:
        """Return the resolved path of a name, and its kind."""
        with self._location(path) as location:
            return location.path, location.kind

    def _location(self, path: WorkspacePath) -> Location:
        """Resolve a name, with its directory open. Raises FileNotFoundError, and OutsideError for a link out."""
        location = self._workspace.locate(path, follow=True)
        if location is None:
            raise OutsideError
        # A mount hides a source entry of this name too.
        exists = location.status is not None and location.kind is not Kind.SYMLINK
        hidden = location.path.partition("/")[0] == _RESERVED or self._policy().secret(location.path.split("/"))
        if not exists or hidden:
            with location:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return location

    def _walk(self, start: str, seconds: float, excluded: Test | None = None) -> Walk:
        policy = self._policy()
        from_scratch = policy.scratch_table(start) is not None

        def shows(path: str) -> bool:
            whole = f"{start}/{path}" if start else path
            return whole != _RESERVED and policy.secret(whole.split("/")) is None

        def enters(path: str) -> bool:
            if path.rpartition("/")[2] in _NOT_ENTERED or (excluded is not None and excluded(path)):
                return False
            return from_scratch or policy.scratch_table(f"{start}/{path}" if start else path) is None

        return Walk(self._workspace, start, monotonic() + seconds, shows=shows, enters=enters)


def _retry_stale(look_up: Callable[[], _Value]) -> _Value:
    """Call `look_up`, and retry while it raises ESTALE because the path changed meanwhile."""
    for _ in range(_TRIES):
        try:
            return look_up()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return look_up()


def _gap(walk: Walk) -> str:
    return "" if walk.is_whole else "The listing reached its time limit; name a directory below."


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
    reader = _LineReader(file)
    data = bytearray(reader.skip_to(first, deadline))
    count = data.count(b"\n")
    while len(data) <= MOST_BYTES and (limit is None or count < limit):
        chunk = reader.read_chunk()
        if not chunk:
            break
        data += chunk
        count += chunk.count(b"\n")
    lines = bytes(data).split(b"\n")
    if not lines[-1]:
        lines.pop()
    lines = lines[:limit]
    fitting = _first_bytes(lines)
    total = reader.count(min(deadline, monotonic() + _SECONDS_TO_COUNT))
    return Lines(fitting, total, whole=fitting == lines)


def _first_bytes(lines: list[bytes]) -> list[bytes]:
    """Return the first lines that together have at most MOST_BYTES; of one longer line, its beginning."""
    room = MOST_BYTES
    for index, line in enumerate(lines):
        room -= len(line) + 1
        if room < 0:
            return lines[:index] or [line[: MOST_BYTES - 1]]
    return lines


class _LineReader:
    """Reads a file sequentially and counts its lines."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: Final = file
        self._ended = 0
        """Number of newlines read so far."""
        self._last = b"\n"
        self._head = file.read(_HEAD)
        if b"\0" in self._head:
            raise UsageError("a binary file; read_file returns lines of text files")

    def read_chunk(self) -> bytes:
        """Return the next chunk; empty at the end of the file."""
        chunk, self._head = self._head or self._file.read(_CHUNK), b""
        self._ended += chunk.count(b"\n")
        self._last = chunk[-1:] or self._last
        return chunk

    def skip_to(self, first: int, deadline: float) -> bytes:
        """Read up to line `first`. Return the rest of its chunk from there; empty if the file has fewer lines."""
        before = 0
        while chunk := self.read_chunk():
            if self._ended >= first - 1:
                at = 0
                for _ in range(first - 1 - before):
                    at = chunk.index(b"\n", at) + 1
                return chunk[at:]
            before = self._ended
            if monotonic() > deadline:
                raise TimeoutError("the line is too far from the start of the file for the time limit")
        return b""

    def count(self, deadline: float) -> int | None:
        """Read to the end and return the number of lines; None at the deadline."""
        while self.read_chunk():
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

    def entries(self, *, recursive: bool, matches: Test) -> Iterator[DirectoryEntry]:
        """Yield the entries for which `matches` is true, sorted by name; the content of a directory follows it.

        Unreadable subdirectories count as empty. Raises OSError if `start` cannot be read.
        """
        pending = self._names("", matches)
        while pending:
            each, is_match = pending.pop()
            if monotonic() > self._deadline:
                self.is_whole = False
                return
            if is_match:
                yield each
            if recursive and each.kind is Kind.DIRECTORY and self._enters(each.path):
                with suppress(OSError):
                    pending += self._names(each.path, matches)

    def _names(self, path: str, matches: Test) -> list[tuple[DirectoryEntry, bool]]:
        """Return the entries of a directory, sorted by name in reverse, each with the result of `matches`."""
        above = f"{path}/" if path else ""
        directory = self._workspace.open_directory("/".join(filter(None, (self._start, path))))
        try:
            most = min(MOST_NAMES, _MOST_BYTES // (len(above) + 1))
            with os.scandir(directory) as names:
                children = list(islice(names, most + 1))
            if len(children) > most:
                self.is_whole = False
            children.sort(key=lambda entry: entry.name, reverse=True)
            entries = []
            for child in children:
                name = above + child.name
                if self._shows(name):
                    is_match = bool(matches(name))
                    entries.append((_entry_of(child, name, measured=is_match), is_match))
            return entries
        finally:
            os.close(directory)


def matching(text: str) -> Test:
    """Compile a glob to a predicate. A glob without a slash matches the last name, another one the whole path.

    `*.{md,py}` matches both suffixes. Raises UsageError for an invalid glob.
    """
    if len(text) > _LONGEST_PATTERN:
        raise UsageError(f"a pattern has at most {_LONGEST_PATTERN} characters")
    globs = _expand_braces(text)
    try:
        patterns = {glob: parse(glob) for glob in globs}
    except PolicyError as error:
        raise UsageError(f"{text!a} is not a valid pattern: {error}") from None
    names = NameGlobs(glob.rstrip("/") for glob in globs if "/" not in glob.rstrip("/"))
    paths = Matcher((pattern, True) for glob, pattern in patterns.items() if "/" in glob.rstrip("/"))
    return lambda path: names.match(path.rpartition("/")[2]) or (paths and paths.find(path.split("/")))


def _expand_braces(text: str) -> list[str]:
    pending, globs = [text], list[str]()
    while pending:
        glob = pending.pop()
        braces = _BRACES.search(glob)
        if braces is None:
            globs.append(glob)
        else:
            pending += [glob[: braces.start()] + part + glob[braces.end() :] for part in braces[1].split(",")]
        if len(pending) + len(globs) > _MOST_PATTERNS:
            raise UsageError(f"the braces of a pattern expand to at most {_MOST_PATTERNS} patterns")
    return globs


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
