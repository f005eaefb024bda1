r"""Read and change the issues of one workspace through bd, and read every change back.

    store = IssueStore(find_beads(source), home, agent)
    with store.locked_client() as client:
        before = client.all_issues()
        ...
        changed = client.close_issue("gt-a1f", permit)

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
    bd_environment,
    error_line,
    find_program,
    hold_lock,
    output_json,
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
    beads = seek_beads(source, home)
    if beads is None:
        raise BeadsError(f"{os.path.realpath(source)} has no .beads; run `bd init` there")
    return beads


def seek_beads(source: Path, home: Path | None = None) -> Path | None:
    """Return the resolved `.beads` of this directory, or None. Raises BeadsError if it links to files of agents.

    For a git worktree, the `.beads` of the main worktree comes first, as in bd, even if the worktree has a copy.
    With `home`, this applies also to the worktrees that bonobofs made in that state directory.
    """
    source = Path(os.path.realpath(source))
    main = _main_worktree(source) or (None if home is None else repository_of(home, source))
    for directory in (source,) if main is None else (main, source):
        beads = Path(os.path.realpath(directory / ".beads"))
        if beads.is_dir():
            if beads.is_relative_to(directory) and ".beads" not in beads.relative_to(directory).parts:
                raise BeadsError(
                    f"{directory / '.beads'} leads to {beads}, where agents can write the configuration of bd"
                )
            return beads
    return None


def _main_worktree(source: Path) -> Path | None:
    """Return the main worktree of the repository; None if `source` is not a worktree registered in one."""
    link = source / ".git"
    try:
        require_open_to = source / link.read_text(encoding="utf-8").strip().removeprefix("gitdir: ")
        registered_link = (require_open_to / "gitdir").read_text(encoding="utf-8").strip()
        common = Path(
            os.path.realpath(require_open_to / (require_open_to / "commondir").read_text(encoding="utf-8").strip())
        )
        is_registered = os.path.samefile(require_open_to / registered_link, link)
    except (OSError, ValueError):
        return None
    return common.parent if is_registered and common.name == ".git" else None


class IssueStore:
    """The issues in one `.beads`, for one agent. Several threads may use it. The first `locked_client` starts bd."""

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
        self._program: Final = program
        self._limit: Final = limit
        self._wait: Final = wait
        self._checked: tuple[int, ...] | None = None
        """Identity of the `.beads` and the program that were checked last."""

    @contextmanager
    def locked_client(self) -> Iterator[BdClient]:
        """Hold the lock of the issues, which all processes of bonobofs use, and give a client.

        Raises BeadsError if bd is missing, not supported or uses another database, or if the lock is not free in time.
        """
        path = self._program or find_program(self._home, self._beads)
        with hold_lock(self._home, self._beads, self._wait) as lock, bd_environment(self._home, self._beads) as around:
            program = Program(path, self._beads, around, self._agent, self._limit)
            identity = self._identity(path)
            if self._checked != identity:
                program.check_version(lock)
                self._check_place(program, lock)
                self._checked = identity
            client = BdClient(program, lock, self._agent.label)
            try:
                yield client
            finally:
                client.end()

    def _identity(self, program: Path) -> tuple[int, ...]:
        """Return numbers that change with the `.beads`, the program and the files that configure it."""
        if os.path.lexists(self._beads / "redirect"):
            raise BeadsError(f"{self._beads / 'redirect'} leads to other issues; open the session where those are")
        steering = (self._beads / name for name in _STEERING)
        try:
            beads = self._beads.stat()
            files = [os.stat(path) for path in (program, *steering) if path == program or os.path.lexists(path)]
        except OSError as error:
            raise BeadsError(f"{error.filename} cannot be used: {error.strerror}") from error
        numbers = (number for file in files for number in (file.st_dev, file.st_ino, file.st_mtime_ns))
        return beads.st_dev, beads.st_ino, *numbers

    def _check_place(self, program: Program, lock: Lock) -> None:
        """Check that bd uses this `.beads`. bd silently ignores a directory that it does not accept."""
        output = program.run(command("where", self._agent.label), lock)
        answer = output_json(output)
        path = answer.get("path") if isinstance(answer, dict) else None
        if not isinstance(path, str):
            reason = error_line(output) or "it gives no reason"
            raise BeadsError(f"bd does not find its issues in {self._beads}: {reason}")
        for location in (path, answer.get("database_path") or path):
            if not Path(os.path.realpath(location)).is_relative_to(self._beads):
                raise BeadsError(f"bd works in {location} and not in {self._beads}, so it is not used")


def failure_reason(output: Output) -> str:
    """Return the reason of a failed call, as far as bd prints one."""
    if output.status is None:
        return "bd was ended at its time limit"
    if output.status < 0:
        return f"bd was ended by signal {-output.status}"
    return error_line(output) or f"bd ended with {output.status} and does not say why"


@dataclass(frozen=True, slots=True)
class Stored:
    """A change that is stored, as reading it back has confirmed."""

    issue: BeadsIssue
    """The issue after the change. For a dependency, the blocked issue."""
    after: Issues


class BdClient:
    """bd under the lock of the issues, for one thread. Ids are full. An unknown issue is a BeadsError except in `find`.

    Each change costs one call of bd and one `list`. `all_issues` caches the list until the next change.
    """

    def __init__(self, program: Program, lock: Lock, actor: str) -> None:
        self._program: Final = program
        self._lock: Final = lock
        self._actor: Final = actor
        self._cached: Issues | None = None
        self._last: Issues | None = None
        self._created: set[str] = set()
        self._ended = False

    def end(self) -> None:
        """Refuse further calls, because the lock is released."""
        self._ended = True

    def all_issues(self, *, fresh: bool = False) -> Issues:
        """Return all issues, as this client listed them last. `fresh`: list them again."""
        if self._cached is None or fresh:
            before, self._cached = self._last, None
            flags = [("limit", "0"), ("all", None), ("include-infra", None), ("include-gates", None)]
            documents = self._array(command("list", self._actor, flags), "its issues")
            try:
                self._cached = self._last = read_issues(documents, before)
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise BeadsError(f"cannot parse an issue in the output of `bd list` ({error}); use bd 1.x") from error
        return self._cached

    def find(self, id: str) -> BeadsIssue | None:  # noqa: A002 - it is bd's word
        """Return the issue of this full id, or None. Raises UsageError for a blank id."""
        if not id.strip():
            raise UsageError("name an issue: without an id, bd would use the one that was changed last")
        return self.all_issues().get(id)

    def comments(self, id: str) -> list[Comment]:  # noqa: A002 - it is bd's word
        """Return the comments of an issue, oldest first."""
        self.issue(id)
        documents = self._array(command("comments", self._actor, words=[id]), f"the comments of {id}")
        try:
            return [read_comment(document) for document in documents]
        except (KeyError, TypeError) as error:
            raise BeadsError(f"cannot parse a comment in the output of bd ({error}); use bd 1.x") from error

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
        issue = self.find(id)
        if issue is None:
            raise BeadsError(f"there is no issue {id}; give the full id")
        return issue

    def _run(self, arguments: Sequence[str], *, bare: bool = False) -> Output:
        if self._ended:
            raise RuntimeError("the lock is released; another process may hold it")
        return self._program.run(arguments, self._lock, bare=bare)

    def _array(self, arguments: Sequence[str], content: str) -> list[Any]:
        output = self._run(arguments)
        documents = output_json(output)
        if output.status != 0 or not isinstance(documents, list):
            raise BeadsError(f"bd does not list {content}: {failure_reason(output)}")
        return documents

    def _read_back(self, output: Output) -> Issues:
        """List all issues after a change. Raises BeadsError with carried_out None if that fails."""
        try:
            return self.all_issues(fresh=True)
        except BeadsError as error:
            reasons = f"{failure_reason(output)}, and reading back failed: {error}"
            raise BeadsError(f"it is unknown whether bd has stored the change: {reasons}", carried_out=None) from error

    def create_issue(self, new: NewIssue, permit: Permit) -> Stored:
        """Create a whole issue, or none. A message is created as a permanent issue, which `list` shows."""
        mark = uuid.uuid4().hex
        creation = Creation(new, mark)
        if new.parent:
            self.issue(new.parent)
        before = self.all_issues()
        output = self._run(command("create", self._actor, creation.flags()))
        if new.issue_type == MESSAGE:
            output = self._make_message(output, mark)
        after = self._read_back(output)
        issue = _marked(after, mark)
        if issue is None:
            raise _not_created(output)
        if issue.id in before:
            raise BeadsError(f"bd has overwritten the existing issue {issue.id}", carried_out=None)
        self._created.add(issue.id)
        if missing := creation.missing(issue):
            reason = f"{_words(missing)} could not be stored ({failure_reason(output)})"
            output, after = self._delete(issue.id, permit)
            if issue.id in after:
                reason = f"{issue.id} is created in part: {reason}; deleting it failed: {failure_reason(output)}"
                raise BeadsError(reason, carried_out=None)
            raise BeadsError(f"nothing is created: {reason}")
        return Stored(issue, after)

    def undo_create(self, created: Stored, permit: Permit) -> Issues:
        """Delete an issue that this client created; return the remaining ones. Raises UsageError for another issue."""
        issue_id = created.issue.id
        if issue_id not in self._created:
            raise UsageError(f"{issue_id} was not created just now, so it cannot be deleted")
        output, after = self._delete(issue_id, permit)
        if issue_id in after:
            raise BeadsError(f"bd has not deleted {issue_id}: {failure_reason(output)}")
        return after

    def update_issue(
        self,
        id: str,  # noqa: A002 - it is bd's word
        permit: Permit,
        *,
        metadata: Mapping[str, Any] | None = None,
        add_labels: Sequence[str] = (),
        remove_labels: Sequence[str] = (),
        **fields: str | int | None,
    ) -> Stored:
        """Change title, status, priority, assignee, description, design, acceptance or notes (`fields`) of an issue.

        None keeps a value, "" clears it. `metadata` is merged into the old metadata. `status` is a word of bd. Raises
        UsageError for `closed`: only `close_issue` makes bd check for blockers.
        """
        issue = self.issue(id)
        texts = {name: str(value) for name, value in fields.items() if value is not None}
        merged = None if metadata is None else {**issue.metadata, **metadata}
        update = Update(texts, merged, add_labels, remove_labels)
        flags = update.flags()
        if not flags:
            return Stored(issue, self.all_issues())
        return self._change(command("update", self._actor, flags, [id]), id, update.missing, permit)

    def close_issue(self, id: str, permit: Permit, *, reason: str = "") -> Stored:  # noqa: A002 - it is bd's word
        """Close an issue. Raises BeadsError if bd refuses because of a blocker."""

        def missing(issue: BeadsIssue) -> Missing:
            is_stored = not reason or same(issue.close_reason, reason)
            return [*(() if issue.is_closed else ("status",)), *(() if is_stored else ("reason",))]

        flags: list[Flag] = [("reason", reason)] if reason else []
        return self._change(command("close", self._actor, flags, [id]), id, missing, permit)

    def reopen_issue(self, id: str, permit: Permit, *, reason: str = "") -> Stored:  # noqa: A002 - it is bd's word
        """Reopen a closed issue."""

        def missing(issue: BeadsIssue) -> Missing:
            return [] if issue.status == OPEN else ["status"]

        flags: list[Flag] = [("reason", reason)] if reason else []
        return self._change(command("reopen", self._actor, flags, [id]), id, missing, permit)

    def add_dependency(self, blocked: str, blocker: str, kind: str, permit: Permit) -> Stored:
        """Make `blocked` depend on `blocker`. `kind` is a word of bd, which hardly validates it."""
        self.issue(blocker)
        edge = Edge(blocked, blocker, kind)

        def missing(issue: BeadsIssue) -> Missing:
            return [] if edge in issue.edges else ["edge"]

        arguments = command("dep add", self._actor, [("type", kind)], [blocked, blocker])
        return self._change(arguments, blocked, missing, permit)

    def remove_dependency(self, blocked: str, blocker: str, permit: Permit) -> Stored:
        """Remove the dependency of `blocked` on `blocker`, whatever its kind."""
        self.issue(blocker)

        def missing(issue: BeadsIssue) -> Missing:
            return ["removal"] if any(edge.on == blocker for edge in issue.edges) else []

        return self._change(command("dep remove", self._actor, words=[blocked, blocker]), blocked, missing, permit)

    def add_comment(self, id: str, text: str, permit: Permit) -> Stored:  # noqa: A002, ARG002 - as above
        """Add a comment to an issue. Reads back its comments only."""
        issue = self.issue(id)
        if not text.strip():
            raise UsageError("a comment needs a text")
        issues = self.all_issues()
        output = self._run(command("comments add", self._actor, words=[id, text]))
        comment_id = _printed_id(output)
        try:
            comments = self.comments(id)
        except BeadsError as error:
            raise BeadsError(f"it is unknown whether bd has stored the comment: {error}", carried_out=None) from error
        new = [comment for comment in comments if comment.id == comment_id] or comments[issue.comment_count :]
        if not any(same(comment.text, text) and comment.author == self._actor for comment in new):
            raise BeadsError(f"bd has not stored the comment: {failure_reason(output)}")
        return Stored(issue, issues)

    def _make_message(self, output: Output, mark: str) -> Output:
        """Change the type of the created task to message."""
        issue_id = _printed_id(output) if output.status == 0 else None
        if not isinstance(issue_id, str):
            issue = _marked(self._read_back(output), mark)
            if issue is None:
                return output
            issue_id = issue.id
        return self._run(command("update", self._actor, [("type", MESSAGE)], [issue_id]))

    def _delete(self, id: str, permit: Permit) -> tuple[Output, Issues]:  # noqa: A002, ARG002 - as above
        """Try to delete an issue that this client created; return the remaining ones."""
        output = self._run(command("delete", self._actor, [("force", None)], [id]))
        after = self._read_back(output)
        if id not in after:
            self._created.discard(id)
        return output, after

    def _change(
        self,
        arguments: Sequence[str],
        id: str,  # noqa: A002 - it is bd's word
        missing: Callable[[BeadsIssue], Missing],
        permit: Permit,  # noqa: ARG002 - a change requires one
    ) -> Stored:
        """Run a command that changes an issue, and compare whatever its exit status is."""
        before = missing(self.issue(id))
        output = self._run(arguments)
        after = self._read_back(output)
        issue = after.get(id)
        if issue is None:
            raise BeadsError(f"{id} no longer exists after a change by bd: {failure_reason(output)}", carried_out=None)
        left = missing(issue)
        if not left:
            return Stored(issue, after)
        done = tuple(part for part in before if part not in left)
        if not done:
            raise BeadsError(f"bd has not changed {id}: {failure_reason(output)}", missing=tuple(left))
        raise BeadsError(
            f"bd has changed {id} in part: {_words(left)} not stored ({failure_reason(output)})",
            carried_out=None,
            stored=done,
            missing=tuple(left),
        )


def _printed_id(output: Output) -> Any:
    document = output_json(output)
    return document.get("id") if isinstance(document, dict) else None


def _not_created(output: Output) -> BeadsError:
    """Return the error. If bd is configured to create issues elsewhere, it prints an id that `list` does not show."""
    issue_id = _printed_id(output) if output.status == 0 else None
    if issue_id:
        return BeadsError(f"bd reports that it created {issue_id}, which is not among these issues", carried_out=None)
    return BeadsError(f"bd has created nothing: {failure_reason(output)}")


def _marked(issues: Issues, mark: str) -> BeadsIssue | None:
    return next((issue for issue in issues.values() if issue.metadata.get(CALL) == mark), None)


def _words(words: Sequence[str]) -> str:
    return " and ".join(words)
