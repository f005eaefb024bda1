"""Whether trails are what was written: the first entry that is changed, missing, moved or added, and lost ends.

The chain says that something is wrong at an entry; what was done is told by what comes after it. So a trail is read to
its end, in constant memory: at the first break a few questions are noted (does the entry that belongs here stand
further down? does this one stand there again?), and answered by the time the end is reached.

What it rests on is the head, which is kept outside the trail. Entries after the head (at most a second of them) can be
cut off, and a history rewritten together with its head cannot be told: only an outside witness tells those.
"""

from __future__ import annotations

import enum
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.audit.entry import HASH_KEY, HASH_TAIL, LAYER, ZERO
from bonobofs.audit.reader import LONGEST_LINE, OTHER_NAMES, trails_in
from bonobofs.audit.temp_cleanup import by_way_of
from bonobofs.audit.tombstones import Tombstone, Tombstones
from bonobofs.audit.trail_file import open_trail
from bonobofs.audit.writer import CLOSE, HEAD_SIZE
from bonobofs.errors import TrailError
from bonobofs.system.paths import open_directory_beneath

OPEN_INTENTS: Final = 100_000
"""How many intents without outcome are kept in mind; beyond that the oldest are counted only."""

Look = Callable[[str], str]
"""Says what the source shows at a path now, in a few words."""

_CLAIMS = re.compile(rb'"seq":(\d{1,18}),"prev":"([0-9a-f]{64})"')
_ENDED = re.compile(rb',"hash":"[0-9a-f]{64}"\}.')
_BEGINNING = b'{"timestamp":"'


class What(enum.StrEnum):
    """What was done to a trail, as well as the evidence tells."""

    CHANGED = "changed"
    MISSING = "missing"
    MOVED = "moved"
    ADDED = "added"
    TAIL = "tail"
    """Entries that the head knows of are missing at the end."""
    TRAIL = "trail"
    """The whole trail is missing or cannot be read."""
    HEAD = "head"
    """The head is missing or cannot be read."""
    ORPHAN = "orphan"
    """An outcome whose intent is not there, or had its outcome before."""
    WITNESS = "witness"
    """The trail is not the one whose heads were posted."""
    SESSION = "session"
    """The session's document cannot be read."""


class Status(enum.StrEnum):
    """How a session's trail ends."""

    CLOSED = "closed"
    """With a closing entry: a clean end."""
    OPEN = "open"
    """Its session lives."""
    CRASHED = "crashed"
    """Without a closing entry, and its session does not live."""
    GONE = "gone"
    """There is no trail."""
    PRUNED = "pruned"
    """There is no trail any more, and the record of pruned trails says so."""


class Finding(NamedTuple):
    """Something that is not as it was written."""

    session: str
    what: What
    seq: int | None
    """Number of the entry that it is about."""
    line: int | None
    """Line of the trail, from 1, on which it shows."""
    message: str


class Unfinished(NamedTuple):
    """An intent without outcome: the change may have been made or not."""

    seq: int
    timestamp: str
    operation: str
    path: str
    shows: str
    """What the source shows now; "" when nobody looked."""


@dataclass(slots=True)
class Report:
    """What is known of one session's trail."""

    session: str
    status: Status = Status.CRASHED
    entries: int = 0
    torn: bool = False
    """The last line was cut short before it was whole, as a crash does; nothing was done on its strength."""
    findings: list[Finding] = field(default_factory=list)
    unfinished: list[Unfinished] = field(default_factory=list)
    unfinished_uncounted: int = 0
    """Intents without outcome beyond OPEN_INTENTS."""


class Head(NamedTuple):
    """What a head file says."""

    seq: int
    hash: str
    settled: datetime | None
    """All that was entered before this moment is on the disk; None: nothing was synced yet."""


def verify(
    directory: Path,
    *,
    live: Callable[[str], bool] = lambda _: False,
    look: Callable[[str], Look | None] = lambda _: None,
    expected: Collection[str] = (),
    pruned: Tombstones = dict,
) -> Iterator[Report]:
    """Verify every trail of a state directory, by session.

    `live` says whether the process of a session runs; `look` gives the sight of a session's source; `expected` are
    sessions that are known to have had a trail; `pruned` reads the tombstones.
    """
    found = {path.stem for path in (*trails_in(directory), *directory.glob("*.head"))}
    for session in sorted(found.union(expected, pruned())):
        paths = directory / f"{session}.jsonl", directory / f"{session}.head"
        try:
            report = verify_trail(*paths, session=session, live=live(session), look=look(session))
            # A tombstone is written before its trail is removed, which may be at this moment.
            if report.status is Status.GONE and (tombstone := pruned().get(session)) is not None:
                report = _pruned(tombstone, paths[1])
            yield report
        except TrailError as error:
            yield Report(session, findings=[Finding(session, What.TRAIL, None, None, str(error))])


