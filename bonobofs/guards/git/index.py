"""The index of a repository: what it holds, read from its file and written to one, as git does.

Written here, and not by libgit2, for two reasons: what git keeps of a file (its times, inode, size) goes in, so
that a plain `git status` has nothing to look at again, and the file is made, locked and placed at our own time.

What is kept of the extensions: TREE, which names the trees of directories that have not changed. The others are caches
that git makes anew (UNTR, FSMN, EOIE, IEOT) or notes that lapse with the next change (REUC). An index that is split or
sparse cannot be read without its other half, and is refused.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from hashlib import sha1
from typing import Final, NamedTuple

from bonobofs.errors import GitError
from bonobofs.guards.git.modes import TREE

_HEADER: Final = struct.Struct(">4sII")
_FIXED: Final = struct.Struct(">10I20sH")
_MORE: Final = struct.Struct(">H")
_SUM: Final = 20
_NAME_MASK: Final = 0xFFF
_STAGE_SHIFT: Final = 12
_EXTENDED: Final = 0x4000
_ASSUME_VALID: Final = 0x8000
_SKIP_WORKTREE: Final = 0x4000
_INTENT_TO_ADD: Final = 0x2000
_EXTENDED_HIGH: Final = _EXTENDED >> 8
_STAGES: Final = 0x3000 >> 8
_TIME: Final = struct.Struct(">II")
_MTIME: Final = slice(8, 16)
_SIZE: Final = slice(36, 40)
_FLAGS: Final = 60
"""Where the flags of an entry begin."""
_LONG: Final = _FIXED.size + _MORE.size
_U32: Final = 0xFFFFFFFF

Stat = tuple[int, int, int, int, int, int, int, int, int]
"""ctime, its nanoseconds, mtime, its nanoseconds, device, inode, owner, group, size; each of 32 bits, as git has it."""

NO_STAT: Final[Stat] = (0,) * 9
"""Of a file that was not looked at: git compares its content."""


class Entry(NamedTuple):
    """One path as the index has it."""

    path: bytes
    mode: int
    oid: bytes
    stat: Stat = NO_STAT
    stage: int = 0
    """0; 1, 2 and 3 are the sides of a conflict."""
    assume_valid: bool = False
    more: int = 0
    """The flags of version 3: skip-worktree, intent-to-add."""

    @property
    def skips_worktree(self) -> bool:
        """The file is not meant to be there (sparse checkout)."""
        return bool(self.more & _SKIP_WORKTREE)

    @property
    def is_only_intended(self) -> bool:
        """`git add -N`: the path is known, and its content is not."""
        return bool(self.more & _INTENT_TO_ADD)


def stat_of(status: os.stat_result) -> Stat:
    """What git keeps of a file."""
    return (
        status.st_ctime_ns // 1_000_000_000 & _U32,
        status.st_ctime_ns % 1_000_000_000,
        status.st_mtime_ns // 1_000_000_000 & _U32,
        status.st_mtime_ns % 1_000_000_000,
        status.st_dev & _U32,
        status.st_ino & _U32,
        status.st_uid & _U32,
        status.st_gid & _U32,
        status.st_size & _U32,
    )


class _Node:
    """A directory of which the tree is known (count of its entries, tree), or is not (-1)."""

    __slots__ = ("below", "count", "oid")

    def __init__(self, count: int = -1, oid: bytes = b"") -> None:
        self.count = count
        self.oid = oid
        self.below: dict[bytes, _Node] = {}


class Entries(MutableMapping[bytes, Entry]):
    """Entries by path, each taken apart when it is asked for: of ten thousand a commit touches few."""

    def __init__(self) -> None:
        self._kept: Final[dict[bytes, Entry | bytes]] = {}
        """What was read stays as it stands in the file, up to the path."""

    def keep(self, path: bytes, raw: bytes) -> None:
        """An entry as it stands in the file."""
        self._kept[path] = raw

    def raw(self, path: bytes) -> bytes | None:
        """An entry as it stood in the file, if it was not replaced."""
        kept = self._kept[path]
        return kept if isinstance(kept, bytes) else None

    def __getitem__(self, path: bytes) -> Entry:
        kept = self._kept[path]
        return _taken_apart(path, kept) if isinstance(kept, bytes) else kept

    def __setitem__(self, path: bytes, entry: Entry) -> None:
        self._kept[path] = entry

    def __delitem__(self, path: bytes) -> None:
        del self._kept[path]

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, path: object) -> bool:
        return path in self._kept


class Index:
    """What is staged. Paths are bytes, as git keeps them."""

    def __init__(self, version: int = 2) -> None:
        """An empty one, as in a repository in which nothing was ever staged."""
        self.entries: Final = Entries()
        self.unmerged: Final[list[Entry]] = []
        self._version = version
        self._top = _Node()
        self._fresh: Final[set[bytes]] = set()
        """What was looked at after the index was read."""
        self._written_ns = 0
        """When the file was written from which this was read: files as young as that may have changed unseen."""

    @classmethod
    def read(cls, data: bytes, written_ns: int) -> Index:
        """From the content of an index file and its mtime. GitError: unsupported, or broken."""
        try:
            return cls._read(data, written_ns)
        except (struct.error, IndexError, ValueError) as error:
            raise GitError("the index is damaged; `git status` says how", kind="unsupported") from error

    @classmethod
    def _read(cls, data: bytes, written_ns: int) -> Index:
        signature, version, count = _HEADER.unpack_from(data)
        if signature != b"DIRC" or version not in (2, 3, 4):
            raise GitError(f"the index has version {version}, which is not known here", kind="unsupported")
        total = data[-_SUM:]
        if total != bytes(_SUM) and sha1(data[:-_SUM], usedforsecurity=False).digest() != total:
            raise GitError("the index is damaged: its checksum is wrong", kind="unsupported")
        index = cls(version)
        index._written_ns = written_ns
        at, previous = _HEADER.size, b""
        for _ in range(count):
            previous, raw, at = _entry_at(data, at, version, previous)
            if raw[_FLAGS] & _STAGES:
                index.unmerged.append(_taken_apart(previous, raw))
            else:
                index.entries.keep(previous, raw)
        index._read_extensions(data, at)
        return index

    def _read_extensions(self, data: bytes, at: int) -> None:
        while at < len(data) - _SUM:
            signature, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "big")
            body = data[at + 8 : at + 8 + size]
            at += 8 + size
            if signature == b"TREE":
                self._top = _nodes(body)
            elif not b"A" <= signature[:1] <= b"Z":
                kind = {b"link": "split", b"sdir": "sparse"}.get(signature, "of an unknown kind")
                advice = "run `git update-index --no-split-index` or `git sparse-checkout reapply --no-sparse-index`"
                raise GitError(f"the index is {kind}, which the gate cannot read; {advice}", kind="unsupported")

    def update(self, edits: Mapping[bytes, Entry | None]) -> None:
        """Stage anew, or no more where it is None, conflicts included.

        What is in the way of a new path (a file where a directory is needed, or the other way round) is staged no more.
        """
        added = {path for path, entry in edits.items() if entry is not None and path not in self.entries}
        for path, entry in edits.items():
            if entry is None:
                self.entries.pop(path, None)
            else:
                self.entries[path] = entry
                self._fresh.add(path)
            self._touch(path)
        if self.unmerged:
            self.unmerged[:] = [entry for entry in self.unmerged if entry.path not in edits]
        if not added:
            return
        needed = {above for path in added for above in _above(path)}
        for path in [path for path in self.entries if path in needed or not added.isdisjoint(_above(path))]:
            del self.entries[path]
            self._touch(path)

    def _touch(self, path: bytes) -> None:
        """The trees of the directories above are known no more."""
        node = self._top
        node.count = -1
        for name in path.split(b"/")[:-1]:
            below = node.below.get(name)
            if below is None:
                return
            node = below
            node.count = -1

    def __iter__(self) -> Iterator[Entry]:
        """What is staged without a conflict, in git's order."""
        return (self.entries[path] for path in sorted(self.entries))

    def write_tree(self, write: Callable[[bytes], bytes]) -> bytes:
        """The tree of what is staged; `write` takes a tree's content and gives its id."""
        entries = list(self)
        oid, taken = _write(entries, 0, b"", self._top, write)
        assert taken == len(entries)
        return oid

    def serialize(self) -> bytes:
        """The content of an index file."""
        more = any(entry.more for entry in map(self.entries.__getitem__, self._fresh & self.entries.keys()))
        version = 3 if self._version == 2 and more else self._version
        young = _TIME.pack(*divmod(self._written_ns, 1_000_000_000)) if self._written_ns else b""
        out: list[bytes] = []
        previous = b""
        for path in sorted(self.entries):
            raw = self.entries.raw(path)
            if raw is None:
                raw = _put_together(self.entries[path])
            if young and path not in self._fresh and raw[_MTIME] >= young:
                # The file was changed, as it was looked at, no earlier than the index was written that says so. Were
                # its time left beside a younger index, git would take it for unchanged. With no size it looks.
                raw = raw[: _SIZE.start] + bytes(4) + raw[_SIZE.stop :]
            out.append(_packed(path, raw, version, previous))
            previous = path
        if self.unmerged:
            out = self._with_unmerged(version)
        out.insert(0, _HEADER.pack(b"DIRC", version, len(out)))
        if self.entries:
            tree = b"".join(_serialized(b"", self._top))
            out.append(b"TREE" + len(tree).to_bytes(4, "big") + tree)
        body = b"".join(out)
        return body + sha1(body, usedforsecurity=False).digest()

    def _with_unmerged(self, version: int) -> list[bytes]:
        """All entries where there are conflicts: git looks at every file then, whatever its times."""
        everything = sorted([*self.entries.values(), *self.unmerged], key=lambda entry: (entry.path, entry.stage))
        out: list[bytes] = []
        previous = b""
        for entry in everything:
            out.append(_packed(entry.path, _put_together(entry._replace(stat=NO_STAT)), version, previous))
            previous = entry.path
        return out


