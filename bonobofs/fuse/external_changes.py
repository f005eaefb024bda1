"""Detection of external changes: compare watcher events with the mount's own effects, and invalidate caches.

The watcher reports what may have changed, but not by which process. Therefore the current state is compared with the
state that the kernel has. Each node stores the change time and size that the kernel has. Recent own changes of
names, and the state of forgotten nodes, are kept for a while. If the states are equal, the change was the mount's own.
Otherwise the change counts as external: the kernel's caches are invalidated, and the change is passed on as a suspect.
"""

from __future__ import annotations

import gc
import os
import stat
import time
from collections.abc import Callable
from time import time_ns
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from bonobofs.fuse.fd_cache import FdCache
from bonobofs.fuse.inode_table import UNKNOWN, InodeTable, ListedFile, Node
from bonobofs.policy.decision import Layer
from bonobofs.policy.request import WorkspacePath
from bonobofs.system import watcher_events
from bonobofs.system.watcher_events import BEGAN, GONE, MADE, MODIFIED, reachable

if TYPE_CHECKING:
    from bonobofs.fuse.mount_context import Notifications

_REMEMBERED: Final = 20_000
"""Minimum of own effects that are kept. It exceeds the default length of an inotify queue."""
_MODIFICATION: Final = (1 << 62) - 1
_MARGIN: Final = 10_000_000_000
"""Nanoseconds: twice the time that the watcher may delay the event of a closed file."""
_REPLACED: Final = 4096
"""Maximum of names that were created or replaced externally and are remembered."""
_SECONDS_AT_ONCE: Final = 0.01


def fingerprint_of(st: os.stat_result) -> int:
    """Return change time and size in one number. Code of the hot path repeats the expression to avoid a call."""
    return st.st_size << 62 | st.st_ctime_ns


def _end_batch(node: Node) -> None:
    """After an external change, let the next write have an intent of its own, and keep the content before it."""
    node.kept_turn = -1
    if node.batch is not None:
        node.batch.generation = -1


def fingerprint_after_rename(st: os.stat_result) -> int:
    """Return the fingerprint to store after an own link or rename: ctime will change, size and mtime will not."""
    return -2 - (st.st_size << 62 | st.st_mtime_ns & _MODIFICATION)


class OwnEffects:
    """Recent own effects of the mount."""

    def __init__(self) -> None:
        self._names: Final[_Recent[tuple[int, bytes]]] = _Recent()
        self._fingerprints: Final[_Recent[int]] = _Recent()

    def expire(self, since: int) -> None:
        """Drop effects from long before `since`, in nanoseconds since 1970. Events are compared up to that time."""
        self._names.expire(since)
        self._fingerprints.expire(since)

    def compact(self) -> None:
        """Move the values together in memory, after many nodes were forgotten.

        Live values are scattered over all arenas of 1 MB, and the allocator returns empty arenas only.
        """
        self._names.compact(lambda key: (key[0] + 0, b"%b" % key[1]))
        self._fingerprints.compact(lambda ino: ino + 0)
        gc.collect()  # it empties the interpreter's own free lists; few nodes are left

    def note_name(self, directory: int, name: bytes, ino: int) -> None:
        """Record that the mount has made a name in the directory of this inode number lead to `ino`; 0: removed it."""
        self._names.put((directory, name), ino)

    def made_to_lead(self, directory: int, name: bytes) -> int:
        """Return the inode that the mount has made the name lead to; -1 if it has not changed the name."""
        return self._names.get((directory, name))

    def note_fingerprint(self, ino: int, stored: int) -> None:
        """Keep the fingerprint of a node that the kernel has forgotten."""
        self._fingerprints.put(ino, stored)

    def fingerprint(self, ino: int) -> int:
        """Return the kept fingerprint of a forgotten node, or UNKNOWN."""
        return self._fingerprints.get(ino)

    def note_attributes(self, st: os.stat_result) -> None:
        """Record a change of this directory's attributes by the mount."""
        self.note_name(st.st_ino, b"", _attributes(st))

    def has_attributes(self, st: os.stat_result) -> bool:
        """Whether the directory still has the attributes that the mount gave it."""
        return self.made_to_lead(st.st_ino, b"") == _attributes(st)


Key = TypeVar("Key", tuple[int, bytes], int)


