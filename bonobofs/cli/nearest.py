"""The known names that are nearest to an unknown one, for error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def close_names(name: str, known: Iterable[str]) -> list[str]:
    """Return at most three known names that look like a misspelling of the name, the nearest first."""
    return difflib.get_close_matches(name, sorted(set(known)), n=3, cutoff=0.6)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean alice?`, else `; known are alice, bob`, or "" where nothing is known."""
    names = sorted(set(known))
    close = close_names(name, names)
    if close:
        return f"; did you mean {' or '.join(close)}?"
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    return f"; known are {', '.join(names[:12])}{more}" if names else ""
