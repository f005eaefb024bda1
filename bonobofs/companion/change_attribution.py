"""Attribute external changes: another session's trail explains them, or they are out of band.

A trail has an intent before each change and an outcome after it. A burst of changes is attributed as a whole when it
ends: one entry for each path, and one entry for many paths below one `.git`, where a git command touches dozens.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.audit.entry import AuditEntry, touched_paths
from bonobofs.audit.reader import entries_of, paths_of, with_renames
from bonobofs.audit.temp_cleanup import declared_temporary
from bonobofs.audit.trail_storage import open_trail, stat_trail
from bonobofs.errors import GitError
from bonobofs.git.source_refs import find_git_dirs
from bonobofs.ipc.channel import Channel, MessageKind
from bonobofs.state.sessions import Session, lives, load
from bonobofs.system.paths import STORE, is_within
from bonobofs.system.watcher_events import BEGAN, GONE, MADE, reachable

_QUIET: Final = 0.25
"""Seconds of quiet after which a burst ends."""
_MAX_BURST: Final = 3.0
"""Seconds after which a burst is attributed even if further changes follow."""
_MAX_SINGLE: Final = 200
"""Paths of a burst that get an entry each; the rest are grouped by their top directory."""
_MAX_NAMES: Final = 10
"""Names in the entry of a group."""
_SLACK: Final = 1.0
"""Seconds that a change may come after its outcome, or before the burst that shows it."""
_MAX_READ: Final = 16 << 20
_FOREVER: Final = float("inf")
_ABSENT: Final = -2
_BEADS: Final = ".beads"
_GIT: Final = ".git/"
_INDEX: Final = ".git/index"
_MAX_INDEX: Final = 16 << 20
"""Bytes of the largest git index that is compared; a refresh of a larger one is out of band."""


class _Suspect(NamedTuple):
    kinds: int
    size: int
    """Bytes of a regular file. `_ABSENT`: the path does not exist. -1: it is no regular file."""
    protected: bool


class ChangeAttribution:
    """Collects suspects, and reports to the server those that no session recorded."""

    def __init__(self, channel: Channel, home: Path, session: str, source: Path) -> None:
        self._channel: Final = channel
        self._home: Final = home
        self._source: Final = source
        self._trails: Final = _OtherTrails(home, session, source)
        self.index: Final = GitIndex(source / _INDEX)
        self._suspects: dict[str, _Suspect] = {}
        self._began = 0.0
        self._began_at = 0.0
        self._last = 0.0

    def due(self, now: float) -> float:
        """Seconds until `report` must be called."""
        if not self._suspects:
            return _FOREVER
        return max(0.0, min(self._last + _QUIET, self._began + _MAX_BURST) - now)

    def add_suspects(self, suspects: list[list[Any]], now: float) -> None:
        """Add changes that did not come through the mount: path, kinds, size, whether the path is protected."""
        if not self._suspects:
            self._began, self._began_at = now, time.time()
        self._last = now
        for path, kinds, size, protected in suspects:
            earlier = self._suspects.get(path)
            if earlier is not None:
                kinds = earlier.kinds | (kinds & ~BEGAN)  # noqa: PLW2901 - all kinds of the burst
            self._suspects[path] = _Suspect(kinds, size, protected)

    def report(self) -> None:
        """Send the server the changes of the burst that no session recorded."""
        burst, self._suspects = self._suspects, {}
        # A file that was created and removed within the burst leaves no change.
        suspects = {path: one for path, one in burst.items() if not (one.kinds & BEGAN and one.size == _ABSENT)}
        # git's lock file of the index may still exist when a burst ends. Its content shows when it becomes the index.
        suspects.pop(f"{_INDEX}.lock", None)
        suspects.pop(STORE, None)
        if _INDEX in suspects and self.index.update():
            del suspects[_INDEX]
        if not suspects:
            return
        try:
            recorded = self._trails.changed_since(self._began_at - _SLACK)
        except OSError:
            recorded = set()
        trees = tuple(path for path in recorded if path.endswith("/"))
        if any(is_within(path, _BEADS) for path in suspects) and self._bd_has_run():
            suspects = {path: one for path, one in suspects.items() if not is_within(path, _BEADS)}
        suspects = {
            path: one for path, one in suspects.items() if path not in recorded and not f"{path}/".startswith(trees)
        }
        if suspects:
            self._channel.send_list(MessageKind.OUT_OF_BAND, _differences(suspects))

    def _bd_has_run(self) -> bool:
        """Whether the bd of some session has run since the burst began.

        A bd that only reads also writes in `.beads`, without an intent. Every bd runs under one lock.
        """
        from bonobofs.beads.bd_runner import is_held, lock_path  # noqa: PLC0415 - most sources have no issues

        try:
            path = lock_path(self._home, self._source / _BEADS)
            return path.stat().st_mtime >= self._began_at - _SLACK or is_held(path)
        except OSError:
            return False


class GitIndex:
    """The git index of a source. `git status` rewrites it with new stat data and the same entries."""

    def __init__(self, path: Path) -> None:
        self._path: Final = path
        self._content = self._read()

    def update(self) -> bool:
        """Read the index. Return whether all entries have the mode, object, flags and path of the previous read."""
        before, self._content = self._content, self._read()
        if before is None or self._content is None:
            return False
        entries = _index_entries(before)
        return entries is not None and entries == _index_entries(self._content)

    def _read(self) -> bytes | None:
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        with os.fdopen(fd, "rb") as file:
            return file.read(_MAX_INDEX) if 0 < os.fstat(fd).st_size < _MAX_INDEX else None


def _index_entries(content: bytes) -> list[tuple[bytes, bytes]] | None:
    """Return mode, and object id with flags and path, of each entry of a SHA-1 index. None: it cannot be parsed."""
    entries = []
    try:
        signature, version, count = struct.unpack_from(">4sII", content)
        start = 12
        for _ in range(count):
            name = start + (64 if content[start + 60] & 0x40 else 62)  # with the extended flags
            while version == 4 and content[name] & 0x80:
                name += 1  # version 4: the length of the prefix shared with the entry before
            end = content.index(b"\0", name + (version == 4))
            entries.append((content[start + 24 : start + 28], content[start + 40 : end]))
            start = end + 1 if version == 4 else start + ((end - start + 8) & ~7)
    except (struct.error, IndexError, ValueError):
        return None
    return entries if signature == b"DIRC" else None


def _differences(suspects: dict[str, _Suspect]) -> Iterator[dict[str, Any]]:
    """Yield the elements of OUT_OF_BAND."""
    groups: dict[tuple[str, bool], list[str]] = {}
    singles = 0
    for path, suspect in suspects.items():
        top = _enclosing_git(path)
        if not top:
            singles += 1
            top = path if singles <= _MAX_SINGLE else path.partition("/")[0]
        groups.setdefault((top, suspect.protected), []).append(path)
    for (top, protected), paths in groups.items():
        if len(paths) == 1:
            yield {"path": paths[0], "what": _description(suspects[paths[0]]), "protected": protected}
        else:
            yield {
                "path": top,
                "what": f"was changed externally in {len(paths)} places",
                "places": len(paths),
                "names": sorted(paths)[:_MAX_NAMES],
                "protected": protected,
            }


def _enclosing_git(path: str) -> str:
    """Return the `.git` that contains the path, or ""."""
    parts = path.split("/")
    return "/".join(parts[: parts.index(".git") + 1]) if ".git" in parts else ""


def _description(suspect: _Suspect) -> str:
    size = f", and has {suspect.size} bytes" if suspect.size >= 0 else ""
    if suspect.size == _ABSENT:
        return "was removed externally"
    if suspect.kinds & (MADE | GONE) == MADE:
        return f"was created externally{size}"
    return f"was {'replaced' if suspect.kinds & GONE else 'changed'} externally{size}"


def _shared_git_dir(source: str) -> Path | None:
    """Return the git directory that all work trees of the source's repository share; None without a repository."""
    try:
        common = find_git_dirs(Path(source)).common
    except (OSError, GitError):
        return None
    return common if common.is_dir() else None


