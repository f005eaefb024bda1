"""The store of pre-images: the content that files had before a change, by session and number of the change's intent.

A removed or replaced file is moved or linked into the store, if the store is on the file system of the source.
Otherwise its content is cloned or copied. The intent has the old attributes (`BEFORE`), so the store needs none.

The store never refuses or delays a change: what cannot be kept is recorded in the outcome as `NOT_KEPT`, with a reason.
"""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import stat
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Final, NamedTuple, Self

from bonobofs.audit.entry import AFTER, BEFORE, BY, DIR_TIMES, OLD_TARGET, REPLACED, TO_DIR_TIMES, XATTRS, state_text
from bonobofs.policy.decision import Permit
from bonobofs.policy.request import Operation, Request
from bonobofs.system.syscalls import open_beneath

PACK: Final = "pack"
"""Prefix of the files of a session's store with small copies. Each copy has a header of HEADER (number, bytes, CRC-32)
before its bytes."""
HEADER: Final = struct.Struct("<QII")
_PACKED: Final = 64 << 10
"""Bytes of the largest copy in the pack. It costs one write; a file of its own costs five times as much."""
COPIED_AT_ONCE: Final = 1 << 20
"""Bytes that the serving thread copies itself: about a millisecond."""
_OF_CONTENT: Final = (Operation.WRITE_FILE, Operation.CREATE_FILE, Operation.DELETE_FILE)
_DELETE: Final = Operation.DELETE_FILE
OF_NAMES: Final = (
    *_OF_CONTENT,
    *(Operation.RENAME, Operation.LINK, Operation.SYMLINK, Operation.MKDIR, Operation.RMDIR, Operation.MKNOD),
)
"""Operations that may change a name in a directory."""
_FICLONE: Final = 0x40049409
_MOST_SENT: Final = 0x7FFFF000
_MOST_UNSYNCED: Final = 4096
_RESERVE: Final = 256 << 20
"""Bytes of its disk that the store leaves free, or a twentieth of a smaller disk: programs and the trail need them."""
_SECONDS_OF_ROOM: Final = 1.0
"""For how long the store relies on the free space that it has read."""
_SECONDS_FULL: Final = 60.0
"""Shortest time between two calls of `on_full`."""
LONGEST_XATTR: Final = 4096

TOO_LARGE: Final = "the file is larger than max_file"
FULL: Final = "the store has max_total bytes"
NO_ROOM: Final = "the disk of the store is nearly full"
TOO_LONG: Final = "the copy would delay the mount"
UNREADABLE: Final = "the file cannot be read"


def store_place(home: Path, source: Path) -> Path:
    """Return the directory of the pre-images of a source: on its file system, if there is a place for it."""
    own = source / ".bonobofs"
    with suppress(OSError):
        if home.stat().st_dev != source.stat().st_dev and stat.S_ISDIR(own.lstat().st_mode):
            return own / "undo"
    return home / "undo"


class StoreLimits(NamedTuple):
    """What is kept: bytes of the pre-images of all sessions of a state directory, and of one file."""

    max_total: int
    max_file: int

    @classmethod
    def of(cls, policy: Mapping[str, Any]) -> Self | None:
        """Return `[undo]` of a policy as plain data; None: nothing is kept."""
        table = policy.get("undo", {})
        limits = cls(int(table.get("max_total", 0)), int(table.get("max_file", 0)))
        return limits if all(limits) else None


