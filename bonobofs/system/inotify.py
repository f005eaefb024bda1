"""The watcher: reports names below a directory that may have changed, as soon as the kernel reports them.

It uses watchdog's inotify class and not its observers, which delay each event by half a second and deliver events one
at a time. Here one read takes the whole queue and merges all events of a name into one entry.

inotify watches single directories, so every directory gets a watch, at the start or when it appears. For a directory
that appears, the watcher reports all names in it. A directory that moves keeps its watch and gets its new path. Other
file systems mounted below are not watched, because the mount shows their directories as empty.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
import warnings
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

from watchdog.observers.inotify_c import CallbackId, InotifyConstants, InotifyEvent, InotifyFD, Mask, WatchDescriptor

from bonobofs.errors import os_error
from bonobofs.system.paths import STORE
from bonobofs.system.syscalls import file_system_type
from bonobofs.system.watcher_events import BEGAN, CLOSED, DIRECTORY, GONE, LONGEST_PATH, MADE, MODIFIED, NameEvents

_CREATE: Final = InotifyConstants.IN_CREATE
_DELETE: Final = InotifyConstants.IN_DELETE
_MOVED_FROM: Final = InotifyConstants.IN_MOVED_FROM
_MOVED_TO: Final = InotifyConstants.IN_MOVED_TO
_ATTRIB: Final = InotifyConstants.IN_ATTRIB
_ISDIR: Final = InotifyConstants.IN_ISDIR
_IGNORED: Final = InotifyConstants.IN_IGNORED
_OVERFLOW: Final = InotifyConstants.IN_Q_OVERFLOW
_KINDS: Final = {
    InotifyConstants.IN_MODIFY: MODIFIED,
    _ATTRIB: MODIFIED,
    InotifyConstants.IN_CLOSE_WRITE: CLOSED,
    _CREATE: MADE | BEGAN,
    _MOVED_TO: MADE,
    _DELETE: GONE,
    _MOVED_FROM: GONE,
}
_WANTED: Final = Mask(
    sum(_KINDS) | InotifyConstants.IN_ONLYDIR | InotifyConstants.IN_DONT_FOLLOW | InotifyConstants.IN_EXCL_UNLINK
)
_EVENT: Final = struct.Struct("=iIII")
"""struct inotify_event: watch descriptor, mask, cookie, length of the name that follows"""
_BUFFER: Final = 1 << 18
_OURS: Final = CallbackId(1)
_CLOCK: Final = 20_000_000
"""Nanoseconds by which file timestamps may lag behind the clock."""
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LONGEST: Final = 3800
"""Maximum bytes of a watched directory's path, so that one system call can reach a name in it."""
_LONG: Final = f"the path of a directory has more than {_LONGEST} bytes"
_TOO_LONG: Final = b"/"
"""Marks a path that is too long for system calls."""
_LIMITS: Final = Path("/proc/sys/fs/inotify")
_LONGEST_SHOWN: Final = 200
_MOST_SHOWN: Final = 3
_STORE: Final = os.fsencode(STORE).split(b"/")
_CONFIRMED: Final = 3
"""Reads within which a moved directory must be found at its expected path."""
_COUNTS_SUBDIRECTORIES: Final = (0xEF53, 0x58465342, 0x01021994)
"""File systems, by f_type, on which a directory without subdirectories has two links: ext2 to ext4, XFS, tmpfs."""
_REMOTE: Final = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFF534D42: "CIFS",
    0xFE534D42: "SMB",
    0x01021997: "9P",
    0x00C36400: "Ceph",
    0x5346414F: "AFS",
    0x6B414653: "AFS",
    0x73757245: "Coda",
    0x0BD00BD0: "Lustre",
    0x47504653: "GPFS",
    0x01161970: "GFS2",
    0x7461636F: "OCFS2",
    0x19830326: "BeeGFS",
    0x20030528: "OrangeFS",
    0x786F4256: "vboxsf",
    0xBACBACBC: "vmhgfs",
    0x65735546: "FUSE",
}
"""File systems that change without inotify events: other machines or programs write to them."""


class UnwatchableError(Exception):
    """The source cannot be watched. The text gives the reason and the remedy."""


