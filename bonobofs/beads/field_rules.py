"""What the parts of an issue may look like, each by itself."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Final

from bonobofs.beads import refusals
from bonobofs.beads.refusals import LARGEST_TEXT, LONGEST_TITLE, MOST, Fault
from bonobofs.errors import UsageError
from bonobofs.policy.grants import Conventions

_CONTROLS: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})
_TURNED: Final = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""What makes a line look on a terminal as it is not."""
_LABEL_NAME: Final = re.compile(r"[^\s,\"]{1,200}")
_LONGEST_NAME: Final = 64
_PRIORITY: Final = re.compile(r"[Pp]?([0-4])")


def text(name: str, value: object) -> str:
    """What a caller gives as a text. UsageError: it is none."""
    if not isinstance(value, str):
        raise UsageError(f"the {name} of an issue is text, not {type(value).__name__}")
    return value


def label_list(value: object) -> tuple[str, ...]:
    """Labels as a caller gives them. UsageError: it is no list of texts."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise UsageError("labels are a list of texts")
    return tuple(text("label", each) for each in value)


def few(wanted: Sequence[str]) -> Fault | None:
    """Labels, or dependencies: each is looked up among all issues, while nobody else may use them."""
    return Fault(refusals.MANY, f"There are {len(wanted)}.") if len(wanted) > MOST else None


def strange(names: Iterable[str]) -> Fault | None:
    """About fields that nobody knows here."""
    told = ", ".join(map(ascii, sorted(names)))
    return Fault(refusals.FIELD, f"This is about {told}.") if told else None


def title(line: str) -> Fault | None:
    size = len(line.encode("utf-8", "surrogatepass"))
    wrong = not line.strip() or size > LONGEST_TITLE or not _is_one_line(line)
    return Fault(refusals.TITLE) if wrong else None


def body(name: str, content: str) -> Fault | None:
    """A longer text; it may have lines."""
    try:
        fits = len(content.encode()) <= LARGEST_TEXT
    except UnicodeEncodeError:
        fits = False
    return None if fits and "\0" not in content else Fault(refusals.TEXT, f"This is about the {name}.")


def priority(value: int | str) -> int | Fault:
    """The number of a priority; bd writes it as P2 too."""
    found = None if isinstance(value, int) and not 0 <= value <= 4 else _PRIORITY.fullmatch(str(value))
    return Fault(refusals.PRIORITY) if found is None else int(found[1])


def assignee(name: str) -> Fault | None:
    wrong = len(name) > _LONGEST_NAME or not name.isprintable() or name != name.strip()
    return Fault(refusals.ASSIGNEE) if wrong else None


def labels(wanted: Iterable[str], known: Conventions) -> Fault | None:
    """Those of an issue that is made, or that come to it."""
    for label in wanted:
        prefix, colon, name = label.partition(":")
        if prefix not in known.label_prefixes or not colon or not _LABEL_NAME.fullmatch(name) or not name.isprintable():
            return Fault(refusals.wrong_label(known), f"This is about {label!a}.")
    return None


def _is_one_line(line: str) -> bool:
    return not any(unicodedata.category(character) in _CONTROLS or character in _TURNED for character in line)
