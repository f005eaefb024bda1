"""Index refreshes of git: `git status` rewrites `.git/index` with new file times and the same content."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from bonobofs.errors import GitError
from bonobofs.guards.git.index import NO_STAT, Entry, Index

_MOST: Final = 16 << 20
"""Bytes of the largest index that is compared; changes of a larger one stay out of band."""


class IndexRefresh:
    """Compares the index of a source with the index at the last look."""

    def __init__(self, path: Path) -> None:
        self._path: Final = path
        self._known = self._content()

    def note_index(self, content: bytes) -> None:
        """Take what the session's own git gate has written for the last look."""
        self._known = content if len(content) < _MOST else None

    def is_refresh(self) -> bool:
        """Whether path, mode, object and flags of every entry are those of the last look, which this call replaces."""
        before, self._known = self._known, self._content()
        if before is None or self._known is None:
            return False
        entries = _entries(before)
        return entries is not None and entries == _entries(self._known)

    def _content(self) -> bytes | None:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            return file.read(_MOST) if 0 < os.fstat(descriptor).st_size < _MOST else None


def _entries(content: bytes) -> list[Entry] | None:
    try:
        index = Index.read(content, 0)
    except GitError:
        return None
    return [entry._replace(stat=NO_STAT) for entry in (*index, *index.unmerged)]
