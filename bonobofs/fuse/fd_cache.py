"""Descriptors of what lies in the source: opened beneath it, compared with the node, kept by rule.

A node is reached by its directory's descriptor and its name, below a descriptor of the source that is opened before
mounting; whatever is opened is compared with the node afterwards, because another process may have put something
else in its place meanwhile (RESOLVE_BENEATH does not see a directory that was moved away, or a file that was
replaced). A mismatch is ESTALE: the kernel looks the name up again.

No RELEASE ever comes (opens are answered ENOSYS), so descriptors are kept by rule: those that cannot be had again are
held until FORGET, the others in a small cache that drops them when quiet. A descriptor open for writing is dropped
soon: while it lasts, whoever runs the file by its source path gets "text file busy".
"""

from __future__ import annotations

import errno
import os
import queue
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Final

from bonobofs.fuse.inode_table import InodeTable, Node
from bonobofs.policy.decision import Layer
from bonobofs.policy.request import Kind, WorkspacePath, kind_of
from bonobofs.system import mounts, syscalls

R: Final = os.R_OK
W: Final = os.W_OK
FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
RECHECK: Final = 0.002
"""Seconds for which a descriptor is used without looking whether its name still leads to it. What replaces or removes
the file is seen at once all the same, by its link count."""
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK
_PRUNED_AT_ONCE: Final = 64
_LARGE: Final = 4 << 20
"""Bytes of a removed file whose last descriptor is closed by a thread: 400 MB take 40 ms."""
_LONG_PATH: Final = 3800
"""Paths beyond this many bytes are walked in parts: PATH_MAX is 4096."""

_NO_HANDLE: Final = b"none"
"""The handle of what was gone when its handle was read. It is shorter than those of file systems, and equals none."""

Opener = Callable[[int], int]


def stale() -> OSError:
    """The name does not lead to the node any more."""
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE))


