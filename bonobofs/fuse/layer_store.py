"""The source, and the only module that touches it.

Every method that changes the source takes the `Permit` that the guard gave for it, so that none can be called on a
way around the door. What appears is made as the caller; all else is done as the serving user, the kernel having
checked the caller's rights.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final, NamedTuple

from bonobofs.audit.temp_cleanup import stray_name
from bonobofs.fuse.fd_cache import FILE, FdCache, R, W, stale
from bonobofs.fuse.inode_table import InodeTable, Node
from bonobofs.policy.decision import Layer, Permit
from bonobofs.policy.request import HEAD_BYTES, Kind
from bonobofs.system import syscalls
from bonobofs.system.paths import remove_tree

_DIRENT: Final = struct.Struct("=QqHB")
_SECOND: Final = 1_000_000_000
_ROOM_IS_TRUE: Final = 1.0
"""Seconds."""
_MOST_SENT: Final = 1 << 30
_NAMELESS_UNKNOWN: Final = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
_WALKED: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Entry = tuple[int, int, int, bytes]
"""A directory entry: inode number, the file system's own cookie of the next, type, name."""


class WalkEntry(NamedTuple):
    """Something below a directory: its path from there, and how to reach it while the walk stands there."""

    path: str
    directory: int
    name: bytes
    st: os.stat_result


