"""Publication: judge, record and atomically move branches and tags of the source.

    publisher = Publisher(authorizer, Repository(git_dir, [objects]), branches, journal=journal, objects=objects)
    published = publisher.publish([RefUpdate("refs/heads/aidlc/gt-17", old, new)], issue="gt-17")

A call publishes all of its updates or none. The objects are in the source's object store, or in an object directory
from which the publisher adds them. A denial by a rule or the policy raises Refused, a PermissionError. A failure of the
repository raises GitError. In both cases, no ref of the source has changed.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import pygit2

from bonobofs.audit.entry import TOUCHES
from bonobofs.enforcement.authorizer import Authorizer, Caller, RelatedChange, mark_recorded
from bonobofs.errors import BonobofsError, GitError
from bonobofs.git import branch_rules
from bonobofs.git.branch_rules import (
    BranchContext,
    CommitContext,
    CommitRecord,
    RuleRefusal,
    UpdateKind,
    identity,
    rules_of,
)
from bonobofs.git.journal import Journal
from bonobofs.git.repository import GitRepository, TreeDifference
from bonobofs.git.shared_head import is_checked_out_elsewhere
from bonobofs.git.source_refs import BRANCHES, REMOTES, TAGS, Branches, read_head
from bonobofs.git.tree_changes import TreeChanges, workspace_path
from bonobofs.policy.decision import Denied, Permit
from bonobofs.policy.request import NO_FACTS, Operation, Request, WorkspacePath

GUARD: Final = "git"
_NO_LOCK: Final = nullcontext()
PUSH: Final = Caller("git push")
MOST_UPDATES: Final = 100
MOST_COMMITS: Final = 20_000
MOST_PATHS: Final = 200_000
_MOST_SEARCHED: Final = 200_000
"""Number of published commits that a search for the original of a foreign commit reads."""
_MOST_RECORDED: Final = 1000
"""Commits and paths that an entry lists at most. The entry also has their total number."""
_ZERO: Final = frozenset("0")


class RefUpdate(NamedTuple):
    """Intended update of a ref. Object ids are hex; "" means no object."""

    ref: str
    """Full name, `refs/heads/…` or `refs/tags/…`."""
    old: str
    """Value that the caller expects in the source."""
    new: str


class Published(NamedTuple):
    """Completed update of a ref."""

    ref: str
    old: str
    new: str
    kind: UpdateKind
    commits: tuple[str, ...]
    """New commits, parents first."""


class IncompleteError(BonobofsError):
    """The refs have moved, but a later step failed: the checkout, the register of publishers, or the record."""

    def __init__(self, published: Sequence[Published], failures: Sequence[str]) -> None:
        names = ", ".join(f"{update.ref} is at {update.new or 'no commit'}" for update in published)
        super().__init__(f"{names}, but a later step failed: {'; '.join(failures)}")
        self.published: Final = published
        self.failures: Final = failures


CheckoutUpdate = Callable[[Permit], AbstractContextManager[Callable[[], None]]]
"""Prepare the update of a checkout. The context yields the function that completes it after the refs have moved, and
undoes it after an error."""


@contextmanager
def _no_checkout(_: Permit) -> Iterator[Callable[[], None]]:
    """Update no checkout."""
    yield lambda: None


@contextmanager
def _collected(failures: list[str]) -> Iterator[None]:
    """Append an error of the block to `failures`."""
    try:
        yield
    except (OSError, BonobofsError, pygit2.GitError) as error:
        failures.append(str(error))


class _Move(NamedTuple):
    """A judged update, not yet made, and the changes of paths that the policy must permit."""

    published: Published
    related: list[RelatedChange]


def sync_refs(common: Path, refs: Iterable[str]) -> None:
    """Sync loose refs to disk. libgit2 would also sync their logs and directories."""
    for ref in refs:
        with suppress(FileNotFoundError):  # git has packed it meanwhile
            handle = os.open(common / ref, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fdatasync(handle)
            finally:
                os.close(handle)


class Publisher:
    """Publishes for one agent into one repository."""

    def __init__(
        self,
        authorizer: Authorizer,
        repository: GitRepository,
        branches: Branches,
        *,
        journal: Journal,
        objects: Path,
        lock: AbstractContextManager[object] = _NO_LOCK,
        is_operator: bool = False,
    ) -> None:
        """`objects` is an object directory whose content is added to the source once the updates are authorized.

        `repository` must have been opened with it. `lock` is a lock. It is held during each call of the authorizer, and
        from intent to outcome. `is_operator`: the agent is the operator, who may move every ref.
        """
        self._authorizer: Final = authorizer
        self._repository: Final = repository
        self._branches: Final = branches
        self._objects: Final = objects
        self._journal: Final = journal
        self._lock: Final = lock
        self._is_operator: Final = is_operator
        self._rules: Final = rules_of(authorizer.policy.document)
        self._own: Final = identity(authorizer.agent, self._rules)
        self._tips: Final = repository.protected_tips(self._rules)
        self._bases: Final = cache(repository.merge_bases)
        self._elsewhere: Final[dict[str, frozenset[str]]] = {}
        """{tip: commits that it reaches and no branch of the source does}"""

    def publish(
        self,
        updates: Sequence[RefUpdate],
        *,
        issue: str | None,
        operation: Operation = Operation.PUBLISH,
        details: dict[str, Any] | None = None,
        caller: Caller = PUSH,
        touches: Sequence[str] = (),
        follow: CheckoutUpdate = _no_checkout,
    ) -> list[Published]:
        """Judge, record and make the updates. Raises Refused, GitError, OSError; then no ref has moved.

        `operation` and `details` go into the entries. `touches` lists further paths that the publication changes.
        `follow` prepares the update of a checkout when the updates are authorized and the objects are stored. An error
        of it aborts the publication.

        IncompleteError: the refs have moved, and a later step failed. The outcome is a success, with the error.
        """
        intended = {"updates": [update._asdict() for update in updates[:MOST_UPDATES]]}
        caller = caller._replace(details={**intended, **caller.details})
        if not 0 < len(updates) <= MOST_UPDATES or len({update.ref for update in updates}) != len(updates):
            self._refuse(branch_rules.LIMIT.of(operation), caller)
        moves = self._judge_all(updates, issue, operation, caller)
        published = [move.published for move in moves]
        related = list(dict.fromkeys(part for move in moves for part in move.related))
        entry = {**self._recorded(published, related), **({"issue": issue} if issue else {}), **(details or {})}
        entry[TOUCHES] = [".git/", *touches]
        request = Request(operation, WorkspacePath(""))
        authorize = self._authorizer.authorize
        with self._lock:
            admission = authorize(request, NO_FACTS, *related, caller=caller, details=entry, guard=GUARD)
            try:
                failures = self._make(published, operation, follow, admission.permit)
            except BaseException as error:
                admission.__exit__(type(error), error, error.__traceback__)
                raise
            admission.details = {"incomplete": failures} if failures else None
            with _collected(failures):
                admission.end(0)
        if failures:
            incomplete = IncompleteError(published, failures)
            mark_recorded(incomplete)
            raise incomplete
        return published

    def check(self, updates: Sequence[RefUpdate], caller: Caller) -> None:
        """Judge updates as `publish` does, and make none. Raises Refused, GitError."""
        for move in self._judge_all(updates, None, Operation.PUBLISH, caller):
            for part in move.related:
                decision = self._authorizer.decide(part.request, part.context)
                if isinstance(decision, Denied):
                    self._refuse(decision, caller)

    def _judge_all(
        self, updates: Sequence[RefUpdate], issue: str | None, operation: Operation, caller: Caller
    ) -> list[_Move]:
        if self._is_operator:
            return [self._judge_for_operator(update, operation, caller) for update in updates]
        return [self._judge(update, issue, operation, caller) for update in updates]

    def _make(
        self, published: list[Published], operation: Operation, follow: CheckoutUpdate, permit: Permit
    ) -> list[str]:
        """Store the objects, move the refs and take the later steps. Return the errors of the later steps."""
        common, failures, is_moved = self._repository.common_dir, list[str](), False
        try:
            with self._journal.writing(self._repository.git_dir, common, published) as token:
                self._add_objects(token)
                with follow(permit) as complete:
                    moves = {one[:3]: f"{operation}: {one.kind}" for one in published}
                    self._repository.move_refs(moves, self._own)
                    is_moved = True
                    with _collected(failures):
                        complete()
                    with _collected(failures):
                        for update in published:
                            if update.ref.startswith(BRANCHES):
                                self._branches.note(update.ref, update.new)
                    with _collected(failures):
                        sync_refs(common, [update.ref for update in published if update.new])
                        self._add_objects(token)  # git gc may have removed objects that nothing referred to
        except (OSError, BonobofsError) as error:
            if not is_moved:
                raise
            failures.append(str(error))
        return failures

    # -- judging

    def _judge(self, update: RefUpdate, issue: str | None, operation: Operation, caller: Caller) -> _Move:
        ref = update.ref
        old, new = ("" if set(oid) == _ZERO else oid for oid in update[1:])
        if ref.startswith(TAGS):
            return self._judge_tag(RefUpdate(ref, old, new), issue, operation, caller)
        if not ref.startswith(BRANCHES):
            self._refuse(branch_rules.REF.of(operation, about=f"Reference: {ref}."), caller)
        context = self._branch_facts(ref, old, new, operation, caller)
        self._demand(
            branch_rules.judge_branch(self._rules, ref[len(BRANCHES) :], context), operation, caller, f"Branch: {ref}."
        )
        commits = self._new_commits(new, context.current, operation, caller)
        merges = not commits or any(
            (each := self._repository.commit(oid)) and len(each.parent_ids) > 1 for oid in commits
        )
        kind = branch_rules.kind_of(context, merges=merges)
        resets = kind == UpdateKind.FORCE and not commits
        self._demand_role(Operation.RESET if resets else branch_rules.OPERATIONS[kind], caller)
        related = self._judge_commits(commits, context.current, new, issue, operation, caller) if new else []
        return _Move(Published(ref, context.current, new, kind, tuple(commits)), related)

    def _judge_for_operator(self, update: RefUpdate, operation: Operation, caller: Caller) -> _Move:
        """Return a move, which is refused only if the ref has moved, or is the branch of another checkout."""
        ref, old, new = update
        is_branch = ref.startswith(BRANCHES)
        context = self._branch_facts(ref, old, new if is_branch else "", operation, caller)
        refusal = branch_rules.CHECKED_OUT if is_branch and context.is_checked_out else None
        refusal = branch_rules.MOVED if context.current != old else refusal
        self._demand(refusal, operation, caller, f"Reference: {ref}.")
        kind = UpdateKind.TAG if new and not is_branch else branch_rules.kind_of(context, merges=False)
        changes = self._repository.differences(old, new) if is_branch and old and new else ()
        related = [RelatedChange(Request(Operation.WRITE_FILE, workspace_path(each.path))) for each in changes]
        return _Move(Published(ref, old, new, kind, ()), related)

    def _judge_tag(self, update: RefUpdate, issue: str | None, operation: Operation, caller: Caller) -> _Move:
        ref, old, new = update
        name = ref[len(TAGS) :]
        exists = bool(old) or not new or self._repository.exists(ref)
        namesake = any(self._repository.exists(prefix + name) for prefix in (BRANCHES, REMOTES))
        namesake |= self._repository.has_remote(name)
        refusal = branch_rules.judge_tag(name, exists=exists, has_namesake=namesake)
        self._demand(refusal, operation, caller, f"Tag: {ref}.")
        self._demand_role(Operation.TAG, caller)
        target = new
        if self._repository.commit(new) is None:
            found = branch_rules.read_tagger(self._repository.bytes_of(new))
            if found is None or (found[1].name, found[1].email) != self._own:
                self._refuse(branch_rules.TAGGER.of(operation, about=f"Tag: {ref}."), caller)
            target = found[0]
        commits = self._new_commits(target, "", operation, caller)
        related = self._judge_commits(commits, "", target, issue, operation, caller)
        return _Move(Published(ref, "", new, UpdateKind.TAG, tuple(commits)), related)

    def _branch_facts(self, ref: str, old: str, new: str, operation: Operation, caller: Caller) -> BranchContext:
        name = ref[len(BRANCHES) :]
        try:
            current = self._repository.target(ref)
        except GitError:
            self._refuse(branch_rules.SYMBOLIC.of(operation, about=f"Branch: {ref}."), caller)
        if new and self._repository.commit(new) is None:
            self._refuse(branch_rules.OBJECT.of(operation, about=f"Object: {new}."), caller)
        publisher, tip = self._branches.find(ref) if current else ("", "")  # the operator may have deleted the branch
        forwards = bool(new) and (not current or self._repository.reaches(new, current))
        namesake = any(self._repository.exists(prefix + name) for prefix in (TAGS, REMOTES))
        namesake |= not current and self._repository.has_remote(name)
        git_dir, common = self._repository.git_dir, self._repository.common_dir
        elsewhere = is_checked_out_elsewhere(git_dir, common, ref) or (not new and read_head(git_dir) == f"ref: {ref}")
        return BranchContext(
            current, old, new, forwards, publisher, tip, self._authorizer.agent.id, namesake, elsewhere
        )

    def _new_commits(self, tip: str, current: str, operation: Operation, caller: Caller) -> list[str]:
        if not tip:
            return []
        if self._repository.commit(tip) is None:
            self._refuse(branch_rules.OBJECT.of(operation, about=f"Object: {tip}."), caller)
        known = [*self._tips, *filter(None, [current])]
        found = self._repository.new_commits(tip, known, MOST_COMMITS)
        if len(found) > MOST_COMMITS:
            self._refuse(branch_rules.LIMIT.of(operation, about=f"More than {MOST_COMMITS} new commits."), caller)
        return found

    def _judge_commits(
        self, commits: list[str], current: str, tip: str, issue: str | None, operation: Operation, caller: Caller
    ) -> list[RelatedChange]:
        """Judge the new commits. Return the changes for the policy: paths of each commit and of the whole update."""
        roots = [*self._tips, *filter(None, [current])]
        standing = CommitContext(
            self._own, issue, int(time.time()), self._parent_time, lambda commit: self._originals(commit, roots)
        )
        changes = TreeChanges(self._repository, operation)
        related: list[RelatedChange] = []
        for oid in commits:
            commit = branch_rules.read_commit(oid, self._repository.bytes_of(oid))
            refusal = (
                branch_rules.OBJECT if commit is None else branch_rules.judge_commit(self._rules, commit, standing)
            )
            if commit is not None and refusal is not None and self._is_of_a_branch(oid, tip):
                refusal = None
            self._demand(refusal, operation, caller, f"Commit: {oid}.")
            assert commit is not None
            first = commit.parents[0] if commit.parents else ""
            reaches = self._repository.reaches
            others = [each for each in commit.parents[1:] if any(reaches(tip, each) for tip in self._tips)]
            found = self._unpublished(self._repository.differences(first, oid), first, others)
            related += self._questions(changes, found, first, operation, caller, len(related))
        for before, found in self._wholes(current, tip):
            related += self._questions(changes, found, before, operation, caller, len(related))
        return related

    def _wholes(self, current: str, tip: str) -> Iterator[tuple[str, Iterator[TreeDifference]]]:
        """Yield (base, differences) of the whole update: against the old tip and against protected branches."""
        bases = dict.fromkeys(base for each in self._tips for base in self._bases(tip, each))
        if current:
            yield current, self._unpublished(self._repository.differences(current, tip), current, list(bases))
        for base in bases:
            yield base, self._unpublished(self._reverted(base, current, tip), base, ())

    def _reverted(self, base: str, current: str, tip: str) -> Iterator[TreeDifference]:
        """Yield the differences from `base` to `tip`, without content that `current` has since its merge bases."""
        entry = self._repository.entry
        before = (self._bases(current, base) if current else ()) or ("",)
        for each in self._repository.differences(base, tip):
            has = current and entry(current, each.path) == each.new
            if not has or any(entry(commit, each.path) == each.new for commit in before):
                yield each

    def _unpublished(
        self, differences: Iterable[TreeDifference], before: str, others: Sequence[str]
    ) -> Iterator[TreeDifference]:
        """Yield the differences whose new content is neither in a protected branch nor in a commit of `others`."""
        for each in differences:
            if not any(self._is_taken(each, before, commit) for commit in (*self._tips, *others)):
                yield each

    def _is_taken(self, difference: TreeDifference, before: str, commit: str) -> bool:
        """True if `commit` has the new content, or removed the path since its merge bases with `before`."""
        path, _, new = difference
        if self._repository.entry(commit, path) != new:
            return False
        if new is not None:
            return True
        # `commit` removed the path only if each merge base has it.
        bases = self._bases(before, commit) if before else ()
        return bool(bases) and all(self._repository.entry(base, path) is not None for base in bases)

    def _questions(
        self,
        changes: TreeChanges,
        differences: Iterator[TreeDifference],
        before: str,
        operation: Operation,
        caller: Caller,
        count: int,
    ) -> list[RelatedChange]:
        """Return the differences as changes to judge. `count`: changes so far. Refused: too many, or invalid."""
        found: list[TreeDifference] = []
        for each in differences:
            found.append(each)
            if count + len(found) > MOST_PATHS:
                self._refuse(branch_rules.LIMIT.of(operation, about=f"More than {MOST_PATHS} paths."), caller)
        denied = changes.refusal(found)
        if denied is not None:
            self._refuse(denied, caller)
        return list(changes.related(found, before))

    def _is_of_a_branch(self, commit: str, tip: str) -> bool:
        """True if a branch of the source already reaches the commit."""
        if tip not in self._elsewhere:
            self._elsewhere[tip] = frozenset(self._repository.new_commits(tip, self._repository.heads(), MOST_COMMITS))
        return commit not in self._elsewhere[tip]

    def _parent_time(self, commit: CommitRecord) -> int:
        parents = (self._repository.commit(parent) for parent in commit.parents)
        return max((parent.commit_time for parent in parents if parent is not None), default=0)

    def _originals(self, commit: CommitRecord, roots: list[str]) -> list[CommitRecord]:
        """Return the published commits with the same author, author time and change."""
        if not roots or len(commit.parents) > 1:
            return []
        wanted = self._repository.fingerprint(commit.oid)
        walk = self._repository.raw.walk(pygit2.Oid(hex=roots[0]))
        for root in roots[1:]:
            walk.push(pygit2.Oid(hex=root))
        found = []
        for _, each in zip(range(_MOST_SEARCHED), walk, strict=False):
            if each.author.time == commit.author.time and len(each.parent_ids) <= 1:
                context = branch_rules.read_commit(str(each.id), self._repository.bytes_of(str(each.id)))
                if context is not None and context.author == commit.author:
                    found.append(context)
        return [context for context in found if self._repository.fingerprint(context.oid) == wanted]

    def _demand_role(self, operation: Operation, caller: Caller) -> None:
        with self._lock:
            decision = self._authorizer.decide(Request(operation, WorkspacePath("")))
        if isinstance(decision, Denied):
            self._refuse(decision, caller)

    def _demand(self, refusal: RuleRefusal | None, operation: Operation, caller: Caller, about: str) -> None:
        if refusal is not None:
            self._refuse(refusal.of(operation, about=about), caller)

    def _refuse(self, denied: Denied, caller: Caller) -> NoReturn:
        with self._lock:
            raise self._authorizer.deny(denied, caller, guard=GUARD)

    # -- recording and making

    def _recorded(self, published: Sequence[Published], related: Sequence[RelatedChange]) -> dict[str, Any]:
        paths = list(dict.fromkeys(part.request.path for part in related))
        updates = [
            {**one._asdict(), "commits": list(one.commits[-_MOST_RECORDED:]), "count": len(one.commits)}
            for one in published
        ]
        return {
            "updates": updates,
            "paths": paths[:_MOST_RECORDED],
            "path_count": len(paths),
        }

    def _add_objects(self, token: str) -> None:
        add_objects(self._objects, self._repository.common_dir / "objects", token)


_SUFFIXES: Final = (".pack", ".rev", ".bitmap", ".mtimes", ".keep", ".idx")
"""Order in which the files of a pack must appear. git uses a pack once its .idx exists."""


def add_objects(objects: Path, store: Path, token: str) -> None:
    """Add all objects of the object directory `objects` to `store` and sync them. Raises OSError.

    Existing objects stay. Temporary files in `store` are named `tmp_bonobofs_TOKEN_…`. git ignores them and prunes
    old ones.
    """
    for last in (False, False, True):
        try:
            _add_objects(objects, store, token)
        except FileNotFoundError:  # git gc removed an empty directory or a temporary file
            if last:
                raise
        else:
            return


def _add_objects(objects: Path, store: Path, token: str) -> None:
    for pack in sorted((objects / "pack").glob("pack-*.pack")):
        for suffix in _SUFFIXES:
            piece = pack.with_suffix(suffix)
            if suffix != ".keep" and piece.exists():
                _add(piece, store / "pack" / piece.name, store, token)
    for directory in objects.iterdir():
        if len(directory.name) == 2 and directory.is_dir():
            target = store / directory.name
            target.mkdir(exist_ok=True)
            for piece in directory.iterdir():
                _add(piece, target / piece.name, store, token)


def _add(piece: Path, target: Path, store: Path, token: str) -> None:
    if target.exists():
        return
    with piece.open("rb") as file:
        os.fdatasync(file.fileno())
    try:
        target.hardlink_to(piece)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        temporary = store / f"tmp_bonobofs_{token}_{piece.name}"
        shutil.copyfile(piece, temporary)
        with temporary.open("rb") as file:
            os.fchmod(file.fileno(), 0o444)
            os.fdatasync(file.fileno())
        temporary.rename(target)
