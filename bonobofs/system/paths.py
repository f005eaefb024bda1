"""Compare paths, open directories without following symlinks, rename and replace files, and remove trees."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Final

from bonobofs.system import syscalls

Name = tuple[int, bytes]
"""An open directory, and a name in it."""
STORE: Final = ".bonobofs/undo"
"""Directory in a source for old contents. bonobofs writes it itself, so that its changes are no external changes."""
_KEPT_BYTES: Final = 200
_MOST_SYMLINKS = 40
_WALKED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def is_within(path: Path | str, directory: Path | str) -> bool:
    """Return whether the path is the directory or lies below it, by the text of both. Everything lies below ""."""
    text, top = str(path), str(directory).rstrip("/")
    return not top or text == top or text.startswith(f"{top}/")


def symlinks_and_target(path: str) -> list[str]:
    """Return each symlink that an absolute path passes, by the real path of its directory, then the real path.

    After 40 symlinks the next one counts as the real path, as for the kernel.
    """
    found: list[str] = []
    here, pending = "/", path.split("/")[::-1]
    while pending:
        entry = os.path.normpath(os.path.join(here, pending.pop()))
        if len(found) < _MOST_SYMLINKS and os.path.islink(entry):
            found.append(entry)
            target = os.readlink(entry)
            pending += target.split("/")[::-1]
            here = "/" if target.startswith("/") else here
        else:
            here = entry
    return [*found, here]


def open_directory_beneath(source: Path | int, path: str) -> int:
    """Open a directory below `source`, a path or a descriptor, without following symlinks. OSError.

    The caller closes the descriptor.
    """
    if ".." in path.split("/"):
        raise PermissionError(errno.EPERM, "the path leaves the source")
    held = os.dup(source) if isinstance(source, int) else os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    for name in path.split("/") if path else ():
        above = held
        try:
            held = os.open(name, flags, dir_fd=above)
        finally:
            os.close(above)
    return held


def regular_file(path: str, flags: int) -> int:
    """Open a regular file, as an opener of `open`. OSError: it is another file, such as a FIFO or a device."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return fd


def remove_tree(directory: int, name: bytes) -> None:
    """Remove the directory `name` with all its content, whatever the modes and the depth of it.

    Deeper directories are first moved up into `name`, so neither the stack, the descriptors nor the path length limit
    the depth.
    """
    os.chmod(name, 0o700, dir_fd=directory)
    top = os.open(name, _WALKED, dir_fd=directory)
    try:
        waiting: list[bytes] = []
        _empty(top, top, waiting)
        while waiting:
            each = waiting.pop()
            os.chmod(each, 0o700, dir_fd=top)  # its owner may have removed the permission to list it
            fd = os.open(each, _WALKED, dir_fd=top)
            try:
                _empty(fd, top, waiting)
            finally:
                os.close(fd)
            os.rmdir(each, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(name, dir_fd=directory)


def _empty(fd: int, top: int, waiting: list[bytes]) -> None:
    """Remove the files of a directory and move its directories to `top`, where they wait."""
    with os.scandir(fd) as entries:
        found = [(os.fsencode(entry.name), entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_dir in found:
        if not is_dir:
            os.unlink(name, dir_fd=fd)
        elif fd == top:
            waiting.append(name)
        else:
            os.chmod(name, 0o700, dir_fd=fd)  # a move rewrites `..`, which needs write permission
            moved = os.fsencode(f".{os.urandom(16).hex()}")
            os.rename(name, moved, src_dir_fd=fd, dst_dir_fd=top)
            waiting.append(moved)


def exists(at: Name) -> bool:
    """Return whether a name exists. A symlink is not followed."""
    try:
        os.stat(at[1], dir_fd=at[0], follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def rename_to_free(start: Name, end: Name) -> None:
    """Rename to a name that does not exist. FileExistsError, OSError.

    A file system without RENAME_NOREPLACE, such as NFS, replaces a file that gets the name in this moment.
    """
    try:
        syscalls.renameat2(*start, *end, syscalls.RENAME_NOREPLACE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        if exists(end):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
        os.rename(start[1], end[1], src_dir_fd=start[0], dst_dir_fd=end[0])


def return_file(start: Name, end: Name) -> None:
    """Rename a file to its old name, or to a further name if another file has that. OSError."""
    try:
        rename_to_free(start, end)
    except FileExistsError:
        directory, name = end
        kept = name[:_KEPT_BYTES].decode(errors="ignore").encode()  # a cut character would make a name that is no UTF-8
        # No other program can foresee the name.
        rename_to_free(start, (directory, b"%s.%s" % (kept, secrets.token_hex(8).encode())))


def leads_to(at: Name, st: os.stat_result) -> bool:
    """Return whether a name leads to the file of a state."""
    try:
        return os.path.samestat(os.stat(at[1], dir_fd=at[0], follow_symlinks=False), st)
    except OSError:
        return False


def exchange(one: Name, other: Name) -> None:
    """Exchange the files of two names. OSError; EINVAL: the file system, such as NFS, cannot."""
    syscalls.renameat2(*one, *other, syscalls.RENAME_EXCHANGE)


def remove_file(at: Name, temporary: Name, check: Callable[[Name], None]) -> None:
    """Remove a file, unless another program has replaced or written it. OSError.

    The file is first renamed to `temporary`. If `check` raises an OSError for that name, the file returns.
    """
    os.rename(at[1], temporary[1], src_dir_fd=at[0], dst_dir_fd=temporary[0])
    try:
        check(temporary)
        os.unlink(temporary[1], dir_fd=temporary[0])
    except OSError:
        return_file(temporary, at)
        raise


def replace_file(new: Name, at: Name, check: Callable[[Name], None]) -> None:
    """Rename the file `new` onto `at`, unless another program has replaced or written the file there. OSError.

    The names are first exchanged. If `check` raises an OSError for the old file, the exchange is reversed. A file
    system that cannot exchange names, such as NFS, replaces the file without `check`.
    """
    st = os.stat(new[1], dir_fd=new[0], follow_symlinks=False)
    try:
        exchange(new, at)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        os.rename(new[1], at[1], src_dir_fd=new[0], dst_dir_fd=at[0])
        return
    try:
        check(new)
        os.unlink(new[1], dir_fd=new[0])
    except OSError:
        if leads_to(at, st):
            exchange(new, at)
        else:
            return_file(new, at)  # a program has saved the file again
        raise
