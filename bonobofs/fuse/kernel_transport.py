"""The kernel transport: mount, the request loop over /dev/fuse, replies and notifications.

One thread serves. It polls a bounded number of times before it sleeps, because waking up on another CPU costs more
than anything Python does. Other threads send notifications (`notifications`): the kernel may hold, for the request
being served, a lock that an invalidation waits for.
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
from bonobofs.fuse.cpu_latency import CpuLatency, RunQueue
from bonobofs.fuse.mount_context import Handler, Header, Notifications
from bonobofs.fuse.notifications import GONE, NotificationQueue
from bonobofs.fuse.slices import SLICE, Busy, LongRequest, LongRequests
from bonobofs.fuse.splice import FileRange, SplicePipe
from bonobofs.fuse.transport import Hooks
from bonobofs.system import mounts, syscalls

SPIN: Final = 200
"""Polls before the thread sleeps, with two CPUs or more."""
_BETWEEN_CHECKS: Final = 40
"""Polls between two checks of the run queue, which take 1 us each."""
_FULL_CHECKS: Final = 16
"""After so many consecutive checks find the processors oversubscribed, the thread checks before it polls."""
READ_AHEAD_KB: Final = 512
"""Four times the default: 1 GiB is read in five sixths of the time. More does not fit in the processor's cache."""
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
_READER_INTERVAL: Final = 0.01
"""Seconds between two polls of the readers while requests keep coming."""
_SECONDS_TO_END: Final = 3.0
"""Seconds that the end of the mount waits for the system call of a thread."""
_UNMOUNTED: Final = -1
"""In place of a request's length: the mount has ended."""
_READABLE: Final = -2
"""In place of a request's length: there is none, and a reader may be readable."""
_LONG: Final = -3
"""In place of a request's length: there is none, and a long request can go on."""
_TRANSIENT: Final = (errno.ENOENT, errno.EINTR, errno.EAGAIN)
_LOST: Final = _TRANSIENT + GONE
"""Errors of a reply that reaches no caller."""


def mount(
    source: str, mountpoint: str, root: int, *, allow_other: bool, devices: bool, expected: Sequence[int] | None = None
) -> int:
    """Mount on `mountpoint` and return the descriptor of the connection. MountError.

    `root` is a descriptor of the source. `expected` is device and inode number of the mountpoint that was checked.
    A mount that is not on `mountpoint` afterwards is detached.
    """
    path = Path(mountpoint)
    try:
        mountpoint_fd = mounts.open_directory(path)
    except OSError as error:
        raise MountError(f"the mountpoint {mountpoint} cannot be opened ({error.strerror}); mount again") from error
    try:
        if expected is not None and mounts.identity(mountpoint_fd) != tuple(expected):
            raise MountError(f"the mountpoint {mountpoint} was replaced while it was checked; mount again")
        before = mounts.bonobofs_mounts()
        if os.geteuid() == 0:
            fd = _mount_as_root(source, mountpoint_fd, mountpoint, root, allow_other=allow_other, devices=devices)
        else:
            fd = _mount_as_user(source, mountpoint, allow_other=allow_other)
    finally:
        os.close(mountpoint_fd)
    created = mounts.bonobofs_mounts()
    for mount_before in before:
        with suppress(ValueError):
            created.remove(mount_before)
    if any(new.mountpoint == path for new in created):
        return fd
    os.close(fd)
    for new in created:
        if new.source == source:
            mounts.detach(new.mountpoint, lazy=True)
    raise MountError(f"the mountpoint {mountpoint} was replaced during the mount; nothing is mounted; mount again")


