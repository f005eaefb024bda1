"""Compare paths, open directories without following symlinks, and remove trees."""

from __future__ import annotations

import errno
import os
from pathlib import Path

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
