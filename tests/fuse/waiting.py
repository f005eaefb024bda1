"""Wait for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, TypeVar

_T = TypeVar("_T")
PATIENCE: Final = 15.0
"""Seconds after which a wait fails."""


def until(ask: Callable[[], _T], what: str, *, seconds: float = PATIENCE) -> _T:
    """The first true answer; AssertionError, saying `what` did not happen, when there is none in time."""
    deadline = time.monotonic() + seconds
    while not (answer := ask()):
        assert time.monotonic() < deadline, f"within {seconds:.0f} s it did not happen that {what}"
        time.sleep(0.005)
    return answer
