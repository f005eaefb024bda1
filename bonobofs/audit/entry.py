"""One entry of a trail: its fields, and its one line of JSON.

A line is a JSON object in ASCII with no newline in it, so no name or message can forge a line. The fields stand in
the order of `AuditEntry`; `hash` is the last key and covers the bytes of the line before `,"hash":"`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from datetime import MAXYEAR, MINYEAR, UTC, datetime
from hashlib import sha256
from itertools import islice
from json.encoder import encode_basestring_ascii
from types import UnionType
from typing import Any, Final

from bonobofs.errors import TrailError

ZERO: Final = "0" * 64
"""What the first entry of a trail names as the hash of the one before it."""

HASH_KEY: Final = b',"hash":"'
HASH_TAIL: Final = len(HASH_KEY) + 64 + len(b'"}')
"""Bytes of a line, its newline aside, that its hash does not cover."""

LAYER: Final = "layer"
"""Key in the details of an intent: `scratch` or `temporary` where the change leaves the source as it is."""

COUNTS: Final = "counts"
"""Key in the details of an intent and its outcome that stand for many changes in scratch. The outcome has the numbers,
as `created`, `modified`, `deleted`, `failed`."""

REPLACES: Final = "replaces"
"""Key in the details of a rename: true where the other name had a file or an empty directory, which this replaces."""
BY: Final = "by"
"""Key in the details of an intent: the name, beside the one that changes, by way of which new content comes there."""
INODE: Final = "inode"
"""Key in the details of an intent with BY: the number of the inode that is to get the name, where it is known."""
TOUCHES: Final = "touches"
"""Key in the details of an intent: further paths that the change touches; one that ends in `/` is all below it."""

_LONG: Final = 1 << 16
"""Characters of a line whose texts stay whole. A path of LONGEST_TEXT characters may take six times as many."""
_LONGEST_BODY: Final = 8 << 20
LONGEST_TEXT: Final = 8192
"""Characters that a line longer than 64 KiB has of each text."""

Line = bytes
"""A line as it lies on the disk. `AuditEntry` has a field named `bytes`, so the type needs another name there."""


@dataclass(slots=True)
class AuditEntry:
    """What was asked of a guard and what came of it. Seven fields are the caller's, the rest the trail's."""

    timestamp: datetime
    """When, with its time zone; in UTC wherever bonobofs makes it."""
    guard: str
    """`file`, `git` or `beads`."""
    operation: str
    agent: str
    """The agent's label."""
    details: dict[str, Any]
    """Particulars of the operation; an outcome has the number of its intent here, as `intent`."""
    result: str
    """`allowed`, `denied` or `error`."""
    reason: str | None
    """Why it was denied or failed."""
    kind: str = "event"
    """`intent`, `outcome`, `alert` or `event`. A denial is an intent that has no outcome."""
    session: str = ""
    agent_id: str = ""
    """The agent's UUID."""
    tool: str = ""
    """The function or program that asked: evidence, never an identity."""
    path: str = ""
    """Below the workspace's root; bytes that are not UTF-8 by surrogateescape."""
    action: str = ""
    """`create`, `modify`, `delete`, or nothing."""
    governance: str = "pass"
    """`pass` or `deny`."""
    lock: str = "none"
    """`none`, `own`, or the chain that holds the lease."""
    code: str | None = None
    rule: str = ""
    bytes: int = 0
    """How many bytes the change carried."""
    seq: int = 0
    """Place in the trail, from 1."""
    prev: str = field(default=ZERO, repr=False)
    """Hash of the entry before."""
    hash: str = field(default="", repr=False)

    def to_json(self) -> str:
        """Give the entry as one JSON object on one line, all fields in their order, without a newline."""
        return f'{body_of(self)}{self.seq},"prev":"{self.prev}","hash":"{self.hash}"}}'

    @classmethod
    def from_line(cls, line: str | Line) -> AuditEntry:
        """Read a line of a trail, with or without its newline; TrailError when it is not an entry."""
        try:
            document = json.loads(line)
            moment = document["timestamp"] = datetime.fromisoformat(document["timestamp"])
            if not MINYEAR < moment.year < MAXYEAR:
                raise ValueError("its moment has no name in every time zone")
            entry = cls(**document)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise TrailError(f"this is not an entry of a trail: {error}") from None
        for name, kinds in _KINDS.items():
            if not isinstance(getattr(entry, name), kinds):
                raise TrailError(f"this is not an entry of a trail: its {name} is of the wrong kind")
        return entry


FIELDS: Final = tuple(each.name for each in fields(AuditEntry))

