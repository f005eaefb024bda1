"""What is staged, and files that follow it: add, rm, mv, restore."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bonobofs.errors import GitError
from bonobofs.guards.git import rules
from bonobofs.guards.git.branches import start_of
from bonobofs.guards.git.commit import in_submodule, read_files
from bonobofs.guards.git.index import Entry, Index
from bonobofs.guards.git.journal import Change, Step
from bonobofs.guards.git.judging import named, unfit
from bonobofs.guards.git.modes import SUBMODULE
from bonobofs.guards.git.repository import Blob, Difference
from bonobofs.guards.git.work import Work, entry_of, listed


def add(work: Work, paths: Sequence[bytes], *, update_only: bool) -> None:
    """Stage files as they are now; one that is gone is staged as deleted. All or none."""
    index = work.transaction.lock_index()
    head = work.repository.tree_of(work.repository.refs.head()[1])
    if update_only:
        paths = [path for path in paths if path in index.entries]
    edits = read_files(work, paths, index, head)
    differences = [
        Difference(path, _blob(index.entries.get(path)), _blob(entry))
        for path, entry in edits.items()
        if _blob(index.entries.get(path)) != _blob(entry)
    ]
    work.do(lambda: (Change(staged=edits), {}), differences, head, details=listed("paths", [*paths]))


def remove(work: Work, paths: Sequence[bytes], *, cached: bool, force: bool) -> None:
    """Take paths out of the index, and their files away unless `cached`. Changes that would be lost refuse it."""
    index = work.index()
    head = work.repository.tree_of(work.repository.refs.head()[1])
    _demand_tracked(index, paths)
    lost: list[bytes] = []
    steps: list[Step] = []
    for path in paths:
        entry = index.entries[path]
        if entry.mode == SUBMODULE:
            work.demand(rules.SUBMODULE, named(path))
        staged, committed = _blob(entry), work.repository.lookup(head, path)
        there = work.tree.look(path) is not None and not work.tree.is_directory(path)
        changed = there and not work.tree.is_unchanged(entry, work.transaction.index_time)
        if not force and ((changed and staged != committed) if cached else (changed or staged != committed)):
            lost.append(path)
        elif not cached and there:
            steps.append(Step(path, work.tree.blob_of(path, entry), None))
    if lost:
        raise GitError("local changes would be lost", kind="dirty", paths=[named(path) for path in lost])
    change = Change(tuple(steps), dict.fromkeys(paths))
    differences = [Difference(path, _blob(index.entries[path]), None) for path in paths]
    work.do(lambda: (change, {}), differences, head, action="delete", details={"cached": cached})


def move(work: Work, pairs: Sequence[tuple[bytes, bytes]], *, force: bool) -> None:
    """Give files other names, in the index and in the working tree. A directory goes with all that is tracked in it."""
    index = work.index()
    head = work.repository.tree_of(work.repository.refs.head()[1])
    plain = [each for source, target in pairs for each in _files_of(work, index, source, target)]
    steps: list[Step] = []
    staged: dict[bytes, Entry | None] = {}
    differences: list[Difference] = []
    for source, target in plain:
        entry = index.entries[source]
        if unfit(target):
            work.demand(rules.NOT_OURS, named(target))
        if in_submodule(index, target):
            work.demand(rules.SUBMODULE, named(target))
        work.demand_paths([target])
        old = work.tree.blob_of(target, index.entries.get(target))
        if (old is not None or target in index.entries or work.tree.is_directory(target)) and not force:
            raise GitError(f"destination {named(target)!a} exists", kind="exists", paths=(named(target),))
        there = work.tree.blob_of(source, entry)
        if there is None:
            raise GitError(f"bad source {named(source)!a}", kind="pathspec", paths=(named(source),))
        steps += [Step(source, there, None), Step(target, old, there)]
        # What is staged stays as it was: `git mv` does not add what was changed meanwhile.
        staged[source] = None
        staged[target] = entry_of(target, Blob(entry.mode, entry.oid), None)
        differences += [Difference(source, there, None), Difference(target, old, there)]
    change = Change(tuple(steps), staged)
    details = {"pairs": [[named(source), named(target)] for source, target in plain[:1000]]}
    work.do(lambda: (change, {}), differences, head, details=details)


def _files_of(work: Work, index: Index, source: bytes, target: bytes) -> list[tuple[bytes, bytes]]:
    if source in index.entries:
        return [(source, target)]
    below = source.rstrip(b"/") + b"/"
    found = [path for path in index.entries if path.startswith(below)]
    if not found:
        kind = "not under version control" if work.tree.look(source) is not None else "bad source"
        raise GitError(f"{kind}: {named(source)!a}", kind="pathspec", paths=(named(source),))
    return [(path, target.rstrip(b"/") + b"/" + path[len(below) :]) for path in sorted(found)]


def restore(work: Work, paths: Sequence[bytes], source: str | None, *, staged: bool, worktree: bool) -> None:
    """Bring paths back to what a commit has (None: the index; for the index, HEAD). What that has not, is removed."""
    index = work.transaction.lock_index()
    head = work.repository.tree_of(work.repository.refs.head()[1])
    from_commit = source is not None or staged
    tree = work.repository.tree_of(start_of(work, source)) if source is not None else head
    wanted: dict[bytes, Blob | None] = {}
    unknown: list[str] = []
    for path in paths:
        entry = index.entries.get(path)
        wanted[path] = work.repository.lookup(tree, path) if from_commit else _blob(entry)
        unmerged = any(each.path == path for each in index.unmerged)
        if wanted[path] is None and entry is None and not unmerged:
            unknown.append(named(path))
    if unknown:
        raise GitError("no such path is known", kind="pathspec", paths=unknown)
    edits = _staged_as(index, wanted) if staged else {}
    steps: list[Step] = []
    # What is staged otherwise than HEAD has it is a step towards a commit, and judged like one.
    differences = {
        path: Difference(path, committed, wanted[path])
        for path in edits
        if wanted[path] != (committed := work.repository.lookup(head, path))
    }
    for path, blob in wanted.items() if worktree else ():
        there = work.tree.blob_of(path, index.entries.get(path))
        if there != blob:
            steps.append(Step(path, there, blob))
            differences[path] = Difference(path, there, blob)
            known = edits.get(path, index.entries.get(path))
            if known is not None and _blob(known) == blob:
                edits[path] = known
    details: dict[str, Any] = {"staged": staged, "worktree": worktree, **listed("paths", [*paths])}
    if source is not None:
        details["source"] = source
    work.do(lambda: (Change(tuple(steps), edits), {}), [*differences.values()], head, details=details)


def _staged_as(index: Index, wanted: dict[bytes, Blob | None]) -> dict[bytes, Entry | None]:
    found: dict[bytes, Entry | None] = {}
    for path, blob in wanted.items():
        entry = index.entries.get(path)
        if blob is None:
            found[path] = None
        elif _blob(entry) != blob:
            found[path] = entry_of(path, blob, entry)
    return found


def _demand_tracked(index: Index, paths: Sequence[bytes]) -> None:
    unknown = [named(path) for path in paths if path not in index.entries]
    if unknown:
        raise GitError("no such path is tracked", kind="pathspec", paths=unknown)


def _blob(entry: Entry | None) -> Blob | None:
    return None if entry is None else Blob(entry.mode, entry.oid)
