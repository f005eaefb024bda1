"""What changes behind the mount: told apart from the mount's own effects, and told to the kernel.

The watcher names what may have changed; it cannot know who did it. So what lies below is compared with what the kernel
was last told: a node remembers the change time and size of which the kernel knows, and for a while it is remembered
where the mount itself has made names lead, and what it knew of files that the kernel has forgotten since. What is as it
was told is an effect of the mount, and nothing follows. All else is foreign, in doubt too: the kernel is made to look
again, and the change is given on as one that the mount did not make.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from time import time_ns
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from bonobofs.fuse.fd_cache import FdCache
from bonobofs.fuse.inode_table import InodeTable, Node
from bonobofs.system import watcher_events
from bonobofs.system.watcher_events import BEGAN, GONE, MADE, MODIFIED, reachable

if TYPE_CHECKING:
    from bonobofs.fuse.mount_context import Notifications

UNKNOWN: Final = -1
"""Of a node: the kernel has nothing that could be wrong. Of a directory: the mount has changed names in it since."""

_REMEMBERED: Final = 20_000
"""Own effects that are remembered at least. More changes than inotify queues by default cannot be on their way."""
_MODIFICATION: Final = (1 << 62) - 1
_MARGIN: Final = 10_000_000_000
"""Nanoseconds. Twice as long as the watcher may keep to itself that a file was closed."""
_REPLACED: Final = 4096
"""Names that were made or replaced behind the mount, of which the latest are known."""
_SECONDS_AT_ONCE: Final = 0.01


def fingerprint_of(st: os.stat_result) -> int:
    """Change time and size in one number, which is what a node remembers."""
    return st.st_size << 62 | st.st_ctime_ns


def fingerprint_after_rename(st: os.stat_result) -> int:
    """What a node remembers once the mount has changed its names, when it was as `st` says.

    Its change time is another one then, which is not looked up: what was written in it is as it was.
    """
    return -2 - (st.st_size << 62 | st.st_mtime_ns & _MODIFICATION)


class OwnEffects:
    """What the mount itself has done, as far back as may matter."""

    def __init__(self) -> None:
        self._names: Final[_Recent[tuple[int, bytes]]] = _Recent()
        self._fingerprints: Final[_Recent[int]] = _Recent()
        self._rotated = time_ns()

    def expire(self, since: int) -> None:
        """Nobody will ask any more of what was done a good while before `since`, in nanoseconds since 1970."""
        if since > self._rotated + _MARGIN:
            self._names.rotate()
            self._fingerprints.rotate()
            self._rotated = time_ns()

    def note_name(self, directory: int, name: bytes, ino: int) -> None:
        """The mount has made this name, in the directory of this inode number, lead there; 0: to nothing."""
        self._names.put((directory, name), ino)

    def made_to_lead(self, directory: int, name: bytes) -> int:
        """Where the mount has made this name lead lately; -1: it has not changed it."""
        return self._names.get((directory, name))

    def note_fingerprint(self, ino: int, known: int) -> None:
        """The kernel has forgotten the node of this inode number, and had been told this of it."""
        self._fingerprints.put(ino, known)

    def fingerprint(self, ino: int) -> int:
        """What the kernel had been told of a node that it has forgotten since; UNTOLD where that is not known."""
        return self._fingerprints.get(ino)

    def note_attributes(self, st: os.stat_result) -> None:
        """The mount has changed attributes of this directory."""
        self.note_name(st.st_ino, b"", _attributes(st))

    def has_attributes(self, st: os.stat_result) -> bool:
        """Whether the directory's attributes are those that the mount gave it lately."""
        return self.made_to_lead(st.st_ino, b"") == _attributes(st)


Key = TypeVar("Key", tuple[int, bytes], int)


class _Recent(Generic[Key]):
    """A map of what was put since the turn before the last, and of at most the last two times _REMEMBERED."""

    def __init__(self) -> None:
        self._new: dict[Key, int] = {}
        self._old: dict[Key, int] = {}

    def put(self, key: Key, value: int) -> None:
        if len(self._new) >= _REMEMBERED:
            self.rotate()
        self._new[key] = value

    def rotate(self) -> None:
        """Forget what was put before the last turn."""
        self._old, self._new = self._new, {}

    def get(self, key: Key) -> int:
        """The value; -1 where there is none."""
        found = self._new.get(key)
        return self._old.get(key, -1) if found is None else found


def _attributes(st: os.stat_result) -> int:
    return st.st_mode << 64 | st.st_uid << 32 | st.st_gid


class Suspect(NamedTuple):
    """Something that was changed, and not through this mount."""

    path: str
    kinds: int
    size: int
    """Bytes that a regular file holds now; -1 for all else, -2 where nothing is there."""