class PreimageStore:
    """The pre-images of one session. Used by one thread, except `sync`."""

    def __init__(self, directory: Path, limits: StoreLimits) -> None:
        """Create the directory. OSError."""
        directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        self._directory: Final = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.limits: Final = limits
        self.size = 0
        """Bytes that all sessions keep: as measured last, and what this session has added since."""
        self.on_full: Callable[[int], None] = lambda _size: None
        """Called with the size of a file for which there is no room, at most once in a minute."""
        self._full_at = -inf
        self._room = 0
        self._room_read_at = -inf
        self._links = True
        """Whether a file of the source can be linked into the store."""
        self._unsynced: Final[dict[int, bytes]] = {}
        """Names of the copies that are not on the disk, by inode number of the source's file. The companion syncs a
        copy before it renames the copy."""
        self._changed = self._synced = object()
        """Stand for the last change of the store's directory, and for the last change that is on the disk."""
        self._clones = True
        self._pack = -1
        self._pack_name = b""
        self._pack_lock: Final = threading.Lock()
        self._copying: queue.Queue[tuple[int, int, os.stat_result]] | None = None
        self.losses: Final[deque[tuple[int, str]]] = deque()
        """Numbers of the contents that were not kept after all, with the reasons, until the trail has them."""

    def refusal(self, st: os.stat_result) -> str:
        """Return why the content of a file is not kept, or "".

        On a nearly full disk nothing is kept, not even by a link: the removal of a file must free its space.
        """
        if st.st_size > self.limits.max_file:
            return TOO_LARGE
        if self.size + st.st_size > self.limits.max_total:
            if (now := monotonic()) - self._full_at >= _SECONDS_FULL:
                self._full_at = now
                self.on_full(st.st_size)
            return FULL
        return self.refusal_of_copy(st)

    def refusal_of_copy(self, st: os.stat_result) -> str:
        """Return why a counted file is not copied, or ""."""
        if (now := monotonic()) - self._room_read_at >= _SECONDS_OF_ROOM:
            self._room_read_at = now
            self._room = free_room(self._directory)
        return NO_ROOM if st.st_size > self._room else ""

    def take(self, number: int, directory: int, name: bytes, permit: Permit) -> bool:  # noqa: ARG002 - a change takes one
        """Remove a name by moving its file into the store. False: the store cannot have it; nothing is changed."""
        return self._move_or_link(os.rename, number, directory, name)

    def link(self, number: int, directory: int, name: bytes) -> bool:
        """Link a file into the store. False: it cannot be linked."""
        return self._move_or_link(partial(os.link, follow_symlinks=False), number, directory, name)

    def _move_or_link(self, call: Callable[..., None], number: int, directory: int, name: bytes) -> bool:
        if not self._links:
            return False
        try:
            call(name, b"%d" % number, src_dir_fd=directory, dst_dir_fd=self._directory)
        except OSError as error:
            self._links = error.errno != errno.EXDEV
            return False
        self._changed = object()
        return True

    def count(self, st: os.stat_result) -> None:
        """Count a kept file."""
        self.size += st.st_size
        self._room -= st.st_size

    def drop(self, number: int) -> None:
        """Remove a pre-image whose change was not made."""
        with suppress(OSError):
            os.unlink(b"%d" % number, dir_fd=self._directory)

    def copy(self, number: int, fd: int, st: os.stat_result, *, packs: bool = True) -> str:
        """Clone or copy the content of an open file; return why it was not kept, or "".

        The name appears when the copy is complete: a killed process leaves no half of a pre-image. `packs`: a small
        copy goes to the pack.
        """
        if packs and st.st_size <= _PACKED and not os.listxattr(fd):
            with self._pack_lock:
                return self._append(number, fd, st)
        name, incomplete = b"%d" % number, b"%d.copy" % number
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            copy = os.open(incomplete, flags, 0o600, dir_fd=self._directory)
        except OSError as error:
            return _reason(error)
        try:
            self._fill(copy, fd, st.st_size)
            os.rename(incomplete, name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        except OSError as error:
            with suppress(OSError):
                os.unlink(incomplete, dir_fd=self._directory)
            return _reason(error)
        finally:
            os.close(copy)
        self._note_unsynced(st.st_ino, name)
        return ""

    def _append(self, number: int, fd: int, st: os.stat_result) -> str:
        """Copy the content of a small file to the pack; return why it was not kept, or ""."""
        try:
            if self._pack < 0:
                flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._pack_name = b"%s-%d" % (PACK.encode(), number)
                self._pack = os.open(self._pack_name, flags, 0o600, dir_fd=self._directory)
            data = os.pread(fd, st.st_size, 0)
            header = HEADER.pack(number, len(data), zlib.crc32(data))
            if os.writev(self._pack, [header, data]) != len(header) + len(data):
                self._end_pack()  # readers skip the incomplete copy at its end
                return FULL
        except OSError as error:
            return _reason(error)
        self._note_unsynced(st.st_ino, self._pack_name)
        return ""

    def close_pack(self) -> None:
        """Close the pack, so that the companion can take its copies. The next small copy begins another pack."""
        with self._pack_lock:
            self._end_pack()

    def _end_pack(self) -> None:
        if self._pack >= 0:
            os.close(self._pack)
            self._pack = -1

    def _note_unsynced(self, ino: int, name: bytes) -> None:
        self._unsynced[ino] = name
        while len(self._unsynced) > _MOST_UNSYNCED:
            del self._unsynced[next(iter(self._unsynced))]
        self._changed = object()

    def copy_later(self, number: int, fd: int, st: os.stat_result) -> None:
        """Have a thread copy the content of a file that is about to lose its name. Takes a descriptor."""
        if self._copying is None:
            self._copying = queue.Queue()
            threading.Thread(target=self._copy_each, args=(self._copying,), daemon=True).start()
        self._copying.put((number, fd, st))
        self._note_unsynced(st.st_ino, b"%d" % number)

    def _copy_each(self, waiting: queue.Queue[tuple[int, int, os.stat_result]]) -> None:
        while True:
            number, fd, st = waiting.get()
            if reason := self.copy(number, fd, st, packs=False):
                self.losses.append((number, reason))
            os.close(fd)
            waiting.task_done()

    @property
    def is_copying(self) -> bool:
        """Whether the thread of `copy_later` has work."""
        return self._copying is not None and self._copying.unfinished_tasks > 0

    def wait_for_copies(self) -> None:
        """Return when the thread of `copy_later` has no work. Any thread."""
        if self._copying is not None:
            self._copying.join()

    def replace(self, number: int, fd: int, st: os.stat_result) -> str:
        """Replace a linked file by a copy of its present content, because the file will be written.

        Return why the copy was not made, or "".
        """
        if not (reason := self.copy(number, fd, st, packs=False)):
            self._room -= st.st_size
        return reason

    def sync(self, ino: int) -> None:
        """Write the pre-image of a file to the disk, if it is not there: its new content will be. Any thread."""
        changed = self._changed
        if self._synced is changed and ino not in self._unsynced:
            return
        name = self._unsynced.pop(ino, None)
        if name is not None:
            self.wait_for_copies()
            with suppress(OSError):  # it was never complete, was removed, or was synced and renamed
                fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._directory)
                try:
                    os.fdatasync(fd)
                finally:
                    os.close(fd)
        os.fsync(self._directory)
        self._synced = changed

    def _fill(self, copy: int, fd: int, size: int) -> None:
        """Give an empty file the content of another, by FICLONE or by a copy, and its extended attributes. OSError."""
        for name in os.listxattr(fd):
            with suppress(OSError):  # this file system may not support it
                os.setxattr(copy, name, os.getxattr(fd, name))
        if self._clones:
            try:
                fcntl.ioctl(copy, _FICLONE, fd)
            except OSError as error:
                self._clones = error.errno not in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL)
            else:
                return
        at = 0
        while at < size:
            sent = os.sendfile(copy, fd, at, min(size - at, _MOST_SENT))
            if not sent:
                break
            at += sent

    def close(self) -> None:
        """Close the store."""
        self.close_pack()
        os.close(self._directory)