class Changes(NamedTuple):
    """Result of one read."""

    since: int
    """Nanoseconds since 1970. Earlier reads reported all changes before it."""
    names: list[NameEvents]
    lost: bool
    """True if events were lost, so that any name may have changed."""


class Directory:
    """A watched directory."""

    __slots__ = ("below", "ino", "name", "parent", "wd")

    def __init__(self, parent: Directory | None, name: bytes, ino: int, wd: WatchDescriptor) -> None:
        self.parent = parent
        self.name = name
        self.ino: Final = ino
        self.wd: Final = wd
        self.below: dict[bytes, Directory] = {}

    @property
    def path(self) -> bytes:
        """Current path below the watched root; empty for the root, _TOO_LONG above LONGEST_PATH bytes."""
        parts = []
        length = 0
        at = self
        while at.parent is not None:
            parts.append(at.name)
            length += len(at.name) + 1
            if length > LONGEST_PATH:
                return _TOO_LONG
            at = at.parent
        return b"/".join(reversed(parts))


class _Queue(InotifyFD):
    """An inotify instance without watchdog's thread: its owner polls and reads it."""

    def fileno(self) -> int:
        return self._inotify_fd

    def watch(self, path: bytes) -> WatchDescriptor:
        """Watch a directory; idempotent. OSError."""
        with warnings.catch_warnings():
            # watchdog warns about a directory that is already watched, which is normal in a rescan.
            warnings.simplefilter("ignore")
            return self.add_callback(path, _WANTED, self, _OURS)

    def take(self) -> bytes:
        """Read the queued events as `struct inotify_event` records. Blocks until there is one."""
        return os.read(self._inotify_fd, _BUFFER)

    def unwatch(self, wd: WatchDescriptor) -> None:
        """Remove a watch."""
        self.remove_callbacks([(wd, _OURS)])

    def forget(self, wd: WatchDescriptor) -> None:
        """Drop a watch that the kernel has removed."""
        self.handle_event(InotifyEvent(wd, Mask(_IGNORED), 0, b""))

    def close(self) -> None:
        """Close the descriptors. watchdog leaves that to the end of its thread, which this class has not."""
        self._is_reading = False
        super().close()

    # The callbacks do nothing: `Watcher` parses the events itself.
    def on_event(self, event: InotifyEvent) -> None: ...

    def on_watch_deleted(self, wd: WatchDescriptor) -> None: ...

    def on_queue_overflow(self) -> None: ...


