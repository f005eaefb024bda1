"""A state directory with the trails of many changes, written by the product's own writer: chains and heads are valid.

Usage: python -m tests.support.recorded_changes HOME SOURCE CHANGES
"""

from __future__ import annotations

import random
import sys
import uuid
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, Final

from bonobofs.audit.entry import AFTER, BEFORE, PROCESS
from bonobofs.audit.trail_storage import compress
from bonobofs.audit.writer import Trail, TrailIdentity
from bonobofs.policy.decision import Code, Denied
from bonobofs.policy.request import Operation, WorkspacePath
from bonobofs.state.home import head_path, session_directory, trail_path
from bonobofs.state.sessions import PolicyMark, Session, save

TRAILS: Final = 8
FILES: Final = 40_000
_STATE: Final = "33188 0 0 1795514013{n:09d} {n} {n} 1 1795514013{n:09d}"
_BEGAN_NS: Final = 1_795_000_000 * 10**9
_STEP_NS: Final = 50_000_000
"""The clock advances by this for each entry. All trails cover the same time."""
_DENIED: Final = Denied(
    Code.KEEP, "secrets", "It is kept.", "Leave it.", WorkspacePath("tree/kept.md"), Operation.DELETE_FILE
)


def path_of(number: int) -> str:
    """Return the path of one of FILES files."""
    return f"tree/package{number % 50}/directory{number % 377}/file_{number}.md"


def record(home: Path, source: Path, changes: int, *, ended: bool = True) -> list[str]:
    """Write the trails of `changes` changes, in eight sessions of `source`; return the UUIDs of the sessions.

    Half of the trails are compressed, if the sessions have ended.
    """
    names = [str(uuid.UUID(int=(number + 1) << 96)) for number in range(TRAILS)]
    for number, name in enumerate(names):
        _write_trail(home, source, name, changes // TRAILS, random.Random(number))
        _register(home, source, name, ended=ended)
        if ended and number % 2:
            compress(trail_path(home, name))
    return names


def _write_trail(home: Path, source: Path, name: str, changes: int, chance: random.Random) -> None:
    clock = count(_BEGAN_NS, _STEP_NS)
    (home / "trails").mkdir(parents=True, exist_ok=True)
    identity = TrailIdentity(name, "bench", f"id-{name[:8]}")
    trail = Trail.create(trail_path(home, name), head_path(home, name), identity, clock=lambda: next(clock))
    process = 0
    for number in range(changes):
        if number % 500 == 0:
            observed = {"pid": 4711, "start": number, "name": "sed", "command": f"sed -i {number}", "parent": 0}
            process = trail.queue_event(PROCESS, {"observed": observed}, tool="sed")
        if number % 200 == 0:
            trail.begin_turn(f"turn {number}", "mark")
        _write_change(trail, chance, f'{{"pid":4711,"uid":0,"process":{process}}}')
    trail.close()


def _write_change(trail: Trail, chance: random.Random, caller: str) -> None:
    path, kind = path_of(chance.randrange(FILES)), chance.random()
    state = _STATE.format(n=chance.randrange(10**8))
    if kind < 0.02:
        trail.denial(_DENIED, "delete", tool="rm", details={"pid": 4711, "uid": 0})
        return
    details: dict[str, Any] = {BEFORE: state}
    operation, begins = Operation.WRITE_FILE, path
    if kind < 0.2:
        operation, begins = Operation.RENAME, f"{path}.new"
        details |= {"to": path, "replaces": True}
    elif kind < 0.3:
        operation = Operation.DELETE_FILE
    seq = trail.intent(operation, begins, "modify", "work", tool="sed", details=details, caller=caller)
    trail.outcome(seq, operation, begins, action="modify", bytes=len(path), details={AFTER: state})


def _register(home: Path, source: Path, name: str, *, ended: bool) -> None:
    session_directory(home, name).mkdir(parents=True)
    now = datetime.now(UTC).isoformat()
    mark = PolicyMark("bench", "0" * 64, 1)
    save(
        home,
        Session(
            name, "bench", f"id-{name[:8]}", None, "agent", None, str(source), None, None, None, "none", mark, "boot",
            now, now if ended else None,
        ),
    )  # fmt: skip


if __name__ == "__main__":
    record(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
