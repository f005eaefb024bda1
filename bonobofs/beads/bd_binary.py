"""Which program bd is: an installed one, and none that an agent could have put there or could change."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

from bonobofs.errors import BeadsError
from bonobofs.system import mounts
from bonobofs.system.paths import is_within

INSTALL: Final = (
    "install bd 1.0.5 or a later 1.x from the releases of Beads and put it on PATH, or name it in BONOBOFS_BD"
)


def find_program(home: Path, beads: Path) -> Path:
    """`$BONOBOFS_BD`, else `bd` on PATH; BeadsError where there is none, or where agents could change it."""
    named = os.environ.get("BONOBOFS_BD")
    path = search_path(home, beads)
    found = shutil.which(named or "bd", path=path)
    if found is None and named:
        raise BeadsError(f"BONOBOFS_BD names {named}, which is no program; {INSTALL}")
    if found is None:
        closed = "" if path == os.environ.get("PATH") else " outside of the directories that agents can write"
        raise BeadsError(f"there is no bd on PATH{closed}; {INSTALL}")
    if _is_below(os.path.realpath(found), _of_agents(home, beads)):
        raise BeadsError(f"{found} lies where agents can write, and is not run; {INSTALL}")
    return Path(found).absolute()


def search_path(home: Path, beads: Path) -> str:
    """PATH without relative directories, and without what an agent could put there."""
    closed = _of_agents(home, beads)
    absolute = [each for each in os.environ.get("PATH", os.defpath).split(":") if os.path.isabs(each)]
    # As it is written first: what hangs in a dead mount is not to be looked at.
    named = [each for each in absolute if not _is_below(os.path.normpath(each), closed)]
    return ":".join(each for each in named if not _is_below(os.path.realpath(each), closed))


def _of_agents(home: Path, beads: Path) -> list[str]:
    """Our shims and worktrees, this workspace, and what is mounted."""
    return [str(home), str(beads.parent), *(str(mount.mountpoint) for mount in mounts.bonobofs_mounts())]


def _is_below(path: str, tops: list[str]) -> bool:
    return any(is_within(path, top) for top in tops)
