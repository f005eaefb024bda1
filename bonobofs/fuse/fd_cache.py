"""The cache of open descriptors of one layer. Each is opened beneath the root and verified against its node.

A node is opened by name in its directory, beneath a descriptor of the source that was opened before the mount. The
result is then compared with the node, because another process may have replaced the file or moved the directory,
which RESOLVE_BENEATH does not detect. A mismatch is ESTALE, and the kernel looks the name up again.

The kernel sends no RELEASE, because OPEN is answered with ENOSYS. Descriptors that could not be opened again are kept
until FORGET. Others are in a small cache that closes them when idle. A descriptor open for writing is closed soon,
because no process can execute the file meanwhile (ETXTBSY).
"""

from __future__ import annotations

import errno
import os
import queue
import re
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Final

from bonobofs.errors import os_error
from bonobofs.fuse.inode_table import InodeTable, Node
from bonobofs.policy.decision import Layer
from bonobofs.policy.request import Kind, WorkspacePath, kind_of
from bonobofs.system import mounts, syscalls

R: Final = os.R_OK
W: Final = os.W_OK
FILE: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
RECHECK: Final = 0.002
"""Seconds for which a descriptor is used without verifying its name again.

A removed or replaced file is detected at once by its link count.
"""
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK
_PRUNED_AT_ONCE: Final = 64
_LARGE: Final = 4 << 20
"""Size of a removed file whose last descriptor a thread closes: 400 MB take 40 ms."""
_REMOVED: Final = re.compile(rb".* \(deleted\)|.*/undo/[0-9a-f-]{36}/\d+(-\d+-[0-9a-f]{64})?", re.DOTALL)
"""Path of the descriptor of a file whose name was removed or replaced, or that is a pre-image."""
_LONG_PATH: Final = 3800
"""Paths with more bytes are walked in parts; PATH_MAX is 4096."""

_NO_HANDLE: Final = b"none"
"""Handle of a file that was gone when its handle was read. Real handles are longer, so it equals none."""

Opener = Callable[[int], int]


def stale() -> OSError:
    """Return ESTALE: the name does not lead to the node."""
    return os_error(errno.ESTALE)