class LayerStore(FdCache):
    """Every read and every change of the source. Used by one thread."""

    def __init__(
        self, root: int, inodes: InodeTable, *, cache: int, pins: int, layer: Layer = Layer.SOURCE, place: str = ""
    ) -> None:
        """As `FdCache`."""
        super().__init__(root, inodes, cache=cache, pins=pins, layer=layer, place=place)
        self.top: Final = inodes.add_root(os.fstat(root).st_ino + self.numbers, self)
        self.top.fd = root
        self.top.access = R
        self.top.keeps_fd = True
        os.umask(0)
        self._umask = 0
        self._room = 0
        """Bytes that callers other than root may still allocate, as read at the time `_room_read`."""
        self._room_read = 0.0
        self._entries: Final = ctypes.create_string_buffer(65536)
        self._caller: tuple[int, int, tuple[int, ...]] = (0, 0, ())

    # -- reading

    def entries(self, node: Node, cookie: int, size: int) -> list[Entry]:
        """Entries of the directory from `cookie` on, about `size` bytes of them; [] at the end.

        The cookies are the file system's own, so that a reader skips nothing though no handle keeps its place.
        """
        fd = self.listed(node)
        unread = node.position == 0
        if node.position != cookie:
            os.lseek(fd, cookie, os.SEEK_SET)
        buffer = self._entries
        filled = syscalls.getdents(fd, buffer, min(size, len(buffer)))
        if unread and cookie and not filled:
            # A descriptor whose first read was at the end finds nothing from the start either, on ext4.
            node.position = -1
            self._close_cached(node)
            return []
        found: list[Entry] = []
        raw = buffer.raw[:filled]
        at = 0
        while at < filled:
            ino, following, length, kind = _DIRENT.unpack_from(raw, at)
            start = at + _DIRENT.size
            found.append((ino, following, kind, raw[start : raw.index(b"\0", start)]))
            at += length
        node.position = found[-1][1] if found else -1
        return found

    def head(self, node: Node) -> bytes:
        """The first HEAD_BYTES of the file."""
        return os.pread(self.file(node, R), HEAD_BYTES, 0)

    def head_of_entry(self, directory: int, name: bytes) -> bytes:
        """The first HEAD_BYTES of a regular file that may have no node."""
        fd = self._open_at(directory, name, os.O_RDONLY | FILE)
        try:
            return os.pread(fd, HEAD_BYTES, 0)
        finally:
            os.close(fd)

    def has_names(self, directory: int, name: bytes) -> bool:
        """Whether the directory `name` has anything in it."""
        fd = os.open(name, _WALKED, dir_fd=directory)
        try:
            with os.scandir(fd) as entries:
                return next(entries, None) is not None
        finally:
            os.close(fd)

    def names_in(self, directory: int, name: bytes) -> list[bytes]:
        """What the directory `name` has."""
        fd = os.open(name, _WALKED, dir_fd=directory)
        try:
            return [os.fsencode(each) for each in os.listdir(fd)]
        finally:
            os.close(fd)

    def walk(self, directory: int, name: bytes, *, closed: bool = False) -> Iterator[WalkEntry | None]:
        """Everything below the directory `name`, whatever it is, without following a symlink.

        None stands for a subdirectory that the walk has read the name of: its caller may let other requests be served.

        With `closed`, a server without root gives itself the rights to each directory while the walk stands there. The
        directories must be the server's own (the layer), and no request may be served meanwhile.

        Two descriptors are open at a time, whatever the tree's depth and width, and of paths only the current one is
        kept: the way up is `..`, which is compared with the directory that the walk came from. ESTALE: it is another.
        """
        assert not closed or self.layer is Layer.SCRATCH  # modes of the source change with a permit alone
        fd = self._walked(directory, name, closed=closed)
        above = ""
        levels: list[tuple[tuple[int, int], int, list[str]]] = []
        """Of each directory above: device and inode number, the length of its path, subdirectories yet to be seen."""
        try:
            while True:
                below: list[str] = []
                with self._passable(fd, closed=closed), os.scandir(fd) as entries:
                    for entry in entries:
                        if entry.is_dir(follow_symlinks=False):
                            below.append(entry.name)
                            yield None
                        else:
                            yield _walk_entry(above, fd, entry.name)
                while not below:
                    if not levels:
                        return
                    key, length, below = levels.pop()
                    above = above[:length]
                    fd = self._step(fd, b"..", closed=closed)
                    if _key(fd) != key:
                        raise stale()
                name_below = below.pop()
                with self._passable(fd, closed=closed):
                    yield _walk_entry(
                        above, fd, name_below
                    )  # not above: empty directories would be walked without a yield
                levels.append((_key(fd), len(above), below))
                above += f"{name_below}/"
                fd = self._step(fd, os.fsencode(name_below), closed=closed)
        finally:
            os.close(fd)

    def _walked(self, directory: int, name: bytes, *, closed: bool) -> int:
        try:
            return os.open(name, _WALKED, dir_fd=directory)
        except OSError as error:
            if error.errno == errno.EACCES and closed and not self.privileged:
                return _open_closed(directory, name)
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self.close_unused()
            return os.open(name, _WALKED, dir_fd=directory)

    @contextmanager
    def _passable(self, fd: int, *, closed: bool) -> Iterator[None]:
        """Let this user pass through its directory `fd`, then restore its mode."""
        mode = stat.S_IMODE(os.fstat(fd).st_mode) if closed and not self.privileged else 0o700
        if mode & 0o700 == 0o700:
            yield
            return
        os.fchmod(fd, mode | 0o700)
        try:
            yield
        finally:
            os.fchmod(fd, mode)

    def _step(self, fd: int, name: bytes, *, closed: bool) -> int:
        """A descriptor of the directory `name` in that of `fd`, which is closed unless that fails."""
        with self._passable(fd, closed=closed):
            following = self._walked(fd, name, closed=closed)
        os.close(fd)
        return following

    def readlink(self, node: Node) -> bytes:
        """The symlink's text."""
        return os.readlink(b"", dir_fd=self._any_fd(node))

    def get_xattr(self, node: Node, name: bytes) -> bytes:
        """The value of an extended attribute."""
        return os.getxattr(self._fd_or_path(node), name)

    def xattr_growth(self, node: Node, name: bytes, size: int) -> int:
        """Return by how many bytes name and value grow if the attribute gets a value of `size` bytes."""
        try:
            return size - len(os.getxattr(self._fd_or_path(node), name))
        except OSError:
            return len(name) + size  # it has none

    def list_xattrs(self, node: Node) -> list[str]:
        """The names of the extended attributes."""
        return os.listxattr(self._fd_or_path(node))

    def check_reserve(self, needed: int) -> None:
        """Raise ENOSPC if allocating `needed` bytes would take blocks that the file system keeps for root.

        The server may be root while its caller is not. The free space is read again after a second, or once the bytes
        that it had room for are allocated.
        """
        if not self.privileged or needed <= 0:
            return
        self._room -= needed
        if self._room >= 0 and self.now - self._room_read < _ROOM_IS_TRUE:
            return
        v = os.statvfs(self.root)
        self._room = v.f_bavail * v.f_frsize - needed
        self._room_read = self.now
        if self._room < 0 and v.f_bavail < v.f_bfree:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def statvfs(self) -> os.statvfs_result:
        """The file system of the source."""
        return os.statvfs(self.root)

    def fd_to_sync(self, node: Node) -> int:
        """A descriptor of the file or directory, for fsync(2)."""
        try:
            return self.listed(node) if node.is_dir else self.file(node, R)
        except PermissionError:
            return self.file(node, W)

    # -- acting as the caller: files that appear belong to whoever made them

    def act_as(self, uid: int, gid: int, groups: tuple[int, ...], umask: int) -> None:
        """Make what appears next as this user, with this umask; the file system below checks the rights again."""
        if umask:
            os.umask(umask)
            self._umask = umask
        if self.privileged and (uid, gid, groups) != self._caller:
            syscalls.set_file_identity(uid, gid, groups)
            self._caller = (uid, gid, groups)

    def act_as_self(self) -> None:
        """Touch files as the serving user again, with umask 0: the server's own files have the modes it gives them."""
        if self._umask:
            os.umask(0)
            self._umask = 0
        if self._caller != (0, 0, ()):
            syscalls.set_file_identity(0, 0, ())
            self._caller = (0, 0, ())

    # -- changing

    def create(self, directory: int, name: bytes, mode: int, permit: Permit) -> int:
        """A new regular file, open for reading and writing. FileExistsError: the kernel did not know that it exists."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | FILE
        try:
            return os.open(name, flags, mode, dir_fd=directory)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self.close_unused()
            return os.open(name, flags, mode, dir_fd=directory)

    def reopen_empty(self, directory: int, name: bytes, mode: int, permit: Permit) -> int:
        """A descriptor of a regular file that has lost its content and has this mode now."""
        fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | FILE, dir_fd=directory)
        os.ftruncate(fd, 0)
        os.fchmod(fd, mode)
        return fd

    def fill(self, fd: int, stage: int, at: int, length: int, permit: Permit) -> Iterator[Callable[[], object]]:
        """The system calls that write `length` bytes at `at` of the file `stage` to an empty file."""
        while (done := os.lseek(fd, 0, os.SEEK_CUR)) < length:
            yield partial(os.sendfile, fd, stage, at + done, min(length - done, _MOST_SENT))
            if os.lseek(fd, 0, os.SEEK_CUR) == done:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

    def create_nameless(self, directory: int, mode: int, permit: Permit) -> int:
        """A new regular file without a name, open for reading and writing, that `publish` can bring into the source.

        EOPNOTSUPP: the file system has none.
        """
        try:
            return os.open(b".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, mode, dir_fd=directory)
        except OSError as error:
            if error.errno in _NAMELESS_UNKNOWN:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP)) from error
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self.close_unused()
                raise OSError(errno.ENFILE, os.strerror(errno.ENFILE)) from error
            raise

    def create_nameless_symlink(self, place: str, target: bytes, owner: tuple[int, int], permit: Permit) -> int:
        """An O_PATH descriptor of a new symlink that has lost its name in the directory `place` already."""
        path = os.path.join(place, stray_name())
        os.symlink(target, path)
        try:
            if self.privileged:
                os.chown(path, *owner, follow_symlinks=False)
            return os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        finally:
            os.unlink(path)

    def publish(self, node: Node, directory: int, name: bytes, by: bytes, permit: Permit) -> None:
        """Give what has no name one in the source, in one step; onto a name that is taken, by way of `by`.

        A symlink cannot come from elsewhere: it is made again, with its owner and times, and needs `by` for that.
        """
        if not by:
            self.link(node, directory, name, permit)
            return
        try:
            if node.kind is Kind.SYMLINK:
                self._copy_symlink(node, directory, by, permit)
            else:
                self.link(node, directory, by, permit)
            os.rename(by, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(by, dir_fd=directory)
            raise

    def _copy_symlink(self, node: Node, directory: int, name: bytes, permit: Permit) -> None:
        st = node.store.stat(node)
        os.symlink(node.store.readlink(node), name, dir_fd=directory)
        if self.privileged:
            os.chown(name, st.st_uid, st.st_gid, dir_fd=directory, follow_symlinks=False)
        os.utime(name, ns=(st.st_atime_ns, st.st_mtime_ns), dir_fd=directory, follow_symlinks=False)

    def copy(self, node: Node, directory: int, name: bytes, permit: Permit) -> int:
        """A descriptor of a copy, in this layer, of a file or symlink of another: content, owner, mode, times and all.

        That of a symlink is O_PATH.
        """
        if node.kind is Kind.SYMLINK:
            self._copy_symlink(node, directory, name, permit)
            return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        fd = self.create(directory, name, 0o600, permit)
        try:
            self._fill(fd, node, permit)
        except BaseException:
            os.close(fd)
            os.unlink(name, dir_fd=directory)
            raise
        return fd

    def copy_nameless(self, node: Node, permit: Permit) -> int:
        """As `copy`, of a file whose name is gone."""
        fd = self.create_nameless(self.root, 0o600, permit)
        try:
            self._fill(fd, node, permit)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def keep_copied(self, node: Node, fd: int) -> None:
        """Keep the descriptor of `copy`."""
        if node.kind is Kind.SYMLINK:
            self._keep(node, fd, 0)
        else:
            self.keep_created(node, fd, stat.S_IMODE(os.fstat(fd).st_mode))

    def _fill(self, fd: int, node: Node, permit: Permit) -> None:
        """Make an empty file like another: only where that has data, for it may be large and hold little."""
        original = node.store.file(node, R)
        size = os.fstat(original).st_size
        os.ftruncate(fd, size)
        at = 0
        while at < size:
            try:
                at = os.lseek(original, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                break
            end = os.lseek(original, at, os.SEEK_HOLE)
            os.lseek(fd, at, os.SEEK_SET)
            while at < end and (sent := os.sendfile(fd, original, at, min(end - at, _MOST_SENT))):
                at += sent
        self._copy_attributes(fd, original, permit)

    def copy_attributes(self, node: Node, other: Node, permit: Permit) -> None:
        """Give a directory of this layer what another's has: owner, mode, attributes, times."""
        self._copy_attributes(self.directory(node), other.store.listed(other), permit)

    def _copy_attributes(self, fd: int, original: int, permit: Permit) -> None:
        st = os.fstat(original)
        if self.privileged:
            os.fchown(fd, st.st_uid, st.st_gid)
        for name in os.listxattr(original):
            with suppress(OSError):  # what this user or this file system cannot give
                os.setxattr(fd, name, os.getxattr(original, name))
        os.fchmod(fd, stat.S_IMODE(st.st_mode))
        os.utime(fd, ns=(st.st_atime_ns, st.st_mtime_ns))

    def keep_named(self, node: Node) -> None:
        """A file that had no name has one: its descriptor is kept as that of a file that was just made."""
        self.unpin(node)
        node.checked = self.now
        if not self.privileged and stat.S_IMODE(os.fstat(node.fd).st_mode) & 0o600 != 0o600:
            self.hold(node)

    def keep_created(self, node: Node, fd: int, mode: int) -> None:
        """Keep the descriptor of `create`: until FORGET where the file's mode would not let it be opened again."""
        self._keep(node, fd, R | W)
        node.checked = self.now
        if not self.privileged and mode & 0o600 != 0o600:
            self.hold(node)

    def mkdir(self, directory: int, name: bytes, mode: int, permit: Permit) -> None:
        """A new directory."""
        os.mkdir(name, mode, dir_fd=directory)

    def mknod(self, directory: int, name: bytes, mode: int, device: int, permit: Permit) -> None:
        """A new FIFO, socket, device or empty regular file."""
        os.mknod(name, mode, device, dir_fd=directory)

    def symlink(self, directory: int, name: bytes, target: bytes, permit: Permit) -> None:
        """A new symlink."""
        os.symlink(target, name, dir_fd=directory)

    def link(self, node: Node, directory: int, name: bytes, permit: Permit) -> None:
        """A further name for the node's inode, whatever its old name leads to by now."""
        os.link(self._inode_path(node), name, dst_dir_fd=directory, follow_symlinks=True)

    def unlink(self, directory: int, name: bytes, permit: Permit) -> None:
        """Remove a name that is no directory."""
        os.unlink(name, dir_fd=directory)

    def rmdir(self, directory: int, name: bytes, permit: Permit) -> None:
        """Remove an empty directory."""
        os.rmdir(name, dir_fd=directory)

    def remove_tree(self, directory: int, name: bytes, permit: Permit) -> None:
        """Remove a directory and all that is in it."""
        remove_tree(directory, name)

    def rename(self, source: int, old: bytes, target: int, new: bytes, flags: int, permit: Permit) -> None:
        """Move a name, with the flags of renameat2(2)."""
        if flags:
            syscalls.renameat2(source, old, target, new, flags)
        else:
            os.rename(old, new, src_dir_fd=source, dst_dir_fd=target)

    def write(self, fd: int, data: memoryview, offset: int, permit: Permit) -> int:
        """Write to a descriptor that `file` gave; bytes written."""
        return os.pwrite(fd, data, offset)

    def append(self, fd: int, data: memoryview, permit: Permit) -> int:
        """Write at the end, wherever other writers have moved it by then; bytes written."""
        return os.pwritev(fd, [data], 0, os.RWF_APPEND)

    def truncate(self, fd: int, size: int, permit: Permit) -> None:
        """Set the file's size."""
        os.ftruncate(fd, size)

    def allocate(self, fd: int, mode: int, offset: int, length: int, permit: Permit) -> None:
        """fallocate(2)."""
        syscalls.fallocate(fd, mode, offset, length)

    def copy_range(
        self, source: int, source_offset: int, target: int, target_offset: int, length: int, permit: Permit
    ) -> int:
        """copy_file_range(2); bytes copied."""
        return os.copy_file_range(source, target, length, source_offset, target_offset)

    def set_mode(self, node: Node, mode: int, permit: Permit) -> None:
        """chmod(2)."""
        os.chmod(self._fd_or_path(node), mode)

    def set_mode_of(self, fd: int, mode: int, permit: Permit) -> None:
        """fchmod(2), of a file that is being written."""
        os.fchmod(fd, mode)

    def set_owner(self, node: Node, uid: int, gid: int, permit: Permit) -> None:
        """chown(2); -1 leaves one as it is."""
        os.chown(self._fd_or_path(node), uid, gid)

    def set_times(self, node: Node, access: tuple[int, int], modification: tuple[int, int], permit: Permit) -> None:
        """utimensat(2); each time is (seconds, nanoseconds or UTIME_NOW or UTIME_OMIT)."""
        target = self._fd_or_path(node)
        if isinstance(target, int) and max(access[1], modification[1]) < _SECOND:
            os.utime(target, ns=(access[0] * _SECOND + access[1], modification[0] * _SECOND + modification[1]))
        else:
            syscalls.utimens(self._inode_path(node), access, modification)

    def set_xattr(self, node: Node, name: bytes, value: bytes, flags: int, permit: Permit) -> None:
        """setxattr(2)."""
        os.setxattr(self._fd_or_path(node), name, value, flags)

    def remove_xattr(self, node: Node, name: bytes, permit: Permit) -> None:
        """removexattr(2)."""
        os.removexattr(self._fd_or_path(node), name)


def _open_closed(directory: int, name: bytes) -> int:
    """A descriptor of this user's own directory, whose mode does not let it be listed and stays what it was."""
    mode = stat.S_IMODE(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    os.chmod(name, mode | 0o700, dir_fd=directory)
    try:
        return os.open(name, _WALKED, dir_fd=directory)
    finally:
        os.chmod(name, mode, dir_fd=directory)


def _walk_entry(above: str, fd: int, name: str) -> WalkEntry:
    raw = os.fsencode(name)
    return WalkEntry(above + name, fd, raw, os.stat(raw, dir_fd=fd, follow_symlinks=False))


def _key(fd: int) -> tuple[int, int]:
    st = os.fstat(fd)
    return st.st_dev, st.st_ino
