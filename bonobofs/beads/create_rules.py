"""The rules for an issue that is made, and for what is said below one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from bonobofs.beads import field_rules, refusals
from bonobofs.beads.dependency_rules import NEW, new_edge, tie_new
from bonobofs.beads.issue import PARENT, BeadsIssue, Edge, Issues
from bonobofs.beads.issue_metadata import Who, existing
from bonobofs.beads.refusals import Fault
from bonobofs.beads.update_rules import MESSAGE, SPELLINGS, TEXTS
from bonobofs.policy.grants import Conventions

EPIC: Final = "epic"


class Draft(NamedTuple):
    """An issue as it is asked for."""

    title: str
    issue_type: str
    labels: tuple[str, ...] = ()
    priority: int | str = 2
    assignee: str = ""
    parent: str = ""
    texts: tuple[tuple[str, str], ...] = ()
    """Names and contents of the longer texts."""
    dependencies: tuple[str, ...] = ()
    """As `bd create --deps` takes them: ID, TYPE:ID, or blocks:ID for one that is to wait for the new issue."""
    strange: tuple[str, ...] = ()
    """Names of fields that no new issue has."""


def draft(title: object, issue_type: object, priority: int | str | None, fields: Mapping[str, Any]) -> Draft:
    """What a caller asks for. UsageError: a value is of the wrong kind."""
    given = {SPELLINGS.get(name, name): value for name, value in fields.items() if value is not None}
    return Draft(
        field_rules.text("title", title),
        field_rules.text("type", issue_type),
        field_rules.label_list(given.pop("labels", ())),
        2 if priority is None else priority,
        field_rules.text("assignee", given.pop("assignee", "")),
        field_rules.text("parent", given.pop("parent", "")),
        tuple((name, field_rules.text(name, given.pop(name))) for name in TEXTS if name in given),
        field_rules.label_list(given.pop("dependencies", ())),
        tuple(sorted(given)),
    )


def judge_draft(draft: Draft, known: Conventions) -> Fault | None:
    """What is wrong with a new issue whatever others there are."""
    return (
        field_rules.title(draft.title)
        or field_rules.strange(draft.strange)
        or (None if draft.issue_type in known.types else Fault(refusals.wrong_type(known)))
        or field_rules.few(draft.labels)
        or field_rules.labels(draft.labels, known)
        or field_rules.assignee(draft.assignee)
        or next((wrong for name, text in draft.texts if (wrong := field_rules.body(name, text))), None)
        or (_not_to_human(draft, known) if draft.issue_type == MESSAGE else None)
        or (number if isinstance(number := field_rules.priority(draft.priority), Fault) else None)
        or field_rules.few(draft.dependencies)
    )


def judge_create(issues: Issues, draft: Draft, who: Who) -> Fault | tuple[Edge, ...]:
    """The edges that a new issue, with which nothing is wrong by itself, gets beside its parent."""
    tied: list[Edge] = []
    if draft.parent:
        found = new_edge(issues, tied, Edge(NEW, draft.parent, PARENT))
        if isinstance(found, Fault):
            return found
        tied.append(Edge(NEW, draft.parent, PARENT))
    made = len(tied)
    for text in draft.dependencies:
        edge = tie_new(issues, tied, text, who)
        if isinstance(edge, Fault):
            return edge
        if edge is not None:
            tied.append(edge)
    return tuple(tied[made:])


def _not_to_human(draft: Draft, known: Conventions) -> Fault | None:
    return None if draft.assignee == known.human else Fault(refusals.not_to_human(known))


def judge_comment(issues: Issues, issue_id: str, text: str) -> Fault | BeadsIssue:
    """The issue that is commented on; anybody may, whosever it is."""
    issue = existing(issues, issue_id)
    if isinstance(issue, Fault):
        return issue
    return (Fault(refusals.TEXT) if not text.strip() else field_rules.body("comment", text)) or issue
