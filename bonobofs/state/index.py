"""What is said to the index and what it answers: plain values, for those who need no database to name them."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import NamedTuple


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
    return str(json.loads(f'"{stored}"'))
