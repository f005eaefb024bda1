"""A letter: some entries of one trail that follow one another, for people; its subject says which, for us.

The subject names the session, the first and last entry and the hash of the last. The chain makes that hash stand for
every entry before it, so each letter is a witness of the whole trail up to there.
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
from bonobofs.audit.verify import Finding, What
from bonobofs.audit.writer import CLOSE
from bonobofs.system.terminal import escape

MOST_ENTRIES: Final = 2000
MOST_CHARACTERS: Final = 256 * 1024
"""What a letter lists at the most, one entry aside."""

HASH_DIGITS: Final = 32
"""Digits of a hash that a subject has room for; servers cut subjects at 200 characters."""
_LONGEST_LINE: Final = 1000
_LONGEST_NAME: Final = 32
_MARK: Final = re.compile(
    rf"\[([0-9a-f-]{{36}}) (\d{{1,18}})-(\d{{1,18}}) ([0-9a-f]{{{HASH_DIGITS}}}) ([0-9a-f]{{8}})\]$"
)


class Posted(NamedTuple):
    """What the subject of a letter says."""

    session: str
    first: int
    last: int
    hash: str
    """The beginning of the hash of the entry `last`."""
    home: str
    """The beginning of the UUID of the state directory that keeps the trail."""


@dataclass(slots=True)
class Letter:
    """One letter in the making."""

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

    def take(self, entry: AuditEntry, *, only_denials: bool) -> None:
        """Add the next entry of the trail."""
        self.first = self.first or entry.seq
        if entry.seq:  # else the line is no entry, which is told like one
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
        """It lists as much as one letter may."""
        return len(self.lines) >= MOST_ENTRIES or self.characters >= MOST_CHARACTERS

    @property
    def is_urgent(self) -> bool:
        """It tells of a refusal or an alert."""
        return bool(self.denied or self.alerts)

    @property
    def importance(self) -> str:
        return "urgent" if self.alerts else "high" if self.denied else "low"

    @property
    def subject(self) -> str:
        said = [f"{self.alerts} alert{'s' * (self.alerts > 1)}"] if self.alerts else []
        said += [f"{self.denied} denied"] if self.denied else []
        said += [f"{self.entries} entr{'ies' if self.entries > 1 else 'y'}"]
        mark = f"[{self.session} {self.first}-{self.last} {self.hash[:HASH_DIGITS]} {self.home[:8]}]"
        return f"{escape(self.agent)[:_LONGEST_NAME]}: {', '.join(said)} {mark}"

    @property
    def body(self) -> str:
        """Markdown. What an entry holds stands in a block of code, a line each, so that it can forge nothing."""
        held = len(self.lines)
        left_out = f", {self.entries - held} of them are not listed" if held < self.entries else ""
        lines = [
            f"Entries {self.first} to {self.last} of session `{self.session}`{left_out}.",
            f"Agent `{self.agent_id}`. The record up to here has the hash `{self.hash}`.",
        ]
        if held:
            lines += ["", "~~~text", *self.lines, "~~~"]
        return "\n".join(lines) + "\n"


def posted(subject: str) -> Posted | None:
    """Read the subject of a letter; None when it is none of ours."""
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
    """Give, for each session of this state directory that was posted, the first entry that is not as it was then.

    `home` is the UUID of the state directory; `pruned` reads the tombstones. TrailError when a trail cannot be read.
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
        message = f"{trail} is missing: the witness knows of it, up to entry {last}"
        return Finding(session, What.WITNESS, None, None, message)
    waiting = dict(known)
    for entry in read(trail):
        stated = waiting.pop(entry.seq, None)
        if stated is not None and not entry.hash.startswith(stated):
            message = f"entry {entry.seq} is another than the one that the witness knows: the trail was rewritten"
            return Finding(session, What.WITNESS, entry.seq, None, message)
    if waiting:
        message = f"entry {min(waiting)} is missing: the witness knows of entries up to {last}"
        return Finding(session, What.WITNESS, min(waiting), None, message)
    return None


def _compare_tombstone(known: dict[int, str], tombstone: Tombstone) -> Finding | None:
    last = max(known)
    if last < tombstone.seq or (last == tombstone.seq and tombstone.hash.startswith(known[last])):
        return None
    message = f"the record of pruned trails ends it with entry {tombstone.seq}, and the witness knows of another end"
    return Finding(tombstone.session, What.WITNESS, last, None, message)
