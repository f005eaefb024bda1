"""One operation of the gate in the making: what it stands on, and how its change is judged, entered and done."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from bonobofs.audit.record import TOUCHES
from bonobofs.decision import Code, Denied
from bonobofs.errors import GitError
from bonobofs.guard import Caller, Door, Part
from bonobofs.guards.git import rules
from bonobofs.guards.git.index import Entry, Index
from bonobofs.guards.git.journal import Change, Step
from bonobofs.guards.git.judging import Judging, named
from bonobofs.guards.git.modes import SUBMODULE
from bonobofs.guards.git.refs import HEADS, ZERO, Move, Value
from bonobofs.guards.git.repository import Blob, Difference, Repository
from bonobofs.guards.git.rules import Refusal, Rules
from bonobofs.guards.git.transaction import Transaction
from bonobofs.request import NO_FACTS, Operation, Request, WorkspacePath

GUARD: Final = "git"
_OF_THE_PATH: Final = (Code.OUTSIDE, Code.PROTECTED)
UNDER_WAY: Final = {"MERGE_HEAD": "a merge", "CHERRY_PICK_HEAD": "a cherry-pick", "REVERT_HEAD": "a revert"}
"""What git notes of an operation that waits to be ended by a commit."""
_LISTED: Final = 1000
"""How many paths an entry lists; it says how many there are."""


class Head:
    """Where HEAD is, locked."""

    def __init__(self, branch: str, oid: str | None) -> None:
        self.branch: Final = branch
        """"" where it is detached."""
        self.oid: Final = oid
        """None where the branch has no commit yet."""


class Work:
    """What an operation works with, from the role's leave to its end."""

    def __init__(
        self,
        door: Door,
        turn: AbstractContextManager[object],
        transaction: Transaction,
        operation: Operation,
        tool: str,
    ) -> None:
        """Refused, once entered, where the role does not have the operation.

        `turn` is held whenever the door is asked, and from the intent to the outcome, but not while things are looked
        at: leases could not be followed meanwhile.
        """
        self.door: Final = door
        self._turn: Final = turn
        self.rules: Final[Rules] = rules.rules_of(door.policy.document)
        self.transaction: Final = transaction
        self.repository: Final[Repository] = transaction.repository
        self.tree: Final = transaction.tree
        self.operation: Final = operation
        self.caller: Final = Caller(tool)
        self.is_entered = False
        """Whether the record has an intent, and so will have its end."""
        self.demand_leave(Part(self.request))
        for about in transaction.mended:
            self.note({"mended": about})

    @property
    def request(self) -> Request:
        return Request(self.operation, WorkspacePath(""))

    def demand(self, refusal: Refusal | Denied | None, about: str = "", **details: Any) -> None:
        """Refused, once entered, where there is a refusal."""
        if refusal is not None:
            denied = refusal if isinstance(refusal, Denied) else refusal.of(self.operation, about)
            with self._turn:
                raise self.door.refuse(denied, self.caller._replace(details=details), guard=GUARD)

    def demand_leave(self, part: Part, *codes: Code) -> None:
        """Refused, once entered, where the engine denies it, with one of these codes if any are named."""
        with self._turn:
            decision = self.door.decide(*part[:2])
            if isinstance(decision, Denied) and (not codes or decision.code in codes):
                raise self.door.refuse(decision, self.caller, guard=GUARD)

    def note(self, details: dict[str, Any], *, error: int = 0) -> None:
        """Enter what came of an operation that changed nothing."""
        with self._turn:
            self.door.note(self.request, guard=GUARD, caller=self.caller, details=details, error=error)

    def demand_paths(self, paths: Iterable[bytes], operation: Operation = Operation.WRITE_FILE) -> None:
        """Refused where the rules for files speak against a path itself: nothing is looked up under it."""
        for path in paths:
            self.demand_leave(Part(Request(operation, named(path))), *_OF_THE_PATH)

    def demand_fit(self, differences: Iterable[Difference], **details: Any) -> None:
        """Refused where a difference is of what no rule for files can allow."""
        self.demand(Judging(self.repository, self.operation).refusal(differences), **details)

    def index(self) -> Index:
        """The index, locked. GitError: it has conflicts."""
        index = self.transaction.lock_index()
        if index.unmerged:
            paths = sorted({named(entry.path) for entry in index.unmerged})
            raise GitError("the index has conflicts that only git itself resolves", kind="unmerged", paths=paths)
        return index

    def head(self) -> Head:
        """Where HEAD is, it and its branch locked. GitError; Refused where the branch is another name of a branch."""
        value = self.transaction.lock("HEAD")
        if value is None:
            raise GitError("the repository has no HEAD", kind="no-repository")
        if value.target is None:
            return Head("", value.oid)
        branch, _ = self.repository.refs.head()
        return Head(branch, self.branch(branch))

    def demand_settled(self) -> None:
        """GitError: git is in the middle of something, and what it would do next would be lost."""
        for name, what in UNDER_WAY.items():
            if self.repository.refs.place(name).exists():
                raise GitError(
                    f"{what} is under way here; `git reset` gives it up, git itself ends it", kind="unmerged"
                )

    def branch(self, name: str) -> str | None:
        """The commit of a branch, locked; None: there is no such branch."""
        value = self.transaction.lock(HEADS + name)
        if value is not None and value.target is not None:
            led = value.target.removeprefix(HEADS)
            self.demand(rules.moved_branch(self.rules, led) or rules.SYMBOLIC, branch=name, target=led)
        return None if value is None else value.oid

    def moves(self, head: Head, new: str, log: str) -> tuple[Move, ...]:
        """Move the branch that HEAD is on, or HEAD itself, to a commit."""
        old, logged = head.oid, (log, head.oid or ZERO, new)
        if not head.branch:
            return (Move("HEAD", Value(old), Value(new), *logged),)
        before = None if old is None else Value(old)
        on_branch = Value(None, HEADS + head.branch)
        return (Move(HEADS + head.branch, before, Value(new), *logged), Move("HEAD", on_branch, on_branch, *logged))

    def do(
        self,
        make: Callable[[], tuple[Change, dict[str, Any]]],
        differences: Sequence[Difference] = (),
        before: bytes | None = None,
        *,
        action: str = "",
        details: dict[str, Any],
    ) -> dict[str, Any]:
        """Judge the differences, enter the intent, make the change and do it; gives what the record says of its end.

        `before` is the tree of which the directories are there already.
        """
        self.demand_fit(differences, **details)
        parts = Judging(self.repository, self.operation).parts(differences, before)
        size = sum(part.facts.size for part in parts if part.facts.size > 0)
        shown = {**listed("files", [each.path for each in differences]), TOUCHES: self._touched(differences)}
        caller = self.caller._replace(details=details)
        with self._turn:
            admission = self.door.admit(
                self.request, NO_FACTS, *parts, caller=caller, details=shown, size=size, action=action, guard=GUARD
            )
            self.is_entered = True
            with admission as leave:
                change, outcome = make()
                try:
                    self.transaction.apply(change, leave, {"operation": self.operation.value, **outcome})
                except GitError as error:
                    admission.details = {**outcome, "error": error.kind}
                    raise
                admission.written = size
                admission.details = outcome
        return outcome

    def _touched(self, differences: Iterable[Difference]) -> list[str]:
        """What changes beside the files themselves: the repository, and directories that are empty without them."""
        layout = self.repository.layout
        above = {named(each.path.rpartition(b"/")[0]) for each in differences if each.new is None} - {""}
        return [*([".git/"] if layout.git == layout.root / ".git" else []), *sorted(above)]

    def files(self, differences: Iterable[Difference], index: Index) -> tuple[Step, ...]:
        """The files of the working tree that follow a difference; what sparse checkout leaves out is left out."""
        return tuple(
            Step(path, old, new)
            for path, old, new in differences
            if not ((entry := index.entries.get(path)) is not None and entry.skips_worktree)
        )

    def staged(self, differences: Iterable[Difference], index: Index) -> dict[bytes, Entry | None]:
        """The index as it follows a difference; the times come with the files."""
        return {
            path: None if new is None else entry_of(path, new, index.entries.get(path)) for path, _, new in differences
        }

    def changes_of_index(self, tree: bytes | None, index: Index) -> list[Difference]:
        """What is staged: the paths that the index has otherwise than a tree."""
        made = index.write_tree(self.repository.write_tree)
        return list(self.repository.differences(tree, made))

    def unclean(self, index: Index, tree: bytes | None) -> list[str]:
        """The tracked paths with changes that are not committed, staged or not."""
        found = {named(each.path) for each in self.changes_of_index(tree, index)}
        found.update(named(entry.path) for entry in self.changed_files(index))
        found.update(named(entry.path) for entry in index if entry.is_only_intended)
        return sorted(found)

    def changed_files(self, index: Index) -> list[Entry]:
        """The entries whose files are not as they were staged."""
        time = self.transaction.index_time
        return [
            entry
            for entry in index
            if not entry.skips_worktree
            and not entry.assume_valid
            and entry.mode != SUBMODULE
            and not self.tree.is_unchanged(entry, time)
        ]


def entry_of(path: bytes, blob: Blob, known: Entry | None) -> Entry:
    """What is staged of a path anew, with the flags that it had."""
    if known is None:
        return Entry(path, blob.mode, blob.oid)
    return known._replace(mode=blob.mode, oid=blob.oid, stat=Entry(path, 0, b"").stat, more=known.more & ~0x2000)


def listed(key: str, paths: Sequence[bytes]) -> dict[str, Any]:
    """Paths, for a record; where there are very many, the first of them and how many there are."""
    shown: dict[str, Any] = {key: [named(path) for path in paths[:_LISTED]]}
    return shown if len(paths) <= _LISTED else {**shown, f"{key}_total": len(paths)}
