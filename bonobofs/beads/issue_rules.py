"""The rules for creating, updating, closing, reopening and commenting on issues. A rule raises Fault.

A rule checks the caller's words before they are mapped to bd's: bd has no status `done`. An update leaves out every
value that the issue already has, because bd would write it again: closing a closed issue changes its reason and time.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

from bonobofs.beads import refusals
from bonobofs.beads.dependency_rules import NEW, judge_new_dependency, new_edge, open_children, parents, waits_for
from bonobofs.beads.issue import (
    CLOSED,
    MESSAGE,
    OPEN,
    PARENT,
    Actor,
    BeadsIssue,
    Edge,
    Issues,
    is_kept,
    is_made_by,
    require_issue,
    require_open_to,
)
from bonobofs.beads.refusals import LARGEST_TEXT, LONGEST_TITLE, MOST, Fault, format_ids
from bonobofs.errors import UsageError
from bonobofs.policy.role_lists import Conventions

PHASE: Final = "phase:"
DONE: Final = "done"
IN_PROGRESS: Final = "in_progress"
TEXTS: Final = ("description", "design", "acceptance", "notes")
SPELLINGS: Final = {"type": "issue_type", "acceptance_criteria": "acceptance"}
_FIELDS: Final = frozenset(
    {"title", *TEXTS, "priority", "assignee", "status", "issue_type", "labels", "add_labels", "remove_labels"}
)


class IssueChanges(NamedTuple):
    """The changes of an update."""

    fields: Mapping[str, str | int]
    """Changed values of title, texts, priority, assignee and status (in_progress)."""
    add_labels: tuple[str, ...] = ()
    remove_labels: tuple[str, ...] = ()
    closes: bool = False
    """True if the issue is then closed."""


def judge_update(
    issues: Issues, issue_id: str, changes: Mapping[str, Any], actor: Actor, conventions: Conventions
) -> IssueChanges | None:
    """Return the changes, or None if there are none. Raises UsageError for a value of the wrong type."""
    issue = require_open_to(issues, issue_id, actor)
    values = {SPELLINGS.get(name, name): value for name, value in changes.items() if value is not None}
    check_fields(values.keys() - _FIELDS)
    if values.get("issue_type", issue.issue_type) != issue.issue_type:
        raise Fault(refusals.IMMUTABLE)
    fields = {
        **_texts(issue, values, actor),
        **_priority(issue, values),
        **_assignee(issue, values, actor, conventions),
    }
    add, remove = _labels(issue, values, conventions)
    closes = False
    if "status" in values:
        status = _status(issue.status, require_text("status", values["status"]))
        closes = status == CLOSED and not issue.is_closed
        if closes:
            _check_closable(issues, issue_id)
        if status == IN_PROGRESS != issue.status:
            fields["status"] = status
    return IssueChanges(fields, add, remove, closes) if fields or add or remove or closes else None


def judge_close(issues: Issues, issue_id: str, reason: str, actor: Actor) -> BeadsIssue | None:
    """Return the issue to close, or None if it is closed."""
    issue = require_open_to(issues, issue_id, actor)
    if issue.is_closed:
        return None
    check_text("reason", reason)
    _check_closable(issues, issue_id)
    return issue


def judge_reopen(issues: Issues, issue_id: str, reason: str, actor: Actor) -> BeadsIssue | None:
    """Return the issue to reopen, or None if it is open."""
    issue = require_open_to(issues, issue_id, actor)
    if issue.status == OPEN:
        return None
    if not issue.is_closed:
        raise Fault(refusals.STATUS, f"It is {issue.status}.")
    closed = [parent for parent in parents(issues.edges, issue_id) if parent in issues and issues[parent].is_closed]
    if closed:
        raise Fault(refusals.PARENT_CLOSED, f"Its parent is closed: {format_ids(closed)}.")
    check_text("reason", reason)
    return issue


def _check_closable(issues: Issues, issue_id: str) -> None:
    if waiting := waits_for(issues, issues.edges, issue_id):
        raise Fault(refusals.BLOCKERS, f"It waits for {format_ids(waiting)}.")
    if children := open_children(issues, issues.edges, issue_id):
        raise Fault(refusals.CHILDREN, f"Its open children: {format_ids(children)}.")


def _texts(issue: BeadsIssue, values: Mapping[str, Any], actor: Actor) -> dict[str, str | int]:
    new = {name: require_text(name, values[name]) for name in ("title", *TEXTS) if name in values}
    changed = {name: text for name, text in new.items() if text != getattr(issue, name)}
    if changed and not is_made_by(issue, actor):
        raise Fault(refusals.AUTHOR, f"{issue.id} was made by {issue.created_by or 'an unknown person'}.")
    for name, text in changed.items():
        check_title(text) if name == "title" else check_text(name, text)
    return {**changed}


def _priority(issue: BeadsIssue, values: Mapping[str, Any]) -> dict[str, str | int]:
    number = parse_priority(values.get("priority", issue.priority))
    return {} if number == issue.priority else {"priority": number}


def _assignee(
    issue: BeadsIssue, values: Mapping[str, Any], actor: Actor, conventions: Conventions
) -> dict[str, str | int]:
    if "assignee" not in values:
        return {}
    name = require_text("assignee", values["assignee"])
    if name == issue.assignee and (name != actor.label or is_kept(issue)):
        return {}
    if issue.issue_type == MESSAGE:
        _check_human(name, conventions)
    check_assignee(name)
    return {"assignee": name}


def _labels(
    issue: BeadsIssue, values: Mapping[str, Any], conventions: Conventions
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the labels to add and the labels to remove."""
    add, remove, whole = (require_texts(values.get(name, ())) for name in ("add_labels", "remove_labels", "labels"))
    check_count([*add, *remove, *whole])
    if "labels" in values:
        add += whole
        remove += tuple(label for label in issue.labels if label not in whole)
    added = tuple(dict.fromkeys(label for label in add if label not in issue.labels))
    removed = tuple(dict.fromkeys(label for label in remove if label in issue.labels and label not in add))
    if phases := [label for label in removed if label.startswith(PHASE)]:
        raise Fault(refusals.PHASE, f"This is about {', '.join(map(ascii, phases))}.")
    check_labels(added, conventions)
    return added, removed


