"""How long the record is kept: trails that have ended are compressed; the oldest are pruned by age and by total size.

Only the trail of a session that has ended is touched. One process at a time works here, under `retention.lock`.
"""

from __future__ import annotations

import contextlib
import getpass
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.audit.entry import ZERO, instant
from bonobofs.audit.index import Index, Progress
from bonobofs.audit.reader import is_closed, last, read, since, trails_in
from bonobofs.audit.report import SessionFacts
from bonobofs.audit.tombstones import PRUNED, Tombstone, appending, bury, record_head, record_path, tombstones
from bonobofs.audit.trail_file import compress, remove, stat_trail
from bonobofs.audit.verify import Report, read_head, verify_trail
from bonobofs.errors import StateError, TrailError
from bonobofs.state.home import head_path, read_document, session_directory, trail_path
from bonobofs.state.sessions import lives, load, read_all
from bonobofs.system.locks import locked, never

AT_ONCE: Final = 2 * 1024 * 1024
"""Bytes that a mount or umount compresses at the most, in some 0.1 s; the daemon and `audit prune` do the rest."""

GoesOn = Callable[[], bool]


def compress_ended(home: Path, most: int | None = AT_ONCE, goes_on: GoesOn = lambda: True) -> list[str]:
    """Compress the trails of sessions that have ended, up to `most` bytes together; return the failures, a line each.

    Where another process compresses or prunes, nothing is done.
    """
    with _alone(home, wait=False) as is_ours:
        return _compress_ended(home, most, goes_on) if is_ours else []


