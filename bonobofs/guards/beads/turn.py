"""What can be asked of bd while its issues are ours alone: reading everything, and one change at a time, read back."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bonobofs.decision import Allowed
from bonobofs.errors import BeadsError, UsageError
from bonobofs.guards.beads.answer import Output, complaint, notices, payload
from bonobofs.guards.beads.commands import Flag, check_label, check_text, command
from bonobofs.guards.beads.issue import (
    CLOSED,
    PARENT,
    BeadsIssue,
    Comment,
    Edge,
    Issues,
    NewIssue,
    read_comment,
    read_issue,
)
from bonobofs.guards.beads.lock import Lock
from bonobofs.guards.beads.program import Program

CALL: Final = "bonobofs_call"
"""The key of an issue's metadata by which what one call has created is found, though bd never told its id."""
MESSAGE: Final = "message"
OPEN: Final = "open"

Missing = list[str]
"""Which of the parts that were asked for are not stored, in words."""


@dataclass(frozen=True, slots=True)
class Changed:
    """A change that is stored, as reading back has shown."""

    issue: BeadsIssue
    """As it is now; of a dependency, the one that is blocked."""
    after: Issues
    said: tuple[str, ...] = ()
    """What bd said beside its answer, a line each; also why it failed, where it has stored everything all the same."""


