"""Check the arguments of a call of the guard socket by the annotations of the function that answers it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from inspect import Parameter, signature
from types import NoneType
from typing import Any, Final, NewType, get_args, get_origin, get_type_hints

from bonobofs.errors import UsageError

Content = NewType("Content", str)
"""A text that only the size of the call limits."""

_MAX_TEXT: Final = 1 << 16
"""Characters of any other text."""
OTHERS: Final = "**"
"""The name under which a call takes arguments of any other name."""


@cache
def kinds_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the arguments of a call by name, each with its type. `T | None` is optional. `OTHERS` permits others.

    The parameters `session` and `descriptors` are not arguments of a call.
    """
    hints = get_type_hints(function)
    kinds = {}
    for name, parameter in signature(function).parameters.items():
        if parameter.kind is Parameter.VAR_KEYWORD:
            kinds[OTHERS] = Any
        elif name not in ("session", "descriptors"):
            kinds[name] = hints[name] if parameter.default is Parameter.empty else hints[name] | None
    return kinds


def check_arguments(arguments: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that are not null. Raises UsageError for missing, unknown and invalid arguments."""
    present = {name: value for name, value in arguments.items() if value is not None}
    for name, kind in kinds.items():
        if name in present:
            _check(name, present[name], kind)
        elif name != OTHERS and NoneType not in get_args(kind):
            raise UsageError(f"the call needs {name}")
    if OTHERS not in kinds and (unknown := present.keys() - kinds.keys()):
        raise UsageError(f"the call takes no {', '.join(sorted(unknown))}")
    return present


def _check(name: str, value: Any, kind: Any) -> None:
    if NoneType in get_args(kind):
        kind = get_args(kind)[0]
    wanted = get_origin(kind) or getattr(kind, "__supertype__", kind)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        raise UsageError(f"{name} is not of the type {wanted.__name__}")
    if isinstance(value, int) and abs(value) > sys.maxsize:
        raise UsageError(f"{name} is too large a number")
    if kind is str and len(value) > _MAX_TEXT:
        raise UsageError(f"{name} has more than {_MAX_TEXT} characters")
    if kind == list[str] and not all(isinstance(member, str) for member in value):
        raise UsageError(f"{name} must be a list of texts")