def _compress_ended(home: Path, most: int | None, goes_on: GoesOn) -> list[str]:
    problems = []
    for trail in sorted((home / "trails").glob("*.jsonl")):
        try:
            size = trail.stat().st_size
            if (most is not None and size > most) or not goes_on() or not has_ended(home, trail):
                continue
            most = None if most is None else most - size
            compress(trail)
        except (OSError, TrailError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            problems.append(f"the trail {trail} cannot be compressed: {reason}")
    return problems


class Limits(NamedTuple):
    """`[audit]` of a policy."""

    keep: str
    """Age at which a trail is pruned, such as "90d"."""
    max_total: int
    """Bytes that all trails may hold together."""


class Pruning(NamedTuple):
    """What a pruning did, or would do."""

    pruned: list[Tombstone]
    kept: dict[str, str]
    """Trails that were due and stay, by session, each with the reason."""
    failures: list[str]
    """Trails that could not be compressed, a line each."""


def limits(home: Path) -> Limits:
    """Return `[audit]` of `policy.toml` in the state directory, else the defaults. PolicyError.

    The record belongs to the state directory: `[audit]` of any other policy is checked and has no effect.
    """
    from bonobofs.policy.document import Audit, load  # noqa: PLC0415 - an umount needs no pydantic

    own = home / "policy.toml"
    audit = load(own).audit if own.exists() else Audit()
    return Limits(audit.keep, int(audit.max_total))


def prune(home: Path, *, dry_run: bool = False, goes_on: GoesOn = lambda: True, now: datetime | None = None) -> Pruning:
    """Compress what has ended; remove the oldest ended trails that are too old or too many bytes together.

    Each leaves a tombstone first. A process that is killed leaves a tombstone with its trail at the most; the next
    pruning removes that trail. PolicyError, TrailError, StateError, OSError: what was not pruned is unchanged.
    """
    bounds = limits(home)
    oldest = since(bounds.keep, now or datetime.now(UTC))
    with _alone(home, wait=True):
        failures = [] if dry_run else _compress_ended(home, None, goes_on)
        _check_record(home)
        if not dry_run:
            _finish(home)
        found = _due(home, bounds, oldest, goes_on)._replace(failures=failures)
        if found.pruned and not dry_run:
            with appending(home, getpass.getuser()) as record:
                for tombstone in found.pruned:
                    bury(record, tombstone)
                    _remove(home, tombstone.session)
        return found


def _due(home: Path, bounds: Limits, oldest: datetime, goes_on: GoesOn) -> Pruning:
    """Find what is to be pruned, the oldest first."""
    trails = [(stat_trail(trail), trail) for trail in trails_in(home / "trails")]
    total = sum(status.st_size for status, _ in trails)
    found = Pruning([], {}, [])
    for status, trail in sorted(trails, key=lambda each: (each[0].st_mtime_ns, each[1])):
        old = status.st_mtime < oldest.timestamp()
        if not goes_on() or not (old or total > bounds.max_total):
            break
        if not has_ended(home, trail):
            continue
        why = f"older than {bounds.keep}" if old else f"all trails together hold more than {bounds.max_total} bytes"
        tombstone = _tombstone(trail, status.st_size, why)
        reason = _reason_to_keep(home, trail, tombstone, oldest if old else None)
        if reason:
            found.kept[trail.stem] = reason
        else:
            found.pruned.append(tombstone)
            total -= status.st_size
    return found


def _tombstone(trail: Path, size: int, why: str) -> Tombstone:
    first, end = next(read(trail), None), last(trail, 1)
    if first is None or not end:
        return Tombstone(trail.stem, "", 0, ZERO, "", "", size, why)
    moments = instant(first.timestamp), instant(end[0].timestamp)
    return Tombstone(trail.stem, end[0].agent, end[0].seq, end[0].hash, *moments, size, why)


def _reason_to_keep(home: Path, trail: Path, tombstone: Tombstone, oldest: datetime | None) -> str:
    """Say why a trail that is due stays; "" where nothing speaks for it."""
    if oldest is not None and tombstone.last > instant(oldest):
        return "its last entry is younger than its file"
    report = verify_trail(trail, head_path(home, trail.stem), session=trail.stem)
    if report.findings:
        return f"it does not verify: {report.findings[0].message}"
    from bonobofs.session.mail_settings import is_carried  # noqa: PLC0415 - as in `limits`

    session = load(home, trail.stem)
    return (
        "" if session is None or is_carried(home, session, tombstone.seq) else "Agent Mail does not have all of it yet"
    )


def _check_record(home: Path) -> None:
    """TrailError where the record of pruned trails is damaged: nothing may hide behind it."""
    report = verify_record(home)
    if report is not None and report.findings:
        raise TrailError(
            f"nothing was pruned, because {record_path(home)} does not verify: {report.findings[0].message}"
        )


def verify_record(home: Path) -> Report | None:
    """Verify the record of pruned trails; None where nothing was ever pruned. TrailError."""
    path, head = record_path(home), record_head(home)
    if not path.exists() and not head.exists():
        return None
    return verify_trail(path, head, session=PRUNED, live=True)


def _finish(home: Path) -> None:
    """Remove what an interrupted pruning left: trails and heads that end as their tombstone says."""
    buried = tombstones(home)
    trails = trails_in(home / "trails")
    for trail in trails:
        tombstone = buried.get(trail.stem)
        if tombstone is not None and has_ended(home, trail):
            end = last(trail, 1)
            if (tombstone.seq, tombstone.hash) == ((end[0].seq, end[0].hash) if end else (0, ZERO)):
                _remove(home, trail.stem)
    for head in (home / "trails").glob("*.head"):
        left = head.stem in buried and head.with_suffix(".jsonl") not in trails
        if left and read_head(head).seq <= buried[head.stem].seq:
            head.unlink()


def _remove(home: Path, session: str) -> None:
    remove(trail_path(home, session))
    head_path(home, session).unlink(missing_ok=True)


def has_ended(home: Path, trail: Path) -> bool:
    """Whether no process writes this trail any more, and no mount has to compare the source with it. TrailError."""
    session = load(home, trail.stem)
    if session is not None and session.ended is not None:
        return True
    return (session is None or not lives(session)) and is_closed(trail)


@contextlib.contextmanager
def _alone(home: Path, *, wait: bool) -> Iterator[bool]:
    """Hold the lock; gives False if another process holds it and this one does not wait."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(home / "retention.lock", retry=None if wait else never))
        except BlockingIOError:
            yield False
        else:
            yield True


@contextlib.contextmanager
def open_index(home: Path) -> Iterator[Index]:
    """The index of a state directory, as it was left; `catch_up` brings it up to the trails. StateError."""
    # Most commands need no database, and reading SQLAlchemy takes longer than they do.
    from bonobofs.audit.index_store import open_tables  # noqa: PLC0415
    from bonobofs.state.database import home_id  # noqa: PLC0415

    tables = open_tables(home)
    try:
        yield Index(home, home_id(home), tables)
    finally:
        tables.close()


def rebuild_index(home: Path) -> Progress:
    """Throw away what the index has of this state directory's trails, and read them all; StateError."""
    from bonobofs.audit.index_store import throw_away  # noqa: PLC0415 - as above

    try:
        with open_index(home) as index:
            return index.rebuild()
    except StateError as error:
        if not throw_away(home, error):
            raise
    with open_index(home) as index:
        return index.rebuild()


def about_sessions(home: Path) -> dict[str, SessionFacts]:
    """What is known of each session that can be read, by UUID; of other hosts' by the database."""
    from bonobofs.state import heartbeats  # noqa: PLC0415 - as above
    from bonobofs.state.database import Database  # noqa: PLC0415 - as above

    with Database.open(home) as database:
        found = {name: SessionFacts(role, source) for name, role, source in heartbeats.list_sessions(database)}
    for session in read_all(home)[0]:
        head = _head(home, session.session)
        found[session.session] = SessionFacts(session.role, session.source, session.policy.digest, *head)
    return found


def _head(home: Path, session: str) -> tuple[int, str]:
    try:
        head = read_head(head_path(home, session))
    except (FileNotFoundError, TrailError):
        return 0, ""
    return head.seq, head.hash


def rules_of_sessions(home: Path) -> set[str]:
    """The names of the [[rule]] tables of all sessions' policies."""
    found: set[str] = set()
    for session in read_all(home)[0]:
        with contextlib.suppress(OSError, StateError):
            policy = read_document(session_directory(home, session.session) / "policy.json")
            found.update(rule["name"] for rule in policy.get("rule", ()))
    return found


def agents_of(home: Path) -> set[str]:
    """The labels and UUIDs of the agents of the register, and of those that were removed from it."""
    from bonobofs.state import agent_registry  # noqa: PLC0415 - as above
    from bonobofs.state.database import Database  # noqa: PLC0415 - as above

    with Database.open(home) as database:
        return {name for one in agent_registry.list_agents(database, removed=True) for name in (one.label, one.id)}
