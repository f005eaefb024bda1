"""How long the record is kept: trails that have ended are compressed; the oldest are pruned by age and by total size.

Only the trail of a session that has ended is touched. One process at a time works here, under `retention.lock`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from bonobofs.audit.history import is_closed
from bonobofs.audit.trail_file import compress
from bonobofs.errors import TrailError
from bonobofs.state.sessions import lives, load

AT_ONCE: Final = 2 * 1024 * 1024
"""Bytes that a mount or umount compresses at the most, in some 0.1 s; the daemon and `audit prune` do the rest."""

GoesOn = Callable[[], bool]


def compress_ended(home: Path, most: int | None = AT_ONCE, goes_on: GoesOn = lambda: True) -> list[str]:
    """Compress the trails of sessions that have ended, up to `most` bytes together; return the failures, a line each.

    Where another process compresses or prunes, nothing is done.
    """
    with _alone(home, wait=False) as is_ours:
        return _compress_ended(home, most, goes_on) if is_ours else []


def _compress_ended(home: Path, most: int | None, goes_on: GoesOn) -> list[str]:
    problems = []
    for trail in sorted((home / "trails").glob("*.jsonl")):
        try:
            size = trail.stat().st_size
            if (most is not None and size > most) or not goes_on() or not has_ended(home, trail):
                continue
            most = None if most is None else most - size
            compress(trail)
        except (OSError, TrailError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            problems.append(f"the trail {trail} cannot be compressed: {reason}")
    return problems


def has_ended(home: Path, trail: Path) -> bool:
    """Whether no process writes this trail any more, and no mount has to compare the source with it. TrailError."""
    session = load(home, trail.stem)
    if session is not None and session.ended is not None:
        return True
    return (session is None or not lives(session)) and is_closed(trail)


@contextlib.contextmanager
def _alone(home: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock; False: another process holds it, and this one does not wait."""
    handle = os.open(home / "retention.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(handle)
