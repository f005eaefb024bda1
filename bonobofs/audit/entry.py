"""One entry of a trail: its fields, the paths that it names, and its line of JSON.

A line is a JSON object in ASCII without a newline, so that no name or message can forge a line. The keys have the order
of the fields of `AuditEntry`. The last key `hash` is the SHA-256 of the bytes before `,"hash":"`, in hex.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import MAXYEAR, MINYEAR, UTC, datetime
from hashlib import sha256
from itertools import islice
from json.encoder import encode_basestring_ascii
from types import UnionType
from typing import Any, Final, NamedTuple

from bonobofs.errors import TrailError

ZERO: Final = "0" * 64
"""`prev` of the first entry of a trail."""

HASH_KEY: Final = b',"hash":"'
HASH_TAIL: Final = len(HASH_KEY) + 64 + len(b'"}')
"""Bytes at the end of a line, without its newline, that its hash does not cover."""

LAYER: Final = "layer"
"""Key in the details of an intent whose change does not touch the source: `scratch` or `staged`."""

COUNTS: Final = "counts"
"""Key in the details of an intent and its outcome that represent many changes in scratch. The outcome has the numbers
`created`, `modified`, `deleted` and `failed`."""

TURN: Final = "turn"
"""Operation of the event that begins a turn. The changes of a trail up to the next such event belong to the turn. Its
details have the `name`, and in `by` what began it: `mark`, `hook` or `pause`."""

PROCESS: Final = "process"
"""Operation of the event that describes a process: its details have what was `observed`, with `parent`, the number of
the parent's entry or 0, and what it `claimed`. Also the key of a change's details with the number of that event."""

CALL_BEGIN: Final = "call_begin"
CALL_END: Final = "call_end"
"""Operations of the events by which the hooks of a client claim that a tool call begins and ends. Their details have
its id as `tool_call`; those of the begin also `tool`, `agent_session`, `turn` and `subagent`."""
UNKNOWN: Final = "unknown"
"""An id that the client did not give."""

REPLACES: Final = "replaces"
"""Key in the details of a rename: true if it replaces a file or an empty directory of the new name."""
BY: Final = "by"
"""Key in the details of an intent: temporary sibling name of the new content, until a rename to the path."""
INODE: Final = "inode"
"""Key in the details of an intent with BY, if known: inode number of the file that may have the temporary name, or a
list of such numbers."""
TOUCHES: Final = "touches"
"""Key in the details of an intent: further paths that the change touches. A path with a final `/` is a subtree."""

BEFORE: Final = "before"
"""Key in the details of an intent: `state_text` of the file at the path before the change."""
REPLACED: Final = "replaced_state"
"""Key in the details of the intent of a rename: `state_text` of the file at the new path."""
AFTER: Final = "after"
"""Key in the details of an outcome: `state_text` of the file after the change. Of a change that failed, only if it has
changed the file in spite of that."""
DIR_TIMES: Final = "dir_mtime"
"""Key in the details of an outcome: time of modification of the path's directory, in nanoseconds, before and after the
change of a name in it. In the intent of a change by path: the time before."""
TO_DIR_TIMES: Final = "to_dir_mtime"
"""The same for the directory of the new path of a rename, if it is another one."""
UNDO: Final = "undo"
"""Key in the details of an intent of an undo: name of the change that it takes back."""
TAKEN_BACK: Final = "taken_back"
"""Operation of the event at the end of an undo. Its details have the names of what it took back as `changes`."""
NOT_KEPT: Final = "not_kept"
"""Key in the details of an outcome: why the old content was not kept."""
LOSS: Final = "content_lost"
"""Operation of the event that the old content of an earlier change is not kept after all. Its details have the number
of the intent as `change`, and NOT_KEPT."""
OLD_TARGET: Final = "old_target"
"""Key in the details of an intent: text of the symlink that the change removes."""
XATTRS: Final = "xattrs"
"""Key in the details of an intent: the extended attributes of the removed directory, name to hex."""
OLD_VALUE: Final = "old_value"
NEW_VALUE: Final = "new_value"
"""Keys in the details of an intent: the extended attribute before and after the change, as hex; null: none."""

_OTHER_PATHS: Final = ("to", "from")
"""Keys in details of another path: `to` is the new name of a rename; `from` is the old name of a link or of a staged
file, or the file from which bytes were copied."""

_LONG: Final = 1 << 16
"""A line with at most this many characters keeps its texts whole. JSON takes up to six characters for one of a path."""
_LONGEST_BODY: Final = 8 << 20
LONGEST_TEXT: Final = 8192
"""Characters that each text keeps in a line longer than 64 KiB."""

Line = bytes
"""A line of a trail. The alias exists because `AuditEntry` has a field named `bytes`."""


class AuditEntry(NamedTuple):
    """A request to a guard, and its result. `Trail.append` sets `session`, `seq`, `prev`, `hash` and a missing UUID."""

    timestamp: datetime
    """Time with its zone; bonobofs writes UTC."""
    guard: str
    """`file`, `git`, `beads` or `network`."""
    operation: str
    agent: str
    """The agent's label."""
    details: dict[str, Any]
    """Particulars of the operation. An outcome has the number of its intent as `intent`."""
    result: str
    """`allowed`, `denied` or `error`."""
    reason: str | None
    """Why the request was denied or failed."""
    kind: str = "event"
    """`intent`, `outcome`, `alert` or `event`. A denial is an intent without an outcome."""
    session: str = ""
    agent_id: str = ""
    """The agent's UUID."""
    tool: str = ""
    """The function or program that made the request: evidence, never an identity."""
    path: str = ""
    """Relative to the workspace's root, decoded with surrogateescape."""
    action: str = ""
    """`create`, `modify`, `delete` or ""."""
    governance: str = "pass"
    """`pass` or `deny`."""
    lock: str = "none"
    """`none`, `own`, or the chain or label of the lease's holder."""
    code: str | None = None
    rule: str = ""
    bytes: int = 0
    """Number of bytes of the change."""
    seq: int = 0
    """Number in the trail, from 1."""
    prev: str = ZERO
    """Hash of the previous entry."""
    hash: str = ""

    def to_json(self) -> str:
        """Return the entry as one line of JSON without a newline."""
        return f'{body_of(self)}{self.seq},"prev":"{self.prev}","hash":"{self.hash}"}}'

    @classmethod
    def from_line(cls, line: str | Line) -> AuditEntry:
        """Parse a line of a trail, with or without its newline. TrailError: it is not an entry."""
        try:
            document = json.loads(line)
            moment = document["timestamp"] = datetime.fromisoformat(document["timestamp"])
            if not MINYEAR < moment.year < MAXYEAR:
                raise ValueError("its timestamp is out of range")
            entry = cls(**document)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise TrailError(f"this is not an entry of a trail: {error}") from None
        for name, kinds in _KINDS.items():
            if not isinstance(getattr(entry, name), kinds):
                raise TrailError(f"this is not an entry of a trail: its {name} has the wrong type")
        return entry