class _Recent(Generic[Key]):
    """A map of recent values: those of the last two rotations, at most two times _REMEMBERED."""

    def __init__(self) -> None:
        self._new: dict[Key, int] = {}
        self._old: dict[Key, int] = {}
        self._rotated = time_ns()

    def put(self, key: Key, value: int) -> None:
        if len(self._new) >= _REMEMBERED:
            self._rotate()
        self._new[key] = value

    def expire(self, since: int) -> None:
        """Rotate if the last rotation was long before `since`, in nanoseconds since 1970."""
        if since > self._rotated + _MARGIN:
            self._rotate()

    def _rotate(self) -> None:
        """Drop the values from before the last rotation."""
        self._old, self._new = self._new, {}
        self._rotated = time_ns()

    def compact(self, copy: Callable[[Key], Key]) -> None:
        """Replace all keys and values by copies."""
        self._old, self._new = (
            {copy(key): value + 0 for key, value in values.items()} for values in (self._old, self._new)
        )

    def get(self, key: Key) -> int:
        """Return the value, or -1."""
        found = self._new.get(key)
        return self._old.get(key, -1) if found is None else found


def _stat_name(directory: int, name: bytes) -> os.stat_result | None:
    """Return the stat of a name in the open directory, and of the directory itself if the name is empty."""
    try:
        if directory < 0:
            return None
        return os.stat(name, dir_fd=directory, follow_symlinks=False) if name else os.fstat(directory)
    except OSError:
        return None


def _attributes(st: os.stat_result) -> int:
    return st.st_mode << 64 | st.st_uid << 32 | st.st_gid


class Suspect(NamedTuple):
    """A change that was not made through this mount."""

    path: str
    kinds: int
    size: int
    """Bytes of a regular file; -1 for other files, -2 if there is none."""


