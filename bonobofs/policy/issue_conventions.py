"""The [beads] table of a policy, ready for judging: which types, which labels, and who the person is that is asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

TYPES: Final = ("task", "epic", "bug", "feature", "chore", "decision", "message")
LABEL_PREFIXES: Final = ("phase", "unit", "stage", "type")
HUMAN: Final = "human"


class Conventions(NamedTuple):
    """What an issue may be like."""

    types: tuple[str, ...] = TYPES
    label_prefixes: tuple[str, ...] = LABEL_PREFIXES
    human: str = HUMAN
    """To whom messages are assigned."""


def conventions(document: Mapping[str, Any]) -> Conventions:
    """Those of a policy document, as plain data; what it leaves out is as it is shipped."""
    table = document.get("beads", {})
    return Conventions(
        tuple(table.get("types", TYPES)),
        tuple(table.get("label_prefixes", LABEL_PREFIXES)),
        table.get("human", HUMAN),
    )
