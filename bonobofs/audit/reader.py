"""Read the entries of trails: in order, merged by time, the last ones, new ones; export them.

A trail may have a gigabyte, so all functions stream. A damaged line becomes an entry with the operation `unreadable`,
so that no query hides the damage. `audit.verify` reports the kind of damage.
"""

from __future__ import annotations

import heapq
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import islice, takewhile
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, Self, TextIO

from bonobofs.audit.entry import FIELDS, AuditEntry, instant, other_paths
from bonobofs.audit.trail_storage import open_trail
from bonobofs.audit.writer import CLOSE, Trail
from bonobofs.errors import TrailError, UsageError
from bonobofs.system.terminal import escape

LONGEST_LINE: Final = 16 * 1024 * 1024
"""Maximum number of bytes of a line. A longer line is split: garbage without a newline must not fill the memory."""

UNREADABLE: Final = "unreadable"

EPOCH: Final = datetime.fromtimestamp(0, UTC)

_BLOCK = 64 * 1024
_TOGETHER = 256
"""Number of entries that `read` reads before it closes the file again."""
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def trails_in(directory: Path) -> list[Path]:
    """Return the paths of all trails of a directory, sorted. A compressed trail has the path of its plain form."""
    return sorted({*directory.glob("*.jsonl"), *(path.with_suffix("") for path in directory.glob("*.jsonl.gz"))})


def read(trail: Path) -> Iterator[AuditEntry]:
    """Yield the entries of one trail. Omits an incomplete last line, because its write may be in progress.

    Closes the file between batches of entries: a merge may read more trails than there are descriptors. TrailError.
    """
    offset, moment, found = 0, EPOCH, _TOGETHER
    while found == _TOGETHER:
        try:
            with open_trail(trail) as stream:
                stream.seek(offset)
                entries = [entry for _, entry in islice(entries_of(stream, trail.stem, moment), _TOGETHER)]
                offset = stream.tell()
        except OSError as error:
            raise TrailError(f"the trail {trail} cannot be read: {error.strerror}") from error
        yield from entries
        found = len(entries)
        moment = entries[-1].timestamp if entries else moment


def merged(trails: Iterable[Path]) -> Iterator[AuditEntry]:
    """Yield the entries of several trails by time. Each trail keeps its order, even if the clock was set back.

    Only trails whose times overlap are read at the same time. TrailError.
    """
    waiting = deque(sorted((_began(trail), number, trail) for number, trail in enumerate(trails)))
    heap: list[tuple[datetime, int, AuditEntry, Iterator[AuditEntry]]] = []
    while waiting or heap:
        if waiting and (not heap or waiting[0][0] <= heap[0][0]):
            moment, number, trail = waiting.popleft()
            entries = read(trail)
        else:
            moment, number, entry, entries = heapq.heappop(heap)
            yield entry
        following = next(entries, None)
        if following is not None:
            heapq.heappush(heap, (max(moment, following.timestamp), number, following, entries))


def last(trail: Path, count: int) -> list[AuditEntry]:
    """Return the last `count` entries of a trail, oldest first. Reads only the end of the file. TrailError."""
    if count <= 0:
        return []
    try:
        with open_trail(trail) as stream:
            start = stream.seek(0, os.SEEK_END)
            newlines = 0
            while start > 0 and newlines <= count:
                step = min(_BLOCK, start)
                start = stream.seek(start - step)
                newlines += stream.read(step).count(b"\n")
            stream.seek(start)
            if start > 0:
                stream.readline()
            return [entry for _, entry in deque(entries_of(stream, trail.stem), maxlen=count)]
    except OSError as error:
        raise TrailError(f"the trail {trail} cannot be read: {error.strerror}") from error


def is_closed(trail: Path) -> bool:
    """True if a trail ends with its closing entry. Reads only the end of the file. TrailError."""
    return any((entry.kind, entry.operation) == ("event", CLOSE) for entry in last(trail, 1))


class Follower:
    """Follows the trails of a directory, for `audit tail -f`."""

    def __init__(self, directory: Path) -> None:
        """Start at the present end of every trail."""
        self._directory = directory
        self._offsets = {trail: _whole_lines_end(trail) for trail in trails_in(directory)}

    def poll(self) -> list[AuditEntry]:
        """Return the entries since the last call, by time. New trails are read from the beginning."""
        found: list[AuditEntry] = []
        for trail in trails_in(self._directory):
            offset = self._offsets.get(trail, 0)
            for line, entry in entries_from(trail, offset, found[-1].timestamp if found else EPOCH):
                offset += len(line)
                found.append(entry)
            self._offsets[trail] = offset
        return sorted(found, key=lambda entry: entry.timestamp)


