"""Merges, made in memory: the files of a merge are written when it is known to have no conflict, and admitted."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from bonobofs.errors import GitError
from bonobofs.guards.git import rules
from bonobofs.guards.git.branches import start_of
from bonobofs.guards.git.commit import write_commit
from bonobofs.guards.git.journal import Change
from bonobofs.guards.git.judging import named
from bonobofs.guards.git.refs import HEADS, Move, Value, is_name
from bonobofs.guards.git.repository import Difference
from bonobofs.guards.git.switching import untouched
from bonobofs.guards.git.threeway import merge_commits
from bonobofs.guards.git.work import Head, Work

STRATEGIES: Final = ("merge", "squash")


class Merged(NamedTuple):
    """What came of a merge. Where there are conflicts, nothing was changed."""

    hash: str | None
    fast_forward: bool = False
    up_to_date: bool = False
    conflicts: tuple[str, ...] = ()
    message: str = ""
    files: tuple[str, ...] = ()


class Wish(NamedTuple):
    """What is to be merged, and how."""

    source: str
    target: str | None = None
    """A branch; None: where HEAD is."""
    strategy: str = "merge"
    message: str | None = None
    fast_forward: str = "auto"
    """auto, only, or no."""
    commit: bool = True
    """False: the result of a squash is staged, and not committed."""


def merge(work: Work, wish: Wish, issue: str | None) -> Merged:
    """Merge a branch into another. Into the one that HEAD is on, the working tree is clean, and follows."""
    if wish.strategy not in STRATEGIES:
        work.demand(rules.STRATEGY, strategy=wish.strategy)
    work.demand_settled()
    head = work.head()
    into, ours = _target(work, wish, head)
    theirs = start_of(work, wish.source)
    details: dict[str, Any] = {"source": wish.source, "target": into, "strategy": wish.strategy}
    repository = work.repository
    if ours is not None and repository.is_ancestor(theirs, ours):
        work.note({**details, "up_to_date": True})
        return Merged(ours, up_to_date=True)
    forward = ours is None or repository.is_ancestor(ours, theirs)
    if wish.fast_forward == "only" and not forward:
        raise GitError("not possible to fast-forward", kind="not-fast-forward")
    squash = wish.strategy == "squash"
    tree, conflicts = (repository.tree_of(theirs), ()) if forward else _merged(work, ours or "", theirs)
    if tree is None:
        work.note({**details, "conflicts": list(conflicts)})
        return Merged(None, conflicts=conflicts)
    before = repository.tree_of(ours)
    differences = list(repository.differences(before, tree))
    message = _message(work, wish, into, issue)
    plain = forward and not squash and wish.fast_forward != "no"
    change = _followed(work, head, into, differences)

    def make() -> tuple[Change, dict[str, Any]]:
        if squash and not wish.commit:
            return change, {}
        parents = [each for each in (ours, None if squash else theirs) if each is not None]
        made = theirs if plain else write_commit(work, tree, parents, message)
        how = "Fast-forward" if plain else "Squash" if squash else "Merge made by the 'ort' strategy."
        log = f"merge {wish.source}: {how}"
        moves = _moves(work, head, into, ours, made, log)
        return change._replace(moves=moves), {"hash": made}

    made = work.do(make, differences, before, details={**details, "message": "" if plain else message})
    files = tuple(named(each.path) for each in differences)
    return Merged(made.get("hash"), plain, message="" if plain else message, files=files)


def _target(work: Work, wish: Wish, head: Head) -> tuple[str, str | None]:
    """The branch that is merged into, "" for a detached HEAD, and its commit."""
    into = head.branch if wish.target is None else wish.target
    if into:
        work.demand(rules.moved_branch(work.rules, into), source=wish.source, target=into)
    if into == head.branch:
        return into, head.oid
    is_there = is_name(HEADS + into) and work.repository.refs.read(HEADS + into) is not None
    ours = work.branch(into) if is_there else None
    if ours is None:
        raise GitError(f"there is no branch {into!a}", kind="not-found", paths=(into,))
    if into in work.repository.elsewhere():
        raise GitError(f"{into!a} is checked out in another worktree", kind="checked-out")
    return into, ours


def _merged(work: Work, ours: str, theirs: str) -> tuple[bytes | None, tuple[str, ...]]:
    """The tree of a merge; None, and the paths in conflict."""
    merged = merge_commits(work.repository, ours, theirs)
    if merged is None:
        raise GitError("refusing to merge unrelated histories", kind="usage")
    if merged.conflicts:
        return None, tuple(sorted(named(path) for path in merged.conflicts))
    return merged.tree, ()


def _message(work: Work, wish: Wish, into: str, issue: str | None) -> str:
    if wish.message is not None:
        message = rules.message(work.rules, wish.message, issue)
        if isinstance(message, str):
            return message
        work.demand(message, source=wish.source, target=into, message=wish.message)
    name = wish.source.removeprefix(HEADS)
    what = "commit" if name == wish.source and len(name) == 40 else "branch"
    squashed = "Squash" if wish.strategy == "squash" else "Merge"
    text = f"{squashed} {what} '{name}'" + (f" into {into}" if into else "")
    prefixed = rules.message(work.rules, text, issue)
    return prefixed if isinstance(prefixed, str) else f"{text}\n"


def _followed(work: Work, head: Head, into: str, differences: list[Difference]) -> Change:
    """What the working tree must follow; nothing, where another branch is merged into."""
    if into != head.branch:
        return Change()
    index = work.index()
    if paths := work.unclean(index, work.repository.tree_of(head.oid)):
        raise GitError("the working tree has uncommitted changes", kind="dirty", paths=paths)
    wanted = untouched(work, index, differences)
    return Change(work.files(wanted, index), work.staged(wanted, index))


def _moves(work: Work, head: Head, into: str, ours: str | None, made: str, log: str) -> tuple[Move, ...]:
    if into != head.branch:
        before = None if ours is None else Value(ours)
        return (Move(HEADS + into, before, Value(made), log, ours or "0" * 40, made),)
    moves = work.moves(head, made, log)
    if ours is None:
        return moves
    return (Move("ORIG_HEAD", work.transaction.lock("ORIG_HEAD"), Value(ours)), *moves)
