"""Which changes behind a mount nobody admitted.

What another session of the same state directory does is in that session's record: an intent before the change, an
outcome after it. All else is out of band. A burst is judged as a whole, when it falls quiet: one entry a path, and one
entry for many paths below one `.git`, which a single git command touches by the dozen.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.audit.entry import TOUCHES
from bonobofs.audit.temp_cleanup import by_way_of
from bonobofs.audit.trail_file import open_trail, stat_trail
from bonobofs.beads.bd_lock import is_held, lock_path
from bonobofs.companion.index_refresh import IndexRefresh
from bonobofs.errors import GitError
from bonobofs.git.session_repository import find
from bonobofs.ipc.channel import Kind, Line
from bonobofs.state.sessions import Session, lives, load
from bonobofs.system.paths import is_within
from bonobofs.system.watcher_events import BEGAN, GONE, MADE, reachable

_QUIET: Final = 0.25
"""Seconds without another suspect after which a burst is over."""
_LONGEST: Final = 3.0
"""Seconds after which a burst is judged though it goes on."""
_EACH: Final = 200
"""Paths of a burst that have entries of their own; the others are told by their directory."""
_NAMED: Final = 10
"""Names that an entry for many paths gives."""
_SLACK: Final = 1.0
"""Seconds by which a change may come after the outcome that tells of it, or before the burst that shows it."""
_MOST_READ: Final = 16 << 20
_FOREVER: Final = float("inf")
_BEADS: Final = ".beads"
_GIT: Final = ".git/"
_INDEX: Final = ".git/index"


class _Suspect(NamedTuple):
    kinds: int
    size: int
    protected: bool


class Judging:
    """One service of the companion."""

    def __init__(self, line: Line, home: Path, session: str, source: Path) -> None:
        self._line: Final = line
        self._home: Final = home
        self._source: Final = source
        self._records: Final = _Records(home, session, source)
        self.refresh: Final = IndexRefresh(source / _INDEX)
        self._suspects: dict[str, _Suspect] = {}
        self._began = 0.0
        self._began_at = 0.0
        self._last = 0.0

    def due(self, now: float) -> float:
        """Seconds until the burst is judged."""
        if not self._suspects:
            return _FOREVER
        return max(0.0, min(self._last + _QUIET, self._began + _LONGEST) - now)

    def suspect(self, found: list[list[Any]], now: float) -> None:
        """Take what was changed and not through the mount: path, kinds of changes, size, whether it is protected."""
        if not self._suspects:
            self._began, self._began_at = now, time.time()
        self._last = now
        for path, kinds, size, protected in found:
            known = self._suspects.get(path)
            if known is not None:
                kinds = known.kinds | (kinds & ~BEGAN)  # noqa: PLW2901 - with what came before
            self._suspects[path] = _Suspect(kinds, size, protected)

    def judge(self) -> None:
        """Tell the server what of the burst nobody admitted."""
        suspects, self._suspects = self._suspects, {}
        # What came and went has changed nothing.
        left = {path: one for path, one in suspects.items() if not (one.kinds & BEGAN and one.size == -2)}
        # A lock of the index changes nothing; a burst may end while git holds it. What git writes shows as the index.
        left.pop(f"{_INDEX}.lock", None)
        if _INDEX in left and self.refresh.is_refresh():
            del left[_INDEX]
        if not left:
            return
        try:
            admitted = self._records.admitted(self._began_at - _SLACK)
        except OSError:
            admitted = set()  # in doubt nobody has admitted it
        trees = tuple(path for path in admitted if path.endswith("/"))
        if any(_is_of(_BEADS, path) for path in left) and self._issues_were_in_use():
            left = {path: one for path, one in left.items() if not _is_of(_BEADS, path)}
        left = {path: one for path, one in left.items() if path not in admitted and not f"{path}/".startswith(trees)}
        if left:
            self._line.tell_list(Kind.OUT_OF_BAND, _told(left))

    def _issues_were_in_use(self) -> bool:
        """Whether a bd of some session's gate has run since the burst began.

        Also those that only read write in `.beads`, and have no intent; but all of them run under one lock.
        """
        try:
            path = lock_path(self._home, self._source / _BEADS)
            return path.stat().st_mtime >= self._began_at - _SLACK or is_held(path)
        except OSError:
            return False


def _repository_of(source: str) -> Path | None:
    """The git directory that the work trees of the source's repository share; None: the source has no repository."""
    try:
        common = find(Path(source)).common
    except (OSError, GitError):
        return None
    return common if common.is_dir() else None


def _is_of(top: str, path: str) -> bool:
    return is_within(path, top)


def _told(suspects: dict[str, _Suspect]) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[str, bool], list[str]] = {}
    each = 0
    for path, one in suspects.items():
        top = _repository(path)
        if not top:
            each += 1
            top = path if each <= _EACH else path.partition("/")[0]
        groups.setdefault((top, one.protected), []).append(path)
    for (top, protected), paths in groups.items():
        if len(paths) == 1:
            yield {"path": paths[0], "what": _what(suspects[paths[0]]), "protected": protected}
        else:
            yield {
                "path": top,
                "what": f"was changed behind the mount in {len(paths)} places",
                "places": len(paths),
                "names": sorted(paths)[:_NAMED],
                "protected": protected,
            }


