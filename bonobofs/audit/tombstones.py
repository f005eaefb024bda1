"""The record of pruned trails: for each, its last entry, the agent and the reason.

`pruned.jsonl` in the state directory is a trail of its own, with its head in `pruned.head`. `audit.verify` checks it
like any other trail. It has no closing entry, because every pruning appends to it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.audit.entry import ZERO
from bonobofs.audit.reader import last, read
from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.errors import TrailError

PRUNED: Final = "pruned"
"""Name of the record, and `session` of its entries."""
PRUNE: Final = "prune"


class Tombstone(NamedTuple):
    """A trail that was pruned."""

    session: str
    agent: str
    seq: int
    """Number of the last entry."""
    hash: str
    first: str
    """Time of the first entry in ISO 8601; "" for an empty trail."""
    last: str
    """Time of the last entry."""
    bytes: int
    """Size on the disk."""
    why: str


Tombstones = Callable[[], Mapping[str, Tombstone]]
"""Reads the present tombstones by session."""


def record_path(home: Path) -> Path:
    return home / f"{PRUNED}.jsonl"


def record_head(home: Path) -> Path:
    return home / f"{PRUNED}.head"


def tombstones(home: Path) -> dict[str, Tombstone]:
    """Return the tombstones of a state directory by session. Omits damaged tombstones. TrailError."""
    if not record_path(home).exists():
        return {}
    entries = (entry.details for entry in read(record_path(home)) if entry.operation == PRUNE)
    return {found.session: found for details in entries if (found := _tombstone(details)) is not None}


def _tombstone(details: dict[str, Any]) -> Tombstone | None:
    try:
        found = Tombstone(**details)
    except TypeError:
        return None
    whole = all(isinstance(value, int if name in ("seq", "bytes") else str) for name, value in found._asdict().items())
    return found if whole else None


@contextmanager
def open_record(home: Path, agent: str) -> Iterator[Trail]:
    """Open the record to append tombstones. The caller holds the retention lock and has verified the record.

    Cuts off an incomplete last line, which a crash can leave. TrailError.
    """
    path, head, identity = record_path(home), record_head(home), TrailIdentity(PRUNED, agent, "")
    if not path.exists() and not head.exists():
        trail = Trail.create(path, head, identity)
    else:
        try:
            trail = _resumed(path, head, identity)
        except OSError as error:
            raise TrailError(f"the record of pruned trails {path} cannot be opened: {error.strerror}") from error
    try:
        yield trail
    finally:
        trail.close(final=False)


def _resumed(path: Path, head: Path, identity: TrailIdentity) -> Trail:
    entries = last(path, 1)
    seq, link = (entries[0].seq, entries[0].hash) if entries else (0, ZERO)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        data = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        size = data.rfind(b"\n") + 1
        os.ftruncate(descriptor, size)
        head_descriptor = os.open(head, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return Trail(descriptor, head_descriptor, identity, path, (seq, link, size))


def append_tombstone(trail: Trail, tombstone: Tombstone) -> None:
    """Append a tombstone and sync it to the disk. TrailError: the caller must not remove the trail."""
    trail.event(PRUNE, tombstone._asdict())
    trail.sync()
