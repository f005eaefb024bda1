"""Bound the stores of pre-images: by age, by total size, and after a crash."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.state.sessions import lives, read_all
from bonobofs.system.locks import locked, locked_if_free, try_once
from bonobofs.undo.images import OBJECTS, ImageFile
from bonobofs.undo.preimages import PACK

BETWEEN: Final = 3600.0
"""Seconds between two calls of `expire` by mounts."""


class StoreUsage(NamedTuple):
    """What the stores hold. Equal contents that are shared count once."""

    files: int
    bytes: int


def places_of(home: Path) -> list[Path]:
    """Return the directories of all pre-images of a state directory."""
    sources = {session.source for session in read_all(home)[0]}
    return [home / "undo", *sorted(Path(source) / ".bonobofs" / "undo" for source in sources)]


def usage(places: Iterable[Path]) -> StoreUsage:
    """Return number and bytes of the pre-images in these stores."""
    sizes = {image.content: image.size for image in _images(places)}
    return StoreUsage(len(sizes), sum(sizes.values()))


def size_text(size: int, limit: int) -> str:
    """Return the size of the stores and its limit for the operator."""
    return f"{size / 10**6:.1f} MB of {limit / 10**6:,.0f} MB"


def expire(places: Sequence[Path], keep: float, most: int, live: Collection[str]) -> int:
    """Remove pre-images that are older than `keep` seconds, then the oldest until `most` bytes remain.

    Return their number. A shared content is removed with its last image; for `most` it is as old as its newest image.
    The sessions `live` write to their directories and packs, so these stay. None is removed while an undo runs, or for
    a day after its kill. OSError.
    """
    places[0].mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked_if_free(places[0] / "lock", retry=try_once) as is_free:
        since = time.time() - 24 * BETWEEN
        is_used = not is_free or any(journal.stat().st_mtime > since for journal in places[0].glob("*.plan"))
        return 0 if is_used else _expire(places, keep, most, live)


def _expire(places: Sequence[Path], keep: float, most: int, live: Collection[str]) -> int:
    oldest, removed = time.time() - keep, 0
    images = list(_images(places))
    left = Counter(image.content for image in images)
    newest: dict[tuple[int, int], float] = {}
    for image in images:
        newest[image.content] = max(image.kept_at, newest.get(image.content, 0))
    total = sum({image.content: image.size for image in images}.values())
    for image in sorted(images, key=lambda image: (newest[image.content], image.content, image.kept_at)):
        if (image.kept_at >= oldest and total <= most) or (image.is_pack and image.session in live):
            continue
        try:
            os.unlink(image.path)
        except OSError:  # it stays, or the companion has given it its hash
            continue
        removed += 1
        left[image.content] -= 1
        total -= 0 if left[image.content] else image.size
    for store in places:
        _remove_unused_objects(store)
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
            st = entry.stat(follow_symlinks=False)
            if entry.name.isdecimal() and st.st_nlink > 1 and not _is_object(directory.parent, st.st_ino):
                os.unlink(entry.path)


def _is_object(store: Path, ino: int) -> bool:
    """Return whether an image is being shared: the companion was killed before it gave the image its hash."""
    return any(content.stat().st_ino == ino for content in (store / OBJECTS).glob("*/*"))


def drop_unmade_changes(home: Path, source: str) -> None:
    """Remove what killed sessions of a source kept for changes that they did not make."""
    for session in read_all(home)[0]:
        if session.source == source and session.ended is None and not lives(session):
            for store in (home, Path(source) / ".bonobofs"):
                drop_unmade(store / "undo" / session.session)


def _remove_unused_objects(store: Path) -> None:
    """Remove the contents that no image has."""
    if not (store / OBJECTS).is_dir():
        return
    with suppress(OSError), locked(store / f"{OBJECTS}.lock"):
        for content in (store / OBJECTS).glob("*/*"):
            if content.stat(follow_symlinks=False).st_nlink == 1:
                content.unlink()


def _directories(places: Iterable[Path]) -> Iterator[Path]:
    for store in places:
        with suppress(OSError):
            yield from [
                each for each in store.iterdir() if each.name != OBJECTS and each.is_dir() and not each.is_symlink()
            ]


class _StoredImage(NamedTuple):
    session: str
    path: str
    content: tuple[int, int]
    """Device and inode number."""
    size: int
    kept_at: float
    """Seconds since 1970. Sharing the content changes the change time of the file."""
    is_pack: bool


def _images(places: Iterable[Path]) -> Iterator[_StoredImage]:
    """Yield each pre-image and each pack."""
    for directory in _directories(places):
        with suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                with suppress(OSError):
                    st = entry.stat(follow_symlinks=False)
                    file = ImageFile.parse(entry.name)
                    kept_at = (file and file.kept_at) or st.st_ctime
                    is_pack = entry.name.startswith(PACK)
                    content = st.st_dev, st.st_ino
                    yield _StoredImage(directory.name, entry.path, content, st.st_size, kept_at, is_pack)
