"""The changes that can be taken back, as the trails record them."""

from __future__ import annotations

import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from bonobofs.audit.entry import (
    AFTER,
    BEFORE,
    DIR_TIMES,
    LAYER,
    LOSS,
    NOT_KEPT,
    REPLACED,
    TAKEN_BACK,
    TO_DIR_TIMES,
    TURN,
    UNDO,
    AuditEntry,
    is_effective,
)
from bonobofs.audit.reader import entries_from
from bonobofs.audit.trail_storage import stat_trail
from bonobofs.errors import UsageError
from bonobofs.policy.request import CHANGES, Kind, Operation, kind_of
from bonobofs.system.paths import is_within

ID: Final = re.compile(r"([0-9a-f-]+):([0-9]{1,18})")
"""Id of a change or turn: the first digits of the session's UUID, and the number."""
_SHORT: Final = 8
_KEEPING: Final = (Operation.RENAME, Operation.LINK, Operation.SET_TIMES)
"""Operations of an undo that give no file a new inode."""


class FileState(NamedTuple):
    """What the record keeps of a file (`audit.entry.state_text`). `mtime` and `ctime` are in nanoseconds."""

    mode: int
    uid: int
    gid: int
    mtime: int
    size: int
    ino: int
    links: int
    ctime: int

    @classmethod
    def parse(cls, text: object) -> Self | None:
        """Parse a state; None: the record has none."""
        try:
            return cls(*map(int, str(text).split(" "))) if text is not None else None
        except (TypeError, ValueError):
            return None

    @property
    def kind(self) -> Kind:
        return kind_of(self.mode)

    @property
    def permissions(self) -> int:
        return stat.S_IMODE(self.mode)


class RefMove(NamedTuple):
    """A move of a ref from one object id to another; "": the ref does not exist."""

    ref: str
    old: str
    new: str


class Change(NamedTuple):
    """An intent of a trail, with its outcome."""

    entry: AuditEntry
    outcome: AuditEntry | None
    turn: int
    """`seq` of the entry that began its turn; 0: none."""
    turn_name: str = ""
    loss: str = ""
    """Why the kept content was lost later; "" if it was not."""
    is_taken_back: bool = False
    """Whether it is taken back now. The undo of an undo makes it stand again. `all_changes` sets it."""

    @property
    def id(self) -> str:
        """How commands name the change."""
        return change_id(self.entry.session, self.entry.seq)

    @property
    def path(self) -> str:
        return self.entry.path

    @property
    def operation(self) -> str:
        return self.entry.operation

    @property
    def details(self) -> dict[str, Any]:
        return self.entry.details

    @property
    def result(self) -> str:
        """`allowed`, `denied` or `error`."""
        return self.entry.result if self.outcome is None else self.outcome.result

    @property
    def before(self) -> FileState | None:
        """The file at the path before the change."""
        return FileState.parse(self.details.get(BEFORE))

    @property
    def after(self) -> FileState | None:
        """The file at the path after the change, if the outcome says it."""
        return None if self.outcome is None else FileState.parse(self.outcome.details.get(AFTER))

    @property
    def moved(self) -> FileState | None:
        """The file that a rename moved. Its `ctime` is the end of the rename: overlayfs may copy the file up for it."""
        before = self.before
        if before is None or self.outcome is None:
            return before
        return before._replace(ctime=max(before.ctime, int(self.outcome.timestamp.timestamp() * 10**9)))

    @property
    def replaced(self) -> FileState | None:
        """The file at the new path of a rename before it."""
        return FileState.parse(self.details.get(REPLACED))

    def dir_times(self) -> list[tuple[str, tuple[int, int] | None]]:
        """Return the paths whose names the change has changed, each with the times of its directory before and after.

        None: the record does not have them.
        """
        details = {} if self.outcome is None else self.outcome.details
        keys = (DIR_TIMES, TO_DIR_TIMES) if TO_DIR_TIMES in details else (DIR_TIMES,)
        return [(path, _times(details.get(key))) for key, path in zip(keys, self.paths, strict=False)]

    @property
    def not_kept(self) -> str:
        """Why the old content was not kept; "" if it was, or there was none."""
        return self.loss or ("" if self.outcome is None else str(self.outcome.details.get(NOT_KEPT, "")))

    @property
    def paths(self) -> list[str]:
        """The paths whose files the change made, changed or removed."""
        to = self.details.get("to")
        return [self.path, to] if isinstance(to, str) else [self.path]

    def new_path_of(self, path: str) -> str | None:
        """Return the path to which a rename moved the file of a path; None: it moved no such file."""
        to = self.details.get("to")
        if self.operation != Operation.RENAME or not isinstance(to, str):
            return None
        if path == self.path:
            return to
        return self.path if path == to and self.details.get("exchange") else None

    @property
    def bytes(self) -> int:
        """Number of bytes written."""
        return self.entry.bytes if self.outcome is None else self.outcome.bytes

    @property
    def is_publication(self) -> bool:
        """Whether it has moved refs of the source."""
        is_of_git = self.entry.kind == "intent" and self.entry.guard == "git"
        return is_of_git and self.result == "allowed" and "updates" in self.details

    @property
    def ref_updates(self) -> list[RefMove]:
        """The moves of a publication; []: the record does not have all of them."""
        try:
            return [RefMove(each["ref"], each["old"], each["new"]) for each in self.details["updates"]]
        except (KeyError, TypeError):
            return []

    @property
    def shown_path(self) -> str:
        """The path as reports show it: of a publication those of the refs."""
        if not self.is_publication:
            return self.path
        return ", ".join(f".git/{move.ref}" for move in self.ref_updates) or ".git"

    @property
    def is_made(self) -> bool:
        """Whether it is a change of a file of the source that was made, or may have been made."""
        entry = self.entry
        return (
            entry.kind == "intent"
            and is_effective(self.outcome or entry)
            and entry.guard == "file"
            and entry.operation in CHANGES
            and LAYER not in entry.details
        )