def _mount_as_root(
    source: str, mountpoint_fd: int, mountpoint: str, root: int, *, allow_other: bool, devices: bool
) -> int:
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise MountError(f"/dev/fuse cannot be opened ({error.strerror}); run bonobofs doctor") from error
    options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,default_permissions"
    if allow_other:
        options += ",allow_other"
    source_flags = os.fstatvfs(root).f_flag
    flags = _MS_NOATIME
    for source_flag, flag in ((os.ST_NOSUID, _MS_NOSUID), (os.ST_NOEXEC, _MS_NOEXEC), (os.ST_RDONLY, _MS_RDONLY)):
        flags |= flag if source_flags & source_flag else 0
    if source_flags & os.ST_NODEV or not devices:
        flags |= _MS_NODEV
    try:
        target = f"/proc/self/fd/{mountpoint_fd}".encode()
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
            completed = subprocess.run(
                ["fusermount3", "-o", ",".join(options), "--", mountpoint],
                pass_fds=(theirs.fileno(),),
                env={"_FUSE_COMMFD": str(theirs.fileno()), "PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
            )
        except FileNotFoundError:
            raise MountError("fusermount3 is not installed; install the package fuse3, or mount as root") from None
        if completed.returncode != 0:
            lines = os.fsdecode(completed.stderr).strip().splitlines()
            raise MountError(f"{lines[-1] if lines else 'fusermount3 failed'}; run bonobofs doctor")
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
    """Unmount; False if the mount is busy. Not from the serving thread: the kernel may send it WRITE requests first."""
    try:
        mounts.detach(Path(mountpoint), lazy=lazy)
    except MountError:
        return True
    except OSError as error:
        return error.errno != errno.EBUSY
    return True


class KernelTransport:
    """An open connection: reads requests, calls their handlers, writes replies."""

    def __init__(self, fd: int) -> None:
        self._fd: Final = fd
        self._wake, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.spins: Final = SPIN if len(os.sched_getaffinity(0)) > 1 else 0
        self._run_queue: Final = RunQueue()
        self._cpu_latency: Final = CpuLatency()
        self._full_checks = 0
        """Consecutive checks that found the processors oversubscribed. A request found by a poll resets the number."""
        self._served = 0
        self._pipe: Final = SplicePipe()
        self._notices: Final = NotificationQueue(fd, lambda: self._cpu_latency.check(self._served))
        self._buffer: Final = bytearray(p.BUFFER_SIZE)
        self._buffers: Final = [self._buffer]
        self._view: Final = memoryview(self._buffer)
        self._request_poll: Final = select.poll()
        self._request_poll.register(fd, select.POLLIN)
        self._poll: Final = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._readers: Final[dict[int, Callable[[], None]]] = {}
        self._reader_poll: Final = select.poll()
        self.flags = p.Init(0)
        self._minor = 0
        self._slices: Final = LongRequests()
        self.add_reader(self._slices.bell, self._slices.collect)
        os.set_blocking(fd, False)

    @property
    def waker(self) -> int:
        """A descriptor that wakes the loop when it is written to (signal.set_wakeup_fd)."""
        return self._waker

    @property
    def notices(self) -> Notifications:
        """The notifications of this connection."""
        return Notifications(
            self.invalidate, self.invalidate_entry, self.prune, self.invalidate_names, self._notices.after_pending
        )

    @property
    def blocked_notifications(self) -> int:
        """Number of notifications that the kernel has not taken within a second."""
        return self._notices.blocked

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        """Call `callback` between requests, in the serving thread, whenever `fd` is readable."""
        self._readers[fd] = callback
        self._reader_poll.register(fd, select.POLLIN)
        self._poll.register(fd, select.POLLIN)

    def remove_reader(self, fd: int) -> None:
        """Call no callback for `fd` any more."""
        del self._readers[fd]
        self._reader_poll.unregister(fd)
        self._poll.unregister(fd)

    def handshake(self, *, watched: bool) -> None:
        """Answer INIT. ProtocolError: the kernel is too old.

        `watched`: the server sends invalidations for external changes; otherwise the kernel compares attributes.
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
        self._set_read_ahead()

    def _set_read_ahead(self) -> None:
        """Let the kernel read further ahead in a file. Only root may set this."""
        with suppress(OSError, StopIteration):
            lines = Path(f"/proc/self/fdinfo/{self._fd}").read_text().splitlines()
            number = next(line.split()[1] for line in lines if line.startswith("fuse_connection:"))
            Path(f"/sys/class/bdi/0:{number}/read_ahead_kb").write_text(str(READ_AHEAD_KB))

    def serve(self, handlers: dict[int, Handler], hooks: Hooks) -> None:
        """Serve until the mount ends. An unexpected exception in a handler fails that request with EIO."""
        self._notices.start()
        slices = self._slices
        due = polled = monotonic()
        while True:
            length = self._read_request(due, hooks.rest)
            if length == _UNMOUNTED:
                break
            now = monotonic()
            if length == 0 or now >= due:
                self._notices.replace_late_thread(now)
                wait = hooks.idle(now)
                if wait is None:
                    break
                due = now + wait
            if length == _READABLE or now - polled >= _READER_INTERVAL:
                polled = now
                self._run_readers(now, hooks)
            if length > 0:
                self._served += 1
                hooks.before(now)
                self._handle(length, handlers, hooks.failed)
                hooks.after()
            if slices.ready or slices.again:
                self._continue_long(handlers, hooks)
            if slices.again:  # before a new request, which may be long itself
                self._continue_long(handlers, hooks)

        self._end_jobs(hooks)

    def _end_jobs(self, hooks: Hooks) -> None:
        """Wait for the system calls of threads, 3 s at most, and record their outcomes."""
        self._slices.ready.clear()
        while self._slices.has_jobs and select.select([self._slices.bell], [], [], _SECONDS_TO_END)[0]:
            self._slices.collect()
            while self._slices.ready:
                hooks.before(monotonic())
                self._advance(self._slices.ready.popleft(), hooks.failed)
                hooks.after()

    def _continue_long(self, handlers: dict[int, Handler], hooks: Hooks) -> None:
        """Serve one slice of a long request, or one request that was deferred for a long one."""
        hooks.before(monotonic())
        slices = self._slices
        if slices.again:
            message = slices.again.popleft()
            self._buffer[: len(message)] = message
            self._handle(len(message), handlers, hooks.failed)
        else:
            self._advance(slices.ready.popleft(), hooks.failed)
        hooks.after()

    def _read_request(self, due: float, rest: Callable[[], bool]) -> int:
        """Read a request into the buffer; its length. 0: it is time to tidy up; _READABLE, _UNMOUNTED, _LONG."""
        poll = self._request_poll.poll
        if not poll(0):  # a poll costs a third of a read that fails with an exception
            if self._slices.ready or self._slices.again:
                return _LONG
            while rest() and not poll(0):
                pass
            if not self._spin() and (other := self._sleep(due)) is not None:
                return other
        try:
            return os.readv(self._fd, self._buffers)
        except OSError as error:
            # A request may be interrupted before it is read.
            return _READABLE if error.errno in _TRANSIENT else self._on_read_error(error)

    def _sleep(self, due: float) -> int | None:
        """Wait for a request, until `due` at the latest. None: there is one. 0: it is time to tidy up; _READABLE."""
        self._cpu_latency.allow_halt()
        ready = self._poll.poll(max(0.0, due - monotonic()) * 1000)
        self._cpu_latency.disallow_halt()
        readable = [fd for fd, _ in ready]
        if self._wake in readable:
            os.read(self._wake, 4096)
            return 0
        if self._fd in readable:
            return None
        return _READABLE if readable else 0

    def _spin(self) -> bool:
        """Poll for a request while no process waits for a processor. Return whether there is a request."""
        poll = self._request_poll.poll
        for _ in range(self.spins // _BETWEEN_CHECKS):
            polls = _BETWEEN_CHECKS if self._full_checks < _FULL_CHECKS else 0
            for _ in range(polls):
                if poll(0):
                    self._full_checks = 0
                    return True
            if self._run_queue.is_oversubscribed():
                self._full_checks += 1
                return False
            self._full_checks = 0
        return False

    def _on_read_error(self, error: OSError) -> int:
        if error.errno in GONE:
            return _UNMOUNTED
        raise error

    def _run_readers(self, now: float, hooks: Hooks) -> None:
        for fd, _ in self._reader_poll.poll(0):
            hooks.before(now)
            if fd in self._readers:  # an earlier callback may have removed it
                self._readers[fd]()
            hooks.after()

    def _handle(self, length: int, handlers: dict[int, Handler], failed: Callable[[int, Exception], None]) -> None:
        if length < p.IN_SIZE:
            return  # no complete request; the buffer still holds the one before
        fields = p.IN_HEADER.unpack_from(self._buffer)
        opcode, unique = fields[1], fields[2]
        handler = handlers.get(opcode)
        if handler is None:
            if opcode not in _SILENT:
                self._error(unique, errno.ENOSYS)
            return
        if opcode in _DEFERRABLE and (self._slices.deferred if opcode in _COPIES else self._slices.is_occupied):
            self._defer(length, failed)
            return
        try:
            # Equal to Header(*fields[3:8]), at a third of its time.
            body = handler(tuple.__new__(Header, fields[3:8]), self._view[p.IN_SIZE : length])
        except OSError as error:
            if opcode not in _SILENT:
                self._error(unique, error.errno or errno.EIO)
            return
        except Busy as busy:
            self._defer(length, failed)
            if busy.first is not None:
                self._advance(LongRequest(0, p.Opcode.FORGET, busy.first), failed)
            return
        except Exception as error:  # noqa: BLE001 - an unknown failure becomes EIO and a log line
            failed(opcode, error)
            if opcode not in _SILENT:
                self._error(unique, errno.EIO)
            return
        if not isinstance(body, bytes) and isinstance(body, Generator):  # most replies are bytes
            self._advance(LongRequest(unique, opcode, body), failed)
        elif opcode not in _SILENT:
            self._reply(unique, body)

    def _defer(self, length: int, failed: Callable[[int, Exception], None]) -> None:
        """Keep the request in the buffer until a long one has ended. If too many wait, fail the long renames."""
        if not self._slices.defer(bytes(self._view[:length])):
            for long in [long for long in self._slices.ready if long.opcode in _JUDGED]:
                self._slices.ready.remove(long)
                long.steps.close()
                self._error(long.unique, errno.EBUSY)
            self._slices.ended()

    def _advance(self, long: LongRequest, failed: Callable[[int, Exception], None]) -> None:
        """Run a long request for one slice, or until it waits for a system call."""
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

    def _reply(self, unique: int, body: bytes | tuple[bytes, memoryview] | FileRange) -> None:
        try:
            if isinstance(body, bytes):
                os.write(self._fd, p.OUT_HEADER.pack(p.OUT_SIZE + len(body), 0, unique) + body)
            elif isinstance(body, FileRange):
                self._splice(unique, body)
            else:
                head, data = body
                size = p.OUT_SIZE + len(head) + len(data)
                os.writev(self._fd, [p.OUT_HEADER.pack(size, 0, unique) + head, data])
        except OSError as error:
            if error.errno not in _LOST:
                self._error(unique, errno.EIO)

    def _splice(self, unique: int, content: FileRange) -> None:
        if not self._pipe.send(p.OUT_HEADER.pack(p.OUT_SIZE + content.length, 0, unique), content, self._fd):
            data = b"".join(content)
            os.writev(self._fd, [p.OUT_HEADER.pack(p.OUT_SIZE + len(data), 0, unique), data])

    def _error(self, unique: int, code: int) -> None:
        try:
            os.write(self._fd, p.OUT_HEADER.pack(p.OUT_SIZE, -code, unique))
        except OSError as error:
            if error.errno not in _LOST:
                raise

    def invalidate(self, node_id: int, offset: int, length: int) -> None:
        """Invalidate the node's attributes, and its pages from `offset` on (none if it is negative)."""
        body = p.INVAL_INODE_OUT.pack(node_id, offset, length)
        self._notices.put(p.OUT_HEADER.pack(p.OUT_SIZE + len(body), p.NOTIFY_INVAL_INODE, 0) + body)

    def invalidate_entry(self, parent_id: int, name: bytes) -> None:
        """Invalidate a name."""
        body = p.INVAL_ENTRY_OUT.pack(parent_id, len(name), 0) + name + b"\0"
        self._notices.put(p.OUT_HEADER.pack(p.OUT_SIZE + len(body), p.NOTIFY_INVAL_ENTRY, 0) + body)

    def invalidate_names(self) -> bool:
        """Invalidate every name. False: the kernel is too old for this."""
        if self._minor >= p.EPOCH_MINOR_VERSION:
            self._notices.put(p.OUT_HEADER.pack(p.OUT_SIZE, p.NOTIFY_INC_EPOCH, 0))
        return self._minor >= p.EPOCH_MINOR_VERSION

    def prune(self, node_ids: list[int], names: list[tuple[int, bytes]]) -> None:
        """Drop the nodes that no process has open. `names` are their names, which an older kernel gets instead."""
        if self._minor >= p.PRUNE_MINOR_VERSION:
            body = p.PRUNE_OUT.pack(len(node_ids), 0, 0) + struct.pack(f"={len(node_ids)}Q", *node_ids)
            self._notices.put(p.OUT_HEADER.pack(p.OUT_SIZE + len(body), p.NOTIFY_PRUNE, 0) + body)
            return
        for parent_id, name in names:
            self.invalidate_entry(parent_id, name)

    def close(self) -> None:
        """End the connection: every further access to the mount fails with ENOTCONN."""
        self._notices.close()
        self._cpu_latency.close()
        self._run_queue.close()
        self._pipe.close()
        os.close(self._fd)


_SYNCS: Final = (p.Opcode.FSYNC, p.Opcode.FSYNCDIR)
_COPIES: Final = (p.Opcode.COPY_FILE_RANGE, p.Opcode.COPY_FILE_RANGE_64)
"""Deferred while any request is deferred. Else a request that waits for one copy would wait for the next one too."""
_DEFERRABLE: Final = frozenset((*_SYNCS, *_COPIES))
_JUDGED: Final = (p.Opcode.RENAME, p.Opcode.RENAME2)
_SILENT: Final = frozenset(opcode for opcode, role in p.ROLES.items() if role is p.RequestEffect.SILENT)