def _status(now: str, word: str) -> str:
    """Return bd's word for the status after the transition from `now` to the caller's `word`. Raises Fault."""
    if word == now:
        return now
    if word == CLOSED or (word == DONE and now == IN_PROGRESS):
        return CLOSED
    if word == IN_PROGRESS and now == OPEN:
        return IN_PROGRESS
    raise Fault(refusals.STATUS, f"It is {now}.")


EPIC: Final = "epic"


class IssueRequest(NamedTuple):
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
    unknown: tuple[str, ...] = ()
    """Names of unknown fields."""

    @classmethod
    def parse(cls, title: object, issue_type: object, priority: int | str | None, fields: Mapping[str, Any]) -> Self:
        """Parse the fields of a new issue. Raises UsageError for a value of the wrong type."""
        values = {SPELLINGS.get(name, name): value for name, value in fields.items() if value is not None}
        return cls(
            require_text("title", title),
            require_text("type", issue_type),
            require_texts(values.pop("labels", ())),
            2 if priority is None else priority,
            require_text("assignee", values.pop("assignee", "")),
            require_text("parent", values.pop("parent", "")),
            tuple((name, require_text(name, values.pop(name))) for name in TEXTS if name in values),
            require_texts(values.pop("dependencies", ())),
            tuple(sorted(values)),
        )


def judge_request(request: IssueRequest, conventions: Conventions) -> None:
    """Check a new issue as far as that needs no other issues."""
    check_title(request.title)
    check_fields(request.unknown)
    if request.issue_type not in conventions.types:
        raise Fault(refusals.wrong_type(conventions))
    check_count(request.labels)
    check_labels(request.labels, conventions)
    check_assignee(request.assignee)
    for name, text in request.texts:
        check_text(name, text)
    if request.issue_type == MESSAGE:
        _check_human(request.assignee, conventions)
    parse_priority(request.priority)
    check_count(request.dependencies)


def judge_create(issues: Issues, request: IssueRequest, actor: Actor) -> tuple[Edge, ...]:
    """Return the edges of a new issue that passed `judge_request`, without the edge to its parent."""
    tied: list[Edge] = []
    if request.parent:
        edge = Edge(NEW, request.parent, PARENT)
        new_edge(issues, tied, edge)
        tied.append(edge)
    for text in request.dependencies:
        dependency = judge_new_dependency(issues, tied, text, actor)
        if dependency is not None:
            tied.append(dependency)
    return tuple(tied[1:] if request.parent else tied)


def _check_human(assignee: str, conventions: Conventions) -> None:
    if assignee != conventions.human:
        raise Fault(refusals.not_to_human(conventions))


def judge_comment(issues: Issues, issue_id: str, text: str) -> BeadsIssue:
    """Return the issue to comment on. It may be assigned to any agent."""
    issue = require_issue(issues, issue_id)
    if not text.strip():
        raise Fault(refusals.TEXT)
    check_text("comment", text)
    return issue


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
        raise UsageError("labels must be a list of texts")
    return tuple(require_text("label", each) for each in value)


def check_count(texts: Sequence[str]) -> None:
    """Limit labels or dependencies: each one is looked up while the call holds the lock of the issues."""
    if len(texts) > MOST:
        raise Fault(refusals.MANY, f"There are {len(texts)}.")


def check_fields(unknown: Iterable[str]) -> None:
    """Raises Fault if there are unknown fields."""
    if names := ", ".join(map(ascii, sorted(unknown))):
        raise Fault(refusals.FIELD, f"This is about {names}.")


def check_title(line: str) -> None:
    size = len(line.encode("utf-8", "surrogatepass"))
    if not line.strip() or size > LONGEST_TITLE or not _is_one_line(line):
        raise Fault(refusals.TITLE)


def check_text(name: str, content: str) -> None:
    """Check a text that may have several lines."""
    try:
        fits = len(content.encode()) <= LARGEST_TEXT
    except UnicodeEncodeError:
        fits = False
    if not fits or "\0" in content:
        raise Fault(refusals.TEXT, f"This is about the {name}.")


def parse_priority(value: int | str) -> int:
    """Return the number of a priority, which callers may also write as P2."""
    match = None if isinstance(value, int) and not 0 <= value <= 4 else _PRIORITY.fullmatch(str(value))
    if match is None:
        raise Fault(refusals.PRIORITY)
    return int(match[1])


def check_assignee(name: str) -> None:
    if len(name) > _LONGEST_NAME or not name.isprintable() or name != name.strip():
        raise Fault(refusals.ASSIGNEE)


def check_labels(labels: Iterable[str], conventions: Conventions) -> None:
    """Check the labels of a new issue, or labels to add."""
    for label in labels:
        prefix, colon, name = label.partition(":")
        is_valid = colon and _LABEL_NAME.fullmatch(name) and name.isprintable()
        if not is_valid or prefix not in conventions.label_prefixes:
            raise Fault(refusals.wrong_label(conventions), f"This is about {label!a}.")


def _is_one_line(line: str) -> bool:
    return not any(unicodedata.category(character) in _CONTROLS or character in _TURNED for character in line)
