"""The rules for dependencies between issues, and the search for cycles. A rule raises Fault.

bd looks for cycles along some kinds of edges only. This module searches all edges that order issues.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from bonobofs.beads import refusals
from bonobofs.beads.issue import (
    OPEN,
    PARENT,
    Actor,
    BeadsIssue,
    Edge,
    Issues,
    has_had_worktree,
    require_issue,
    require_open_to,
)
from bonobofs.beads.refusals import Fault, format_ids

NEW: Final = "the new issue"
"""Id of an issue that is not created yet, in its edges. Ids of bd contain no blanks."""

_NOT_BEGUN: Final = frozenset({OPEN, "blocked", "deferred"})


def judge_dependency(issues: Issues, blocked_id: str, blocker_id: str, word: str, actor: Actor) -> Edge | None:
    """Return the edge to add, or None if it exists."""
    kind = _kind(word)
    require_open_to(issues, blocked_id, actor)
    return new_edge(issues, (), Edge(blocked_id, blocker_id, kind))


def judge_removal(issues: Issues, blocked_id: str, blocker_id: str, actor: Actor) -> Edge | None:
    """Return the edge to remove, whatever its kind, or None if there is none."""
    blocked = require_open_to(issues, blocked_id, actor)
    return next((edge for edge in blocked.edges if edge.on == blocker_id), None)


def judge_begin(issues: Issues, issue_id: str) -> BeadsIssue:
    """Return the issue if a worktree may be made for it: all its blockers are closed. The parent may be open."""
    issue = require_issue(issues, issue_id)
    if waiting := waits_for(issues, issues.edges, issue_id):
        raise Fault(refusals.WAITING, f"It waits for {format_ids(waiting)}.")
    return issue


def judge_concurrent(issues: Issues, edge: Edge) -> None:
    """Check that concurrent changes did not make an added edge close a cycle or add a second parent."""
    others = [other for other in issues.edges if other != edge]
    _check_single_parent(others, edge)
    _check_cycle(others, edge)


def new_edge(issues: Issues, new_edges: Sequence[Edge], edge: Edge) -> Edge | None:
    """Judge an edge against all issues and the other edges of a new issue (`new_edges`). Returns None if it exists."""
    if edge.on != NEW:
        require_issue(issues, edge.on)
    edges = (*issues.edges, *new_edges)
    kinds = {other.kind for other in edges if other[:2] == edge[:2]}
    if edge.kind in kinds:
        return None
    if kinds:
        raise Fault(refusals.PAIR, f"That one is {format_ids(sorted(kinds))}.")
    if edge.kind in ORDERING and edge.issue != NEW:
        _check_not_begun(issues, issues[edge.issue])
    _check_single_parent(edges, edge)
    _check_parent_open(issues, edge)
    _check_cycle(edges, edge)
    return edge


def judge_new_dependency(issues: Issues, new_edges: Sequence[Edge], text: str, actor: Actor) -> Edge | None:
    """Judge one dependency of a new issue: `text` is ID, TYPE:ID or blocks:ID, as for `bd create --deps`."""
    word, colon, other = text.rpartition(":")
    if word == "blocks" and colon:
        require_open_to(issues, other, actor)
        return new_edge(issues, new_edges, Edge(other, NEW, "blocks"))
    kind = "blocks" if not colon or word in {"depends-on", "blocked-by"} else _kind(word)
    return new_edge(issues, new_edges, Edge(NEW, other, kind))


def _kind(word: str) -> str:
    if word not in KINDS:
        raise Fault(refusals.KIND)
    return KINDS[word]


def _check_not_begun(issues: Issues, issue: BeadsIssue) -> None:
    if issue.status not in _NOT_BEGUN:
        raise Fault(refusals.BEGUN, f"{issue.id} is {issue.status}.")
    if has_had_worktree(issue):
        raise Fault(refusals.BEGUN, f"{issue.id} has had a worktree.")
    if any(edge.kind in ORDERING for edge in issue.edges) and not waits_for(issues, issue.edges, issue.id):
        raise Fault(refusals.BEGUN, f"All blockers of {issue.id} are closed.")


def _check_single_parent(edges: Iterable[Edge], edge: Edge) -> None:
    if edge.kind == PARENT and (others := parents(edges, edge.issue)):
        raise Fault(refusals.PARENT, f"That one is {format_ids(others)}.")


def _check_parent_open(issues: Issues, edge: Edge) -> None:
    if edge.kind != PARENT or edge.on == NEW or not issues[edge.on].is_closed:
        return
    if edge.issue == NEW or not issues[edge.issue].is_closed:
        raise Fault(refusals.PARENT_CLOSED, f"{edge.on} is closed.")


def _check_cycle(edges: Iterable[Edge], edge: Edge) -> None:
    if cycle := find_cycle(edges, edge):
        raise Fault(refusals.CYCLE, f"The cycle is {' -> '.join(cycle)}.")


ORDERING: Final = frozenset({"blocks", "conditional-blocks", "waits-for"})
"""Kinds of edges that make an issue wait until the other one is closed."""
FREE: Final = frozenset({"related", "discovered-from"})
"""Kinds of edges without an order."""
KINDS: Final[Mapping[str, str]] = {"parent": PARENT, **{kind: kind for kind in (*ORDERING, PARENT, *FREE)}}
"""bd's kind for each word that a caller may use."""


