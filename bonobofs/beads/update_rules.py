"""The rules for what an issue says of itself: status, fields and labels of one that is there.

Words are judged before they are mapped: bd has no status `done`. What changes nothing is left out, for bd would still
write it: closing what is closed gives it a new reason and time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from bonobofs.beads import field_rules, refusals
from bonobofs.beads.dependency_graph import OPEN, open_children, parents, waits_for
from bonobofs.beads.issue import CLOSED, BeadsIssue, Issues
from bonobofs.beads.issue_metadata import Who, is_kept, is_made_by, own
from bonobofs.beads.refusals import Fault, named
from bonobofs.policy.grants import Conventions

PHASE: Final = "phase:"
DONE: Final = "done"
IN_PROGRESS: Final = "in_progress"
MESSAGE: Final = "message"
TEXTS: Final = ("description", "design", "acceptance", "notes")
SPELLINGS: Final = {"type": "issue_type", "acceptance_criteria": "acceptance"}
_FIELDS: Final = frozenset(
    {"title", *TEXTS, "priority", "assignee", "status", "issue_type", "labels", "add_labels", "remove_labels"}
)


class Edit(NamedTuple):
    """What an update comes to."""

    fields: Mapping[str, str | int]
    """New title, texts, priority, assignee and status (in_progress), as far as they change."""
    add_labels: tuple[str, ...] = ()
    remove_labels: tuple[str, ...] = ()
    closes: bool = False
    """At last it is closed."""


def judge_update(
    issues: Issues, issue_id: str, changes: Mapping[str, Any], who: Who, known: Conventions
) -> Fault | Edit | None:
    """UsageError: a value is of the wrong kind."""
    issue = own(issues, issue_id, who)
    if isinstance(issue, Fault):
        return issue
    asked = {SPELLINGS.get(name, name): value for name, value in changes.items() if value is not None}
    if strange := field_rules.strange(asked.keys() - _FIELDS):
        return strange
    fields: dict[str, str | int] = {}
    for judge in (_type, _texts, _priority, _assignee):
        found = judge(issue, asked, who, known)
        if isinstance(found, Fault):
            return found
        fields |= found
    labels = _labels(issue, asked, known)
    if isinstance(labels, Fault):
        return labels
    closes = False
    if "status" in asked:
        status = _status(issue.status, field_rules.text("status", asked["status"]))
        if isinstance(status, Fault):
            return status
        closes = status == CLOSED and not issue.is_closed
        if closes and (fault := _kept_open(issues, issue_id)):
            return fault
        if status == IN_PROGRESS != issue.status:
            fields["status"] = status
    edit = Edit(fields, *labels, closes)
    return edit if fields or edit.add_labels or edit.remove_labels or closes else None


def judge_close(issues: Issues, issue_id: str, reason: str, who: Who) -> Fault | BeadsIssue | None:
    """The issue that is to be closed."""
    issue = own(issues, issue_id, who)
    if isinstance(issue, Fault):
        return issue
    if issue.is_closed:
        return None
    return field_rules.body("reason", reason) or _kept_open(issues, issue_id) or issue


def judge_reopen(issues: Issues, issue_id: str, reason: str, who: Who) -> Fault | BeadsIssue | None:
    """The issue that is to be opened again."""
    issue = own(issues, issue_id, who)
    if isinstance(issue, Fault):
        return issue
    if issue.status == OPEN:
        return None
    if not issue.is_closed:
        return Fault(refusals.STATUS, f"It is {issue.status}.")
    closed = [one for one in parents(issues.edges, issue_id) if one in issues and issues[one].is_closed]
    if closed:
        return Fault(refusals.PARENT_CLOSED, f"Closed is {named(closed)}.")
    return field_rules.body("reason", reason) or issue


def _kept_open(issues: Issues, issue_id: str) -> Fault | None:
    waiting = waits_for(issues, issues.edges, issue_id)
    if waiting:
        return Fault(refusals.BLOCKERS, f"It waits for {named(waiting)}.")
    children = open_children(issues, issues.edges, issue_id)
    return Fault(refusals.CHILDREN, f"Not closed is {named(children)}.") if children else None


Found = Fault | dict[str, str | int]


def _type(issue: BeadsIssue, asked: Mapping[str, Any], _: Who, __: Conventions) -> Found:
    return {} if asked.get("issue_type", issue.issue_type) == issue.issue_type else Fault(refusals.IMMUTABLE)


def _texts(issue: BeadsIssue, asked: Mapping[str, Any], who: Who, _: Conventions) -> Found:
    new = {name: field_rules.text(name, asked[name]) for name in ("title", *TEXTS) if name in asked}
    changed = {name: text for name, text in new.items() if text != getattr(issue, name)}
    if changed and not is_made_by(issue, who):
        return Fault(refusals.AUTHOR, f"{issue.id} was made by {issue.created_by or 'somebody unknown'}.")
    for name, text in changed.items():
        fault = field_rules.title(text) if name == "title" else field_rules.body(name, text)
        if fault is not None:
            return fault
    return {**changed}


def _priority(issue: BeadsIssue, asked: Mapping[str, Any], _: Who, __: Conventions) -> Found:
    if "priority" not in asked:
        return {}
    number = field_rules.priority(asked["priority"])
    if isinstance(number, Fault):
        return number
    return {} if number == issue.priority else {"priority": number}


def _assignee(issue: BeadsIssue, asked: Mapping[str, Any], who: Who, known: Conventions) -> Found:
    if "assignee" not in asked:
        return {}
    name = field_rules.text("assignee", asked["assignee"])
    if name == issue.assignee and (name != who.label or is_kept(issue)):
        return {}
    if issue.issue_type == MESSAGE and name != known.human:
        return Fault(refusals.not_to_human(known))
    return field_rules.assignee(name) or {"assignee": name}


def _labels(
    issue: BeadsIssue, asked: Mapping[str, Any], known: Conventions
) -> Fault | tuple[tuple[str, ...], tuple[str, ...]]:
    """The labels that come, and those that go."""
    add = list(field_rules.label_list(asked.get("add_labels", ())))
    remove = list(field_rules.label_list(asked.get("remove_labels", ())))
    whole = field_rules.label_list(asked.get("labels", ()))
    if fault := field_rules.few([*add, *remove, *whole]):
        return fault
    if "labels" in asked:
        add += whole
        remove += [label for label in issue.labels if label not in whole]
    coming = tuple(dict.fromkeys(label for label in add if label not in issue.labels))
    going = tuple(dict.fromkeys(label for label in remove if label in issue.labels and label not in add))
    if staying := [label for label in going if label.startswith(PHASE)]:
        return Fault(refusals.PHASE, f"This is about {', '.join(map(ascii, staying))}.")
    return field_rules.labels(coming, known) or (coming, going)


def _status(now: str, word: str) -> str | Fault:
    """The status, in the words of bd, after a step that has this word."""
    if word == now:
        return now
    if word == CLOSED or (word == DONE and now == IN_PROGRESS):
        return CLOSED
    if word == IN_PROGRESS and now == OPEN:
        return IN_PROGRESS
    return Fault(refusals.STATUS, f"It is {now}.")