class RecordedChange(NamedTuple):
    """An entry, and the outcome if the entry is an intent that has one."""

    entry: AuditEntry
    outcome: AuditEntry | None = None

    @property
    def result(self) -> str:
        """`allowed`, `denied` or `error`: the result of the outcome if there is one."""
        return self.outcome.result if self.outcome is not None else self.entry.result


def since(text: str, now: datetime) -> datetime:
    """Parse a duration before `now` (`10m`, `2h`, `1d`) or a time in ISO 8601, local if it has no zone. UsageError."""
    short = re.fullmatch(r"(\d{1,6})([smhdw])", text.strip())
    try:
        if short is not None:
            return now - timedelta(**{_UNITS[short[2]]: int(short[1])})
        return datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        raise UsageError(f"{escape(text)!r} is not a time; give 30s, 10m, 2h, 1d, 1w or 2026-01-31T12:00") from None


def paths_of(entry: AuditEntry) -> list[str]:
    """Return the path of an entry, and its other paths."""
    return [entry.path, *other_paths(entry.details)]


def export_jsonl(entries: Iterable[AuditEntry], out: TextIO) -> None:
    """Write the entries as the lines of their trails: one JSON object a line."""
    out.writelines(f"{entry.to_json()}\n" for entry in entries)


def export_csv(entries: Iterable[AuditEntry], out: TextIO) -> None:
    """Write CSV (RFC 4180) with a header; `details` is JSON. The caller opens `out` with newline="".

    `escape` escapes each text. An apostrophe precedes a text that a spreadsheet would run as a formula. The JSON export
    has the exact text.
    """
    import csv  # noqa: PLC0415 - only an export needs it

    writer = csv.writer(out)
    writer.writerow(FIELDS)
    for entry in entries:
        writer.writerow([_cell(getattr(entry, name)) for name in FIELDS])


def _cell(value: object) -> str:
    if isinstance(value, datetime):
        return instant(value)
    if isinstance(value, dict):
        return json.dumps(value, separators=(",", ":"))
    if value is None or isinstance(value, int):
        return "" if value is None else str(value)
    text = escape(str(value))
    return f"'{text}" if text.startswith(_FORMULA) else text


