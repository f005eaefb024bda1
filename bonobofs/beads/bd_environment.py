"""Where bd runs and as whom: in a HOME and a working directory of ours, in which nothing lies that could steer it.

No `.beads` and no git repository is found upwards from there, and of the caller's environment only PATH remains, less
what an agent could put there. bd does what files in its `.beads` say, down to the variables of the programs that it
starts; so root has it run as whoever owns those files, and not as root.
"""

from __future__ import annotations

import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, TypedDict

from bonobofs.beads.bd_binary import search_path
from bonobofs.errors import BeadsError

_CONFIGURATION: Final = "[beads]\n\trole = maintainer\n"
"""What git is configured with; without a role bd complains at every call."""
_FOR_OTHERS: Final = "/run"
"""Where root makes a directory for another user: nobody else can put anything above it."""


class Ids(TypedDict, total=False):
    """Whom bd runs as, where that is another user than ours."""

    user: int
    group: int
    extra_groups: list[int]


class Surroundings(NamedTuple):
    """What bd is given beside its arguments."""

    home: Path
    cwd: Path
    configuration: Path
    """Git's, for this user."""
    path: str
    ids: Ids


@contextmanager
def surroundings(home: Path, beads: Path) -> Iterator[Surroundings]:
    """Directories for bd, in the state directory, or for the time of this where bd may not reach that.

    BeadsError: they cannot be made, or `.beads` is gone.
    """
    path = search_path(home, beads)
    try:
        owner = beads.stat()
        if os.geteuid() != 0 or owner.st_uid == 0:
            own, made = None, _made(home / "beads", path, {})
        else:
            own = Path(tempfile.mkdtemp(prefix="bonobofs-bd-", dir=_FOR_OTHERS))
            made = _made(own, path, _ids(owner))
            for each, mode in ((own, 0o755), (made.cwd, 0o755), (made.configuration, 0o644)):
                each.chmod(mode)
            os.chown(made.home, owner.st_uid, owner.st_gid)
    except OSError as error:
        raise BeadsError(f"there is no place for bd to run: {error}") from error
    try:
        yield made
    finally:
        if own is not None:
            shutil.rmtree(own)


def _made(directory: Path, path: str, ids: Ids) -> Surroundings:
    made = Surroundings(directory / "home", directory / "empty", directory / "gitconfig", path, ids)
    for each in (made.home, made.cwd):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not made.configuration.exists() or made.configuration.read_text(encoding="utf-8") != _CONFIGURATION:
        made.configuration.write_text(_CONFIGURATION, encoding="utf-8")
    return made


def _ids(owner: os.stat_result) -> Ids:
    try:
        user = pwd.getpwuid(owner.st_uid)
    except KeyError:
        return {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
    groups = os.getgrouplist(user.pw_name, user.pw_gid)
    return {"user": owner.st_uid, "group": user.pw_gid, "extra_groups": groups}