def verify_trail(trail: Path, head_path: Path, *, session: str, live: bool = False, look: Look | None = None) -> Report:
    """Verify one trail against its head. TrailError: it is there and cannot be read."""
    report = Report(session)
    walk = _Walk(report)
    # The head first: a living trail may only have more than the head said, never less.
    head = _judged_head(head_path, report)
    try:
        with open_trail(trail) as stream:
            walk.head = head
            for raw in iter(lambda: stream.readline(LONGEST_LINE), b""):
                walk.take(raw)
    except FileNotFoundError:
        report.status = Status.GONE
        message = f"{trail} is missing" if head is not None else f"{trail} is missing, and its head tells nothing"
        report.findings.insert(0, Finding(session, What.TRAIL, None, None, message))
        return report
    except OSError as error:
        raise TrailError(f"the trail {trail} cannot be read: {error.strerror}") from error
    walk.end()
    if live and report.entries == 0 and head is None:
        report.findings.clear()  # It is being made at this moment: the head comes just after the trail.
    report.status = Status.CLOSED if walk.closed else Status.OPEN if live else Status.CRASHED
    report.unfinished = [_unfinished(seq, intent, look) for seq, intent in walk.intents.items()]
    return report


def _pruned(tombstone: Tombstone, head_path: Path) -> Report:
    """Report on a trail that was pruned; a pruning that was interrupted leaves the head."""
    report = Report(tombstone.session, Status.PRUNED)
    try:
        head = read_head(head_path)
    except (FileNotFoundError, TrailError):
        return report
    if head.seq > tombstone.seq or (head.seq == tombstone.seq and head.hash != tombstone.hash):
        message = f"the record of pruned trails ends it with entry {tombstone.seq}, and its head knows of another end"
        report.findings.append(Finding(report.session, What.TRAIL, None, None, message))
    return report