class FdCache:
    """The open descriptors of one layer. Used by one thread."""

    _closing: queue.SimpleQueue[int] | None = None
    """Descriptors for the thread that closes large removed files; None until it is started."""

    def __init__(
        self, root: int, inodes: InodeTable, *, cache: int, pins: int, layer: Layer = Layer.SOURCE, prefix: str = ""
    ) -> None:
        """Take an open descriptor of the root. `cache` is the maximum of cached descriptors.

        `pins` is the maximum of descriptors of nodes without a name, which are kept until FORGET. `prefix` is the path
        at which the mount shows the root of this layer.
        """
        self.layer: Final = layer
        self.prefix: Final = WorkspacePath(prefix)
        self.ino_offset: Final = inodes.add_layer()
        """Offset between the inode numbers of this layer and those of its nodes."""
        self.root: Final = root
        self.device: Final = os.fstat(root).st_dev
        self.privileged: Final = os.geteuid() == 0
        self._handle_flags: Final = syscalls.handle_flags(root)
        self.now = 0.0
        self._inodes: Final = inodes
        self._cache: Final = cache
        self._pins: Final = pins
        self._pinned: Final[set[int]] = set()
        """Ids of the nodes with a descriptor outside `_open` and `_kept`."""
        self._open: Final[dict[int, Node]] = {}
        self._mountinfo: Final = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        self._mounts: Final = select.poll()
        self._mounts.register(self._mountinfo, select.POLLPRI)
        self._mounts_seen = False
        self._covered: frozenset[str] = frozenset()
        self._request = 0
        self._verified_dir: Node | None = None
        """The directory that was last verified for a change, within the current request."""
        self._quiet_since = 0
        self._kept: Final[dict[int, Node]] = {}
        self._released: Final[list[int]] = []
        self._released_at = 0
        self._kept_count = 0
        self._prune_due = 0
        self.on_stale: Callable[[Node], None] = lambda _: None
        """Called with a node that is not where the kernel has it cached."""

    def read_mounts(self) -> None:
        """Read the mounts below the source if they have changed. st_dev shows other file systems, but not bind mounts.

        The source itself may be a mountpoint, so only mounts below it count.
        """
        if self._mounts_seen and not self._mounts.poll(0):
            return
        self._mounts_seen = True
        os.lseek(self._mountinfo, 0, os.SEEK_SET)
        with open(self._mountinfo, "rb", closefd=False) as table:
            below = mounts.points_below(table.read(), os.readlink(f"/proc/self/fd/{self.root}"))
        self._covered = frozenset(below)

    def is_mounted_over(self, directory: Node, name: bytes) -> bool:
        """Whether this name of the source is a mountpoint."""
        return bool(self._covered) and self._inodes.join(directory, name) in self._covered

    # -- access to nodes

    def stat_entry(self, directory: Node, name: bytes) -> os.stat_result:
        """Return the stat of a name in the directory. FileNotFoundError."""
        return os.stat(name, dir_fd=self.directory(directory), follow_symlinks=False)

    def stat(self, node: Node, *, changing: bool = False) -> os.stat_result:
        """Return the stat of the node. ESTALE: its name does not lead to it.

        `changing`: a symlink on the path is ESTALE too.
        """
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
                if not changing and self._keep_removed(node):
                    return os.fstat(node.fd)
                raise self._stale(node) from None
            except PermissionError:
                if node.fd < 0:
                    raise
                # this user may no longer search the directory; programs that have the file open continue
                return os.fstat(node.fd)
        if not self._is_node(node, st):
            if node.mounted_over:
                return st
            if not changing and self._keep_removed(node):
                return os.fstat(node.fd)
            raise self._stale(node)
        # A new inode has a new change time, so a node with the known fingerprint is still the same inode.
        if node.fingerprint != st.st_size << 62 | st.st_ctime_ns and self.is_number_reused(node):
            raise self._reused(node)
        node.checked = self.now
        return st

    def choose_reachable_name(self, node: Node) -> None:
        """Give a node with a forgotten directory a name in a known one, because renames of that one are followed."""
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
        return self.stat_entry(parent, name).st_ino + self.ino_offset == node.ino

    def recent_stat(self, node: Node) -> os.stat_result:
        """Return the stat by the descriptor if it was verified within RECHECK, else as `stat` does."""
        if node.fd >= 0 and node.parent is not None and self.now - node.checked < RECHECK:
            st = os.fstat(node.fd)
            if st.st_nlink:
                return st
        return self.stat(node)

    def directory(self, node: Node, *, changing: bool = False) -> int:
        """Return a verified descriptor of the directory.

        For a change, it is verified once in each request. For a lookup, a verification within RECHECK is enough.
        """
        fd = node.fd
        if fd < 0:
            return self._open_directory(node)
        node.used = self._request
        if node is self._verified_dir or (not changing and (node.parent is None or self.now - node.checked < RECHECK)):
            return fd
        if node.parent is None:
            st = os.fstat(fd)
        else:
            st = self._stat_path(node, strict=changing)
            if not self._is_node(node, st):
                raise self._stale(node)
            node.checked = self.now
        if changing:
            node.mtime = st.st_mtime_ns
            self._verified_dir = node
        return fd

    def _path(self, node: Node) -> bytes:
        """Return the directory's path below the root of this layer."""
        path = self._inodes.path(node).encode("utf-8", "surrogateescape")
        return path[len(self.prefix) + 1 :] if self.prefix else path

    def _stat_path(self, node: Node, *, strict: bool = False) -> os.stat_result:
        """Return the stat of the directory's path.

        `strict` forbids symlinks on the path, which might lead back from outside.
        """
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
        """Return the stat of a path below the source, of any length."""
        if len(path) < _LONG_PATH:
            return os.stat(path, dir_fd=self.root, follow_symlinks=False)
        above, name = os.path.split(path)
        fd = self._walk(above)
        try:
            return os.stat(name, dir_fd=fd, follow_symlinks=False)
        finally:
            os.close(fd)

    def open_path(self, path: bytes) -> int:
        """Return a new O_PATH descriptor of a directory below the source, or of the source for b"".

        OSError; it does not follow symlinks.
        """
        return self._walk(path) if path else os.open(".", os.O_PATH | os.O_CLOEXEC, dir_fd=self.root)

    def _walk(self, path: bytes) -> int:
        """Return an O_PATH descriptor of a directory. The path may be longer than PATH_MAX."""
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
            return self._cache_fd(node, self._reopen(node, os.O_RDONLY | os.O_DIRECTORY), R)
        path = self._path(node)
        above = self.root
        if len(path) >= _LONG_PATH:
            above = self._walk(os.path.dirname(path))
            path = node.name
        access = R
        try:
            fd = self._open_at(above, path, _DIRECTORY)
        except PermissionError:
            # A user without read permission may still search the directory.
            fd = self._open_at(above, path, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
            access = 0
        finally:
            if above != self.root:
                os.close(above)
        node.position = 0
        return self._cache_fd(node, self._verified(node, fd), access)

    def readable_directory(self, node: Node) -> int:
        """Return a descriptor for listing the directory. PermissionError: the serving user may not read it."""
        fd = self.directory(node)
        if not node.access & R:
            self._close_cached(node)
            fd = self._open_directory(node)
            if not node.access & R:
                raise os_error(errno.EACCES)
        return fd

    def file(self, node: Node, need: int) -> int:
        """Return a verified descriptor of the file, opened for reading (R) or writing (W)."""
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
            # The descriptor was kept because it might not be opened again. The new one has more rights.
            self._close_later(node.fd)
            if node.pin == node.fd:
                node.pin = fd
            node.fd, node.access = fd, access
            return fd
        return self._cache_fd(node, fd, access)

    def confirm_name(self, node: Node) -> None:
        """Verify now that the name leads to the file, because a decision depends on it.

        Check the link count afterwards: while one name leads to the file, its other names count too.
        """
        if node.parent is not None:
            self._recheck(node)

    def _recheck(self, node: Node, *, reading: bool = False) -> None:
        """Raise ESTALE if the name does not lead to the node. `reading`: a removed file can be read to its end."""
        assert node.parent is not None
        if node.keeps_fd:
            return
        try:
            st = os.stat(node.name, dir_fd=self.directory(node.parent, changing=True), follow_symlinks=False)
        except PermissionError:
            return  # this user may no longer search the directory; programs that have the file open continue
        except FileNotFoundError:
            if reading and self._keep_removed(node):
                return
            raise self._stale(node) from None
        if not self._is_node(node, st):
            if reading and self._keep_removed(node):
                return
            self._close_cached(node)
            raise self._stale(node)
        node.checked = self.now

    def _keep_removed(self, node: Node) -> bool:
        """Keep the descriptor of a file that was removed or replaced externally. Return False for any other file.

        The node is detached and its descriptor kept until FORGET, so that programs read the old file to its end. A file
        that still has a name was moved, perhaps under other rules, and does not count. Another mount of the source may
        have moved or linked the file into its store of pre-images.
        """
        if node.kind is not Kind.FILE or node.fd < 0 or self.is_full:
            return False
        if os.fstat(node.fd).st_nlink and not _REMOVED.fullmatch(os.readlink(b"/proc/self/fd/%d" % node.fd)):
            return False
        self.on_stale(node)
        self.keep_open(node)
        self._inodes.detach(node)
        return True

    def _open_as(self, need: int, opener: Opener) -> tuple[int, int]:
        if need & W:
            try:
                return opener(os.O_RDWR), R | W
            except PermissionError:
                return opener(os.O_WRONLY), W
        return opener(os.O_RDONLY), R

    def _open_name(self, directory: int, name: bytes, flags: int) -> int:
        """Open a name in a directory.

        For one name, O_NOFOLLOW is as strict as `_open_at` and takes a third of the time.
        """
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
        """Return `fd` if it is the node. Otherwise close it and raise ESTALE."""
        st = os.fstat(fd)
        if not self._is_node(node, st):
            os.close(fd)
            raise self._stale(node)
        # A new inode has a new change time, so a node with the known fingerprint is still the same inode.
        if node.handle and node.fingerprint != st.st_size << 62 | st.st_ctime_ns and self.handle(fd) != node.handle:
            os.close(fd)
            raise self._reused(node)
        node.checked = self.now
        node.mtime = st.st_mtime_ns
        return fd

    def handle(self, fd: int, name: bytes = b"") -> bytes:
        """Return the file handle of `fd`, or of `name` in it; empty if the file system has none."""
        if self._handle_flags < 0:
            return b""
        try:
            return syscalls.file_handle(fd, name, self._handle_flags)
        except OSError:
            return _NO_HANDLE

    def is_number_reused(self, node: Node) -> bool:
        """Whether the inode number now belongs to another file under the node's name. OSError."""
        if node.fd >= 0 or not node.handle or node.parent is None:
            return False  # a descriptor keeps the inode number from being reused
        return self.handle(self.directory(node.parent), node.name) != node.handle

    def _reused(self, node: Node) -> OSError:
        """Return ESTALE for a node whose inode number is reused, and detach the node."""
        error = self._stale(node)
        self._inodes.detach(node)
        return error

    def _any_fd(self, node: Node) -> int:
        """Return any descriptor of this inode, also an O_PATH one."""
        if node.is_dir:
            return self.directory(node, changing=True)
        if node.pin >= 0:
            return node.pin
        if node.fd < 0:
            if node.parent is None:
                raise stale()
            fd = self._open_name(self.directory(node.parent), node.name, os.O_PATH)
            return self._cache_fd(node, self._verified(node, fd), 0)
        node.used = self._request
        if node.parent is not None and self.now - node.checked >= RECHECK:
            self._recheck(node)
        return node.fd

    def _fd_or_path(self, node: Node) -> int | bytes:
        """Return what system calls take for this inode: a descriptor, or a path through an O_PATH descriptor."""
        fd = self._any_fd(node)
        return fd if fd == node.fd and node.access else b"/proc/self/fd/%d" % fd

    def _inode_path(self, node: Node) -> bytes:
        """Return a path to this inode. By its name, chmod and xattr calls would follow a symlink."""
        return b"/proc/self/fd/%d" % self._any_fd(node)

    def _is_node(self, node: Node, st: os.stat_result) -> bool:
        return st.st_ino + self.ino_offset == node.ino and st.st_dev == self.device and kind_of(st.st_mode) is node.kind

    def _stale(self, node: Node) -> OSError:
        """Return ESTALE for a node that its name does not lead to, and invalidate the name in the kernel."""
        node.name_unverified = True
        self.on_stale(node)
        return stale()

    # -- the cache

    def _close_later(self, fd: int) -> None:
        """Close a descriptor after this request, which may still use it."""
        self._released.append(fd)
        self._released_at = self._request

    def _cache_fd(self, node: Node, fd: int, access: int) -> int:
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
        """The number of the request, or of the slice of a long request."""
        return self._request

    def begin_request(self, now: float) -> None:
        """Start a request at the time `now`."""
        self.now = now
        self._request += 1
        self._verified_dir = None

    def _nodes_to_prune(self) -> tuple[Node, ...]:
        """Return the oldest nodes that keep a descriptor.

        Most of them are open in no program. The kernel forgets these if their entries are invalidated.
        """
        self._prune_due = self._kept_count + _PRUNED_AT_ONCE
        some = tuple(self._kept.values())[:_PRUNED_AT_ONCE]
        for node in some:
            self._kept[node.id] = self._kept.pop(node.id)
        return some

    def close_idle(self) -> None:
        """Close descriptors that were not used since the previous call."""
        self.close_released()
        self._prune_due = 0
        for node in [node for node in self._open.values() if node.used < self._quiet_since]:
            self._close_cached(node)
        self._quiet_since = self._request
        self._request += 1

    def close_unused(self) -> None:
        """Close every cached descriptor that this request does not use."""
        if self._released_at != self._request:
            self.close_released()
        for node in [node for node in self._open.values() if node.used < self._request]:
            self._close_cached(node)

    @property
    def is_full(self) -> bool:
        """Whether the maximum of descriptors kept until FORGET is reached."""
        return len(self._kept) + len(self._pinned) >= self._pins

    @property
    def is_crowded(self) -> bool:
        """Whether the remaining descriptors are reserved for files that are removed while open."""
        return len(self._kept) + len(self._pinned) >= self._pins - self._pins // 9

    def keep_open(self, node: Node) -> None:
        """Keep the node's open descriptor until FORGET, if there is one and the maximum is not reached."""
        if node.fd >= 0 and not self.is_full:
            node.keeps_fd = True
            self._open.pop(node.id, None)
            self._kept[node.id] = node
            self._kept_count += 1

    def keep_open_before_mode(self, node: Node, mode: int) -> None:
        """Keep the file open if the new mode will not let its owner open it again.

        As with any file system, a program that has the file open can then still use it.
        """
        if self.privileged or (node.keeps_fd and node.access == R | W):
            return
        if node.is_dir:
            if mode & 0o100 == 0:
                for number in list(islice(self._inodes.files_below(node), self._cache)):
                    if (below := self._inodes.get(number)) is not None:
                        self._keep_file_open(below)
        elif mode & 0o600 != 0o600:
            self._keep_file_open(node)

    def _keep_file_open(self, node: Node) -> None:
        try:
            self.file(node, R | W)
        except PermissionError:
            try:
                self.file(node, R)
            except PermissionError:
                return  # no program has it open through this mount, or a descriptor would be kept
        self.keep_open(node)

    def pin(self, node: Node, directory: int, name: bytes) -> None:
        """Keep a descriptor of a node whose last known name will be removed, for programs that have it open.

        ENFILE: the programs of this mount have too many removed files open.
        """
        if node.keeps_fd or node.pin >= 0:
            return
        if self.is_full:
            raise os_error(errno.ENFILE)
        if node.fd >= 0:
            self.keep_open(node)
            node.pin = node.fd
            return
        node.pin = self._verified(node, self._open_name(directory, name, os.O_PATH))
        self._pinned.add(node.id)

    def keep_nameless(self, node: Node, fd: int, access: int) -> None:
        """Keep the only descriptor of a file without a name, until the table drops it."""
        node.fd = node.pin = fd
        node.access = access
        node.keeps_fd = True
        self._pinned.add(node.id)

    def unpin(self, node: Node) -> None:
        """Stop keeping the node's descriptor, because the node has a name."""
        if node.pin < 0:
            return
        self._pinned.discard(node.id)
        if node.pin == node.fd:
            node.keeps_fd = False
            self._kept.pop(node.id, None)
            self._open[node.id] = node
        else:
            os.close(node.pin)
        node.pin = -1

    def release(self, node: Node) -> None:
        """Close the descriptors of a node that the kernel has forgotten.

        Closing the last descriptor of a removed file frees its blocks, which takes time. It is done after the next
        reply; for a large file, in a thread.
        """
        if node.keeps_fd:
            self._kept.pop(node.id, None)
        self._pinned.discard(node.id)
        self._open.pop(node.id, None)
        for fd in {node.fd, node.pin} - {-1}:
            self._close_later(fd)
        node.fd = node.pin = -1
        node.keeps_fd = False

    def after_reply(self) -> tuple[Node, ...]:
        """Close descriptors beyond the maximum. Called after a reply, when none is in use.

        Return nodes that the kernel should drop, because too many keep a descriptor.
        """
        kept = self._open
        while len(kept) > self._cache:
            self._close_cached(kept[next(iter(kept))])
        if self._released and self._request != self._released_at:
            self.close_released()
        is_crowded = len(self._kept) > self._cache and self._kept_count >= self._prune_due
        return self._nodes_to_prune() if is_crowded else ()

    def close_released(self) -> None:
        """Close the descriptors of released nodes."""
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
    """Yield duplicates of descriptors, which stay open while a thread uses them."""
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