def _above(path: bytes) -> Iterator[bytes]:
    """The directories that a path lies in."""
    at = path.find(b"/")
    while at >= 0:
        yield path[:at]
        at = path.find(b"/", at + 1)


def _entry_at(data: bytes, at: int, version: int, previous: bytes) -> tuple[bytes, bytes, int]:
    """The path of an entry, what stands in the file before it, and where the next one begins."""
    high = data[at + _FLAGS]
    start = at + (_LONG if high & _EXTENDED_HIGH else _FIXED.size)
    if version == 4:
        strip, begin = _varint(data, start)
        end = data.index(b"\0", begin)
        return previous[: len(previous) - strip] + data[begin:end], data[at:start], end + 1
    length = (high << 8 | data[at + _FLAGS + 1]) & _NAME_MASK
    end = start + length if length < _NAME_MASK else data.index(b"\0", start)
    return data[start:end], data[at:start], at + ((end - at + 8) & ~7)


def _taken_apart(path: bytes, raw: bytes) -> Entry:
    fields = _FIXED.unpack_from(raw)
    flags = fields[11]
    more = _MORE.unpack_from(raw, _FIXED.size)[0] if flags & _EXTENDED else 0
    stat: Stat = (*fields[:6], *fields[7:10])
    return Entry(path, fields[6], fields[10], stat, flags >> _STAGE_SHIFT & 3, bool(flags & _ASSUME_VALID), more)


