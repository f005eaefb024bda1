"""The register of sessions: one document each, `sessions/UUID/session.json`. What a session did is in its trail."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bonobofs.errors import StateError
from bonobofs.state.home import read_document, session_directory, write_document
from bonobofs.system import processes


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyMark:
    """Which policy a session began with: the file, the digest of its meaning, and the count of changes since."""

    origin: str
    digest: str
    generation: int


@dataclasses.dataclass(frozen=True, slots=True)
class Session:
    """One session from its start to its end. The field names are those of session.json."""

    session: str
    """UUID; also the name of its directory and of its trail."""
    agent: str
    agent_id: str
    team: str | None
    role: str
    chain: str | None
    source: str
    mountpoint: str | None
    """None: a session of a Python caller, without a mount."""
    pid: int | None
    """The process that serves it; with `starttime`, as numbers are used again."""
    starttime: int | None
    """Clock ticks since the boot, as in /proc/PID/stat."""
    transport: str
    policy: PolicyMark
    boot_id: str
    """Another one than now: the machine went down since, and the trail's last second may be missing."""
    started: str
    """UTC, ISO 8601."""
    ended: str | None
    """When its end was noted; null while it lives, and after a crash until the next mount or umount there."""
    issue: str | None = None
    """The issue that it is for: a worktree's. The gates' commits name it."""
    source_inode: int | None = None
    """Inode number of the source at the start; None in records of older versions."""


@dataclasses.dataclass(frozen=True, slots=True)
class Live:
    """What changes while a mount is served; kept by its server, in `live.json` beside session.json."""

    watch: str
    """`watching`, or why changes behind the mount are looked for once a second only."""
    policy: PolicyMark
    """The policy in force."""
    policy_error: str | None
    """Why the policy file that is there now is not in force; null where it is."""
    leases: str | None = None
    """Why it is not known what is leased, so that every change is refused; null where it is."""
    caches: str | None = None
    """Why the kernel caches nothing and what it has cached may be stale; null where it is not."""


WATCHING = "watching"
PARTLY = "in part: "
"""Begins `Live.watch` where a part of the source is not watched."""


def write_live(directory: Path, live: Live) -> None:
    """Keep it in a session's directory."""
    write_document(directory / "live.json", dataclasses.asdict(live))


def read_live(directory: Path) -> Live | None:
    """What is kept there; None where nothing was served, or by an older version. OSError, StateError."""
    try:
        document = read_document(directory / "live.json")
        return Live(**{**document, "policy": PolicyMark(**document["policy"])})
    except (FileNotFoundError, TypeError, KeyError):
        return None


def lives(session: Session) -> bool:
    """Whether the very process that serves it still runs: the same number, the same start, in the same boot."""
    if session.ended is not None or session.boot_id != processes.boot_id():
        return False
    return processes.is_alive(session.pid, session.starttime)


def save(home: Path, session: Session) -> None:
    write_document(_record(home, session.session), dataclasses.asdict(session))


def note_ends(home: Path, names: Iterable[str]) -> None:
    """Enter that these sessions have ended, by now at the latest."""
    for name in names:
        session = _session(read_document(_record(home, name)))
        save(home, dataclasses.replace(session, ended=datetime.now(UTC).isoformat()))


def load(home: Path, name: str) -> Session | None:
    """The session of that UUID; None where there is none that this version can read."""
    try:
        return _session(read_document(_record(home, name)))
    except (OSError, StateError, TypeError, KeyError):
        return None


def read_all(home: Path) -> tuple[list[Session], dict[str, StateError]]:
    """Return the registered sessions, oldest first, and by UUID the error of each that cannot be read.

    A directory without a record is a session that is being made.
    """
    found, unreadable = [], {}
    for directory in (home / "sessions").iterdir():
        path = _record(home, directory.name)
        try:
            found.append(_session(read_document(path)))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except StateError as error:
            unreadable[directory.name] = error
        except OSError as error:
            remedy = "make it readable, or move its directory away"
            unreadable[directory.name] = StateError(f"{path} cannot be read: {error.strerror}; {remedy}")
        except (TypeError, KeyError):
            message = f"{path} was not written by this version of bonobofs; move its directory away"
            unreadable[directory.name] = StateError(message)
    return sorted(found, key=lambda session: session.started), unreadable


def load_all(home: Path) -> list[Session]:
    """Return every registered session, oldest first. StateError: one of them cannot be read."""
    found, unreadable = read_all(home)
    for error in unreadable.values():
        raise error
    return found


def live_at(home: Path, mountpoint: Path) -> Session | None:
    """Return the session whose process serves this mountpoint now.

    StateError: none of the readable ones does, and one that cannot be read might.
    """
    found, unreadable = read_all(home)
    for session in found:
        if session.mountpoint == str(mountpoint) and lives(session):
            return session
    for error in unreadable.values():
        raise error
    return None


def _record(home: Path, name: str) -> Path:
    return session_directory(home, name) / "session.json"


def _session(document: dict[str, Any]) -> Session:
    return Session(**{**document, "policy": PolicyMark(**document["policy"])})