def _times(text: object) -> tuple[int, int] | None:
    try:
        before, after = map(int, str(text).split(" "))
    except ValueError:
        return None
    return before, after


def change_id(session: str, seq: int) -> str:
    """Return how commands name a change or a turn: 8 digits of the session's UUID, a colon, the number."""
    return f"{session[:_SHORT]}:{seq}"


def parse_id(text: str, sessions: Iterable[str]) -> tuple[str, int]:
    """Return session and number of a change or turn. UsageError: it is malformed, or no session has these digits."""
    id_ = ID.fullmatch(text)
    if id_ is None:
        raise UsageError(f"{text[:80]!r} is no id; `bonobofs history PATH` shows ids such as 3d1fbd0c:17")
    prefix, number = id_.groups()
    found = [session for session in sessions if session.startswith(prefix)]
    if len(found) != 1:
        few = "more than one session begins" if found else "no session of this source begins"
        raise UsageError(f"{text!r}: {few} with {prefix!r}; see `bonobofs status --all`")
    return found[0], int(number)


class Selection(NamedTuple):
    """Which changes to take back or to show. Empty fields select all."""

    session: str | None = None
    change: tuple[str, int] | None = None
    turn: tuple[str, int] | None = None
    since: datetime | None = None
    path: str | None = None
    agent: str | None = None
    """Label or UUID."""

    def __contains__(self, change: object) -> bool:
        """Return whether a `Change` is selected."""
        assert isinstance(change, Change)
        entry = change.entry
        return (
            (self.session is None or entry.session == self.session)
            and (self.change is None or (entry.session, entry.seq) == self.change)
            and (self.turn is None or (entry.session, change.turn) == self.turn)
            and (self.since is None or entry.timestamp >= self.since)
            and (self.path is None or any(is_within(path, self.path) for path in change.paths))
            and (self.agent is None or self.agent in (entry.agent, entry.agent_id))
        )


_UndoEnd = tuple[datetime, list[str]]
"""When an undo has ended, and the names of the changes that it took back."""


def changes_of(trail: Path) -> list[Change]:
    """Return the intents of a trail with their outcomes, in the order of their ends. OSError.

    Intents without an outcome come last. Events, alerts and counted denials are left out.
    """
    return _read(trail)[0]


