"""The connection to the kernel: mount, the request loop, replies, invalidations, unmount.

One thread serves. It tries a bounded number of reads before it waits, because being woken on another CPU costs more
than anything Python does. Invalidations are sent from other threads (`notifier`): the kernel may hold, for the very
request being served, a lock that an invalidation waits for.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import struct
import subprocess
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Final

from bonobofs.errors import MountError, ProtocolError
from bonobofs.fuse import abi as p
from bonobofs.fuse.cpu_latency import Idle
from bonobofs.fuse.mount_context import Handler, Header, Notifications
from bonobofs.fuse.notifications import GONE, Notifier
from bonobofs.fuse.slices import SLICE, Busy, Long, Slices
from bonobofs.fuse.splice import Pipe, Stretch
from bonobofs.fuse.transport import Hooks
from bonobofs.system import mounts, syscalls

SPIN: Final = 200
"""Reads that are tried before waiting, where there are two CPUs or more."""
READ_AHEAD_KB: Final = 512
"""Four times what a mount begins with: 1 GiB is read in five sixths of the time. More leaves the processor's cache."""
_MS_NOSUID: Final = 2
_MS_NODEV: Final = 4
_MS_NOEXEC: Final = 8
_MS_RDONLY: Final = 1
_MS_NOATIME: Final = 1024
_WANTED: Final = (
    p.Init.ASYNC_READ
    | p.Init.BIG_WRITES
    | p.Init.DONT_MASK
    | p.Init.DO_READDIRPLUS
    | p.Init.ASYNC_DIO
    | p.Init.NO_OPEN_SUPPORT
    | p.Init.PARALLEL_DIROPS
    | p.Init.POSIX_ACL
    | p.Init.MAX_PAGES
    | p.Init.CACHE_SYMLINKS
    | p.Init.NO_OPENDIR_SUPPORT
    | p.Init.EXPLICIT_INVAL_DATA
    | p.Init.HANDLE_KILLPRIV_V2
    | p.Init.SETXATTR_EXT
    | p.Init.INIT_EXT
    | p.Init.CREATE_SUPP_GROUP
)
_NEEDED: Final = (
    p.Init.SETXATTR_EXT
    | p.Init.HANDLE_KILLPRIV_V2
    | p.Init.NO_OPEN_SUPPORT
    | p.Init.NO_OPENDIR_SUPPORT
    | p.Init.MAX_PAGES
    | p.Init.EXPLICIT_INVAL_DATA
    | p.Init.POSIX_ACL
)
_LISTEN: Final = 0.01
"""Seconds after which what is listened to is looked at, though requests keep coming."""
_SECONDS_TO_END: Final = 3.0
"""Seconds that the end of the mount waits for a system call of a thread."""
_ENDED: Final = -1
"""In place of a request's length: the mount has ended."""
_HEARD: Final = -2
"""The same: something that is listened to can be read, and there is no request."""
_LONG: Final = -3
"""The same: there is no request, and a long one can go on."""
_PASSING: Final = (errno.ENOENT, errno.EINTR, errno.EAGAIN)


def mount(
    source: str,
    mountpoint: str,
    root: int,
    *,
    allow_other: bool,
    devices: bool,
    expected: Sequence[int] | None = None,
) -> int:
    """Mount on `mountpoint` and return the descriptor of the connection. MountError.

    `root` is the source, open. `expected` is the device and inode number that the mountpoint had when it was checked.
    The mount is taken off again if it is not on `mountpoint` afterwards.
    """
    path = Path(mountpoint)
    try:
        place = mounts.open_directory(path)
    except OSError as error:
        raise MountError(f"the mountpoint {mountpoint} cannot be opened ({error.strerror}); mount again") from error
    try:
        if expected is not None and mounts.identity(place) != tuple(expected):
            raise MountError(f"the mountpoint {mountpoint} was replaced while it was checked; mount again")
        before = mounts.bonobofs_mounts()
        if os.geteuid() == 0:
            fd = _mount_as_root(source, place, mountpoint, root, allow_other=allow_other, devices=devices)
        else:
            fd = _mount_as_user(source, mountpoint, allow_other=allow_other)
    finally:
        os.close(place)
    landed = mounts.bonobofs_mounts()
    for one in before:
        with suppress(ValueError):
            landed.remove(one)
    if any(one.mountpoint == path for one in landed):
        return fd
    os.close(fd)
    for one in landed:
        if one.source == source:
            mounts.detach(one.mountpoint, lazy=True)
    raise MountError(f"the mountpoint {mountpoint} was replaced during the mount; nothing is mounted; mount again")


