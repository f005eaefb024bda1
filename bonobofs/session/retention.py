"""Retention of the audit log: compress the trails of ended sessions, and prune the oldest by age and by total size.

Trails of live sessions are never changed. `retention.lock` admits one process at a time.
"""

from __future__ import annotations

import contextlib
import getpass
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.audit.entry import ZERO, instant
from bonobofs.audit.index import AuditIndex, Progress
from bonobofs.audit.reader import is_closed, last, read, since, trails_in
from bonobofs.audit.report import SessionFacts
from bonobofs.audit.tombstones import (
    PRUNED,
    Tombstone,
    append_tombstone,
    open_record,
    record_head,
    record_path,
    tombstones,
)
from bonobofs.audit.trail_storage import compress, remove, stat_trail
from bonobofs.audit.verify import Damage, Finding, TrailReport, read_head, verify_trail
from bonobofs.errors import StateError, TrailError, reason
from bonobofs.state.home import head_path, home_id, read_document, session_directory, trail_path
from bonobofs.state.sessions import lives, load, read_all
from bonobofs.system.locks import locked, locked_if_free, try_once

AT_ONCE: Final = 2 * 1024 * 1024
"""Maximum bytes that a mount or umount compresses, in about 0.1 s. The daemon and `audit prune` compress the rest."""

_LOCK: Final = "retention.lock"
Condition = Callable[[], bool]


def compress_ended(home: Path, most: int | None = AT_ONCE, may_continue: Condition = lambda: True) -> list[str]:
    """Compress the trails of ended sessions, at most `most` bytes in total. Return one line per failure.

    If another process holds the lock, return at once.
    """
    with locked_if_free(home / _LOCK, retry=try_once) as is_ours:
        return _compress_ended(home, most, may_continue) if is_ours else []


def _compress_ended(home: Path, most: int | None, may_continue: Condition) -> list[str]:
    problems = []
    for trail in sorted((home / "trails").glob("*.jsonl")):
        try:
            size = trail.stat().st_size
            if (most is not None and size > most) or not may_continue() or not has_ended(home, trail):
                continue
            most = None if most is None else most - size
            compress(trail)
        except (OSError, TrailError) as error:
            problems.append(f"the trail {trail} cannot be compressed: {reason(error)}")
    return problems


class RetentionLimits(NamedTuple):
    """Table `[audit]` of a policy."""

    keep: str
    """Age at which a trail is pruned, such as "90d"."""
    max_total: int
    """Maximum bytes of all trails together."""


class Pruning(NamedTuple):
    """Result of a pruning, or of a dry run."""

    pruned: list[Tombstone]
    kept: dict[str, str]
    """The due trails that were kept: session UUID to reason."""
    failures: list[str]
    """One line for each trail that could not be compressed."""


def limits(home: Path) -> RetentionLimits:
    """Return `[audit]` of `policy.toml` in the state directory, else the defaults. PolicyError.

    The audit log belongs to the state directory: `[audit]` of other policies is validated and has no effect.
    """
    from bonobofs.policy.document import AuditTable, load  # noqa: PLC0415 - umount avoids the import of pydantic

    own = home / "policy.toml"
    audit = load(own).audit if own.exists() else AuditTable()
    return RetentionLimits(audit.keep, int(audit.max_total))


def prune(
    home: Path, *, dry_run: bool = False, may_continue: Condition = lambda: True, now: datetime | None = None
) -> Pruning:
    """Compress ended trails; remove the oldest ones that exceed `keep`, or the limit of total bytes.

    The tombstone is written before its trail is removed. If the process is killed between, the next pruning removes
    the trail. PolicyError, TrailError, StateError, OSError: the trails that were not pruned are unchanged.
    """
    bounds = limits(home)
    oldest = since(bounds.keep, now or datetime.now(UTC))
    with locked(home / _LOCK):
        failures = [] if dry_run else _compress_ended(home, None, may_continue)
        _check_record(home)
        if not dry_run:
            _finish(home)
        pruning = _due(home, bounds, oldest, may_continue)._replace(failures=failures)
        if pruning.pruned and not dry_run:
            with open_record(home, getpass.getuser()) as record:
                for tombstone in pruning.pruned:
                    append_tombstone(record, tombstone)
                    _remove(home, tombstone.session)
        return pruning


