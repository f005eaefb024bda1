"""The difference that changes made: unified diffs of texts, and counts of lines."""

from __future__ import annotations

import difflib
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.policy.request import Kind, Operation
from bonobofs.undo.changes import Change, FileState
from bonobofs.undo.images import Image, Images

_LARGEST: Final = 4 << 20
"""Bytes of the largest content that is compared line by line."""
_BINARY_HEAD: Final = 8192


class Content(NamedTuple):
    """The content of a file at one moment."""

    data: bytes | None
    """None: it is not kept, or too large."""
    exists: bool = True
    note: str = ""
    """Why there is no data."""


ABSENT: Final = Content(b"", exists=False)


class FileDifference(NamedTuple):
    """A path before the first and after the last of some changes."""

    path: str
    old_path: str
    before: Content
    after: Content
    changes: Sequence[str]
    """Names of the changes, oldest first."""

    @property
    def status(self) -> str:
        """`added`, `removed`, `renamed`, `changed` or `same`."""
        if not self.before.exists:
            return "added" if self.after.exists else "same"
        if not self.after.exists:
            return "removed"
        if self.path != self.old_path:
            return "renamed"
        return "same" if self.before.data == self.after.data is not None else "changed"

    def unified(self) -> list[str]:
        """Return the lines of a unified diff; of a binary file or a missing content one line that says so."""
        old, new = (f"a/{self.old_path}", f"b/{self.path}")
        head = [f"diff {old} {new}"]
        if self.before.data is None or self.after.data is None:
            return [*head, f"# {self.before.note or self.after.note}"]
        if _is_binary(self.before.data) or _is_binary(self.after.data):
            return [*head, f"Binary files {old} and {new} differ"]
        names = old if self.before.exists else "/dev/null", new if self.after.exists else "/dev/null"
        lines = list(difflib.unified_diff(_lines(self.before.data), _lines(self.after.data), *names, lineterm=""))
        return [*head, *lines]

    def counts(self) -> tuple[int, int] | None:
        """Return the numbers of added and removed lines; None for a binary file or a missing content."""
        lines = self.unified()
        if len(lines) == 2 and not lines[1].startswith("---"):
            return None
        body = [line for line in lines[3:] if not line.startswith("@@")]
        return sum(line.startswith("+") for line in body), sum(line.startswith("-") for line in body)


def differences(
    source: Path, images: Images, selected: Sequence[Change], later: Iterable[Change]
) -> list[FileDifference]:
    """Return what the selected changes did to each path. `later` are all changes since the first of them, by time.

    The content after the changes is the pre-image of the next change of the path, else that of the file on the disk.
    """
    first: dict[str, Change] = {}
    last: dict[str, Change] = {}
    names: dict[str, list[str]] = {}
    origin: dict[str, str] = {}
    for change in selected:
        if not change.is_made or change.path.startswith(".git/"):
            continue
        for path in change.paths:
            first.setdefault(path, change)
            last[path] = change
            names.setdefault(path, []).append(change.id)
        to = change.details.get("to")
        if isinstance(to, str) and change.operation == Operation.RENAME and not change.details.get("exchange"):
            origin[to] = origin.pop(change.path, change.path)
    following = _by_path(later)
    found = []
    for path in sorted(first):
        before = _before(images, first[path], path)
        after = _after(source, images, following, last[path], path)
        if origin.get(path, path) in first and origin.get(path, path) != path and not before.exists:
            old = origin[path]
            earlier = _before(images, first[old], old, source_path=path, source=source)
            difference = FileDifference(path, old, earlier, after, names[path])
        else:
            difference = FileDifference(path, path, before, after, names[path])
        if difference.status != "same":
            found.append(difference)
    moved = {difference.old_path for difference in found if difference.status == "renamed"}
    return [each for each in found if not (each.status == "removed" and each.path in moved)]


def _before(images: Images, change: Change, path: str, *, source_path: str = "", source: Path | None = None) -> Content:
    """Return the content of a path before a change."""
    state = change.replaced if path == change.details.get("to") else change.before
    if state is None or change.operation == Operation.LINK or state.kind is Kind.DIRECTORY:
        return ABSENT
    if change.operation == Operation.RENAME and path == change.path and source is not None:
        return _on_disk(source / source_path)  # a rename changes no content
    return _kept(images, change, state)


def _by_path(changes: Iterable[Change]) -> dict[str, list[tuple[int, Change]]]:
    """Return by path the made changes of its content, and the renames from it, with their places in the order."""
    found: dict[str, list[tuple[int, Change]]] = {}
    for place, change in enumerate(changes):
        if change.is_made and change.operation not in _WITHOUT_CONTENT:
            for path in change.paths:
                found.setdefault(path, []).append((place, change))
    return found


def _after(
    source: Path, images: Images, following: Mapping[str, list[tuple[int, Change]]], last: Change, path: str
) -> Content:
    directories = (path[:end] for end, character in enumerate(path) if character == "/")
    candidates = [
        *following.get(path, ()),
        *(each for above in directories for each in following.get(above, ()) if _moves(each[1], above)),
    ]
    key = last.entry.timestamp, last.entry.session, last.entry.seq
    for _, change in sorted(candidates, key=lambda each: each[0]):
        if (change.entry.timestamp, change.entry.session, change.entry.seq) <= key:
            continue
        if path in change.paths:
            return _before(images, change, path)
        return Content(None, note="its directory was moved afterwards")
    return _on_disk(source / path)


def _moves(change: Change, directory: str) -> bool:
    return change.path == directory and isinstance(change.details.get("to"), str)


_WITHOUT_CONTENT: Final = (
    Operation.SET_MODE,
    Operation.SET_OWNER,
    Operation.SET_TIMES,
    Operation.SET_XATTR,
    Operation.REMOVE_XATTR,
    Operation.LINK,
)


def _kept(images: Images, change: Change, state: FileState) -> Content:
    if state.kind is Kind.SYMLINK:
        return Content(os.fsencode(str(change.details.get("old_target", ""))))
    if not state.size:
        return Content(b"")
    image = images.open(Image(change.entry.session, change.entry.seq))
    if image is None:
        return Content(None, note=change.not_kept or "the old content is not kept")
    with image:
        return Content(None, note=_too_large(state.size)) if state.size > _LARGEST else Content(image.read())


def _on_disk(path: Path) -> Content:
    try:
        st = path.lstat()
        if stat.S_ISLNK(st.st_mode):
            return Content(os.fsencode(os.readlink(path)))
        if not stat.S_ISREG(st.st_mode):
            return ABSENT
        if st.st_size > _LARGEST:
            return Content(None, note=_too_large(st.st_size))
        return Content(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT
    except OSError as error:
        return Content(None, note=f"the file cannot be read: {error.strerror}")


def _too_large(size: int) -> str:
    return f"{size} bytes are too many to compare by line"


def _is_binary(data: bytes) -> bool:
    return b"\0" in data[:_BINARY_HEAD]


def _lines(data: bytes) -> list[str]:
    return data.decode("utf-8", "surrogateescape").splitlines()
