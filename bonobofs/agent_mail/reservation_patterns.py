"""What a reservation of Agent Mail covers, as patterns of ours.

There a `*` passes over slashes, and what is reserved by the name of a directory is all that lies in it. A lease must
cover no less.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bonobofs.policy.pattern import is_wild, parse

_MOST: Final = 32
"""Patterns of one lease that a reservation is written out to; one that takes more covers all below its first star."""
_STARS: Final = re.compile(r"\*+")


def covered(reserved: str, project: str, source: Path) -> tuple[str, ...]:
    """The patterns of a lease on this source that cover what is reserved; PolicyError where there is none."""
    text = reserved
    for above in (str(source), project):
        text = text.removeprefix(f"{above.rstrip('/')}/")
    text = text.removeprefix("./")
    parse(text)
    if not is_wild(text):
        below = not text.endswith("/") and (source / text).is_dir()
        return (f"{text}/",) if below else (text,)
    parts = text.split("/")
    written = ["/".join(found) for found in itertools.product(*(list(_passing(part)) for part in parts))]
    if len(written) > _MOST:
        first = next(number for number, part in enumerate(parts) if "*" in part)
        written = ["/".join([*parts[:first], "**"])]
    patterns = tuple(dict.fromkeys(re.sub(r"\*\*(/\*\*)+", "**", pattern) for pattern in written))
    for pattern in patterns:
        parse(pattern)
    return patterns


def _passing(part: str) -> Iterator[str]:
    """A component whose stars pass over slashes, as components of ours; in `[...]` a star is none."""
    if "[" in part or "*" not in part:
        yield part
        return
    before, *after = _STARS.split(part)
    # Where a star stands at the beginning, what it passes over may be nothing: one form says both.
    forms = [before]
    for place, text in enumerate(after):
        last = place == len(after) - 1 and not text
        grown = []
        for form in forms:
            name = form.rpartition("/")[2]
            if not name:
                grown.append(f"{form}**" if last else f"{form}**/*{text}")
            else:
                grown += [f"{form}*{text}", f"{form}*/**" if last else f"{form}*/**/*{text}"]
        forms = grown
    yield from forms