_KINDS: Final[dict[str, type | UnionType]] = {
    **dict.fromkeys(FIELDS, str),
    "timestamp": datetime,
    "details": dict,
    "reason": str | None,
    "code": str | None,
    "bytes": int,
    "seq": int,
}


def instant(moment: datetime) -> str:
    """Write a moment as ISO 8601 in UTC with microseconds; one that names no zone is taken as UTC."""
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return aware.astimezone(UTC).isoformat(timespec="microseconds")


def object_of(details: dict[str, Any] | None) -> str:
    """Write `details` as one JSON object in ASCII. What JSON has no form for is written as its text."""
    if not details:
        return "{}"
    parts = []
    for key, value in details.items():
        # Exactly str and int, which is all that the hot path has: True is an int whose text is no JSON.
        if type(key) is not str:
            return json.dumps(details, separators=(",", ":"), default=str)
        if type(value) is int:
            parts.append(f"{encode_basestring_ascii(key)}:{value}")
        elif type(value) is str:
            parts.append(f"{encode_basestring_ascii(key)}:{encode_basestring_ascii(value)}")
        else:
            return json.dumps(details, separators=(",", ":"), default=str)
    return f"{{{','.join(parts)}}}"


def body_of(entry: AuditEntry) -> str:
    """Write the line's beginning, up to and with `"seq":`: all that is known before its place in the trail is."""
    return (
        f'{{"timestamp":"{instant(entry.timestamp)}"'
        f',"guard":{encode_basestring_ascii(entry.guard)}'
        f',"operation":{encode_basestring_ascii(entry.operation)}'
        f',"agent":{encode_basestring_ascii(entry.agent)}'
        f',"details":{object_of(entry.details)}'
        f',"result":{encode_basestring_ascii(entry.result)}'
        f',"reason":{text_or_null(entry.reason)}'
        f',"kind":{encode_basestring_ascii(entry.kind)}'
        f',"session":{encode_basestring_ascii(entry.session)}'
        f',"agent_id":{encode_basestring_ascii(entry.agent_id)}'
        f',"tool":{encode_basestring_ascii(entry.tool)}'
        f',"path":{encode_basestring_ascii(entry.path)}'
        f',"action":{encode_basestring_ascii(entry.action)}'
        f',"governance":{encode_basestring_ascii(entry.governance)}'
        f',"lock":{encode_basestring_ascii(entry.lock)}'
        f',"code":{text_or_null(entry.code)}'
        f',"rule":{encode_basestring_ascii(entry.rule)}'
        f',"bytes":{int(entry.bytes)}'
        ',"seq":'
    )


def with_path(before: str, path: str, after: str) -> str:
    """Return `before`, the path in quotes, and `after`. A path is cut that makes the line too long by itself.

    The result is that of `within_bounds`, which first writes and reads the whole: 2 ms for a path of 150 KB.
    """
    if len(path) > _LONG and len(before) + len(after) <= LONGEST_TEXT:
        path = shortened(path, 0, LONGEST_TEXT)
    return f"{before}{encode_basestring_ascii(path)}{after}"


def within_bounds(body: str) -> str:
    """Return the beginning of a line, with long texts cut; a reader takes lines of up to 16 MiB.

    The digest of the whole replaces what is cut. Lists stay whole as long as the line has at most 8 MiB.
    """
    if len(body) <= _LONG:
        return body
    entry = json.loads(f"{body}0}}")
    for most_items, longest in ((len(body), LONGEST_TEXT), (1000, 256), (10, 64)):
        cut = json.dumps(shortened(entry, most_items, longest), separators=(",", ":"))[:-2]
        if len(cut) <= _LONGEST_BODY:
            break
    return cut


def shortened(value: Any, most_items: int, longest: int) -> Any:
    """Return a JSON value with at most so many items in each list and object, and characters in each text."""
    if isinstance(value, str) and len(value) > longest:
        digest = sha256(value.encode("utf-8", "surrogatepass")).hexdigest()
        return f"{value[:longest]}... ({len(value)} characters, sha256 {digest})"
    if not isinstance(value, (dict, list)):
        return value
    rest = ""
    if len(value) > most_items:
        digest = sha256(json.dumps(value, separators=(",", ":")).encode()).hexdigest()
        rest = f"({len(value)} items, sha256 {digest})"
    if isinstance(value, list):
        return [shortened(one, most_items, longest) for one in value[:most_items]] + [rest] * bool(rest)
    members = [(key, shortened(value[key], most_items, longest)) for key in islice(value, most_items)]
    return dict([*members, ("...", rest)] if rest else members)


def text_or_null(text: str | None) -> str:
    """Write a JSON string, or null."""
    return "null" if text is None else encode_basestring_ascii(text)
