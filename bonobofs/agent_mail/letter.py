"""A letter: some entries of one trail that follow one another, for people; its subject says which, for us.

The subject names the session, the first and last entry and the hash of the last. The chain makes that hash stand for
every entry before it, so each letter is a witness of the whole trail up to there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import UTC
from typing import Final, NamedTuple

from bonobofs.audit.entry import ZERO, AuditEntry
from bonobofs.audit.reader import paths_of, shown
from bonobofs.audit.writer import CLOSE

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
        return f"{shown(self.agent)[:_LONGEST_NAME]}: {', '.join(said)} {mark}"

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
    others = [f"-> {shown(path)}" for path in paths_of(entry)[1:]]
    if entry.kind == "outcome" and entry.result == "allowed":
        what = [f"done {intent}"]
    else:
        what = [
            entry.kind if entry.kind in ("alert", "event") else entry.result,
            shown(entry.operation),
            shown(entry.path),
            *others,
        ]
    times = [f"({count} times more)"] if isinstance(count, int) else []
    why = [f"{entry.code}:"] if entry.code else []
    why += [shown(entry.reason)] if entry.reason else []
    moment = entry.timestamp.astimezone(UTC).strftime("%H:%M:%S.%f")
    text = " ".join(part for part in (f"#{entry.seq}", moment, *what, *times, *why) if part)
    return text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}…"
