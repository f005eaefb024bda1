"""What is put aside: a commit of the index and one of the working tree, as git has them, listed by a reflog."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bonobofs.errors import GitError
from bonobofs.guards.git import rules
from bonobofs.guards.git.commit import write_commit
from bonobofs.guards.git.index import Entry, Index
from bonobofs.guards.git.journal import Change, Step
from bonobofs.guards.git.judging import named, unfit
from bonobofs.guards.git.refs import ZERO, Move, Value
from bonobofs.guards.git.repository import Blob, Difference
from bonobofs.guards.git.switching import overwrite, staged_as, untouched
from bonobofs.guards.git.threeway import merge_trees
from bonobofs.guards.git.work import Work

STASH: Final = "refs/stash"


class _Aside:
    """One entry: what was staged, what the files were, and those that were not tracked."""

    def __init__(self, work: Work, oid: str) -> None:
        commit = work.repository.commit(oid)
        self.oid: Final = oid
        parents = commit.parents
        if not 2 <= len(parents) <= 3:
            raise GitError(f"{oid} is no stash", kind="not-found")
        self.base: Final = work.repository.tree_of(parents[0])
        self.index: Final = work.repository.tree_of(parents[1])
        self.files: Final = work.repository.tree_of(oid)
        self.untracked: Final = work.repository.tree_of(parents[2]) if len(parents) == 3 else None


def push(
    work: Work,
    message: str | None,
    untracked: Sequence[bytes],
    paths: Sequence[bytes] | None,
    *,
    keep_index: bool,
) -> str:
    """Put aside what is not committed, or what of it is among `paths`, and bring the files back to HEAD."""
    index = work.index()
    work.demand_settled()
    head = work.head()
    if head.oid is None:
        raise GitError("you do not have the initial commit yet", kind="nothing")
    repository = work.repository
    if message is not None and not rules.is_text(message):
        raise GitError("a message is text", kind="usage")
    base = repository.tree_of(head.oid)
    chosen = None if paths is None else set(paths)
    extra = _untracked(work, untracked)
    staged_tree, files_tree = _trees(work, index, base, chosen)
    changed = [each.path for tree in (staged_tree, files_tree) for each in repository.differences(base, tree)]
    if not extra and not any(chosen is None or path in chosen for path in changed):
        raise GitError("no local changes to save", kind="nothing")
    subject = repository.commit(head.oid).message.split("\n", 1)[0]
    where = f"{head.branch or '(no branch)'}: {head.oid[:7]} {subject}"
    says = f"On {head.branch or '(no branch)'}: {message}" if message else f"WIP on {where}"
    back = staged_tree if keep_index else base or b""
    steps, kept = _back(work, index, back, chosen, extra)
    old = work.transaction.lock(STASH)

    def make() -> tuple[Change, dict[str, str]]:
        parents = [head.oid or "", write_commit(work, staged_tree, [head.oid or ""], f"index on {where}\n")]
        if extra:
            tree = repository.edited(None, dict(extra))
            parents.append(write_commit(work, tree, [], f"untracked files on {where}\n"))
        made = write_commit(work, files_tree, parents, says)
        move = Move(STASH, old, Value(made), says, ZERO if old is None else old.oid or ZERO, made)
        return Change(steps, kept, (move,)), {"hash": made}

    differences = [Difference(*step) for step in steps]
    return str(work.do(make, differences, base, details={"message": says})["hash"])


def _trees(work: Work, index: Index, base: bytes | None, chosen: set[bytes] | None) -> tuple[bytes, bytes]:
    """What is staged, and that with the tracked files as they are, of which `chosen` leaves out the others."""
    edits = {
        entry.path: work.tree.blob_of(entry.path, entry)
        for entry in work.changed_files(index)
        if chosen is None or entry.path in chosen
    }
    staged = index.write_tree(work.repository.write_tree)
    # What is tracked no more may be there still; HEAD's will be put in its place.
    for path, _, new in work.repository.differences(base, staged):
        if new is None and (chosen is None or path in chosen):
            edits[path] = work.tree.blob_of(path)
    return staged, work.repository.edited(staged, edits)


def _untracked(work: Work, paths: Sequence[bytes]) -> dict[bytes, Blob]:
    found = {path: work.tree.blob_of(path) for path in paths if not unfit(path)}
    return {path: blob for path, blob in found.items() if blob is not None}


def _back(
    work: Work, index: Index, tree: bytes, chosen: set[bytes] | None, extra: dict[bytes, Blob]
) -> tuple[tuple[Step, ...], dict[bytes, Entry | None]]:
    steps, staged = overwrite(work, index, tree)
    if chosen is not None:
        steps = tuple(step for step in steps if step.path in chosen)
        staged = {path: entry for path, entry in staged.items() if path in chosen}
    gone = {step.path for step in steps}
    return (*steps, *(Step(path, blob, None) for path, blob in extra.items() if path not in gone)), staged


def apply(work: Work, number: int, *, drop: bool, restore_index: bool) -> None:
    """Bring what was put aside back. GitError: it conflicts with what is there, and nothing was changed."""
    index = work.index()
    entries = listing(work)
    aside = _Aside(work, _chosen(entries, number))
    repository = work.repository
    now_staged = index.write_tree(repository.write_tree)
    result = _merged(work, aside, now_staged)
    differences = list(repository.differences(now_staged, result))
    untracked = [
        Difference(path, None, blob)
        for path, blob in (repository.walk(aside.untracked) if aside.untracked is not None else ())
    ]
    wanted = untouched(work, index, [*differences, *untracked])
    steps = work.files(wanted, index)
    # What was new comes back staged, as git has it; the rest shows as changes that are not staged.
    tracked = {each.path: each for each in differences}
    staged = work.staged([each for each in tracked.values() if each.old is None], index)
    if restore_index and aside.index != aside.base:
        staged = staged_as(work, index, _index_back(work, aside, now_staged))
    moves, logs = _dropped(work, entries, number) if drop else ((), ())
    change = Change(steps, staged, moves, logs)
    details = {"stash": number, "hash": aside.oid, "dropped": drop}
    work.do(lambda: (change, {}), wanted, now_staged, details=details)


def _merged(work: Work, aside: _Aside, ours: bytes) -> bytes:
    merged = merge_trees(work.repository, aside.base, ours, aside.files)
    if merged.conflicts:
        paths = sorted(named(path) for path in merged.conflicts)
        raise GitError("the stash conflicts with what is there", kind="conflict", paths=paths)
    return merged.tree


def _index_back(work: Work, aside: _Aside, ours: bytes) -> bytes:
    merged = merge_trees(work.repository, aside.base, ours, aside.index)
    if merged.conflicts:
        paths = sorted(named(path) for path in merged.conflicts)
        raise GitError("conflicts in index; try without --index", kind="conflict", paths=paths)
    return merged.tree


def listing(work: Work) -> list[str]:
    """The commits that are put aside, the youngest first; the stash is locked."""
    work.transaction.lock(STASH)
    return [line.split(" ", 2)[1] for line in reversed(work.repository.refs.read_log(STASH))]


def _chosen(entries: Sequence[str], number: int) -> str:
    if not 0 <= number < len(entries):
        what = "no stash entries found" if not entries else f"stash@{{{number}}} is not a valid reference"
        raise GitError(what, kind="not-found")
    return entries[number]


def drop(work: Work, number: int) -> str:
    """Forget one entry, and give its commit."""
    entries = listing(work)
    oid = _chosen(entries, number)
    moves, logs = _dropped(work, entries, number)
    work.do(lambda: (Change(moves=moves, logs=logs), {}), action="delete", details={"dropped": number, "hash": oid})
    return oid


def clear(work: Work) -> None:
    """Forget all entries."""
    entries = listing(work)
    old = work.transaction.lock(STASH)
    if old is None:
        return
    change = Change(moves=(Move(STASH, old, None),))
    work.do(lambda: (change, {}), action="delete", details={"cleared": True, "hashes": entries[:1000]})


def _dropped(work: Work, entries: Sequence[str], number: int) -> tuple[tuple[Move, ...], tuple[tuple[str, str], ...]]:
    """The stash without one entry: each line of its reflog begins where the one before ends."""
    old = work.transaction.lock(STASH)
    if len(entries) == 1:
        return (Move(STASH, old, None),), ()
    lines = list(reversed(work.repository.refs.read_log(STASH)))
    del lines[number]
    lines.reverse()
    before, text = ZERO, ""
    for line in lines:
        _, after, rest = line.split(" ", 2)
        text += f"{before} {after} {rest}"
        before = after
    return (Move(STASH, old, Value(before)),), ((STASH, text),)
