"""Wait for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

_T = TypeVar("_T")
PATIENCE: Final = 60.0
"""Seconds after which a wait fails; a machine under load may take that long for any step."""


def until(condition: Callable[[], _T], what: str, *, seconds: float = PATIENCE) -> _T:
    """Return the first true result of `condition`.

    Raises:
        AssertionError: there was none within `seconds`. The message names `what` did not happen.
    """
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"within {seconds:.0f} s it did not happen that {what}"
        time.sleep(0.002)
    return result


def seconds_until(condition: Callable[[], object], what: str) -> float:
    """Wait as `until` does. Return the seconds that it took."""
    began = time.monotonic()
    until(condition, what)
    return time.monotonic() - began
