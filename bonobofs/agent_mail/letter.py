"""Format a letter with consecutive entries of one trail; compare posted letters with the trails.

The subject has the session, the numbers of the first and last entry, and the hash of the last. The hash chain covers
every entry before it, so each letter is a witness of the trail up to its last entry. A trail that was rewritten
together with its head verifies, but does not match the letters that were sent before.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.audit.entry import ZERO, AuditEntry
from bonobofs.audit.reader import paths_of, read, trails_in
from bonobofs.audit.tombstones import Tombstone, Tombstones
from bonobofs.audit.verify import Damage, Finding
from bonobofs.audit.writer import CLOSE
from bonobofs.system.terminal import escape

MOST_ENTRIES: Final = 2000
MOST_CHARACTERS: Final = 256 * 1024
"""Most entries and characters of a letter; the last entry can exceed the characters."""

HASH_DIGITS: Final = 32
"""Digits of a hash in a subject. Servers cut subjects at 200 characters."""
_LONGEST_LINE: Final = 1000
_LONGEST_NAME: Final = 32
_MARK: Final = re.compile(
    rf"\[([0-9a-f-]{{36}}) (\d{{1,18}})-(\d{{1,18}}) ([0-9a-f]{{{HASH_DIGITS}}}) ([0-9a-f]{{8}})\]$"
)


class Posted(NamedTuple):
    """The parsed subject of a letter."""

    session: str
    first: int
    last: int
    hash: str
    """First digits of the hash of the entry `last`."""
    home: str
    """First digits of the UUID of the state directory with the trail."""


@dataclass(slots=True)
class Letter:
    """One letter that is being written."""

    session: str
    home: str
    agent: str = ""
    agent_id: str = ""
    first: int = 0
    last: int = 0
    hash: str = ZERO
    lines: list[str] = field(default_factory=list)
    characters: int = 0
    entries: int = 0
    denied: int = 0
    alerts: int = 0
    closed: bool = False

    def add_entry(self, entry: AuditEntry, *, only_denials: bool) -> None:
        """Add the next entry of the trail."""
        self.first = self.first or entry.seq
        if entry.seq:  # 0: a damaged line, which the letter lists too
            self.last, self.hash = entry.seq, entry.hash
        self.agent, self.agent_id = entry.agent or self.agent, entry.agent_id or self.agent_id
        self.entries += 1
        alert, denied = entry.kind == "alert", entry.kind != "alert" and entry.result == "denied"
        self.alerts += alert
        self.denied += denied
        self.closed = (entry.kind, entry.operation) == ("event", CLOSE)
        if alert or denied or not only_denials:
            line = _line(entry)
            self.lines.append(line)
            self.characters += len(line) + 1

    def is_full(self) -> bool:
        """True if the letter can list no more entries."""
        return len(self.lines) >= MOST_ENTRIES or self.characters >= MOST_CHARACTERS

    @property
    def is_urgent(self) -> bool:
        """True if the letter has a denial or an alert."""
        return bool(self.denied or self.alerts)

    @property
    def importance(self) -> str:
        return "urgent" if self.alerts else "high" if self.denied else "low"

    @property
    def subject(self) -> str:
        counts = [f"{self.alerts} alert{'s' * (self.alerts > 1)}"] if self.alerts else []
        counts += [f"{self.denied} denied"] if self.denied else []
        counts += [f"{self.entries} entr{'ies' if self.entries > 1 else 'y'}"]
        mark = f"[{self.session} {self.first}-{self.last} {self.hash[:HASH_DIGITS]} {self.home[:8]}]"
        return f"{escape(self.agent)[:_LONGEST_NAME]}: {', '.join(counts)} {mark}"

    @property
    def body(self) -> str:
        """The body in Markdown. Entries are lines in a code block, so that no entry can forge text outside of it."""
        held = len(self.lines)
        left_out = f", {self.entries - held} of them are not listed" if held < self.entries else ""
        lines = [
            f"Entries {self.first} to {self.last} of session `{self.session}`{left_out}.",
            f"Agent `{self.agent_id}`. The record up to here has the hash `{self.hash}`.",
        ]
        if held:
            lines += ["", "~~~text", *self.lines, "~~~"]
        return "\n".join(lines) + "\n"


def parse_subject(subject: str) -> Posted | None:
    """Parse the subject of a letter. None: the letter is not from a courier."""
    mark = _MARK.search(subject)
    if mark is None:
        return None
    return Posted(mark[1], int(mark[2]), int(mark[3]), mark[4], mark[5])


def _line(entry: AuditEntry) -> str:
    intent = entry.details.get("intent")
    count = entry.details.get("count")
    others = [f"-> {escape(path)}" for path in paths_of(entry)[1:]]
    if entry.kind == "outcome" and entry.result == "allowed":
        what = [f"done {intent}"]
    else:
        what = [
            entry.kind if entry.kind in ("alert", "event") else entry.result,
            escape(entry.operation),
            escape(entry.path),
            *others,
        ]
    times = [f"({count} times more)"] if isinstance(count, int) else []
    why = [f"{entry.code}:"] if entry.code else []
    why += [escape(entry.reason)] if entry.reason else []
    moment = entry.timestamp.astimezone(UTC).strftime("%H:%M:%S.%f")
    text = " ".join(part for part in (f"#{entry.seq}", moment, *what, *times, *why) if part)
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}…"


def compare(letters: Iterable[Posted], trails: Path, home: str, pruned: Tombstones = dict) -> Iterator[Finding]:
    """Return, for each posted session of this state directory, the first entry that does not match a letter.

    `home` is the UUID of the state directory; `pruned` reads the tombstones. TrailError: a trail cannot be read.
    """
    heads: dict[str, dict[int, str]] = defaultdict(dict)
    for letter in letters:
        if letter.home == home[:8] and letter.last:
            heads[letter.session].setdefault(letter.last, letter.hash)
    for session, known in sorted(heads.items()):
        finding = _compare(session, known, trails / f"{session}.jsonl", pruned)
        if finding is not None:
            yield finding


def _compare(session: str, known: dict[int, str], trail: Path, pruned: Tombstones) -> Finding | None:
    last = max(known)
    if trail not in trails_in(trail.parent):
        tombstone = pruned().get(session)
        if tombstone is not None:
            return _compare_tombstone(known, tombstone)
        message = f"{trail} is missing: the witness has its entries up to {last}"
        return Finding(session, Damage.WITNESS, None, None, message)
    waiting = dict(known)
    for entry in read(trail):
        stated = waiting.pop(entry.seq, None)
        if stated is not None and not entry.hash.startswith(stated):
            message = f"entry {entry.seq} does not have the hash that the witness has: the trail was rewritten"
            return Finding(session, Damage.WITNESS, entry.seq, None, message)
    if waiting:
        message = f"entry {min(waiting)} is missing: the witness has the entries up to {last}"
        return Finding(session, Damage.WITNESS, min(waiting), None, message)
    return None


def _compare_tombstone(known: dict[int, str], tombstone: Tombstone) -> Finding | None:
    last = max(known)
    if last < tombstone.seq or (last == tombstone.seq and tombstone.hash.startswith(known[last])):
        return None
    message = f"the tombstone ends the trail with entry {tombstone.seq}, and the witness has another end"
    return Finding(tombstone.session, Damage.WITNESS, last, None, message)
