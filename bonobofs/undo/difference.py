"""The difference that changes made, as a patch in the format of git, and counts of lines."""

from __future__ import annotations

import difflib
import os
import re
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
    mode: int = 0

    @property
    def git_mode(self) -> str:
        """The mode as git shows it: the type, and whether the owner may execute the file."""
        return "120000" if stat.S_ISLNK(self.mode) else f"100{'755' if self.mode & stat.S_IXUSR else '644'}"


ABSENT: Final = Content(b"", exists=False)


class FileDifference(NamedTuple):
    """The content of a path before the first of some changes and after the last one."""

    path: str
    """The path after the changes."""
    old_path: str
    """The path before the changes. It differs from `path` if the changes renamed the file."""
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
        is_same = self.before.data == self.after.data is not None and self.before.git_mode == self.after.git_mode
        return "same" if is_same else "changed"

    @property
    def is_text(self) -> bool:
        """Whether both contents are there, and no binary file has changed."""
        before, after = self.before.data, self.after.data
        if before is None or after is None:
            return False
        return before == after or not (_is_binary(before) or _is_binary(after))

    def unified(self) -> list[str]:
        """Return the lines of a patch. `git apply` and `patch` skip a file that is not `is_text`."""
        before, after, is_change = self.before, self.after, self.before.exists and self.after.exists
        old, new = _quoted(f"a/{self.old_path}"), _quoted(f"b/{self.path}")
        if not self.is_text:
            note = before.note or after.note
            return [f"diff {old} {new}", f"# {note}" if note else f"Binary files {old} and {new} differ"]
        if is_change and stat.S_ISLNK(before.mode) != stat.S_ISLNK(after.mode):
            removed = self._replace(path=self.old_path, after=ABSENT)
            return [*removed.unified(), *self._replace(old_path=self.path, before=ABSENT).unified()]
        head = [f"diff --git {old} {new}"]
        if not is_change:
            head += [f"deleted file mode {before.git_mode}" if before.exists else f"new file mode {after.git_mode}"]
        elif before.git_mode != after.git_mode:
            head += [f"old mode {before.git_mode}", f"new mode {after.git_mode}"]
        if self.path != self.old_path:
            head += [f"rename from {_quoted(self.old_path)}", f"rename to {_quoted(self.path)}"]
        names = old if before.exists else "/dev/null", new if after.exists else "/dev/null"
        one, other = (f"{name}\t" if " " in name else name for name in names)  # a name with a space ends at a tab
        hunks = difflib.unified_diff(*self._lines(), one, other, lineterm="")
        return [*head, *(line for each in hunks for line in each.split("\n"))]

    def counts(self) -> tuple[int, int] | None:
        """Return the numbers of added and removed lines; None: it is not `is_text`."""
        if not self.is_text:
            return None
        codes = difflib.SequenceMatcher(None, *self._lines()).get_opcodes()
        changed = [(end - start, old_end - old) for tag, old, old_end, start, end in codes if tag != "equal"]
        return sum(added for added, _ in changed), sum(removed for _, removed in changed)

    def _lines(self) -> tuple[list[str], list[str]]:
        return _lines(self.before.data or b""), _lines(self.after.data or b"")


