"""File operations on one layer. In the mount, only this module changes the source.

Each method that changes a layer takes the enforcer's `Permit`, so no change can bypass the enforcer. New files are
created as the caller. All other operations run as the serving user, after the kernel has checked the caller's rights.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple

from bonobofs.audit.temp_cleanup import stray_name
from bonobofs.errors import os_error
from bonobofs.fuse.fd_cache import FILE, FdCache, R, W, duplicates, stale
from bonobofs.fuse.inode_table import InodeTable, Node
from bonobofs.fuse.slices import LongCall, Run
from bonobofs.policy.decision import Layer, Permit
from bonobofs.policy.request import HEAD_BYTES, Kind
from bonobofs.system import syscalls
from bonobofs.system.paths import remove_tree

_DIRENT: Final = struct.Struct("=QqHB")
_ROOM_IS_TRUE: Final = 1.0
"""Seconds until the free space is read again."""
_MOST_SENT: Final = 1 << 30
_NAMELESS_UNKNOWN: Final = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)
_WALKED: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Entry = tuple[int, int, int, bytes]
"""A directory entry: inode number, the file system's cookie of the next entry, type, name."""


class WalkEntry(NamedTuple):
    """A file or directory below a walked directory. `directory` and `name` are valid until the walk continues."""

    path: str
    directory: int
    name: bytes
    st: os.stat_result