FIELDS: Final = AuditEntry._fields

_KINDS: Final[dict[str, type | UnionType]] = {
    **dict.fromkeys(FIELDS, str),
    "timestamp": datetime,
    "details": dict,
    "reason": str | None,
    "code": str | None,
    "bytes": int,
    "seq": int,
}


def is_effective(outcome: AuditEntry) -> bool:
    """Whether an outcome is of a change that was made, also of one that failed after it had changed the file."""
    return outcome.result == "allowed" or AFTER in outcome.details


def other_paths(details: Mapping[str, Any]) -> list[str]:
    """Return the paths that `details` names as `to` and `from`."""
    return [path for key in _OTHER_PATHS if isinstance(path := details.get(key), str)]


def touched_paths(details: Mapping[str, Any]) -> list[str]:
    """Return the paths that `details` lists as TOUCHES."""
    touches = details.get(TOUCHES)
    return [path for path in touches if isinstance(path, str)] if isinstance(touches, list) else []


def instant(moment: datetime) -> str:
    """Format a time as ISO 8601 in UTC with microseconds. A time without a zone counts as UTC."""
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return aware.astimezone(UTC).isoformat(timespec="microseconds")


def state_text(st: os.stat_result, links: int | None = None) -> str:
    """Format what the record keeps of a file: mode, uid, gid, mtime, size, inode, links, ctime.

    `links`: the number of names outside the store; None: all.
    """
    return (
        f"{st.st_mode} {st.st_uid} {st.st_gid} {st.st_mtime_ns} {st.st_size} {st.st_ino} "
        f"{st.st_nlink if links is None else links} {st.st_ctime_ns}"
    )


def object_of(details: dict[str, Any] | None) -> str:
    """Format `details` as one JSON object in ASCII. A value without a JSON form is written as its text."""
    if not details:
        return "{}"
    parts = []
    for key, value in details.items():
        # The hot path has str and int only. `type` and not `isinstance`, because the text of True is not JSON.
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
    """Format the line up to and including `"seq":`. The rest depends on the position in the trail."""
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
    """Return `before`, the quoted path and `after`. Cuts a path that alone makes the line too long.

    `within_bounds` has the same result, but formats and parses the whole line: 2 ms for a path of 150 KB.
    """
    if len(path) > _LONG and len(before) + len(after) <= LONGEST_TEXT:
        path = shortened(path, 0, LONGEST_TEXT)
    return f"{before}{encode_basestring_ascii(path)}{after}"


def within_bounds(body: str) -> str:
    """Return the first part of a line with its long texts cut, because readers accept lines of up to 16 MiB.

    A cut text ends with the SHA-256 of the whole text. Lists stay whole if the line then has at most 8 MiB.
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
    """Return a JSON value with at most `most_items` in each list and object, and `longest` characters in each text."""
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
        return [shortened(item, most_items, longest) for item in value[:most_items]] + [rest] * bool(rest)
    members = [(key, shortened(value[key], most_items, longest)) for key in islice(value, most_items)]
    return dict([*members, ("...", rest)] if rest else members)


def text_or_null(text: str | None) -> str:
    """Format a JSON string, or null."""
    return "null" if text is None else encode_basestring_ascii(text)
