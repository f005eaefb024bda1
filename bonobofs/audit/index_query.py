"""What is said to the index and what it answers: plain values, for those who need no database to name them."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple, Protocol


class By(enum.StrEnum):
    """What changes can be counted by."""

    AGENT = "agent"
    SESSION = "session"
    PATH = "path"
    OPERATION = "operation"
    RULE = "rule"
    CODE = "code"
    RESULT = "result"


class Cursor(NamedTuple):
    """How far a trail has been read."""

    trail: int
    """Its number in the index."""
    session: str
    place: int
    mark: str
    moment: int


class Found(NamedTuple):
    """One change as its lines in the trail; `outcome` is None where there is none."""

    line: str
    outcome: str | None


class Count(NamedTuple):
    """How many changes share a value."""

    value: str
    changes: int
    """Entries: a refusal that was repeated is one, or two with the entry that counts the rest."""
    times: int
    """How often it was really asked."""
    label: str = ""
    """By agent: the label that goes with the UUID."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to look for; what is None is not asked. All parts must hold."""

    agent: str | None = None
    """A UUID or a label."""
    agent_id: str | None = None
    """UUID of the living agent that the label means; None: every agent that ever had the label."""
    session: str | None = None
    path: str | None = None
    """A path, which means all below it too, or a pattern: `*` and `?` within a name, `**` across names."""
    operation: str | None = None
    rule: str | None = None
    result: str | None = None
    since: int | None = None
    """Microseconds since 1970, as all moments here."""
    until: int | None = None


def text_of(text: str) -> str:
    """The form in which the tables hold a text: ASCII, without a NUL, one for each text."""
    return encode_basestring_ascii(text)[1:-1]


def text_from(stored: str) -> str:
    """What `text_of` was given."""
    return str(json.loads(f'"{stored}"')) if "\\" in stored else stored


class Tables(Protocol):
    """What the index is written to and read from. Every call is one transaction; StateError."""

    def cursors(self, home: str, /) -> dict[str, Cursor]:
        """How far each trail of a state directory has been read, by session."""

    def enter_trail(self, home: str, session: str, /) -> Cursor:
        """Begin a trail that is new, or that another state directory had."""

    def forget_trail(self, session: str, /) -> None:
        """Take out all that there is of a trail."""

    def advance(
        self, place: int, cursor: Cursor, rows: Sequence[Mapping[str, Any]], late: Mapping[int, Mapping[str, Any]], /
    ) -> None:
        """Enter what was read from `place` on, and the cursor after it."""

    def find(self, wanted: Wanted, /) -> Iterator[Found]:
        """The changes that answer, by time."""

    def count(self, wanted: Wanted, by: By, most: int | None, /) -> list[Count]:
        """How many changes answer, by a value, the most frequent first."""