class Watcher:
    """Watches the working directory and all directories below it. Not thread-safe."""

    def __init__(self, budget: int | None = None) -> None:
        """Start watching, with at most `budget` watches; None: the share of `_share`. UnwatchableError."""
        self._budget: Final = _share() if budget is None else budget
        self._gaps: dict[Directory, None] = {}
        """Watched directories with an unwatched subdirectory."""
        self._reason = ""
        """Why the first of them has a gap."""
        self._root: Final = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._device: Final = os.fstat(self._root).st_dev
        file_system = _type_of(self._root)
        self._counts_subdirectories: Final = file_system in _COUNTS_SUBDIRECTORIES
        remote = _REMOTE.get(file_system)
        if remote is not None:
            raise UnwatchableError(
                f"it is on {remote}, where files change without inotify events; move it to a local disk"
            )
        self._begin()

    def _begin(self) -> None:
        try:
            self._queue = _Queue()
        except OSError as error:
            raise UnwatchableError(_inotify_error(error)) from error
        self._by_wd: dict[int, Directory] = {}
        self._gaps, self._reason = {}, ""
        self._moved: dict[Directory, None] = {}
        """Directories that could not be opened at their expected path, to be rescanned."""
        self._moving: dict[int, Directory] = {}
        """By cookie, directories whose old name has gone and whose new name was not reported yet."""
        self._displaced: tuple[Directory, bytes, Directory] | None = None
        self._unsure: dict[Directory, int] = {}
        self._confused = False
        self._read_at = time.time_ns()
        self._names: dict[Directory, dict[bytes, int]] = {}
        self._notes_names = False  # the first scan reports none
        self._add(None, b"", os.fstat(self._root).st_ino)
        self._notes_names = True

    @property
    def gap(self) -> str:
        """Message on the unwatched part of the source and the reason; "" if all is watched."""
        if not self._reason:
            return ""
        paths = sorted({os.fsdecode(each.path)[:_LONGEST_SHOWN] or "." for each in islice(self._gaps, _MOST_SHOWN)})
        named = ", ".join(map(repr, paths)) or "directories that have gone"
        more = f" and {len(self._gaps) - _MOST_SHOWN} more" if len(self._gaps) > _MOST_SHOWN else ""
        return f"{len(self._by_wd)} directories are watched, and not all below {named}{more}: {self._reason}"

    def restart(self) -> None:
        """Discard the queue and all watches, and watch the whole tree again. UnwatchableError."""
        old = self._queue
        self._begin()
        old.close()

    def fileno(self) -> int:
        """Descriptor that becomes readable when something has changed."""
        return self._queue.fileno()

    def read(self) -> Changes:
        """Return the changes since the last read. Blocks until there is one. UnwatchableError."""
        since, self._read_at = self._read_at, time.time_ns()
        self._names = {}
        earlier = list(self._moving)
        lost = self._note(self._queue.take())
        # The kernel queues both halves of a move together, but a read may end between them.
        for cookie in earlier:
            if cookie in self._moving:
                self._abandon(self._moving.pop(cookie))
        if self._moved:
            moved, self._moved = self._moved, {}
            self._read_again(moved)
        self._confirm()
        lost = lost or self._confused
        found = []
        for directory, names in self._names.items():
            if names and (path := directory.path) != _TOO_LONG:
                found.append(NameEvents(directory.ino, path, names))
            elif names and directory.parent is not None:
                self._leave_out(directory.parent, _LONG)
        return Changes(since - _CLOCK, found, lost)

    def _note(self, data: bytes) -> bool:
        """Process these events; return True if the kernel lost events.

        Every change through the mount causes events too, so this is optimized: watchdog's parser creates an object for
        each event, which costs more than all other steps together.
        """
        by_wd, noted = self._by_wd, self._names
        at, end = 0, len(data)
        lost = False
        while at < end:
            wd, mask, cookie, length = _EVENT.unpack_from(data, at)
            at += _EVENT.size + length
            name = data[at - length : at].rstrip(b"\0")
            directory = by_wd.get(wd)
            kinds = _KINDS.get(mask)
            if directory is None:
                lost = lost or bool(mask & _OVERFLOW)
                continue
            if kinds is None:
                if mask & _IGNORED:
                    self._displaced = None
                    self._forget(directory)
                    continue
                kinds = _KINDS.get(mask & ~_ISDIR, 0) | DIRECTORY
                self._follow(directory, mask, cookie, name)
            if not name and directory.parent is not None:
                continue  # the parent directory reports the same event
            names = noted.get(directory)
            if names is None:
                names = noted[directory] = {}
            known = names.get(name)
            names[name] = kinds if known is None else known | (kinds & ~BEGAN)
        return lost

    def _follow(self, above: Directory, mask: int, cookie: int, name: bytes) -> None:
        """Process an event of a subdirectory: watch a new one, update the path of a moved one."""
        displaced, self._displaced = self._displaced, None
        if mask & _MOVED_FROM:
            if displaced is not None and displaced[:2] == (above, name):
                moved: Directory | None = displaced[2]  # RENAME_EXCHANGE: the directory that was here before the move
            else:
                moved = above.below.pop(name, None)
            if moved is not None:
                self._moving[cookie] = moved
        elif mask & _MOVED_TO:
            here = above.below.get(name)
            if here is not None:
                self._displaced = above, name, here
            moved = self._moving.pop(cookie, None)
            if moved is None:
                self._add(above, name)
            else:
                self._put(moved, above, name)
                self._unsure[moved] = _CONFIRMED
        elif mask & _CREATE or (mask & _ATTRIB and name and name not in above.below):
            self._add(above, name)
        elif mask & _DELETE:
            above.below.pop(name, None)

    def _confirm(self) -> None:
        """Check that moved directories are at their expected path. A later read may report a further move."""
        for directory, left in list(self._unsure.items()):
            path = directory.path
            try:
                is_there = (
                    path == _TOO_LONG or os.stat(path, dir_fd=self._root, follow_symlinks=False).st_ino == directory.ino
                )
            except OSError:
                is_there = False
            if is_there or directory.wd not in self._by_wd:
                del self._unsure[directory]
            elif left:
                self._unsure[directory] = left - 1
            else:
                self._confused = True

    def _put(self, directory: Directory, above: Directory, name: bytes) -> None:
        at: Directory | None = above if directory.below or above is directory else None
        while at is not None:
            if at is directory:
                self._confused = True  # a cycle: the events were misinterpreted
                return
            at = at.parent
        directory.parent, directory.name = above, name
        above.below[name] = directory

    def _add(self, above: Directory | None, name: bytes, ino: int = 0) -> None:
        """Watch a directory and all below it, breadth first, and report every existing name."""
        self._add_all(deque([(above, [(name, ino)])]))

    def _add_all(self, waiting: deque[tuple[Directory | None, list[tuple[bytes, int]]]]) -> None:
        """Watch these names of each directory and all below. Children are opened relative to their open directory."""
        while waiting:
            above, names = waiting.popleft()
            path = None if above is None else above.path
            try:
                fd = os.open(path or b".", _OPEN, dir_fd=self._root) if path != _TOO_LONG else -1
            except OSError:
                fd = -1  # removed or moved: an event follows, and then it is rescanned
            if fd < 0:
                if above is not None:
                    self._moved[above] = None
                continue
            try:
                for name, ino in names:
                    if above is not None and len(path or b"") + len(name) >= _LONGEST:
                        self._leave_out(above, _LONG)
                        continue
                    try:
                        found = self._add_one(above, fd, name, ino)
                    except FileNotFoundError:
                        continue  # removed since the scan
                    if found is not None and found[1]:
                        waiting.append(found)
            finally:
                os.close(fd)

    def _add_one(
        self, above: Directory | None, fd: int, name: bytes, ino: int
    ) -> tuple[Directory, list[tuple[bytes, int]]] | None:
        """Watch one directory of the open directory `fd`; return it with its subdirectories if it was scanned.

        The store of old contents stays unwatched.

        FileNotFoundError: it was removed. UnwatchableError: the root cannot be watched.
        """
        if above is not None and name == _STORE[1] and above.path == _STORE[0]:
            return None
        try:
            child = os.open(name or b".", _OPEN, dir_fd=fd)
        except OSError as error:
            if error.errno == errno.EACCES and above is not None and os.access(name, os.X_OK, dir_fd=fd):
                self._leave_out(above, _closed(b"/".join(filter(None, (above.path, name)))))
            return None  # no longer a directory: an event follows
        try:
            st = os.fstat(child)
            if st.st_dev != self._device or (ino and st.st_ino != ino):
                return None
            directory = self._watch(child, above, name, st.st_ino)
            # The links are counted after the watch begins: it reports a later subdirectory.
            is_leaf = self._counts_subdirectories and os.fstat(child).st_nlink == 2
            if directory is None or (is_leaf and not self._notes_names):
                return None
            return directory, _scan(child, self._names.setdefault(directory, {}) if self._notes_names else None)
        finally:
            os.close(child)

    def _watch(self, fd: int, above: Directory | None, name: bytes, ino: int) -> Directory | None:
        """Watch an open directory, and return it if its names must be scanned. None: it stays unwatched, or it was
        watched already at the path that the last event left it, so that its own events report its names.

        FileNotFoundError; for the root UnwatchableError.
        """
        if above is not None and len(self._by_wd) >= self._budget:
            self._leave_out(above, _inotify_error(OSError(errno.ENOSPC, "")))
            return None
        try:
            wd = self._queue.watch(b"/proc/self/fd/%d/." % fd)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise os_error(errno.ENOENT) from error
            if above is None:
                raise UnwatchableError(_inotify_error(error)) from error
            self._leave_out(above, _inotify_error(error))
            return None
        if wd < 0:
            self._leave_out(above, "inotify refused: Permission denied")
            return None
        directory = self._by_wd.setdefault(wd, Directory(above, name, ino, wd))
        siblings = {} if directory.parent is None else directory.parent.below
        is_known = siblings.get(directory.name) is directory
        if is_known:
            del siblings[directory.name]
            # Its move was not reported yet, so another directory may have its old name now.
            self._moved |= {each: None for each in (directory.parent, above) if each is not None}
        self._moving = {cookie: moving for cookie, moving in self._moving.items() if moving is not directory}
        if above is not None:
            self._put(directory, above, name)
        return None if is_known else directory

    def _leave_out(self, above: Directory | None, reason: str) -> None:
        """Record that a directory in `above`, and all below it, stays unwatched. UnwatchableError: it is the root."""
        if above is None:
            raise UnwatchableError(reason)
        if not self._gaps:
            self._reason = reason
        self._gaps[above] = None

    def fill_gaps(self) -> bool:
        """Retry to watch the unwatched directories; return True if all are watched now."""
        gaps, self._gaps, self._reason = self._gaps, {}, ""
        self._read_again(gaps)
        self._names = {}  # the server checks all nodes that the kernel knows once no gap is left
        return not self._gaps

    def _read_again(self, directories: Iterable[Directory]) -> None:
        """Rescan these watched directories, whose own events report their names, and watch unwatched subdirectories."""
        waiting: deque[tuple[Directory | None, list[tuple[bytes, int]]]] = deque()
        for directory in directories:
            path = directory.path
            if directory.wd not in self._by_wd:
                continue
            if path == _TOO_LONG:
                self._leave_out(directory, _LONG)
                continue
            try:
                fd = os.open(path or b".", _OPEN, dir_fd=self._root)
            except OSError:
                self._moved[directory] = None
                continue
            try:
                below = [one for one in _scan(fd, None) if one[0] not in directory.below]
                waiting.append((directory, below))
            finally:
                os.close(fd)
        self._add_all(waiting)

    def _forget(self, directory: Directory) -> None:
        """Drop a removed directory, whose watch the kernel has ended."""
        self._by_wd.pop(directory.wd, None)
        self._gaps.pop(directory, None)
        self._queue.forget(directory.wd)
        above = directory.parent
        if above is not None and above.below.get(directory.name) is directory:
            del above.below[directory.name]

    def _abandon(self, directory: Directory) -> None:
        """Stop watching a directory that was moved out of the source, and all below it."""
        waiting = [directory]
        while waiting:
            one = waiting.pop()
            waiting += one.below.values()
            self._gaps.pop(one, None)
            if self._by_wd.pop(one.wd, None) is not None:
                self._queue.unwatch(one.wd)


