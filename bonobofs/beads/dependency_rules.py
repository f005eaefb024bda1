"""The rules for dependencies: which edge may come between two issues, and what must have ended before work begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from bonobofs.beads import refusals
from bonobofs.beads.dependency_graph import KINDS, OPEN, ORDERING, circle, parents, waits_for
from bonobofs.beads.issue import PARENT, BeadsIssue, Edge, Issues
from bonobofs.beads.issue_metadata import Who, existing, has_had_worktree, own
from bonobofs.beads.refusals import Fault, named

NEW: Final = "the new issue"
"""Stands in edges for the issue that is not made yet; no id has blanks."""

_NOT_BEGUN: Final = frozenset({OPEN, "blocked", "deferred"})


def judge_dependency(issues: Issues, blocked_id: str, blocker_id: str, word: str, who: Who) -> Fault | Edge | None:
    """The edge that is to be added."""
    kind = KINDS.get(word)
    if kind is None:
        return Fault(refusals.KIND)
    blocked = own(issues, blocked_id, who)
    if isinstance(blocked, Fault):
        return blocked
    return new_edge(issues, (), Edge(blocked_id, blocker_id, kind))


def judge_removal(issues: Issues, blocked_id: str, blocker_id: str, who: Who) -> Fault | Edge | None:
    """The edge that is to be removed, whatever its kind."""
    blocked = own(issues, blocked_id, who)
    if isinstance(blocked, Fault):
        return blocked
    return next((edge for edge in blocked.edges if edge.on == blocker_id), None)


def judge_begin(issues: Issues, issue_id: str) -> Fault | BeadsIssue:
    """The issue, if it waits for nothing, so that a worktree may be made for it. Its parent it need not wait for."""
    issue = existing(issues, issue_id)
    if isinstance(issue, Fault):
        return issue
    waiting = waits_for(issues, issues.edges, issue_id)
    return Fault(refusals.WAITING, f"It waits for {named(waiting)}.") if waiting else issue


def what_came_in_between(issues: Issues, edge: Edge) -> Fault | None:
    """Whether an edge that was added has, by what others did meanwhile, closed a circle or given a second parent."""
    others = [one for one in issues.edges if one != edge]
    return _second_parent(others, edge) or _closed_circle(others, edge)


def new_edge(issues: Issues, tied: Sequence[Edge], edge: Edge) -> Fault | Edge | None:
    """The edge, if it may come to what there is and to those of the new issue; None where it is there."""
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


def tie_new(issues: Issues, tied: Sequence[Edge], text: str, who: Who) -> Fault | Edge | None:
    """One dependency of an issue that is not made yet."""
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
