"""Verify trails: find the first entry that was changed, removed, moved or added, and missing ends.

The hash chain shows the entry at which a trail breaks. The lines after it show the kind of damage. So `_Walk` reads a
trail to its end, in constant memory. From the first break on it searches for evidence (the expected entry, a second
copy of the entry at the break), and it judges the break at the end.

Verification relies on the head, a file outside the trail. It cannot detect that entries after the head (at most one
second) were cut off, or that a trail was rewritten together with its head. Only the posted heads of an outside witness
detect these.
"""

from __future__ import annotations

import enum
import json
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.audit.entry import HASH_KEY, HASH_TAIL, LAYER, ZERO, other_paths
from bonobofs.audit.reader import LONGEST_LINE, lines_of, trails_in
from bonobofs.audit.temp_cleanup import declared_temporary
from bonobofs.audit.tombstones import Tombstone, Tombstones
from bonobofs.audit.trail_storage import form_problem, open_trail
from bonobofs.audit.writer import CLOSE, HEAD_SIZE
from bonobofs.errors import TrailError
from bonobofs.system.paths import open_directory_beneath, regular_file

OPEN_INTENTS: Final = 100_000
"""Maximum number of intents without outcome that a walk keeps. It only counts older ones."""

Describe = Callable[[str], str]
"""Describes in a few words the file that the source has at a path now."""

_CLAIMS = re.compile(rb'"seq":(\d{1,18}),"prev":"([0-9a-f]{64})"')
_ENDED = re.compile(rb',"hash":"[0-9a-f]{64}"\}.')
_BEGINNING = b'{"timestamp":"'


class Damage(enum.StrEnum):
    """The kind of damage to a trail, according to the evidence."""

    CHANGED = "changed"
    MISSING = "missing"
    MOVED = "moved"
    ADDED = "added"
    TAIL = "tail"
    """Entries up to that of the head are missing at the end."""
    TRAIL = "trail"
    """The whole trail is missing or cannot be read."""
    HEAD = "head"
    """The head is missing or cannot be read."""
    ORPHAN = "orphan"
    """An outcome whose intent is missing or already has an outcome."""
    WITNESS = "witness"
    """The trail does not match a posted head."""
    SESSION = "session"
    """The session's document cannot be read."""


class TrailStatus(enum.StrEnum):
    """How a session's trail ends."""

    CLOSED = "closed"
    """It has a closing entry."""
    OPEN = "open"
    """It has no closing entry, and its session lives."""
    CRASHED = "crashed"
    """It has no closing entry, and its session does not live."""
    GONE = "gone"
    """The trail does not exist."""
    PRUNED = "pruned"
    """The trail does not exist, and the record of pruned trails has its tombstone."""


class Finding(NamedTuple):
    """One damage of a trail."""

    session: str
    what: Damage
    seq: int | None
    """Number of the entry concerned."""
    line: int | None
    """Line of the trail, from 1."""
    message: str


class Unfinished(NamedTuple):
    """An intent without outcome. The change may have been made."""

    seq: int
    timestamp: str
    operation: str
    path: str
    shows: str
    """Description of the file that the source has at the path now; "" if `verify` did not describe it."""


@dataclass(slots=True)
class TrailReport:
    """The result for one session's trail."""

    session: str
    status: TrailStatus = TrailStatus.CRASHED
    entries: int = 0
    torn: bool = False
    """The last line is incomplete, as after a crash. No change was made under an incomplete intent."""
    findings: list[Finding] = field(default_factory=list)
    unfinished: list[Unfinished] = field(default_factory=list)
    unfinished_uncounted: int = 0
    """Intents without outcome beyond OPEN_INTENTS."""


class TrailHead(NamedTuple):
    """The content of a head file."""

    seq: int
    hash: str
    settled: datetime | None
    """All entries before this time are on the disk. None: the trail was never synced."""


