"""What a directory tree holds, and whether a record explains how it came to differ."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.audit.entry import LAYER, AuditEntry
from bonobofs.policy.request import Operation


class Entry(NamedTuple):
    """The attributes that stay the same without a change."""

    kind: str
    mode: int
    owner: tuple[int, int]
    content: str
    """Hash of a file's bytes, text of a symlink, number of a device."""
    xattrs: tuple[tuple[str, bytes], ...]
    modified: int
    """Of a directory 0: its time tells only of names, which are compared themselves."""


Tree = dict[str, Entry]
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def snapshot(root: Path, *, without: Collection[str] = ()) -> Tree:
    """All that lies in `root`, by path from there; a path in `without` is left out with all below.

    It goes by descriptors: a path may be longer than one system call takes.
    """
    found: Tree = {}
    waiting = [("", os.open(root, _DIRECTORY))]
    found[""] = _entry(f"/proc/self/fd/{waiting[0][1]}/.", os.fstat(waiting[0][1]))
    while waiting:
        above, fd = waiting.pop()
        for name in os.listdir(fd):
            path = f"{above}/{name}" if above else name
            if path not in without:
                st = os.stat(name, dir_fd=fd, follow_symlinks=False)
                found[path] = _entry(f"/proc/self/fd/{fd}/{name}", st)
                if stat.S_ISDIR(st.st_mode):
                    waiting.append((path, os.open(name, _DIRECTORY, dir_fd=fd)))
        os.close(fd)
    return found


def _entry(path: str, st: os.stat_result) -> Entry:
    content = ""
    if stat.S_ISREG(st.st_mode):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            content = sha256(os.pread(fd, st.st_size, 0)).hexdigest() if st.st_size else "empty"
        finally:
            os.close(fd)
    elif stat.S_ISLNK(st.st_mode):
        content = os.readlink(path)
    elif stat.S_ISCHR(st.st_mode) or stat.S_ISBLK(st.st_mode):
        content = str(st.st_rdev)
    names = os.listxattr(path, follow_symlinks=False)
    xattrs = tuple(sorted((name, os.getxattr(path, name, follow_symlinks=False)) for name in names))
    modified = 0 if stat.S_ISDIR(st.st_mode) else st.st_mtime_ns
    kind, mode = stat.filemode(st.st_mode)[0], stat.S_IMODE(st.st_mode)
    return Entry(kind, mode, (st.st_uid, st.st_gid), content, xattrs, modified)


def differences(before: Tree, after: Tree) -> dict[str, tuple[Entry | None, Entry | None]]:
    """What is not as it was, by path."""
    return {
        path: (before.get(path), after.get(path))
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    }


_CONTENT: Final = frozenset(
    {Operation.WRITE_FILE, Operation.CREATE_FILE, Operation.TRUNCATE, Operation.ALLOCATE, Operation.COPY_RANGE}
)
_MODE: Final = frozenset({Operation.SET_MODE, Operation.SET_OWNER, Operation.SET_XATTR, Operation.REMOVE_XATTR})
_XATTRS: Final = frozenset({Operation.SET_XATTR, Operation.REMOVE_XATTR, Operation.SET_MODE})
_NEW: Final = frozenset({Operation.CREATE_FILE, Operation.MKNOD, Operation.MKDIR, Operation.SYMLINK})


class _Thing:
    """Something in a tree while its record is played: how it was at first, and what was done to it since."""

    def __init__(self, first: Entry | None) -> None:
        self.first = first
        self.done: set[str] = set()


def unexplained(before: Tree, after: Tree, entries: Iterable[AuditEntry]) -> list[str]:
    """What the record does not explain of how `before` became `after`, in words; [] where it explains all.

    Changes are made one after another, each between its intent and the next entry. So all intents are played but those
    whose outcome is an error; and the last one, where it has no outcome, may have been made or not.
    """
    record = list(entries)
    failed = {entry.details.get("intent") for entry in record if entry.kind == "outcome" and entry.result == "error"}
    intents = [
        entry for entry in record if entry.kind == "intent" and entry.result == "allowed" and entry.seq not in failed
    ]
    if intents and "by" in intents[-1].details:
        # Linked to a name beside, and not yet renamed from there.
        beside = f"{intents[-1].path.rpartition('/')[0]}/{intents[-1].details['by']}".removeprefix("/")
        after = {path: entry for path, entry in after.items() if path != beside}
    with_last = _compare(_played(before, intents), after)
    if not with_last or not intents:
        return with_last
    without_last = _compare(_played(before, intents[:-1]), after)
    return min(with_last, without_last, key=len)


def _played(before: Tree, intents: list[AuditEntry]) -> dict[str, _Thing]:
    things = {path: _Thing(entry) for path, entry in before.items()}
    for intent in intents:
        path, operation = intent.path, intent.operation
        if LAYER in intent.details:
            continue
        if operation in _NEW or (operation == Operation.RENAME and "from" in intent.details):
            things[path] = _Thing(None)
        elif operation == Operation.LINK:
            things[path] = things.get(intent.details["from"], _Thing(None))
        elif intent.action == "delete":
            things.pop(path, None)
        elif operation == Operation.RENAME:
            _move(things, path, intent.details["to"], exchange=bool(intent.details.get("exchange")))
        elif path in things:
            things[path].done.add(operation)
    return things


def _move(things: dict[str, _Thing], old: str, new: str, *, exchange: bool) -> None:
    moved, replaced = _cut(things, old), _cut(things, new)
    things.update({new + rest: thing for rest, thing in moved.items()})
    if exchange:
        things.update({old + rest: thing for rest, thing in replaced.items()})


def _cut(things: dict[str, _Thing], top: str) -> dict[str, _Thing]:
    found = {path: thing for path, thing in things.items() if path == top or path.startswith(f"{top}/")}
    for path in found:
        del things[path]
    return {path[len(top) :]: thing for path, thing in found.items()}


def _compare(things: dict[str, _Thing], after: Tree) -> list[str]:
    wrong = [f"{path} is gone" for path in things.keys() - after.keys()]
    wrong += [f"{path} is there" for path in after.keys() - things.keys()]
    for path in things.keys() & after.keys():
        wrong += _changed(path, things[path], after[path])
    return sorted(wrong)


def _changed(path: str, thing: _Thing, now: Entry) -> Iterator[str]:
    first, done = thing.first, thing.done
    if first is None:
        return
    if first.kind != now.kind:
        yield f"{path} is of another kind"
    if first.content != now.content and not done & _CONTENT:
        yield f"{path} holds something else"
    if first.modified != now.modified and not done & (_CONTENT | {Operation.SET_TIMES}):
        yield f"{path} has another time"
    if (first.mode, first.owner) != (now.mode, now.owner) and not done & (_MODE | _CONTENT):
        yield f"{path} has another mode or owner"
    if first.xattrs != now.xattrs and not done & _XATTRS:
        yield f"{path} has other attributes"
