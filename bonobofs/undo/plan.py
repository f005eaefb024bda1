"""Plan an undo: the inverse of each selected change, newest first, on a tree in memory.

A change can be taken back if its file is as the change left it. Otherwise it is a conflict, and so is every other
selected change of that file: it is taken back completely or left untouched.
"""

from __future__ import annotations

import errno
import os
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self

from bonobofs.audit.entry import NEW_VALUE, OLD_TARGET, OLD_VALUE, XATTRS, touched_paths
from bonobofs.policy.decision import Denied
from bonobofs.policy.request import Kind, Operation
from bonobofs.undo.changes import (
    Change,
    FileState,
    RefMove,
    Restoration,
    attribute_changes,
    ends_by_directory,
    file_keys,
    moment_of_change,
    publishers,
    restored_files,
)
from bonobofs.undo.images import EMPTY, MISSING, Image, Images
from bonobofs.undo.preimages import OF_NAMES
from bonobofs.undo.step_replay import Judge, Replay
from bonobofs.undo.steps import UndoStep
from bonobofs.undo.tree import FileNode, SourceTree

CHANGED: Final = "the file was changed afterwards"
GONE: Final = "the file is gone"
TAKEN: Final = "another file has the name"
NO_DIRECTORY: Final = "its directory is gone"
NOT_WRITABLE: Final = "its directory is not writable"
NOT_OWNED: Final = "only its old owner or root can restore it"
NOT_EMPTY: Final = "the directory has other files"
MOVED: Final = "the file was moved afterwards"
LAST_NAME: Final = "it is the last name of the file"
NO_OTHER_NAME: Final = "the other names of the file are gone"
UNKNOWN_END: Final = "the session ended before it recorded how the change ended"
NO_STATE: Final = "the record does not have the old state: nothing was kept then"
OF_TURN: Final = "an earlier change of its turn has the old content; take back the whole turn"
NO_LONGER: Final = "the old content is no longer kept"
LONG_VALUE: Final = "the attribute is too long to be kept"
REF_MOVED: Final = "the branch was moved afterwards"
MERGED: Final = "the merge has changed files of the checkout without a record of each; take it back with git"


class SourceRefs(Protocol):
    """The refs of the source."""

    def value(self, ref: str) -> str:
        """Return the object id of a ref; "" if it does not exist."""

    def refusal(self, moves: tuple[RefMove, ...]) -> str:
        """Return why refs cannot be moved; "" if they can."""

    def move_back(self, step: UndoStep) -> None:
        """Make a step `publish`. OSError."""


class UndoConflict(Exception):  # noqa: N818 - a result of planning, never shown as an error
    """A change cannot be taken back."""


class UndoRefusal(NamedTuple):
    """A selected change that is not taken back."""

    change: Change
    reason: str


class Plan(NamedTuple):
    """What an undo will do."""

    steps: list[UndoStep]
    taken_back: list[Change]
    """Newest first."""
    refusals: list[UndoRefusal]
    denials: Sequence[Denied] = ()
    """The denials of the policy. Their changes are among `refusals`."""


class Record(NamedTuple):
    """What all changes of a source say of the selected ones."""

    restored: Mapping[int, list[Restoration]]
    keys: Mapping[str, list[str]]
    """See `changes.file_keys`."""
    publishers: Mapping[tuple[str, str], str]
    """See `changes.publishers`."""
    dir_times: Mapping[str, list[tuple[int, str]]]
    """See `changes.ends_by_directory`."""
    attribute_changes: Callable[[], Mapping[str, list[Change]]]
    """See `changes.attribute_changes`. Few plans need it."""

    @classmethod
    def of(cls, changes: Sequence[Change]) -> Self:
        """`changes`: all changes of the source by time."""
        keys = file_keys(changes)
        attributes = cache(partial(attribute_changes, changes, keys))
        return cls(restored_files(changes), keys, publishers(changes), ends_by_directory(changes), attributes)

    def earlier_inos(self, change: Change, state: FileState) -> set[int]:
        """Return the inode numbers that the file had before earlier undos restored it. `state`: that of the change."""
        found: set[int] = set()
        for each in self.restored.get(state.ino, ()):
            if state.kind is Kind.DIRECTORY:  # it has no keys
                is_same = each.ctime <= state.ctime
            else:
                common = set(self.keys.get(change.id, ())).intersection(self.keys.get(each.change, ()))
                is_same = any(key.startswith(f"ino:{state.ino}.") for key in common)
            if is_same:
                found |= each.inos
        return found