def verify(
    directory: Path,
    *,
    live: Callable[[str], bool] = lambda _: False,
    describe: Callable[[str], Describe | None] = lambda _: None,
    expected: Collection[str] = (),
    pruned: Tombstones = dict,
) -> Iterator[TrailReport]:
    """Verify every trail of a state directory; yield the reports sorted by session.

    `live` returns whether the process of a session runs. `describe` returns the function that describes the files of a
    session's source, or None. `expected` are sessions that had a trail. `pruned` reads the tombstones.
    """
    found = {path.stem for path in (*trails_in(directory), *directory.glob("*.head"))}
    for session in sorted(found.union(expected, _read_tombstones(pruned))):
        paths = directory / f"{session}.jsonl", directory / f"{session}.head"
        try:
            is_known = session in expected
            report = verify_trail(
                *paths, session=session, live=live(session), describe=describe(session), is_known=is_known
            )
            # Another process may prune a trail during this call. It writes the tombstone before it removes the trail.
            if report.status is TrailStatus.GONE and (tombstone := _read_tombstones(pruned).get(session)) is not None:
                report = _pruned(tombstone, paths[1])
            yield report
        except TrailError as error:
            yield TrailReport(session, findings=[Finding(session, Damage.TRAIL, None, None, str(error))])


def _read_tombstones(pruned: Tombstones) -> Mapping[str, Tombstone]:
    try:
        return pruned()
    except TrailError:
        return {}  # the verification of the record of pruned trails reports it


def verify_trail(
    trail: Path,
    head_path: Path,
    *,
    session: str,
    live: bool = False,
    describe: Describe | None = None,
    is_known: bool = True,
) -> TrailReport:
    """Verify one trail against its head. `is_known`: it has had a trail. TrailError: it exists and cannot be read."""
    report = TrailReport(session)
    walk = _Walk(report)
    # Read the head first, so that a growing trail has at least the head's entries.
    head = _judged_head(head_path, report)
    try:
        with open_trail(trail) as stream:
            walk.head = head
            for raw in lines_of(stream):
                walk.take(raw)
        problem = form_problem(trail)
    except FileNotFoundError:
        if not is_known and _is_new(head, head_path):
            report.findings.clear()  # The session was killed between the creation of the head and that of the trail.
            report.status = TrailStatus.OPEN if live else TrailStatus.CRASHED
            return report
        report.status = TrailStatus.GONE
        message = f"{trail} is missing"
        if not os.path.lexists(head_path):
            message = f"{trail} and its head are missing"
            report.findings.clear()
        report.findings.insert(0, Finding(session, Damage.TRAIL, None, None, message))
        return report
    except OSError as error:
        raise TrailError(f"the trail {trail} cannot be read: {error.strerror}") from error
    walk.end()
    if problem:
        report.findings.append(Finding(session, Damage.TRAIL, None, None, problem))
    if live and report.entries == 0 and head is None:
        report.findings.clear()  # The session has created both, and has written no entry.
    report.status = TrailStatus.CLOSED if walk.closed else TrailStatus.OPEN if live else TrailStatus.CRASHED
    report.unfinished = [_unfinished(seq, intent, describe) for seq, intent in walk.intents.items()]
    return report


def _pruned(tombstone: Tombstone, head_path: Path) -> TrailReport:
    """Report on a pruned trail. An interrupted pruning leaves the head."""
    report = TrailReport(tombstone.session, TrailStatus.PRUNED)
    try:
        head = read_head(head_path)
    except (FileNotFoundError, TrailError):
        return report
    if head.seq > tombstone.seq or (head.seq == tombstone.seq and head.hash != tombstone.hash):
        message = f"the tombstone ends the trail with entry {tombstone.seq}, and its head names another end"
        report.findings.append(Finding(report.session, Damage.TRAIL, None, None, message))
    return report


