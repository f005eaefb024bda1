"""The denials of one agent are counted together over all its sessions."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime

import pytest

from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.reader import AuditLog, read, trails_in
from bonobofs.enforcement.denial_recorder import ALERT_WINDOW, DenialWindow
from bonobofs.guards import FileGuard
from bonobofs.session import open_session
from tests.audit.conftest import Create
from tests.support.world import Mounted


def alerts(home: Path) -> list[AuditEntry]:
    return [entry for trail in trails_in(home / "trails") for entry in read(trail) if entry.kind == "alert"]


def test_the_third_denial_of_an_agent_is_an_alert_over_its_sessions(home: Path, source: Path) -> None:
    """Five sessions with one denial each give one alert, in the third; another agent's denials do not count."""
    trails = []
    for agent in ("bob", "alice", "bob", "alice", "alice", "alice", "alice"):
        with open_session(source, agent=agent) as session:
            assert not FileGuard(session).write_file("src/a.py", "", agent)
            trails += [session.guard.trail.path] if agent == "alice" else []
    (alert,) = alerts(home)
    assert (alert.agent, alert.session) == ("alice", trails[2].stem)


def test_mounts_of_one_agent_count_together(home: Path, mounted: Mounted) -> None:
    for _ in range(3):
        world = mounted(agent="ann")
        with pytest.raises(PermissionError):
            (world.path / "denied.xyz").touch()
        world.umount()
    (alert,) = alerts(home)
    assert alert.agent == "ann"


def test_an_alert_is_raised_once_per_window(tmp_path: Path) -> None:
    path = tmp_path / "denials" / "agent"
    assert [DenialWindow(path).add() for _ in range(6)] == [False, False, True, False, False, False]
    now = clock_gettime(CLOCK_BOOTTIME)
    path.write_bytes(struct.pack("=4d", now - ALERT_WINDOW - 1, 1.0, now - 2, now - 1))
    assert DenialWindow(path).add()


@pytest.mark.parametrize("content", [b"", b"half", b"\xff" * 32, struct.pack("=4d", *[1e12] * 4)])
def test_a_damaged_or_old_window_file_is_replaced(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "agent"
    path.write_bytes(content)
    assert [DenialWindow(path).add() for _ in range(3)] == [False, False, True]


def test_without_the_window_file_the_session_counts_alone(tmp_path: Path) -> None:
    """If a directory is in its place, or another process keeps its lock, the session continues."""
    (tmp_path / "agent").mkdir()
    window = DenialWindow(tmp_path / "agent")
    assert [window.add() for _ in range(3)] == [False, False, True]
    held = DenialWindow(tmp_path / "held")
    held.add()
    descriptor = os.open(tmp_path / "held", os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        assert held.add() is False
        assert held.add() is True
    finally:
        os.close(descriptor)


def test_recent_and_filter_by_agent_cover_all_sessions(create: Create, tmp_path: Path) -> None:
    first, second = create(tmp_path, "s1", "alice"), create(tmp_path, "s2", "bob")
    for number in range(4):
        (first, second)[number % 2].event("note", {"n": number})
    log = AuditLog(first, {"alice": "id-of-alice", "bob": "id-of-bob"}.get)
    assert [entry.details["n"] for entry in log.recent()] == [0, 1, 2, 3]
    assert [entry.details["n"] for entry in log.recent(3)] == [1, 2, 3]
    for name in ("bob", "id-of-bob"):
        assert [entry.details["n"] for entry in log.filter_by_agent(name)] == [1, 3]
