"""Check the arguments of a call: each function takes one argument off the dictionary, so that the rest is unknown."""

from __future__ import annotations

import sys
from typing import Any, Final, TypeVar

from bonobofs.errors import UsageError

Arguments = dict[str, Any]

_T = TypeVar("_T")
_MAX_TEXT: Final = 1 << 16
"""Characters of a text other than the content of a file."""


def optional(arguments: Arguments, name: str, kind: type[_T], limit: int = _MAX_TEXT) -> _T | None:
    """An argument of that type; None if it is missing. UsageError."""
    value = arguments.pop(name, None)
    if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
        raise UsageError(f"{name} is not of the type {kind.__name__}")
    if isinstance(value, int) and abs(value) > sys.maxsize:
        raise UsageError(f"{name} is too large a number")
    if isinstance(value, str) and len(value) > limit:
        raise UsageError(f"{name} has more than {limit} characters")
    return value


def required(arguments: Arguments, name: str, kind: type[_T], limit: int = _MAX_TEXT) -> _T:
    """An argument of that type. UsageError."""
    value = optional(arguments, name, kind, limit)
    if value is None:
        raise UsageError(f"the call needs {name}")
    return value


def required_texts(arguments: Arguments, name: str) -> list[str]:
    """An argument that is a list of texts. UsageError."""
    values = required(arguments, name, list)
    if not all(isinstance(value, str) for value in values):
        raise UsageError(f"{name} must be a list of texts")
    return values


def check_empty(arguments: Arguments) -> None:
    """UsageError if an argument is left that the call does not have."""
    if arguments:
        raise UsageError(f"the call takes no {', '.join(sorted(arguments))}")
