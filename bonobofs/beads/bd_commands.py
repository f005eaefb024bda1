"""What bd can be asked for at all: a fixed list of its commands, and of the flags of each.

A value never stands where bd could take it for something else: a flag and its value are one argument, and what is named
by its place stands behind `--`. `--actor` is always said, as it alone outweighs every file and variable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from bonobofs.errors import UsageError

FLAGS: Final[dict[str, frozenset[str]]] = {
    "where": frozenset(),
    "list": frozenset({"all", "include-gates", "include-infra", "limit"}),
    "comments": frozenset(),
    "create": frozenset(
        {
            "acceptance",
            "assignee",
            "description",
            "design",
            "labels",
            "metadata",
            "notes",
            "parent",
            "priority",
            "title",
            "type",
        }
    ),
    "update": frozenset(
        {
            "acceptance",
            "add-label",
            "assignee",
            "description",
            "design",
            "metadata",
            "notes",
            "parent",
            "priority",
            "remove-label",
            "status",
            "title",
            "type",
        }
    ),
    "close": frozenset({"reason"}),
    "reopen": frozenset({"reason"}),
    "delete": frozenset({"force"}),
    "dep add": frozenset({"type"}),
    "dep remove": frozenset(),
    "comments add": frozenset(),
}
"""No flag that leads elsewhere (--db, --repo, -C), that overrules bd (--force, but to take away what we have made),
that chooses an id, or that reads a file."""

_LABEL: Final = 255
_CONTROL: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u00[01]")
"""In JSON, where backspace, tab, line feed, form feed and carriage return have words of their own."""

Flag = tuple[str, str | None]
"""A name and its value; None for one that has none."""


def command(name: str, actor: str, flags: Iterable[Flag] = (), named: Iterable[str] = ()) -> list[str]:
    """The arguments of one call. UsageError: a value holds what no program can be told, or bd cannot store."""
    arguments = [*name.split(), "--json", f"--actor={actor}"]
    known = FLAGS[name]
    for flag, value in flags:
        if flag not in known:
            raise KeyError(f"bd {name} is not asked with --{flag}")
        arguments.append(f"--{flag}" if value is None else f"--{flag}={value}")
    if named := list(named):
        arguments += ["--", *named]
    for argument in arguments:
        check_text(argument)
    return arguments


def check_text(text: str) -> None:
    """UsageError for what is not UTF-8, which bd does not store, and for NUL, which ends an argument."""
    if "\0" in text:
        raise UsageError("a text for bd must not hold NUL")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError("a text for bd must be UTF-8") from None


def check_label(label: str) -> None:
    """UsageError for a label that bd would take apart, or read as something else, or cut."""
    if not label or label != label.strip() or not label.isprintable() or any(mark in label for mark in ',"'):
        raise UsageError(f"bd cannot be told the label {label!r}: no commas, quotes, or blanks around it")
    if len(label) > _LABEL:
        raise UsageError(f"bd keeps no more than {_LABEL} characters of a label; shorten {label[:40]}...")


def metadata_text(metadata: Mapping[str, Any]) -> str:
    """The JSON of it. UsageError for control characters, with which bd stores it and then lists no issue at all."""
    text = json.dumps(metadata)
    if _CONTROL.search(text):
        raise UsageError("metadata for bd must not hold control characters: bd could not list its issues any more")
    return text


def check_description(text: str) -> None:
    """UsageError for the one text in whose place bd would read its standard input."""
    if text == "-":
        raise UsageError("bd cannot be told the description '-': it would read its standard input for it")
