"""The watcher: the names below a directory that may have changed, as soon as the kernel says so.

It stands on watchdog's own inotify class, below its observers: those hold every event back for half a second, and hand
on one at a time. Here one read takes all that is queued, and what happened to one name becomes one entry.

inotify watches single directories, so every directory gets a watch: those that are there at the start, and those that
appear, with all that is in them by then. A directory that moves keeps its watch and gets its new path. Directories of
other file systems, mounted below, are left out: the mount shows them empty.
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

from bonobofs.system.syscalls import file_system_type
from bonobofs.system.watcher_events import BEGAN, CLOSED, DIRECTORY, GONE, LONGEST_PATH, MADE, MODIFIED, Names

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
"""struct inotify_event: watch, mask, cookie, bytes of the name that follows"""
_BUFFER: Final = 1 << 18
_OURS: Final = CallbackId(1)
_CLOCK: Final = 20_000_000
"""Nanoseconds by which a file's times may lag behind the clock."""
_OPEN: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LONGEST: Final = 3800
"""Bytes of the longest path of a directory that is watched; a name in it is reached by one system call."""
_LONG: Final = f"the path of a directory has more than {_LONGEST} bytes"
_TOO_LONG: Final = b"/"
"""Stands for a path that no system call takes."""
_LIMITS: Final = Path("/proc/sys/fs/inotify")
_LONGEST_SHOWN: Final = 200
_MOST_SHOWN: Final = 3
_CONFIRMED: Final = 3
"""Reads after which a directory that moved must be where it is believed to be."""
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
"""File systems that other machines, or other programs, may change without this kernel knowing."""


class UnwatchableError(Exception):
    """The source cannot be watched; the text says why, and what to do."""


class Changes(NamedTuple):
    """What one read gave."""

    since: int
    """Nanoseconds since 1970: what changed before was in an earlier read."""
    names: list[Names]
    lost: bool
    """More changed than the kernel could keep: anything may have."""


class Directory:
    """A directory that is watched."""

    __slots__ = ("below", "ino", "name", "parent", "wd")

    def __init__(self, parent: Directory | None, name: bytes, ino: int, wd: WatchDescriptor) -> None:
        self.parent = parent
        self.name = name
        self.ino: Final = ino
        self.wd: Final = wd
        self.below: dict[bytes, Directory] = {}

    @property
    def path(self) -> bytes:
        """Where it lies now, from the watched root; the root is empty. _TOO_LONG: its path has too many bytes."""
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
    """An inotify instance that is read by whoever polls it, without watchdog's thread."""

    def fileno(self) -> int:
        return self._inotify_fd

    def watch(self, path: bytes) -> WatchDescriptor:
        """Watch a directory. OSError."""
        with warnings.catch_warnings():
            # It says so when it watches the directory already, which a rescan need not know.
            warnings.simplefilter("ignore")
            return self.add_callback(path, _WANTED, self, _OURS)

    def take(self) -> bytes:
        """What is queued, as the kernel writes it. Blocks while nothing is."""
        return os.read(self._inotify_fd, _BUFFER)

    def unwatch(self, wd: WatchDescriptor) -> None:
        """Watch it no more."""
        self.remove_callbacks([(wd, _OURS)])

    def forget(self, wd: WatchDescriptor) -> None:
        """The kernel has ended this watch by itself."""
        self.handle_event(InotifyEvent(wd, Mask(_IGNORED), 0, b""))

    # Watches call nobody back: the events of one read are taken as they are.
    def on_event(self, event: InotifyEvent) -> None: ...

    def on_watch_deleted(self, wd: WatchDescriptor) -> None: ...

    def on_queue_overflow(self) -> None: ...


