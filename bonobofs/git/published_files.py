"""Check which files a git command may write, and put their content into one file for the server. Runs in the worker.

Content is published if a protected branch has it at the same path now. A removal is published if a protected branch
does not have the path. `returns` lists content that an earlier command of the session replaced at a path; the command
may restore it. The present content of the file must be in the source's repository, so that no change is lost.
"""

from __future__ import annotations

import json
import os
import stat
from hashlib import sha1
from typing import Any, Final

from bonobofs.git.branch_rules import BranchRules
from bonobofs.git.repository import GitRepository
from bonobofs.git.source_refs import EXECUTABLE, FILE, SYMLINK
from bonobofs.system.paths import open_directory_beneath

KEPT: Final = 1
"""Same value as in `fuse.git_grants`, which this package does not import."""
_MODES: Final = (FILE, EXECUTABLE, SYMLINK)
NOT_PUBLISHED: Final = "no protected branch has this content there now"
CHANGED: Final = "the file has changes that no commit has"


class PublishedContent:
    """Tips of the protected branches when the check began, and the file for the content."""

    def __init__(self, repository: GitRepository, rules: BranchRules, buffer: int) -> None:
        """`buffer` is a descriptor of the file that gets the content. The working directory must be the source."""
        self._repository: Final = repository
        self._tips: Final = repository.protected_tips(rules)
        self._buffer: Final = buffer
        self._offsets: Final[dict[str, tuple[int, int]]] = {}
        self._end = 0
        self._root: Final = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def close(self) -> None:
        os.close(self._root)

    def is_published(self, path: str, mode: int, oid: str) -> bool:
        """True if a protected branch has this content at the path. Mode 0 means no file."""
        for tip in self._tips:
            entry = self._repository.entry(tip, os.fsencode(path))
            if (entry is None and mode == 0) or (entry is not None and (entry.mode, entry.oid) == (mode, oid)):
                return True
        return False

    def copy_content(self, oid: str) -> tuple[int, int]:
        """Return offset and size of a blob's content in the file. Write it there the first time."""
        if oid not in self._offsets:
            content = self._repository.bytes_of(oid)
            self._offsets[oid] = self._end, len(content)
            self.write(content)
        return self._offsets[oid]

    def write(self, content: bytes) -> int:
        """Append to the file and return the offset."""
        at = self._end
        view = memoryview(content)
        while view:
            view = view[os.write(self._buffer, view) :]
        self._end += len(content)
        return at

    def before(self, path: str) -> tuple[list[int] | None, int, str]:
        """Return fingerprint, mode and blob id of a file in the source, or (None, 0, "") if missing. Raises OSError."""
        above, _, name = path.rpartition("/")
        try:
            directory = open_directory_beneath(self._root, above)
        except (FileNotFoundError, NotADirectoryError):
            return None, 0, ""
        try:
            st = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISDIR(st.st_mode):
                return None, 0, ""
            mark = [st.st_ino, st.st_size, st.st_mtime_ns, st.st_ctime_ns]
            if stat.S_ISLNK(st.st_mode):
                return mark, SYMLINK, _blob_id(os.fsencode(os.readlink(name, dir_fd=directory)))
            if not stat.S_ISREG(st.st_mode):
                return mark, 0, ""
            with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory), "rb") as file:
                return mark, EXECUTABLE if st.st_mode & 0o100 else FILE, _blob_id(file.read())
        except FileNotFoundError:
            return None, 0, ""
        finally:
            os.close(directory)

    def has(self, oid: str) -> bool:
        """True if the source's repository has the object."""
        return oid in self._repository.raw.odb


def _blob_id(content: bytes) -> str:
    return sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def prepare(repository: GitRepository, rules: BranchRules, descriptor: int, request: dict[str, Any]) -> dict[str, Any]:
    """Check each of `files` ([path, mode, blob id]) and write the content of the permitted ones to the file.

    Returns:
        "refused": {path: reason}; "before": {path: [mode, blob id]} of the present files; "at" and "size": offset and
        bytes of the list for the server in the file.
    """
    content = PublishedContent(repository, rules, descriptor)
    try:
        return _prepare(content, request)
    finally:
        content.close()


def _prepare(content: PublishedContent, request: dict[str, Any]) -> dict[str, Any]:
    refused: dict[str, str] = {}
    replaced: dict[str, tuple[int, str]] = {}
    listed: list[tuple[str, int, int, int, list[int] | None]] = []
    for path, mode, oid in request["files"]:
        try:
            mark, old_mode, old = content.before(path)
        except OSError as error:
            refused[path] = f"the file cannot be read: {error.strerror}"
            continue
        returns = request["returns"].get(path) == [mode, oid]
        if mode != KEPT and not returns and (mode not in (0, *_MODES) or not content.is_published(path, mode, oid)):
            refused[path] = NOT_PUBLISHED
        elif mode != KEPT and mark is not None and not (old and content.has(old)):
            refused[path] = CHANGED
        else:
            offset, size = content.copy_content(oid) if mode in _MODES else (0, 0)
            listed.append((path, mode, offset, size, mark))
            replaced[path] = old_mode, old
    text = json.dumps(listed).encode()
    return {"refused": refused, "before": replaced, "at": content.write(text), "size": len(text)}
