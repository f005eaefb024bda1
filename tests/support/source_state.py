"""The state of a source, for comparison, and the undo of changes in it."""

from __future__ import annotations

import hashlib
import os
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bonobofs.audit.reader import since as moment_of
from bonobofs.session import undo_service
from tests.support.world import World

_ROLE = '[role.agent]\nwrite = ["**"]\ntools = ["undo"]\n'
AGENT_ALL = f'default = "allow"\nhidden = ["**"]\n{_ROLE}'
"""A policy under which an agent may change and take back everything."""
AGENT_RULES = f"""
default = "deny"
[[rule]]
name = "docs"
paths = ["docs/**"]
max_size = "1KB"
executable = false
[[rule]]
name = "bin"
paths = ["bin/**"]
executable = true
{_ROLE}
"""
"""As AGENT_ALL, but for small text files in docs, and any files in bin."""

State = dict[str, tuple[object, ...]]


def state_of(source: Path) -> State:
    """Return kind, mode, owner, content, time and names of each file and directory.

    The names of a file are those that lead to its inode.
    """
    top = source.stat()
    found: State = {"": (top.st_mode, top.st_uid, top.st_gid, top.st_mtime_ns)}
    names: dict[int, list[str]] = {}
    for above, directories, files in os.walk(source):
        for name in [*directories, *files]:
            path = Path(above, name)
            st = path.lstat()
            key = str(path.relative_to(source))
            if stat.S_ISDIR(st.st_mode):
                found[key] = (st.st_mode, st.st_uid, st.st_gid, st.st_mtime_ns, xattrs_of(path))
                continue
            if stat.S_ISLNK(st.st_mode):
                content = os.readlink(path)
            else:
                content = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(st.st_mode) else ""
            group = names.setdefault(st.st_ino, [])
            group.append(key)
            found[key] = (st.st_mode, st.st_uid, st.st_gid, content, st.st_mtime_ns, xattrs_of(path), group)
    for group in names.values():
        group.sort()
    return found


def without_directory_times(state: State) -> State:
    """Without the times of directories: an undo of some changes leaves them, and an integrity revert sets none."""
    return {path: (*about[:3], *about[4:]) if len(about) < 6 else about for path, about in state.items()}


def xattrs_of(path: Path) -> tuple[tuple[str, bytes], ...]:
    names = sorted(os.listxattr(path, follow_symlinks=False))
    return tuple((each, os.getxattr(path, each, follow_symlinks=False)) for each in names)


def undo(place: World, **options: Any) -> dict[str, Any]:
    """Take back changes of the source of a mount as the operator; the document of `bonobofs undo --json`."""
    source = str(place.source)
    dry_run = options.pop("dry_run", False)
    if "since" in options:
        options["since"] = moment_of(options["since"], datetime.now(UTC))
    selected = undo_service.selection(place.home, source, **options)
    return undo_service.undo(place.home, source, selected, dry_run=dry_run)
