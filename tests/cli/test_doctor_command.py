"""`doctor`: what mounting needs, and what to do."""

from __future__ import annotations

import grp
import json
import os
import stat
from pathlib import Path

import pytest

from bonobofs.cli import doctor
from bonobofs.errors import BonobofsError, UsageError
from bonobofs.sandbox import host_probe
from bonobofs.session import mount_setup
from tests.support.observe import stopped
from tests.support.world import ALLOW_ALL, Mounted, bonobofs

NAMES = {
    "kernel",
    "python",
    "build",
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
    "old contents",
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


def test_doctor_does_not_wait_for_a_stopped_server(mounted: Mounted, tmp_path: Path) -> None:
    """The source of another session lies in its mount."""
    (tmp_path / "outer/inner").mkdir(parents=True)
    mounted(policy=ALLOW_ALL, source=tmp_path / "outer/inner").umount()
    outer = mounted(policy=ALLOW_ALL, source=tmp_path / "outer", mountpoint=tmp_path / "outer")
    with stopped(outer.pid):
        report = json.loads(bonobofs("doctor", "--json").stdout)
    assert report["ok"] is True


@pytest.mark.root
def test_a_guest_may_search_the_state_directory(home: Path) -> None:
    """`chmod 700` would end its session. An entry with more rights, and the mode without an ACL, have a remedy."""

    def state() -> dict[str, str]:
        report = json.loads(bonobofs("doctor", "--json").stdout)
        return next(check for check in report["checks"] if check["name"] == "state directory")

    home.chmod(0o750)
    assert state()["remedy"].endswith(f"; chmod 700 {home}")
    home.chmod(0o700)
    guest = mount_setup.Guest("nobody", 65534, 65534)
    (home / "inside/bin").mkdir(parents=True)
    mount_setup.permit_directory(home, home / "inside", guest)  # the guest may search the state directory
    assert stat.S_IMODE(home.stat().st_mode) == 0o710
    assert state()["verdict"] == "ok"
    home.chmod(0o714)
    assert (state()["verdict"], state()["remedy"].endswith(f"; setfacl -m g::-,o::- {home}")) == ("note", True)


def test_the_remedy_for_the_sandbox_follows_its_message() -> None:
    """Python below a directory of root's own is no matter of namespaces."""
    said = "the sandbox cannot start: bwrap: Can't find source path /private/python: Permission denied"
    assert host_probe.remedy(said).startswith("the command's user cannot reach /private/python; install Python")
    assert "cannot reach" not in host_probe.remedy("bwrap: No permissions to create new namespace")
    (sandbox,) = [one for one in json.loads(bonobofs("doctor", "--json").stdout)["checks"] if one["name"] == "sandbox"]
    assert "bonobofs doctor" not in sandbox["found"]


def test_doctor_reports_a_state_directory_that_cannot_be_created(tmp_path: Path) -> None:
    """One line with the remedy."""
    (tmp_path / "file").touch()
    asked = bonobofs("status", env={"BONOBOFS_HOME": str(tmp_path / "file" / "home")})
    assert asked.returncode == 1
    assert asked.stderr.endswith("set BONOBOFS_HOME to another directory\n")


def test_fix_lets_a_group_keep_processors_awake(tmp_path: Path) -> None:
    """The device belongs to the group at once, and a rule for udev repeats it after a restart; twice is as once."""
    group = grp.getgrgid(os.getgid()).gr_name
    device = tmp_path / "dev/cpu_dma_latency"
    device.parent.mkdir()
    device.touch(mode=0o600)
    for _ in range(2):
        rules = doctor.permit_group(group, tmp_path)
        assert (device.stat().st_gid, stat.S_IMODE(device.stat().st_mode)) == (os.getgid(), 0o660)
        assert rules.is_relative_to(tmp_path / "etc/udev/rules.d")
        assert rules.read_text() == f'KERNEL=="cpu_dma_latency", SUBSYSTEM=="misc", GROUP="{group}", MODE="0660"\n'


def test_fix_changes_nothing_without_the_group_or_the_device(tmp_path: Path) -> None:
    """The message has the remedy, and no rule is left for a device that is not there."""
    with pytest.raises(UsageError, match="groupadd --system no-such-group"):
        doctor.permit_group("no-such-group", tmp_path)
    with pytest.raises(BonobofsError, match=r"processors still halt at once: .*cpu_dma_latency: No such file"):
        doctor.permit_group(grp.getgrgid(os.getgid()).gr_name, tmp_path)
    assert not (tmp_path / "etc").exists()
