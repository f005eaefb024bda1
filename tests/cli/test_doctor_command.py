"""`doctor`: what mounting needs, and what to do."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.world import bonobofs

NAMES = {
    "kernel",
    "python",
    "portable",
    "/dev/fuse",
    "fusermount3",
    "/etc/mtab",
    "user_allow_other",
    "user namespaces",
    "open files",
    "file size",
    "inotify",
    "processors",
    "state directory",
    "space for records",
}


def test_a_machine_that_can_mount_is_well(home: Path) -> None:
    """Everything is looked at, and what is not well says what to do."""
    looked = bonobofs("doctor", "--json")
    assert looked.returncode == 0, looked.stdout
    report = json.loads(looked.stdout)
    assert report["ok"] is True
    assert {check["name"] for check in report["checks"]} - {"idle processors"} == NAMES  # only virtual machines idle so
    assert all(check["remedy"] for check in report["checks"] if check["verdict"] != "ok")
    said = bonobofs("doctor").stdout
    assert f"state directory    ok    {home}" in said


def test_a_state_directory_that_others_can_write_is_no_good(home: Path) -> None:
    """It is said with what to do about it, and nothing else works there."""
    home.chmod(0o777)
    report = json.loads(bonobofs("doctor", "--json").stdout)
    (state,) = [check for check in report["checks"] if check["name"] == "state directory"]
    assert (state["verdict"], f"chmod go-w {home}" in state["remedy"]) == ("fail", True)
    assert bonobofs("doctor").returncode == 1
    assert bonobofs("status").returncode == 1


def test_a_state_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    """One line and the remedy."""
    (tmp_path / "file").touch()
    asked = bonobofs("status", env={"BONOBOFS_HOME": str(tmp_path / "file" / "home")})
    assert asked.returncode == 1
    assert asked.stderr.endswith("set BONOBOFS_HOME to another directory\n")