def differences(
    source: Path, images: Images, selected: Sequence[Change], later: Iterable[Change]
) -> list[FileDifference]:
    """Return what the selected changes did to each path. `later` are all changes since the first of them, by time.

    `later` needs only the changes of the paths of the selected changes, and of the paths to which their files were
    renamed. The content after the changes is the pre-image of the next change of the file, else that on the disk.
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
    found = [_directory_rename(change) for change in selected if _is_directory_rename(change)]
    contents = _Contents(source, images, _by_path(later))
    for path in sorted(first):
        before, after = contents.before(first[path], path), contents.after(last[path], path)
        difference, old = FileDifference(path, path, before, after, names[path]), origin.get(path, path)
        if old in first and old != path and after.exists and not before.exists:
            earlier = contents.before(first[old], old)
            if earlier.exists:
                difference = difference._replace(old_path=old, before=earlier)
        if difference.status != "same":
            found.append(difference)
    moved = {difference.old_path for difference in found if difference.status == "renamed"}
    return [each for each in found if not (each.status == "removed" and each.path in moved)]


class _Contents(NamedTuple):
    """The contents of files between changes."""

    source: Path
    images: Images
    following: Mapping[str, list[tuple[int, Change]]]

    def before(self, change: Change, path: str) -> Content:
        """Return the content of a path before a change."""
        while (new_path := change.new_path_of(path)) is not None:
            path = new_path  # a rename changes no content
            following = self._next(change, path)
            if isinstance(following, Content):
                return following
            change = following
        state = change.replaced if path == change.details.get("to") else change.before
        if state is None or change.operation == Operation.LINK or state.kind is Kind.DIRECTORY:
            return ABSENT
        if change.operation in _WITHOUT_CONTENT:
            return self.after(change, path)._replace(mode=state.mode)
        return _kept(self.images, change, state)

    def after(self, last: Change, path: str) -> Content:
        """Return the content of a path after a change."""
        following = self._next(last, path)
        content = following if isinstance(following, Content) else self.before(following, path)
        is_at_path = last.after is not None and path == last.details.get("to", last.path)
        return content._replace(mode=last.after.mode) if last.after is not None and is_at_path else content

    def _next(self, last: Change, path: str) -> Change | Content:
        """Return the next change of the content of a path; if there is none, its present content."""
        directories = (path[:end] for end, character in enumerate(path) if character == "/")
        candidates: list[tuple[int, Change]] = [
            *self.following.get(path, ()),
            *(each for above in directories for each in self.following.get(above, ()) if _moves(each[1], above)),
        ]
        key = last.entry.timestamp, last.entry.session, last.entry.seq
        for _, change in sorted(candidates, key=lambda each: each[0]):
            if (change.entry.timestamp, change.entry.session, change.entry.seq) <= key:
                continue
            if path in change.paths:
                return change
            return Content(None, note="its directory was moved afterwards")
        return _on_disk(self.source / path)


def _is_directory_rename(change: Change) -> bool:
    is_directory = change.before is not None and change.before.kind is Kind.DIRECTORY
    return change.is_made and is_directory and _moves(change, change.path)


def _directory_rename(change: Change) -> FileDifference:
    note = Content(None, note="the directory was renamed; this is not a part of the patch")
    return FileDifference(str(change.details["to"]), change.path, note, note, [change.id])


def _by_path(changes: Iterable[Change]) -> dict[str, list[tuple[int, Change]]]:
    """Return by path the made changes of its content, and the renames from it, with their places in the order."""
    found: dict[str, list[tuple[int, Change]]] = {}
    for place, change in enumerate(changes):
        if change.is_made and change.operation not in _WITHOUT_CONTENT:
            for path in change.paths:
                found.setdefault(path, []).append((place, change))
    return found


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
        return Content(os.fsencode(str(change.details.get("old_target", ""))), mode=state.mode)
    if not state.size:
        return Content(b"", mode=state.mode)
    image = images.open(Image(change.entry.session, change.entry.seq))
    if image is None:
        return Content(None, note=change.not_kept or "the old content is not kept")
    with image:
        too_large = Content(None, note=_too_large(state.size))
        return too_large if state.size > _LARGEST else Content(image.read(), mode=state.mode)


def _on_disk(path: Path) -> Content:
    try:
        st = path.lstat()
        if stat.S_ISLNK(st.st_mode):
            return Content(os.fsencode(os.readlink(path)), mode=st.st_mode)
        if not stat.S_ISREG(st.st_mode):
            return ABSENT
        if st.st_size > _LARGEST:
            return Content(None, note=_too_large(st.st_size))
        return Content(path.read_bytes(), mode=st.st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return ABSENT
    except OSError as error:
        return Content(None, note=f"the file cannot be read: {error.strerror}")


def _too_large(size: int) -> str:
    return f"{size} bytes are too many to compare by line"


def _is_binary(data: bytes) -> bool:
    return b"\0" in data[:_BINARY_HEAD]


def _lines(data: bytes) -> list[str]:
    *lines, last = data.decode("utf-8", "surrogateescape").split("\n")
    return [*lines, f"{last}\n\\ No newline at end of file"] if last else lines


def _quoted(path: str) -> str:
    """Quote a path with control characters as git does, so that it is one line."""
    escaped = re.sub(r'[\x00-\x1f"\\\x7f]', lambda match: f"\\{ord(match[0]):03o}", path)
    return path if escaped == path else f'"{escaped}"'