def _scan(fd: int, names: dict[bytes, int] | None) -> list[tuple[bytes, int]]:
    """Return the subdirectories of the open directory with their inode numbers, and add every name in it to `names` as
    MADE.
    """
    with suppress(OSError):  # only the owner may set O_NOATIME
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NOATIME)  # the scan leaves the access time unchanged
    with os.scandir(fd) as entries:
        found = list(entries)
    if names is not None:
        for entry in found:
            raw = os.fsencode(entry.name)
            names[raw] = names.get(raw, 0) | MADE
    below = [entry for entry in found if entry.is_dir(follow_symlinks=False)]
    return [(os.fsencode(entry.name), entry.inode()) for entry in below]


def _share() -> int:
    """Return the watches for one session: a quarter of the user's limit, and at least min(8192, half of it)."""
    try:
        limit = int((_LIMITS / "max_user_watches").read_text(encoding="ascii"))
    except (OSError, ValueError):
        limit = 8192
    return max(limit // 4, min(limit // 2, 8192))


def _closed(path: bytes) -> str:
    name = os.fsdecode(path)
    return (
        f"the directory {name[:_LONGEST_SHOWN]!r} may be entered and not read, so it cannot be watched; "
        "as its owner: chmod u+r"
    )


def _type_of(fd: int) -> int:
    """Return the `f_type` of the file system; 0 if it cannot be determined."""
    try:
        return file_system_type(fd)
    except OSError:
        return 0


def _inotify_error(error: OSError) -> str:
    """Message with inotify's error and the remedy."""
    if error.errno == errno.ENOSPC:
        # The session's own share may be used up, while the kernel's limit is not reached.
        return f"the limit of watched directories is reached; {_raise('max_user_watches', 1_048_576)}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"the limit of watching programs is reached; {_raise('max_user_instances', 1024)}"
    return f"inotify refused: {error.strerror}"


def _raise(name: str, advised: int) -> str:
    try:
        limit = (_LIMITS / name).read_text(encoding="ascii").strip()
    except OSError:
        limit = "unknown"
    return f"it is {limit}; as root: sysctl fs.inotify.{name}={advised}"
