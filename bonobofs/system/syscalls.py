"""System calls that Python's `os` lacks, through the C library. Errors are raised as OSError."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import resource
import signal
import struct
import sys
from typing import Final

_MOST_DESCRIPTORS: Final = 1 << 20
_TABLE: Final = 1 << 16
"""Descriptors for which the kernel allocates room at once, 8 bytes for each."""
_libc: Final = ctypes.CDLL(None, use_errno=True)
_SETGROUPS: Final = {"x86_64": 116, "aarch64": 159, "riscv64": 159, "ppc64le": 81, "s390x": 206}.get(os.uname().machine)

RENAME_NOREPLACE: Final = 1
RENAME_EXCHANGE: Final = 2
MNT_DETACH: Final = 2
UMOUNT_NOFOLLOW: Final = 8
FALLOC_KEEP_SIZE: Final = 1
FALLOC_PUNCH_HOLE: Final = 2
FALLOC_ZERO_RANGE: Final = 16
UTIME_NOW: Final = (1 << 30) - 1
UTIME_OMIT: Final = (1 << 30) - 2
_AT_FDCWD: Final = -100
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_PR_SET_NAME: Final = 15
_CLONE_NEWNS: Final = 0x00020000
_CLONE_NEWUSER: Final = 0x10000000
_MS_REC: Final = 0x4000
_MS_PRIVATE: Final = 1 << 18
# Since Linux 5.2, with the same numbers on every architecture.
_FSOPEN: Final = 430
_FSCONFIG: Final = 431
_FSMOUNT: Final = 432
_CLOEXEC: Final = 1
"""FSOPEN_CLOEXEC and FSMOUNT_CLOEXEC."""
_CONFIG_CREATE: Final = 6

_getdents = _libc.getdents64
_getdents.argtypes = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
_getdents.restype = ctypes.c_ssize_t
_renameat2 = _libc.renameat2
_renameat2.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
_fallocate = _libc.fallocate64
_fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_mount = _libc.mount
_mount.argtypes = (ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_ulong, ctypes.c_char_p)
_unshare = _libc.unshare
_unshare.argtypes = (ctypes.c_int,)
_umount2 = _libc.umount2
_umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_setfsuid = _libc.setfsuid
_setfsgid = _libc.setfsgid


_TIMES: Final = struct.Struct("=4q")
_utimensat = _libc.utimensat
_utimensat.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int)
_futimens = _libc.futimens
_futimens.argtypes = (ctypes.c_int, ctypes.c_char_p)


def _check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def getdents(fd: int, buffer: ctypes.Array[ctypes.c_char], size: int) -> int:
    """Fill `buffer` with the next `struct linux_dirent64` records; return the number of bytes, 0 at the end."""
    return _check(_getdents(fd, buffer, size))


def renameat2(old_dir: int, old: bytes, new_dir: int, new: bytes, flags: int) -> None:
    """Rename with RENAME_NOREPLACE or RENAME_EXCHANGE."""
    _check(_renameat2(old_dir, old, new_dir, new, flags))


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """Allocate, punch or zero `length` bytes at `offset`, as the FALLOC_ bits of `mode` say."""
    _check(_fallocate(fd, mode, offset, length))


def syncfs(fd: int) -> None:
    """Write the file system of an open file to the disk."""
    _check(_libc.syncfs(fd))


def utimens(target: int | bytes, access: tuple[int, int], modification: tuple[int, int]) -> None:
    """Set both times of an open file, or of a path, following symlinks.

    Each time is (seconds, nanoseconds). UTIME_NOW or UTIME_OMIT may take the place of the nanoseconds.
    """
    times = _TIMES.pack(*access, *modification)
    _check(_futimens(target, times) if isinstance(target, int) else _utimensat(_AT_FDCWD, target, times, 0))


class _FileHandle(ctypes.Structure):
    _fields_ = (("size", ctypes.c_uint32), ("type", ctypes.c_int32), ("content", ctypes.c_ubyte * 128))


_AT_EMPTY_PATH: Final = 0x1000
_AT_HANDLE_FID: Final = 0x200
"""Since Linux 6.6: also gives handles on file systems that cannot open by handle."""
_handle: Final = _FileHandle()
_handle_pointer: Final = ctypes.byref(_handle)
_handle_content: Final = memoryview(_handle.content).cast("B")
_mount_id_pointer: Final = ctypes.byref(ctypes.c_int())
_name_to_handle_at: Final = _libc.name_to_handle_at
_name_to_handle_at.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)


def file_handle(fd: int, name: bytes = b"", flags: int = 0) -> bytes:
    """Return the file handle, which identifies an inode: a reused inode number has a different handle.

    The file is `name` in the directory `fd`, without following a symlink, or `fd` itself. Not thread-safe. OSError.
    """
    _handle.size = len(_handle_content)
    if _name_to_handle_at(fd, name, _handle_pointer, _mount_id_pointer, flags if name else flags | _AT_EMPTY_PATH):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return bytes(_handle_content[: _handle.size])


def handle_flags(fd: int) -> int:
    """Return the `flags` with which `file_handle` works on the file system of `fd`; -1 if it has no handles."""
    for flags in (_AT_HANDLE_FID, 0):
        try:
            file_handle(fd, flags=flags)
        except OSError:
            continue
        return flags
    return -1


_STATX_SIZE: Final = 256
_STATX_BTIME: Final = 0x800
_BTIME: Final = struct.Struct("=80xqI")
_AT_SYMLINK_NOFOLLOW: Final = 0x100


def birth_time(path: bytes) -> int:
    """Return when a file was created, in nanoseconds; 0: the file system does not tell. Follows no symlink. OSError."""
    buffer = ctypes.create_string_buffer(_STATX_SIZE)
    if _libc.statx(_AT_FDCWD, path, _AT_SYMLINK_NOFOLLOW, _STATX_BTIME, buffer):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    if not int.from_bytes(buffer.raw[:4], sys.byteorder) & _STATX_BTIME:
        return 0
    seconds, nanoseconds = _BTIME.unpack_from(buffer)
    return int(seconds) * 10**9 + int(nanoseconds)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_OPENAT2: Final = 437
RESOLVE_NO_XDEV: Final = 0x01
RESOLVE_NO_SYMLINKS: Final = 0x04
RESOLVE_BENEATH: Final = 0x08
_how: Final = _OpenHow(0, 0, RESOLVE_NO_XDEV | RESOLVE_NO_SYMLINKS | RESOLVE_BENEATH)
_how_pointer: Final = ctypes.byref(_how)
_how_size: Final = ctypes.sizeof(_how)
_syscall: Final = _libc.syscall


def open_beneath(directory: int, path: bytes, flags: int) -> int:
    """Open `path` beneath the descriptor `directory`, without following symlinks or crossing a mount.

    Not thread-safe; the server opens in one thread. OSError: ELOOP for a symlink, EXDEV for a mount or `..` outside.
    """
    _how.flags = flags | os.O_CLOEXEC
    return _check(_syscall(_OPENAT2, directory, path, _how_pointer, _how_size))


def openat2(directory: int, path: bytes, flags: int, resolve: int) -> int:
    """Open `path` relative to the descriptor `directory` with the RESOLVE_ flags. Thread-safe. OSError."""
    how = _OpenHow(flags | os.O_CLOEXEC, 0, resolve)
    return _check(_syscall(_OPENAT2, directory, path, ctypes.byref(how), _how_size))


def mount(source: bytes, target: bytes, fstype: bytes, flags: int, data: bytes) -> None:
    """Attach a file system, as the system call does."""
    _check(_mount(source, target, fstype, flags, data))


def umount(target: bytes, flags: int) -> None:
    """Detach a mount, as umount2(2), without the GIL: threads of this process that serve the target can answer."""
    _check(_umount2(target, flags))


def file_system_type(fd: int) -> int:
    """Return the `f_type` of the file system of an open file, as fstatfs(2). OSError."""
    buffer = (ctypes.c_long * 32)()
    _check(_libc.fstatfs(fd, buffer))
    return buffer[0] & 0xFFFFFFFF


def set_file_identity(uid: int, gid: int, groups: tuple[int, ...]) -> None:
    """Set the file system credentials of this thread only to (uid, gid, groups). OSError.

    It uses the raw setgroups system call, because the C library's function changes all threads of the process.
    """
    if _SETGROUPS is None:
        raise OSError(errno.ENOSYS, f"no setgroups known for {os.uname().machine}")
    if uid == 0:
        _setfsuid(0)
    array = (ctypes.c_uint32 * len(groups))(*groups)
    _check(_libc.syscall(_SETGROUPS, len(groups), array))
    _setfsgid(gid)
    if uid != 0:
        _setfsuid(uid)


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send a signal to this process when its parent thread exits."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0))


def open_file_system(kind: bytes) -> int:
    """Return a descriptor of the root of a file system, such as fusectl, without mounting it. OSError."""
    context = _check(_libc.syscall(_FSOPEN, kind, _CLOEXEC))
    try:
        _check(_libc.syscall(_FSCONFIG, context, _CONFIG_CREATE, None, None, 0))
        return _check(_libc.syscall(_FSMOUNT, context, _CLOEXEC, 0))
    finally:
        os.close(context)


def unshare_mounts() -> None:
    """Move this process to a private mount namespace, in which later mounts outside do not appear.

    An unprivileged user also gets a user namespace that maps its own IDs. OSError: not permitted.
    """
    uid, gid = os.geteuid(), os.getegid()
    _check(_unshare(_CLONE_NEWNS if uid == 0 else _CLONE_NEWNS | _CLONE_NEWUSER))
    if uid != 0:
        for name, text in (("uid_map", f"{uid} {uid} 1"), ("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    _check(_mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))


def enter_namespace(descriptor: int) -> None:
    """Join the namespace of a descriptor from /proc/PID/ns. The process must be single-threaded. OSError."""
    _check(_libc.setns(descriptor, 0))


def forbid_tracing() -> None:
    """Keep other processes of the same user from tracing this one or reading its memory and descriptors."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def allow_tracing() -> None:
    """Undo `forbid_tracing`: other processes of the same user may trace this one."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0))


def set_process_name(name: bytes) -> None:
    """Set the name that ps and top show; at most 15 bytes."""
    _check(_libc.prctl(_PR_SET_NAME, name, 0, 0, 0))


def close_all_but(kept: set[int]) -> None:
    """Close all descriptors of this process except `kept`."""
    low = 0
    for fd in sorted(kept):
        if low < fd:  # os.closerange closes every descriptor if the range is empty
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


def libfuse() -> str | None:
    """Return the file name of the installed libfuse 3, or None."""
    for name in ("libfuse3.so.4", "libfuse3.so.3"):
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return name
    return None


def raise_limit() -> int:
    """Raise the soft limit of open descriptors to the hard limit, at most _MOST_DESCRIPTORS; return the new limit.

    Call it before a thread starts: it also enlarges the kernel's table of descriptors. The kernel doubles a full table,
    which takes 14 ms in a process with threads.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    fd = os.open("/", os.O_PATH | os.O_CLOEXEC)
    for opened in (fd, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, min(wanted, _TABLE) - 1)):
        os.close(opened)
    return wanted
