"""What a directory tree holds, and whether a record explains how it came to differ."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple


class Entry(NamedTuple):
    """Everything that is the same as long as nobody changes it."""

    kind: str
    mode: int
    owner: tuple[int, int]
    content: str
    """Hash of a file's bytes, text of a symlink, number of a device."""
    xattrs: tuple[tuple[str, bytes], ...]
    modified: int
    """Of a directory 0: its time tells only of names, which are compared themselves."""


Tree = dict[str, Entry]


def look(root: Path, *, without: Collection[str] = ()) -> Tree:
    """All that lies in `root`, by path from there; what is called as in `without` is left out with all below."""
    found: Tree = {"": _entry(str(root), os.lstat(root))}
    waiting = [""]
    while waiting:
        above = waiting.pop()
        with os.scandir(root / above) as listing:
            for each in listing:
                path = f"{above}/{each.name}" if above else each.name
                if path in without:
                    continue
                st = each.stat(follow_symlinks=False)
                found[path] = _entry(each.path, st)
                if stat.S_ISDIR(st.st_mode):
                    waiting.append(path)
    return found


def _entry(path: str, st: os.stat_result) -> Entry:
    content = ""
    if stat.S_ISREG(st.st_mode):
        # By a call that no open file of ours outlives, and which leaves the times alone.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            content = sha256(os.pread(fd, st.st_size, 0)).hexdigest() if st.st_size else "empty"
        finally:
            os.close(fd)
    elif stat.S_ISLNK(st.st_mode):
        content = os.readlink(path)
    elif stat.S_ISCHR(st.st_mode) or stat.S_ISBLK(st.st_mode):
        content = str(st.st_rdev)
    names = os.listxattr(path, follow_symlinks=False)
    xattrs = tuple(sorted((name, os.getxattr(path, name, follow_symlinks=False)) for name in names))
    modified = 0 if stat.S_ISDIR(st.st_mode) else st.st_mtime_ns
    kind, mode = stat.filemode(st.st_mode)[0], stat.S_IMODE(st.st_mode)
    return Entry(kind, mode, (st.st_uid, st.st_gid), content, xattrs, modified)


def differences(before: Tree, after: Tree) -> dict[str, tuple[Entry | None, Entry | None]]:
    """What is not as it was, by path."""
    return {
        path: (before.get(path), after.get(path))
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    }