def _repository(path: str) -> str:
    """The `.git` that the path lies in; "" where it lies in none."""
    parts = path.split("/")
    return "/".join(parts[: parts.index(".git") + 1]) if ".git" in parts else ""


def _what(one: _Suspect) -> str:
    holds = f", and holds {one.size} bytes" if one.size >= 0 else ""
    if one.size == -2:
        return "was removed behind the mount"
    if one.kinds & (MADE | GONE) == MADE:
        return f"was made behind the mount{holds}"
    return f"was {'replaced' if one.kinds & GONE else 'changed'} behind the mount{holds}"


class _Records:
    """What other sessions have recorded lately about paths of this source."""

    def __init__(self, home: Path, session: str, source: Path) -> None:
        self._home: Final = home
        self._own: Final = f"{session}.jsonl"
        self._source: Final = str(source)
        self._repository: Final = _repository_of(self._source)
        self._sessions: dict[str, Session | None] = {}
        """By trail, the session that it is of; None where that is over, or works elsewhere."""
        self._places: dict[str, int] = {}
        self._open: dict[tuple[str, int], list[str]] = {}
        """By session and number of an intent without outcome, the paths that it concerns."""
        self._ended: dict[str, float] = {}
        """By path, when the last change of it ended."""
        self._moves: dict[tuple[str, str], float] = {}
        """What was renamed, from where to where, and when at the latest. What was changed below went along."""

    def admitted(self, since: float) -> set[str]:
        """The paths of this source that others have changed since then, as their records say.

        One that ends in `/` is all below it.
        """
        directory = self._home / "trails"
        names = {name.removesuffix(".gz") for name in os.listdir(directory)}
        for name in sorted(names - {self._own}):
            if name.endswith(".jsonl"):
                with suppress(FileNotFoundError):  # it was pruned
                    self._look(directory / name, since)
        self._ended = {path: ended for path, ended in self._ended.items() if ended + _SLACK >= since}
        self._moves = {move: ended for move, ended in self._moves.items() if ended + _SLACK >= since}
        found = {*self._ended, *(path for paths in self._open.values() for path in paths)}
        for old, new in self._moves:
            found |= {new + path.removeprefix(old) for path in found if path.startswith(f"{old}/")}
        above = self._source + "/"
        return {reachable(path.removeprefix(above)) for path in found if path.startswith(above)}

    def _look(self, trail: Path, since: float) -> None:
        """Take in what was recorded since the last look."""
        name = trail.name
        session = self._session_of(name)
        if session is None:
            return
        over = not lives(session)
        if not over or stat_trail(trail).st_mtime >= since:
            self._read(name, session.source, trail)
        if over:
            self._sessions[name] = None
            for key in [key for key in self._open if key[0] == name]:
                for path in self._open.pop(key):
                    self._ended[path] = stat_trail(trail).st_mtime

    def _read(self, name: str, source: str, trail: Path) -> None:
        try:
            with open_trail(trail) as stream:
                end = stream.seek(0, os.SEEK_END)
                place = self._places.get(name, 0)
                if end - place > _MOST_READ:
                    place = stream.seek(end - _MOST_READ)
                    place += len(stream.readline())
                stream.seek(place)
                data = stream.read(end - place)
        except OSError:
            return
        whole = data.rfind(b"\n") + 1
        self._places[name] = place + whole
        for line in data[:whole].splitlines():
            self._note(name, source, line)

    def _note(self, name: str, source: str, line: bytes) -> None:
        try:
            entry = json.loads(line)
            kind, details = entry["kind"], entry["details"]
            if kind == "intent" and entry["result"] == "allowed":
                paths = [f"{source}/{path}" for path in _paths(entry["path"], details)]
                # A worktree's session changes the repository that it shares with the main work tree.
                if f"{source}/{_GIT}" in paths and _repository_of(source) == self._repository:
                    paths.append(f"{self._source}/{_GIT}")
                self._open[name, entry["seq"]] = paths
                if "to" in details:
                    self._moves[paths[0], paths[1]] = _FOREVER
            elif kind == "outcome":
                moment = datetime.fromisoformat(entry["timestamp"]).timestamp()
                paths = self._open.pop((name, details["intent"]), [])
                self._ended |= dict.fromkeys(paths, moment)
                if tuple(paths[:2]) in self._moves:
                    self._moves[paths[0], paths[1]] = moment
        except (ValueError, KeyError, TypeError):
            return  # no entry: `audit verify` tells of it

    def _session_of(self, name: str) -> Session | None:
        if name not in self._sessions:
            session = load(self._home, name.removesuffix(".jsonl"))
            if session is None:
                return None  # it is being made
            ours, theirs = f"{self._source}/", f"{session.source}/"
            shares = self._repository is not None and _repository_of(session.source) == self._repository
            related = shares or ours.startswith(theirs) or theirs.startswith(ours)
            self._sessions[name] = session if related else None
        return self._sessions[name]


def _paths(path: str, details: dict[str, Any]) -> Iterator[str]:
    """Every path that an intent concerns."""
    yield path
    for key in ("to", "from"):
        if isinstance(details.get(key), str):
            yield details[key]
    by = by_way_of(path, details)
    if by is not None:
        yield by
    touches = details.get(TOUCHES)
    if isinstance(touches, list):
        yield from (touched for touched in touches if isinstance(touched, str))