class _OtherTrails:
    """Recent changes of other sessions in this source, from their trails. Paths are absolute."""

    def __init__(self, home: Path, session: str, source: Path) -> None:
        self._home: Final = home
        self._own: Final = f"{session}.jsonl"
        self._source: Final = str(source)
        self._git_dir: Final = _shared_git_dir(self._source)
        self._sessions: dict[str, Session | None] = {}
        """By name of the trail; None: the session has ended, or its source is unrelated."""
        self._offsets: dict[str, int] = {}
        self._open: dict[tuple[str, int], list[str]] = {}
        """By trail and number of an intent without outcome, the paths of the change."""
        self._ended: dict[str, float] = {}
        """By path, the time of the last outcome."""
        self._renames: dict[tuple[str, str], float] = {}
        """By old and new path, the time of the outcome. Changes below the old path are now below the new one."""

    def changed_since(self, since: float) -> set[str]:
        """Return the paths, relative to this source, that other sessions have changed since then.

        A path that ends in `/` means everything below it.
        """
        directory = self._home / "trails"
        names = {name.removesuffix(".gz") for name in os.listdir(directory)}
        for name in sorted(names - {self._own}):
            if name.endswith(".jsonl"):
                with suppress(FileNotFoundError):  # pruned
                    self._update(directory / name, since)
        self._ended = {path: ended for path, ended in self._ended.items() if ended + _SLACK >= since}
        self._renames = {rename: ended for rename, ended in self._renames.items() if ended + _SLACK >= since}
        changed = {*self._ended, *(path for paths in self._open.values() for path in paths)}
        changed = with_renames(changed, self._renames)
        above = self._source + "/"
        return {reachable(path.removeprefix(above)) for path in changed if path.startswith(above)}

    def _update(self, trail: Path, since: float) -> None:
        """Read the new entries of a trail."""
        name = trail.name
        session = self._session_of(name)
        if session is None:
            return
        has_ended = not lives(session)
        if not has_ended or stat_trail(trail).st_mtime >= since:
            self._read(name, session.source, trail)
        if has_ended:
            self._sessions[name] = None
            for key in [key for key in self._open if key[0] == name]:
                for path in self._open.pop(key):
                    self._ended[path] = stat_trail(trail).st_mtime

    def _read(self, name: str, source: str, trail: Path) -> None:
        try:
            with open_trail(trail) as stream:
                end = stream.seek(0, os.SEEK_END)
                offset = self._offsets.get(name, 0)
                if end - offset > _MAX_READ:
                    offset = stream.seek(end - _MAX_READ)
                    offset += len(stream.readline())
                stream.seek(offset)
                for line, entry in entries_of(stream, trail.stem):
                    offset += len(line)
                    self._add_entry(name, source, entry)
                    if offset >= end:
                        break
        except OSError:
            return
        self._offsets[name] = offset

    def _add_entry(self, name: str, source: str, entry: AuditEntry) -> None:
        details = entry.details
        if entry.kind == "intent" and entry.result == "allowed":
            paths = [f"{source}/{path}" for path in _paths(entry)]
            # A worktree's session changes the repository that it shares with the main work tree.
            if f"{source}/{_GIT}" in paths and _shared_git_dir(source) == self._git_dir:
                paths.append(f"{self._source}/{_GIT}")
            self._open[name, entry.seq] = paths
            if isinstance(details.get("to"), str):
                self._renames[paths[0], paths[1]] = _FOREVER
        elif entry.kind == "outcome" and isinstance(intent := details.get("intent"), int):
            moment = entry.timestamp.timestamp()
            paths = self._open.pop((name, intent), [])
            self._ended |= dict.fromkeys(paths, moment)
            if tuple(paths[:2]) in self._renames:
                self._renames[paths[0], paths[1]] = moment

    def _session_of(self, name: str) -> Session | None:
        if name not in self._sessions:
            session = load(self._home, name.removesuffix(".jsonl"))
            if session is None:
                return None  # `mount` has not yet saved it
            ours, theirs = f"{self._source}/", f"{session.source}/"
            shares_git = self._git_dir is not None and _shared_git_dir(session.source) == self._git_dir
            is_related = shares_git or ours.startswith(theirs) or theirs.startswith(ours)
            self._sessions[name] = session if is_related else None
        return self._sessions[name]


def _paths(entry: AuditEntry) -> list[str]:
    """Return every path that an intent names."""
    temporary = declared_temporary(entry.path, entry.details)
    return [*paths_of(entry), *([temporary] if temporary is not None else []), *touched_paths(entry.details)]