class LayerStore(FdCache):
    """All reads and changes of one layer. Used by one thread."""

    def __init__(
        self, root: int, inodes: InodeTable, *, cache: int, pins: int, layer: Layer = Layer.SOURCE, prefix: str = ""
    ) -> None:
        super().__init__(root, inodes, cache=cache, pins=pins, layer=layer, prefix=prefix)
        self.top: Final = inodes.add_root(os.fstat(root).st_ino + self.ino_offset, self)
        self.top.fd = root
        self.top.access = R
        self.top.keeps_fd = True
        os.umask(0)
        self._umask = 0
        self._room = 0
        """Bytes that callers other than root may still allocate, as of `_room_read`."""
        self._room_read = 0.0
        self._entries: Final = ctypes.create_string_buffer(65536)
        self._caller: tuple[int, int, tuple[int, ...]] = (0, 0, ())

    # -- reads

    def entries(self, node: Node, cookie: int, size: int) -> list[Entry]:
        """Return about `size` bytes of directory entries from `cookie` on; [] at the end.

        The cookies are the file system's own, so no entry is skipped although there is no directory handle.
        """
        fd = self.readable_directory(node)
        unread = node.position == 0
        if node.position != cookie:
            os.lseek(fd, cookie, os.SEEK_SET)
        buffer = self._entries
        filled = syscalls.getdents(fd, buffer, min(size, len(buffer)))
        if unread and cookie and not filled:
            # On ext4, a descriptor whose first read was at the end finds nothing from the start either.
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
        """Return the first HEAD_BYTES of the file."""
        return os.pread(self.file(node, R), HEAD_BYTES, 0)

    def head_of_entry(self, directory: int, name: bytes, st: os.stat_result) -> bytes:
        """Return the first HEAD_BYTES of a regular file that may have no node, or one in another layer."""
        node = self._inodes.find(st.st_ino + self.ino_offset) if st.st_dev == self.device else None
        if node is not None and node.fd >= 0 and node.access & R:  # its descriptor keeps the inode number
            return os.pread(node.fd, HEAD_BYTES, 0)
        fd = self._open_name(directory, name, os.O_RDONLY)
        try:
            return os.pread(fd, HEAD_BYTES, 0)
        finally:
            os.close(fd)

    def has_names(self, directory: int, name: bytes) -> bool:
        """Whether the directory `name` has entries."""
        fd = os.open(name, _WALKED, dir_fd=directory)
        try:
            with os.scandir(fd) as entries:
                return next(entries, None) is not None
        finally:
            os.close(fd)

    def names_in(self, directory: int, name: bytes) -> list[bytes]:
        """Return the names in the directory `name`."""
        fd = os.open(name, _WALKED, dir_fd=directory)
        try:
            return [os.fsencode(each) for each in os.listdir(fd)]
        finally:
            os.close(fd)

    def walk(self, directory: int, name: bytes, *, closed: bool = False) -> Iterator[WalkEntry | None]:
        """Yield everything below the directory `name`, without following symlinks.

        It yields None after it has read the name of a subdirectory: the caller may serve other requests.

        With `closed`, a server without root gives itself the rights to each directory during its walk. The directories
        must be the server's own (the overlay), and no request may be served meanwhile.

        Two descriptors are open at a time, for any depth and width, and only the current path is stored. The walk goes
        up by `..`, and compares the result with the directory that it came from. ESTALE: it is another one.
        """
        assert not closed or self.layer is Layer.SCRATCH  # modes of the source change only with a permit
        fd = self._walked(directory, name, closed=closed)
        above = ""
        levels: list[tuple[tuple[int, int], int, list[str]]] = []
        """For each directory above: device and inode number, length of its path, remaining subdirectories."""
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
                    yield _walk_entry(above, fd, name_below)  # here, so that a walk of empty directories yields too
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
        """Give this user access to its directory `fd`, then restore the mode."""
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
        """Return a descriptor of `name` in the directory `fd`, and close `fd` unless that fails."""
        with self._passable(fd, closed=closed):
            following = self._walked(fd, name, closed=closed)
        os.close(fd)
        return following

    def readlink(self, node: Node) -> bytes:
        """Return the target of the symlink."""
        return os.readlink(b"", dir_fd=self._any_fd(node))

    def get_xattr(self, node: Node, name: bytes) -> bytes:
        """Return the value of an extended attribute."""
        return os.getxattr(self._fd_or_path(node), name)

    def xattr_growth(self, node: Node, name: bytes, size: int) -> int:
        """Return by how many bytes name and value grow if the value has `size` bytes."""
        try:
            return size - len(os.getxattr(self._fd_or_path(node), name))
        except OSError:
            return len(name) + size  # there is no such attribute

    def list_xattrs(self, node: Node) -> list[str]:
        """Return the names of the extended attributes."""
        return os.listxattr(self._fd_or_path(node))

    def check_reserve(self, needed: int) -> None:
        """Raise ENOSPC if `needed` more bytes would take blocks that the file system reserves for root.

        The server may be root while its caller is not. The free space is read again after a second, or when it is used
        up.
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
            raise os_error(errno.ENOSPC)

    def statvfs(self) -> os.statvfs_result:
        """Return the statvfs of the layer."""
        return os.statvfs(self.root)

    def fd_to_sync(self, node: Node) -> int:
        """Return a descriptor of the file or directory for fsync(2)."""
        try:
            return self.readable_directory(node) if node.is_dir else self.file(node, R)
        except PermissionError:
            return self.file(node, W)

    # -- identity of the caller

    def act_as(self, uid: int, gid: int, groups: tuple[int, ...], umask: int) -> None:
        """Create the next files as this user, with this umask. The file system checks the rights again."""
        if umask:
            os.umask(umask)
            self._umask = umask
        if self.privileged and (uid, gid, groups) != self._caller:
            syscalls.set_file_identity(uid, gid, groups)
            self._caller = (uid, gid, groups)

    def act_as_self(self) -> None:
        """Access files as the serving user again, with umask 0, so that the server sets modes exactly."""
        if self._umask:
            os.umask(0)
            self._umask = 0
        if self._caller != (0, 0, ()):
            syscalls.set_file_identity(0, 0, ())
            self._caller = (0, 0, ())

    # -- changes

    def create(self, directory: int, name: bytes, mode: int, permit: Permit) -> int:
        """Create a regular file and open it for reading and writing.

        FileExistsError: the kernel did not know the file.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | FILE
        try:
            return os.open(name, flags, mode, dir_fd=directory)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            self.close_unused()
            return os.open(name, flags, mode, dir_fd=directory)

    def reopen_empty(self, directory: int, name: bytes, mode: int, permit: Permit) -> int:
        """Open a regular file, truncate it and set its mode."""
        fd = os.open(name, os.O_RDWR | os.O_CLOEXEC | FILE, dir_fd=directory)
        os.ftruncate(fd, 0)
        os.fchmod(fd, mode)
        return fd

    def fill(self, fd: int, buffer: int, at: int, length: int, permit: Permit) -> Iterator[Callable[[], object]]:
        """Yield the system calls that copy `length` bytes, from offset `at` of the file `buffer`, to an empty file."""
        while (done := os.lseek(fd, 0, os.SEEK_CUR)) < length:
            yield partial(os.sendfile, fd, buffer, at + done, min(length - done, _MOST_SENT))
            if os.lseek(fd, 0, os.SEEK_CUR) == done:
                raise os_error(errno.EIO)

    def create_nameless(self, directory: int, mode: int, permit: Permit) -> int:
        """Create a regular file without a name and open it for reading and writing. `publish` gives it a name.

        EOPNOTSUPP: the file system has no unnamed files.
        """
        try:
            return os.open(b".", os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, mode, dir_fd=directory)
        except OSError as error:
            if error.errno in _NAMELESS_UNKNOWN:
                raise os_error(errno.EOPNOTSUPP) from error
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self.close_unused()
                raise os_error(errno.ENFILE) from error
            raise

    def create_nameless_symlink(self, prefix: str, target: bytes, owner: tuple[int, int], permit: Permit) -> int:
        """Create a symlink in the directory `prefix`, remove its name, and return an O_PATH descriptor."""
        path = os.path.join(prefix, stray_name())
        os.symlink(target, path)
        try:
            if self.privileged:
                os.chown(path, *owner, follow_symlinks=False)
            return os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        finally:
            os.unlink(path)

    def publish(self, node: Node, directory: int, name: bytes, temporary: bytes, permit: Permit) -> None:
        """Give an unnamed file a name in the source in one step.

        With `temporary`, the file gets that name first and is then renamed to `name`, which may exist. A symlink needs
        it: it cannot be linked from another file system, so a copy with its owner and times is created.
        """
        if not temporary:
            self.link(node, directory, name, permit)
            return
        try:
            if node.kind is Kind.SYMLINK:
                self._copy_symlink(node, directory, temporary, permit)
            else:
                self.link(node, directory, temporary, permit)
            os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=directory)
            raise

    def _copy_symlink(self, node: Node, directory: int, name: bytes, permit: Permit) -> None:
        st = node.store.stat(node)
        os.symlink(node.store.readlink(node), name, dir_fd=directory)
        if self.privileged:
            os.chown(name, st.st_uid, st.st_gid, dir_fd=directory, follow_symlinks=False)
        os.utime(name, ns=(st.st_atime_ns, st.st_mtime_ns), dir_fd=directory, follow_symlinks=False)

    def copy(
        self, node: Node, above: Node | None, name: bytes, run: Run, permit: Permit
    ) -> Generator[LongCall[Any], None, int]:
        """Copy a file or symlink of another layer with all attributes, and return a descriptor.

        The copy is `name` in `above`; a file has no name if `above` is None. The descriptor of a symlink is O_PATH.
        `run` makes the calls that copy the content.
        """
        directory = self.root if above is None else self.directory(above, changing=True)
        if node.kind is Kind.SYMLINK:
            self._copy_symlink(node, directory, name, permit)
            return os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        make = partial(self.create_nameless, directory) if above is None else partial(self.create, directory, name)
        fd = make(0o600, permit)
        try:
            yield from self._fill(fd, node, run, permit)
        except BaseException:
            os.close(fd)
            if above is not None:
                os.unlink(name, dir_fd=self.directory(above, changing=True))
            raise
        return fd

    def keep_copied(self, node: Node, fd: int) -> None:
        """Keep the descriptor that `copy` returned."""
        if node.kind is Kind.SYMLINK:
            self._cache_fd(node, fd, 0)
        else:
            self.keep_created(node, fd, stat.S_IMODE(os.fstat(fd).st_mode))

    def _fill(self, fd: int, node: Node, run: Run, permit: Permit) -> Generator[LongCall[Any], None, None]:
        """Copy the content and attributes of a file. Holes stay holes."""
        with duplicates(node.store.file(node, R)) as (original,):
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
                while at < end:
                    sent = yield from run(partial(os.sendfile, fd, original, at, min(end - at, _MOST_SENT)))
                    if not sent:
                        break
                    at += sent
            self._copy_attributes(fd, original, permit)

    def copy_attributes(self, node: Node, other: Node, permit: Permit) -> None:
        """Give a directory of this layer the owner, mode, extended attributes and times of another."""
        self._copy_attributes(self.directory(node), other.store.readable_directory(other), permit)

    def _copy_attributes(self, fd: int, original: int, permit: Permit) -> None:
        st = os.fstat(original)
        if self.privileged:
            os.fchown(fd, st.st_uid, st.st_gid)
        for name in os.listxattr(original):
            with suppress(OSError):  # this user or this file system may not support it
                os.setxattr(fd, name, os.getxattr(original, name))
        os.fchmod(fd, stat.S_IMODE(st.st_mode))
        os.utime(fd, ns=(st.st_atime_ns, st.st_mtime_ns))

    def keep_named(self, node: Node) -> None:
        """Keep the descriptor of a published file like that of a new one."""
        self.unpin(node)
        node.checked = self.now
        if not self.privileged and stat.S_IMODE(os.fstat(node.fd).st_mode) & 0o600 != 0o600:
            self.keep_open(node)

    def keep_created(self, node: Node, fd: int, mode: int) -> None:
        """Keep the descriptor of a new file; until FORGET, if the mode would not let it be opened again."""
        self._cache_fd(node, fd, R | W)
        node.checked = self.now
        if not self.privileged and mode & 0o600 != 0o600:
            self.keep_open(node)

    def mkdir(self, directory: int, name: bytes, mode: int, permit: Permit) -> None:
        """Create a directory."""
        os.mkdir(name, mode, dir_fd=directory)

    def mknod(self, directory: int, name: bytes, mode: int, device: int, permit: Permit) -> None:
        """Create a FIFO, socket, device or empty regular file."""
        os.mknod(name, mode, device, dir_fd=directory)

    def symlink(self, directory: int, name: bytes, target: bytes, permit: Permit) -> None:
        """Create a symlink."""
        os.symlink(target, name, dir_fd=directory)

    def link(self, node: Node, directory: int, name: bytes, permit: Permit) -> None:
        """Add a name to the node's inode, even if its old name now leads to another file."""
        os.link(self._inode_path(node), name, dst_dir_fd=directory, follow_symlinks=True)

    def unlink(self, directory: int, name: bytes, permit: Permit) -> None:
        """Remove a name other than a directory."""
        os.unlink(name, dir_fd=directory)

    def rmdir(self, directory: int, name: bytes, permit: Permit) -> None:
        """Remove an empty directory."""
        os.rmdir(name, dir_fd=directory)

    def remove_tree(self, directory: int, name: bytes, permit: Permit) -> None:
        """Remove a directory with all its contents."""
        remove_tree(directory, name)

    def rename(self, old_dir: int, old: bytes, new_dir: int, new: bytes, flags: int, permit: Permit) -> None:
        """Rename, with the flags of renameat2(2)."""
        if flags:
            syscalls.renameat2(old_dir, old, new_dir, new, flags)
        else:
            os.rename(old, new, src_dir_fd=old_dir, dst_dir_fd=new_dir)

    def write(self, fd: int, data: memoryview, offset: int, permit: Permit) -> int:
        """Write at the offset and return the number of bytes written."""
        return os.pwrite(fd, data, offset)

    def append(self, fd: int, data: memoryview, permit: Permit) -> int:
        """Append at the current end, and return the number of bytes written."""
        return os.pwritev(fd, [data], 0, os.RWF_APPEND)

    def truncate(self, fd: int, size: int, permit: Permit) -> None:
        """ftruncate(2)."""
        os.ftruncate(fd, size)

    def allocate(self, fd: int, mode: int, offset: int, length: int, permit: Permit) -> None:
        """fallocate(2)."""
        syscalls.fallocate(fd, mode, offset, length)

    def copy_range(
        self, source: int, source_offset: int, target: int, target_offset: int, length: int, head: bytes, permit: Permit
    ) -> int:
        """Write `head`, the first bytes of the range, and copy the rest by copy_file_range(2).

        Returns: the number of bytes copied.
        """
        done = os.pwrite(target, head, target_offset) if head else 0
        try:
            return done + os.copy_file_range(source, target, length - done, source_offset + done, target_offset + done)
        except OSError:
            if not done:
                raise
            return done  # the caller requests the rest, and gets the error then

    def set_mode(self, node: Node, mode: int, permit: Permit) -> None:
        """chmod(2)."""
        os.chmod(self._fd_or_path(node), mode)

    def set_mode_of(self, fd: int, mode: int, permit: Permit) -> None:
        """fchmod(2)."""
        os.fchmod(fd, mode)

    def set_owner(self, node: Node, uid: int, gid: int, permit: Permit) -> None:
        """chown(2); -1 leaves a value unchanged."""
        os.chown(self._fd_or_path(node), uid, gid)

    def set_times(self, node: Node, access: tuple[int, int], modification: tuple[int, int], permit: Permit) -> None:
        """utimensat(2); each time is (seconds, nanoseconds or UTIME_NOW or UTIME_OMIT)."""
        syscalls.utimens(self._fd_or_path(node), access, modification)

    def set_xattr(self, node: Node, name: bytes, value: bytes, flags: int, permit: Permit) -> None:
        """setxattr(2)."""
        os.setxattr(self._fd_or_path(node), name, value, flags)

    def remove_xattr(self, node: Node, name: bytes, permit: Permit) -> None:
        """removexattr(2)."""
        os.removexattr(self._fd_or_path(node), name)


def _open_closed(directory: int, name: bytes) -> int:
    """Open a directory of this user that its mode does not let it list. The mode is restored."""
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
