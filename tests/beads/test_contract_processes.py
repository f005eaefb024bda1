"""Facts about bd 1.0.5 that the tests check on the bd in use: concurrent and killed processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import signal
import subprocess
import time

import pytest

from tests.support.beads_workspace import Workspace
from tests.support.wait import until


def test_concurrent_changes_are_all_stored(beads_workspace: Workspace) -> None:
    """Creations, and labels of one issue."""
    calls = [beads_workspace.start("create", f"issue {n}") for n in range(8)]
    for call in calls:
        call.communicate(timeout=60)
    assert {call.returncode for call in calls} == {0}
    assert len(beads_workspace.all_issues()) == 8
    one = next(iter(beads_workspace.all_issues()))
    calls = [beads_workspace.start("label", "add", one, f"l{n}") for n in range(8)]
    for call in calls:
        call.communicate(timeout=60)
    assert len(beads_workspace.issue(one)["labels"]) == 8


def test_bd_waits_for_its_lock_without_limit(beads_workspace: Workspace) -> None:
    """It prints no output meanwhile, and continues when it has the lock."""
    beads_workspace.create("one")
    with beads_workspace.lock.open("r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = beads_workspace.start("create", "two", "--json")
        until(lambda: beads_workspace.has_open(waiting, beads_workspace.lock), "bd waits for its lock")
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(timeout=0.2)
    stdout, _ = waiting.communicate(timeout=60)
    assert json.loads(stdout)["id"] in beads_workspace.all_issues()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_bd_has_stored_all_or_nothing(beads_workspace: Workspace, number: signal.Signals) -> None:
    """At any moment: the database opens, printed issues are stored, and failed ones after SIGTERM are not."""
    started = time.monotonic()
    beads_workspace.create("how long it takes")
    takes = time.monotonic() - started
    for part in range(10):
        call = beads_workspace.start("create", f"{part}", "-l", "a,b,c", "--json")
        with contextlib.suppress(subprocess.TimeoutExpired):
            call.wait(timeout=takes * part / 8)
        call.send_signal(number)
        stdout, _ = call.communicate(timeout=60)
        found = [issue for issue in beads_workspace.all_issues().values() if issue["title"] == f"{part}"]
        assert all(sorted(issue["labels"]) == ["a", "b", "c"] for issue in found)
        if stdout:
            assert found
        if call.returncode == 1:
            assert not found
