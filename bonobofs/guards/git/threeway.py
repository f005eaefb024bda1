"""Merging trees, as git's own strategy (ort) does it.

libgit2 merges the lines of a file as git does, but finds renames by another measure, and takes no account of conflicts
between the bases of a criss-cross history; so the trees are merged here. What one side renamed is taken to its new name
on all sides first; then each path is merged by itself. Where there are several bases they are merged with each other,
and what conflicts there goes into the base with its markers, so that it conflicts again where neither side settled it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

import pygit2
from pygit2.ffi import C, ffi

from bonobofs.guards.git import renames
from bonobofs.guards.git.modes import FILES, TREE
from bonobofs.guards.git.repository import Blob, Repository

_BINARY_HEAD: Final = 8000
_UNION: Final = 3
_ONE, _OTHER, _STALE = 1, 2, 4
_BOTH: Final = _ONE | _OTHER


class Outcome(NamedTuple):
    """The tree of a merge, and the paths that conflict; the tree means something only where there are none."""

    tree: bytes
    conflicts: frozenset[bytes]


class _Sides(NamedTuple):
    """What the base and each side have of one path."""

    base: Blob | None
    ours: Blob | None
    theirs: Blob | None


def merge_commits(repository: Repository, ours: str, theirs: str) -> Outcome | None:
    """Merge two commits; None where their histories have nothing in common."""
    bases = _bases(repository, ours, theirs)
    if not bases:
        return None
    base = _base_of(repository, bases, 1)
    return _Merge(repository, 0).trees(base, repository.tree_of(ours), repository.tree_of(theirs))


def merge_trees(repository: Repository, base: bytes | None, ours: bytes | None, theirs: bytes | None) -> Outcome:
    """Merge two trees that come from one."""
    return _Merge(repository, 0).trees(base, ours, theirs)


def _bases(repository: Repository, one: str, other: str) -> list[str]:
    """The best common ancestors, the oldest first: those that no other common ancestor comes from."""
    sides = {one: _ONE, other: _OTHER} if one != other else {one: _BOTH}
    dates: dict[str, int] = {}
    parents: dict[str, list[str]] = {}

    def read(oid: str) -> tuple[int, str]:
        if oid not in dates:
            commit = repository.commit(oid)
            dates[oid], parents[oid] = int(commit["committer"].rsplit(" ", 2)[1]), commit.parents
        return -dates[oid], oid

    queue = [read(oid) for oid in sides]
    heapify(queue)
    found: list[str] = []
    while any(not sides[oid] & _STALE for _, oid in queue):
        _, oid = heappop(queue)
        flags = sides[oid]
        if flags & _BOTH == _BOTH and not flags & _STALE:
            found.append(oid)
            flags |= _STALE
        for parent in parents[oid]:
            if sides.get(parent, 0) | flags != sides.get(parent, 0):
                sides[parent] = sides.get(parent, 0) | flags
                heappush(queue, read(parent))
    best = [oid for oid in dict.fromkeys(found) if not _comes_from(repository, oid, found)]
    return sorted(best, key=lambda oid: dates[oid])


def _comes_from(repository: Repository, oid: str, others: Sequence[str]) -> bool:
    return any(other != oid and repository.is_ancestor(oid, other) for other in others)


def _base_of(repository: Repository, bases: Sequence[str], depth: int) -> bytes | None:
    """One tree for several bases: they are merged, each with what came of those before."""
    first, *others = bases
    tree = repository.tree_of(first)
    for other in others:
        below = _bases(repository, first, other)
        base = _base_of(repository, below, depth + 1) if below else None
        tree = _Merge(repository, depth).trees(base, tree, repository.tree_of(other)).tree
    return tree


_Changes = Mapping[bytes, tuple[Blob | None, Blob | None]]


class _Merge:
    """One merge of trees; `depth` is how deep among the bases of bases it is, 0 the one that was asked for."""

    def __init__(self, repository: Repository, depth: int) -> None:
        self._repository: Final = repository
        self._depth: Final = depth
        self._conflicts: Final[set[bytes]] = set()
        self._edits: Final[dict[bytes, Blob | None]] = {}
        self._settled: Final[dict[bytes, Blob | None]] = {}
        """What a path with a conflict of names is, so far as anything is."""

    def trees(self, base: bytes | None, ours: bytes | None, theirs: bytes | None) -> Outcome:
        changes: list[_Changes] = [
            {each.path: (each.old, each.new) for each in self._repository.differences(base, tree)}
            for tree in (ours, theirs)
        ]
        paths = _together(changes)
        had = {path: sides.ours for path, sides in paths.items()}
        self._follow_renames(paths, changes)
        merged = {path: self._path(path, sides) for path, sides in sorted(paths.items()) if path not in self._settled}
        merged.update(self._settled)
        self._edits.update((path, merged.get(path)) for path in had if merged.get(path) != had[path])
        self._find_clashes(ours)
        return Outcome(self._repository.edited(ours, self._edits), frozenset(self._conflicts))

    def _follow_renames(self, paths: dict[bytes, _Sides], changes: list[_Changes]) -> None:
        renamed = [self._renames(changes[side], changes[1 - side]) for side in (0, 1)]
        for side in (0, 1):
            for old, new in sorted(renamed[side].items()):
                self._follow(paths, renamed, side, old, new)
        if not self._depth:
            for side in (0, 1):
                self._follow_directories(changes, renamed[side], side)

    def _renames(self, changed: _Changes, others: _Changes) -> dict[bytes, bytes]:
        gone = {path: old for path, (old, new) in changed.items() if new is None and old is not None}
        come = {path: new for path, (old, new) in changed.items() if old is None and new is not None}
        relevant = gone.keys() & others.keys()
        added = [path for path, (old, new) in others.items() if old is None and new is not None]
        above = {path.rpartition(b"/")[0] for path in added} - {b""}
        relevant |= {path for path in gone if path.rpartition(b"/")[0] in above}
        return renames.find(gone, come, relevant, self._repository.blob) if come else {}

    def _follow(
        self, paths: dict[bytes, _Sides], renamed: list[dict[bytes, bytes]], side: int, old: bytes, new: bytes
    ) -> None:
        """Take what the other side made of a renamed file to its new name."""
        elsewhere = renamed[1 - side].get(old)
        sides = paths.get(old)
        if sides is None or sides.base is None:
            return  # both gave it the same name, and it was followed there
        mine, other, there = paths[new][1 + side], sides[2 - side], paths[new][2 - side]
        if elsewhere is not None:
            if elsewhere != new:
                self._conflicts.update((old, new, elsewhere))
                self._keep_both(paths, sides.base, new, elsewhere, old)
                return
            other = there
        elif other == sides.base:
            return  # only renamed: one path goes, another comes
        elif other is None or there is not None or _kind(other) != _kind(sides.base):
            self._conflicts.add(new)  # deleted there, or another file added, or made something else
            if other is None and there is None:
                self._settled[new] = sides.base
                del paths[old]
            return
        del paths[old]
        paths[new] = _Sides(sides.base, other, mine) if side else _Sides(sides.base, mine, other)

    def _keep_both(self, paths: dict[bytes, _Sides], base: Blob, new: bytes, elsewhere: bytes, old: bytes) -> None:
        """Where sides do not agree on a name, what they made of the content is under both; a base of bases keeps it."""
        mine, other = (next(filter(None, paths[name][1:]), base) for name in (new, elsewhere))
        merged = self._both(new, base, mine, other)
        self._settled[new] = self._settled[elsewhere] = merged
        paths.pop(old, None)

    def _follow_directories(self, changes: list[_Changes], renamed: Mapping[bytes, bytes], side: int) -> None:
        """What the other side adds to a directory that this one renamed: where it belongs, git leaves to a person."""
        moved = _directories(renamed)
        for path, (old, new) in changes[1 - side].items():
            directory, _, name = path.rpartition(b"/")
            if old is None and new is not None and directory in moved and not _remains(changes[side], directory):
                self._conflicts.discard(path)
                self._conflicts.add(moved[directory] + b"/" + name if moved[directory] else name)

    def _path(self, path: bytes, sides: _Sides) -> Blob | None:
        base, ours, theirs = sides
        if theirs in (ours, base):
            return ours
        if ours == base:
            return theirs
        if ours is None or theirs is None:
            self._conflicts.add(path)
            return base  # changed here, deleted there
        return self._both(path, base, ours, theirs)

    def _both(self, path: bytes, base: Blob | None, ours: Blob, theirs: Blob) -> Blob | None:
        """Both changed it, or both added it."""
        if {_kind(ours), _kind(theirs)} != {FILES[0]}:
            self._conflicts.add(path)
            return base
        from_file = base if base is not None and base.mode in FILES else None
        mode, is_clean = _mode(from_file, ours, theirs)
        if ours.oid == theirs.oid or (from_file is not None and theirs.oid == from_file.oid):
            oid = ours.oid
        elif from_file is not None and ours.oid == from_file.oid:
            oid = theirs.oid
        else:
            oid, merged = self._content(path, from_file, ours, theirs)
            is_clean = is_clean and merged
        if not is_clean:
            self._conflicts.add(path)
        return Blob(mode, oid)

    def _content(self, path: bytes, base: Blob | None, ours: Blob, theirs: Blob) -> tuple[bytes, bool]:
        """The blob that both make together, and whether they do not conflict."""
        driver = self._driver(path)
        blobs = [each.oid for each in (base, ours, theirs) if each is not None]
        binary = any(b"\0" in self._repository.blob(oid)[:_BINARY_HEAD] for oid in blobs)
        if driver in (False, "binary") or (binary and driver != "union"):
            return (base.oid if base is not None and self._depth else ours.oid), False
        content, is_clean = self._lines(path, base, ours, theirs, union=driver == "union")
        if not is_clean and not self._depth:
            return ours.oid, False
        return self._repository.write_blob(content), is_clean

    def _driver(self, path: bytes) -> bool | str | None:
        """What the attributes say; a driver of one's own would be a program, and is taken for text."""
        try:
            return self._repository.store.get_attr(path.decode("utf-8", "replace"), "merge")
        except (pygit2.GitError, ValueError, KeyError):
            return None

    def _lines(self, path: bytes, base: Blob | None, ours: Blob, theirs: Blob, *, union: bool) -> tuple[bytes, bool]:
        name = path.decode("utf-8", "surrogateescape")
        kept = []
        for blob in (base, ours, theirs):
            entry = None if blob is None else pygit2.IndexEntry("file", pygit2.Oid(raw=blob.oid), blob.mode)  # type: ignore[arg-type]
            kept.append((ffi.NULL, None) if entry is None else entry._to_c())  # noqa: SLF001 - for bytes, not text
        options = ffi.new("git_merge_file_options *")
        options.version = 1
        options.favor = _UNION if union else 0
        options.marker_size = 7 + 2 * self._depth
        labels = [ffi.new("char[]", text) for text in (b"Temporary merge branch 1", b"Temporary merge branch 2")]
        options.our_label, options.their_label = labels
        result = ffi.new("git_merge_file_result *")
        if C.git_merge_file_from_index(result, self._repository.store._repo, *(each[0] for each in kept), options):  # noqa: SLF001
            raise ValueError(name)
        try:
            return bytes(ffi.buffer(result.ptr, result.len)), bool(result.automergeable)
        finally:
            C.git_merge_file_result_free(result)

    def _find_clashes(self, ours: bytes | None) -> None:
        """Files that have come where the other side has a directory, or the other way round."""
        for path, blob in self._edits.items():
            if blob is None:
                continue
            names = path.split(b"/")
            for depth in range(1, len(names)):
                above = b"/".join(names[:depth])
                if above in self._edits:
                    clash = self._edits[above] is not None
                else:
                    clash = self._repository.lookup(ours, above) is not None
                if clash:
                    self._conflicts.add(above)
            below = self._tree_at(ours, names)
            if below is not None and any(
                self._edits.get(path + b"/" + rest, inner) is not None for rest, inner in self._repository.walk(below)
            ):
                self._conflicts.add(path)

    def _tree_at(self, tree: bytes | None, names: list[bytes]) -> bytes | None:
        for name in names:
            found = self._repository.entries(tree).get(name)
            if found is None or found.mode != TREE:
                return None
            tree = found.oid
        return tree