def plan(
    source: Path, changes: Sequence[Change], record: Record, images: Images, refs: SourceRefs, judge: Judge | None
) -> Plan:
    """Plan to take back `changes`. `judge`: the policy that permits the steps; None: all are permitted. OSError."""
    newest_first = [change for change in reversed(changes) if change.is_made or change.is_publication]
    bad: dict[str, str] = {}
    denials: list[Denied] = []
    while True:
        planner = _Planner(source, record, images, refs, bad)
        planner.plan(newest_first)
        if planner.bad.keys() <= bad.keys():
            reasons, denied = Replay(source, record.restored, images).run(planner.steps, judge)
            planner.refuse(newest_first, reasons)
            denials += denied
        if planner.bad.keys() <= bad.keys():
            found = [(change, _bad_key(change, record, bad)) for change in newest_first]
            refusals = [UndoRefusal(change, bad[key]) for change, key in found if key]
            taken_back = [change for change, key in found if not key and change.id not in planner.unmade]
            return Plan(planner.steps, taken_back, refusals, denials)
        bad = {**planner.bad, **bad}


def _bad_key(change: Change, record: Record, bad: dict[str, str]) -> str:
    return next((key for key in _keys(change, record) if key in bad), "")


def _keys(change: Change, record: Record) -> list[str]:
    """Return what a change has in common with the other changes of the same file: itself, its inodes, its names.

    The changes of a ref have the ref in common.
    """
    if change.is_publication:
        return [change.id, *(f"ref:{move.ref}" for move in change.ref_updates)]
    names = [f"path:{path}" for path in change.paths] if change.operation in _OF_NAMES else []
    return [change.id, *record.keys.get(change.id, ()), *names]


def _above(path: str) -> str:
    return path.rpartition("/")[0]


def _empty(step: UndoStep) -> None:
    """Let a step restore a file without content, which is written or removed later."""
    step.arguments["size"] = 0
    if step.arguments["image"] == list(MISSING):
        step.arguments["image"] = list(EMPTY)


_UNKNOWN: Final = "?"
_OF_OWNER: Final = ("put", "mkdir", "symlink", "mode", "owner", "times")
"""Steps that set the owner, mode or time of a file."""
_OF_NAMES: Final = (Operation.CREATE_FILE, Operation.DELETE_FILE, Operation.SYMLINK, Operation.LINK, Operation.RENAME)


