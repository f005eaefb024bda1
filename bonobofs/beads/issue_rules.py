"""The rules for creating, updating, closing, reopening and commenting on issues. Each refuses a call with a Fault.

A rule checks the caller's words before they are mapped to bd's: bd has no status `done`. An update leaves out every
value that the issue already has, because bd would write it again: closing a closed issue changes its reason and time.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from bonobofs.beads import refusals
from bonobofs.beads.dependency_rules import NEW, new_edge, open_children, parents, tie_new, waits_for
from bonobofs.beads.issue import (
    CLOSED,
    MESSAGE,
    OPEN,
    PARENT,
    Actor,
    BeadsIssue,
    Edge,
    Issues,
    existing,
    is_kept,
    is_made_by,
    own,
)
from bonobofs.beads.refusals import LARGEST_TEXT, LONGEST_TITLE, MOST, Fault, named
from bonobofs.errors import UsageError
from bonobofs.policy.grants import Conventions

PHASE: Final = "phase:"
DONE: Final = "done"
IN_PROGRESS: Final = "in_progress"
TEXTS: Final = ("description", "design", "acceptance", "notes")
SPELLINGS: Final = {"type": "issue_type", "acceptance_criteria": "acceptance"}
_FIELDS: Final = frozenset(
    {"title", *TEXTS, "priority", "assignee", "status", "issue_type", "labels", "add_labels", "remove_labels"}
)


class Edit(NamedTuple):
    """The changes of an update."""

    fields: Mapping[str, str | int]
    """Changed values of title, texts, priority, assignee and status (in_progress)."""
    add_labels: tuple[str, ...] = ()
    remove_labels: tuple[str, ...] = ()
    closes: bool = False
    """True if the issue is then closed."""


def judge_update(
    issues: Issues, issue_id: str, changes: Mapping[str, Any], who: Actor, known: Conventions
) -> Fault | Edit | None:
    """Return the changes, or None if there are none. Raises UsageError for a value of the wrong type."""
    issue = own(issues, issue_id, who)
    if isinstance(issue, Fault):
        return issue
    asked = {SPELLINGS.get(name, name): value for name, value in changes.items() if value is not None}
    if strange := check_fields(asked.keys() - _FIELDS):
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
        status = _status(issue.status, require_text("status", asked["status"]))
        if isinstance(status, Fault):
            return status
        closes = status == CLOSED and not issue.is_closed
        if closes and (fault := _kept_open(issues, issue_id)):
            return fault
        if status == IN_PROGRESS != issue.status:
            fields["status"] = status
    edit = Edit(fields, *labels, closes)
    return edit if fields or edit.add_labels or edit.remove_labels or closes else None


def judge_close(issues: Issues, issue_id: str, reason: str, who: Actor) -> Fault | BeadsIssue | None:
    """Return the issue to close, or None if it is closed."""
    issue = own(issues, issue_id, who)
    if isinstance(issue, Fault):
        return issue
    if issue.is_closed:
        return None
    return check_text("reason", reason) or _kept_open(issues, issue_id) or issue


def judge_reopen(issues: Issues, issue_id: str, reason: str, who: Actor) -> Fault | BeadsIssue | None:
    """Return the issue to reopen, or None if it is open."""
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
    return check_text("reason", reason) or issue


def _kept_open(issues: Issues, issue_id: str) -> Fault | None:
    waiting = waits_for(issues, issues.edges, issue_id)
    if waiting:
        return Fault(refusals.BLOCKERS, f"It waits for {named(waiting)}.")
    children = open_children(issues, issues.edges, issue_id)
    return Fault(refusals.CHILDREN, f"Not closed is {named(children)}.") if children else None


_FieldChanges = Fault | dict[str, str | int]


def _type(issue: BeadsIssue, asked: Mapping[str, Any], _: Actor, __: Conventions) -> _FieldChanges:
    return {} if asked.get("issue_type", issue.issue_type) == issue.issue_type else Fault(refusals.IMMUTABLE)


def _texts(issue: BeadsIssue, asked: Mapping[str, Any], who: Actor, _: Conventions) -> _FieldChanges:
    new = {name: require_text(name, asked[name]) for name in ("title", *TEXTS) if name in asked}
    changed = {name: text for name, text in new.items() if text != getattr(issue, name)}
    if changed and not is_made_by(issue, who):
        return Fault(refusals.AUTHOR, f"{issue.id} was made by {issue.created_by or 'an unknown person'}.")
    for name, text in changed.items():
        fault = check_title(text) if name == "title" else check_text(name, text)
        if fault is not None:
            return fault
    return {**changed}


def _priority(issue: BeadsIssue, asked: Mapping[str, Any], _: Actor, __: Conventions) -> _FieldChanges:
    if "priority" not in asked:
        return {}
    number = parse_priority(asked["priority"])
    if isinstance(number, Fault):
        return number
    return {} if number == issue.priority else {"priority": number}


def _assignee(issue: BeadsIssue, asked: Mapping[str, Any], who: Actor, known: Conventions) -> _FieldChanges:
    if "assignee" not in asked:
        return {}
    name = require_text("assignee", asked["assignee"])
    if name == issue.assignee and (name != who.label or is_kept(issue)):
        return {}
    if issue.issue_type == MESSAGE and name != known.human:
        return Fault(refusals.not_to_human(known))
    return check_assignee(name) or {"assignee": name}


def _labels(
    issue: BeadsIssue, asked: Mapping[str, Any], known: Conventions
) -> Fault | tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the labels to add and the labels to remove."""
    add = list(require_texts(asked.get("add_labels", ())))
    remove = list(require_texts(asked.get("remove_labels", ())))
    whole = require_texts(asked.get("labels", ()))
    if fault := check_count([*add, *remove, *whole]):
        return fault
    if "labels" in asked:
        add += whole
        remove += [label for label in issue.labels if label not in whole]
    coming = tuple(dict.fromkeys(label for label in add if label not in issue.labels))
    going = tuple(dict.fromkeys(label for label in remove if label in issue.labels and label not in add))
    if staying := [label for label in going if label.startswith(PHASE)]:
        return Fault(refusals.PHASE, f"This is about {', '.join(map(ascii, staying))}.")
    return check_labels(coming, known) or (coming, going)