class FdCache:
    """The open descriptors of one source. Used by one thread."""

    _closing: queue.SimpleQueue[int] | None = None
    """Descriptors for the thread that closes large removed files; None: it has not been started."""

    def __init__(
        self, root: int, inodes: InodeTable, *, cache: int, pins: int, layer: Layer = Layer.SOURCE, place: str = ""
    ) -> None:
        """Take an open descriptor of the root; `cache` is how many descriptors may be kept open.

        `pins` is how many more may be open for nodes that cannot be reached by name, until FORGET.
        `layer` says of which layer it is: of the source, or of what is held apart from it. `place` is the path at which
        the mount shows the root of this layer.
        """
        self.layer: Final = layer
        self.place: Final = WorkspacePath(place)
        self.numbers: Final = inodes.add_layer()
        """Added to an inode number, it is that of a node."""
        self.root: Final = root
        self.device: Final = os.fstat(root).st_dev
        self.privileged: Final = os.geteuid() == 0
        self._handle_flags: Final = syscalls.handle_flags(root)
        self.now = 0.0
        self._inodes: Final = inodes
        self._cache: Final = cache
        self._pins: Final = pins
        self._pinned: Final[set[int]] = set()
        """Ids of the nodes with a descriptor outside `_open` and `_held`."""
        self._open: Final[dict[int, Node]] = {}
        self._mountinfo: Final = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        self._mounts: Final = select.poll()
        self._mounts.register(self._mountinfo, select.POLLPRI)
        self._mounts_seen = False
        self._covered: frozenset[str] = frozenset()
        self._request = 0
        self._verified_dir: Node | None = None
        """The directory that was last looked at for a change, within the request that is being served."""
        self._quiet_since = 0
        self._held: Final[dict[int, Node]] = {}
        self._released: Final[list[int]] = []
        self._released_at = 0
        self._holds = 0
        self._prune_due = 0
        self.on_stale: Callable[[Node], None] = lambda _: None
        """Told of a node that is not where the kernel believes it to be."""

    def read_mounts(self) -> None:
        """Look what is mounted below the source by now. Of another file system st_dev tells; a bind mount is only here.

        The source's own path may be the mountpoint: only what lies below it counts.
        """
        if self._mounts_seen and not self._mounts.poll(0):
            return
        self._mounts_seen = True
        os.lseek(self._mountinfo, 0, os.SEEK_SET)
        with open(self._mountinfo, "rb", closefd=False) as table:
            below = mounts.points_below(table.read(), os.readlink(f"/proc/self/fd/{self.root}"))
        self._covered = frozenset(below)

    def is_mounted_over(self, directory: Node, name: bytes) -> bool:
        """Whether something is mounted on this name of the source."""
        return bool(self._covered) and self._inodes.join(directory, name) in self._covered

    # -- reaching a node

    def stat_entry(self, directory: Node, name: bytes) -> os.stat_result:
        """What `name` in the directory is now. FileNotFoundError: it is not there."""
        return os.stat(name, dir_fd=self.directory(directory), follow_symlinks=False)

    def stat(self, node: Node, *, changing: bool = False) -> os.stat_result:
        """What the node is now. ESTALE: it is not where it was; before a change, no symlink may lead there either."""
        if node.parent is None:
            if node.pin < 0 and node.fd < 0:
                raise stale()
            return os.fstat(node.pin if node.pin >= 0 else node.fd)
        if node.is_dir:
            st = self._stat_path(node, strict=changing)
        else:
            try:
                st = os.stat(node.name, dir_fd=self.directory(node.parent, changing=changing), follow_symlinks=False)
            except FileNotFoundError:
                if not changing and self._keeps_removed(node):
                    return os.fstat(node.fd)
                raise self._stale(node) from None
            except PermissionError:
                if node.fd < 0:
                    raise
                return os.fstat(node.fd)  # the way there was closed to us since; who has the file open may go on
        if not self._is_node(node, st):
            if node.mounted_over:
                return st
            if not changing and self._keeps_removed(node):
                return os.fstat(node.fd)
            raise self._stale(node)
        # A new inode has a new change time: one that the kernel was told of is the old inode.
        if node.fingerprint != st.st_size << 62 | st.st_ctime_ns and self.is_number_reused(node):
            raise self._reused(node)
        node.checked = self.now
        return st

    def choose_reachable_name(self, node: Node) -> None:
        """The directory of the name that the node goes by was forgotten: let it go by another that can be followed."""
        for parent, name in self._inodes.links(node.ino):
            if parent.lookups > 0:
                try:
                    leads = self.leads_to(parent, name, node)
                except OSError:
                    continue
                if leads:
                    node.parent, node.name = parent, name
                    return

    def leads_to(self, parent: Node, name: bytes, node: Node) -> bool:
        """Whether the name leads to the node."""
        return self.stat_entry(parent, name).st_ino + self.numbers == node.ino

    def status(self, node: Node) -> os.stat_result:
        """As `stat`, but by the descriptor where that was compared with the name within RECHECK."""
        if node.fd >= 0 and node.parent is not None and self.now - node.checked < RECHECK:
            st = os.fstat(node.fd)
            if st.st_nlink:
                return st
        return self.stat(node)

    def directory(self, node: Node, *, changing: bool = False) -> int:
        """An open descriptor of the directory, which still lies where the node does.

        A change always looks, once for each request; a lookup trusts what was seen within RECHECK.
        """
        fd = node.fd
        if fd < 0:
            return self._open_directory(node)
        node.used = self._request
        if node.parent is None or node is self._verified_dir or (not changing and self.now - node.checked < RECHECK):
            return fd
        st = self._stat_path(node, strict=changing)
        if not self._is_node(node, st):
            raise self._stale(node)
        node.checked = self.now
        if changing:
            self._verified_dir = node
        return fd

    def _path(self, node: Node) -> bytes:
        """The path of a directory from the root of this layer."""
        path = self._inodes.path(node).encode("utf-8", "surrogateescape")
        return path[len(self.place) + 1 :] if self.place else path

    def _stat_path(self, node: Node, *, strict: bool = False) -> os.stat_result:
        """What lies at the directory's path. `strict`: no symlink on the way, as it might lead back from outside."""
        path = self._path(node)
        if len(path) < _LONG_PATH and not (strict and b"/" in path):
            try:
                return os.stat(path, dir_fd=self.root, follow_symlinks=False)
            except FileNotFoundError:
                raise self._stale(node) from None
        try:
            fd = self._walk(path)
        except (FileNotFoundError, NotADirectoryError):
            raise self._stale(node) from None
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EXDEV):
                raise self._stale(node) from None
            raise
        try:
            return os.fstat(fd)
        finally:
            os.close(fd)

    def stat_below(self, path: bytes) -> os.stat_result:
        """What lies at `path` below the source, however long that is."""
        if len(path) < _LONG_PATH:
            return os.stat(path, dir_fd=self.root, follow_symlinks=False)
        above, name = os.path.split(path)
        fd = self._walk(above)
        try:
            return os.stat(name, dir_fd=fd, follow_symlinks=False)
        finally:
            os.close(fd)

    def _walk(self, path: bytes) -> int:
        """An O_PATH descriptor of a directory whose path may be longer than one system call takes."""
        fd = self.root
        while path:
            cut = path.rfind(b"/", 0, _LONG_PATH) if len(path) >= _LONG_PATH else len(path)
            part, path = path[:cut], path[cut + 1 :]
            try:
                below = syscalls.open_beneath(fd, part, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
            finally:
                if fd != self.root:
                    os.close(fd)
            fd = below
        return fd

    def _open_directory(self, node: Node) -> int:
        if node.parent is None:
            if node.pin < 0:
                raise stale()
            node.position = 0
            return self._keep(node, self._reopen(node, os.O_RDONLY | os.O_DIRECTORY), R)
        path = self._path(node)
        above = self.root
        if len(path) >= _LONG_PATH:
            above = self._walk(os.path.dirname(path))
            path = node.name
        access = R
        try:
            fd = self._open_at(above, path, _DIRECTORY)
        except PermissionError:
            # An ordinary user's directory without read permission can still be passed through.
            fd = self._open_at(above, path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
            access = 0
        finally:
            if above != self.root:
                os.close(above)
        node.position = 0
        return self._keep(node, self._verified(node, fd), access)

    def listed(self, node: Node) -> int:
        """A descriptor of the directory that can be read. PermissionError: the serving user may not."""
        fd = self.directory(node)
        if not node.access & R:
            self._close_cached(node)
            fd = self._open_directory(node)
            if not node.access & R:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return fd

    def file(self, node: Node, need: int) -> int:
        """A descriptor of the file that can be read (R) or written (W), and is what the node's name leads to."""
        fd = node.fd
        if fd >= 0 and node.access & need == need:
            node.used = self._request
            if node.parent is not None and self.now - node.checked >= RECHECK:
                self._recheck(node, reading=need == R)
            return fd
        if node.parent is None:
            if node.pin < 0 and fd < 0:
                raise stale()
            fd, access = self._open_as(need, lambda flags: self._reopen(node, flags))
        else:
            directory, name = self.directory(node.parent), node.name
            fd, access = self._open_as(need, lambda flags: self._open_name(directory, name, flags))
            self._verified(node, fd)
        if node.keeps_fd:
            # It was held because it may not be had again: what the new one adds is worth less.
            self._close_later(node.fd)
            if node.pin == node.fd:
                node.pin = fd
            node.fd, node.access = fd, access
            return fd
        return self._keep(node, fd, access)

    def confirm_name(self, node: Node) -> None:
        """Look that the file's name leads to it, however lately that was seen: a verdict is about to rest on it.

        Look at the link count afterwards: while a name leads to the file, every other name counts too.
        """
        if node.parent is not None:
            self._recheck(node)

    def _recheck(self, node: Node, *, reading: bool = False) -> None:
        """Raise ESTALE if the name does not lead to the node. `reading`: a removed file is read to its end."""
        assert node.parent is not None
        if node.keeps_fd:
            return
        try:
            st = os.stat(node.name, dir_fd=self.directory(node.parent, changing=True), follow_symlinks=False)
        except PermissionError:
            return  # the way there was closed to us since; who has the file open may go on
        except FileNotFoundError:
            if reading and self._keeps_removed(node):
                return
            raise self._stale(node) from None
        if not self._is_node(node, st):
            if reading and self._keeps_removed(node):
                return
            self._close_cached(node)
            raise self._stale(node)
        node.checked = self.now

    def _keeps_removed(self, node: Node) -> bool:
        """Whether the file was removed or replaced behind the mount while a descriptor of it is open.

        That descriptor is then held until FORGET, so that a reader gets the old file to its end. A file that has a name
        anywhere is none: it was moved, perhaps to where other rules hold.
        """
        if node.kind is not Kind.FILE or node.fd < 0 or self.is_full or os.fstat(node.fd).st_nlink:
            return False
        self.on_stale(node)
        self.hold(node)
        self._inodes.cut_off(node)
        return True

    def _open_as(self, need: int, opener: Opener) -> tuple[int, int]:
        if need & W:
            try:
                return opener(os.O_RDWR), R | W
            except PermissionError:
                return opener(os.O_WRONLY), W
        return opener(os.O_RDONLY), R

    def _open_name(self, directory: int, name: bytes, flags: int) -> int:
        """One name in a directory: O_NOFOLLOW says as much of it as `_open_at`, for a third of the cost."""
        try:
            return os.open(name, flags | FILE | os.O_CLOEXEC, dir_fd=directory)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self.close_unused()
                return os.open(name, flags | FILE | os.O_CLOEXEC, dir_fd=directory)
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise stale() from error
            raise

    def _open_at(self, directory: int, path: bytes, flags: int) -> int:
        try:
            return syscalls.open_beneath(directory, path, flags)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self.close_unused()
                return syscalls.open_beneath(directory, path, flags)
            if error.errno in (errno.ELOOP, errno.EXDEV, errno.ENXIO):
                raise stale() from error
            raise

    def _reopen(self, node: Node, flags: int) -> int:
        through = node.pin if node.pin >= 0 else node.fd
        return os.open(f"/proc/self/fd/{through}", flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)

    def _verified(self, node: Node, fd: int) -> int:
        """`fd`, if it is the node in this life of its inode number; else it is closed and ESTALE raised."""
        if not self._is_node(node, os.fstat(fd)):
            os.close(fd)
            raise self._stale(node)
        if node.handle and self.handle(fd) != node.handle:
            os.close(fd)
            raise self._reused(node)
        node.checked = self.now
        return fd

    def handle(self, fd: int, name: bytes = b"") -> bytes:
        """The file handle of `fd`, or of `name` in it; empty: the file system has none."""
        if self._handle_flags < 0:
            return b""
        try:
            return syscalls.file_handle(fd, name, self._handle_flags)
        except OSError:
            return _NO_HANDLE

    def is_number_reused(self, node: Node) -> bool:
        """Whether the node's inode was removed, and its number is used by another file under its name. OSError."""
        if node.fd >= 0 or not node.handle or node.parent is None:
            return False  # a number is not used again while a descriptor holds it
        return self.handle(self.directory(node.parent), node.name) != node.handle

    def _reused(self, node: Node) -> OSError:
        """The node's inode was removed, and its number is used by another file."""
        error = self._stale(node)
        self._inodes.cut_off(node)
        return error

    def _any_fd(self, node: Node) -> int:
        """Any descriptor of exactly this inode, O_PATH ones included."""
        if node.is_dir:
            return self.directory(node, changing=True)
        if node.pin >= 0:
            return node.pin
        if node.fd < 0:
            if node.parent is None:
                raise stale()
            fd = self._open_at(self.directory(node.parent), node.name, os.O_PATH | os.O_NOFOLLOW)
            return self._keep(node, self._verified(node, fd), 0)
        node.used = self._request
        if node.parent is not None and self.now - node.checked >= RECHECK:
            self._recheck(node)
        return node.fd

    def _fd_or_path(self, node: Node) -> int | bytes:
        """What a system call takes for exactly this inode: a descriptor, or a path that leads to one opened O_PATH."""
        fd = self._any_fd(node)
        return fd if fd == node.fd and node.access else b"/proc/self/fd/%d" % fd

    def _inode_path(self, node: Node) -> bytes:
        """A path by which the kernel reaches exactly this inode: by name, chmod and xattrs would follow a symlink."""
        return b"/proc/self/fd/%d" % self._any_fd(node)

    def _is_node(self, node: Node, st: os.stat_result) -> bool:
        return st.st_ino + self.numbers == node.ino and st.st_dev == self.device and kind_of(st.st_mode) is node.kind

    def _stale(self, node: Node) -> OSError:
        """The kernel believes a name that no longer leads to the node: it is told to look again."""
        node.name_unverified = True
        self.on_stale(node)
        return stale()

    # -- keeping descriptors

    def _close_later(self, fd: int) -> None:
        """Close a descriptor once this request is done: it may be in use by the request itself."""
        self._released.append(fd)
        self._released_at = self._request

    def _keep(self, node: Node, fd: int, access: int) -> int:
        if node.fd >= 0:
            self._close_later(node.fd)
        node.fd = fd
        node.access = access
        node.used = self._request
        kept = self._open
        kept.pop(node.id, None)
        kept[node.id] = node
        return fd

    def _close_cached(self, node: Node) -> None:
        self._open.pop(node.id, None)
        if node.fd >= 0 and not node.keeps_fd:
            if not node.handle:
                node.handle = self.handle(node.fd)
            self._close(node.fd)
            node.fd = -1
            node.access = 0

    @property
    def request_number(self) -> int:
        """Another number for each request, and for each slice of a long one."""
        return self._request

    def begin(self, now: float) -> None:
        """A request begins at this time."""
        self.now = now
        self._request += 1
        self._verified_dir = None

    def nodes_to_prune(self) -> list[Node]:
        """Some of the nodes that are held, oldest first, where they are more than a cache full.

        Most are open to nobody: if the kernel is made to look their names up again, it forgets those that are not.
        """
        if len(self._held) <= self._cache or self._holds < self._prune_due:
            return []
        self._prune_due = self._holds + _PRUNED_AT_ONCE
        some = list(self._held.values())[:_PRUNED_AT_ONCE]
        for node in some:
            self._held[node.id] = self._held.pop(node.id)
        return some

    def close_idle(self) -> None:
        """Close what was not used since the call before the last one."""
        self.close_released()
        self._prune_due = 0
        for node in [node for node in self._open.values() if node.used < self._quiet_since]:
            self._close_cached(node)
        self._quiet_since = self._request
        self._request += 1

    def close_unused(self) -> None:
        """Close every descriptor that can be had again and is not in use by this request."""
        if self._released_at != self._request:
            self.close_released()
        for node in [node for node in self._open.values() if node.used < self._request]:
            self._close_cached(node)

    @property
    def is_full(self) -> bool:
        """Whether no further descriptor may be kept until FORGET."""
        return len(self._held) + len(self._pinned) >= self._pins

    @property
    def is_crowded(self) -> bool:
        """Whether the rest of those descriptors is left to files that are removed while they are open."""
        return len(self._held) + len(self._pinned) >= self._pins - self._pins // 9

    def hold(self, node: Node) -> None:
        """Keep the node's open descriptor until FORGET, if it has one and there is room."""
        if node.fd >= 0 and not self.is_full:
            node.keeps_fd = True
            self._open.pop(node.id, None)
            self._held[node.id] = node
            self._holds += 1

    def hold_before_mode(self, node: Node, mode: int) -> None:
        """Hold the file open if `mode` will take its owner's right to open it again, as a program's own open file."""
        if self.privileged or (node.keeps_fd and node.access == R | W):
            return
        if node.is_dir:
            if mode & 0o100 == 0:
                files = (each for each in self._inodes if each.kind is Kind.FILE and self._inodes.descends(each, node))
                for below in list(islice(files, self._cache)):
                    self._hold_open(below)
        elif mode & 0o600 != 0o600:
            self._hold_open(node)

    def _hold_open(self, node: Node) -> None:
        try:
            self.file(node, R | W)
        except PermissionError:
            try:
                self.file(node, R)
            except PermissionError:
                return  # nobody has it open through this mount, or it would be held
        self.hold(node)

    def pin(self, node: Node, directory: int, name: bytes) -> None:
        """Keep hold of a node whose last known name is about to go, for those who have it open.

        ENFILE: the programs of this mount keep too many removed files open.
        """
        if node.keeps_fd or node.pin >= 0:
            return
        if self.is_full:
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        if node.fd >= 0:
            self.hold(node)
            node.pin = node.fd
            return
        node.pin = self._verified(node, self._open_name(directory, name, os.O_PATH))
        self._pinned.add(node.id)

    def hold_nameless(self, node: Node, fd: int, access: int) -> None:
        """Keep the only way to a file that never had a name, whatever the kernel forgets."""
        node.fd = node.pin = fd
        node.access = access
        node.keeps_fd = True
        self._pinned.add(node.id)

    def unpin(self, node: Node) -> None:
        """The node has a name after all."""
        if node.pin < 0:
            return
        self._pinned.discard(node.id)
        if node.pin == node.fd:
            node.keeps_fd = False
            self._held.pop(node.id, None)
            self._open[node.id] = node
        else:
            os.close(node.pin)
        node.pin = -1

    def release(self, node: Node) -> None:
        """The kernel has forgotten the node: what is open for it is to be closed.

        Closing the last descriptor of a removed file frees its blocks, which takes as long as removing it did. It is
        done after the next reply, while the caller goes on; of a large file, in a thread.
        """
        if node.keeps_fd:
            self._held.pop(node.id, None)
        self._pinned.discard(node.id)
        self._open.pop(node.id, None)
        for fd in {node.fd, node.pin} - {-1}:
            self._close_later(fd)
        node.fd = node.pin = -1
        node.keeps_fd = False

    def after(self) -> None:
        """A reply has been sent. Only here are descriptors dropped for want of room: none is in use."""
        kept = self._open
        while len(kept) > self._cache:
            self._close_cached(kept[next(iter(kept))])
        if self._released and self._request != self._released_at:
            self.close_released()

    def close_released(self) -> None:
        """Close what the kernel has forgotten."""
        for fd in self._released:
            self._close(fd)
        self._released.clear()

    def _close(self, fd: int) -> None:
        st = os.fstat(fd)
        if st.st_nlink or st.st_blocks * 512 < _LARGE:
            os.close(fd)
            return
        if self._closing is None:
            self._closing = queue.SimpleQueue()
            threading.Thread(target=_close_each, args=(self._closing,), daemon=True).start()
        self._closing.put(fd)


@contextmanager
def duplicates(*descriptors: int) -> Iterator[list[int]]:
    """Duplicates of descriptors that may be dropped while a thread uses them."""
    own: list[int] = []
    try:
        for fd in descriptors:
            own.append(os.dup(fd))  # noqa: PERF401 - those before one that fails are closed
        yield own
    finally:
        for fd in own:
            os.close(fd)


def _close_each(descriptors: queue.SimpleQueue[int]) -> None:
    while True:
        os.close(descriptors.get())