def read_head(path: Path) -> Head:
    """Read a head file; FileNotFoundError, or TrailError when it is not a head."""
    try:
        data = path.read_bytes()[: HEAD_SIZE + 1]
        # It is rewritten in place: two equal readings are no half of one and half of another.
        while (again := path.read_bytes()[: HEAD_SIZE + 1]) != data:
            data = again
        document = json.loads(data)
        seq, link, moment = document["seq"], document["hash"], document["settled"]
        settled = datetime.fromisoformat(moment) if moment else None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TrailError(f"the head {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError):
        raise TrailError(f"the head {path} is not as it was written") from None
    if type(seq) is not int or not isinstance(link, str) or len(data) != HEAD_SIZE:
        raise TrailError(f"the head {path} is not as it was written")
    return Head(seq, link, settled)


def look_below(source: Path) -> Look:
    """Give a sight of a source directory that follows no symlink, not even on the way to a path."""

    def look(path: str) -> str:
        above, _, name = path.rpartition("/")
        held = -1
        try:
            held = open_directory_beneath(source, above)
            status = os.stat(name, dir_fd=held, follow_symlinks=False) if name else os.fstat(held)
            return _described(status)
        except (FileNotFoundError, NotADirectoryError):
            return "absent"
        except (OSError, ValueError) as error:
            return f"cannot be looked at: {error.strerror if isinstance(error, OSError) else error}"
        finally:
            if held >= 0:
                os.close(held)

    return look


class _Line(NamedTuple):
    """A line and what it says of itself. What an unsound line says is a claim and proves nothing."""

    number: int
    sound: bool
    """Its hash is that of its bytes, and it belongs to this session."""
    seq: int
    prev: str
    hash: str
    document: dict[str, Any]


class _Break:
    """The first place where a trail does not go on as it should, and what the lines after it tell of the cause."""

    def __init__(self, line: _Line, before: _Line | None, head: Head | None) -> None:
        self.line = line
        self.head = head
        self.before = before
        """The last line that was in its place."""
        self.expected = before.seq + 1 if before is not None else 1
        self.link = before.hash if before is not None else ZERO
        self.next: _Line | None = None
        self.expected_at = 0
        """Line on which the entry that belongs here stands; 0: on none."""
        self.again_at = 0
        """Line on which the same entry as `line` stands again; 0: on none."""

    def take(self, line: _Line) -> None:
        if self.next is None:
            self.next = line
        if line.sound and (line.seq, line.prev) == (self.expected, self.link) and not self.expected_at:
            self.expected_at = line.number
        if line.sound and line.hash == self.line.hash and not self.again_at:
            self.again_at = line.number

    def finding(self, session: str) -> Finding:
        what, seq, number, message = self._judge()
        return Finding(session, what, seq, number, message)

    def _judge(self) -> tuple[What, int | None, int, str]:
        line, expected = self.line, self.expected
        if not line.sound:
            return self._judge_unsound()
        if line.seq > expected:
            return self._judge_ahead()
        if line.seq == expected:
            return self._judge_unlinked()
        return self._judge_behind()

    def _judge_unsound(self) -> tuple[What, int | None, int, str]:
        line, expected = self.line, self.expected
        if self.expected_at:
            return What.ADDED, None, line.number, f"line {line.number} is no entry of this trail: it was added"
        message = f"entry {expected} on line {line.number} does not agree with its own hash: it was changed"
        return What.CHANGED, expected, line.number, message

    def _judge_ahead(self) -> tuple[What, int | None, int, str]:
        line, expected = self.line, self.expected
        if self.expected_at and self.again_at:
            return What.ADDED, line.seq, line.number, f"entry {line.seq} was added on line {line.number} as a copy"
        if self.expected_at == line.number + 1:
            message = f"entry {line.seq} was moved: it stands on line {line.number}, before entry {expected}"
            return What.MOVED, line.seq, line.number, message
        if self.expected_at:
            message = f"entry {expected} was moved: it stands on line {self.expected_at}, not on line {line.number}"
            return What.MOVED, expected, self.expected_at, message
        if self.next is not None and self.next.seq == expected + 1 and self.next.prev != line.hash:
            message = f"entry {expected} on line {line.number} was changed: it calls itself entry {line.seq}"
            return What.CHANGED, expected, line.number, message
        gap = f"entry {expected} is" if line.seq == expected + 1 else f"entries {expected} to {line.seq - 1} are"
        return What.MISSING, expected, line.number, f"{gap} missing before line {line.number}"

    def _judge_unlinked(self) -> tuple[What, int | None, int, str]:
        line, expected = self.line, self.expected
        if self.expected_at:
            message = f"line {line.number} was added: entry {expected} stands on line {self.expected_at}"
            return What.ADDED, expected, line.number, message
        goes_on = self.next is None or (self.next.seq, self.next.prev) == (expected + 1, line.hash)
        if self.before is not None and goes_on:
            before = self.before
            message = f"entry {before.seq} on line {before.number} was changed: the entry after it knows another hash"
            return What.CHANGED, before.seq, before.number, message
        message = f"entry {expected} on line {line.number} was changed: it does not know the entry before it"
        return What.CHANGED, expected, line.number, message

    def _judge_behind(self) -> tuple[What, int | None, int, str]:
        line, before = self.line, self.before
        followed = self.next is not None and (self.next.seq, self.next.prev) == (line.seq + 1, line.hash)
        known = self.head is not None and (self.head.seq, self.head.hash) == (line.seq, line.hash)
        if before is not None and (followed or known) and line.hash != before.hash and line.prev == before.prev:
            message = f"line {before.number} was added: the trail goes on from the other entry {line.seq}"
            return What.ADDED, before.seq, before.number, message
        message = f"line {line.number} was added: there is an entry {line.seq} before it"
        return What.ADDED, line.seq, line.number, message


class _Walk:
    """The state of one reading."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self.head: Head | None = None
        self.closed = False
        self.intents: dict[int, dict[str, Any]] = {}
        """Allowed intents that have no outcome yet."""
        self._number = 0
        self._last: _Line | None = None
        self._break: _Break | None = None
        self._highest = 0
        self._head_seen = False
        self._orphan = False
        self._rest = b""

    def take(self, raw: bytes) -> None:
        self._number += 1
        if not raw.endswith(b"\n") and len(raw) < LONGEST_LINE:
            self._rest = raw
            return
        line = _parsed(raw, self._number, self._report.session)
        self._report.entries += 1
        # What an unsound line says of itself must not hide a missing tail; but it does stand for one entry.
        self._highest = max(self._highest, line.seq if line.sound else self._due()[0] if self._break is None else 0)
        if line.sound and self.head is not None and (line.seq, line.hash) == (self.head.seq, self.head.hash):
            self._head_seen = True
        if self._break is not None:
            self._break.take(line)
        elif self.closed and self._last is not None and (line.seq, line.prev) != (self._last.seq, self._last.prev):
            self._find(What.ADDED, line.seq or None, line.number, f"line {line.number} stands after the closing entry")
            self._break = _Break(line, self._last, self.head)
        elif line.sound and (line.seq, line.prev) == self._due():
            self._last = line
            self._follow(line)
            return
        else:
            self.closed = False
            self._break = _Break(line, self._last, self.head)
        if line.sound:
            self._pair(line)

    def end(self) -> None:
        """Judge what only the end tells."""
        report = self._report
        if self._break is not None and not self.closed:
            report.findings.insert(0, self._break.finding(report.session))
        if self._rest:
            self._judge_rest()
        head = self.head
        if head is None or self._head_seen or head == (0, ZERO, head.settled):
            return
        if self._highest < head.seq:
            lost = self._highest + 1
            which = f"entry {lost} is" if lost == head.seq else f"entries {lost} to {head.seq} are"
            self._find(What.TAIL, lost, None, f"{which} missing at the end: the head knows of them")
        elif not report.findings:
            message = f"entry {head.seq} is another than the one that the head knows: the trail or the head was changed"
            self._find(What.CHANGED, head.seq, None, message)

    def _due(self) -> tuple[int, str]:
        return (self._last.seq + 1, self._last.hash) if self._last is not None else (1, ZERO)

    def _follow(self, line: _Line) -> None:
        document = line.document
        self.closed = (document.get("kind"), document.get("operation")) == ("event", CLOSE)
        if not self._pair(line) and not self._orphan:
            self._orphan = True
            message = f"entry {line.seq} on line {line.number} is an outcome, and there is no intent that waits for it"
            self._find(What.ORPHAN, line.seq, line.number, message)

    def _pair(self, line: _Line) -> bool:
        """Keep an intent, or strike the one that an outcome ends; False when an outcome ends none."""
        document = line.document
        if document.get("result") == "denied":
            return True
        if document.get("kind") == "intent":
            self.intents[line.seq] = document
            if len(self.intents) > OPEN_INTENTS:
                del self.intents[next(iter(self.intents))]
                self._report.unfinished_uncounted += 1
        if document.get("kind") != "outcome":
            return True
        details = document.get("details")
        intent = details.get("intent") if isinstance(details, dict) else None
        if not isinstance(intent, int):
            return False
        if self.intents.pop(intent, None) is not None:
            return True
        if self._report.unfinished_uncounted and 0 < intent < next(iter(self.intents), line.seq):
            self._report.unfinished_uncounted -= 1
            return True
        return False

    def _judge_rest(self) -> None:
        """Judge what stands after the last newline: a write that a crash cut short, or something else."""
        rest = self._rest
        torn = not rest.strip(b"\0") or (
            rest.startswith(_BEGINNING[: len(rest)]) and _ENDED.search(rest) is None and rest.isascii()
        )
        if torn and not self.closed:
            self._report.torn = True
        else:
            self._find(What.ADDED, None, self._number, f"what stands on line {self._number} at the end is no entry")

    def _find(self, what: What, seq: int | None, line: int | None, message: str) -> None:
        self._report.findings.append(Finding(self._report.session, what, seq, line, message))


def _parsed(raw: bytes, number: int, session: str) -> _Line:
    text = raw[:-1]
    body, ending = text[:-HASH_TAIL], text[-HASH_TAIL:]
    stated = ending[len(HASH_KEY) : -2].decode("ascii", "replace")
    sound = ending == b'%b%b"}' % (HASH_KEY, stated.encode()) and sha256(body).hexdigest() == stated
    document: Any = None
    try:
        document = json.loads(text)
        seq, prev = document["seq"], document["prev"]
        if type(seq) is int and type(prev) is str and document["hash"] == stated:
            return _Line(number, sound and document["session"] == session, seq, prev, stated, document)
    except (ValueError, TypeError, KeyError, RecursionError):
        pass
    claims = _CLAIMS.findall(text)
    seq, prev = (int(claims[-1][0]), claims[-1][1].decode()) if claims else (0, "")
    return _Line(number, False, seq, prev, stated, {})


def _judged_head(path: Path, report: Report) -> Head | None:
    try:
        return read_head(path)
    except FileNotFoundError:
        message = f"the head {path} is missing: a tail that was cut off cannot be told"
    except TrailError as error:
        message = str(error)
    report.findings.append(Finding(report.session, What.HEAD, None, None, message))
    return None


def _unfinished(seq: int, intent: dict[str, Any], look: Look | None) -> Unfinished:
    path, details = str(intent.get("path", "")), intent.get("details")
    details = details if isinstance(details, dict) else {}
    others = [*(details.get(key) for key in OTHER_NAMES), by_way_of(path, details)]
    shows = ""
    if look is not None and LAYER in details:
        shows = "kept apart from the source, which it left as it is"
    elif look is not None:
        names = [path, *(other for other in others if isinstance(other, str))]
        shows = look(path) if len(names) == 1 else "; ".join(f"{name}: {look(name)}" for name in names)
    return Unfinished(seq, str(intent.get("timestamp", "")), str(intent.get("operation", "")), path, shows)


def _described(status: os.stat_result) -> str:
    mode = status.st_mode
    permissions = f"mode {stat.S_IMODE(mode):o}"
    if stat.S_ISREG(mode):
        return f"a file, {status.st_size} bytes, {permissions}"
    if stat.S_ISLNK(mode):
        return "a symlink"
    kinds = {stat.S_IFDIR: "directory", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket"}
    return f"a {kinds.get(stat.S_IFMT(mode), 'device')}, {permissions}"
