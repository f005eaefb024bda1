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
"""Time limit of one call of bd in seconds. With a thousand issues, the slowest call takes about 1 s."""
WAIT: Final = 120.0
"""Seconds to wait for the lock of a `.beads`."""
_STEERING: Final = (".env", "config.yaml", "metadata.json")
"""Files in `.beads` that can make bd use another database."""


def find_beads(source: Path, home: Path | None = None) -> Path:
    """Find the `.beads` as `seek_beads` does. Raises BeadsError also if there is none."""
    found = seek_beads(source, home)
    if found is None:
        raise BeadsError(f"{source} has no .beads; run `bd init` there")
    return found


def seek_beads(source: Path, home: Path | None = None) -> Path | None:
    """Return the resolved `.beads` of this directory, or None. Raises BeadsError if it links to files of agents.

    For a git worktree, the `.beads` of the main worktree comes first, as in bd, even if the worktree has a copy.
    With `home`, this applies also to the worktrees that bonobofs made in that state directory.
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
    """Return the main worktree of the repository; None if `source` is not a worktree registered in one."""
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
    """bd on one `.beads`, for one agent. May be used by several threads. The first turn starts the first bd."""

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
        """`beads` is from `find_beads`; `program` is bd, by default from `find_program`.

        `limit` is in seconds for one call, `wait` for the lock. Raises UsageError if the agent has no label.
        """
        if not agent.label.strip():
            raise UsageError("an agent without a name cannot act on issues: bd would act under another name")
        self._beads: Final = beads
        self._home: Final = home
        self._agent: Final = agent
        self._named: Final = program
        self._limit: Final = limit
        self._wait: Final = wait
        self._checked: tuple[int, ...] | None = None
        """Identity of the `.beads` and the program that were checked last."""

    @contextmanager
    def turn(self) -> Iterator[BdClient]:
        """Hold the lock of the issues, which all processes of bonobofs use, and give a client.

        Raises BeadsError if bd is missing, not supported or uses another database, or if the lock is not free in time.
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
        """Return numbers that change with the `.beads`, the program and the files that configure it."""
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
        """Check that bd uses this `.beads`. bd silently ignores a directory that it does not accept."""
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
    """The calls that read. For one thread, until `end`."""

    def __init__(self, program: Program, held: Lock, actor: str) -> None:
        self._program: Final = program
        self._held: Final = held
        self._actor: Final = actor
        self._known: Issues | None = None
        self._last: Issues | None = None
        self._ended = False

    def end(self) -> None:
        """Refuse further calls, because the lock is released."""
        self._ended = True

    def everything(self, *, fresh: bool = False) -> Issues:
        """Return all issues, as this turn listed them last. `fresh`: list them again."""
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
        """Return the issue of this full id, or None. Raises UsageError for a blank id."""
        if not id.strip():
            raise UsageError("name an issue: bd would take the one that was touched last")
        return self.everything().get(id)

    def comments(self, id: str) -> list[Comment]:  # noqa: A002 - it is bd's word
        """Return the comments of an issue, oldest first."""
        self.issue(id)
        told = self._array(command("comments", self._actor, named=[id]), f"the comments of {id}")
        try:
            return [read_comment(each) for each in told]
        except (KeyError, TypeError) as error:
            raise BeadsError(f"bd lists what is no comment to us ({error}); is it a bd 1.x?") from error

    def read(self, arguments: Sequence[str]) -> Output:
        """Run a command with bd's own arguments. The caller has checked that the command only reads.

        This adds only `--readonly` and `--actor`. bd's read-only mode refuses some of the writing commands, not all.
        """
        first, *rest = arguments
        for argument in arguments:
            check_text(argument)
        return self._run([first, "--readonly", f"--actor={self._actor}", *rest], bare=True)

    def issue(self, id: str) -> BeadsIssue:  # noqa: A002 - it is bd's word
        """Return the issue. Raises BeadsError for an unknown or abbreviated id, which bd would expand."""
        found = self.find(id)
        if found is None:
            raise BeadsError(f"there is no issue {id}; ids are given in full")
        return found

    def _run(self, arguments: Sequence[str], *, bare: bool = False) -> Output:
        if self._ended:
            raise RuntimeError("the lock is released; another process may hold it")
        return self._program.run(arguments, self._held, bare=bare)

    def _array(self, arguments: Sequence[str], what: str) -> list[Any]:
        output = self._run(arguments)
        told = payload(output)
        if output.status != 0 or not isinstance(told, list):
            raise BeadsError(f"bd does not list {what}: {why(output)}")
        return told

    def _read_back(self, output: Output) -> Issues:
        """List all issues after a change. Raises BeadsError with carried_out None if that fails."""
        try:
            return self.everything(fresh=True)
        except BeadsError as error:
            what = f"{why(output)}, and reading back failed: {error}"
            raise BeadsError(f"whether bd has done it cannot be told: {what}", carried_out=None) from error


def why(output: Output) -> str:
    """Return the reason of a failed call, as far as bd prints one."""
    if output.status is None:
        return "bd was ended at its time limit"
    if output.status < 0:
        return f"bd was ended by signal {-output.status}"
    return complaint(output) or f"bd ended with {output.status} and does not say why"


def said(output: Output) -> tuple[str, ...]:
    """Return the notices of a call whose change is stored, one line each, and its error if it failed."""
    failed = () if output.status == 0 else (why(output),)
    return (*failed, *(line for line in notices(output) if line not in failed))


