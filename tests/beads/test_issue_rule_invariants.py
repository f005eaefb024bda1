"""Invariants of the issue rules under random requests; the cycle search agrees with a naive one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bonobofs.beads import dependency_rules, issue_rules
from bonobofs.beads.dependency_rules import NEW, find_cycle
from bonobofs.beads.issue import Actor, BeadsIssue, Edge, Issues, assignment, require_issue
from bonobofs.beads.issue_rules import IssueChanges, IssueRequest
from bonobofs.beads.refusals import Fault
from tests.beads.issues import ALICE, BOB, KNOWN, issue, issues, verdict

judge_close = verdict(issue_rules.judge_close)
judge_create = verdict(issue_rules.judge_create)
judge_dependency = verdict(dependency_rules.judge_dependency)
judge_removal = verdict(dependency_rules.judge_removal)
judge_reopen = verdict(issue_rules.judge_reopen)
judge_request = verdict(issue_rules.judge_request)
judge_update = verdict(issue_rules.judge_update)

NAMES = ("a", "b", "c", "d", "e")
ORDERING = ("blocks", "conditional-blocks", "waits-for")
KINDS = (*ORDERING, "parent-child", "related", "discovered-from")

edges = st.builds(Edge, st.sampled_from(NAMES), st.sampled_from(NAMES), st.sampled_from(KINDS))


def reaches(steps: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Every pair of which the second can be reached from the first, in one step or more."""
    found = set(steps)
    for via, one, on in product(NAMES, repeat=3):
        if (one, via) in found and (via, on) in found:
            found.add((one, on))
    return found


def is_circular(known: list[Edge], new: Edge) -> bool:
    """The oracle: the way back from the new edge's end, along bd's edges or with every parent after its children."""
    if new.issue == new.on:
        return True
    if new.kind in ("related", "discovered-from"):
        return False
    straight = {(edge.issue, edge.on) for edge in known if edge.kind in (*ORDERING, "parent-child")}
    ending = {(edge.issue, edge.on) for edge in known if edge.kind in ORDERING}
    ending |= {(edge.on, edge.issue) for edge in known if edge.kind == "parent-child"}
    first, last = (new.on, new.issue) if new.kind == "parent-child" else (new.issue, new.on)
    return (new.on, new.issue) in reaches(straight) or (last, first) in reaches(ending)


@given(st.lists(edges, max_size=12), edges)
@settings(max_examples=400)
def test_the_cycle_search_agrees_with_reachability(known: list[Edge], new: Edge) -> None:
    """The reported cycle consists of existing edges."""
    found = find_cycle(known, new)
    assert bool(found) == is_circular(known, new)
    if found:
        assert found[0] == found[-1]
        ties = {frozenset(edge[:2]) for edge in [*known, new]}
        assert all(frozenset(pair) in ties for pair in pairwise(found))


who = st.sampled_from([ALICE, BOB])
names = st.sampled_from([*NAMES, "gone", ""])
labels = st.lists(st.sampled_from(["phase:1", "phase:2", "unit:x", "wild", "type:y"]), max_size=2)
changes = st.fixed_dictionaries(
    {},
    optional={
        "status": st.sampled_from(["open", "in_progress", "done", "closed", "blocked"]),
        "assignee": st.sampled_from(["", "alice", "bob", "human"]),
        "title": st.sampled_from(["Another", "", "a\nb"]),
        "notes": st.sampled_from(["noted", "a\0b"]),
        "issue_type": st.sampled_from(["task", "epic"]),
        "labels": labels,
        "add_labels": labels,
        "remove_labels": labels,
        "metadata": st.just({}),
    },
)
words = st.sampled_from(["blocks", "parent", "waits-for", "conditional-blocks", "related", "tracks"])
calls = st.one_of(
    st.tuples(
        st.just("create"), who, st.sampled_from(["task", "epic", "message", "TASK"]), names, st.lists(names, max_size=2)
    ),
    st.tuples(st.just("update"), who, names, changes),
    st.tuples(st.just("close"), who, names),
    st.tuples(st.just("reopen"), who, names),
    st.tuples(st.just("add"), who, names, names, words),
    st.tuples(st.just("remove"), who, names, names),
)
IDS = {ALICE.label: ALICE.id, BOB.label: BOB.id}


