"""Repositories of ended sessions: one with work that the source lacks is kept in `kept/SESSION`, others are removed.

An agent has written the configuration and the hooks of such a repository, and the operator will fetch from it. So it
gets a new configuration and has no hooks before any git looks at it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.errors import GitError
from bonobofs.git.session_repository import all_stores, configuration, content, files, find, git, write_config
from bonobofs.state import scratch_dir
from bonobofs.state.home import session_directory
from bonobofs.state.sessions import Session, lives, read_all
from bonobofs.system.locks import lock, never
from bonobofs.system.paths import remove_tree

_NOTE: Final = "bonobofs.json"
_OPERATIONS: Final = {
    "rebase-merge": "a rebase in progress",
    "rebase-apply": "a rebase or am in progress",
    "MERGE_HEAD": "a merge in progress",
    "CHERRY_PICK_HEAD": "a cherry-pick in progress",
    "REVERT_HEAD": "a revert in progress",
    "BISECT_LOG": "a bisect in progress",
}
_ARMED: Final = ("config", "config.worktree", "commondir", "gitdir", "hooks", "objects/info/alternates", _NOTE)


class Kept(NamedTuple):
    """A repository that was kept."""

    session: str
    agent: str
    source: str
    place: str
    branches: dict[str, int]
    """Branches with commits that no ref of the source reaches, and how many; -1: it cannot be told. HEAD: detached."""
    stashes: int
    operations: list[str]

    def __str__(self) -> str:
        """What it holds, and how to take it over."""
        held = [f"{name} (commits: {'unknown' if count < 0 else count})" for name, count in self.branches.items()]
        held += [f"stash entries: {self.stashes}"] if self.stashes else []
        place = shlex.quote(self.place)
        names = " ".join(shlex.quote(name) for name in self.branches) or ("refs/stash" if self.stashes else "HEAD")
        return (
            f"kept: the repository of {self.agent}'s session {self.session[:8]} on {self.source}, with "
            f"{', '.join([*held, *self.operations])}; to fetch from it: git fetch {place} {names}; to drop it: "
            f"rm -r {place}"
        )


def settle(home: Path) -> list[Kept]:
    """Keep or remove the repository of every session that has ended, and return those that were kept now."""
    found = []
    for session in read_all(home)[0]:
        directory = session_directory(home, session.session)
        if not (directory / scratch_dir.REPOSITORY).exists() or lives(session):
            continue
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lock(fd, retry=never)
            if (directory / scratch_dir.REPOSITORY).exists():
                kept = _kept(home, session, directory / scratch_dir.REPOSITORY)
                found += [kept] if kept is not None else []
                if kept is None:
                    remove_tree(fd, os.fsencode(scratch_dir.REPOSITORY))
        except BlockingIOError:
            pass  # another process settles it
        finally:
            os.close(fd)
    return found


def all_kept(home: Path) -> list[Kept]:
    """Every repository that was kept and is still there, also of sessions whose mount still stands."""
    settle(home)
    found = []
    for path in sorted((home / "kept").glob(f"*/{_NOTE}")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Kept(**json.loads(path.read_bytes())))
    return found


def _kept(home: Path, session: Session, place: Path) -> Kept | None:
    """Move the repository to where it is kept; None: it has no work of its own."""
    common = _disarm(place, Path(session.source))
    branches = {name: count for name, tip in _own_tips(place, common).items() if (count := _missing(place, tip))}
    stashes = len(_stashes(place) - _stashes(common))
    operations = [text for name, text in _OPERATIONS.items() if os.path.lexists(place / name)]
    if not branches and not stashes and not operations:
        return None
    target = home / "kept" / session.session
    kept = Kept(session.session, session.agent, session.source, str(target), branches, stashes, operations)
    (place / _NOTE).write_text(json.dumps(kept._asdict()))
    target.parent.mkdir(mode=0o700, exist_ok=True)
    os.rename(place, target)
    return kept


def _disarm(place: Path, source: Path) -> Path:
    """Let no program start that the agent has named, give the repository to the operator, and find the source's refs.

    The agent made no symlink that leads out of the repository: the mount refused it.
    """
    for path in (place / name for name in _ARMED):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    common, entries, stores = source / ".git", list[tuple[str, str]](), list[str]()
    # The source may be gone. Then every tip of the session is kept.
    with contextlib.suppress(OSError, ValueError, GitError):
        places = find(source)
        common, stores = places.common, all_stores(places.common / "objects")
        entries = [pair for pair in configuration(places) if pair[0].startswith("extensions.")]
    version = ("core.repositoryformatversion", "1" if entries else "0")
    write_config(place / "config", [version, ("core.bare", "true"), *entries])
    (place / "objects/info").mkdir(parents=True, exist_ok=True)
    (place / "objects/info/alternates").write_bytes(os.fsencode("".join(f"{store}\n" for store in stores)))
    for above, _, names in os.walk(place) if os.geteuid() == 0 else ():
        for each in (above, *(os.path.join(above, name) for name in names)):
            os.chown(each, 0, 0, follow_symlinks=False)
    place.chmod(0o700)
    return common


def _own_tips(place: Path, common: Path) -> dict[str, str]:
    """Branches whose tip may be among the session's own objects, and is not the value of that branch in the source."""
    heads, found = place / "refs/heads", dict[str, str]()
    packs = any((place / "objects/pack").glob("*.pack"))
    for path in (*files(heads), place / "HEAD"):
        name = os.path.relpath(path, heads) if heads in path.parents else "HEAD"
        value = content(path) or b""
        tip = value.decode(errors="replace").strip()
        own = packs or (place / "objects" / tip[:2] / tip[2:]).is_file()
        if re.fullmatch("[0-9a-f]{40,64}", tip) and own and content(common / "refs/heads" / name) != value:
            found[name] = tip
    return found


def _missing(place: Path, tip: str) -> int:
    """How many commits no ref of the source reaches; -1: git cannot tell."""
    try:
        return int(git(f"--git-dir={place}", "rev-list", "--count", tip, "--not", "--alternate-refs"))
    except (GitError, ValueError):
        return -1


def _stashes(repository: Path) -> set[bytes]:
    """The commits of the stash."""
    log = content(repository / "logs/refs/stash") if (repository / "refs/stash").exists() else None
    return {line.split(b" ")[1] for line in (log or b"").splitlines() if line.count(b" ") > 1}