def _read(trail: Path) -> tuple[list[Change], list[_UndoEnd]]:
    ended: list[Change] = []
    open_intents: dict[int, Change] = {}
    losses: dict[object, object] = {}
    undos: list[_UndoEnd] = []
    turn, name = 0, ""
    for _, entry in entries_from(trail, 0):
        if entry.kind == "intent":
            change = Change(entry, None, turn, name)
            if entry.result == "denied":
                ended.append(change)
            else:
                open_intents[entry.seq] = change
        elif entry.kind == "outcome":
            number = entry.details.get("intent")
            intent = open_intents.pop(number, None) if isinstance(number, int) else None
            if intent is not None:
                is_known = entry.details.get("end") != "unknown"  # it is not, if the companion was killed
                ended.append(intent._replace(outcome=entry if is_known else None))
        elif entry.operation == TURN:
            turn, name = entry.seq, str(entry.details.get("name", ""))
        elif entry.operation == LOSS:
            losses[entry.details.get("change")] = entry.details.get(NOT_KEPT)
        elif entry.operation == TAKEN_BACK:
            undos.append((entry.timestamp, list(map(str, entry.details.get("changes", ())))))
    found = [*ended, *open_intents.values()]
    if losses:
        found = [change._replace(loss=str(losses.get(change.entry.seq, ""))) for change in found]
    return found, undos


def publishers(changes: Iterable[Change]) -> dict[tuple[str, str], str]:
    """Return the UUIDs of the agents that published values of refs, by ref and value. `changes` are all by time."""
    return {
        (move.ref, move.new): change.entry.agent_id
        for change in changes
        if change.is_publication and UNDO not in change.details
        for move in change.ref_updates
    }


def ends_by_directory(changes: Sequence[Change]) -> dict[str, list[tuple[int, str]]]:
    """Return by directory the times that changes of its names have given it, each with the id of the change.

    Leaves out the changes that undos have made, and those that are taken back.
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for change in _standing(changes):
        if change.is_made:
            for path, times in change.dir_times():
                if times is not None:
                    found.setdefault(path.rpartition("/")[0], []).append((times[1], change.id))
    return found


def attribute_changes(changes: Sequence[Change], keys: Mapping[str, list[str]]) -> dict[str, list[Change]]:
    """Return the changes that have set the mode, owner or time of a file, by the keys of the file (`file_keys`).

    Leaves out the changes that undos have made, and those that are taken back.
    """
    found: dict[str, list[Change]] = {}
    for change in _standing(changes):
        before, after = change.before, change.after
        if before is not None and after is not None and before[:4] != after[:4]:
            for key in keys.get(change.id, ()):
                found.setdefault(key, []).append(change)
    return found


def _standing(changes: Sequence[Change]) -> Iterator[Change]:
    """Yield the changes that are not of an undo, and that no undo has taken back."""
    return (change for change in changes if UNDO not in change.details and not change.is_taken_back)


class Restoration(NamedTuple):
    """An undo has given a file a new inode."""

    ctime: int
    """Change time of the new inode then, in nanoseconds. A file that is born later has only reused its number."""
    inos: set[int]
    """The inode numbers that the file had before."""
    change: str
    """Id of the undo's change."""


def restored_files(changes: Iterable[Change]) -> dict[int, list[Restoration]]:
    """Return what undos have restored, by the new inode number."""
    found: dict[int, list[Restoration]] = {}
    by_id: dict[str, Change] = {}
    for change in changes:
        by_id[change.id] = change
        original = by_id.get(str(change.details.get(UNDO)))
        if original is None or change.after is None or change.operation in _KEEPING:
            continue
        old = original.replaced if change.path == original.details.get("to") else original.before
        if old is not None and old.kind is change.after.kind:
            earlier = (restoration.inos for restoration in found.get(old.ino, ()))
            restoration = Restoration(change.after.ctime, {old.ino}.union(*earlier), change.id)
            found.setdefault(change.after.ino, []).append(restoration)
    return found


