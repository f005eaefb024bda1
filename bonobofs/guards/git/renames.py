"""Which files one side of a merge renamed, found as git finds them.

First what has exactly the same content; then files that kept their name in another directory, if three quarters of
them are alike; then what is most alike, from one half on. Empty files count as new ones. How alike two files are is
how much of the one is in the other, in lines (or 64 bytes, where those are longer).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Final

from bonobofs.guards.git.modes import FILES
from bonobofs.guards.git.repository import Blob

FULL: Final = 60000
_LEAST: Final = FULL // 2
_SAME_NAME: Final = _LEAST + (FULL - _LEAST) // 2
_CHUNK: Final = 64
_LIMIT: Final = 7000
"""Beyond so many squared comparisons git looks for exact renames alone."""
_EMPTY: Final = bytes.fromhex("e69de29bb2d1d6434b8b29ae775ad8c2e48c5391")

Read = Callable[[bytes], bytes]


class _Content:
    """A file taken apart."""

    def __init__(self, content: bytes) -> None:
        self.size: Final = len(content)
        self.chunks: Final = _chunks(content)


def find(
    gone: Mapping[bytes, Blob], come: Mapping[bytes, Blob], relevant: Collection[bytes], read: Read
) -> dict[bytes, bytes]:
    """The new name of each file that was renamed. `relevant` are the old names for which it matters."""
    if not relevant:
        return {}
    left = {path: blob for path, blob in gone.items() if blob.oid != _EMPTY}
    free = {path: blob for path, blob in come.items() if blob.oid != _EMPTY}
    found = _exact(left, free)
    _take(found, left, free)
    contents: dict[bytes, _Content] = {}

    def alike(old: bytes, new: bytes) -> int:
        for blob in (left[old], free[new]):
            if blob.oid not in contents:
                contents[blob.oid] = _Content(read(blob.oid))
        return _alike(left[old], free[new], contents)

    same = _by_name(left, free, relevant, alike)
    _take(same, left, free)
    found |= same
    for path in left.keys() - set(relevant):
        del left[path]
    if len(left) * len(free) <= _LIMIT * _LIMIT:
        found |= _most_alike(left, free, alike)
    return found


def _take(found: Mapping[bytes, bytes], left: dict[bytes, Blob], free: dict[bytes, Blob]) -> None:
    for old, new in found.items():
        del left[old], free[new]


def _exact(left: Mapping[bytes, Blob], free: Mapping[bytes, Blob]) -> dict[bytes, bytes]:
    by_oid: dict[bytes, list[bytes]] = {}
    for path in sorted(left):
        by_oid.setdefault(left[path].oid, []).append(path)
    found: dict[bytes, bytes] = {}
    for new in sorted(free):
        blob = free[new]
        olds = [
            old
            for old in by_oid.get(blob.oid, ())
            if old not in found and (left[old].mode == blob.mode or {left[old].mode, blob.mode} <= set(FILES))
        ]
        if olds:
            same_name = [old for old in olds if _base(old) == _base(new)]
            found[(same_name or olds)[0]] = new
    return found


def _by_name(
    left: Mapping[bytes, Blob], free: Mapping[bytes, Blob], relevant: Collection[bytes], alike: Callable[..., int]
) -> dict[bytes, bytes]:
    olds, news = Counter(map(_base, left)), Counter(map(_base, free))
    new_of = {_base(new): new for new in free}
    return {
        old: new_of[_base(old)]
        for old in sorted(left)
        if old in relevant
        and olds[_base(old)] == 1
        and news[_base(old)] == 1
        and alike(old, new_of[_base(old)]) >= _SAME_NAME
    }


def _most_alike(
    left: Mapping[bytes, Blob], free: Mapping[bytes, Blob], alike: Callable[..., int]
) -> dict[bytes, bytes]:
    scores = [
        (score, _base(old) == _base(new), old, new)
        for new in sorted(free)
        for old in sorted(left)
        if (score := alike(old, new)) >= _LEAST
    ]
    found: dict[bytes, bytes] = {}
    taken: set[bytes] = set()
    for _, _, old, new in sorted(scores, key=lambda each: (-each[0], not each[1])):
        if old not in found and new not in taken:
            found[old] = new
            taken.add(new)
    return found


def _alike(old: Blob, new: Blob, contents: Mapping[bytes, _Content]) -> int:
    if old.mode not in FILES or new.mode not in FILES:
        return 0
    was, now = contents[old.oid], contents[new.oid]
    largest, least = max(was.size, now.size), min(was.size, now.size)
    if largest * (FULL - _LEAST) < (largest - least) * FULL:
        return 0
    kept = sum(min(size, now.chunks.get(chunk, 0)) for chunk, size in was.chunks.items())
    return kept * FULL // largest


def _chunks(content: bytes) -> dict[bytes, int]:
    """How many bytes of the file are of each chunk."""
    is_text = b"\0" not in content[:8000]
    found: dict[bytes, int] = {}
    for line in content.split(b"\n"):
        whole = line + b"\n"
        if is_text and whole.endswith(b"\r\n"):
            whole = whole[:-2] + b"\n"
        for at in range(0, len(whole), _CHUNK):
            chunk = whole[at : at + _CHUNK]
            found[chunk] = found.get(chunk, 0) + len(chunk)
    last = content.rpartition(b"\n")[2]
    # What was split at the end has no newline of its own.
    tail = (last + b"\n")[len(last) // _CHUNK * _CHUNK :]
    found[tail] -= len(tail)
    if len(tail) > 1:
        found[tail[:-1]] = found.get(tail[:-1], 0) + len(tail) - 1
    return found


def _base(path: bytes) -> bytes:
    return path.rpartition(b"/")[2]