class Turn:
    """bd, within `Beads.turn`. For one thread. Ids are full ones; BeadsError for an issue that there is not.

    Each change costs one call of bd and a `list` after it. What `everything` has read serves until the next change.
    """

    def __init__(self, program: Program, held: Lock, actor: str) -> None:
        self._program: Final = program
        self._held: Final = held
        self._actor: Final = actor
        self._known: Issues | None = None
        self._made: set[str] = set()
        self._ended = False

    def end(self) -> None:
        """The lock is no longer ours."""
        self._ended = True

    def everything(self, *, fresh: bool = False) -> Issues:
        """All issues as they are; `fresh`: as they are now, whatever has been read in this turn."""
        if self._known is None or fresh:
            self._known = None
            flags = [("limit", "0"), ("all", None), ("include-infra", None), ("include-gates", None)]
            output = self._run(command("list", self._actor, flags))
            told = payload(output)
            if output.status != 0 or not isinstance(told, list):
                raise BeadsError(f"bd does not list its issues: {_why(output)}")
            try:
                self._known = Issues(map(read_issue, told))
            except (KeyError, TypeError, ValueError) as error:
                raise BeadsError(f"bd lists what is no issue to us ({error}); is it a bd 1.x?") from error
        return self._known

    def find(self, id: str) -> BeadsIssue | None:  # noqa: A002 - it is bd's word
        """The issue of this full id, None where there is none. UsageError: it names none."""
        if not id.strip():
            raise UsageError("name an issue: bd would take the one that was touched last")
        return self.everything().get(id)

    def comments(self, id: str) -> list[Comment]:  # noqa: A002 - it is bd's word
        """What has been said of an issue, the oldest first."""
        self._issue(id)
        output = self._run(command("comments", self._actor, named=[id]))
        told = payload(output)
        if output.status != 0 or not isinstance(told, list):
            raise BeadsError(f"bd does not list the comments of {id}: {_why(output)}")
        try:
            return [read_comment(each) for each in told]
        except (KeyError, TypeError) as error:
            raise BeadsError(f"bd lists what is no comment to us ({error}); is it a bd 1.x?") from error

    def read(self, arguments: Sequence[str]) -> Output:
        """Run a reading command, in bd's own words, which the caller has held to a list of what only reads.

        Nothing but `--readonly` and `--actor` is added to it, and read-only mode refuses a part of what writes.
        """
        first, *rest = arguments
        for argument in arguments:
            check_text(argument)
        return self._run([first, "--readonly", f"--actor={self._actor}", *rest])

    def create_issue(self, new: NewIssue, leave: Allowed) -> Changed:
        """Create an issue, all of it or nothing. A message is made so that it lasts and is listed."""
        mark = uuid.uuid4().hex
        for label in new.labels:
            check_label(label)
        if new.parent:
            self._issue(new.parent)
        metadata = {**new.metadata, CALL: mark}
        # bd makes a message one that passes away, and a task that becomes a message one that stays.
        kind = "task" if new.issue_type == MESSAGE else new.issue_type
        flags: list[Flag] = [
            ("title", new.title),
            ("type", kind),
            ("priority", str(new.priority)),
            *((name, value) for name, value in _texts(new).items() if value),
            *(("labels", label) for label in new.labels),
            *((("parent", new.parent),) if new.parent else ()),
            ("metadata", json.dumps(metadata)),
        ]
        before = self.everything()
        output = self._run(command("create", self._actor, flags))
        if new.issue_type == MESSAGE:
            output = self._make_message(output, mark)
        after = self._read_back(output)
        made = _marked(after, mark)
        if made is None:
            raise BeadsError(f"bd has created nothing: {_why(output)}")
        if made.id in before:
            raise BeadsError(f"bd has written over {made.id}, which was there", carried_out=None)
        self._made.add(made.id)
        missing = _missing_of_new(new, made)
        if missing:
            self._take_away(made.id, leave, f"{_words(missing)} could not be stored ({_why(output)})")
        return Changed(made, after, _said(output))

    def _make_message(self, output: Output, mark: str) -> Output:
        """Make a message of the task that has been created for it."""
        told = payload(output)
        id_ = told.get("id") if output.status == 0 and isinstance(told, dict) else None
        if not isinstance(id_, str):
            made = _marked(self._read_back(output), mark)
            if made is None:
                return output
            id_ = made.id
        return self._run(command("update", self._actor, [("type", MESSAGE)], [id_]))

    def undo_create(self, made: Changed, leave: Allowed) -> Issues:  # noqa: ARG002 - no change without one
        """Take away for good what this turn has created; give what is left. UsageError: it has not created that."""
        id_ = made.issue.id
        if id_ not in self._made:
            raise UsageError(f"{id_} was not created just now; only that can be taken away again")
        output, after = self._change(command("delete", self._actor, [("force", None)], [id_]))
        if id_ in after:
            raise BeadsError(f"bd has not taken {id_} away again: {_why(output)}", carried_out=False)
        self._made.discard(id_)
        return after

    def update_issue(  # noqa: PLR0913 - an issue has as many fields as it has
        self,
        id: str,  # noqa: A002 - it is bd's word
        leave: Allowed,
        *,
        title: str | None = None,
        status: str | None = None,
        priority: int | None = None,
        assignee: str | None = None,
        description: str | None = None,
        design: str | None = None,
        acceptance: str | None = None,
        notes: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        add_labels: Sequence[str] = (),
        remove_labels: Sequence[str] = (),
        parent: str | None = None,
    ) -> Changed:
        """Change fields of an issue; None leaves one as it is, "" empties it. `metadata` is added to what is there.

        The status is a word of bd, and never `closed`: closing asks bd whether something keeps the issue open.
        """
        issue = self._issue(id)
        if status == CLOSED:
            raise UsageError("an issue is closed by closing it: an update would pass over what keeps it open")
        for label in (*add_labels, *remove_labels):
            check_label(label)
        if parent:
            self._issue(parent)
        wanted: dict[str, str | None] = {
            "title": title,
            "status": status,
            "priority": None if priority is None else str(priority),
            "assignee": assignee,
            "description": description,
            "design": design,
            "acceptance": acceptance,
            "notes": notes,
        }
        flags: list[Flag] = [(name, value) for name, value in wanted.items() if value is not None]
        flags += [("add-label", label) for label in add_labels]
        flags += [("remove-label", label) for label in remove_labels]
        flags += [] if parent is None else [("parent", parent)]
        merged = None if metadata is None else {**issue.metadata, **metadata}
        flags += [] if merged is None else [("metadata", json.dumps(merged))]
        if not flags:
            return Changed(issue, self.everything())

        def missing(now: BeadsIssue) -> Missing:
            found = [name for name, value in wanted.items() if value is not None and not _is(now, name, value)]
            found += [f"label {label}" for label in add_labels if label not in now.labels]
            found += [f"removal of label {label}" for label in remove_labels if label in now.labels]
            if parent is not None and [edge.on for edge in now.edges if edge.kind == PARENT] != (
                [parent] if parent else []
            ):
                found.append("parent")
            if merged is not None and dict(now.metadata) != merged:
                found.append("metadata")
            return found

        parts = [name for name, _ in flags]
        return self._change_one(command("update", self._actor, flags, [id]), id, parts, missing, leave)

    def close_issue(self, id: str, leave: Allowed, *, reason: str = "") -> Changed:  # noqa: A002 - it is bd's word
        """Close an issue; BeadsError where bd says that something keeps it open."""
        self._issue(id)

        def missing(now: BeadsIssue) -> Missing:
            told = [] if not reason or _same(now.close_reason, reason) else ["reason"]
            return told if now.is_closed else ["status", *told]

        flags: list[Flag] = [("reason", reason)] if reason else []
        parts = ["status", *(["reason"] if reason else [])]
        return self._change_one(command("close", self._actor, flags, [id]), id, parts, missing, leave)

    def reopen_issue(self, id: str, leave: Allowed, *, reason: str = "") -> Changed:  # noqa: A002 - it is bd's word
        """Open a closed issue again."""
        self._issue(id)
        flags: list[Flag] = [("reason", reason)] if reason else []
        arguments = command("reopen", self._actor, flags, [id])
        return self._change_one(arguments, id, ["status"], lambda now: [] if now.status == OPEN else ["status"], leave)

    def add_dependency(self, blocked: str, blocker: str, kind: str, leave: Allowed) -> Changed:
        """Let `blocked` depend on `blocker`; `kind` is a word of bd, of which it checks very little."""
        self._issue(blocked)
        self._issue(blocker)
        edge = Edge(blocked, blocker, kind)
        arguments = command("dep add", self._actor, [("type", kind)], [blocked, blocker])
        return self._change_one(arguments, blocked, ["edge"], lambda now: [] if edge in now.edges else ["edge"], leave)

    def remove_dependency(self, blocked: str, blocker: str, leave: Allowed) -> Changed:
        """Let `blocked` no longer depend on `blocker`, in whichever way it did."""
        self._issue(blocked)
        self._issue(blocker)

        def missing(now: BeadsIssue) -> Missing:
            return ["removal"] if any(edge.on == blocker for edge in now.edges) else []

        arguments = command("dep remove", self._actor, named=[blocked, blocker])
        return self._change_one(arguments, blocked, ["removal"], missing, leave)

    def add_comment(self, id: str, text: str, leave: Allowed) -> Changed:  # noqa: A002, ARG002 - as above
        """Say something of an issue. Reads the comments back, and not everything."""
        issue = self._issue(id)
        if not text.strip():
            raise UsageError("a comment must say something")
        known = self.everything()
        output = self._run(command("comments add", self._actor, named=[id, text]))
        told = payload(output)
        mark = told.get("id") if isinstance(told, dict) else None
        try:
            found = self.comments(id)
        except BeadsError as error:
            raise BeadsError(f"whether the comment is stored cannot be told: {error}", carried_out=None) from error
        said = [each for each in found if each.id == mark] or found[issue.comment_count :]
        if not any(_same(each.text, text) and each.author == self._actor for each in said):
            raise BeadsError(f"bd has not stored the comment: {_why(output)}")
        return Changed(issue, known, _said(output))

    def _issue(self, id: str) -> BeadsIssue:  # noqa: A002 - it is bd's word
        """The issue. BeadsError for an id that is none, or the short form of one: bd would take what fits."""
        found = self.find(id)
        if found is None:
            raise BeadsError(f"there is no issue {id}; ids are given in full")
        return found

    def _run(self, arguments: Sequence[str]) -> Output:
        if self._ended:
            raise RuntimeError("the turn is over, and the lock somebody else's")
        return self._program.run(arguments, self._held)

    def _change(self, arguments: Sequence[str]) -> tuple[Output, Issues]:
        """Run a changing command, and read everything back however it ended."""
        output = self._run(arguments)
        return output, self._read_back(output)

    def _read_back(self, output: Output) -> Issues:
        """Everything, after a call that ended so."""
        try:
            return self.everything(fresh=True)
        except BeadsError as error:
            what = f"{_why(output)}, and reading back failed: {error}"
            raise BeadsError(f"whether bd has done it cannot be told: {what}", carried_out=None) from error

    def _change_one(
        self,
        arguments: Sequence[str],
        id: str,  # noqa: A002 - it is bd's word
        parts: list[str],
        missing: Callable[[BeadsIssue], Missing],
        leave: Allowed,  # noqa: ARG002 - no change without one
    ) -> Changed:
        output, after = self._change(arguments)
        now = after.get(id)
        if now is None:
            raise BeadsError(f"{id} is gone after bd was asked to change it: {_why(output)}", carried_out=None)
        not_done = missing(now)
        if not not_done:
            return Changed(now, after, _said(output))
        if len(not_done) >= len(parts):
            raise BeadsError(f"bd has not changed {id}: {_why(output)}", missing=tuple(not_done))
        done = tuple(part for part in parts if part not in not_done)
        raise BeadsError(
            f"bd has changed {id} in part: {_words(not_done)} not stored ({_why(output)})",
            carried_out=None,
            done=done,
            missing=tuple(not_done),
        )

    def _take_away(self, id: str, leave: Allowed, why: str) -> None:  # noqa: A002, ARG002 - as above
        """An issue that could not be made as asked is not left half made."""
        output, after = self._change(command("delete", self._actor, [("force", None)], [id]))
        if id in after:
            raise BeadsError(f"{id} is created in part: {why}; taking it away failed: {_why(output)}", carried_out=None)
        self._made.discard(id)
        raise BeadsError(f"nothing is created: {why}")


