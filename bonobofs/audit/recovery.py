"""After an unclean shutdown: find where the source differs from its trails.

Power loss can remove the last second of the trails, and recorded changes that were not yet on the disk. So `compare`
replays the trails of a source and compares the result with the source: names, sizes, and changes since the time up to
which the trails are known to be complete.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.audit.entry import BY, LAYER, TOUCHES, AuditEntry, instant, is_effective, touched_paths
from bonobofs.audit.reader import PathNode, is_closed, last, merged
from bonobofs.audit.temp_cleanup import declared_temporary
from bonobofs.audit.trail_storage import stat_trail
from bonobofs.audit.writer import Trail
from bonobofs.errors import TrailError
from bonobofs.policy.request import Operation
from bonobofs.system.paths import STORE, open_directory_beneath

OUT_OF_BAND: Final = "out_of_band"

SLACK: Final = 1.0
"""Largest difference in seconds between an entry's time and the kernel's time of the same change."""

MOST: Final = 10_000
"""Maximum number of differences that are recorded one by one. Further ones are counted."""

KEEPS_CONTENT: Final = frozenset(
    {
        Operation.RENAME,
        Operation.LINK,
        Operation.SET_MODE,
        Operation.SET_OWNER,
        Operation.SET_TIMES,
        Operation.SET_XATTR,
        Operation.REMOVE_XATTR,
    }
)
"""Operations that do not change the content of a file."""

FOREVER: Final = float("inf")


class SourceDifference(NamedTuple):
    """A path at which the source differs from the trails."""

    path: str
    message: str
    details: dict[str, Any] = {}  # noqa: RUF012 - never changed; a NamedTuple holds it as the shared default


class _Node(PathNode):
    """The state of one path according to the trails.

    Recorded changes explain a ctime from `began` to `ended`, in seconds since 1970. The span joins those of separate
    changes, because ctime shows the last change only. `ended` is FOREVER after an intent without outcome.
    `exists` (the path exists) and `size` (in bytes) are None if the trails do not determine them.
    """

    __slots__ = ("began", "content_by", "ended", "exists", "size")

    def __init__(self) -> None:
        super().__init__()
        self.began = FOREVER
        self.ended = 0.0
        self.content_by: tuple[str, int] | None = None
        """Session and number of the last intent that changes the content."""
        self.exists: bool | None = None
        self.size: int | None = None

    def touch(self, began: float, ended: float) -> None:
        self.began = min(self.began, began)
        self.ended = max(self.ended, ended)

    def explains(self, moment: float) -> bool:
        return self.began - SLACK <= moment <= self.ended + SLACK


class _Replay:
    """The replayed trails of one source."""

    def __init__(self) -> None:
        self.root = _Node()
        self.names = _Node()
        """The span of all changes of names. Such a change sets the ctime of the file under its other names too."""
        self._open: dict[tuple[str, int], AuditEntry] = {}
        self._touching: dict[tuple[str, int], AuditEntry] = {}
        self._trees: list[tuple[str, float, float]] = []
        """Subtrees that one change touched as a whole (TOUCHES), and the span of each change."""

    def explains(self, path: str, moment: float) -> bool:
        """True if the change of a subtree explains a ctime of this path."""
        return any(
            f"{path}/".startswith(tree) and began - SLACK <= moment <= ended + SLACK
            for tree, began, ended in self._trees
        )

    def play(self, entries: Iterator[AuditEntry]) -> None:
        for entry in entries:
            if entry.kind == "intent" and entry.result == "allowed":
                if TOUCHES in entry.details:
                    self._touching[entry.session, entry.seq] = entry
                if LAYER in entry.details or entry.guard != "file":
                    continue  # not a change of a file in the source; its outcome finds no intent and is ignored
                self._open[entry.session, entry.seq] = entry
                if entry.operation not in KEEPS_CONTENT:
                    self.root.reach(entry.path).content_by = (entry.session, entry.seq)
            elif entry.kind == "outcome":
                number = entry.details.get("intent")
                if not isinstance(number, int):
                    continue
                intent = self._open.pop((entry.session, number), None)
                if intent is not None:
                    self._end(intent, entry)
                touching = self._touching.pop((entry.session, number), None)
                if touching is not None:
                    self._touch(touching, entry.timestamp.timestamp())
            elif entry.operation == OUT_OF_BAND:
                node = self.root.reach(entry.path)
                node.exists = node.size = None
                node.touch(0.0, entry.timestamp.timestamp())
        for intent in self._open.values():
            self._leave_open(intent)
        for intent in self._touching.values():
            self._touch(intent, FOREVER)

    def _touch(self, intent: AuditEntry, ended: float) -> None:
        """Add the further paths of a change. The trails do not determine what is there after it."""
        began = intent.timestamp.timestamp()
        for path in touched_paths(intent.details):
            name = path.rstrip("/")
            if not name:
                continue
            if name != path:
                self._trees.append((path, began, ended))
                self.root.put(name, _Node())
            node = self.root.reach(name)
            node.exists = node.size = None
            node.touch(began, ended)
            self.root.above(name).touch(began, ended)

    def _end(self, intent: AuditEntry, outcome: AuditEntry) -> None:
        began, ended = intent.timestamp.timestamp(), outcome.timestamp.timestamp()
        other = _other_name(intent)
        if is_effective(outcome):
            if intent.operation == Operation.RENAME:
                if other is not None:
                    self._rename(intent.path, other, exchanged=bool(intent.details.get("exchange")))
                else:
                    self._cut(intent.path)  # a staged file replaced the path
                    self.root.reach(intent.path).exists = True
            elif intent.action == "delete":
                self._cut(intent.path)
            else:
                self._note_content(self.root.reach(intent.path), intent, outcome)
        for name in (intent.path, other):
            if name is not None:
                self.root.reach(name).touch(began, ended)
                # A change of content can touch the directory too: a temporary sibling name can replace the file.
                self.root.above(name).touch(began, ended)
        if _changes_names(intent):
            self.names.touch(began, ended)

    def _leave_open(self, intent: AuditEntry) -> None:
        """Apply an intent without outcome: the change may have been made at any time since."""
        began = intent.timestamp.timestamp()
        for name in (intent.path, _other_name(intent)):
            if name is not None:
                node = self.root.reach(name)
                node.touch(began, FOREVER)
                node.exists = node.size = None
                if _changes_names(intent) or BY in intent.details:
                    self.root.above(name).touch(began, FOREVER)
                if _changes_names(intent):
                    self.names.touch(began, FOREVER)
        stray = declared_temporary(intent.path, intent.details)
        if stray is not None:
            self.root.reach(stray).touch(began, FOREVER)

    def _note_content(self, node: _Node, intent: AuditEntry, outcome: AuditEntry) -> None:
        node.exists = True
        if intent.operation not in KEEPS_CONTENT:
            size = outcome.details.get("size")
            # The outcome of a write batch comes late. If another change came in between, its size is obsolete.
            is_last = node.content_by == (intent.session, intent.seq)
            node.size = size if is_last and isinstance(size, int) else None

    def _rename(self, old: str, new: str, *, exchanged: bool) -> None:
        moved, replaced = self._cut(old), self._cut(new)
        moved.exists = True
        self.root.put(new, moved)
        if exchanged:
            replaced.exists = True
            self.root.put(old, replaced)

    def _cut(self, path: str) -> _Node:
        """Replace the node of a path by one that marks the path as absent; return the old node."""
        node = self.root.reach(path)
        absent = _Node()
        absent.exists = False
        self.root.put(path, absent)
        return node


def _other_name(intent: AuditEntry) -> str | None:
    """Return the second name of a change: the new name of a rename, the old name of a link."""
    key = "to" if intent.operation == Operation.RENAME else "from" if intent.operation == Operation.LINK else ""
    other = intent.details.get(key)
    return other if isinstance(other, str) else None


def _changes_names(intent: AuditEntry) -> bool:
    return intent.action in ("create", "delete") or intent.operation == Operation.RENAME


def compare(source: Path, trails: Sequence[tuple[Path, Path]]) -> Iterator[SourceDifference]:
    """Yield the differences between a source and its trails, in no order; none if all trails are closed.

    `trails` are the trails of all sessions of this source, each with its head. Trails without a closing entry determine
    the time from which a change needs an explanation; all trails explain changes. The walk omits file systems that are
    mounted below the source, and follows no symlink. TrailError.
    """
    ended_open = [pair for pair in trails if not is_closed(pair[0])]
    if not ended_open:
        return
    record = _Replay()
    record.play(merged(trail for trail, _ in trails))
    yield from _Comparison(source, record, max(_whole_until(*pair) for pair in ended_open) - SLACK).run()


def enter(trail: Trail, differences: Iterable[SourceDifference], protected: Callable[[str], bool]) -> int:
    """Record each difference as an event, and one of a protected path also as an alert; return their number.

    After MOST events, one last entry counts the differences without an alert. TrailError: some are not recorded.
    """
    number = left = 0
    for number, (path, message, particulars) in enumerate(differences, 1):
        details = {"what": message, **particulars}
        if number <= MOST:
            trail.event(OUT_OF_BAND, details, path=path)
        if protected(path):
            reason = "A protected path was changed externally."
            trail.alert(reason, operation=OUT_OF_BAND, path=path, details=details)
        elif number > MOST:
            left += 1
    if left:
        trail.event(OUT_OF_BAND, {"more": left})
    return number


class _Comparison:
    """One walk over the source, compared with the replayed trails."""

    def __init__(self, source: Path, record: _Replay, since: float) -> None:
        self._source = source
        self._record = record
        self._since = since
        self._device = source.stat().st_dev
        self._linked: dict[int, list[SourceDifference]] = {}
        """Unexplained differences of hard-linked files, by inode; another name of the file may still explain them."""
        self._linked_explained: set[int] = set()

    def run(self) -> Iterator[SourceDifference]:
        root = self._record.root
        yield from self._judge("", self._source.stat(), root)
        waiting: list[tuple[str, _Node | None]] = [("", root)]
        while waiting:
            path, node = waiting.pop()
            try:
                descriptor = open_directory_beneath(self._source, path)
            except OSError:
                # A program removed it, or made it unreadable, after the listing. Its own times are already checked.
                continue
            try:
                if os.fstat(descriptor).st_dev == self._device:
                    yield from self._directory(descriptor, path, node, waiting)
            finally:
                os.close(descriptor)
        for inode, differences in self._linked.items():
            if inode not in self._linked_explained:
                yield from differences

    def _directory(
        self, descriptor: int, path: str, node: _Node | None, waiting: list[tuple[str, _Node | None]]
    ) -> Iterator[SourceDifference]:
        children = node.children if node is not None else {}
        seen = set()
        with os.scandir(descriptor) as listing:
            for each in listing:
                below = f"{path}/{each.name}" if path else each.name
                if below == STORE:
                    continue
                child = children.get(each.name)
                with suppress(FileNotFoundError):
                    status = each.stat(follow_symlinks=False)
                    yield from self._judge(below, status, child)
                    if child is not None:
                        seen.add(each.name)
                    if stat.S_ISDIR(status.st_mode):
                        waiting.append((below, child))
                    elif child is not None:
                        for name, lost in child.children.items():
                            yield from self._absent(f"{below}/{name}", lost)
        for name, child in children.items():
            if name not in seen:
                yield from self._absent(f"{path}/{name}" if path else name, child)

    def _judge(self, path: str, status: os.stat_result, node: _Node | None) -> Iterator[SourceDifference]:
        has_other_names = status.st_nlink > 1 and not stat.S_ISDIR(status.st_mode)
        # A change of a hard-linked file shows at all its names, and rename(2) between two of its names does nothing.
        if node is not None and not has_other_names:
            if node.exists is False:
                yield SourceDifference(path, "exists, and the trails record its removal")
                return
            if node.size not in (None, status.st_size) and stat.S_ISREG(status.st_mode):
                yield SourceDifference(path, f"has {status.st_size} bytes, and the trails record {node.size}")
                return
        if status.st_ctime <= self._since:
            return
        explained = (node is not None and node.explains(status.st_ctime)) or self._record.explains(
            path, status.st_ctime
        )
        moment = datetime.fromtimestamp(status.st_ctime, UTC)
        difference = SourceDifference(path, f"was changed at {instant(moment)}, and no trail records the change")
        if has_other_names and (explained or self._record.names.explains(status.st_ctime)):
            self._linked_explained.add(status.st_ino)
        elif has_other_names:
            self._linked.setdefault(status.st_ino, []).append(difference)
        elif not explained:
            yield difference

    def _absent(self, path: str, node: _Node) -> Iterator[SourceDifference]:
        """Yield the topmost names at and below an absent `path` that exist according to the trails."""
        waiting = [(path, node)]
        while waiting:
            below, node = waiting.pop()
            if node.exists:
                yield SourceDifference(below, "is missing, and the trails record that it exists")
            elif node.exists is None:
                waiting += [(f"{below}/{name}", child) for name, child in node.children.items()]


def _whole_until(trail: Path, head: Path) -> float:
    """Return the time, in seconds since 1970, up to which the trail of a session is known to be complete."""
    from bonobofs.audit.verify import read_head  # noqa: PLC0415 - a server, which compares no trails, waits for it

    with suppress(TrailError, FileNotFoundError):
        settled = read_head(head).settled
        if settled is not None:
            return settled.timestamp()
    entries = last(trail, 1)
    return entries[0].timestamp.timestamp() if entries else stat_trail(trail).st_mtime
