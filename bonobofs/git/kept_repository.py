"""Repositories of ended sessions: one with work that the source lacks is kept in `kept/SESSION`, others are removed.

An agent has written the configuration and the hooks of such a repository, and the operator will fetch from it. So it
gets a new configuration and has no hooks before any git looks at it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.errors import GitError
from bonobofs.git import session_repository as repositories
from bonobofs.state import scratch
from bonobofs.state.home import session_directory
from bonobofs.state.sessions import Session, lives, read_all

_NOTE: Final = "bonobofs.json"
_SECONDS: Final = 60
_OPERATIONS: Final = {
    "rebase-merge": "a rebase in progress",
    "rebase-apply": "a rebase or am in progress",
    "MERGE_HEAD": "a merge in progress",
    "CHERRY_PICK_HEAD": "a cherry-pick in progress",
    "REVERT_HEAD": "a revert in progress",
    "BISECT_LOG": "a bisect in progress",
}
_HEX: Final = re.compile(rb"[0-9a-f]{40}(?:[0-9a-f]{24})?")
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
        held = [f"{name} ({_counted(count, 'commit')})" for name, count in self.branches.items()]
        held += [_counted(self.stashes, "stash")] if self.stashes else []
        place = shlex.quote(self.place)
        names = " ".join(shlex.quote(name) for name in self.branches) or ("refs/stash" if self.stashes else "HEAD")
        return (
            f"kept: the repository of {self.agent}'s session {self.session[:8]} on {self.source}, with "
            f"{', '.join([*held, *self.operations])}; to fetch from it: git fetch {place} {names}; to drop it: "
            f"rm -r {place}"
        )


def _counted(count: int, what: str) -> str:
    if count < 0:
        return f"some {what}s"
    plural = "es" if what.endswith("h") else "s"
    return f"{count} {what}{'' if count == 1 else plural}"


def settle(home: Path) -> list[Kept]:
    """Keep or remove the repository of every session that has ended, and return those that were kept now."""
    found = []
    for session in read_all(home)[0]:
        directory = session_directory(home, session.session)
        if (directory / scratch.REPOSITORY).exists() and not lives(session):
            with _alone(directory) as is_ours:
                if is_ours and (kept := _settle(home, session, directory)) is not None:
                    found.append(kept)
    return found


def all_kept(home: Path) -> list[Kept]:
    """Every repository that was kept and is still there, those of sessions that nobody has unmounted included."""
    settle(home)
    found = []
    for path in sorted((home / "kept").glob(f"*/{_NOTE}")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(Kept(**json.loads(path.read_bytes())))
    return found


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[bool]:
    """Whether this process is the only one that settles the session."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(fd)


def _settle(home: Path, session: Session, directory: Path) -> Kept | None:
    place = directory / scratch.REPOSITORY
    if not place.exists():
        return None
    source = Path(session.source)
    common = _disarm(place, source)
    branches = {name: _missing(place, value) for name, value in _candidates(place, common).items()}
    branches = {name: count for name, count in branches.items() if count}
    stashes = len(_stashes(place) - (_stashes(common) if common is not None else set()))
    operations = [text for name, text in _OPERATIONS.items() if os.path.lexists(place / name)]
    if not branches and not stashes and not operations:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            scratch.remove_tree(fd, os.fsencode(scratch.REPOSITORY))
        finally:
            os.close(fd)
        return None
    target = home / "kept" / session.session
    kept = Kept(session.session, session.agent, session.source, str(target), branches, stashes, operations)
    (place / _NOTE).write_text(json.dumps(kept._asdict()))
    target.parent.mkdir(mode=0o700, exist_ok=True)
    os.rename(place, target)
    return kept


def _disarm(place: Path, source: Path) -> Path | None:
    """Let no program start that the agent has named, and give the repository to the operator.

    Returns: where the source's repository has its refs; None: it cannot be read any more.
    """
    for name in _ARMED:
        path = place / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    entries: list[tuple[str, str]] = []
    common, stores = None, list[str]()
    with contextlib.suppress(OSError, GitError):
        places = repositories.find(source)
        entries = [pair for pair in repositories.configuration(places) if pair[0].startswith("extensions.")]
        stores = list(repositories.all_stores(places.common / "objects"))
        common = places.common
    version = "1" if entries else "0"
    entries = [("core.repositoryformatversion", version), ("core.bare", "true"), *entries]
    (place / "config").write_text(repositories.config_text(entries), encoding="utf-8", errors="surrogateescape")
    info = place / "objects/info"
    if info.is_dir() and not info.is_symlink():
        (info / "alternates").write_text("".join(f"{store}\n" for store in stores), errors="surrogateescape")
    if os.geteuid() == 0:
        for above, directories, names in os.walk(place):
            for name in (*directories, *names):
                os.chown(os.path.join(above, name), 0, 0, follow_symlinks=False)
        os.chown(place, 0, 0)
    place.chmod(0o700)
    return common


def _candidates(place: Path, common: Path | None) -> dict[str, str]:
    """Branches whose tip is among the session's own objects, and is not the value of that branch in the source."""
    heads = place / "refs/heads"
    tips = {os.path.relpath(path, heads): repositories.content(path) for path in repositories.files(heads)}
    tips["HEAD"] = repositories.content(place / "HEAD")
    packs = any(name.endswith(".pack") for name in repositories.names(place / "objects/pack"))
    found = {}
    for name, content in tips.items():
        value = (content or b"").strip()
        if not _HEX.fullmatch(value) or name.endswith(".lock"):
            continue
        tip = value.decode()
        own = packs or (place / "objects" / tip[:2] / tip[2:]).exists()
        if own and (common is None or repositories.content(common / "refs/heads" / name) != value + b"\n"):
            found[name] = tip
    return found


def _missing(place: Path, tip: str) -> int:
    """How many commits no ref of the source reaches; -1: git cannot tell."""
    try:
        ran = subprocess.run(
            ["git", f"--git-dir={place}", "rev-list", "--count", tip, "--not", "--alternate-refs"],
            cwd="/",
            env=repositories.plain_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_SECONDS,
        )
        return int(ran.stdout) if ran.returncode == 0 else -1
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return -1


def _stashes(repository: Path) -> set[bytes]:
    """The commits of the stash."""
    log = repositories.content(repository / "logs/refs/stash")
    if log is None or not (repository / "refs/stash").exists():
        return set()
    return {line.split(b" ")[1] for line in log.splitlines() if line.count(b" ") > 1}
