"""The arguments of each bd call: a fixed list of commands and flags, and the parts of a change that bd must store.

A flag and its value are one argument, and positional values follow `--`, so bd cannot parse a value as a flag.
`--actor` is always given, because it overrides every file and environment variable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bonobofs.beads.issue import CLOSED, MESSAGE, OPEN, PARENT, BeadsIssue, NewIssue
from bonobofs.errors import UsageError

CALL: Final = "bonobofs_call"
"""Metadata key that marks the issue of one call. It finds the issue even if bd did not print its id."""

Missing = list[str]
"""The names of the requested parts that are not stored."""


@dataclass(frozen=True, slots=True)
class Update:
    """Changes of an issue's fields."""

    texts: Mapping[str, str]
    """By name: title, status, priority, assignee, description, design, acceptance, notes. "" clears a value."""
    metadata: Mapping[str, Any] | None = None
    """The whole new metadata, with the old keys; None keeps it."""
    add_labels: Sequence[str] = ()
    remove_labels: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raises UsageError for a label that bd would split, a description `-` and the status `closed`."""
        if self.texts.get("status") == CLOSED:
            raise UsageError("an issue is closed by closing it: an update would not check its blockers")
        for label in (*self.add_labels, *self.remove_labels):
            check_label(label)
        check_description(self.texts.get("description", ""))

    def flags(self) -> list[Flag]:
        return [
            *self.texts.items(),
            *(("add-label", label) for label in self.add_labels),
            *(("remove-label", label) for label in self.remove_labels),
            *(() if self.metadata is None else (("metadata", metadata_text(self.metadata)),)),
        ]

    def missing(self, issue: BeadsIssue) -> Missing:
        return [
            *(name for name, value in self.texts.items() if not _is(issue, name, value)),
            *(f"label {label}" for label in self.add_labels if label not in issue.labels),
            *(f"removal of label {label}" for label in self.remove_labels if label in issue.labels),
            *(("metadata",) if self.metadata is not None and not _contains(issue.metadata, self.metadata) else ()),
        ]


class Creation:
    """One issue to create, with a unique mark in its metadata."""

    def __init__(self, new: NewIssue, mark: str) -> None:
        """Raises UsageError as `Update` does."""
        texts = {name: getattr(new, name) for name in ("description", "design", "acceptance", "notes", "assignee")}
        texts |= {"title": new.title, "priority": str(new.priority), "status": OPEN}
        self._new: Final = new
        self._fields: Final = Update(texts, {**new.metadata, CALL: mark}, new.labels)

    def flags(self) -> list[Flag]:
        new, fields = self._new, self._fields
        return [
            # bd creates a message as ephemeral. A task that becomes a message is permanent.
            ("type", "task" if new.issue_type == MESSAGE else new.issue_type),
            *((name, value) for name, value in fields.texts.items() if value and name != "status"),
            *(("labels", label) for label in new.labels),
            *((("parent", new.parent),) if new.parent else ()),
            ("metadata", metadata_text(fields.metadata or {})),
        ]

    def missing(self, issue: BeadsIssue) -> Missing:
        new = self._new
        parents = [edge.on for edge in issue.edges if edge.kind == PARENT]
        return [
            *self._fields.missing(issue),
            *(() if issue.issue_type == new.issue_type and not issue.ephemeral else ("type",)),
            *(() if parents == ([new.parent] if new.parent else []) else ("parent",)),
        ]


def same(stored: str, requested: str) -> bool:
    """Return True if the texts are equal. Some versions of bd strip blanks around a text."""
    return stored.strip() == requested.strip()


def _is(issue: BeadsIssue, name: str, value: str) -> bool:
    return same(str(getattr(issue, name)), value)


def _contains(stored: Mapping[str, Any], requested: Mapping[str, Any]) -> bool:
    return all(key in stored and stored[key] == value for key, value in requested.items())


_FIELDS: Final = "acceptance assignee description design metadata notes priority title type"
_COMMANDS: Final = {
    "where": "",
    "list": "all include-gates include-infra limit",
    "comments": "",
    "create": f"{_FIELDS} labels parent",
    "update": f"{_FIELDS} add-label remove-label status",
    "close": "reason",
    "reopen": "reason",
    "delete": "force",
    "dep add": "type",
    "dep remove": "",
    "comments add": "",
}
FLAGS: Final = {name: frozenset(flags.split()) for name, flags in _COMMANDS.items()}
"""The flags of each command. None of them selects another database (--db, --repo, -C), chooses an id or reads a file.
--force, which overrides bd, only deletes an issue that the same client has created."""

_LABEL: Final = 255
_CONTROL: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]")
"""Control characters in JSON, except backspace, tab, line feed, form feed and carriage return."""

Flag = tuple[str, str | None]
"""Name and value of a flag. The value is None for a switch."""


def command(name: str, actor: str, flags: Iterable[Flag] = (), words: Sequence[str] = ()) -> list[str]:
    """Return the arguments of one call. UsageError: NUL or invalid UTF-8. KeyError: unknown name or flag."""
    arguments = [*name.split(), "--json", f"--actor={actor}"]
    known = FLAGS[name]
    for flag, value in flags:
        if flag not in known:
            raise KeyError(f"bd {name} does not take --{flag}")
        arguments.append(f"--{flag}" if value is None else f"--{flag}={value}")
    if words:
        arguments += ["--", *words]
    for argument in arguments:
        check_text(argument)
    return arguments


def check_text(text: str) -> None:
    """Raises UsageError for text that is not UTF-8, which bd does not store, and for NUL, which ends an argument."""
    if "\0" in text:
        raise UsageError("a text for bd must not contain NUL")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("a text for bd must be UTF-8") from None


def check_label(label: str) -> None:
    """Raises UsageError for a label that bd would split, misread or cut."""
    if not label or label != label.strip() or not label.isprintable() or any(mark in label for mark in ',"'):
        raise UsageError(f"bd would misread the label {label!r}; use no commas, no quotes and no blanks around it")
    if len(label) > _LABEL:
        raise UsageError(f"bd stores at most {_LABEL} characters of a label; shorten {label[:40]}...")


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """Return the JSON. Raises UsageError for control characters: bd stores them, and then cannot list any issue."""
    text = json.dumps(metadata)
    if _CONTROL.search(text):
        raise UsageError("bd cannot list an issue whose metadata has control characters; leave them out")
    return text


def check_description(text: str) -> None:
    """Raises UsageError for `-`, for which bd reads its standard input."""
    if text == "-":
        raise UsageError("bd would read its standard input for the description '-'; use another text")
