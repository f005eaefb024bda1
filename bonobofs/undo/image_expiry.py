"""Bound the stores of pre-images: by age, by total size, and after a crash."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.state.sessions import lives, read_all
from bonobofs.undo.preimages import PACK

BETWEEN: Final = 3600.0
"""Seconds between two calls of `expire` by mounts."""


class StoreUsage(NamedTuple):
    """What the stores hold."""

    files: int
    bytes: int


def places_of(home: Path) -> list[Path]:
    """Return the directories of all pre-images of a state directory."""
    sources = {session.source for session in read_all(home)[0]}
    return [home / "undo", *sorted(Path(source) / ".bonobofs" / "undo" for source in sources)]


def usage(places: Iterable[Path]) -> StoreUsage:
    """Return number and bytes of the pre-images in these stores."""
    sizes = [st.st_size for _, _, st in _images(places)]
    return StoreUsage(len(sizes), sum(sizes))


def size_text(size: int, limit: int) -> str:
    """Return the size of the stores and its limit for the operator."""
    return f"{size / 10**6:.1f} MB of {limit / 10**6:,.0f} MB"


def expire(places: Iterable[Path], keep: float, most: int, live: Collection[str]) -> int:
    """Remove pre-images that are older than `keep` seconds, then the oldest until `most` bytes remain.

    Return their number. A pre-image has the change time at which it was kept. The sessions `live` write to their
    directories and packs, so these stay.
    """
    oldest, removed = time.time() - keep, 0
    images = sorted(_images(places), key=lambda image: image[2].st_ctime)
    total = sum(st.st_size for _, _, st in images)
    for session, image, st in images:
        if st.st_ctime >= oldest and total <= most:
            break
        if image.name == PACK and session in live:
            continue
        with suppress(OSError):
            os.unlink(image.path)
            removed += 1
        total -= st.st_size
    unused_since = time.time() - BETWEEN  # the record of a session that starts may be missing
    for directory in _directories(places):
        with suppress(OSError):
            if directory.name not in live and directory.stat().st_ctime < unused_since:
                directory.rmdir()  # fails while it holds an image
    return removed


def is_due(home: Path) -> bool:
    """Return True at most once in BETWEEN seconds: then the caller calls `expire`. False for a new store.

    Without a daemon, each mount asks this.
    """
    stamp = home / "undo" / ".expired"
    try:
        is_old = time.time() - stamp.stat().st_mtime >= BETWEEN
    except FileNotFoundError:
        is_old = False
    except OSError:
        return False
    with suppress(OSError):
        if is_old or not stamp.exists():
            stamp.touch(mode=0o600)
    return is_old


def drop_unmade(directory: Path) -> None:
    """Remove the links of files that still have their name: a killed session did not make these changes.

    A file with a name more than it shows could not be written through a mount.
    """
    for entry in os.scandir(directory) if directory.is_dir() else ():
        with suppress(OSError):
            if entry.stat(follow_symlinks=False).st_nlink > 1:
                os.unlink(entry.path)


def drop_unmade_changes(home: Path, source: str) -> None:
    """Remove what killed sessions of a source kept for changes that they did not make."""
    for session in read_all(home)[0]:
        if session.source == source and session.ended is None and not lives(session):
            for store in (home, Path(source) / ".bonobofs"):
                drop_unmade(store / "undo" / session.session)


def _directories(places: Iterable[Path]) -> Iterator[Path]:
    for store in places:
        with suppress(OSError):
            yield from [each for each in store.iterdir() if each.is_dir() and not each.is_symlink()]


def _images(places: Iterable[Path]) -> Iterator[tuple[str, os.DirEntry[str], os.stat_result]]:
    """Yield the session, the file and its stat of each pre-image."""
    for directory in _directories(places):
        with suppress(OSError), os.scandir(directory) as images:
            for image in images:
                with suppress(OSError):
                    yield directory.name, image, image.stat(follow_symlinks=False)