def waits_for(issues: Mapping[str, BeadsIssue], edges: Iterable[Edge], issue: str) -> list[str]:
    """Return the open blockers of the issue. An unknown issue counts as open."""
    blockers = {edge.on for edge in edges if edge.issue == issue and edge.kind in ORDERING}
    return sorted(blocker for blocker in blockers if not _is_closed(issues, blocker))


def open_children(issues: Mapping[str, BeadsIssue], edges: Iterable[Edge], issue: str) -> list[str]:
    children = {edge.issue for edge in edges if edge.on == issue and edge.kind == PARENT}
    return sorted(child for child in children if not _is_closed(issues, child))


def parents(edges: Iterable[Edge], issue: str) -> list[str]:
    return sorted({edge.on for edge in edges if edge.issue == issue and edge.kind == PARENT})


def find_cycle(edges: Iterable[Edge], new: Edge) -> list[str]:
    """Return the issues of the cycle that the edge closes, from one end back to it; [] if it closes none.

    Two orders must be free of cycles. In bd's order, a child comes after its parent and is blocked with it. In
    the order of closing, a parent comes after its children: a child that waits for its own parent can never close.
    """
    if new.kind not in ORDERING and new.kind != PARENT:
        return [new.issue, new.on] if new.issue == new.on else []
    ordered = [edge for edge in edges if edge.kind in ORDERING or edge.kind == PARENT]
    return _path_back([edge[:2] for edge in ordered], new[:2]) or _path_back(map(_closing, ordered), _closing(new))


def _is_closed(issues: Mapping[str, BeadsIssue], issue: str) -> bool:
    return issue in issues and issues[issue].is_closed


def _closing(edge: Edge) -> tuple[str, str]:
    """Return the edge as (later, earlier): the first issue is closed after the second."""
    return (edge.on, edge.issue) if edge.kind == PARENT else (edge.issue, edge.on)


def _path_back(steps: Iterable[tuple[str, str]], new: tuple[str, str]) -> list[str]:
    """Return a cycle of the steps and the new one; [] if there is none."""
    goal, start = new
    successors: dict[str, list[str]] = {}
    for issue, on in steps:
        successors.setdefault(issue, []).append(on)
    predecessors = {start: goal}
    pending = [start]
    while pending:
        issue = pending.pop()
        if issue == goal:
            cycle = [goal]
            while len(cycle) == 1 or cycle[-1] != goal:
                cycle.append(predecessors[cycle[-1]])
            return cycle[::-1]
        for on in successors.get(issue, ()):
            if on not in predecessors:
                predecessors[on] = issue
                pending.append(on)
    return []
