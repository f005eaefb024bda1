"""What an operation has locked and is about to do, so that a kill between any two steps is mended by the next one.

One file in the state directory for each operation that is under way, a line of JSON for each step:

    {"git": ..., "common": ..., "root": ..., "session": ..., "token": ...}
    {"lock": "/…/index.lock", "by": "/…/bonobofs-TOKEN-0"}      written before the lock is taken
    {"plan": {...}}                                             from here on it is done, and not undone

A lock is a link to the file `by`, so whose it is can be told as long as that file is there. Who holds the flock of the
repository is alone with it: what another process left is that of a dead one.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.guards.git.index import Entry
from bonobofs.guards.git.refs import Move, Value
from bonobofs.guards.git.repository import Blob, Layout

_SUFFIX: Final = ".journal"


class Step(NamedTuple):
    """A file of the working tree that is to change; None: nothing is there."""

    path: bytes
    old: Blob | None
    new: Blob | None


class Change(NamedTuple):
    """All that an operation does, but for the objects, which nothing points to before."""

    files: tuple[Step, ...] = ()
    staged: dict[bytes, Entry | None] = {}  # noqa: RUF012 - never changed
    """What is staged anew; None is staged no more."""
    moves: tuple[Move, ...] = ()
    logs: tuple[tuple[str, str], ...] = ()
    """Reflogs that get another content, such as that of the stash when one is dropped; "" removes it."""


class Left(NamedTuple):
    """What a dead process left."""

    journal: Path
    head: dict[str, Any]
    locks: list[tuple[Path, Path]]
    """Each lock, and the file that it is a link to."""
    plan: dict[str, Any] | None


class Journal:
    """The journal of one operation; the file is made with the first line."""

    def __init__(self, directory: Path, token: str, head: dict[str, Any]) -> None:
        self.path: Final = directory / (token + _SUFFIX)
        self._head: Final = {**head, "token": token}
        self._descriptor = -1

    def _line(self, content: dict[str, Any]) -> None:
        if self._descriptor < 0:
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o600)
            self._line(self._head)
        data = json.dumps(content).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]

    def lock(self, lock: Path, by: Path) -> None:
        self._line({"lock": str(lock), "by": str(by)})

    def plan(self, change: Change, who: str, about: dict[str, Any]) -> None:
        """`who` stands in reflogs, with its time: a line that is there is not written again."""
        self._line({"plan": {**_as_json(change), "who": who, "about": about}})

    def end(self) -> None:
        """Nothing is left to be mended."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self.path.unlink()


def left_of(directory: Path, layout: Layout) -> Iterator[Left]:
    """What operations on this worktree or on what it shares have left; the caller holds the repository's flock."""
    try:
        names = sorted(directory.iterdir())
    except FileNotFoundError:
        return
    for path in names:
        if path.suffix != _SUFFIX:
            continue
        try:
            lines = path.read_bytes().split(b"\n")[:-1]
        except FileNotFoundError:
            continue  # of another repository, and just ended
        found = [json.loads(line) for line in lines]
        if not found:
            continue
        if found[0]["common"] == str(layout.common):
            locks = [(Path(each["lock"]), Path(each["by"])) for each in found if "lock" in each]
            plan = next((each["plan"] for each in found if "plan" in each), None)
            yield Left(path, found[0], locks, plan)


def _as_json(change: Change) -> dict[str, Any]:
    return {
        "files": [[_text(step.path), _blob(step.old), _blob(step.new)] for step in change.files],
        "staged": [[_text(path), _entry(entry)] for path, entry in change.staged.items()],
        "moves": [list(move) for move in change.moves],
        "logs": [list(log) for log in change.logs],
    }


def change_of(plan: dict[str, Any]) -> Change:
    """The change that a plan states."""
    return Change(
        files=tuple(Step(_bytes(path), _unblob(old), _unblob(new)) for path, old, new in plan["files"]),
        staged={_bytes(path): _unentry(entry) for path, entry in plan["staged"]},
        moves=tuple(_move(move) for move in plan["moves"]),
        logs=tuple((name, content) for name, content in plan["logs"]),
    )


def _text(path: bytes) -> str:
    return base64.b64encode(path).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)


def _blob(blob: Blob | None) -> list[Any] | None:
    return None if blob is None else [blob.mode, blob.oid.hex()]


def _unblob(text: list[Any] | None) -> Blob | None:
    return None if text is None else Blob(text[0], bytes.fromhex(text[1]))


def _entry(entry: Entry | None) -> list[Any] | None:
    if entry is None:
        return None
    return [entry.mode, entry.oid.hex(), list(entry.stat), entry.assume_valid, entry.more, _text(entry.path)]


def _unentry(text: list[Any] | None) -> Entry | None:
    if text is None:
        return None
    mode, oid, status, assume_valid, more, path = text
    stat = (*map(int, status),)
    return Entry(_bytes(path), mode, bytes.fromhex(oid), stat, 0, assume_valid, more)  # type: ignore[arg-type] # nine


def _move(text: list[Any]) -> Move:
    name, old, new, *rest = text
    return Move(name, None if old is None else Value(*old), None if new is None else Value(*new), *rest)


def unlink(path: Path) -> None:
    with suppress(FileNotFoundError):
        path.unlink()