def read_head(path: Path) -> TrailHead:
    """Read a head file. FileNotFoundError; TrailError: it is damaged or cannot be read."""
    try:
        data = _head_bytes(path)
        # The writer rewrites the file in place. Two equal reads show that the content is complete.
        while (again := _head_bytes(path)) != data:
            data = again
        document = json.loads(data)
        seq, link, moment = document["seq"], document["hash"], document["settled"]
        settled = datetime.fromisoformat(moment) if moment else None
    except FileNotFoundError:
        raise
    except OSError as error:
        raise TrailError(f"the head {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, RecursionError):
        raise TrailError(f"the head {path} is damaged") from None
    if type(seq) is not int or not isinstance(link, str) or len(data) != HEAD_SIZE:
        raise TrailError(f"the head {path} is damaged")
    return TrailHead(seq, link, settled)


def _head_bytes(path: Path) -> bytes:
    with open(path, "rb", buffering=0, opener=regular_file) as file:
        return file.read(HEAD_SIZE + 1)


def describe_below(source: Path) -> Describe:
    """Return the function that describes the files of a source. It follows no symlink in any component of a path."""

    def describe(path: str) -> str:
        above, _, name = path.rpartition("/")
        held = -1
        try:
            held = open_directory_beneath(source, above)
            status = os.stat(name, dir_fd=held, follow_symlinks=False) if name else os.fstat(held)
            return _described(status)
        except (FileNotFoundError, NotADirectoryError):
            return "absent"
        except (OSError, ValueError) as error:
            return f"cannot be read: {error.strerror if isinstance(error, OSError) else error}"
        finally:
            if held >= 0:
                os.close(held)

    return describe


class _Line(NamedTuple):
    """A line and its fields. The fields of a line that is not sound are no evidence."""

    number: int
    sound: bool
    """`hash` matches its bytes, and it belongs to this session."""
    seq: int
    prev: str
    hash: str
    document: dict[str, Any]


class _Break:
    """The first line at which the chain breaks, and the evidence of the lines after it."""

    def __init__(self, line: _Line, before: _Line | None, head: TrailHead | None) -> None:
        self.line = line
        self.head = head
        self.before = before
        """The last line before the break."""
        self.expected = before.seq + 1 if before is not None else 1
        self.link = before.hash if before is not None else ZERO
        self.next: _Line | None = None
        self.expected_at = 0
        """Number of the line with the expected entry; 0: none."""
        self.again_at = 0
        """Number of the line with a second copy of `line`; 0: none."""

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

    def _judge(self) -> tuple[Damage, int | None, int, str]:
        line, expected = self.line, self.expected
        if not line.sound:
            return self._judge_unsound()
        if line.seq > expected:
            return self._judge_ahead()
        if line.seq == expected:
            return self._judge_unlinked()
        return self._judge_behind()

    def _judge_unsound(self) -> tuple[Damage, int | None, int, str]:
        line, expected = self.line, self.expected
        if self.expected_at:
            return Damage.ADDED, None, line.number, f"line {line.number} is not an entry of this trail: it was added"
        message = f"entry {expected} on line {line.number} does not match its own hash: it was changed"
        return Damage.CHANGED, expected, line.number, message

    def _judge_ahead(self) -> tuple[Damage, int | None, int, str]:
        line, expected = self.line, self.expected
        if self.expected_at and self.again_at:
            return Damage.ADDED, line.seq, line.number, f"entry {line.seq} was added on line {line.number} as a copy"
        if self.expected_at == line.number + 1:
            message = f"entry {line.seq} was moved: it is on line {line.number}, before entry {expected}"
            return Damage.MOVED, line.seq, line.number, message
        if self.expected_at:
            message = f"entry {expected} was moved: it is on line {self.expected_at}, not on line {line.number}"
            return Damage.MOVED, expected, self.expected_at, message
        if self.next is not None and self.next.seq == expected + 1 and self.next.prev != line.hash:
            message = f"entry {expected} on line {line.number} was changed: its number is {line.seq}"
            return Damage.CHANGED, expected, line.number, message
        gap = f"entry {expected} is" if line.seq == expected + 1 else f"entries {expected} to {line.seq - 1} are"
        return Damage.MISSING, expected, line.number, f"{gap} missing before line {line.number}"

    def _judge_unlinked(self) -> tuple[Damage, int | None, int, str]:
        line, expected = self.line, self.expected
        if self.expected_at:
            message = f"line {line.number} was added: entry {expected} is on line {self.expected_at}"
            return Damage.ADDED, expected, line.number, message
        is_continued = self.next is None or (self.next.seq, self.next.prev) == (expected + 1, line.hash)
        if self.before is not None and is_continued:
            before = self.before
            message = f"entry {before.seq} on line {before.number} was changed: the next entry has another hash of it"
            return Damage.CHANGED, before.seq, before.number, message
        message = (
            f"entry {expected} on line {line.number} was changed: it does not have the hash of the entry before it"
        )
        return Damage.CHANGED, expected, line.number, message

    def _judge_behind(self) -> tuple[Damage, int | None, int, str]:
        line, before = self.line, self.before
        followed = self.next is not None and (self.next.seq, self.next.prev) == (line.seq + 1, line.hash)
        known = self.head is not None and (self.head.seq, self.head.hash) == (line.seq, line.hash)
        if before is not None and (followed or known) and line.hash != before.hash and line.prev == before.prev:
            message = f"line {before.number} was added: the trail continues from the other entry {line.seq}"
            return Damage.ADDED, before.seq, before.number, message
        message = f"line {line.number} was added: there is an entry {line.seq} before it"
        return Damage.ADDED, line.seq, line.number, message


class _Walk:
    """The state while one trail is read."""

    def __init__(self, report: TrailReport) -> None:
        self._report = report
        self.head: TrailHead | None = None
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
        # A line that is not sound counts as one entry. Its number must not hide a missing tail.
        self._highest = max(self._highest, line.seq if line.sound else self._due()[0] if self._break is None else 0)
        if line.sound and self.head is not None and (line.seq, line.hash) == (self.head.seq, self.head.hash):
            self._head_seen = True
        if self._break is not None:
            self._break.take(line)
        elif self.closed and self._last is not None and (line.seq, line.prev) != (self._last.seq, self._last.prev):
            self._find(Damage.ADDED, line.seq or None, line.number, f"line {line.number} is after the closing entry")
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
        """Judge the trail at its end."""
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
            self._find(Damage.TAIL, lost, None, f"{which} missing at the end: the head ends with entry {head.seq}")
        elif not report.findings:
            message = f"entry {head.seq} does not have the hash of the head: the trail or the head was changed"
            self._find(Damage.CHANGED, head.seq, None, message)

    def _due(self) -> tuple[int, str]:
        return (self._last.seq + 1, self._last.hash) if self._last is not None else (1, ZERO)

    def _follow(self, line: _Line) -> None:
        document = line.document
        self.closed = (document.get("kind"), document.get("operation")) == ("event", CLOSE)
        if not self._pair(line) and not self._orphan:
            self._orphan = True
            message = f"entry {line.seq} on line {line.number} is an outcome without an open intent"
            self._find(Damage.ORPHAN, line.seq, line.number, message)

    def _pair(self, line: _Line) -> bool:
        """Store an intent, or remove the intent of an outcome. False: the outcome has no open intent."""
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
        """Judge the bytes after the last newline: a write that a crash interrupted, or an addition."""
        rest = self._rest
        torn = not rest.strip(b"\0") or (
            rest.startswith(_BEGINNING[: len(rest)]) and _ENDED.search(rest) is None and rest.isascii()
        )
        if torn and not self.closed:
            self._report.torn = True
        else:
            self._find(
                Damage.ADDED, None, self._number, f"line {self._number} at the end is not an entry: it was added"
            )

    def _find(self, damage: Damage, seq: int | None, line: int | None, message: str) -> None:
        self._report.findings.append(Finding(self._report.session, damage, seq, line, message))


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


def _judged_head(path: Path, report: TrailReport) -> TrailHead | None:
    try:
        return read_head(path)
    except FileNotFoundError:
        message = f"the head {path} is missing: a missing end of the trail cannot be detected"
    except TrailError as error:
        message = str(error)
    report.findings.append(Finding(report.session, Damage.HEAD, None, None, message))
    return None


def _is_new(head: TrailHead | None, path: Path) -> bool:
    """Return whether no entry was recorded when the head was written last."""
    if head is not None:
        return head.seq == 0
    return path.is_file() and path.stat().st_size == 0


def _unfinished(seq: int, intent: dict[str, Any], describe: Describe | None) -> Unfinished:
    path, details = str(intent.get("path", "")), intent.get("details")
    details = details if isinstance(details, dict) else {}
    temporary = declared_temporary(path, details)
    shows = ""
    if describe is not None and LAYER in details:
        shows = "the change was not in the source, but in another layer"
    elif describe is not None:
        names = [path, *other_paths(details), *([temporary] if temporary is not None else [])]
        shows = describe(path) if len(names) == 1 else "; ".join(f"{name}: {describe(name)}" for name in names)
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
