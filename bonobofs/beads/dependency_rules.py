"""The rules for dependencies between issues, and the search for cycles. A rule refuses a change with a Fault.

bd looks for cycles along some kinds of edges only. This module searches all edges that order issues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from bonobofs.beads import refusals
from bonobofs.beads.issue import OPEN, PARENT, Actor, BeadsIssue, Edge, Issues, existing, has_had_worktree, own
from bonobofs.beads.refusals import Fault, named

NEW: Final = "the new issue"
"""Id of an issue that is not created yet, in its edges. Ids of bd contain no blanks."""

_NOT_BEGUN: Final = frozenset({OPEN, "blocked", "deferred"})


def judge_dependency(issues: Issues, blocked_id: str, blocker_id: str, word: str, who: Actor) -> Fault | Edge | None:
    """Return the edge to add, or None if it exists."""
    kind = KINDS.get(word)
    if kind is None:
        return Fault(refusals.KIND)
    blocked = own(issues, blocked_id, who)
    if isinstance(blocked, Fault):
        return blocked
    return new_edge(issues, (), Edge(blocked_id, blocker_id, kind))


def judge_removal(issues: Issues, blocked_id: str, blocker_id: str, who: Actor) -> Fault | Edge | None:
    """Return the edge to remove, whatever its kind, or None if there is none."""
    blocked = own(issues, blocked_id, who)
    if isinstance(blocked, Fault):
        return blocked
    return next((edge for edge in blocked.edges if edge.on == blocker_id), None)


def judge_begin(issues: Issues, issue_id: str) -> Fault | BeadsIssue:
    """Return the issue if a worktree may be made for it: all its blockers are closed. The parent may be open."""
    issue = existing(issues, issue_id)
    if isinstance(issue, Fault):
        return issue
    waiting = waits_for(issues, issues.edges, issue_id)
    return Fault(refusals.WAITING, f"It waits for {named(waiting)}.") if waiting else issue


def what_came_in_between(issues: Issues, edge: Edge) -> Fault | None:
    """Return a fault if concurrent changes made an added edge close a cycle or add a second parent."""
    others = [one for one in issues.edges if one != edge]
    return _second_parent(others, edge) or _closed_circle(others, edge)


def new_edge(issues: Issues, tied: Sequence[Edge], edge: Edge) -> Fault | Edge | None:
    """Judge an edge against all issues and the other edges of a new issue (`tied`). Returns None if it exists."""
    if edge.on != NEW and isinstance(other := existing(issues, edge.on), Fault):
        return other
    edges = (*issues.edges, *tied)
    kinds = {one.kind for one in edges if one[:2] == edge[:2]}
    if kinds:
        return None if edge.kind in kinds else Fault(refusals.PAIR, f"That one is {named(sorted(kinds))}.")
    return (
        (_begun(issues, edge) if edge.kind in ORDERING else None)
        or _second_parent(edges, edge)
        or _below_closed(issues, edge)
        or _closed_circle(edges, edge)
        or edge
    )


def tie_new(issues: Issues, tied: Sequence[Edge], text: str, who: Actor) -> Fault | Edge | None:
    """Judge one dependency of a new issue: `text` is ID, TYPE:ID or blocks:ID, as for `bd create --deps`."""
    word, colon, other = text.rpartition(":")
    if word == "blocks" and colon:
        blocked = own(issues, other, who)
        return blocked if isinstance(blocked, Fault) else new_edge(issues, tied, Edge(other, NEW, "blocks"))
    kind = "blocks" if not colon or word in {"depends-on", "blocked-by"} else KINDS.get(word)
    return Fault(refusals.KIND) if kind is None else new_edge(issues, tied, Edge(NEW, other, kind))


def _begun(issues: Issues, edge: Edge) -> Fault | None:
    if edge.issue == NEW:
        return None
    issue = issues[edge.issue]
    if issue.status not in _NOT_BEGUN:
        return Fault(refusals.BEGUN, f"{issue.id} is {issue.status}.")
    if has_had_worktree(issue):
        return Fault(refusals.BEGUN, f"{issue.id} has had a worktree.")
    ordered = any(one.kind in ORDERING for one in issue.edges)
    if ordered and not waits_for(issues, issue.edges, issue.id):
        return Fault(refusals.BEGUN, f"All that {issue.id} waited for has ended.")
    return None


def _second_parent(edges: Iterable[Edge], edge: Edge) -> Fault | None:
    others = parents(edges, edge.issue) if edge.kind == PARENT else []
    return Fault(refusals.PARENT, f"That one is {named(others)}.") if others else None


def _below_closed(issues: Issues, edge: Edge) -> Fault | None:
    if edge.kind != PARENT or edge.on == NEW or not issues[edge.on].is_closed:
        return None
    if edge.issue != NEW and issues[edge.issue].is_closed:
        return None
    return Fault(refusals.PARENT_CLOSED, f"Closed is {edge.on}.")


def _closed_circle(edges: Iterable[Edge], edge: Edge) -> Fault | None:
    found = circle(edges, edge)
    return Fault(refusals.CYCLE, f"The circle is {' -> '.join(found)}.") if found else None


ORDERING: Final = frozenset({"blocks", "conditional-blocks", "waits-for"})
"""Kinds of edges that make an issue wait until the other one is closed."""
FREE: Final = frozenset({"related", "discovered-from"})
"""Kinds of edges without an order."""
KINDS: Final[Mapping[str, str]] = {"parent": PARENT, **{kind: kind for kind in (*ORDERING, PARENT, *FREE)}}
"""bd's kind for each word that a caller may use."""


def waits_for(issues: Mapping[str, BeadsIssue], edges: Iterable[Edge], issue: str) -> list[str]:
    """Return the open blockers of the issue. An unknown issue counts as open."""
    return sorted({on for one, on, kind in edges if one == issue and kind in ORDERING and not _ended(issues, on)})


def open_children(issues: Mapping[str, BeadsIssue], edges: Iterable[Edge], issue: str) -> list[str]:
    return sorted({one for one, on, kind in edges if on == issue and kind == PARENT and not _ended(issues, one)})


def parents(edges: Iterable[Edge], issue: str) -> list[str]:
    return sorted({on for one, on, kind in edges if one == issue and kind == PARENT})


def circle(edges: Iterable[Edge], new: Edge) -> list[str]:
    """Return the issues of the cycle that the edge closes, from one end back to it; [] if it closes none.

    Two orders must be free of cycles. In bd's order, a child comes after its parent and is blocked with it. In
    the order of closing, a parent comes after its children: a child that waits for its own parent can never close.
    """
    if new.kind not in ORDERING and new.kind != PARENT:
        return [new.issue, new.on] if new.issue == new.on else []
    known = [edge for edge in edges if edge.kind in ORDERING or edge.kind == PARENT]
    return _circle([edge[:2] for edge in known], new[:2]) or _circle([_ending(edge) for edge in known], _ending(new))


def _ended(issues: Mapping[str, BeadsIssue], issue: str) -> bool:
    return issue in issues and issues[issue].is_closed


def _ending(edge: Edge) -> tuple[str, str]:
    """Return the edge as (later, earlier): the first issue is closed after the second."""
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