def _due(home: Path, bounds: RetentionLimits, oldest: datetime, may_continue: Condition) -> Pruning:
    """Find the trails to prune, oldest first."""
    trails = [(stat_trail(trail), trail) for trail in trails_in(home / "trails")]
    total = sum(status.st_size for status, _ in trails)
    pruning = Pruning([], {}, [])
    for status, trail in sorted(trails, key=lambda each: (each[0].st_mtime_ns, each[1])):
        old = status.st_mtime < oldest.timestamp()
        if not may_continue() or not (old or total > bounds.max_total):
            break
        if not has_ended(home, trail):
            continue
        why = f"older than {bounds.keep}" if old else f"all trails together hold more than {bounds.max_total} bytes"
        tombstone = _tombstone(trail, status.st_size, why)
        obstacle = _reason_to_keep(home, trail, tombstone, oldest if old else None)
        if obstacle:
            pruning.kept[trail.stem] = obstacle
        else:
            pruning.pruned.append(tombstone)
            total -= status.st_size
    return pruning


def _tombstone(trail: Path, size: int, why: str) -> Tombstone:
    first, end = next(read(trail), None), last(trail, 1)
    if first is None or not end:
        return Tombstone(trail.stem, "", 0, ZERO, "", "", size, why)
    moments = instant(first.timestamp), instant(end[0].timestamp)
    return Tombstone(trail.stem, end[0].agent, end[0].seq, end[0].hash, *moments, size, why)


def _reason_to_keep(home: Path, trail: Path, tombstone: Tombstone, oldest: datetime | None) -> str:
    """Return the reason to keep a due trail; "" if it can be pruned."""
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
    """Raise TrailError if the record of pruned trails is damaged, because it could hide missing trails."""
    report = verify_record(home)
    if report is not None and report.findings:
        raise TrailError(
            f"nothing was pruned, because {record_path(home)} does not verify: {report.findings[0].message}"
        )


def verify_record(home: Path) -> TrailReport | None:
    """Verify the record of pruned trails; None if there is none yet."""
    path, head = record_path(home), record_head(home)
    if not path.exists() and not head.exists():
        return None
    try:
        return verify_trail(path, head, session=PRUNED, live=True)
    except TrailError as error:
        return TrailReport(PRUNED, findings=[Finding(PRUNED, Damage.TRAIL, None, None, str(error))])


def _finish(home: Path) -> None:
    """Finish an interrupted pruning: remove trails and heads that match their tombstone."""
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
    """Return True if no process writes this trail and recovery does not need it. TrailError."""
    session = load(home, trail.stem)
    if session is not None and session.ended is not None:
        return True
    return (session is None or not lives(session)) and is_closed(trail)


@contextlib.contextmanager
def open_index(home: Path) -> Iterator[AuditIndex]:
    """Open the index of a state directory without updating it; call `catch_up` for that. StateError."""
    # Most commands use no database, and importing SQLAlchemy would take longer than they run.
    from bonobofs.audit.index_store import open_tables  # noqa: PLC0415

    tables = open_tables(home)
    try:
        yield AuditIndex(home, home_id(home), tables)
    finally:
        tables.close()


def rebuild_index(home: Path) -> Progress:
    """Delete the index rows of this state directory and index all trails again. StateError."""
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
    """Return facts of each session by UUID, from its readable session.json, else from the database. StateError."""
    from bonobofs.state import heartbeats  # noqa: PLC0415 - as above
    from bonobofs.state.database import Database  # noqa: PLC0415 - as above

    with Database.open(home) as database:
        facts = {name: SessionFacts(role, source) for name, role, source in heartbeats.list_sessions(database)}
    for session in read_all(home)[0]:
        head = _head(home, session.session)
        facts[session.session] = SessionFacts(session.role, session.source, session.policy.digest, *head)
    return facts


def _head(home: Path, session: str) -> tuple[int, str]:
    try:
        head = read_head(head_path(home, session))
    except (FileNotFoundError, TrailError):
        return 0, ""
    return head.seq, head.hash


def rules_of_sessions(home: Path) -> set[str]:
    """Return the names of the [[rule]] tables in the policies of all sessions."""
    names: set[str] = set()
    for session in read_all(home)[0]:
        with contextlib.suppress(OSError, StateError):
            policy = read_document(session_directory(home, session.session) / "policy.json")
            names.update(rule["name"] for rule in policy.get("rule", ()))
    return names


def agents_of(home: Path) -> set[str]:
    """Return labels and UUIDs of all registered agents, removed ones too. StateError."""
    from bonobofs.state import agent_registry  # noqa: PLC0415 - as above
    from bonobofs.state.database import Database  # noqa: PLC0415 - as above

    with Database.open(home) as database:
        return {
            name for agent in agent_registry.list_agents(database, removed=True) for name in (agent.label, agent.id)
        }