class _Planner:
    def __init__(
        self,
        source: Path,
        record: Record,
        images: Images,
        refs: SourceRefs,
        bad: dict[str, str],
    ) -> None:
        self._source: Final = source
        self._record: Final = record
        self._tree: Final = SourceTree(source, record.restored)
        self._images: Final = images
        self._refs: Final = refs
        self._values_of_refs: Final[dict[str, str]] = {}
        self._excluded: Final = bad
        self.bad: Final[dict[str, str]] = {}
        """Keys of changes that cannot be taken back, with the reason."""
        self.steps: Final[list[UndoStep]] = []
        self._contents: Final[dict[FileNode, UndoStep]] = {}
        """The last step that writes the content of a file."""
        self._touched: Final[dict[FileNode, int]] = {}
        """Number of the steps that change a file."""
        self._values: Final[dict[FileNode, dict[str, str | None]]] = {}
        """Extended attributes that the steps have set, in hex."""
        self._dirs: Final[dict[FileNode, str]] = {}
        """Directories whose time the steps change, or should change, each with the name of a change."""
        self._without_time: Final[set[FileNode]] = set()
        """Directories that have had other changes of names since: these keep the time that they get."""
        self.unmade: Final[set[str]] = set()
        """Names of publications that moved nothing."""
        self._selected: Final[set[str]] = set()
        """Names of the changes that the plan takes back."""
        self._other_ends: Final[dict[str, list[int]]] = {}
        """Times of directories after changes of names that stay, sorted, by directory."""
        self._change: Change

    def plan(self, newest_first: list[Change]) -> None:
        for change in newest_first:
            if not _bad_key(change, self._record, self._excluded):
                self._selected.add(change.id)
        for change in newest_first:
            if change.id not in self._selected:
                continue
            self._change = change
            try:
                self._take_back(change)
            except UndoConflict as conflict:
                self._refuse(change, str(conflict))
            except OSError as error:  # such as a path that is longer than a system call takes
                hint = "; repeat the undo if it gives a directory its mode back" if error.errno == errno.EACCES else ""
                self._refuse(change, f"the source cannot be read: {error.strerror}{hint}")
        self._set_dir_times()
        self.steps[:] = [step for step in self.steps if step.do]
        missing = {step.change for step in self.steps if step.arguments.get("image") == list(MISSING)}
        for change in newest_first:
            if change.id in missing:
                in_place = change.operation not in (Operation.DELETE_FILE, Operation.RENAME)
                self._refuse(change, change.not_kept or (OF_TURN if in_place else NO_LONGER))

    def _refuse(self, change: Change, reason: str) -> None:
        for key in _keys(change, self._record):
            self.bad.setdefault(key, reason)

    def _take_back(self, change: Change) -> None:
        if change.is_publication:
            self._publication(change)
            return
        if change.path == ".git" or change.path.startswith(".git/"):
            raise UndoConflict("git's own files are never changed; use git")
        if change.outcome is None:
            raise UndoConflict(UNKNOWN_END)
        _INVERSES[Operation(change.operation)](self, change)
        for path, times in change.dir_times() if change.operation in OF_NAMES else ():
            above = self._tree.directory_of(path)
            if above is not None and (times is not None or change.operation != Operation.WRITE_FILE):
                before, after = times or (0, -1)
                end = self._last_other(_above(path), before, after)
                if end == after or end >= change.entry.timestamp.timestamp() * 10**9:
                    self._without_time.add(above)  # another change of the directory, made at the same time, stays
                self._return_time(above, before, after)

    def _last_other(self, directory: str, before: int, after: int) -> int:
        """Return the last time in (before, after] that a change that stays gave to a directory; 0: none."""
        if directory not in self._other_ends:
            ends = self._record.dir_times.get(directory, ())
            self._other_ends[directory] = sorted(end for end, name in ends if name not in self._selected)
        others = self._other_ends[directory]
        found = bisect_right(others, after)
        return others[found - 1] if found and others[found - 1] > before else 0

    def _return_time(self, node: FileNode, before: int, after: int) -> None:
        """Give a directory the time before a change of its names, if it has that after the change."""
        if before != after:
            self._dirs[node] = self._change.id
            if node.mtime == after:
                node.mtime = before
            else:
                self._without_time.add(node)

    def _set_dir_times(self) -> None:
        for path, node in self._tree.directories():
            if node in self._dirs and node not in self._without_time:
                now = {} if node.real is None else {"ino": node.ino, "now": node.disk_mtime}
                self.steps.append(UndoStep("dir_times", path, self._dirs[node], {"mtime": node.mtime, **now}))

    def _step(self, do: str, path: str, node: FileNode, **arguments: Any) -> UndoStep:
        if (
            do in _OF_OWNER
            and os.geteuid()
            and (node.uid != os.geteuid() or node.gid not in (os.getegid(), *os.getgroups()))
        ):
            raise UndoConflict(NOT_OWNED)
        step = UndoStep(do, path, self._change.id, arguments)
        for above in filter(None, map(self._tree.find, step.directories)):
            self._dirs[above] = self._change.id
            self._check_writable(above, NOT_WRITABLE)
        self._touched[node] = self._touched.get(node, 0) + 1
        self.steps.append(step)
        return step

    def _check_writable(self, node: FileNode, reason: str) -> None:
        """Refuse a change in a directory that this process cannot write, unless a step changes the directory first."""
        if node.real is None or node in self._touched:
            return
        if not os.access(self._source / node.real, os.W_OK | os.X_OK):
            raise UndoConflict(reason)

    def refuse(self, changes: Sequence[Change], reasons: Mapping[str, str]) -> None:
        """Refuse the changes with a reason, by name."""
        for change in changes:
            if change.id in reasons:
                self._refuse(change, reasons[change.id])

    def _publication(self, change: Change) -> None:
        """Move the refs of a publication back, all or none."""
        moves = change.ref_updates
        touched = [path for path in touched_paths(change.details) if path != ".git/"]
        if not moves or (touched and change.operation == Operation.MERGE):
            raise UndoConflict(MERGED if moves else NO_STATE)
        values = [self._values_of_refs.get(move.ref, self._refs.value(move.ref)) for move in moves]
        if change.outcome is None and values == [move.old for move in moves]:
            self.unmade.add(change.id)  # the session was killed before it moved them
            return
        if values != [move.new for move in moves]:
            raise UndoConflict(REF_MOVED)
        whole = [RefMove(move.ref, self._refs.value(move.ref), move.old) for move in moves]
        refusal = self._refs.refusal(tuple(move for move in whole if move.old != move.new))
        if refusal:
            raise UndoConflict(refusal)
        self._values_of_refs.update({move.ref: move.old for move in moves})
        publishers = {move.ref: self._record.publishers.get((move.ref, move.old), "") for move in moves}
        updates = [[move.ref, move.new, move.old] for move in moves]
        self.steps.append(
            UndoStep("publish", change.shown_path, change.id, {"updates": updates, "publishers": publishers})
        )

    # -- the inverse of each operation

    def create(self, change: Change) -> None:
        after = self._after(change)
        if change.before is not None:
            self.content(change)
            return
        node = self._file(change.path, after)
        if not node.has_content_of(after):
            raise UndoConflict(CHANGED)
        self._remove(change.path, node)

    def content(self, change: Change) -> None:
        """Take back a change of content, or the replacement of a file by a new one."""
        before, after = self._before(change), self._after(change)
        if before.links == 0:
            return  # the file had no name any more
        has_other_names = before.ino != after.ino and before.links > 1
        if before.kind is not Kind.FILE or after.kind is not Kind.FILE or has_other_names:
            self._replace_other(change, before)
            return
        node = self._file(change.path, after)
        if not node.has_content_of(after):
            raise UndoConflict(CHANGED)
        if (before.size, before.mtime, before.ino) != (after.size, after.mtime, after.ino):
            node.size, node.mtime = before.size, before.mtime
            if before.ino != after.ino:
                node.inos.update({before.ino}, self._record.earlier_inos(change, before))
            self._set_attributes(change.path, node, before, after, steps=False)
            self._write(change, change.path, node)
        self._set_attributes(change.path, node, before, after)

    def _replace_other(self, change: Change, before: FileState) -> None:
        """Put back a symlink, a special file or a file with other names, which was replaced at its path."""
        after = self._after(change)
        node = self._file(change.path, after)
        if not node.has_content_of(after):
            raise UndoConflict(CHANGED)
        self._remove(change.path, node)
        self._restore(change, change.path, before)

    def delete(self, change: Change) -> None:
        before = self._before(change)
        self._check_free(change.path)
        self._restore(change, change.path, before)

    def rename(self, change: Change) -> None:
        to = change.details.get("to")
        if not isinstance(to, str):
            self.create(change)  # a staged file was published
            return
        before = change.moved or self._before(change)
        if change.replaced is not None and change.replaced.ino == before.ino:
            return  # two names of one file: rename(2) does nothing
        node = self._tree.find(to)
        if change.details.get("exchange"):
            self._exchange(change, before, node, to)
            return
        if node is None or not node.is_file_of(before):
            raise UndoConflict(MOVED)
        self._check_free(change.path)
        if node.is_dir and _above(to) != _above(change.path):
            self._check_writable(node, "the directory is not writable")
        self._step("rename", to, node, to=change.path)
        self._tree.remove(to)
        self._tree.put(change.path, node)
        if change.replaced is not None:
            self._restore(change, to, change.replaced)

    def _exchange(self, change: Change, before: FileState, node: FileNode | None, to: str) -> None:
        other = self._tree.find(change.path)
        replaced = change.replaced
        if node is None or other is None or replaced is None or not node.is_file_of(before):
            raise UndoConflict(MOVED)
        if not other.is_file_of(replaced._replace(ctime=before.ctime)):  # as `Change.moved`
            raise UndoConflict(MOVED)
        self._step("exchange", to, node, to=change.path)
        self._tree.put(change.path, node)
        self._tree.put(to, other)
        self._touched[other] = self._touched.get(other, 0) + 1

    def link(self, change: Change) -> None:
        state = change.after or self._before(change)
        node = self._tree.find(change.path)
        if node is None or not node.is_file_of(state):
            raise UndoConflict(CHANGED if node is not None else GONE)
        if node.links < 2:
            if change.after is None or change.before is not None:
                raise UndoConflict(LAST_NAME)
            self.create(change)  # a staged file was published
            return
        self._remove(change.path, node)

    def symlink(self, change: Change) -> None:
        node = self._tree.find(change.path)
        if node is None or node.target != change.details.get("target"):
            raise UndoConflict(CHANGED if node is not None else GONE)
        if change.after is not None and not node.has_content_of(change.after):
            raise UndoConflict(CHANGED)
        self._remove(change.path, node)
        if change.before is not None:
            self._restore(change, change.path, change.before)

    def mkdir(self, change: Change) -> None:
        node = self._tree.find(change.path)
        if node is None or not node.is_dir:
            raise UndoConflict(GONE)
        if not self._tree.is_empty(node):
            raise UndoConflict(NOT_EMPTY)
        self._step("rmdir", change.path, node)
        self._tree.remove(change.path)

    def rmdir(self, change: Change) -> None:
        before = self._before(change)
        self._check_free(change.path)
        self._restore(change, change.path, before)

    def mknod(self, change: Change) -> None:
        node = self._tree.find(change.path)
        if node is None or node.kind in (Kind.FILE, Kind.DIRECTORY, Kind.SYMLINK):
            raise UndoConflict(CHANGED if node is not None else GONE)
        self._remove(change.path, node)

    def attributes(self, change: Change) -> None:
        before, after = self._before(change), self._after(change)
        if before.links == 0:
            return
        if before._replace(links=after.links, ctime=after.ctime) == after:
            return  # the file had the attributes
        if before.size != after.size and before.kind is Kind.FILE:
            self.content(change)
            return
        self._set_attributes(change.path, self._file(change.path, after), before, after)

    def xattr(self, change: Change) -> None:
        before, after = self._before(change), self._after(change)
        if before.links == 0:
            return
        if OLD_VALUE not in change.details:
            raise UndoConflict(LONG_VALUE)
        node, name = self._file(change.path, after), str(change.details.get("name"))
        if self._value(node, name) not in (change.details[NEW_VALUE], _UNKNOWN):
            raise UndoConflict(CHANGED)
        self._values.setdefault(node, {})[name] = change.details[OLD_VALUE]
        self._step("xattr", change.path, node, name=name, value=change.details[OLD_VALUE])
        self._set_attributes(change.path, node, before, after)

    def _value(self, node: FileNode, name: str) -> str | None:
        if name in self._values.get(node, ()):
            return self._values[node][name]
        written = self._contents.get(node)
        if node.real is None or (written is not None and written.arguments["xattrs"] is not None):
            return _UNKNOWN  # it comes from the store
        try:
            return os.getxattr(self._source / node.real, name, follow_symlinks=False).hex()
        except OSError:
            return None

    # -- parts

    def _before(self, change: Change) -> FileState:
        if change.before is None:
            raise UndoConflict(NO_STATE)
        return change.before

    def _after(self, change: Change) -> FileState:
        if change.after is None:
            raise UndoConflict(NO_STATE)
        return change.after

    def _file(self, path: str, state: FileState) -> FileNode:
        node = self._tree.find(path)
        if node is None or not node.is_file_of(state):
            raise UndoConflict(CHANGED if node is not None else GONE)
        return node

    def _check_free(self, path: str) -> None:
        if self._tree.find(path) is not None:
            raise UndoConflict(TAKEN)
        if self._tree.directory_of(path) is None:
            raise UndoConflict(NO_DIRECTORY)

    def _remove(self, path: str, node: FileNode) -> None:
        node.links -= 1
        pending = self._contents.get(node)
        if pending is not None and not node.links:
            if not pending.arguments["new"]:
                self._drop(node, pending)  # the content would be written and then removed
            elif self._touched[node] == 1:
                self._drop(node, pending)
                self._tree.remove(path)
                return
            else:
                _empty(pending)
        self._step("remove", path, node)
        self._tree.remove(path)

    def _drop(self, node: FileNode, step: UndoStep) -> None:
        step.do = ""
        self._touched[node] -= 1
        if not self._touched[node]:
            del self._touched[node]

    def _restore(self, change: Change, path: str, state: FileState) -> None:
        """Put back a file, directory or symlink that has no name any more, or lost this one."""
        attributes = {"mode": state.permissions, "uid": state.uid, "gid": state.gid, "mtime": state.mtime}
        node = FileNode(state)
        node.inos.update(self._record.earlier_inos(change, state))
        if state.kind in (Kind.FILE, Kind.SYMLINK) and state.links > 1:
            other = self._tree.path_of(state)
            node = self._tree.find(other) if other is not None else None  # type: ignore[assignment]
            if other is None or node is None:
                raise UndoConflict(NO_OTHER_NAME)
            node.links += 1
            self._step("link", path, node, of=other)
        elif state.kind is Kind.DIRECTORY:
            self._step("mkdir", path, node, **attributes, xattrs=change.details.get(XATTRS, {}))
        elif state.kind is Kind.SYMLINK:
            node.target = str(change.details.get(OLD_TARGET))
            self._step("symlink", path, node, **attributes, target=node.target)
        elif state.kind is Kind.FILE:
            self._write(change, path, node, is_new=True)
        else:
            raise UndoConflict("a special file is not kept")
        self._tree.put(path, node)

    def _write(self, change: Change, path: str, node: FileNode, *, is_new: bool = False) -> None:
        """Give a file its old content. Of several contents of an existing file only the oldest is written."""
        image = Image(change.entry.session, change.entry.seq)
        if change.not_kept or not self._images.has(image, node.size):
            image = MISSING if node.size or change.not_kept else EMPTY
        pending = self._contents.get(node)
        in_place = not is_new and change.before is not None and change.after is not None
        in_place = in_place and change.before.ino == change.after.ino  # type: ignore[union-attr]
        xattrs = None if in_place else list(image)
        if not in_place:
            self._values.pop(node, None)  # these are the attributes of the replacement
        if pending is not None and (not pending.arguments["new"] or self._touched[node] == 1):
            is_new = bool(pending.arguments["new"])
            xattrs = pending.arguments["xattrs"] if in_place else xattrs
            self._drop(node, pending)
        elif pending is not None:
            _empty(pending)
        self._contents[node] = self._step(
            "put",
            path,
            node,
            image=list(image),
            mode=node.mode & 0o7777,
            uid=node.uid,
            gid=node.gid,
            mtime=node.mtime,
            size=node.size,
            new=is_new,
            xattrs=xattrs,
            values={} if xattrs is None else dict(self._values.get(node, {})),
        )

    def _is_set_later(self, node: FileNode, attribute: Callable[[FileState], object]) -> bool:
        """Return whether a later change that stays has set an attribute of the file of the present change."""
        if node.is_dir:
            return True  # nothing else gives a directory the old value
        change, record = self._change, self._record
        found = (each for key in record.keys.get(change.id, ()) for each in record.attribute_changes().get(key, ()))
        later = (each for each in found if moment_of_change(each) > moment_of_change(change))
        return any(
            attribute(self._before(each)) != attribute(self._after(each))
            for each in later
            if each.id not in self._selected
        )

    def _set_attributes(
        self, path: str, node: FileNode, before: FileState, after: FileState, *, steps: bool = True
    ) -> None:
        """Set the mode, owner and time that a change has set to their old values.

        The file may already have the old values, from the restored content or from a batch of writes. It is a conflict
        if another change gave it these values.
        """
        if (before.uid, before.gid) != (after.uid, after.gid):
            if (node.uid, node.gid) == (after.uid, after.gid):
                node.uid, node.gid = before.uid, before.gid
                if steps:
                    self._step("owner", path, node, uid=before.uid, gid=before.gid)
            elif (node.uid, node.gid) != (before.uid, before.gid) or self._is_set_later(node, lambda state: state[1:3]):
                raise UndoConflict("the owner was changed afterwards")
        if before.permissions != after.permissions:
            if node.mode & 0o7777 == after.permissions:
                node.mode = before.mode
                if steps:
                    self._step("mode", path, node, mode=before.permissions)
            elif node.mode & 0o7777 != before.permissions or self._is_set_later(node, lambda state: state.mode):
                raise UndoConflict("the mode was changed afterwards")
        if node.is_dir:
            if self._change.operation == Operation.SET_TIMES and node.mtime != after.mtime != before.mtime:
                raise UndoConflict("the time was changed afterwards")
            self._return_time(node, before.mtime, after.mtime)
        elif steps and before.mtime != after.mtime and before.size == after.size:
            is_only_time = self._change.operation == Operation.SET_TIMES
            if node.mtime == after.mtime:
                node.mtime = before.mtime
                self._step("times", path, node, mtime=before.mtime)
            elif node.mtime != before.mtime or (is_only_time and self._is_set_later(node, lambda state: state.mtime)):
                raise UndoConflict("the time was changed afterwards")


_INVERSES: Final[dict[Operation, Callable[[_Planner, Change], None]]] = {
    Operation.CREATE_FILE: _Planner.create,
    Operation.WRITE_FILE: lambda planner, change: (
        planner.content(change) if change.before is not None else planner.create(change)
    ),
    Operation.TRUNCATE: _Planner.attributes,
    Operation.ALLOCATE: _Planner.content,
    Operation.COPY_RANGE: _Planner.content,
    Operation.DELETE_FILE: _Planner.delete,
    Operation.RENAME: _Planner.rename,
    Operation.LINK: _Planner.link,
    Operation.SYMLINK: _Planner.symlink,
    Operation.MKDIR: _Planner.mkdir,
    Operation.RMDIR: _Planner.rmdir,
    Operation.MKNOD: lambda planner, change: (
        planner.create(change) if change.after is not None and change.after.kind is Kind.FILE else planner.mknod(change)
    ),
    Operation.SET_MODE: _Planner.attributes,
    Operation.SET_OWNER: _Planner.attributes,
    Operation.SET_TIMES: _Planner.attributes,
    Operation.SET_XATTR: _Planner.xattr,
    Operation.REMOVE_XATTR: _Planner.xattr,
}