def _status(now: str, word: str) -> str | Fault:
    """Return the status, as a word of bd, after the transition from `now` to the caller's `word`."""
    if word == now:
        return now
    if word == CLOSED or (word == DONE and now == IN_PROGRESS):
        return CLOSED
    if word == IN_PROGRESS and now == OPEN:
        return IN_PROGRESS
    return Fault(refusals.STATUS, f"It is {now}.")


EPIC: Final = "epic"


class Draft(NamedTuple):
    """The requested fields of a new issue."""

    title: str
    issue_type: str
    labels: tuple[str, ...] = ()
    priority: int | str = 2
    assignee: str = ""
    parent: str = ""
    texts: tuple[tuple[str, str], ...] = ()
    """Names and contents of the fields in TEXTS."""
    dependencies: tuple[str, ...] = ()
    """In the form of `bd create --deps`: ID, TYPE:ID, or blocks:ID for an issue that waits for the new one."""
    strange: tuple[str, ...] = ()
    """Names of unknown fields."""


def draft(title: object, issue_type: object, priority: int | str | None, fields: Mapping[str, Any]) -> Draft:
    """Parse the fields of a new issue. Raises UsageError for a value of the wrong type."""
    given = {SPELLINGS.get(name, name): value for name, value in fields.items() if value is not None}
    return Draft(
        require_text("title", title),
        require_text("type", issue_type),
        require_texts(given.pop("labels", ())),
        2 if priority is None else priority,
        require_text("assignee", given.pop("assignee", "")),
        require_text("parent", given.pop("parent", "")),
        tuple((name, require_text(name, given.pop(name))) for name in TEXTS if name in given),
        require_texts(given.pop("dependencies", ())),
        tuple(sorted(given)),
    )


