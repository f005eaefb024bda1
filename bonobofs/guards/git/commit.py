"""Commits: what is staged, or the files that are named, on the branch that HEAD is on."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pygit2.enums import ObjectType

from bonobofs.errors import GitError
from bonobofs.guard import Part
from bonobofs.guards.git import rules
from bonobofs.guards.git.identity import COMMITTER, author
from bonobofs.guards.git.index import Entry, Index
from bonobofs.guards.git.journal import Change
from bonobofs.guards.git.judging import is_evil_link, named, unfit
from bonobofs.guards.git.modes import SUBMODULE, SYMLINK
from bonobofs.guards.git.refs import now
from bonobofs.guards.git.repository import Blob
from bonobofs.guards.git.signing import Signer
from bonobofs.guards.git.work import Work, listed
from bonobofs.request import Facts, Operation, Request


class Committed(NamedTuple):
    """A commit that was made."""

    hash: str
    message: str
    branch: str
    """The branch that it is on; "" where HEAD is detached."""
    parents: tuple[str, ...]
    files: tuple[str, ...]
    """What it has otherwise than its first parent."""


class Wanted(NamedTuple):
    """What is to be committed."""

    message: str | None
    """None: that of the commit that is amended."""
    files: Sequence[bytes] | None = None
    """None: what is staged."""
    only: bool = False
    """These files alone, and whatever else is staged stays so; else they are staged in addition."""
    amend: bool = False
    allow_empty: bool = False


def commit(work: Work, wanted: Wanted, issue: str | None) -> Committed:
    """Make a commit. Refused; GitError: nothing was changed."""
    index = work.index()
    work.demand_settled()
    head = work.head()
    work.demand(rules.moved_branch(work.rules, head.branch) if head.branch else None, branch=head.branch)
    repository = work.repository
    old = repository.commit(head.oid) if wanted.amend and head.oid is not None else None
    if wanted.amend and old is None:
        raise GitError("there is no commit to amend", kind="nothing")
    text = wanted.message if wanted.message is not None or old is None else old.message
    message = _message(work, text or "", issue, wanted.files or ())
    parents = old.parents if old is not None else [head.oid] if head.oid is not None else []
    before = repository.tree_of(parents[0] if parents else None)
    base = repository.tree_of(head.oid)

    edits = read_files(work, wanted.files or (), index, base)
    if wanted.only and wanted.files is not None:
        tree = repository.edited(base, {path: entry and Blob(entry.mode, entry.oid) for path, entry in edits.items()})
        index.update(edits)
    else:
        index.update(edits)
        tree = index.write_tree(repository.write_tree)
    differences = list(repository.differences(before, tree))
    empty = next(repository.differences(base, tree), None) is None
    if empty and not (wanted.allow_empty or wanted.amend):
        raise GitError("there is nothing to commit", kind="nothing")
    details: dict[str, Any] = {"branch": head.branch, "message": message, **({"issue": issue} if issue else {})}

    def make() -> tuple[Change, dict[str, Any]]:
        made = write_commit(work, tree, parents, message, kept=_kept(work, old.get("author", "")) if old else None)
        what = "commit (amend)" if wanted.amend else "commit" if parents else "commit (initial)"
        log = f"{what}: {message.splitlines()[0]}"
        return Change(staged=edits, moves=work.moves(head, made, log)), {"hash": made}

    # Of an amended commit its own parent is what it differs from; what is judged is all that it brings.
    made = work.do(make, differences, before, details=details)
    files = tuple(named(each.path) for each in differences)
    return Committed(made["hash"], message, head.branch, tuple(parents), files)


def _message(work: Work, text: str, issue: str | None, files: Sequence[bytes]) -> str:
    message = rules.message(work.rules, text, issue)
    if isinstance(message, str):
        return message
    work.demand(message, **{"message": text, **listed("files", files)})
    raise AssertionError(message)


def _kept(work: Work, written_by: str) -> str | None:
    """The author and time of an amended commit, if they are this agent's: nobody speaks in another's name."""
    return written_by if written_by.rpartition(">")[0] + ">" == author(work.door.agent, work.rules) else None


def write_commit(work: Work, tree: bytes, parents: Iterable[str], message: str, *, kept: str | None = None) -> str:
    """Keep a commit object, signed where that is asked for; `kept` is the author of the one that it replaces."""
    moment = now("").strip()
    lines = [f"tree {tree.hex()}", *(f"parent {parent}" for parent in parents)]
    lines += [f"author {kept or f'{author(work.door.agent, work.rules)} {moment}'}", f"committer {COMMITTER} {moment}"]
    head, body = "\n".join(lines).encode("utf-8", "surrogateescape"), message.encode("utf-8", "surrogateescape")
    signature = Signer(work.rules.sign).signature(head + b"\n\n" + body)
    if signature:
        head += b"\ngpgsig " + signature.strip().replace(b"\n", b"\n ")
    return work.repository.write(ObjectType.COMMIT, head + b"\n\n" + body).hex()


def read_files(
    work: Work, files: Sequence[bytes], index: Index, base: bytes | None, *, update_only: bool = False
) -> dict[bytes, Entry | None]:
    """The files as they are now, each as what is staged of it; one that is gone is staged as deleted.

    Each is judged by its size and kind before it is read. GitError: one is neither there nor tracked, or a directory.
    """
    edits: dict[bytes, Entry | None] = {}
    work.demand_paths(files)
    for path in files:
        known = index.entries.get(path)
        if unfit(path):
            work.demand(rules.NOT_OURS, named(path))
        if in_submodule(index, path):
            work.demand(rules.SUBMODULE, named(path))
        _demand_before_reading(work, path, known)
        try:
            found = work.tree.read(path, known)
        except GitError as error:
            if error.kind != "filter":
                raise
            work.demand(rules.FILTER, named(path))
            raise
        if found is None:
            tracked = known is not None or work.repository.lookup(base, path) is not None
            status = work.tree.look(path)
            if not tracked or (status is not None and update_only):
                raise GitError(f"{named(path)!a} did not match any file", kind="pathspec", paths=(named(path),))
            edits[path] = None
            continue
        if is_evil_link(path, found.mode):
            work.demand(rules.NOT_OURS, named(path))
        blob = work.repository.write_blob(found.content)
        entry = Entry(path, found.mode, blob, found.stat)
        edits[path] = entry if known is None else entry._replace(assume_valid=known.assume_valid)
    return edits


def in_submodule(index: Index, path: bytes) -> bool:
    """Whether a path is a submodule's, or lies in one."""
    names = path.split(b"/")
    found = (index.entries.get(b"/".join(names[:depth])) for depth in range(1, len(names) + 1))
    return any(entry is not None and entry.mode == SUBMODULE for entry in found)


def _demand_before_reading(work: Work, path: bytes, known: Entry | None) -> None:
    """Refused where a file is too large to be committed, so that it is not read first."""
    status = work.tree.look(path)
    operation, facts = Operation.WRITE_FILE, Facts(in_source=True)
    if status is None:
        operation, facts = Operation.DELETE_FILE, Facts(leaves=True, in_source=True)
    elif stat.S_ISLNK(status.st_mode):
        return
    elif stat.S_ISREG(status.st_mode):
        before = 0 if known is None or known.mode == SYMLINK else known.stat[8]
        facts = facts._replace(size=status.st_size, size_before=before)
    work.demand_leave(Part(Request(operation, named(path)), facts))
