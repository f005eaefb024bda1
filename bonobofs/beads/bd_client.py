r"""Read and change the issues of one workspace through bd, and read every change back.

    beads = Beads(find_beads(source), home, agent)
    with beads.turn() as turn:
        before = turn.everything()
        ...
        changed = turn.close_issue("gt-a1f", permit)

bonobofs ignores bd's exit status: bd has exited with 0 without storing anything, and with other values after storing
everything. The client lists the issues after each change and compares. A change that is stored completely succeeds,
whatever bd printed. Any other result is a BeadsError, which states whether bd stored nothing, a part, or an unknown
part of the change.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bonobofs.beads.bd_arguments import CALL, Creation, Flag, Missing, Update, check_text, command, same
from bonobofs.beads.bd_runner import (
    Lock,
    Output,
    Program,
    complaint,
    find_program,
    hold_lock,
    notices,
    payload,
    surroundings,
)
from bonobofs.beads.issue import MESSAGE, OPEN, BeadsIssue, Comment, Edge, Issues, NewIssue, read_comment, read_issues
from bonobofs.errors import BeadsError, UsageError
from bonobofs.policy.decision import Permit
from bonobofs.policy.request import Principal
from bonobofs.state.worktree_registry import repository_of

LIMIT: Final = 30.0
"""Seconds for one call of bd; with a thousand issues its slowest takes about one."""
WAIT: Final = 120.0
"""Seconds to wait until others are done with the same `.beads`."""
_STEERING: Final = (".env", "config.yaml", "metadata.json")
"""Files by which bd could be led to another database."""


def find_beads(source: Path, home: Path | None = None) -> Path:
    """As `seek_beads`; BeadsError if there is none."""
    found = seek_beads(source, home)
    if found is None:
        raise BeadsError(f"{source} has no .beads; run `bd init` there")
    return found


def seek_beads(source: Path, home: Path | None = None) -> Path | None:
    """The `.beads` of this directory, without symlinks; BeadsError if agents could write what steers bd.

    A worktree of git has that of its repository's main worktree, as bd has it, though a copy may have been checked out.
    With the state directory, worktrees that were made there are known too.
    """
    source = Path(os.path.realpath(source))
    made = None if home is None else repository_of(home, source)
    main = _main_worktree(source) or made
    for directory in (source,) if main is None else (main, source):
        beads = Path(os.path.realpath(directory / ".beads"))
        if beads.is_dir():
            if beads.is_relative_to(directory) and ".beads" not in beads.relative_to(directory).parts:
                raise BeadsError(f"{directory / '.beads'} leads to {beads}, where agents can write what steers bd")
            return beads
    return None


def _main_worktree(source: Path) -> Path | None:
    """Where the repository of this worktree is at home; None where this is no worktree that the repository knows."""
    link = source / ".git"
    try:
        own = source / link.read_text(encoding="utf-8").strip().removeprefix("gitdir: ")
        known_as = (own / "gitdir").read_text(encoding="utf-8").strip()
        common = Path(os.path.realpath(own / (own / "commondir").read_text(encoding="utf-8").strip()))
        is_known = os.path.samefile(own / known_as, link)
    except (OSError, ValueError):
        return None
    return common.parent if is_known and common.name == ".git" else None


class Beads:
    """bd on one `.beads`, for one agent. May be used by several threads; nothing runs before the first turn."""

    def __init__(
        self,
        beads: Path,
        home: Path,
        agent: Principal,
        *,
        program: Path | None = None,
        limit: float = LIMIT,
        wait: float = WAIT,
    ) -> None:
        """`beads`: from `find_beads`. `program`: None for the one that is found (`find_program`).

        `limit`, `wait`: seconds for one call, and for others to be done. UsageError: the agent has no name.
        """
        if not agent.label.strip():
            raise UsageError("an agent without a name cannot act on issues: bd would take it for somebody else")
        self._beads: Final = beads
        self._home: Final = home
        self._agent: Final = agent
        self._named: Final = program
        self._limit: Final = limit
        self._wait: Final = wait
        self._checked: tuple[int, ...] | None = None
        """Of which `.beads` and program it is known that they are what they should be."""

    @contextmanager
    def turn(self) -> Iterator[BdClient]:
        """Have the issues to oneself, as far as all go through here, across processes.

        BeadsError: bd is missing or not supported, would work elsewhere, or others have been busy for too long.
        """
        path = self._named if self._named is not None else find_program(self._home, self._beads)
        with hold_lock(self._home, self._beads, self._wait) as held, surroundings(self._home, self._beads) as around:
            program = Program(path, self._beads, around, self._agent, self._limit)
            identity = self._identity(path)
            if self._checked != identity:
                program.check_version(held)
                self._check_place(program, held)
                self._checked = identity
            turn = BdClient(program, held, self._agent.label)
            try:
                yield turn
            finally:
                turn.end()

    def _identity(self, program: Path) -> tuple[int, ...]:
        """Changes when there is another `.beads`, another program, or something else that steers it."""
        if os.path.lexists(self._beads / "redirect"):
            raise BeadsError(f"{self._beads / 'redirect'} leads to other issues; open the session where those are")
        steering = (self._beads / name for name in _STEERING)
        try:
            found = [os.stat(path) for path in (self._beads, program)]
            found += [os.stat(path) for path in steering if os.path.lexists(path)]
        except OSError as error:
            raise BeadsError(f"{error.filename} cannot be used: {error.strerror}") from error
        beads, *others = found
        files = (number for each in others for number in (each.st_dev, each.st_ino, each.st_mtime_ns))
        return beads.st_dev, beads.st_ino, *files

    def _check_place(self, program: Program, held: Lock) -> None:
        """Whether bd works where it is told to: a directory that it does not take it passes over without a word."""
        output = program.run(command("where", self._agent.label), held)
        told = payload(output)
        path = told.get("path") if isinstance(told, dict) else None
        if not isinstance(path, str):
            what = complaint(output) or "it does not say why"
            raise BeadsError(f"bd does not find its issues in {self._beads}: {what}")
        for place in (path, told.get("database_path") or path):
            if not Path(os.path.realpath(place)).is_relative_to(self._beads):
                raise BeadsError(f"bd works in {place} and not in {self._beads}; nothing is asked of it")


class Calls:
    """What reads. For one thread, and until `end`."""

    def __init__(self, program: Program, held: Lock, actor: str) -> None:
        self._program: Final = program
        self._held: Final = held
        self._actor: Final = actor
        self._known: Issues | None = None
        self._last: Issues | None = None
        self._ended = False

    def end(self) -> None:
        """The lock is no longer ours."""
        self._ended = True

    def everything(self, *, fresh: bool = False) -> Issues:
        """All issues, as they were when this turn last asked or changed something; `fresh`: as they are now."""
        if self._known is None or fresh:
            before, self._known = self._last, None
            flags = [("limit", "0"), ("all", None), ("include-infra", None), ("include-gates", None)]
            told = self._array(command("list", self._actor, flags), "its issues")
            try:
                self._known = self._last = read_issues(told, before)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise BeadsError(f"bd lists what is no issue to us ({error}); is it a bd 1.x?") from error
        return self._known

    def find(self, id: str) -> BeadsIssue | None:  # noqa: A002 - it is bd's word
        """The issue of this full id, None where there is none. UsageError: it names none."""
        if not id.strip():
            raise UsageError("name an issue: bd would take the one that was touched last")
        return self.everything().get(id)

    def comments(self, id: str) -> list[Comment]:  # noqa: A002 - it is bd's word
        """What has been said of an issue, the oldest first."""
        self.issue(id)
        told = self._array(command("comments", self._actor, named=[id]), f"the comments of {id}")
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
        return self._run([first, "--readonly", f"--actor={self._actor}", *rest], bare=True)

    def issue(self, id: str) -> BeadsIssue:  # noqa: A002 - it is bd's word
        """The issue. BeadsError for an id that is none, or the short form of one: bd would take what fits."""
        found = self.find(id)
        if found is None:
            raise BeadsError(f"there is no issue {id}; ids are given in full")
        return found

    def _run(self, arguments: Sequence[str], *, bare: bool = False) -> Output:
        if self._ended:
            raise RuntimeError("the turn is over, and the lock somebody else's")
        return self._program.run(arguments, self._held, bare=bare)

    def _array(self, arguments: Sequence[str], what: str) -> list[Any]:
        output = self._run(arguments)
        told = payload(output)
        if output.status != 0 or not isinstance(told, list):
            raise BeadsError(f"bd does not list {what}: {why(output)}")
        return told

    def _read_back(self, output: Output) -> Issues:
        """Everything, after a change that ended so."""
        try:
            return self.everything(fresh=True)
        except BeadsError as error:
            what = f"{why(output)}, and reading back failed: {error}"
            raise BeadsError(f"whether bd has done it cannot be told: {what}", carried_out=None) from error


def why(output: Output) -> str:
    """Why a call has not done what was asked, as far as bd says."""
    if output.status is None:
        return "bd was ended at its time limit"
    if output.status < 0:
        return f"bd was ended by signal {-output.status}"
    return complaint(output) or f"bd ended with {output.status} and does not say why"


def said(output: Output) -> tuple[str, ...]:
    """What is worth telling of a call that has done what was asked, a line each."""
    failed = () if output.status == 0 else (why(output),)
    return (*failed, *(line for line in notices(output) if line not in failed))


@dataclass(frozen=True, slots=True)
class Stored:
    """A change that is stored, as reading back has shown."""

    issue: BeadsIssue
    """As it is now; of a dependency, the one that is blocked."""
    after: Issues
    said: tuple[str, ...] = ()
    """What bd said beside its answer, a line each; also why it failed, where it has stored everything all the same."""


class BdClient(Calls):
    """bd, within `Beads.turn`. For one thread. Ids are full ones; BeadsError for an issue that there is not.

    Each change costs one call of bd and a `list` after it. What `everything` has read serves until the next change.
    """

    def __init__(self, program: Program, held: Lock, actor: str) -> None:
        super().__init__(program, held, actor)
        self._made: set[str] = set()

    def create_issue(self, new: NewIssue, permit: Permit) -> Stored:
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
        return Stored(made, after, said(output))

    def undo_create(self, made: Stored, permit: Permit) -> Issues:  # noqa: ARG002 - no change without one
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
    ) -> Stored:
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
            return Stored(issue, self.everything())
        return self._change_one(command("update", self._actor, flags, [id]), id, update.missing, permit)

    def close_issue(self, id: str, permit: Permit, *, reason: str = "") -> Stored:  # noqa: A002 - it is bd's word
        """Close an issue; BeadsError where bd says that something keeps it open."""
        self.issue(id)

        def missing(now: BeadsIssue) -> Missing:
            told = [] if not reason or same(now.close_reason, reason) else ["reason"]
            return told if now.is_closed else ["status", *told]

        flags: list[Flag] = [("reason", reason)] if reason else []
        return self._change_one(command("close", self._actor, flags, [id]), id, missing, permit)

    def reopen_issue(self, id: str, permit: Permit, *, reason: str = "") -> Stored:  # noqa: A002 - it is bd's word
        """Open a closed issue again."""
        self.issue(id)

        def missing(now: BeadsIssue) -> Missing:
            return [] if now.status == OPEN else ["status"]

        flags: list[Flag] = [("reason", reason)] if reason else []
        return self._change_one(command("reopen", self._actor, flags, [id]), id, missing, permit)

    def add_dependency(self, blocked: str, blocker: str, kind: str, permit: Permit) -> Stored:
        """Let `blocked` depend on `blocker`; `kind` is a word of bd, of which it checks very little."""
        self.issue(blocked)
        self.issue(blocker)
        edge = Edge(blocked, blocker, kind)

        def missing(now: BeadsIssue) -> Missing:
            return [] if edge in now.edges else ["edge"]

        arguments = command("dep add", self._actor, [("type", kind)], [blocked, blocker])
        return self._change_one(arguments, blocked, missing, permit)

    def remove_dependency(self, blocked: str, blocker: str, permit: Permit) -> Stored:
        """Let `blocked` no longer depend on `blocker`, in whichever way it did."""
        self.issue(blocked)
        self.issue(blocker)

        def missing(now: BeadsIssue) -> Missing:
            return ["removal"] if any(edge.on == blocker for edge in now.edges) else []

        arguments = command("dep remove", self._actor, named=[blocked, blocker])
        return self._change_one(arguments, blocked, missing, permit)

    def add_comment(self, id: str, text: str, permit: Permit) -> Stored:  # noqa: A002, ARG002 - as above
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
        return Stored(issue, known, said(output))

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
    ) -> Stored:
        was_missing = missing(self.issue(id))
        output, after = self._change(arguments)
        now = after.get(id)
        if now is None:
            raise BeadsError(f"{id} is gone after bd was asked to change it: {why(output)}", carried_out=None)
        left = missing(now)
        if not left:
            return Stored(now, after, said(output))
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
