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
    "sandbox",
    "network lists",
    "open files",
    "file size",
    "inotify",
    "processors",
    "state directory",
    "space for records",
}


def test_doctor_succeeds_on_a_machine_that_can_mount(home: Path) -> None:
    """Each check runs, and each failed check has a remedy."""
    looked = bonobofs("doctor", "--json")
    assert looked.returncode == 0, looked.stdout
    report = json.loads(looked.stdout)
    assert report["ok"] is True
    assert {check["name"] for check in report["checks"]} - {
        "idle processors",  # of virtual machines only
        *(check["name"] for check in report["checks"] if check["name"].startswith("escapes: ")),
    } == NAMES
    assert all(check["remedy"] for check in report["checks"] if check["verdict"] != "ok")
    said = bonobofs("doctor").stdout
    assert f"state directory    ok    {home}" in said


def test_doctor_refuses_a_state_directory_that_others_can_write(home: Path) -> None:
    """The message has the remedy, and no other command uses the directory."""
    home.chmod(0o777)
    report = json.loads(bonobofs("doctor", "--json").stdout)
    (state,) = [check for check in report["checks"] if check["name"] == "state directory"]
    assert (state["verdict"], f"chmod go-w {home}" in state["remedy"]) == ("fail", True)
    assert bonobofs("doctor").returncode == 1
    assert bonobofs("status").returncode == 1


def test_doctor_reports_a_state_directory_that_cannot_be_created(tmp_path: Path) -> None:
    """One line with the remedy."""
    (tmp_path / "file").touch()
    asked = bonobofs("status", env={"BONOBOFS_HOME": str(tmp_path / "file" / "home")})
    assert asked.returncode == 1
    assert asked.stderr.endswith("set BONOBOFS_HOME to another directory\n")