def _texts(new: NewIssue) -> dict[str, str]:
    names = ("description", "design", "acceptance", "notes", "assignee")
    return {name: getattr(new, name) for name in names}


def _marked(issues: Issues, mark: str) -> BeadsIssue | None:
    return next((issue for issue in issues.values() if issue.metadata.get(CALL) == mark), None)


def _missing_of_new(new: NewIssue, made: BeadsIssue) -> Missing:
    wanted = {"title": new.title, "priority": str(new.priority), "status": OPEN, **_texts(new)}
    missing = [name for name, value in wanted.items() if not _is(made, name, value)]
    missing += [] if made.issue_type == new.issue_type and not made.ephemeral else ["type"]
    missing += [f"label {label}" for label in new.labels if label not in made.labels]
    missing += [f"metadata {key}" for key, value in new.metadata.items() if made.metadata.get(key) != value]
    if [edge.on for edge in made.edges if edge.kind == PARENT] != ([new.parent] if new.parent else []):
        missing.append("parent")
    return missing


def _is(issue: BeadsIssue, name: str, value: str) -> bool:
    return _same(str(getattr(issue, name)), value)


def _same(stored: str, asked: str) -> bool:
    """Some versions of bd take the blanks around a text away."""
    return stored == asked or stored.strip() == asked.strip()


def _why(output: Output) -> str:
    if output.status is None:
        return "bd was ended at its time limit"
    if output.status < 0:
        return f"bd was ended by signal {-output.status}"
    return complaint(output) or f"bd ended with {output.status} and does not say why"


def _said(output: Output) -> tuple[str, ...]:
    failed = () if output.status == 0 else (_why(output),)
    return (*failed, *(line for line in notices(output) if line not in failed))


def _words(parts: Sequence[str]) -> str:
    return " and ".join(parts)
