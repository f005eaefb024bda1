"""Which issue waits for which. bd looks for cycles along some edges only, so the gate walks all of them itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from bonobofs.beads.issue import PARENT, BeadsIssue, Edge

ORDERING: Final = frozenset({"blocks", "conditional-blocks", "waits-for"})
"""Kinds of edges along which the issue waits for what it depends on."""
FREE: Final = frozenset({"related", "discovered-from"})
"""Kinds that order nothing."""
KINDS: Final[Mapping[str, str]] = {"parent": PARENT, **{kind: kind for kind in (*ORDERING, PARENT, *FREE)}}
"""The words for dependencies, and what bd calls each."""
OPEN: Final = "open"


def waits_for(issues: Mapping[str, BeadsIssue], edges: Iterable[Edge], issue: str) -> list[str]:
    """What the issue waits for and has not ended. What cannot be found has not."""
    return sorted({on for one, on, kind in edges if one == issue and kind in ORDERING and not _ended(issues, on)})


def open_children(issues: Mapping[str, BeadsIssue], edges: Iterable[Edge], issue: str) -> list[str]:
    return sorted({one for one, on, kind in edges if on == issue and kind == PARENT and not _ended(issues, one)})


def parents(edges: Iterable[Edge], issue: str) -> list[str]:
    return sorted({on for one, on, kind in edges if one == issue and kind == PARENT})


def circle(edges: Iterable[Edge], new: Edge) -> list[str]:
    """The issues of a circle that the edge closes, from its one end back to it; [] where it closes none.

    Two orders are kept. In bd's a child follows its parent, and is held up with it. And since no issue is closed before
    its children, a parent ends after them: a child that waits, over whatever issues, for its own parent never ends.
    """
    if new.kind not in ORDERING and new.kind != PARENT:
        return [new.issue, new.on] if new.issue == new.on else []
    known = [edge for edge in edges if edge.kind in ORDERING or edge.kind == PARENT]
    return _circle([edge[:2] for edge in known], new[:2]) or _circle([_ending(edge) for edge in known], _ending(new))


def _ended(issues: Mapping[str, BeadsIssue], issue: str) -> bool:
    return issue in issues and issues[issue].is_closed


def _ending(edge: Edge) -> tuple[str, str]:
    """Which of the two cannot end before which other."""
    return (edge.on, edge.issue) if edge.kind == PARENT else (edge.issue, edge.on)


def _circle(steps: Iterable[tuple[str, str]], new: tuple[str, str]) -> list[str]:
    start, goal = new[1], new[0]
    onward: dict[str, list[str]] = {}
    for one, on in steps:
        onward.setdefault(one, []).append(on)
    came: dict[str, str] = {start: goal}
    rest = [start]
    while rest:
        at = rest.pop()
        if at == goal:
            found = [goal]
            while len(found) == 1 or found[-1] != goal:
                found.append(came[found[-1]])
            return found[::-1]
        for on in onward.get(at, ()):
            if on not in came:
                came[on] = at
                rest.append(on)
    return []