def file_keys(changes: Iterable[Change]) -> dict[str, list[str]]:
    """Return the keys of the files of each change, by the change's id. `changes` are all changes of a source by time.

    Two changes of the same file have a key in common. A key is an inode number with a counter. The counter grows when
    the file with this number ends, because the kernel then reuses the number. Directories and files without a name
    have no key.
    """
    keys: dict[str, list[str]] = {}
    ended: Counter[str] = Counter()
    """Number of recorded files that have ended, by inode number."""
    for change in changes:
        if not change.is_made:
            continue
        details = change.details
        before, replaced = _Inode.parse(details.get(BEFORE)), _Inode.parse(details.get(REPLACED))
        after = None if change.outcome is None else _Inode.parse(change.outcome.details.get(AFTER))
        moves = change.operation == Operation.RENAME and isinstance(details.get("to"), str)
        is_same = before is not None and after is not None and before.number == after.number
        is_link = change.operation == Operation.LINK and after is not None and after.links != "1"
        if after is not None and not (moves or is_same or is_link):
            ended[after.number] += 1  # a new file: an earlier one of this number has ended, recorded or not
        named = [inode for inode in (before, after, replaced) if inode is not None and inode.links != "0"]
        keys[change.id] = [f"ino:{each.number}.{ended[each.number]}" for each in named if not each.is_dir]
        if moves:
            lost = None if details.get("exchange") or replaced == before else replaced
        else:
            lost = before if change.operation == Operation.DELETE_FILE or not (after is None or is_same) else None
        if lost is not None and lost.links == "1":
            ended[lost.number] += 1
    return keys


class _Inode(NamedTuple):
    """What `file_keys` needs of a `FileState`, which takes four times as long to parse."""

    number: str
    links: str
    is_dir: bool

    @classmethod
    def parse(cls, text: object) -> Self | None:
        fields = text.split(" ") if isinstance(text, str) else []
        if len(fields) != len(FileState._fields) or not fields[0].isdecimal():
            return None
        return cls(fields[5], fields[6], stat.S_ISDIR(int(fields[0])))


def all_changes(trails: Iterable[Path], since: datetime | None = None) -> list[Change]:
    """Return the changes of several trails by time. Leaves out trails that ended before `since`."""
    found: list[Change] = []
    undos: list[_UndoEnd] = []
    for trail in trails:
        try:
            if since is None or stat_trail(trail).st_mtime >= since.timestamp():
                changes, ended = _read(trail)
                found += changes
                undos += ended
        except FileNotFoundError:
            continue  # pruned
    taken = _taken_back(found, sorted(undos))
    found = [change._replace(is_taken_back=True) if change.id in taken else change for change in found]
    return sorted(found, key=moment_of_change)


def _taken_back(changes: Sequence[Change], undos: Sequence[_UndoEnd]) -> set[str]:
    """Return the ids of the changes that are taken back now. `undos` are by time.

    An undo makes changes itself, and each has the id of the change that it takes back. If a later undo takes back such
    a change, the original change stands again.

    A change of an undo may restore a content that several changes have replaced one after the other. It has the id of
    one of them. The others stand again when all changes of that undo are taken back.
    """
    own = {change.id: change for change in changes if UNDO in change.details} if undos else {}
    originals = {name: str(change.details[UNDO]) for name, change in own.items()}
    taken: set[str] = set()

    def mark(name: str | None, *, is_taken: bool) -> None:
        while name is not None:
            (taken.add if is_taken else taken.discard)(name)
            name, is_taken = originals.get(name), not is_taken

    earlier: list[tuple[set[str], set[str]]] = []
    for moment, names in undos:
        were_taken = [steps <= taken for _, steps in earlier]
        for name in names:
            mark(name, is_taken=True)
        for (others, steps), was_taken in zip(earlier, were_taken, strict=True):
            if (steps <= taken) != was_taken:
                for name in others:
                    mark(name, is_taken=was_taken)
        listed = set(names)
        made = (name for name, of in originals.items() if of in listed and own[name].entry.timestamp <= moment)
        steps = set(made).difference(*(steps for _, steps in earlier))
        earlier.append((listed - {originals[name] for name in steps}, steps))
    return taken


def moment_of_change(change: Change) -> tuple[datetime, int]:
    """Return the key of the order by time."""
    return change.entry.timestamp, change.entry.seq
