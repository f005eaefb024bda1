"""The register of sessions: one file `sessions/UUID/session.json` each. The trail records what a session did."""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from bonobofs.errors import StateError
from bonobofs.state.home import read_document, session_directory, write_document
from bonobofs.system import processes


class PolicyMark(NamedTuple):
    """Identifies a policy: its file or preset, the digest of its meaning, and its generation."""

    origin: str
    digest: str
    generation: int


class Session(NamedTuple):
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
    """None for a session of the Python API, which has no mount."""
    pid: int | None
    """The serving process. Compared together with `starttime`, because the kernel reuses numbers."""
    starttime: int | None
    """Start of that process in clock ticks since boot, as in /proc/PID/stat."""
    transport: str
    policy: PolicyMark
    boot_id: str
    """The kernel's boot ID. If it differs now, the machine rebooted and may have lost the trail's last second."""
    started: str
    """UTC, ISO 8601."""
    ended: str | None
    """Time at which the end was recorded; None while live, and after a crash until the next mount or umount there."""
    issue: str | None = None
    """The issue of a worktree's session. Commits of the git and Beads gates name it."""
    source_inode: int | None = None
    """Inode number of the source at the start; None in files of older versions."""


class Live(NamedTuple):
    """Variable state of a mounted session. The server writes it to `live.json` next to session.json."""

    watch: str
    """`watching`; PARTLY and a reason; or why the watcher is off and the server polls the source once a second."""
    policy: PolicyMark
    """The policy in force."""
    policy_error: str | None
    """Why the current policy file is not in force; None if it is."""
    leases: str | None = None
    """Why the leases are unknown, so that every change of the source is refused; None if they are known."""
    caches: str | None = None
    """Why the kernel cache is off and may hold stale data; None if it is on."""
    observes: bool = False
    """The policy records what its rules refuse, and permits it."""
    images: tuple[int, int] | None = None
    """Bytes of all pre-images of the state directory, and the limit; None: unknown, or the session keeps none."""
    device: str = ""
    """`major:minor` of the mount, as the kernel's mount table has it."""


def document_of(record: Session | Live) -> dict[str, Any]:
    """Return a record as JSON data."""
    return {**record._asdict(), "policy": record.policy._asdict()}


WATCHING = "watching"
PARTLY = "in part: "
"""Prefix of `Live.watch` if a part of the source is not watched."""


def write_live(directory: Path, live: Live) -> None:
    """Write `live.json` to a session's directory. It is about a process, which does not outlive a power loss."""
    write_document(directory / "live.json", document_of(live), durable=False)


def read_live(directory: Path) -> Live | None:
    """Read `live.json`; None if it is absent or from an incompatible version. OSError, StateError."""
    try:
        document = read_document(directory / "live.json")
        return Live(**{**document, "policy": PolicyMark(**document["policy"])})
    except (FileNotFoundError, TypeError, KeyError):
        return None


def lives(session: Session) -> bool:
    """Return True if the serving process still runs: same number, same start time, same boot."""
    if session.ended is not None or session.boot_id != processes.boot_id():
        return False
    return processes.is_alive(session.pid, session.starttime)


def save(home: Path, session: Session) -> None:
    write_document(_record(home, session.session), document_of(session))


def note_ends(home: Path, names: Iterable[str]) -> None:
    """Record now as the end of these sessions. OSError, StateError."""
    for name in names:
        session = _session(read_document(_record(home, name)))
        save(home, session._replace(ended=datetime.now(UTC).isoformat()))


def load(home: Path, name: str) -> Session | None:
    """Return the session of that UUID; None if it is absent or unreadable."""
    try:
        return _session(read_document(_record(home, name)))
    except (OSError, StateError, TypeError, KeyError):
        return None


def read_all(home: Path) -> tuple[list[Session], dict[str, StateError]]:
    """Return the registered sessions, oldest first, and by UUID the error of each that cannot be read.

    A directory without session.json belongs to a session that is being created.
    """
    found, unreadable = [], {}
    top = home / "sessions"
    for name in os.listdir(top):
        path = f"{top}/{name}/session.json"
        try:
            st = os.stat(path)
            found.append(_read_version(path, st.st_ino, st.st_mtime_ns, st.st_size))
        except (FileNotFoundError, NotADirectoryError):
            continue
        except StateError as error:
            unreadable[name] = error
        except OSError as error:
            remedy = "make it readable, or move its directory away"
            unreadable[name] = StateError(f"{path} cannot be read: {error.strerror}; {remedy}")
        except (TypeError, KeyError):
            message = f"{path} was not written by this version of bonobofs; move its directory away"
            unreadable[name] = StateError(message)
    return sorted(found, key=lambda session: session.started), unreadable


@lru_cache(maxsize=4096)  # a mount reads the register seven times
def _read_version(path: str, inode: int, mtime: int, size: int) -> Session:  # noqa: ARG001 - the version of the file
    return _session(read_document(Path(path)))


def load_all(home: Path) -> list[Session]:
    """Return all registered sessions, oldest first. StateError: one of them cannot be read."""
    found, unreadable = read_all(home)
    for error in unreadable.values():
        raise error
    return found


def live_at(home: Path, mountpoint: Path) -> Session | None:
    """Return the live session of this mountpoint, or None.

    StateError: no readable session serves it, and at least one session cannot be read.
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
