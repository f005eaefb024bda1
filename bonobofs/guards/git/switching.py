"""HEAD and the working tree brought to another commit: switch and reset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from bonobofs.errors import GitError
from bonobofs.guards.git import rules
from bonobofs.guards.git.branches import start_of
from bonobofs.guards.git.index import Entry, Index
from bonobofs.guards.git.journal import Change, Step
from bonobofs.guards.git.judging import named
from bonobofs.guards.git.modes import SUBMODULE
from bonobofs.guards.git.refs import HEADS, ZERO, Move, Value, is_name
from bonobofs.guards.git.repository import Blob, Difference
from bonobofs.guards.git.work import UNDER_WAY, Head, Work, entry_of

_GIVEN_UP: Final = ("MERGE_MSG", "MERGE_MODE", "SQUASH_MSG", "AUTO_MERGE")
"""What git keeps for the commit that a reset gives up; the next one would begin with its message."""


class Switched(NamedTuple):
    """Where HEAD is now, and where it was."""

    branch: str
    """"" where HEAD is detached."""
    hash: str | None
    previous: str
    """The branch that HEAD was on; "" where it was detached."""


class To(NamedTuple):
    """Where HEAD is to go."""

    branch: str | None = None
    commit: str | None = None
    """A commit, at which HEAD is detached."""
    create: bool = False
    base: str | None = None
    """Where a branch that is created starts; None: HEAD."""
    force: bool = False
    """Changes that are not committed are thrown away."""
    clean: bool = False
    """Whatever is not committed refuses it, and not only what would be overwritten."""


def switch(work: Work, to: To) -> Switched:
    """Go to a branch or a commit, and bring the working tree along.

    What is not committed stays, as git has it: a path that differs between the two must not have been changed.
    """
    index = work.index()
    work.demand_settled()
    head = work.head()
    if to.create and to.branch is not None:
        work.demand(rules.new_branch(work.rules, to.branch), branch=to.branch)
        return _go(work, index, head, to, start_of(work, to.base or "HEAD") if head.oid or to.base else None)
    if to.branch is not None:
        if not is_name(HEADS + to.branch) or work.repository.refs.read(HEADS + to.branch) is None:
            raise GitError(f"there is no branch {to.branch!a}", kind="not-found", paths=(to.branch,))
        oid = head.oid if to.branch == head.branch else work.branch(to.branch)
        if to.branch in work.repository.elsewhere():
            raise GitError(f"{to.branch!a} is checked out in another worktree", kind="checked-out")
        return _go(work, index, head, to, oid)
    return _go(work, index, head, to, start_of(work, to.commit or "HEAD"))


def _go(work: Work, index: Index, head: Head, to: To, oid: str | None) -> Switched:
    repository = work.repository
    before, after = repository.tree_of(head.oid), repository.tree_of(oid)
    if to.clean and (paths := work.unclean(index, before)):
        raise GitError("the working tree has uncommitted changes", kind="dirty", paths=paths)
    differences = list(repository.differences(before, after))
    if to.force:
        files, staged = overwrite(work, index, after)
    else:
        wanted = untouched(work, index, differences)
        files, staged = work.files(wanted, index), work.staged(wanted, index)
    name = to.branch or ""
    moves: list[Move] = []
    if to.create:
        if work.branch(name) is not None:
            raise GitError(f"a branch named {name!a} already exists", kind="exists")
        if oid is not None:
            log = f"branch: Created from {to.base or 'HEAD'}"
            moves.append(Move(HEADS + name, None, Value(oid), log, ZERO, oid))
    was = Value(None, HEADS + head.branch) if head.branch else Value(head.oid)
    now_at = Value(None, HEADS + name) if name else Value(oid)
    log = f"checkout: moving from {head.branch or head.oid} to {name or to.commit or oid}"
    moves.append(Move("HEAD", was, now_at, log, head.oid or ZERO, oid or ZERO))
    details: dict[str, Any] = {"branch": name, "from": head.branch or head.oid, "hash": oid}
    work.do(lambda: (Change(files, staged, tuple(moves)), {}), differences, before, details=details)
    return Switched(name, oid, head.branch)


def untouched(work: Work, index: Index, differences: Sequence[Difference]) -> list[Difference]:
    """The differences that the index and the working tree do not have yet. GitError: local changes are in the way.

    A path may be followed when what is staged of it is what it was before, and its file is that too. Where both are
    what it is to be, nothing needs to be done.
    """
    work.demand_fit(differences)
    wanted: list[Difference] = []
    changed: list[bytes] = []
    untracked: list[bytes] = []
    for difference in differences:
        path, old, new = difference
        entry = index.entries.get(path)
        staged = None if entry is None else Blob(entry.mode, entry.oid)
        if staged == new and new is not None:
            continue
        if staged is None and new is None:
            continue  # it is staged as deleted; what may lie there now is untracked, and stays
        if staged != old:
            changed.append(path)
        elif entry is None:
            if _is_free(work, index, path):
                wanted.append(difference)
            else:
                untracked.append(path)
        elif (
            entry.skips_worktree
            or entry.mode == SUBMODULE
            or work.tree.look(path) is None
            or work.tree.is_unchanged(entry, work.transaction.index_time)
        ):
            wanted.append(difference)
        else:
            changed.append(path)
    if changed:
        raise GitError("local changes would be overwritten", kind="dirty", paths=[named(path) for path in changed])
    if untracked:
        raise GitError("untracked files would be overwritten", kind="untracked", paths=[*map(named, untracked)])
    return wanted


def _is_free(work: Work, index: Index, path: bytes) -> bool:
    """Whether nothing that is not tracked stands where a new path is to come."""
    status = work.tree.look(path)
    if status is None:
        # A file where a directory is needed: free if it is tracked, for then it goes.
        names = path.split(b"/")
        for depth in range(1, len(names)):
            above = b"/".join(names[:depth])
            found = work.tree.look(above)
            if found is None:
                return True
            if not work.tree.is_directory(above):
                return above in index.entries
        return True
    return work.tree.is_directory(path) and work.tree.holds_only(path, index.entries)


def overwrite(work: Work, index: Index, tree: bytes | None) -> tuple[tuple[Step, ...], dict[bytes, Entry | None]]:
    """All that makes index and tracked files what a tree has, whatever they are now. Untracked files stay."""
    wanted = dict(work.repository.walk(tree))
    staged: dict[bytes, Entry | None] = {}
    steps: list[Step] = []
    for path in sorted(wanted.keys() | index.entries.keys()):
        blob, entry = wanted.get(path), index.entries.get(path)
        if entry is None or blob != Blob(entry.mode, entry.oid):
            staged[path] = None if blob is None else entry_of(path, blob, entry)
        if (blob is not None and blob.mode == SUBMODULE) or (entry is not None and entry.skips_worktree):
            continue
        if entry is not None and entry.assume_valid and blob == Blob(entry.mode, entry.oid):
            continue  # whoever said so keeps what is there; it is looked at by nobody
        if blob is not None and entry is not None and blob == Blob(entry.mode, entry.oid):
            if work.tree.is_unchanged(entry, work.transaction.index_time):
                continue
            staged[path] = entry_of(path, blob, entry)
        found = work.tree.blob_of(path, entry)
        if found != blob:
            steps.append(Step(path, found, blob))
        elif blob is not None and entry is not None and blob == Blob(entry.mode, entry.oid):
            del staged[path]
    return tuple(steps), staged


def reset(work: Work, target: str, mode: str) -> str:
    """Bring the branch that HEAD is on to a commit: soft leaves index and files, mixed the files, hard nothing."""
    if mode not in ("soft", "mixed", "hard"):
        raise GitError(f"there is no reset --{mode} here", kind="usage")
    index = work.transaction.lock_index()
    head = work.head()
    oid = start_of(work, target)
    if head.branch and oid != head.oid:
        work.demand(rules.moved_branch(work.rules, head.branch), branch=head.branch)
    repository = work.repository
    before, after = repository.tree_of(head.oid), repository.tree_of(oid)
    steps: tuple[Step, ...] = ()
    staged: dict[bytes, Entry | None] = {}
    work.demand_fit(repository.differences(before, after))
    if mode == "hard":
        steps, staged = overwrite(work, index, after)
    elif mode == "mixed":
        staged = staged_as(work, index, after)
    differences = {each.path: each for each in repository.differences(before, after)}
    differences.update({step.path: Difference(*step) for step in steps})
    moves: list[Move] = []
    if head.oid is not None:
        moves.append(Move("ORIG_HEAD", work.transaction.lock("ORIG_HEAD"), Value(head.oid)))
    moves += work.moves(head, oid, f"reset: moving to {target}")
    if mode == "soft":
        work.demand_settled()
    for name in UNDER_WAY:
        if work.repository.refs.place(name).exists():
            moves.append(Move(name, work.transaction.lock(name), None))
    keep = {entry.path: None for entry in index.unmerged} if mode != "soft" else {}
    change = Change(steps, {**keep, **staged}, tuple(moves))
    details = {"branch": head.branch, "from": head.oid, "hash": oid, "mode": mode}
    work.do(lambda: (change, {}), list(differences.values()), before, details=details)
    for name in _GIVEN_UP:
        (repository.layout.git / name).unlink(missing_ok=True)
    return oid


def staged_as(work: Work, index: Index, tree: bytes | None) -> dict[bytes, Entry | None]:
    """All that makes the index what a tree has. What is known of files that stay as they were staged is kept."""
    wanted = dict(work.repository.walk(tree))
    staged: dict[bytes, Entry | None] = {}
    for path in wanted.keys() | index.entries.keys():
        blob, entry = wanted.get(path), index.entries.get(path)
        if blob is None:
            staged[path] = None
        elif entry is None or blob != Blob(entry.mode, entry.oid):
            staged[path] = entry_of(path, blob, entry)
    return staged