class Model:
    """A store that does what the rules let through, and checks what must be true before it does."""

    def __init__(self) -> None:
        self.all: dict[str, BeadsIssue] = {"a": issue("a")}

    @property
    def issues(self) -> Issues:
        return issues(*self.all.values())

    def call(self, what: str, asks: Actor, *rest: Any) -> None:
        before = dict(self.all)
        getattr(self, what)(asks, *rest)
        changed = {name for name in before if self.all[name] != before[name]}
        for name in changed:
            old, new = before[name], self.all[name]
            assert old.assignee in ("", asks.label), "an issue of another agent is unchanged"
            assert old.issue_type == new.issue_type
            assert {one for one in old.labels if one.startswith("phase:")} <= set(new.labels)
            assert old.title == new.title or old.created_by == asks.label
        self.check()

    def check(self) -> None:
        every = self.issues
        for one in every.values():
            assert len([edge for edge in one.edges if edge.kind == "parent-child"]) <= 1
            others = [edge for edge in every.edges if edge not in one.edges]
            assert not any(is_circular([*others, *set(one.edges) - {edge}], edge) for edge in one.edges)
            below = [edge.issue for edge in every.edges if edge.on == one.id and edge.kind == "parent-child"]
            assert one.status != "closed" or all(every[child].status == "closed" for child in below)

    def create(self, asks: Actor, kind: str, parent: str, deps: list[str]) -> None:
        request = IssueRequest("New", kind, parent=parent, dependencies=tuple(deps))
        found = judge_request(request, KNOWN) or judge_create(self.issues, request, asks)
        free = [name for name in NAMES if name not in self.all]
        if isinstance(found, Fault) or not free:
            return
        made = [edge._replace(issue=free[0]) for edge in found if edge.issue == NEW]
        made += [Edge(free[0], parent, "parent-child")] if parent else []
        self.all[free[0]] = issue(free[0], created_by=asks.label, metadata={}, issue_type=kind)
        self._tie(*made)

    def update(self, asks: Actor, name: str, wanted: dict[str, Any]) -> None:
        edit = judge_update(self.issues, name, wanted, asks, KNOWN)
        if not isinstance(edit, IssueChanges):
            return
        one = self.all[name]
        fields: dict[str, Any] = dict(edit.fields)
        if "assignee" in fields:
            fields["metadata"] = {**one.metadata, **assignment(fields["assignee"], IDS.get(fields["assignee"]))}
        kept = tuple(label for label in one.labels if label not in edit.remove_labels) + edit.add_labels
        self.all[name] = replace(one, labels=kept, **fields)
        if edit.closes:
            self._close(name)

    def close(self, asks: Actor, name: str) -> None:
        if isinstance(judge_close(self.issues, name, "", asks), BeadsIssue):
            self._close(name)

    def reopen(self, asks: Actor, name: str) -> None:
        if isinstance(judge_reopen(self.issues, name, "", asks), BeadsIssue):
            self.all[name] = replace(self.all[name], status="open")

    def add(self, asks: Actor, blocked: str, blocker: str, word: str) -> None:
        edge = judge_dependency(self.issues, blocked, blocker, word, asks)
        if isinstance(edge, Edge):
            assert isinstance(require_issue(self.issues, edge.on), BeadsIssue)
            self._tie(edge)

    def remove(self, asks: Actor, blocked: str, blocker: str) -> None:
        edge = judge_removal(self.issues, blocked, blocker, asks)
        if isinstance(edge, Edge):
            one = self.all[blocked]
            self.all[blocked] = replace(one, edges=tuple(each for each in one.edges if each != edge))

    def _tie(self, *found: Edge) -> None:
        for edge in found:
            one = self.all[edge.issue]
            self.all[edge.issue] = replace(one, edges=(*one.edges, edge))

    def _close(self, name: str) -> None:
        for edge in self.all[name].edges:
            assert edge.kind not in ORDERING or self.all[edge.on].status == "closed"
        self.all[name] = replace(self.all[name], status="closed")


@given(st.lists(calls, max_size=25))
@settings(max_examples=300, deadline=None)
def test_random_requests_keep_the_invariants(asked: list[tuple[Any, ...]]) -> None:
    """No cycle, one parent, no closed issue above an open one, every change by a permitted agent."""
    model = Model()
    for what, asks, *rest in asked:
        model.call(what, asks, *rest)