def judge_draft(draft: Draft, known: Conventions) -> Fault | None:
    """Return the first fault of a new issue that can be found without the other issues."""
    return (
        check_title(draft.title)
        or check_fields(draft.strange)
        or (None if draft.issue_type in known.types else Fault(refusals.wrong_type(known)))
        or check_count(draft.labels)
        or check_labels(draft.labels, known)
        or check_assignee(draft.assignee)
        or next((wrong for name, text in draft.texts if (wrong := check_text(name, text))), None)
        or (_not_to_human(draft, known) if draft.issue_type == MESSAGE else None)
        or (number if isinstance(number := parse_priority(draft.priority), Fault) else None)
        or check_count(draft.dependencies)
    )


def judge_create(issues: Issues, draft: Draft, who: Actor) -> Fault | tuple[Edge, ...]:
    """Return the edges of a new issue that passed `judge_draft`, without the edge to its parent."""
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
    """Return the issue to comment on. It may be assigned to any agent."""
    issue = existing(issues, issue_id)
    if isinstance(issue, Fault):
        return issue
    return (Fault(refusals.TEXT) if not text.strip() else check_text("comment", text)) or issue


_CONTROLS: Final = frozenset({"Cc", "Cs", "Zl", "Zp"})
_TURNED: Final = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Bidirectional controls, which make a terminal show a line in another order."""
_LABEL_NAME: Final = re.compile(r"[^\s,\"]{1,200}")
_LONGEST_NAME: Final = 64
_PRIORITY: Final = re.compile(r"[Pp]?([0-4])")


def require_text(name: str, value: object) -> str:
    """Return a text argument. Raises UsageError for another type."""
    if not isinstance(value, str):
        raise UsageError(f"the {name} of an issue is text, not {type(value).__name__}")
    return value


def require_texts(value: object) -> tuple[str, ...]:
    """Return an argument that is a list of texts. Raises UsageError for another type."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise UsageError("labels are a list of texts")
    return tuple(require_text("label", each) for each in value)


def check_count(wanted: Sequence[str]) -> Fault | None:
    """Limit labels or dependencies: each one is looked up while the call holds the lock of the issues."""
    return Fault(refusals.MANY, f"There are {len(wanted)}.") if len(wanted) > MOST else None


def check_fields(names: Iterable[str]) -> Fault | None:
    """Return a fault for unknown fields, if there are names."""
    told = ", ".join(map(ascii, sorted(names)))
    return Fault(refusals.FIELD, f"This is about {told}.") if told else None


def check_title(line: str) -> Fault | None:
    size = len(line.encode("utf-8", "surrogatepass"))
    wrong = not line.strip() or size > LONGEST_TITLE or not _is_one_line(line)
    return Fault(refusals.TITLE) if wrong else None


def check_text(name: str, content: str) -> Fault | None:
    """Check a text that may have several lines."""
    try:
        fits = len(content.encode()) <= LARGEST_TEXT
    except UnicodeEncodeError:
        fits = False
    return None if fits and "\0" not in content else Fault(refusals.TEXT, f"This is about the {name}.")


def parse_priority(value: int | str) -> int | Fault:
    """Return the number of a priority, which callers may also write as P2."""
    found = None if isinstance(value, int) and not 0 <= value <= 4 else _PRIORITY.fullmatch(str(value))
    return Fault(refusals.PRIORITY) if found is None else int(found[1])


def check_assignee(name: str) -> Fault | None:
    wrong = len(name) > _LONGEST_NAME or not name.isprintable() or name != name.strip()
    return Fault(refusals.ASSIGNEE) if wrong else None


def check_labels(wanted: Iterable[str], known: Conventions) -> Fault | None:
    """Check the labels of a new issue, or labels to add."""
    for label in wanted:
        prefix, colon, name = label.partition(":")
        if prefix not in known.label_prefixes or not colon or not _LABEL_NAME.fullmatch(name) or not name.isprintable():
            return Fault(refusals.wrong_label(known), f"This is about {label!a}.")
    return None


def _is_one_line(line: str) -> bool:
    return not any(unicodedata.category(character) in _CONTROLS or character in _TURNED for character in line)
