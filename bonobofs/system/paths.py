"""Directories of a source, reached without following a symlink."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def directory_below(source: Path | int, path: str) -> int:
    """Open a directory below `source` component by component, following no symlink; the caller closes it. OSError.

    `source` is a path, or the descriptor of a directory.
    """
    if ".." in path.split("/"):
        raise PermissionError(errno.EPERM, "it leaves the source")
    held = os.dup(source) if isinstance(source, int) else os.open(source, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    for name in path.split("/") if path else ():
        above = held
        try:
            held = os.open(name, flags, dir_fd=above)
        finally:
            os.close(above)
    return held