class Watcher:
    """Watches the working directory and all below it. Used by one thread."""

    def __init__(self, budget: int | None = None) -> None:
        """Watch from now on, with at most `budget` watches; None: a quarter of max_user_watches. UnwatchableError."""
        self._budget: Final = _share() if budget is None else budget
        self._gaps: dict[Directory, None] = {}
        """Watched directories in which a directory is left out."""
        self._reason = ""
        """Why the first of them was left out."""
        self._root: Final = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._device: Final = os.fstat(self._root).st_dev
        remote = _REMOTE.get(_type_of(self._root))
        if remote is not None:
            raise UnwatchableError(
                f"it lies on {remote}, where others change files without this machine's kernel knowing; "
                "move it to a local disk"
            )
        self._begin()

    def _begin(self) -> None:
        try:
            self._queue = _Queue()
        except OSError as error:
            raise UnwatchableError(_said(error)) from error
        self._by_wd: dict[int, Directory] = {}
        self._gaps, self._reason = {}, ""
        self._moved: dict[Directory, None] = {}
        """Directories that could not be read where they were believed to be."""
        self._moving: dict[int, Directory] = {}
        self._left: list[Directory] = []
        self._displaced: tuple[Directory, bytes, Directory] | None = None
        self._unsure: dict[Directory, int] = {}
        self._confused = False
        self._read_at = time.time_ns()
        self._names: dict[Directory, dict[bytes, int]] = {}
        self._add(None, b"", os.fstat(self._root).st_ino)
        self._names = {}

    @property
    def gap(self) -> str:
        """Which part of the source is watched, which is not, and why; "" if all is watched."""
        if not self._reason:
            return ""
        places = sorted({os.fsdecode(each.path)[:_LONGEST_SHOWN] or "." for each in islice(self._gaps, _MOST_SHOWN)})
        named = ", ".join(map(repr, places)) or "directories that have gone"
        more = f" and {len(self._gaps) - _MOST_SHOWN} more" if len(self._gaps) > _MOST_SHOWN else ""
        return f"{len(self._by_wd)} directories are watched, and not all below {named}{more}: {self._reason}"

    def begin_anew(self) -> None:
        """Forget what is queued and watched, and watch all that is there now. UnwatchableError."""
        old = self._queue
        self._begin()
        old.close()

    def fileno(self) -> int:
        """What can be read when something has changed."""
        return self._queue.fileno()

    def read(self) -> Changes:
        """What has changed since the last time. Blocks while nothing has. UnwatchableError."""
        since, self._read_at = self._read_at, time.time_ns()
        self._names = {}
        leaving, self._left = self._left, []
        lost = self._note(self._queue.take())
        for directory in leaving:
            self._abandon(directory)
        if self._moved:
            moved, self._moved = self._moved, {}
            self._read_again(moved)
        self._confirm()
        lost = lost or self._confused
        # Both halves of a move are queued together, but one read may end between them.
        self._left = list(self._moving.values())
        found = []
        for directory, names in self._names.items():
            if names and (path := directory.path) != _TOO_LONG:
                found.append(Names(directory.ino, path, names))
            elif names and directory.parent is not None:
                self._leave_out(directory.parent, _LONG)
        return Changes(since - _CLOCK, found, lost)

    def _note(self, data: bytes) -> bool:
        """Note what these events say; whether any were lost.

        Every change through the mount passes here too, so this is written for speed: watchdog's own reading makes an
        object of each event, which costs more than all else.
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
                continue  # the directory above has said the same
            names = noted.get(directory)
            if names is None:
                names = noted[directory] = {}
            known = names.get(name)
            names[name] = kinds if known is None else known | (kinds & ~BEGAN)
        return lost

    def _follow(self, above: Directory, mask: int, cookie: int, name: bytes) -> None:
        """Something has happened to a directory: watch what appears, follow what moves."""
        displaced, self._displaced = self._displaced, None
        if mask & _MOVED_FROM:
            if displaced is not None and displaced[:2] == (above, name):
                moved: Directory | None = displaced[2]  # the second half of an exchange: not what has just come there
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
                if moved in self._left:
                    self._left.remove(moved)
                self._put(moved, above, name)
                self._unsure[moved] = _CONFIRMED
        elif mask & _CREATE or (mask & _ATTRIB and name and name not in above.below):
            self._add(above, name)
        elif mask & _DELETE:
            above.below.pop(name, None)

    def _confirm(self) -> None:
        """Look whether what moved is where it is believed to be; it may have moved on, which a later read tells."""
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
                self._confused = True  # nothing lies in itself: an event was misunderstood
                return
            at = at.parent
        directory.parent, directory.name = above, name
        above.below[name] = directory

    def _add(self, above: Directory | None, name: bytes, ino: int = 0) -> None:
        """Watch a directory and all below it, the upper levels first, and note every name that is in it already."""
        self._add_all(deque([(above, [(name, ino)])]))

    def _add_all(self, waiting: deque[tuple[Directory | None, list[tuple[bytes, int]]]]) -> None:
        """Watch these names of each directory and all below. Each directory is opened once, its children beneath it."""
        while waiting:
            above, names = waiting.popleft()
            path = None if above is None else above.path
            try:
                fd = os.open(path or b".", _OPEN, dir_fd=self._root) if path != _TOO_LONG else -1
            except OSError:
                fd = -1  # gone by now, or moved: an event says so, and then it is read again
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
                        continue  # removed meanwhile
                    if found is not None and found[1]:
                        waiting.append(found)
            finally:
                os.close(fd)

    def _add_one(
        self, above: Directory | None, fd: int, name: bytes, ino: int
    ) -> tuple[Directory, list[tuple[bytes, int]]] | None:
        """Watch one directory; its subdirectories, or None if it is not watched. FileNotFoundError: it is gone.

        `fd` is the directory above, open. UnwatchableError: the root cannot be watched.
        """
        try:
            child = os.open(name or b".", _OPEN, dir_fd=fd)
        except OSError as error:
            if error.errno == errno.EACCES and above is not None and os.access(name, os.X_OK, dir_fd=fd):
                self._leave_out(above, _closed(b"/".join(filter(None, (above.path, name)))))
            return None  # no directory any more: there is an event that says so
        try:
            st = os.fstat(child)
            if st.st_dev != self._device or (ino and st.st_ino != ino):
                return None
            directory = self._watch(child, above, name, st.st_ino)
            return None if directory is None else (directory, self._note_all(directory, child))
        finally:
            os.close(child)

    def _note_all(self, directory: Directory, fd: int) -> list[tuple[bytes, int]]:
        """Note every name in it, and return its subdirectories with their inode numbers."""
        below = []
        names = self._names.setdefault(directory, {})
        with suppress(OSError):  # another's directory
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_NOATIME)  # to be watched is not to be read
        with os.scandir(fd) as entries:
            for entry in entries:
                raw = os.fsencode(entry.name)
                names[raw] = names.get(raw, 0) | MADE
                if entry.is_dir(follow_symlinks=False):
                    below.append((raw, entry.inode()))
        return below

    def _watch(self, fd: int, above: Directory | None, name: bytes, ino: int) -> Directory | None:
        """Watch an open directory; None: it is left out. FileNotFoundError: it is gone."""
        if above is not None and len(self._by_wd) >= self._budget:
            self._leave_out(above, _said(OSError(errno.ENOSPC, "")))
            return None
        try:
            wd = self._queue.watch(b"/proc/self/fd/%d/." % fd)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error
            if above is None:
                raise UnwatchableError(_said(error)) from error
            self._leave_out(above, _said(error))
            return None
        if wd < 0:
            self._leave_out(above, "inotify refused: Permission denied")
            return None
        directory = self._by_wd.get(wd)
        if directory is None:
            directory = self._by_wd[wd] = Directory(above, name, ino, wd)
        elif directory.parent is not None and directory.parent.below.get(directory.name) is directory:
            del directory.parent.below[directory.name]
        if above is not None:
            self._put(directory, above, name)
        return directory

    def _leave_out(self, above: Directory | None, reason: str) -> None:
        """A directory in `above` stays unwatched, with all below it."""
        if above is None:
            raise UnwatchableError(reason)
        if not self._gaps:
            self._reason = reason
        self._gaps[above] = None

    def fill_gaps(self) -> bool:
        """Watch what was left out, as far as that is possible by now; return whether all is watched."""
        gaps, self._gaps, self._reason = self._gaps, {}, ""
        self._read_again(gaps)
        self._names = {}  # the server compares all that the kernel knows once nothing is left out
        return not self._gaps

    def _read_again(self, directories: Iterable[Directory]) -> None:
        """Watch all in these directories that is not watched."""
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
                below = [one for one in self._note_all(directory, fd) if one[0] not in directory.below]
                waiting.append((directory, below))
            finally:
                os.close(fd)
        self._add_all(waiting)

    def _forget(self, directory: Directory) -> None:
        """The kernel watches this directory no more: it was removed."""
        self._by_wd.pop(directory.wd, None)
        self._gaps.pop(directory, None)
        self._queue.forget(directory.wd)
        above = directory.parent
        if above is not None and above.below.get(directory.name) is directory:
            del above.below[directory.name]

    def _abandon(self, directory: Directory) -> None:
        """A directory was moved out of the source: watch neither it nor what is below."""
        for cookie, moving in list(self._moving.items()):
            if moving is directory:
                del self._moving[cookie]
        waiting = [directory]
        while waiting:
            one = waiting.pop()
            waiting += one.below.values()
            self._gaps.pop(one, None)
            if self._by_wd.pop(one.wd, None) is not None:
                self._queue.unwatch(one.wd)


def _share() -> int:
    """Watches that one session may have: the kernel counts those of all sessions of a user together."""
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
    """The kernel's number of the type of file system; 0 if it cannot be determined."""
    try:
        return file_system_type(fd)
    except OSError:
        return 0


def _said(error: OSError) -> str:
    """Why inotify refused, and what to do about it."""
    if error.errno == errno.ENOSPC:
        # A session gets a quarter of the limit, so others may have watches left.
        return f"the limit of watched directories is reached; {_raise('max_user_watches', 1_048_576)}"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"the limit of watching programs is reached; {_raise('max_user_instances', 1024)}"
    return f"inotify refused: {error.strerror}"


def _raise(name: str, wanted: int) -> str:
    try:
        limit = (_LIMITS / name).read_text(encoding="ascii").strip()
    except OSError:
        limit = "unknown"
    return f"it is {limit}; as root: sysctl fs.inotify.{name}={wanted}"
