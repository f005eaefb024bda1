"""What git commands of the session may take in now although the policy refuses a change of the path."""

from __future__ import annotations

import json
import os
from typing import Final, NamedTuple

from bonobofs.policy.request import Operation, Request, WorkspacePath

GONE: Final = 0
"""Mode of a path that the published tree does not have."""
SYMLINK: Final = 0o120000
EXECUTABLE: Final = 0o100755
KEPT: Final = 1
"""Mode of a path that the role may write, and that `[[keep]]` does not let be removed: git may replace its content."""

FileState = tuple[int, int, int, int]
"""Inode number, size, and the times of modification and change in nanoseconds."""


def file_state(st: os.stat_result) -> FileState:
    """What tells one state of a file from another."""
    return st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns


class Grant(NamedTuple):
    """One path that a command may take in: its content is `size` bytes at `offset` of the file `stage`."""

    number: int
    mode: int
    """That of the published tree."""
    before: FileState | None
    """None: the source has nothing of that name."""
    stage: int
    offset: int
    size: int


class GitGrants:
    """The granted paths. Used by the thread that serves."""

    def __init__(self) -> None:
        self.files: Final[dict[str, Grant]] = {}
        self.taken: Final[set[str]] = set()
        """Granted paths that have their published content."""
        self.hidden: Final[set[str]] = set()
        """Paths that git has removed and not yet made again. The source still has them."""
        self._directories: Final[dict[str, int]] = {}
        """Directories above the granted paths, with the number of the last command that needs them."""
        self._stages: Final[dict[int, int]] = {}
        """The descriptors of the content, by the number of the command."""

    def begin(self, number: int, stage: int, at: int, length: int) -> None:
        """Grant files to the command `number`. `end` closes the file `stage`, which has their content.

        The list of the files is JSON in it, `length` bytes at `at`: path, mode, offset, size, and fingerprint or null.
        """
        self._stages[number] = stage
        for path, mode, offset, size, before in json.loads(os.pread(stage, length, at)):
            self.files[path] = Grant(number, mode, before and tuple(before), stage, offset, size)
            self.taken.discard(path)
            above = path.rpartition("/")[0]
            while above:
                self._directories[above] = number
                above = above.rpartition("/")[0]

    def end(self, number: int) -> list[str]:
        """End the grants of a command and return the paths that it has taken in. Hidden names are shown again."""
        taken = []
        for path, grant in list(self.files.items()):
            if grant.number == number:
                del self.files[path]
                if path in self.taken:
                    self.taken.discard(path)
                    taken.append(path)
                self.hidden.discard(path)
        for above in [above for above, last in self._directories.items() if last == number]:
            del self._directories[above]
        if (stage := self._stages.pop(number, -1)) >= 0:
            os.close(stage)
        return taken

    def end_all(self) -> list[str]:
        """End the grants of all commands; the paths that were taken in."""
        return [path for number in list(self._stages) for path in self.end(number)]

    def admits(self, request: Request, st: os.stat_result | None) -> bool:
        """Whether the request removes a granted file `st`, or makes or removes a directory above a granted path.

        The kernel removes no directory that is not empty.
        """
        if request.operation is Operation.MKDIR or request.operation is Operation.RMDIR:
            return request.path in self._directories
        grant = self.files.get(request.path)
        if grant is None or grant.mode != GONE or st is None or grant.before != file_state(st):
            return False
        self.taken.add(request.path)
        return True

    def hides(self, path: WorkspacePath, st: os.stat_result) -> bool:
        """Whether the removal of this file is one half of its replacement. Its name is then hidden in the mount."""
        grant = self.files.get(path)
        if grant is None or grant.mode == GONE or path in self.taken or path in self.hidden:
            return False
        if grant.before != file_state(st) or (grant.mode == KEPT and st.st_nlink > 1):
            return False
        self.hidden.add(path)
        return True
