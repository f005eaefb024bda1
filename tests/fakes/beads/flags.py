"""Arguments as bd reads them: flags anywhere, `--flag value` and `--flag=value`, `--` before what is none."""

from __future__ import annotations

import csv
from typing import Any

from .answers import USAGE, Failed

GLOBAL = {
    "directory": "C:text",
    "actor": "text",
    "db": "text",
    "dolt-auto-commit": "text",
    "global": "flag",
    "ignore-schema-skew": "flag",
    "json": "flag",
    "profile": "flag",
    "quiet": "q:flag",
    "readonly": "flag",
    "sandbox": "flag",
    "verbose": "v:flag",
    "format": "text",
    "help": "h:flag",
}
"""Name -> kind, after the letter if it has one: flag, text, list (split at commas), all (given several times)."""


def read(words: list[str], known: dict[str, str]) -> tuple[list[str], dict[str, Any]]:
    """The positional arguments, and the flags that were given."""
    kinds: dict[str, str] = {}
    letters: dict[str, str] = {}
    for name, told in {**GLOBAL, **known}.items():
        letter, _, kinds[name] = told.rpartition(":")
        if letter:
            letters[letter] = name
    positional: list[str] = []
    given: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            positional += rest
            break
        if not word.startswith("-") or word == "-":
            positional.append(word)
            continue
        name, equals, value = word[2:].partition("=") if word.startswith("--") else (word[1:2], "", word[2:])
        if not word.startswith("--"):
            equals, value = ("=", value.removeprefix("=")) if value else ("", "")
            known_name = letters.get(name)
        else:
            known_name = name if name in kinds else None
        if known_name is None:
            raise Failed(
                f"unknown {'flag: --' + name if word.startswith('--') else 'shorthand flag: ' + name}\n{USAGE}"
            )
        if kinds[known_name] == "flag":
            given[known_name] = value.lower() not in {"false", "0"} if equals else True
            continue
        if not equals:
            if not rest:
                raise Failed(f"flag needs an argument: --{known_name}\n{USAGE}")
            value = rest.pop(0)
        if kinds[known_name] == "list":
            given[known_name] = given.get(known_name, []) + (next(csv.reader([value])) if value else [])
        elif kinds[known_name] == "all":
            given[known_name] = [*given.get(known_name, []), value]
        else:
            given[known_name] = value
    return positional, given
