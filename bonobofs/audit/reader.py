"""Reading what the trails hold: entries in order, the last of them, those that come, export.

A trail may be a gigabyte: everything here streams. A line that is no entry is shown as one with the operation
`unreadable`, because damage that a query leaves out would be hidden by it; `audit.verify` names what was done to it.
"""

from __future__ import annotations

import csv
import heapq
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple, TextIO

from bonobofs.audit.entry import FIELDS, AuditEntry, instant
from bonobofs.audit.trail_file import open_trail
from bonobofs.audit.writer import CLOSE, Trail
from bonobofs.errors import TrailError, UsageError
from bonobofs.system.terminal import escape

LONGEST_LINE: Final = 16 * 1024 * 1024
"""Bytes after which a line is taken as ended: garbage without a newline must not fill the memory."""

UNREADABLE: Final = "unreadable"

OTHER_NAMES: Final = ("to", "from")
"""Where details hold another path: `to`, the new name of a rename; `from`, what a link is another name of, or what
bytes were copied from."""

EPOCH: Final = datetime.fromtimestamp(0, UTC)

_BLOCK = 64 * 1024
_TOGETHER = 256
"""Entries that are read from a trail at once."""
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def trails_in(directory: Path) -> list[Path]:
    """Give the trails of a state directory, by name; those that are compressed under the name of their plain form."""
    return sorted({*directory.glob("*.jsonl"), *(path.with_suffix("") for path in directory.glob("*.jsonl.gz"))})


def read(trail: Path) -> Iterator[AuditEntry]:
    """Give the entries of one trail in its order; a last line without a newline is left out: it may be in the making.

    No descriptor is held between two entries: there may be more trails to merge than descriptors. TrailError when the
    file cannot be read.
    """
    place, moment, found = 0, EPOCH, _TOGETHER
    while found == _TOGETHER:
        try:
            with open_trail(trail) as stream:
                stream.seek(place)
                entries = list(islice(_entries(stream, trail.stem, moment), _TOGETHER))
                place = stream.tell()
        except OSError as error:
            raise TrailError(f"the trail {trail} cannot be read: {error.strerror}") from error
        yield from entries
        found = len(entries)
        moment = entries[-1].timestamp if entries else moment


def merged(trails: Iterable[Path]) -> Iterator[AuditEntry]:
    """Give the entries of several trails by time, each trail in its own order even where a clock was set back.

    Only trails whose times overlap are read together.
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
    """Give the last `count` entries of a trail, oldest first, without reading what is before them."""
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
            return list(deque(_entries(stream, trail.stem), maxlen=count))
    except OSError as error:
        raise TrailError(f"the trail {trail} cannot be read: {error.strerror}") from error


def is_closed(trail: Path) -> bool:
    """Say whether a trail ends with its closing entry; it is read at its end only. TrailError: it cannot be read."""
    return any((entry.kind, entry.operation) == ("event", CLOSE) for entry in last(trail, 1))


class Follower:
    """What is added to the trails of a directory, from the moment of its making; for `audit tail -f`."""

    def __init__(self, directory: Path) -> None:
        """Begin at the present end of every trail."""
        self._directory = directory
        self._places = {trail: _whole_lines_end(trail) for trail in trails_in(directory)}

    def poll(self) -> list[AuditEntry]:
        """Give the entries since the last time, by time. New trails are read from their beginning."""
        found: list[AuditEntry] = []
        for trail in trails_in(self._directory):
            with open_trail(trail) as stream:
                place = stream.seek(self._places.get(trail, 0))
                for line in iter(lambda: stream.readline(LONGEST_LINE), b""):
                    if not line.endswith(b"\n"):
                        break
                    place += len(line)
                    found.append(entry_of(line, trail.stem, found[-1].timestamp if found else EPOCH))
            self._places[trail] = place
        return sorted(found, key=lambda entry: entry.timestamp)


class Change(NamedTuple):
    """An entry, and where it is an intent, the outcome that ended it."""

    entry: AuditEntry
    outcome: AuditEntry | None = None

    @property
    def result(self) -> str:
        """`allowed`, `denied` or `error`: what it came to."""
        return self.outcome.result if self.outcome is not None else self.entry.result


def since(text: str, now: datetime) -> datetime:
    """Read `10m`, `2h`, `1d` (before `now`) or a moment in ISO 8601, local time where it names no zone.

    UsageError when it is neither.
    """
    short = re.fullmatch(r"(\d{1,6})([smhdw])", text.strip())
    try:
        if short is not None:
            return now - timedelta(**{_UNITS[short[2]]: int(short[1])})
        return datetime.fromisoformat(text.strip()).astimezone()
    except (ValueError, OverflowError):
        raise UsageError(f"{escape(text)!r} is no moment: give 30s, 10m, 2h, 1d, 1w or 2026-01-31T12:00") from None


def paths_of(entry: AuditEntry) -> list[str]:
    """Give every path that an entry names."""
    others = (entry.details.get(key) for key in OTHER_NAMES)
    return [entry.path, *(other for other in others if isinstance(other, str))]


def export_jsonl(entries: Iterable[AuditEntry], out: TextIO) -> None:
    """Write one JSON object a line: the lines of the trails, unchanged."""
    out.writelines(f"{entry.to_json()}\n" for entry in entries)


def export_csv(entries: Iterable[AuditEntry], out: TextIO) -> None:
    """Write RFC 4180 with a heading; `details` as JSON. `out` is opened with newline="".

    It is made for tables: text is written as `escape` writes it, and text that a spreadsheet would run as a formula
    gets an apostrophe before it. The exact form is the other one.
    """
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


def _entries(stream: BinaryIO, session: str, moment: datetime = EPOCH) -> Iterator[AuditEntry]:
    for line in iter(lambda: stream.readline(LONGEST_LINE), b""):
        if not line.endswith(b"\n") and len(line) < LONGEST_LINE:
            return
        entry = entry_of(line, session, moment)
        moment = entry.timestamp
        yield entry


def entry_of(line: bytes, session: str, moment: datetime) -> AuditEntry:
    """Read a line of a session's trail; one that is no entry is shown as one, `unreadable` at that moment."""
    try:
        entry = AuditEntry.from_line(line)
    except TrailError as error:
        details = {"line": line[:200].decode("ascii", "backslashreplace")}
        return AuditEntry(moment, "", UNREADABLE, "", details, "error", str(error), session=session)
    if entry.timestamp.tzinfo is None:
        return replace(entry, timestamp=entry.timestamp.replace(tzinfo=UTC))
    return entry