def free_room(directory: int) -> int:
    """Return the free bytes of the disk of a directory beyond the reserve; below 0: the reserve is in use."""
    disk = os.fstatvfs(directory)
    if not disk.f_blocks:  # a disk without a limit
        return 1 << 62
    return disk.f_bavail * disk.f_frsize - min(_RESERVE, disk.f_blocks * disk.f_frsize // 20)


def _reason(error: OSError) -> str:
    return f"the store cannot be written: {errno.errorcode.get(error.errno or 0, 'EIO')}"


def xattrs_of(path: bytes, longest: int = LONGEST_XATTR) -> dict[str, str]:
    """Return the extended attributes of a file as hex, without values longer than `longest` bytes. Never raises."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for name in os.listxattr(path, follow_symlinks=False):
            value = os.getxattr(path, name, follow_symlinks=False)
            if len(value) <= longest:
                found[name] = value.hex()
    return found


class PathKeeper:
    """Keeps the pre-images of changes that a guard makes by path (`enforcement.authorizer.Keeper`)."""

    def __init__(self, root: int, store: PreimageStore, note_linked: Callable[[int, int], None] | None = None) -> None:
        """`root`: descriptor of the source. `note_linked` gets inode number and number of a pre-image: `Node.kept`."""
        self._root: Final = root
        self._store: Final = store
        self._note_linked: Final = note_linked
        self.linked: Final[dict[int, int]] = {}
        """Inode numbers of linked pre-images of changes without an outcome, by number."""

    def before(self, request: Request, details: dict[str, Any]) -> dict[str, Any]:
        """Return what the intent of a change says of the file at the path, if there is one, and of its directory."""
        found: dict[str, Any] = {}
        to = str(details.get("to", request.path))
        if to.rpartition("/")[0] != request.path.rpartition("/")[0]:
            with suppress(OSError), self._directory(to) as (directory, _):
                found[TO_DIR_TIMES] = os.fstat(directory).st_mtime_ns
        if details.get("exchange"):
            with suppress(OSError), self._directory(to) as (directory, name):
                found[REPLACED] = state_text(os.stat(name, dir_fd=directory, follow_symlinks=False))
        with suppress(OSError), self._directory(request.path) as (directory, name):
            if request.operation in OF_NAMES:
                found[DIR_TIMES] = os.fstat(directory).st_mtime_ns
            found |= removal_details(directory, name, os.stat(name, dir_fd=directory, follow_symlinks=False))
        return found

    def keep(self, number: int, request: Request, details: dict[str, Any]) -> str:
        """Keep the content that a change removes or replaces; return why it is not kept, or ""."""
        if request.operation not in _OF_CONTENT or BEFORE not in details:
            return ""
        try:
            with self._directory(request.path) as (directory, name):
                return self._keep(number, directory, name, loses_name=BY in details or request.operation is _DELETE)
        except OSError:
            return UNREADABLE

    def _keep(self, number: int, directory: int, name: bytes, *, loses_name: bool) -> str:
        st = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if not stat.S_ISREG(st.st_mode) or (loses_name and st.st_nlink > 1):
            return ""
        reason = self._store.refusal(st)
        if reason:
            return reason
        if loses_name and self._store.link(number, directory, name):
            self._store.count(st)
            self.linked[number] = st.st_ino
            if self._note_linked is not None:
                self._note_linked(st.st_ino, number)
            return ""
        if st.st_size > COPIED_AT_ONCE and self._note_linked is not None and not loses_name:
            return TOO_LONG
        self._store.count(st)
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
        if st.st_size > COPIED_AT_ONCE and self._note_linked is not None:
            self._store.copy_later(number, fd, st)
            self._note_linked(st.st_ino, -number)
            return ""
        try:
            return self._store.copy(number, fd, st)
        finally:
            os.close(fd)

    def after(self, number: int, request: Request, details: dict[str, Any]) -> dict[str, Any]:
        """Return what the outcome of a change says of the file at the path, or at the new path of a rename."""
        self.linked.pop(number, None)
        to = str(details.get("to", request.path))
        found: dict[str, Any] = {}
        for key, path in ((DIR_TIMES, request.path), (TO_DIR_TIMES, to)):
            if key in details:
                with suppress(OSError), self._directory(path) as (directory, _):
                    found[key] = f"{details[key]} {os.fstat(directory).st_mtime_ns}"
        with suppress(OSError), self._directory(to) as (directory, name):
            found[AFTER] = state_text(os.stat(name, dir_fd=directory, follow_symlinks=False))
        return found

    def drop(self, number: int) -> None:
        """Remove a pre-image: the change was not made."""
        self._store.drop(number)
        ino = self.linked.pop(number, None)
        if ino is not None and self._note_linked is not None:
            self._note_linked(ino, 0)

    @contextmanager
    def _directory(self, path: str) -> Iterator[tuple[int, bytes]]:
        """Open the directory of a path. OSError."""
        above, _, name = os.fsencode(path).rpartition(b"/")
        directory = open_beneath(self._root, above or b".", os.O_PATH | os.O_DIRECTORY)
        try:
            yield directory, name or b"."
        finally:
            os.close(directory)


def removal_details(directory: int, name: bytes, st: os.stat_result) -> dict[str, Any]:
    """Return the details of an intent to remove or replace a name of the source."""
    details: dict[str, Any] = {BEFORE: state_text(st)}
    if stat.S_ISLNK(st.st_mode):
        details[OLD_TARGET] = os.fsdecode(os.readlink(name, dir_fd=directory))
    elif stat.S_ISDIR(st.st_mode) and (xattrs := xattrs_of(b"/proc/self/fd/%d/%s" % (directory, name))):
        details[XATTRS] = xattrs
    return details
