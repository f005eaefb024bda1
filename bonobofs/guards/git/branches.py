"""Branches and tags: made, renamed, removed."""

from __future__ import annotations

from typing import Any

from pygit2.enums import ObjectType

from bonobofs.errors import GitError
from bonobofs.guards.git import rules
from bonobofs.guards.git.identity import author
from bonobofs.guards.git.journal import Change
from bonobofs.guards.git.refs import HEADS, TAGS, ZERO, Move, Value, is_name, now
from bonobofs.guards.git.signing import Signer
from bonobofs.guards.git.work import Work


def create_branch(work: Work, name: str, base: str) -> str:
    """Make a branch at `base`, and give the commit that it is at."""
    work.demand(rules.new_branch(work.rules, name), branch=name, base=base)
    oid = start_of(work, base)
    if work.branch(name) is not None:
        raise GitError(f"a branch named {name!a} already exists", kind="exists")
    move = Move(HEADS + name, None, Value(oid), f"branch: Created from {base}", ZERO, oid)
    _do(work, (move,), action="create", branch=name, base=base, hash=oid)
    return oid


def start_of(work: Work, base: str) -> str:
    """The commit that a name stands for."""
    if base != "HEAD" and not is_name(base):
        raise GitError(f"{base!a} is no valid name of a commit", kind="name")
    return work.repository.find_commit(base)


def delete_branch(work: Work, name: str, *, force: bool) -> str:
    """Remove a branch whose commits others have too, or any with `force`; gives the commit that it was at."""
    work.demand(rules.new_branch(work.rules, name), branch=name)
    oid = _existing(work, name)
    _not_checked_out(work, name)
    if not force:
        _, head = work.repository.refs.head()
        if head is None or not work.repository.is_ancestor(oid, head):
            raise GitError(f"the branch {name!a} is not fully merged", kind="not-merged")
    _do(work, (Move(HEADS + name, Value(oid), None),), action="delete", branch=name, hash=oid)
    return oid


def rename_branch(work: Work, old: str, new: str, *, force: bool) -> None:
    """Give a branch another name; HEAD follows where it is on it. With `force`, over another branch."""
    for name in (old, new):
        work.demand(rules.new_branch(work.rules, name), branch=old, new=new)
    if old == new:
        return
    head = work.head()
    oid = _existing(work, old)
    there = work.branch(new)
    if there is not None and not force:
        raise GitError(f"a branch named {new!a} already exists", kind="exists")
    for name in {old, new} - {head.branch}:
        _not_checked_out(work, name)
    if head.branch == new:
        raise GitError(f"the branch {new!a} is checked out", kind="checked-out")
    log = f"Branch: renamed {HEADS}{old} to {HEADS}{new}"
    moves = [Move(HEADS + new, None if there is None else Value(there), Value(oid), log, there or ZERO, oid)]
    if head.branch == old:
        on_old, on_new = Value(None, HEADS + old), Value(None, HEADS + new)
        moves.append(Move("HEAD", on_old, on_new, log, oid, oid))
    moves.append(Move(HEADS + old, Value(oid), None))
    _do(work, tuple(moves), action="modify", branch=old, new=new, hash=oid)


def _existing(work: Work, name: str) -> str:
    if not is_name(HEADS + name) or work.repository.refs.read(HEADS + name) is None:
        raise GitError(f"branch {name!a} not found", kind="not-found")
    oid = work.branch(name)
    if oid is None:
        raise GitError(f"branch {name!a} not found", kind="not-found")
    return oid


def _not_checked_out(work: Work, name: str) -> None:
    if work.repository.refs.head()[0] == name or name in work.repository.elsewhere():
        raise GitError(f"the branch {name!a} is checked out", kind="checked-out")


def tag(work: Work, name: str, target: str, message: str | None, *, force: bool) -> str:
    """Make a tag, with a message one that is an object of its own; gives what the tag holds."""
    if not is_name(TAGS + name) or name.startswith("-") or name == "HEAD":
        raise GitError(f"{name!a} is not a valid tag name", kind="name")
    oid = start_of(work, target)
    old = work.transaction.lock(TAGS + name)
    if old is not None and not force:
        raise GitError(f"tag {name!a} already exists", kind="exists")
    if message is not None:
        text = rules.tidy(message)
        if not text or not rules.is_text(text):
            raise GitError("a tag's message is text, and says something", kind="usage")
        content = _tag_object(work, name, oid, text)
        oid = work.repository.write(ObjectType.TAG, content).hex()
    _do(work, (Move(TAGS + name, old, Value(oid)),), action="create", tag=name, target=target, hash=oid)
    return oid


def _tag_object(work: Work, name: str, oid: str, text: str) -> bytes:
    who = now(author(work.door.agent, work.rules))
    content = f"object {oid}\ntype commit\ntag {name}\ntagger {who}\n\n{text}".encode("utf-8", "surrogateescape")
    # A tag is signed at its end, and only where the policy asks for it: git signs tags when it is told to.
    return content + Signer(work.rules.sign or "off").signature(content)


def delete_tag(work: Work, name: str) -> str:
    """Remove a tag, and give what it held."""
    old = work.transaction.lock(TAGS + name) if is_name(TAGS + name) else None
    if old is None or old.oid is None:
        raise GitError(f"tag {name!a} not found", kind="not-found")
    _do(work, (Move(TAGS + name, old, None),), action="delete", tag=name, hash=old.oid)
    return old.oid


def _do(work: Work, moves: tuple[Move, ...], *, action: str, **details: Any) -> None:
    work.do(lambda: (Change(moves=moves), {}), action=action, details=details)
