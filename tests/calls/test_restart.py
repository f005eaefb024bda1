"""A companion that dies is started anew, and everything is known again; one that keeps dying is given up, and told."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import pytest

from bonobofs import session
from bonobofs.session import leasing
from bonobofs.session.leasing import Terms, Whose
from tests.calls.conftest import Called, CalledMount
from tests.watch.looking import companion_of, out_of_band, recorded, status, text, until
from tests.worlds import ALLOW_ALL, bonobofs


def kill_companion(called: Called) -> None:
    """Kill it, and wait until another stands."""
    before = len(recorded(called.world, "companion"))
    os.kill(companion_of(called.world.pid), signal.SIGKILL)
    until(lambda: len(recorded(called.world, "companion")) > before, "another stands")


@pytest.mark.parametrize("over", [False, True], ids=["beside", "over the source"])
def test_everything_is_known_again(
    mounted_called: CalledMount, source: Path, home: Path, tmp_path: Path, over: bool
) -> None:
    """Changes behind the mount, leases, the policy, the socket; the log has an alert and an event."""
    if over and os.geteuid() != 0:
        return  # an ordinary user's is in test_calls
    policy = tmp_path / "policy.toml"
    policy.write_text(ALLOW_ALL)
    behind = os.open(source, os.O_PATH)
    (source / "file").write_text("as it was")
    called = mounted_called(policy=policy, mountpoint=source if over else None)
    there = Path(f"/proc/self/fd/{behind}")
    assert (called.path / "file").read_text() == "as it was"
    for turn in range(2):
        kill_companion(called)
        (there / "file").write_text(f"changed {turn}")
        until(lambda wanted=f"changed {turn}": text(called.path / "file") == wanted, "the change shows")  # type: ignore[misc]
        (there / f"new {turn}").write_text("new")
        until(lambda name=f"new {turn}": name in out_of_band(called.world), "it is entered")  # type: ignore[misc]
        assert called("write_file", path=f"by call {turn}", content="text")
        assert (there / f"by call {turn}").read_text() == "text"
        assert f"by call {turn}" in os.listdir(called.path)
        assert status(called.world).watch == session.WATCHING
    leasing.acquire(home, Whose("bob"), ["docs/**"], Terms())
    (called.path / "docs").mkdir()
    with pytest.raises(PermissionError):
        (called.path / "docs/a").touch()
    assert len(recorded(called.world, "companion", "alert")) == 2
    policy.write_text(ALLOW_ALL + "\n[[protect]]\npaths = ['file']\n")
    until(lambda: status(called.world).session.policy.generation == 2, "the new policy is loaded")
    assert called("whoami")["policy"] == status(called.world).session.policy.digest
    assert not any(name.startswith("by call") for name in out_of_band(called.world))
    os.close(behind)


def test_a_policy_that_changes_meanwhile_is_loaded(mounted_called: CalledMount, tmp_path: Path) -> None:
    """While nobody looks at the file."""
    policy = tmp_path / "policy.toml"
    policy.write_text(ALLOW_ALL)
    called = mounted_called(policy=policy)
    companion = companion_of(called.world.pid)
    os.kill(companion, signal.SIGSTOP)
    policy.write_text('default = "deny"\n')
    os.kill(companion, signal.SIGKILL)
    until(lambda: status(called.world).session.policy.generation == 2, "it is loaded")
    with pytest.raises(PermissionError):
        (called.path / "a").touch()


def test_changes_go_on_while_another_is_started(alice: Called) -> None:
    """What was known of leases holds for as long as it was to hold, and reading goes on anyway."""
    refused: list[OSError] = []
    over = threading.Event()

    def change() -> None:
        while not over.is_set():
            try:
                (alice.path / "a").write_text("text")
            except PermissionError as error:
                refused.append(error)

    thread = threading.Thread(target=change)
    thread.start()
    kill_companion(alice)
    over.set()
    thread.join()
    (alice.path / "a").write_text("and after")
    assert (alice.path / "a").read_text() == "and after"


def test_one_that_keeps_dying_is_given_up(alice: Called) -> None:
    """Each time it is waited longer. Then changes are refused, reading goes on, and `status` and `doctor` say why."""
    (alice.source / "file").write_text("as it was")
    before = ""
    for _ in range(6):
        until(lambda last=before: _children(alice) not in ("", last), "there is another", 30)  # type: ignore[misc]
        before = _children(alice)
        os.kill(int(before), signal.SIGKILL)
    until(lambda: "is not started again" in (status(alice.world).watch or ""), "it is given up")
    until(lambda: status(alice.world).leases is not None, "leases are not known")
    with pytest.raises(PermissionError):
        (alice.path / "a").touch()
    assert (alice.path / "file").read_text() == "as it was"
    (alice.source / "file").write_text("changed")
    until(lambda: text(alice.path / "file") == "changed", "it shows, a second late")
    reasons = [one.reason or "" for one in recorded(alice.world, "companion", "alert")]
    assert len(reasons) == 7
    assert "is not started again" in reasons[-1]
    (one,) = json.loads(bonobofs("status", "--json").stdout)
    assert "has ended" in one["leases"]
    assert "every change is refused" in one["note"]
    said = bonobofs("status").stdout
    assert "not watched" in said
    assert "it is not known what is leased" in said
    checks = json.loads(bonobofs("doctor", "--json").stdout)["checks"]
    assert [check["verdict"] for check in checks if check["name"] in ("watching", "leases")] == ["note", "fail"]


def _children(called: Called) -> str:
    return Path(f"/proc/{called.world.pid}/task/{called.world.pid}/children").read_text()
