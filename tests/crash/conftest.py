"""A mount that is killed: what must be true of what it leaves behind."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bonobofs import session
from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.reader import read
from bonobofs.cli.audit import verify_
from bonobofs.session import SessionState
from tests.support.syscalls import make
from tests.support.trees import Tree, snapshot, unexplained
from tests.support.users import outcome, run_in_child
from tests.support.world import World


def _touch_everything(top: Path) -> set[object]:
    """What comes of changing things, and of looking for what the kernel has not seen yet."""
    calls = (
        (make, top / "new.md"),
        (os.mkdir, top / "new"),
        (os.rename, top / "keep.md", top / "kept.md"),
        (os.unlink, top / "keep.md"),
        (os.truncate, top / "keep.md", 0),
        (os.stat, top / "never-seen"),
    )
    return {outcome(*call) for call in calls}


def open_intents(entries: list[AuditEntry]) -> dict[int, AuditEntry]:
    """Allowed intents that have no outcome."""
    done = {entry.details.get("intent") for entry in entries if entry.kind == "outcome"}
    return {
        entry.seq: entry
        for entry in entries
        if entry.kind == "intent" and entry.result == "allowed" and entry.seq not in done
    }


Examine = Callable[[World, Tree], list[AuditEntry]]


@pytest.fixture
def examine(capsys: pytest.CaptureFixture[str]) -> Examine:
    """examine(world, before) looks at what a killed server left, and gives the entries of its trail."""

    def look_at(world: World, before: Tree) -> list[AuditEntry]:
        assert not world.is_alive
        entries = list(read(world.trail))
        assert unexplained(before, snapshot(world.source), entries) == []
        assert run_in_child(_touch_everything, world.path) == {errno.ENOTCONN}
        assert unexplained(before, snapshot(world.source), entries) == []

        report = _verified(world, capsys)
        assert (report["status"], report["findings"]) == ("crashed", [])
        unfinished = {one["seq"]: (one["operation"], one["path"]) for one in report["unfinished"]}
        assert unfinished == {seq: (e.operation, e.path) for seq, e in open_intents(entries).items()}
        assert all(one["shows"] for one in report["unfinished"])
        (status,) = (one for one in session.statuses(world.home) if one.session.session == world.session.session)
        assert status.state is SessionState.DEAD
        return entries

    return look_at


def _verified(world: World, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert verify_(json=True) == 0
    (report,) = (one for one in json.loads(capsys.readouterr().out) if one["session"] == world.session.session)
    assert isinstance(report, dict)
    return report
