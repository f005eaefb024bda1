"""The operator's network lists, `$BONOBOFS_HOME/network.toml`: a general one, and those of single sources.

A connection needs an entry in the policy and in the operator's list. The list of a source replaces the general list,
which admits every host (`*`) until the operator edits it.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.errors import PolicyError, UsageError
from bonobofs.policy.allow_list import EVERYTHING, AllowList, parse_entry
from bonobofs.state.home import write_text
from bonobofs.state.worktree_registry import repository_of
from bonobofs.system.locks import locked

DEFAULT: Final = (EVERYTHING,)
_FILE: Final = "network.toml"
_OLD: Final = "network.toml.old"
_LOCK: Final = "network.lock"
_HEAD: Final = "# Written by `bonobofs network`. network.toml.old is the version before the last change.\n"


class OperatorLists(NamedTuple):
    """The content of network.toml."""

    general: list[str]
    sources: dict[str, list[str]]
    """The lists of single sources, by absolute path."""


def list_file(home: Path) -> Path:
    return home / _FILE


def operator_list(home: Path, source: Path) -> list[str]:
    """Return the list for a source; that of an issue's worktree is its repository's. PolicyError: no list. OSError."""
    lists = read_lists(home)
    return lists.sources.get(str(repository_of(home, source) or source), lists.general)


def read_lists(home: Path) -> OperatorLists:
    """Read network.toml; a missing file has the default list. PolicyError, OSError."""
    file = list_file(home)
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return OperatorLists([*DEFAULT], {})
    except UnicodeDecodeError:
        raise PolicyError(f"{file}: not UTF-8 text; correct it, or run bonobofs network reset") from None
    try:
        document = tomllib.loads(text)
        unknown = {*document} - {"allow", "source"}
        if unknown:
            raise PolicyError(f"unknown key {min(unknown)!a}")
        sources = document.get("source", {})
        if not isinstance(sources, dict):
            raise PolicyError("source must be a table of lists")
        return OperatorLists(
            _checked(document.get("allow", [*DEFAULT])), {path: _checked(entries) for path, entries in sources.items()}
        )
    except (PolicyError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise PolicyError(f"{file}: {error}; correct it, or run bonobofs network reset") from None


def _checked(entries: object) -> list[str]:
    if not isinstance(entries, list) or not all(isinstance(entry, str) for entry in entries):
        raise PolicyError("a list has texts")
    AllowList(entries)
    return entries


def allow(home: Path, source: Path | None, entries: list[str]) -> list[str]:
    """Add entries to the list of a source (None: the general list); return the list. UsageError, PolicyError, OSError.

    A list that admits every host stays as it is.
    """
    for entry in entries:
        _check(entry)

    def add(old: list[str]) -> list[str]:
        if EVERYTHING in (*old, *entries):
            return [EVERYTHING]
        return [*old, *(entry for entry in dict.fromkeys(entries) if entry not in old)]

    return _edit(home, source, add)


def disallow(home: Path, source: Path | None, entries: list[str]) -> list[str]:
    """Remove entries; arguments as for `allow`. UsageError: an entry is not in the list."""

    def remove(old: list[str]) -> list[str]:
        missing = [entry for entry in entries if entry not in old]
        if missing:
            every = ' It has "*": remove that first.' if EVERYTHING in old else ""
            raise UsageError(f"{missing[0]} is not in the list: {', '.join(old) or 'it is empty'}.{every}")
        return [entry for entry in old if entry not in entries]

    return _edit(home, source, remove)


def reset(home: Path, source: Path | None) -> list[str]:
    """Remove the list of a source, or with None all lists, also broken ones; return the list that now applies."""
    with locked(home / _LOCK):
        lists = OperatorLists([*DEFAULT], {})
        if source is not None:
            lists = read_lists(home)
            lists.sources.pop(str(source), None)
        _write(home, lists)
    return lists.general


def _check(entry: str) -> None:
    if entry != EVERYTHING:
        try:
            parse_entry(entry)
        except PolicyError as error:
            raise UsageError(str(error)) from None


def _edit(home: Path, source: Path | None, change: Callable[[list[str]], list[str]]) -> list[str]:
    with locked(home / _LOCK):
        lists = read_lists(home)
        if source is None:
            new = change(lists.general)
            lists = lists._replace(general=new)
        else:
            new = change(lists.sources.get(str(source), lists.general))
            lists.sources[str(source)] = new
        _write(home, lists)
    return new


def _write(home: Path, lists: OperatorLists) -> None:
    """Replace the file atomically, and keep the old version."""
    file = list_file(home)
    lines = [_HEAD, f"allow = {json.dumps(lists.general)}\n"]
    if lists.sources:
        lines.append("\n[source]\n")
        # JSON's texts are TOML's, except that TOML does not know surrogates.
        lines += [f"{json.dumps(path)} = {json.dumps(entries)}\n" for path, entries in sorted(lists.sources.items())]
    # Without the file every host would be admitted, so the old version gets a second name.
    with suppress(FileNotFoundError):
        os.unlink(home / _OLD)
    with suppress(FileNotFoundError):
        os.link(file, home / _OLD)
    write_text(file, "".join(lines))