def _began(trail: Path) -> datetime:
    entry = next(read(trail), None)
    return entry.timestamp if entry is not None else EPOCH


def _whole_lines_end(trail: Path) -> int:
    """Give the offset after the last newline of a file, in bytes."""
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
"""The largest number of entries that one call gives."""


class Record:
    """The trails of one state directory, read at their ends."""

    def __init__(self, trails: Path, resolve: Callable[[str], str | None] | None = None) -> None:
        """`resolve` gives the UUID of the living agent of a label, None if there is none."""
        self._trails: Final = trails
        self._resolve: Final = resolve

    def recent(self, limit: int = 50) -> list[AuditEntry]:
        """Give the last entries of all sessions, at most `limit` and at most 1000, oldest first. TrailError."""
        return self._last(min(limit, MOST), lambda _: True)

    def filter_by_agent(self, agent: str) -> list[AuditEntry]:
        """Give the last entries of `agent`, a UUID or the label of a living agent, over all sessions, oldest first.

        At most 1000 entries; of each session its last 1000 are searched. TrailError.
        """
        identity = self._resolve(agent) if self._resolve is not None else None

        def is_of_agent(entry: AuditEntry) -> bool:
            return entry.agent_id in (agent, identity) or (self._resolve is None and entry.agent == agent)

        return self._last(MOST, is_of_agent, looked_at=MOST)

    def _last(self, limit: int, wanted: Callable[[AuditEntry], bool], looked_at: int = 0) -> list[AuditEntry]:
        found: list[AuditEntry] = []
        for written, trail in self._newest_first():
            if limit <= 0 or (len(found) == limit and written < found[0].timestamp.timestamp()):
                break  # this trail and those after it end before the oldest entry found
            entries = [entry for entry in last(trail, looked_at or limit) if wanted(entry)]
            found = sorted([*found, *entries], key=lambda entry: entry.timestamp)[-limit:]
        return found

    def _newest_first(self) -> Iterator[tuple[float, Path]]:
        yield from sorted(((trail.stat().st_mtime, trail) for trail in trails_in(self._trails)), reverse=True)


class AuditLog(Record):
    """Append-only log of all privileged operations."""

    def __init__(self, trail: Trail, resolve: Callable[[str], str | None] | None = None) -> None:
        """Append to `trail`, which lies beside the trails of the other sessions; `resolve` as for `Record`."""
        super().__init__(trail.path.parent, resolve)
        self._trail: Final = trail

    def log(self, entry: AuditEntry) -> None:
        """Append an entry; its session, place and hashes become the trail's. TrailError: it was not appended."""
        self._trail.enter(entry)

    def _last(self, limit: int, wanted: Callable[[AuditEntry], bool], looked_at: int = 0) -> list[AuditEntry]:
        # What cannot be written now stays queued; reading goes on without it.
        with suppress(TrailError):
            self._trail.flush()
        return super()._last(limit, wanted, looked_at)