def _put_together(entry: Entry) -> bytes:
    flags = min(len(entry.path), _NAME_MASK) | entry.stage << _STAGE_SHIFT
    flags |= (_ASSUME_VALID if entry.assume_valid else 0) | (_EXTENDED if entry.more else 0)
    fixed = _FIXED.pack(*entry.stat[:6], entry.mode, *entry.stat[6:], entry.oid, flags)
    return fixed + _MORE.pack(entry.more) if entry.more else fixed


def _packed(path: bytes, raw: bytes, version: int, previous: bytes) -> bytes:
    if version == 4:
        shared = _shared(previous, path)
        return raw + _as_varint(len(previous) - shared) + path[shared:] + b"\0"
    size = len(raw) + len(path)
    return raw + path + bytes((size + 8 & ~7) - size)


def _shared(one: bytes, other: bytes) -> int:
    """How many bytes both begin with."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at] & 0x7F
    while data[at] & 0x80:
        at += 1
        value = (value + 1 << 7) + (data[at] & 0x7F)
    return value, at + 1


def _as_varint(value: int) -> bytes:
    out = [value & 0x7F]
    while value := value >> 7:
        value -= 1
        out.append(0x80 | value & 0x7F)
    return bytes(reversed(out))


def _nodes(body: bytes) -> _Node:
    node, _, _ = _node_at(body, 0)
    return node


def _node_at(body: bytes, at: int) -> tuple[_Node, bytes, int]:
    end = body.index(b"\0", at)
    name, at = body[at:end], end + 1
    end = body.index(b"\n", at)
    count, children = map(int, body[at:end].split(b" "))
    at = end + 1
    node = _Node(count)
    if count >= 0:
        node.oid, at = body[at : at + 20], at + 20
    for _ in range(children):
        below, called, at = _node_at(body, at)
        node.below[called] = below
    return node, name, at


def _serialized(name: bytes, node: _Node) -> Iterator[bytes]:
    yield b"%s\0%d %d\n%s" % (name, node.count, len(node.below), node.oid if node.count >= 0 else b"")
    for below in sorted(node.below, key=lambda each: (len(each), each)):
        yield from _serialized(below, node.below[below])


def _write(
    entries: list[Entry], at: int, prefix: bytes, node: _Node, write: Callable[[bytes], bytes]
) -> tuple[bytes, int]:
    """The tree of the entries from `at` on that lie below `prefix`, and the place after them."""
    if node.count >= 0:
        return node.oid, at + node.count
    lines: list[bytes] = []
    begin, depth, known, whole = at, len(prefix), set(), True
    while at < len(entries) and entries[at].path.startswith(prefix):
        entry = entries[at]
        name, slash, _ = entry.path[depth:].partition(b"/")
        if slash:
            below = node.below.setdefault(name, _Node())
            known.add(name)
            oid, at = _write(entries, at, prefix + name + b"/", below, write)
            whole = whole and below.count >= 0
            if below.count != 0:
                lines.append(b"%o %s\0%s" % (TREE, name, oid))
        else:
            if entry.is_only_intended:
                whole = False
            else:
                lines.append(b"%o %s\0%s" % (entry.mode, name, entry.oid))
            at += 1
    for gone in node.below.keys() - known:
        del node.below[gone]
    node.oid = write(b"".join(lines))
    node.count = at - begin if whole else -1
    return node.oid, at
