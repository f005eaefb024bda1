"""What can be asked of bd while its issues are ours alone: one change at a time, each read back."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bonobofs.beads.bd_arguments import CALL, MESSAGE, OPEN, Creation, Missing, Update, same
from bonobofs.beads.bd_commands import Flag, command
from bonobofs.beads.bd_lock import Lock
from bonobofs.beads.bd_output import Output, payload
from bonobofs.beads.bd_reader import Calls, said, why
from bonobofs.beads.bd_runner import Program
from bonobofs.beads.issue import BeadsIssue, Edge, Issues, NewIssue
from bonobofs.errors import BeadsError, UsageError
from bonobofs.policy.decision import Permit


@dataclass(frozen=True, slots=True)
class Changed:
    """A change that is stored, as reading back has shown."""

    issue: BeadsIssue
    """As it is now; of a dependency, the one that is blocked."""
    after: Issues
    said: tuple[str, ...] = ()
    """What bd said beside its answer, a line each; also why it failed, where it has stored everything all the same."""


class Turn(Calls):
    """bd, within `Beads.turn`. For one thread. Ids are full ones; BeadsError for an issue that there is not.

    Each change costs one call of bd and a `list` after it. What `everything` has read serves until the next change.
    """

    def __init__(self, program: Program, held: Lock, actor: str) -> None:
        super().__init__(program, held, actor)
        self._made: set[str] = set()

    def create_issue(self, new: NewIssue, permit: Permit) -> Changed:
        """Create an issue, all of it or nothing. A message is made so that it lasts and is listed."""
        mark = uuid.uuid4().hex
        creation = Creation(new, mark)
        if new.parent:
            self.issue(new.parent)
        before = self.everything()
        output = self._run(command("create", self._actor, creation.flags()))
        if new.issue_type == MESSAGE:
            output = self._make_message(output, mark)
        after = self._read_back(output)
        made = _marked(after, mark)
        if made is None:
            raise _nothing_made(output)
        if made.id in before:
            raise BeadsError(f"bd has written over {made.id}, which was there", carried_out=None)
        self._made.add(made.id)
        missing = creation.missing(made)
        if missing:
            self._take_away(made.id, permit, f"{_words(missing)} could not be stored ({why(output)})")
        return Changed(made, after, said(output))

    def undo_create(self, made: Changed, permit: Permit) -> Issues:  # noqa: ARG002 - no change without one
        """Take away for good what this turn has created; give what is left. UsageError: it has not created that."""
        id_ = made.issue.id
        if id_ not in self._made:
            raise UsageError(f"{id_} was not created just now; only that can be taken away again")
        output, after = self._change(command("delete", self._actor, [("force", None)], [id_]))
        if id_ in after:
            raise BeadsError(f"bd has not taken {id_} away again: {why(output)}")
        self._made.discard(id_)
        return after

    def update_issue(  # noqa: PLR0913 - an issue has as many fields as it has
        self,
        id: str,  # noqa: A002 - it is bd's word
        permit: Permit,
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
        issue = self.issue(id)
        if parent:
            self.issue(parent)
        texts = {
            "title": title,
            "status": status,
            "priority": None if priority is None else str(priority),
            "assignee": assignee,
            "description": description,
            "design": design,
            "acceptance": acceptance,
            "notes": notes,
        }
        merged = None if metadata is None else {**issue.metadata, **metadata}
        update = Update(texts, merged, add_labels, remove_labels, parent)
        flags = update.flags()
        if not flags:
            return Changed(issue, self.everything())
        return self._change_one(command("update", self._actor, flags, [id]), id, update.missing, permit)

    def close_issue(self, id: str, permit: Permit, *, reason: str = "") -> Changed:  # noqa: A002 - it is bd's word
        """Close an issue; BeadsError where bd says that something keeps it open."""
        self.issue(id)

        def missing(now: BeadsIssue) -> Missing:
            told = [] if not reason or same(now.close_reason, reason) else ["reason"]
            return told if now.is_closed else ["status", *told]

        flags: list[Flag] = [("reason", reason)] if reason else []
        return self._change_one(command("close", self._actor, flags, [id]), id, missing, permit)

    def reopen_issue(self, id: str, permit: Permit, *, reason: str = "") -> Changed:  # noqa: A002 - it is bd's word
        """Open a closed issue again."""
        self.issue(id)

        def missing(now: BeadsIssue) -> Missing:
            return [] if now.status == OPEN else ["status"]

        flags: list[Flag] = [("reason", reason)] if reason else []
        return self._change_one(command("reopen", self._actor, flags, [id]), id, missing, permit)

    def add_dependency(self, blocked: str, blocker: str, kind: str, permit: Permit) -> Changed:
        """Let `blocked` depend on `blocker`; `kind` is a word of bd, of which it checks very little."""
        self.issue(blocked)
        self.issue(blocker)
        edge = Edge(blocked, blocker, kind)

        def missing(now: BeadsIssue) -> Missing:
            return [] if edge in now.edges else ["edge"]

        arguments = command("dep add", self._actor, [("type", kind)], [blocked, blocker])
        return self._change_one(arguments, blocked, missing, permit)

    def remove_dependency(self, blocked: str, blocker: str, permit: Permit) -> Changed:
        """Let `blocked` no longer depend on `blocker`, in whichever way it did."""
        self.issue(blocked)
        self.issue(blocker)

        def missing(now: BeadsIssue) -> Missing:
            return ["removal"] if any(edge.on == blocker for edge in now.edges) else []

        arguments = command("dep remove", self._actor, named=[blocked, blocker])
        return self._change_one(arguments, blocked, missing, permit)

    def add_comment(self, id: str, text: str, permit: Permit) -> Changed:  # noqa: A002, ARG002 - as above
        """Say something of an issue. Reads the comments back, and not everything."""
        issue = self.issue(id)
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
        new = [each for each in found if each.id == mark] or found[issue.comment_count :]
        if not any(same(each.text, text) and each.author == self._actor for each in new):
            raise BeadsError(f"bd has not stored the comment: {why(output)}")
        return Changed(issue, known, said(output))

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

    def _change(self, arguments: Sequence[str]) -> tuple[Output, Issues]:
        """Run a changing command, and read everything back however it ended."""
        output = self._run(arguments)
        return output, self._read_back(output)

    def _change_one(
        self,
        arguments: Sequence[str],
        id: str,  # noqa: A002 - it is bd's word
        missing: Callable[[BeadsIssue], Missing],
        permit: Permit,  # noqa: ARG002 - no change without one
    ) -> Changed:
        was_missing = missing(self.issue(id))
        output, after = self._change(arguments)
        now = after.get(id)
        if now is None:
            raise BeadsError(f"{id} is gone after bd was asked to change it: {why(output)}", carried_out=None)
        left = missing(now)
        if not left:
            return Changed(now, after, said(output))
        done = tuple(part for part in was_missing if part not in left)
        if not done:
            raise BeadsError(f"bd has not changed {id}: {why(output)}", missing=tuple(left))
        raise BeadsError(
            f"bd has changed {id} in part: {_words(left)} not stored ({why(output)})",
            carried_out=None,
            done=done,
            missing=tuple(left),
        )

    def _take_away(self, id: str, permit: Permit, reason: str) -> None:  # noqa: A002, ARG002 - as above
        """An issue that could not be made as asked is not left half made."""
        output, after = self._change(command("delete", self._actor, [("force", None)], [id]))
        if id in after:
            what = f"{id} is created in part: {reason}; taking it away failed: {why(output)}"
            raise BeadsError(what, carried_out=None)
        self._made.discard(id)
        raise BeadsError(f"nothing is created: {reason}")


def _nothing_made(output: Output) -> BeadsError:
    """It may be configured to keep new issues elsewhere; then it tells an id that is none of these issues."""
    told = payload(output)
    id_ = told.get("id") if output.status == 0 and isinstance(told, dict) else None
    if id_:
        return BeadsError(f"bd says that it has created {id_}, which is not among these issues", carried_out=None)
    return BeadsError(f"bd has created nothing: {why(output)}")


def _marked(issues: Issues, mark: str) -> BeadsIssue | None:
    return next((issue for issue in issues.values() if issue.metadata.get(CALL) == mark), None)


def _words(parts: Sequence[str]) -> str:
    return " and ".join(parts)
