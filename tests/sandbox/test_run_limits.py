"""The limits of `[run]`: processes and memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bonobofs.sandbox import control_group
from tests.sandbox.boxes import POLICY, Box
from tests.sandbox.test_run_life import nothing_is_left

pytestmark = pytest.mark.root

BOMB = """
import os
children = []
for number in range(8):
    pid = os.fork()
    if pid == 0:
        held = bytearray(100 << 20)
        for place in range(0, len(held), 4096):
            held[place] = 1
        os._exit(0)
    children.append(pid)
print([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children])
"""
"""Eight processes, each with half of the limit of the test."""


def test_the_memory_of_the_sandbox_is_limited_as_run_says(user_box: Box) -> None:
    """All processes together where the machine has control groups, else each process."""
    user_box.write_policy(POLICY.replace("400MB", "200MB"))
    (user_box.source / "bomb.py").write_text(BOMB)
    ran = user_box.run("/usr/bin/python3", "bomb.py")
    statuses = json.loads(ran.stdout)
    if "of memory of all processes" in ran.stderr:
        assert -9 in statuses
    else:
        assert "of memory of each process (this machine offers no control group)" in ran.stderr
        assert statuses == [0] * 8
        large = "bytearray(300 << 20)"
        assert "MemoryError" in user_box.run("/usr/bin/python3", "-c", large).stderr


def test_a_fork_bomb_ends_with_its_sandbox(any_box: Box) -> None:
    """The limit holds it, and the end of the time kills all its processes."""
    any_box.write_policy(POLICY.replace("300", "100") + 'time = "3s"\n')
    assert any_box.run("sh", "-c", "bomb() { bomb | bomb & }; bomb 2>/dev/null; sleep 1000").returncode == 124
    nothing_is_left(any_box)


def test_a_directory_that_is_no_control_group_limits_nothing(tmp_path: Path) -> None:
    assert not control_group.make(tmp_path / "group", [], 1 << 20, 10)
    control_group.remove(tmp_path / "group")
    assert not (tmp_path / "group").exists()


def test_a_scope_is_refused_without_systemd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert not control_group.make_scope("bonobofs-test", [], 1 << 20, 10)