def lines_of(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of an open trail with their newlines. Only the last line, or one of LONGEST_LINE, can lack it."""
    return iter(lambda: stream.readline(LONGEST_LINE), b"")


def whole_lines(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of an open trail as `lines_of`. Omits an incomplete last line."""
    return takewhile(lambda line: line.endswith(b"\n") or len(line) == LONGEST_LINE, lines_of(stream))


def entries_of(stream: BinaryIO, session: str, moment: datetime = EPOCH) -> Iterator[tuple[bytes, AuditEntry]]:
    """Yield the lines and entries of an open trail from its position on. Omits an incomplete last line.

    An unreadable line gets the time of the entry before it; `moment` is the time for the first line.
    """
    for line in whole_lines(stream):
        entry = _parse(line, session, moment)
        moment = entry.timestamp
        yield line, entry


def entries_from(trail: Path, offset: int, moment: datetime = EPOCH) -> Iterator[tuple[bytes, AuditEntry]]:
    """Yield the lines and entries of a trail from an offset on, as `entries_of`. OSError."""
    with open_trail(trail) as stream:
        stream.seek(offset)
        yield from entries_of(stream, trail.stem, moment)


def _parse(line: bytes, session: str, moment: datetime) -> AuditEntry:
    try:
        entry = AuditEntry.from_line(line)
    except TrailError as error:
        details = {"line": line[:200].decode("ascii", "backslashreplace")}
        return AuditEntry(moment, "", UNREADABLE, "", details, "error", str(error), session=session)
    if entry.timestamp.tzinfo is None:
        return entry._replace(timestamp=entry.timestamp.replace(tzinfo=UTC))
    return entry


def _began(trail: Path) -> datetime:
    entry = next(read(trail), None)
    return entry.timestamp if entry is not None else EPOCH


def _whole_lines_end(trail: Path) -> int:
    """Return the offset after the last newline of a trail, in bytes."""
    with open_trail(trail) as stream:
        start = stream.seek(0, os.SEEK_END)
        while start > 0:
            step = min(_BLOCK, start)
            start = stream.seek(start - step)
            found = stream.read(step).rfind(b"\n")
            if found >= 0:
                return start + found + 1
    return 0


MOST: Final = 1000
"""Maximum number of entries that one call returns."""


class RecentEntries:
    """The last entries of the trails of one state directory."""

    def __init__(self, trails: Path, resolve: Callable[[str], str | None] | None = None) -> None:
        """`resolve` returns the UUID of the living agent with a label, or None."""
        self._trails: Final = trails
        self._resolve: Final = resolve

    def recent(self, limit: int = 50) -> list[AuditEntry]:
        """Return the last entries of all sessions, at most `limit` and at most 1000, oldest first. TrailError."""
        return self._last(min(limit, MOST), lambda _: True)

    def filter_by_agent(self, agent: str) -> list[AuditEntry]:
        """Return the last entries of `agent`, a UUID or the label of a living agent, in all sessions, oldest first.

        The search covers the last 1000 entries of each session and returns at most 1000. TrailError.
        """
        identity = self._resolve(agent) if self._resolve is not None else None

        def is_of_agent(entry: AuditEntry) -> bool:
            return entry.agent_id in (agent, identity) or (self._resolve is None and entry.agent == agent)

        return self._last(MOST, is_of_agent, searched=MOST)

    def _last(self, limit: int, matches: Callable[[AuditEntry], bool], searched: int = 0) -> list[AuditEntry]:
        found: list[AuditEntry] = []
        for written, trail in self._newest_first():
            if limit <= 0 or (len(found) == limit and written < found[0].timestamp.timestamp()):
                break  # this trail and those after it end before the oldest entry found
            entries = [entry for entry in last(trail, searched or limit) if matches(entry)]
            found = sorted([*found, *entries], key=lambda entry: entry.timestamp)[-limit:]
        return found

    def _newest_first(self) -> Iterator[tuple[float, Path]]:
        yield from sorted(((trail.stat().st_mtime, trail) for trail in trails_in(self._trails)), reverse=True)


class AuditLog(RecentEntries):
    """Append-only log of all privileged operations."""

    def __init__(self, trail: Trail, resolve: Callable[[str], str | None] | None = None) -> None:
        """Append to `trail`; the trails of the other sessions are in its directory. `resolve` as for the base class."""
        super().__init__(trail.path.parent, resolve)
        self._trail: Final = trail

    def log(self, entry: AuditEntry) -> None:
        """Append an entry. The trail sets its session, `seq` and hashes. TrailError: it was not appended."""
        self._trail.append(entry)

    def _last(self, limit: int, matches: Callable[[AuditEntry], bool], searched: int = 0) -> list[AuditEntry]:
        # If the trail cannot be written, its queued entries stay queued, and the result lacks them.
        with suppress(TrailError):
            self._trail.flush()
        return super()._last(limit, matches, searched)


class PathNode:
    """One path. The paths below it are its children, so they move with a renamed directory."""

    __slots__ = ("children",)

    def __init__(self) -> None:
        self.children: dict[str, Self] = {}

    def reach(self, path: str) -> Self:
        """Return the node of a path below this one; missing nodes are created."""
        node = self
        for name in path.split("/") if path else ():
            child = node.children.get(name)
            if child is None:
                child = node.children[name] = type(self)()
            node = child
        return node

    def above(self, path: str) -> Self:
        """Return the node of the directory that contains a path."""
        return self.reach(path.rpartition("/")[0])

    def take(self, path: str) -> Self | None:
        """Remove the node of a path, and return it."""
        return self.above(path).children.pop(path.rpartition("/")[2], None)

    def put(self, path: str, node: Self) -> None:
        """Set the node of a path."""
        self.above(path).children[path.rpartition("/")[2]] = node

    def walk(self) -> Iterator[tuple[str, Self]]:
        """Yield every path and its node, each directory before its content, by name."""
        waiting: list[tuple[str, Self]] = [("", self)]
        while waiting:
            path, node = waiting.pop()
            yield path, node
            waiting += [
                (f"{path}/{name}" if path else name, child)
                for name, child in sorted(node.children.items(), reverse=True)
            ]


def with_renames(paths: set[str], renames: dict[tuple[str, str], float]) -> set[str]:
    """Add, for each renamed directory, the new names of the paths below its old name."""
    found = set(paths)
    for old, new in renames:
        found |= {new + path.removeprefix(old) for path in found if path.startswith(f"{old}/")}
    return found
