"""Renames that replace no file."""

from __future__ import annotations

import errno
import os
import secrets
from typing import Final

from bonobofs.system import syscalls

Name = tuple[int, bytes]
"""An open directory, and a name in it."""
_KEPT_BYTES: Final = 200


def exists(place: Name) -> bool:
    """Return whether a name exists. A symlink is not followed."""
    try:
        os.stat(place[1], dir_fd=place[0], follow_symlinks=False)
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