class ExternalChanges:
    """Compares, tells the kernel, and collects what the mount did not do. Used by the thread that serves."""

    def __init__(self, inodes: InodeTable, source: FdCache, notifications: Notifications) -> None:
        self.own_effects: Final = OwnEffects()
        self.watched = False
        """Somebody judges what is found."""
        self.own: Final[dict[int, str]] = {}
        """Paths of the files whose content threads change for the mount, by inode number."""
        self._notifications: Final = notifications
        self._inodes: Final = inodes
        self._source: Final = source
        self._suspects: dict[str, Suspect] = {}
        self._to_compare: list[Node] = []
        """Nodes that the kernel is to look at again, and that are to be compared; the last comes first."""
        self._invalidates_names = False
        """Whether the kernel is told of their names one by one."""
        self._invalidates_later = False
        """Whether the kernel is still to be told of them."""
        self._replaced: dict[tuple[int, bytes], None] = {}
        self.since = time.time_ns()
        """What has changed before this time, in nanoseconds since 1970, the watcher has told."""

    # -- what the handlers say

    def on_difference(self, node: Node, st: os.stat_result) -> None:
        """The node is not as the kernel was last told: somebody else has changed it."""
        self._notifications.inode(node.id, 0, 0)
        if not node.is_dir and self.watched:
            self._add_suspect(self._inodes.path(node), MODIFIED, st)

    def check_first_lookup(self, node: Node, parent: Node, name: bytes, st: os.stat_result) -> None:
        """The kernel is about to be told of a file that it does not know, and that was changed a moment ago.

        What the watcher is about to say of it will find it as it was told. So if somebody else changed it, that is
        said here.
        """
        if not self.watched or node.layer or node.is_dir:
            return
        known = self.own_effects.fingerprint(st.st_ino)
        if known == UNKNOWN:
            if self.own_effects.made_to_lead(parent.ino, name) != st.st_ino:
                self._add_suspect(self._inodes.path(node), MODIFIED, st)
        elif known not in (fingerprint_of(st), fingerprint_after_rename(st)):
            self._add_suspect(self._inodes.path(node), MODIFIED, st)

    def may_be_replaced(self, parent: Node, name: bytes, st: os.stat_result) -> bool:
        """Whether this regular file may soon be replaced behind the mount, as its name was before or just now."""
        if parent.layer or not stat.S_ISREG(st.st_mode):
            return False
        return st.st_ctime_ns >= self.since or (parent.ino, name) in self._replaced

    # -- what the watcher says

    def compare_changes(self, body: bytes) -> None:
        """Look at what may have changed; `body` is a message of the form of `state.changes`."""
        self.since = watcher_events.since(body)
        for ino, path, name, kinds in watcher_events.decode(body):
            self._compare(ino, path, name, kinds)
        self.own_effects.expire(self.since)

    def _compare(self, ino: int, path: bytes, name: bytes, kinds: int) -> None:
        if kinds == GONE and self.own_effects.made_to_lead(ino, name) == 0:
            return  # the mount has removed it, or moved it away, and nothing has come there since
        directory = self._inodes.find(ino)
        st = self._stat_name(directory, path, name)
        there = st.st_ino if st is not None else 0
        if kinds & (MADE | GONE) and self.own_effects.made_to_lead(ino, name) != there:
            self.own_effects.note_name(ino, name, there)
            self._compare_name(directory, path, name, kinds, st)
        if st is None:
            return
        node = self._inodes.find(there)
        known = self.own_effects.fingerprint(there) if node is None else node.fingerprint
        if known == fingerprint_of(st):
            return
        if known < UNKNOWN and known == fingerprint_after_rename(st):
            self._remember(node, st)
            return
        if node is not None and node.is_dir:
            self._compare_directory(node, known, st, self._text(path, name), kinds)
            return
        if stat.S_ISDIR(st.st_mode):
            if kinds & MODIFIED and not self.own_effects.has_attributes(st):
                self._add_suspect(self._text(path, name), MODIFIED, st)
            return
        if node is None and st.st_ctime_ns < self.since:
            return  # it was only opened for writing, or its directory came here
        if node is not None:
            self._notifications.inode(node.id, 0, 0)
        self._remember(node, st)
        self._add_suspect(self._text(path, name), kinds & (MADE | BEGAN) | MODIFIED, st)

    def accept_own_change(self, path: str) -> None:
        """The session's own companion has changed what this name leads to: the kernel is to look again."""
        above, _, name = os.fsencode(path).rpartition(b"/")
        try:
            ino = self._source.stat_below(above or b".").st_ino
        except OSError:
            return
        directory = self._inodes.find(ino)
        st = self._stat_name(None, above, name)
        there = st.st_ino if st is not None else 0
        self.own_effects.note_name(ino, name, there)
        node = self._inodes.find(there) if st is not None else None
        if directory is not None:
            # A name that leads where it led is let be: whoever stands in that directory would stand nowhere.
            if node is None or node.parent is not directory or node.name != name:
                self._notifications.entry(directory.id, name)
            self._notifications.inode(directory.id, 0, 0)
            directory.fingerprint = UNKNOWN
        if st is not None:
            if node is not None:
                self._notifications.inode(node.id, 0, 0)
            self._remember(node, st)

    def _remember(self, node: Node | None, st: os.stat_result) -> None:
        if node is not None:
            self._update_fingerprint(node, st)
        else:
            self.own_effects.note_fingerprint(st.st_ino, fingerprint_of(st))

    def _update_fingerprint(self, node: Node, st: os.stat_result) -> None:
        """The kernel is told of the node anew; of one whose inode number another file has, that it is gone."""
        try:
            ended = node.store.is_number_reused(node)
        except OSError:
            ended = False  # found when it is asked for
        if ended:
            self._inodes.cut_off(node)
        else:
            node.fingerprint = fingerprint_of(st)

    def _compare_name(
        self, directory: Node | None, path: bytes, name: bytes, kinds: int, st: os.stat_result | None
    ) -> None:
        """A name leads where the mount did not make it lead."""
        if directory is not None:
            self._notifications.entry(directory.id, name)
            self._notifications.inode(directory.id, 0, 0)
            directory.fingerprint = UNKNOWN
            if st is not None:
                self._replaced.pop((directory.ino, name), None)
                self._replaced[directory.ino, name] = None
                if len(self._replaced) > _REPLACED:
                    del self._replaced[next(iter(self._replaced))]
        self._add_suspect(self._text(path, name), kinds & ~MODIFIED, st)

    def _compare_directory(self, node: Node, known: int, st: os.stat_result, path: str, kinds: int) -> None:
        if known != UNKNOWN:
            self._notifications.inode(node.id, 0, 0)
            self._update_fingerprint(node, st)
        if kinds & MODIFIED and not self.own_effects.has_attributes(st):
            self._add_suspect(path, MODIFIED, st)

    def _stat_name(self, directory: Node | None, path: bytes, name: bytes) -> os.stat_result | None:
        """What the name leads to: by where the mount knows the directory to lie, else where the watcher does."""
        places = [path]
        if directory is not None:
            known = os.fsencode(self._inodes.path(directory))
            if known != path:
                places.insert(0, known)
        for above in places:
            try:
                full = b"%s/%s" % (above, name) if above and name else above or name or b"."
                return self._source.stat_below(full)
            except OSError:
                continue
        return None

    @staticmethod
    def _text(path: bytes, name: bytes) -> str:
        return os.fsdecode(b"%s/%s" % (path, name) if path and name else path or name)

    # -- when changes were lost

    def compare_all(self, *, at_once: bool = False) -> None:
        """Invalidate everything in the kernel's caches, and compare every node with the source.

        `compare_slice` does the work in slices: 100,000 notifications at once delay requests by 0.2 s. With `at_once`,
        all notifications are queued when this method returns.
        """
        self._invalidates_names = not self._notifications.names()
        self._to_compare = list(self._inodes)
        self._to_compare.reverse()
        self._invalidates_later = not at_once
        if at_once:
            for node in self._to_compare:
                self._invalidate(node)

    def _invalidate(self, node: Node) -> None:
        if self._invalidates_names and node.parent is not None:
            self._notifications.entry(node.parent.id, node.name)
        self._notifications.inode(node.id, 0, 0)

    @property
    def has_more(self) -> bool:
        """Whether nodes wait to be compared anew."""
        return bool(self._to_compare)

    def compare_slice(self) -> None:
        """Compare some of the nodes that wait for it."""
        until = time.monotonic() + _SECONDS_AT_ONCE
        while self._to_compare and time.monotonic() < until:
            node = self._to_compare.pop()
            if self._inodes.by_id.get(node.id) is not node:
                continue
            if self._invalidates_later:
                self._invalidate(node)
            if node.parent is None or node.mounted_over or node.layer:
                continue
            path = self._inodes.path(node)
            try:
                st = self._source.stat_below(os.fsencode(path))
            except (FileNotFoundError, NotADirectoryError):
                st = None
            except OSError:
                continue  # found when it is asked for
            if st is None or st.st_ino != node.ino:
                self._add_suspect(path, GONE if st is None else MADE, st)
            elif node.fingerprint not in (UNKNOWN, fingerprint_of(st), fingerprint_after_rename(st)):
                self._update_fingerprint(node, st)
                if not node.is_dir:
                    self._add_suspect(path, MODIFIED, st)

    # -- what others are to judge

    def _add_suspect(self, path: str, kinds: int, st: os.stat_result | None) -> None:
        size = -2 if st is None else st.st_size if stat.S_ISREG(st.st_mode) else -1
        ancestor = reachable(path)
        if ancestor != path:
            path, kinds, size = ancestor, MODIFIED, -1
        if path in self.own.values():
            return
        known = self._suspects.get(path)
        if known is not None:
            kinds = known.kinds | (kinds & ~BEGAN)
        self._suspects[path] = Suspect(path, kinds, size)

    def report_suspects(self, report: Callable[[list[Suspect]], object], is_own: Callable[[str], bool]) -> None:
        """Give on what was found since the last time; `is_own` says of a path that the session itself changes it."""
        if self._suspects:
            found = [one for one in self._suspects.values() if not is_own(one.path)]
            self._suspects.clear()
            if found:
                report(found)
