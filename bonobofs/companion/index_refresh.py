"""Index refreshes of git: `git status` rewrites `.git/index` with new file times and the same content."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Final

_MOST: Final = 16 << 20
"""Bytes of the largest index that is compared; changes of a larger one stay out of band."""


class IndexRefresh:
    """Compares the index of a source with the index at the last look."""

    def __init__(self, path: Path) -> None:
        self._path: Final = path
        self._known = self._content()

    def note_index(self) -> None:
        """Look at the index, which a publication of the session may have written."""
        self._known = self._content()

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


def _entries(content: bytes) -> list[tuple[bytes, bytes]] | None:
    """Of each entry of an index of SHA-1, the mode, and the object id, flags and path as they are stored."""
    found = []
    try:
        signature, version, count = struct.unpack_from(">4sII", content)
        at = 12
        for _ in range(count):
            name = at + (64 if content[at + 60] & 0x40 else 62)  # with the extended flags
            while version == 4 and content[name] & 0x80:
                name += 1  # the length that the path shares with the one before
            end = content.index(b"\0", name + (version == 4))
            found.append((content[at + 24 : at + 28], content[at + 40 : end]))
            at = end + 1 if version == 4 else at + ((end - at + 8) & ~7)
    except (struct.error, IndexError, ValueError):
        return None
    return found if signature == b"DIRC" else None