@dataclass(frozen=True, slots=True)
class Stored:
    """A change that is stored, as reading it back has confirmed."""

    issue: BeadsIssue
    """The issue after the change. For a dependency, the blocked issue."""
    after: Issues
    said: tuple[str, ...] = ()
    """Notices of bd, one line each, and its error if it failed after it stored everything."""


class BdClient(Calls):
    """bd within `Beads.turn`, for one thread. Ids are full. An unknown issue is a BeadsError, except for `find`.

    Each change costs one call of bd and one `list`. `everything` caches the list until the next change.
    """

    def __init__(self, program: Program, held: Lock, actor: str) -> None:
        super().__init__(program, held, actor)
        self._made: set[str] = set()

    def create_issue(self, new: NewIssue, permit: Permit) -> Stored:
        """Create a whole issue, or none. A message is created as a permanent issue, which `list` shows."""
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

    def undo_create(self, made: Stored, permit: Permit) -> Issues:  # noqa: ARG002 - a change requires one
        """Delete an issue that this turn created; return the remaining ones. Raises UsageError for another issue."""
        id_ = made.issue.id
        if id_ not in self._made:
            raise UsageError(f"{id_} was not created just now; only that can be taken away again")
        output, after = self._change(command("delete", self._actor, [("force", None)], [id_]))
        if id_ in after:
            raise BeadsError(f"bd has not taken {id_} away again: {why(output)}")
        self._made.discard(id_)
        return after

    def update_issue(  # noqa: PLR0913 - one argument for each field
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
        """Change fields of an issue. None keeps a value, "" clears it. `metadata` is merged into the old metadata.

        `status` is a word of bd. Raises UsageError for `closed`: only `close_issue` makes bd check for blockers.
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
        """Close an issue. Raises BeadsError if bd refuses because of a blocker."""
        self.issue(id)

        def missing(now: BeadsIssue) -> Missing:
            told = [] if not reason or same(now.close_reason, reason) else ["reason"]
            return told if now.is_closed else ["status", *told]

        flags: list[Flag] = [("reason", reason)] if reason else []
        return self._change_one(command("close", self._actor, flags, [id]), id, missing, permit)

    def reopen_issue(self, id: str, permit: Permit, *, reason: str = "") -> Stored:  # noqa: A002 - it is bd's word
        """Reopen a closed issue."""
        self.issue(id)

        def missing(now: BeadsIssue) -> Missing:
            return [] if now.status == OPEN else ["status"]

        flags: list[Flag] = [("reason", reason)] if reason else []
        return self._change_one(command("reopen", self._actor, flags, [id]), id, missing, permit)

    def add_dependency(self, blocked: str, blocker: str, kind: str, permit: Permit) -> Stored:
        """Make `blocked` depend on `blocker`. `kind` is a word of bd, which hardly validates it."""
        self.issue(blocked)
        self.issue(blocker)
        edge = Edge(blocked, blocker, kind)

        def missing(now: BeadsIssue) -> Missing:
            return [] if edge in now.edges else ["edge"]

        arguments = command("dep add", self._actor, [("type", kind)], [blocked, blocker])
        return self._change_one(arguments, blocked, missing, permit)

    def remove_dependency(self, blocked: str, blocker: str, permit: Permit) -> Stored:
        """Remove the dependency of `blocked` on `blocker`, whatever its kind."""
        self.issue(blocked)
        self.issue(blocker)

        def missing(now: BeadsIssue) -> Missing:
            return ["removal"] if any(edge.on == blocker for edge in now.edges) else []

        arguments = command("dep remove", self._actor, named=[blocked, blocker])
        return self._change_one(arguments, blocked, missing, permit)

    def add_comment(self, id: str, text: str, permit: Permit) -> Stored:  # noqa: A002, ARG002 - as above
        """Add a comment to an issue. Reads back its comments only."""
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
        """Change the type of the created task to message."""
        told = payload(output)
        id_ = told.get("id") if output.status == 0 and isinstance(told, dict) else None
        if not isinstance(id_, str):
            made = _marked(self._read_back(output), mark)
            if made is None:
                return output
            id_ = made.id
        return self._run(command("update", self._actor, [("type", MESSAGE)], [id_]))

    def _change(self, arguments: Sequence[str]) -> tuple[Output, Issues]:
        """Run a command that changes an issue, and list all issues whatever its exit status is."""
        output = self._run(arguments)
        return output, self._read_back(output)

    def _change_one(
        self,
        arguments: Sequence[str],
        id: str,  # noqa: A002 - it is bd's word
        missing: Callable[[BeadsIssue], Missing],
        permit: Permit,  # noqa: ARG002 - a change requires one
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
        """Delete an issue that was created only in part, and raise BeadsError with the reason."""
        output, after = self._change(command("delete", self._actor, [("force", None)], [id]))
        if id in after:
            what = f"{id} is created in part: {reason}; taking it away failed: {why(output)}"
            raise BeadsError(what, carried_out=None)
        self._made.discard(id)
        raise BeadsError(f"nothing is created: {reason}")


def _nothing_made(output: Output) -> BeadsError:
    """Return the error. If bd is configured to create issues elsewhere, it prints an id that `list` does not show."""
    told = payload(output)
    id_ = told.get("id") if output.status == 0 and isinstance(told, dict) else None
    if id_:
        return BeadsError(f"bd says that it has created {id_}, which is not among these issues", carried_out=None)
    return BeadsError(f"bd has created nothing: {why(output)}")


def _marked(issues: Issues, mark: str) -> BeadsIssue | None:
    return next((issue for issue in issues.values() if issue.metadata.get(CALL) == mark), None)


def _words(parts: Sequence[str]) -> str:
    return " and ".join(parts)
