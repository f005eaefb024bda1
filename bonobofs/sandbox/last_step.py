"""The last program of the sandbox before the command: limits, Landlock, exec. The launcher sends it compiled.

A Landlock domain forbids mounting, so it can begin only after bubblewrap has made the namespaces. The program imports
few modules, because each start of the sandbox waits for it.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource

OLDEST_ABI = 2
"""Linux 5.19. Under ABI 1 no file can be renamed into another directory."""

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION = 1
_PATH_BENEATH = 1
_NO_NEW_PRIVS = 38
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_BLOCK = 1 << 6, 1 << 11
_TRUNCATE, _IOCTL_DEV, _RESOLVE_UNIX = 1 << 14, 1 << 15, 1 << 16
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16, 6: 16, 7: 16, 8: 16}
"""Number of file rights by ABI. From ABI 9 there are 17."""
_SCOPES = 3
"""Abstract sockets and signals, from ABI 6."""
_SIGNALS = 64
_SIGTTOU = 22
_MOST_DESCRIPTORS = 1 << 20

_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64))


class _Rule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("parent", ctypes.c_int32))


def landlock_abi() -> int:
    """Return the version of the kernel's Landlock interface; 0 if there is none."""
    return max(0, int(_libc.syscall(_CREATE_RULESET, None, 0, _VERSION)))


def restrict(read: list[str], write: list[str], sockets: list[str]) -> None:
    """Enter a Landlock domain. OSError.

    `read`: paths that can be read and executed. `write`: paths on which all rights hold, except making devices.
    `sockets`: paths of Unix sockets, or directories of them, that can be connected to. Elsewhere directories can be
    listed, and nothing else.
    """
    abi = landlock_abi()
    if abi < OLDEST_ABI:
        raise OSError(errno.EOPNOTSUPP, "the kernel has no Landlock")
    handled = (1 << _RIGHTS.get(abi, 17)) - 1
    of_files = handled & (_EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV | _RESOLVE_UNIX)
    readable = _EXECUTE | _READ_FILE | _READ_DIR
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    attributes = _Ruleset(handled, 0, _SCOPES if abi >= 6 else 0)
    ruleset = _check(_libc.syscall(_CREATE_RULESET, ctypes.byref(attributes), size, 0))
    _allow(ruleset, "/", _READ_DIR, handled)
    for path in read:
        _allow(ruleset, path, readable, of_files)
    for path in write:
        _allow(ruleset, path, handled & ~(_MAKE_CHAR | _MAKE_BLOCK), of_files)
    for path in sockets:
        _allow(ruleset, path, readable | handled & _RESOLVE_UNIX, of_files)
    _check(_libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0))
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int, of_files: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if os.fstat(fd).st_mode & 0o170000 != 0o040000:
        access &= of_files
    _check(_libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(_Rule(access, fd)), 0))
    os.close(fd)


def _check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def _limit(which: int, value: int) -> None:
    _, hard = resource.getrlimit(which)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _attach(streams: list[int], *, terminal: bool) -> None:
    """Make the descriptors the standard streams, and the command the foreground group of its terminal."""
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
    os.setpgid(0, 0)
    if terminal:
        _libc.signal(_SIGTTOU, 1)  # ignored while a group in the background takes the terminal
        os.tcsetpgrp(0, os.getpid())


def _prepare(config: dict[str, list[str]], numbers: dict[str, int], streams: list[int], status: int) -> None:
    _attach(streams, terminal=bool(numbers["terminal"]))
    if status > 3:  # os.closerange closes every descriptor if the range is empty
        os.closerange(3, status)
    os.closerange(status + 1, _MOST_DESCRIPTORS)
    os.set_inheritable(status, False)
    _limit(resource.RLIMIT_CORE, 0)
    if numbers["processes"]:
        _limit(resource.RLIMIT_NPROC, numbers["processes"])
    if numbers["memory"]:
        # RLIMIT_DATA counts writable private memory only. Node and Java reserve more address space than they use.
        _limit(resource.RLIMIT_DATA, numbers["memory"])
    restrict(config["read"], config["write"], config["sockets"])
    for number in range(1, _SIGNALS + 1):
        _libc.signal(number, 0)
    _libc.sigprocmask(2, bytes(128), None)


def main(status: int, config: dict[str, list[str]], numbers: dict[str, int], streams: list[int]) -> int:
    """Replace this process with the command.

    The descriptor `status` gets an empty line, then one about a failure, and is closed by exec.

    Returns 125 if the sandbox failed, 126 if the command cannot be run, 127 if there is no such command.
    """
    os.write(status, b"\n")
    command = config["command"]
    code, text = 125, "the last step of the sandbox failed"
    try:
        _prepare(config, numbers, streams, status)
        code, text = 126, command[0]
        os.execvp(command[0], command)
    except (FileNotFoundError, NotADirectoryError) as error:
        code, text = 127 if code == 126 else code, f"{text}: {error.strerror}"
    except OSError as error:
        text = f"{text}: {error.strerror}"
    except ValueError as error:
        text = f"{text}: {error}"
    os.write(status, f"{code} {text}\n".encode("utf-8", "surrogateescape"))
    return code