def _together(changes: Sequence[_Changes]) -> dict[bytes, _Sides]:
    """What base and sides have of each path that some side changed."""
    paths: dict[bytes, _Sides] = {}
    for path in changes[0].keys() | changes[1].keys():
        was = (changes[0].get(path) or changes[1][path])[0]
        ours, theirs = (changes[side][path][1] if path in changes[side] else was for side in (0, 1))
        paths[path] = _Sides(was, ours, theirs)
    return paths


def _remains(changed: _Changes, directory: bytes) -> bool:
    """Whether a side still has something in a directory that it renamed files out of."""
    prefix = directory + b"/"
    return any(new is not None and path.startswith(prefix) for path, (_, new) in changed.items())


def _kind(blob: Blob) -> int:
    return FILES[0] if blob.mode in FILES else blob.mode


def _mode(base: Blob | None, ours: Blob, theirs: Blob) -> tuple[int, bool]:
    if ours.mode == theirs.mode or (base is not None and theirs.mode == base.mode):
        return ours.mode, True
    if base is not None and ours.mode == base.mode:
        return theirs.mode, True
    return ours.mode, False


def _directories(renamed: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
    """Where most of what left a directory went."""
    counts: dict[bytes, dict[bytes, int]] = {}
    for old, new in renamed.items():
        directory, target = old.rpartition(b"/")[0], new.rpartition(b"/")[0]
        if directory and directory != target:
            counts.setdefault(directory, {}).setdefault(target, 0)
            counts[directory][target] += 1
    return {
        directory: max(targets, key=lambda target: targets[target])
        for directory, targets in counts.items()
        if list(targets.values()).count(max(targets.values())) == 1
    }
