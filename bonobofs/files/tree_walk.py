"""What lies below a directory of the workspace, without a symlink followed or another file system entered."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from time import monotonic
from typing import Final, NamedTuple

from bonobofs.errors import PolicyError, UsageError
from bonobofs.files.workspace import Workspace
from bonobofs.policy.pattern import Matcher, Names, parse
from bonobofs.policy.request import Kind, kind_of

MOST_NAMES: Final = 200_000
"""Names of one directory that are looked at."""

_MOST_BYTES: Final = 16 << 20
"""Of the paths in one directory: below long ones fewer names are looked at."""
_LONGEST_PATTERN: Final = 1000
_MOST_PATTERNS: Final = 64
_BRACES: Final = re.compile(r"\{([^{}]*,[^{}]*)\}")

Test = Callable[[str], object]
"""A test for a path that is relative to where the walk began."""


class Found(NamedTuple):
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

    def found(self, *, recursive: bool, wanted: Test) -> Iterator[Found]:
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

    def _names(self, path: str, wanted: Test) -> list[tuple[Found, bool]]:
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
                found.append((_looked_at(entry, name, measured=is_wanted), is_wanted))
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


def _looked_at(entry: os.DirEntry[str], path: str, *, measured: bool) -> Found:
    if entry.is_symlink():
        return Found(path, Kind.SYMLINK, -1)
    if entry.is_dir(follow_symlinks=False):
        return Found(path, Kind.DIRECTORY, -1)
    if not measured:
        return Found(path, Kind.FILE, -1)
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:
        return Found(path, Kind.FILE, -1)
    kind = kind_of(status.st_mode)
    return Found(path, kind, status.st_size if kind is Kind.FILE else -1)