class ExternalChanges:
    """Compares states, notifies the kernel, and collects suspects. Used by the serving thread."""

    def __init__(self, inodes: InodeTable, source: FdCache, notifications: Notifications) -> None:
        self.own_effects: Final = OwnEffects()
        self.watched = False
        """Whether the companion watches the source and attributes suspects."""
        self.thread_changes: Final[dict[int, set[WorkspacePath]]] = {}
        """Paths, by inode number, of the names of files whose content a thread changes for the mount."""
        self._notifications: Final = notifications
        self._inodes: Final = inodes
        self._source: Final = source
        self._suspects: dict[str, Suspect] = {}
        self._to_compare: list[int] = []
        """Ids of the nodes to invalidate and compare, the next one last."""
        self._invalidates_names = False
        """Whether names are invalidated one by one, because the kernel is too old to invalidate all."""
        self._invalidates_later = False
        """Whether `compare_slice` must still invalidate the nodes."""
        self._replaced: dict[tuple[int, bytes], None] = {}
        self.since = time.time_ns()
        """Time up to which the watcher has reported all changes, in nanoseconds since 1970."""

    # -- reports of the handlers

    def on_difference(self, node: Node, st: os.stat_result) -> None:
        """Invalidate a node that differs from its fingerprint, and report the change as a suspect."""
        _end_batch(node)
        self._notifications.inode(node.id, 0, 0)
        if not node.is_dir and self.watched:
            self._add_suspect(self._inodes.path(node), MODIFIED, st)

    def check_first_lookup(self, node: Node, parent: Node, name: bytes, st: os.stat_result) -> None:
        """Report a recent external change of a file that the kernel does not know yet.

        The watcher's event comes too late to report it: by then the kernel has the changed state.
        """
        if not self.watched or node.layer is not Layer.SOURCE or node.is_dir:
            return
        stored = self.own_effects.fingerprint(st.st_ino)
        if stored == UNKNOWN:
            if self.own_effects.made_to_lead(parent.ino, name) != st.st_ino:
                self._add_suspect(self._inodes.path(node), MODIFIED, st)
        elif stored not in (fingerprint_of(st), fingerprint_after_rename(st)):
            self._add_suspect(self._inodes.path(node), MODIFIED, st)

    def note_forgotten(self, node: Node | ListedFile) -> None:
        """Keep the fingerprint of a node that the kernel has forgotten, if a later report can concern it.

        The watcher has reported all changes before `since`. A file that was last changed earlier is compared again
        only after another change, which its fingerprint does not explain.
        """
        stored, parent = node.fingerprint, node.parent
        assert parent is not None
        if (
            stored < 0
            or stored & _MODIFICATION >= self.since
            or (isinstance(node, Node) and node.is_dir)
            or self.own_effects.made_to_lead(parent.ino, node.name) == node.ino
        ):
            self.own_effects.note_fingerprint(node.ino, stored)

    def may_be_replaced(self, parent: Node, name: bytes, st: os.stat_result) -> bool:
        """Whether another process may soon replace this regular file.

        It may if the file was changed recently, or was replaced externally before.
        """
        if parent.layer is not Layer.SOURCE or not stat.S_ISREG(st.st_mode):
            return False
        return st.st_ctime_ns >= self.since or (parent.ino, name) in self._replaced

    # -- reports of the watcher

    def compare_changes(self, body: bytes) -> None:
        """Compare what the watcher has reported; `body` is a message in the format of `system.watcher_events`."""
        self.since = watcher_events.since(body)
        for ino, path, names in watcher_events.decode(body):
            directory = self._find_directory(ino)
            fd = self._open_directory(directory, ino, path)
            try:
                for name, kinds in names.items():
                    self._compare(directory, fd, ino, path, name, kinds)
            finally:
                if fd >= 0:
                    os.close(fd)
        self.own_effects.expire(self.since)

    def _find_directory(self, ino: int) -> Node | None:
        """Return the directory with this inode number. A file may have reused the number of a removed directory."""
        node = self._inodes.find(ino)
        return node if node is not None and node.is_dir else None

    def _open_directory(self, directory: Node | None, ino: int, path: bytes) -> int:
        """Return an O_PATH descriptor of the directory with this inode number; -1 if it has neither known path.

        Its path in the node table is tried first, then the path from the watcher. Another directory may have either.
        """
        own_path = path if directory is None else os.fsencode(self._inodes.path(directory))
        for above in dict.fromkeys((own_path, path)):
            try:
                fd = self._source.open_path(above)
            except OSError:
                continue
            if os.fstat(fd).st_ino == ino:
                return fd
            os.close(fd)
        return -1

    def _compare(self, directory: Node | None, fd: int, ino: int, path: bytes, name: bytes, kinds: int) -> None:
        """Compare one name of the directory with this inode number. `fd`: its descriptor, or -1 if it was removed."""
        if kinds == GONE and self.own_effects.made_to_lead(ino, name) == 0:
            return  # the mount has removed or moved it, and the name is still free
        st = _stat_name(fd, name)
        there = st.st_ino if st is not None else 0
        if kinds & (MADE | GONE) and self.own_effects.made_to_lead(ino, name) != there:
            self.own_effects.note_name(ino, name, there)
            self._compare_name(directory, path, name, kinds, st)
        if st is None:
            return
        node = self._inodes.find(there)
        stored = self.own_effects.fingerprint(there) if node is None else node.fingerprint
        if stored == fingerprint_of(st):
            return
        if stored < UNKNOWN and stored == fingerprint_after_rename(st):
            self._remember(node, st)
            return
        if node is not None and node.is_dir:
            self._compare_directory(node, stored, st, self._text(path, name), kinds)
            return
        if stat.S_ISDIR(st.st_mode):
            if kinds & MODIFIED and not self.own_effects.has_attributes(st):
                self._add_suspect(self._text(path, name), MODIFIED, st)
            return
        if node is None and st.st_ctime_ns < self.since:
            return  # it was only opened for writing, or its directory was moved here
        if node is not None:
            self._notifications.inode(node.id, 0, 0)
            _end_batch(node)
        self._remember(node, st)
        self._add_suspect(self._text(path, name), kinds & (MADE | BEGAN) | MODIFIED, st)

    def accept_own_change(self, path: str) -> None:
        """Invalidate the kernel's cache of `path`, which the session's companion has changed."""
        above, _, name = os.fsencode(path).rpartition(b"/")
        try:
            fd = self._source.open_path(above)
        except OSError:
            return
        try:
            ino, st = os.fstat(fd).st_ino, _stat_name(fd, name)
        finally:
            os.close(fd)
        directory = self._find_directory(ino)
        there = st.st_ino if st is not None else 0
        self.own_effects.note_name(ino, name, there)
        node = self._inodes.find(there) if st is not None else None
        if directory is not None:
            # A name that leads to the same node is not invalidated: a process with its working directory there would
            # lose it.
            if node is None or node.parent is not directory or node.name != name:
                self._notifications.entry(directory.id, name)
            self._notifications.inode(directory.id, 0, 0)
            directory.fingerprint = UNKNOWN
        if st is not None:
            if stat.S_ISDIR(st.st_mode):
                self.own_effects.note_attributes(st)
            if node is not None:
                self._notifications.inode(node.id, 0, 0)
            self._remember(node, st)

    def _remember(self, node: Node | None, st: os.stat_result) -> None:
        if node is not None:
            self._update_fingerprint(node, st)
        else:
            self.own_effects.note_fingerprint(st.st_ino, fingerprint_of(st))

    def _update_fingerprint(self, node: Node, st: os.stat_result) -> None:
        """Store the node's fingerprint, or detach the node if another file has reused its inode number."""
        try:
            ended = node.store.is_number_reused(node)
        except OSError:
            ended = False  # the next access detects it
        if ended:
            self._inodes.detach(node)
        else:
            node.fingerprint = fingerprint_of(st)

    def _compare_name(
        self, directory: Node | None, path: bytes, name: bytes, kinds: int, st: os.stat_result | None
    ) -> None:
        """Handle a name that leads where the mount did not make it lead."""
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

    def _compare_directory(self, node: Node, stored: int, st: os.stat_result, path: str, kinds: int) -> None:
        if stored != UNKNOWN:
            self._notifications.inode(node.id, 0, 0)
            self._update_fingerprint(node, st)
        if kinds & MODIFIED and not self.own_effects.has_attributes(st):
            self._add_suspect(path, MODIFIED, st)

    @staticmethod
    def _text(path: bytes, name: bytes) -> str:
        return os.fsdecode(b"%s/%s" % (path, name) if path and name else path or name)

    # -- comparison of all nodes

    def compare_all(self, *, at_once: bool = False) -> None:
        """Invalidate everything in the kernel's caches, and compare every node with the source.

        `compare_slice` does the work in slices: 100,000 notifications at once delay requests by 0.2 s. With `at_once`,
        all notifications are queued when this method returns.
        """
        self._invalidates_names = not self._notifications.names()
        self._to_compare = list(self._inodes)[::-1]
        self._invalidates_later = not at_once
        if at_once:
            for number in self._to_compare:
                if (known := self._inodes.peek(number)) is not None:
                    self._invalidate(known)

    def _invalidate(self, node: Node | ListedFile) -> None:
        if self._invalidates_names and node.parent is not None:
            self._notifications.entry(node.parent.id, node.name)
        self._notifications.inode(node.id, 0, 0)

    @property
    def has_more(self) -> bool:
        """Whether nodes wait for comparison."""
        return bool(self._to_compare)

    def compare_slice(self) -> None:
        """Compare some of the waiting nodes."""
        until = time.monotonic() + _SECONDS_AT_ONCE
        while self._to_compare and time.monotonic() < until:
            known = self._inodes.peek(self._to_compare.pop())
            if known is None:
                continue
            if self._invalidates_later:
                self._invalidate(known)
            is_other = isinstance(known, Node) and (known.mounted_over or known.layer is not Layer.SOURCE)
            if known.parent is None or is_other:
                continue
            path = self._inodes.join(known.parent, known.name)
            try:
                st = self._source.stat_below(os.fsencode(path))
            except (FileNotFoundError, NotADirectoryError):
                st = None
            except OSError:
                continue  # the next access detects it
            if st is None or st.st_ino != known.ino:
                self._add_suspect(path, GONE if st is None else MADE, st)
            elif known.fingerprint not in (UNKNOWN, fingerprint_of(st), fingerprint_after_rename(st)):
                if (node := self._inodes.get(known.id)) is not None:
                    self._update_fingerprint(node, st)
                if not stat.S_ISDIR(st.st_mode):
                    self._add_suspect(path, MODIFIED, st)

    # -- suspects

    def _add_suspect(self, path: str, kinds: int, st: os.stat_result | None) -> None:
        size = -2 if st is None else st.st_size if stat.S_ISREG(st.st_mode) else -1
        ancestor = reachable(path)
        if ancestor != path:
            path, kinds, size = ancestor, MODIFIED, -1
        if any(path in paths for paths in self.thread_changes.values()):
            return
        known = self._suspects.get(path)
        if known is not None:
            kinds = known.kinds | (kinds & ~BEGAN)
        self._suspects[path] = Suspect(path, kinds, size)

    def report_suspects(self, report: Callable[[list[Suspect]], object], is_own: Callable[[str], bool]) -> None:
        """Report the suspects since the last call, except at paths that the session itself changes (`is_own`)."""
        if self._suspects:
            found = [one for one in self._suspects.values() if not is_own(one.path)]
            self._suspects.clear()
            if found:
                report(found)