def _mount_as_root(source: str, place: int, mountpoint: str, root: int, *, allow_other: bool, devices: bool) -> int:
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise MountError(f"/dev/fuse cannot be opened ({error.strerror}); run bonobofs doctor") from error
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,default_permissions"
    if allow_other:
        options += ",allow_other"
    below = os.fstatvfs(root).f_flag
    flags = _MS_NOATIME
    for given, flag in ((os.ST_NOSUID, _MS_NOSUID), (os.ST_NOEXEC, _MS_NOEXEC), (os.ST_RDONLY, _MS_RDONLY)):
        flags |= flag if below & given else 0
    if below & os.ST_NODEV or not devices:
        flags |= _MS_NODEV
    try:
        target = f"/proc/self/fd/{place}".encode()
        syscalls.mount(os.fsencode(source), target, b"fuse.bonobofs", flags, options.encode())
    except OSError as error:
        os.close(fd)
        raise MountError(f"the kernel refused the mount on {mountpoint} ({error.strerror})") from error
    return fd


def _mount_as_user(source: str, mountpoint: str, *, allow_other: bool) -> int:
    options = ["default_permissions", "noatime", "subtype=bonobofs", f"fsname={_escaped(source)}"]
    if allow_other:
        options.append("allow_other")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        try:
            ran = subprocess.run(
                ["fusermount3", "-o", ",".join(options), "--", mountpoint],
                pass_fds=(theirs.fileno(),),
                env={"_FUSE_COMMFD": str(theirs.fileno()), "PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
            )
        except FileNotFoundError:
            raise MountError("fusermount3 is not installed; install the package fuse3, or mount as root") from None
        if ran.returncode != 0:
            said = os.fsdecode(ran.stderr).strip().splitlines()
            raise MountError(f"{said[-1] if said else 'fusermount3 failed'}; run bonobofs doctor")
        _, ancillary, _, _ = ours.recvmsg(1, socket.CMSG_SPACE(4))
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds = array.array("i")
            fds.frombytes(data[:4])
            os.set_inheritable(fds[0], False)
            return fds[0]
    raise MountError("fusermount3 gave no connection; run bonobofs doctor")


def _escaped(source: str) -> str:
    return source.replace("\\", "\\\\").replace(",", "\\,")


def unmount(mountpoint: str, *, lazy: bool) -> bool:
    """Take the mount off; False when it is busy. Never from the thread that serves: the kernel may ask it to write."""
    try:
        mounts.detach(Path(mountpoint), lazy=lazy)
    except MountError:
        return True
    except OSError as error:
        return error.errno != errno.EBUSY
    return True


class Connection:
    """An open connection: reads requests, gives them to handlers, writes replies."""

    def __init__(self, fd: int) -> None:
        self._fd: Final = fd
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._spin: Final = SPIN if len(os.sched_getaffinity(0)) > 1 else 0
        self._idle: Final = Idle()
        self._served = 0
        self._pipe: Final = Pipe()
        self._notices: Final = Notifier(fd, lambda: self._idle.look(self._served))
        self._buffer: Final = bytearray(p.BUFFER_SIZE)
        self._buffers: Final = [self._buffer]
        self._view: Final = memoryview(self._buffer)
        self._spinner: Final = select.poll()
        self._spinner.register(fd, select.POLLIN)
        self._poll: Final = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._listened: Final[dict[int, Callable[[], None]]] = {}
        self._listener: Final = select.poll()
        self.flags = p.Init(0)
        self._minor = 0
        self._slices: Final = Slices()
        self.add_reader(self._slices.bell, self._slices.collect)
        os.set_blocking(fd, False)

    @property
    def waker(self) -> int:
        """A descriptor to write to when the loop should look up (signal.set_wakeup_fd)."""
        return self._waker

    @property
    def notices(self) -> Notifications:
        """What the kernel can be told through this connection."""
        return Notifications(
            self.invalidate, self.invalidate_entry, self.prune, self.invalidate_names, self._notices.then
        )

    @property
    def blocked_notices(self) -> int:
        """How many notifications the kernel has not taken in time."""
        return self._notices.blocked

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        """Have `callback` run between requests, in the thread that serves, whenever `fd` can be read."""
        self._listened[fd] = callback
        self._listener.register(fd, select.POLLIN)
        self._poll.register(fd, select.POLLIN)

    def remove_reader(self, fd: int) -> None:
        """Listen to `fd` no more."""
        del self._listened[fd]
        self._listener.unregister(fd)
        self._poll.unregister(fd)

    def handshake(self, *, watched: bool) -> None:
        """Answer INIT. ProtocolError: the kernel is too old for what the mount needs.

        `watched`: the kernel is told what changes behind the mount; else it must look for itself.
        """
        self._poll.poll()
        length = os.readv(self._fd, [self._buffer])
        header = p.IN_HEADER.unpack_from(self._buffer)
        if header[1] != p.Opcode.INIT or length < p.IN_SIZE + p.INIT_IN.size:
            raise ProtocolError("the kernel did not begin with INIT")
        unique = header[2]
        major, minor, readahead, flags = p.INIT_IN.unpack_from(self._buffer, p.IN_SIZE)
        if flags & p.Init.INIT_EXT:
            flags |= p.INIT_IN_FLAGS2.unpack_from(self._buffer, p.IN_SIZE + p.INIT_IN.size)[0] << 32
        if major != p.KERNEL_VERSION or minor < p.OLDEST_MINOR_VERSION or flags & _NEEDED != _NEEDED:
            self._error(unique, errno.EPROTO)
            raise ProtocolError(
                f"the kernel speaks FUSE {major}.{minor}, which is too old; Linux 5.12 or later is needed"
            )
        wanted = _WANTED if watched else _WANTED & ~p.Init.EXPLICIT_INVAL_DATA | p.Init.AUTO_INVAL_DATA
        self.flags = p.Init(flags) & wanted
        minor = min(minor, p.KERNEL_MINOR_VERSION)
        self._minor = minor
        chosen = int(self.flags)
        body = p.INIT_OUT.pack(
            p.KERNEL_VERSION,
            minor,
            readahead,
            chosen & 0xFFFFFFFF,
            64,
            48,
            p.MAX_WRITE,
            1,
            p.MAX_PAGES,
            0,
            chosen >> 32,
            0,
        )
        os.write(self._fd, p.OUT_HEADER.pack(p.OUT_SIZE + len(body), 0, unique) + body)
        self._read_further_ahead()

    def _read_further_ahead(self) -> None:
        """Let the kernel ask for longer pieces of a file that is read from end to end. Only root may say so."""
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/self/fdinfo/{self._fd}").read_text().splitlines()
            number = next(line.split()[1] for line in lines if line.startswith("fuse_connection:"))
            Path(f"/sys/class/bdi/0:{number}/read_ahead_kb").write_text(str(READ_AHEAD_KB))

    def serve(
        self,
        handlers: dict[int, Handler],
        hooks: Hooks,
    ) -> None:
        """Serve until the mount ends. An unforeseen exception in a handler refuses that request (EIO)."""
        self._notices.start()
        due = listened = monotonic()
        while True:
            length = self._next(due)
            if length == _ENDED:
                break
            now = monotonic()
            if length == 0 or now >= due:
                self._notices.look(now)
                wait = hooks.idle(now)
                if wait is None:
                    break
                due = now + wait
            if length == _HEARD or now - listened >= _LISTEN:
                listened = now
                self._hear(now, hooks)
            if length > 0:
                self._served += 1
                hooks.before(now)
                self._handle(length, handlers, hooks.failed)
                hooks.after()
            if self._slices:
                self._go_on(handlers, hooks)
            if self._slices.again:  # before a new request, which may be a long one
                self._go_on(handlers, hooks)

        self._end_jobs(hooks)

    def _end_jobs(self, hooks: Hooks) -> None:
        """Wait for the system calls of threads, but not for a disk that hangs, and enter the outcomes."""
        self._slices.ready.clear()
        while self._slices.has_jobs and select.select([self._slices.bell], [], [], _SECONDS_TO_END)[0]:
            self._slices.collect()
            while self._slices.ready:
                hooks.before(monotonic())
                self._advance(self._slices.ready.popleft(), hooks.failed)
                hooks.after()

    def _go_on(self, handlers: dict[int, Handler], hooks: Hooks) -> None:
        """A slice of a long request, or one request that has waited for a long one."""
        hooks.before(monotonic())
        slices = self._slices
        if slices.again:
            message = slices.again.popleft()
            self._buffer[: len(message)] = message
            self._handle(len(message), handlers, hooks.failed)
        else:
            self._advance(slices.ready.popleft(), hooks.failed)
        hooks.after()

    def _next(self, due: float) -> int:
        """The length of the next request, in the buffer; 0: it is time to tidy up; _HEARD, _ENDED."""
        try:
            return os.readv(self._fd, self._buffers)
        except OSError as error:
            if error.errno not in _PASSING:
                return self._ended(error)
        if self._slices:
            return _LONG
        # Looking whether there is something to read costs a fifth of a read that fails: no exception, no message.
        look = self._spinner.poll
        for _ in range(self._spin):
            if look(0):
                break
        else:
            self._idle.let_halt()
            ready = self._poll.poll(max(0.0, due - monotonic()) * 1000)
            self._idle.keep_awake()
            if not ready:
                return 0
            which = [fd for fd, _ in ready]
            if self._wake in which:
                os.read(self._wake, 4096)
                return 0
            if self._fd not in which:
                return _HEARD
        try:
            return os.readv(self._fd, self._buffers)
        except OSError as error:
            return 0 if error.errno in _PASSING else self._ended(error)

    def _ended(self, error: OSError) -> int:
        if error.errno in GONE:
            return _ENDED
        raise error

    def _hear(self, now: float, hooks: Hooks) -> None:
        for fd, _ in self._listener.poll(0):
            hooks.before(now)
            if fd in self._listened:  # what comes before may have ended it
                self._listened[fd]()
            hooks.after()

    def _handle(self, length: int, handlers: dict[int, Handler], failed: Callable[[int, Exception], None]) -> None:
        if length < p.IN_SIZE:
            return  # no request: the buffer still holds an earlier one
        _, opcode, unique, node_id, uid, gid, pid, extensions, _ = p.IN_HEADER.unpack_from(self._buffer)
        handler = handlers.get(opcode)
        if handler is None:
            if opcode not in _SILENT:
                self._error(unique, errno.ENOSYS)
            return
        if (opcode in _SYNCS and self._slices.is_occupied) or (opcode in _COPIES and self._slices.deferred):
            self._defer(length, failed)
            return
        try:
            body = handler(Header(node_id, uid, gid, pid, extensions), self._view[p.IN_SIZE : length])
        except OSError as error:
            if opcode not in _SILENT:
                self._error(unique, error.errno or errno.EIO)
            return
        except Busy:
            self._defer(length, failed)
            return
        except Exception as error:  # noqa: BLE001 - the edge at which an unknown failure becomes a refusal and a record
            failed(opcode, error)
            if opcode not in _SILENT:
                self._error(unique, errno.EIO)
            return
        if isinstance(body, Generator):
            self._advance(Long(unique, opcode, body), failed)
        elif opcode not in _SILENT:
            self._reply(unique, body)

    def _defer(self, length: int, failed: Callable[[int, Exception], None]) -> None:
        """Keep the request in the buffer until a long one has ended. Where too much waits, those that judge end."""
        if not self._slices.defer(bytes(self._view[:length])):
            for long in [each for each in self._slices.ready if each.opcode in _JUDGED]:
                self._slices.ready.remove(long)
                long.steps.close()
                self._error(long.unique, errno.EBUSY)
            self._slices.ended()

    def _advance(self, long: Long, failed: Callable[[int, Exception], None]) -> None:
        """Go on with a long request for the time of a slice, or until it waits for a system call."""
        until = monotonic() + SLICE
        try:
            while True:
                job = next(long.steps)
                if job is not None:
                    self._slices.start(job, long)
                    return
                if monotonic() >= until:
                    self._slices.ready.append(long)
                    return
        except StopIteration as end:
            if long.opcode not in _SILENT:
                self._reply(long.unique, end.value)
        except OSError as error:
            self._error(long.unique, error.errno or errno.EIO)
        except Exception as error:  # noqa: BLE001 - as for a handler
            failed(long.opcode, error)
            if long.opcode not in _SILENT:
                self._error(long.unique, errno.EIO)
        self._slices.ended()

    def _reply(self, unique: int, body: bytes | tuple[bytes, memoryview] | Stretch) -> None:
        try:
            if isinstance(body, Stretch):
                self._move(unique, body)
            elif isinstance(body, tuple):
                head, data = body
                size = p.OUT_SIZE + len(head) + len(data)
                os.writev(self._fd, [p.OUT_HEADER.pack(size, 0, unique) + head, data])
            else:
                os.write(self._fd, p.OUT_HEADER.pack(p.OUT_SIZE + len(body), 0, unique) + body)
        except OSError as error:
            if error.errno not in (*_PASSING, *GONE):
                self._error(unique, errno.EIO)

    def _move(self, unique: int, stretch: Stretch) -> None:
        if not self._pipe.move(p.OUT_HEADER.pack(p.OUT_SIZE + stretch.length, 0, unique), stretch, self._fd):
            data = b"".join(stretch)
            os.writev(self._fd, [p.OUT_HEADER.pack(p.OUT_SIZE + len(data), 0, unique), data])

    def _error(self, unique: int, code: int) -> None:
        try:
            os.write(self._fd, p.OUT_HEADER.pack(p.OUT_SIZE, -code, unique))
        except OSError as error:
            if error.errno not in (*_PASSING, *GONE):
                raise

    def invalidate(self, node_id: int, offset: int, length: int) -> None:
        """The kernel must forget the node's attributes, and its pages from `offset` on (none where it is negative)."""
        body = p.INVAL_INODE_OUT.pack(node_id, offset, length)
        self._notices.put(p.OUT_HEADER.pack(p.OUT_SIZE + len(body), p.NOTIFY_INVAL_INODE, 0) + body)

    def invalidate_entry(self, parent_id: int, name: bytes) -> None:
        """The kernel must look this name up again."""
        body = p.INVAL_ENTRY_OUT.pack(parent_id, len(name), 0) + name + b"\0"
        self._notices.put(p.OUT_HEADER.pack(p.OUT_SIZE + len(body), p.NOTIFY_INVAL_ENTRY, 0) + body)

    def invalidate_names(self) -> bool:
        """The kernel must look every name up again. False: it is too old to be told so."""
        if self._minor >= p.EPOCH_MINOR_VERSION:
            self._notices.put(p.OUT_HEADER.pack(p.OUT_SIZE, p.NOTIFY_INC_EPOCH, 0))
        return self._minor >= p.EPOCH_MINOR_VERSION

    def prune(self, node_ids: list[int], names: list[tuple[int, bytes]]) -> None:
        """The kernel must forget those of the nodes that nobody has open; `names` says the same to an older kernel."""
        if self._minor >= p.PRUNE_MINOR_VERSION:
            body = p.PRUNE_OUT.pack(len(node_ids), 0, 0) + struct.pack(f"={len(node_ids)}Q", *node_ids)
            self._notices.put(p.OUT_HEADER.pack(p.OUT_SIZE + len(body), p.NOTIFY_PRUNE, 0) + body)
            return
        for parent_id, name in names:
            self.invalidate_entry(parent_id, name)

    def close(self) -> None:
        """End the connection: whoever still stands in the mount gets ENOTCONN."""
        self._notices.close()
        self._idle.close()
        self._pipe.close()
        os.close(self._fd)


_SYNCS: Final = (p.Opcode.FSYNC, p.Opcode.FSYNCDIR)
_COPIES: Final = (p.Opcode.COPY_FILE_RANGE, p.Opcode.COPY_FILE_RANGE_64)
"""Each is followed by the next of the same file, so a request that waits for one is served before the next."""
_JUDGED: Final = (p.Opcode.RENAME, p.Opcode.RENAME2)
_SILENT: Final = frozenset(opcode for opcode, role in p.ROLES.items() if role is p.Role.SILENT)
