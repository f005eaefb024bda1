"""External changes are recorded once; changes of other sessions are not."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bonobofs.audit.verify import TrailStatus, verify_trail
from bonobofs.guards import FileGuard
from bonobofs.session import open_session
from tests.support.observe import companion_of, out_of_band, recorded, stopped, text
from tests.support.wait import until
from tests.support.world import ALLOW_ALL, Mounted, World

POLICY = ALLOW_ALL + '[[protect]]\npaths = ["**/.git/", "locked.md", "sealed/"]\n'


@pytest.fixture
def world(mounted: Mounted, source: Path) -> World:
    for name in ("file", "locked.md", "docs/plan.md", "sealed/a"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("as it was")
    return mounted(policy=POLICY)


def _settled(world: World) -> dict[str, str]:
    """What was entered, once a change of a later burst is: the entries of one burst are not in the order of time."""
    signs = "the end", "after the end"
    for sign in signs:
        (world.source / sign).touch()
        until(lambda: sign in out_of_band(world), "the sign is entered")  # noqa: B023 - called at once
    return {path: details["what"] for path, details in out_of_band(world).items() if path not in signs}


def test_each_kind_of_change_is_recorded_with_the_present_state(world: World) -> None:
    """Created, changed, removed, replaced: each with its path, and with the size of a file."""
    (world.source / "new").write_text("four")
    (world.source / "file").write_text("four and more")
    (world.source / "docs/plan.md").unlink()
    assert _settled(world) == {
        "new": "was created externally, and has 4 bytes",
        "file": "was changed externally, and has 13 bytes",
        "docs/plan.md": "was removed externally",
    }
    assert recorded(world, "out_of_band", "alert") == []


def test_a_change_of_a_protected_path_is_an_alert(world: World) -> None:
    """The entry comes with an alert."""
    (world.source / "locked.md").write_text("forged")
    (world.source / "sealed/a").unlink()
    until(lambda: len(recorded(world, "out_of_band", "alert")) == 2, "both are alerts")
    alerts = {entry.path: entry.reason for entry in recorded(world, "out_of_band", "alert")}
    assert alerts == dict.fromkeys(("locked.md", "sealed/a"), "A protected path was changed externally.")
    assert set(_settled(world)) == {"locked.md", "sealed/a"}


def test_a_change_of_an_uncached_file_is_recorded(world: World) -> None:
    """No process has looked up the file or its directory through the mount."""
    (world.source / "docs/plan.md").write_text("changed")
    assert _settled(world) == {"docs/plan.md": "was changed externally, and has 7 bytes"}


def test_a_change_that_a_reader_finds_first_is_recorded(world: World) -> None:
    """The lookup comes before the event of the watcher."""
    for turn in range(20):
        (world.source / f"new-{turn}").write_text("new")
        assert (world.path / f"new-{turn}").read_text() == "new"
        (world.path / "file").stat()
    (world.source / "file").write_text("changed")
    (world.path / "file").stat()
    assert set(_settled(world)) == {"file", *(f"new-{turn}" for turn in range(20))}


def test_a_change_of_a_file_that_the_agent_has_just_written_is_recorded(world: World) -> None:
    """The agent's intent for the path explains the agent's change alone."""
    (world.path / "file").write_text("by the agent")
    (world.source / "file").write_text("by somebody")
    assert _settled(world) == {"file": "was changed externally, and has 11 bytes"}


def test_a_file_created_and_removed_in_a_burst_is_not_recorded(world: World) -> None:
    """Of an editor's temporary file, only the rename target is recorded."""
    with stopped(companion_of(world.pid)):  # so that all changes are in one burst, on a slow machine too
        for _ in range(3):
            (world.source / "file~").write_text("saved")
            (world.source / "file~").rename(world.source / "file")
            (world.source / "lock").touch()
            (world.source / "lock").unlink()
    assert set(_settled(world)) == {"file"}


def test_a_git_command_is_one_entry(world: World) -> None:
    """The operator's git in the source gives one entry for each burst, with the number of paths and some names."""
    run = ["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid"]
    subprocess.run(["git", "init", "-q"], cwd=world.source, check=True)
    subprocess.run([*run, "add", "-A"], cwd=world.source, check=True)
    subprocess.run([*run, "commit", "-qm", "first"], cwd=world.source, check=True)
    assert ".git" in _settled(world)
    entries = [entry for entry in recorded(world, "out_of_band") if entry.path.startswith(".git")]
    assert len(entries) <= 4
    details = max((entry.details for entry in entries), key=lambda details: int(details.get("places", 0)))
    assert details["places"] > 10
    assert len(details["names"]) == 10
    assert details["what"] == f"was changed externally in {details['places']} places"
    assert len(recorded(world, "out_of_band", "alert")) == len(entries)


def test_thousands_of_changes_are_grouped_by_directory(world: World) -> None:
    """The first changes get an entry each; the rest are counted by top directory."""
    (world.source / "build").mkdir()
    for number in range(2000):
        (world.source / "build" / str(number)).touch()
    shutil.rmtree(world.source / "build")
    (world.source / "build").mkdir()
    for number in range(3000):
        (world.source / "build" / str(number)).touch()
    _settled(world)
    assert any(entry.details.get("places", 0) > 100 for entry in recorded(world, "out_of_band"))
    assert len(recorded(world, "out_of_band")) < 1500


def test_changes_of_another_session_are_not_out_of_band(world: World, mounted: Mounted) -> None:
    """Of a mount of the same source, and of a Python session; both show in the mount."""
    other = mounted(policy=POLICY, agent="bob")
    (other.path / "by-bob").write_text("through bob's mount")
    (other.path / "docs/plan.md").write_text("changed by bob")
    (other.path / "docs").rename(other.path / "texts")
    with open_session(world.source, agent="carol", policy=Path(other.session.policy.origin)) as made:
        guard = FileGuard(made)
        assert guard.write_file("by-carol", "through a guard", "carol")
        assert guard.write_file("file", "replaced by carol", "carol", overwrite=True)
    until((world.path / "by-bob").exists, "bob's file shows")
    until((world.path / "by-carol").exists, "carol's file shows")
    until(lambda: text(world.path / "file") == "replaced by carol", "carol's text shows")
    until(lambda: text(world.path / "texts/plan.md") == "changed by bob", "bob's text shows")
    assert _settled(world) == {}
    assert {*out_of_band(other)} <= {"the end", "after the end"}


def test_the_last_change_before_an_unmount_is_recorded(world: World) -> None:
    """The trail has it before it is closed, and verifies."""
    (world.source / "locked.md").write_text("at the last moment")
    world.umount()
    assert "locked.md" in out_of_band(world)
    assert recorded(world, "close")
    report = verify_trail(world.trail, world.head, session=world.session.session)
    assert (report.status, report.findings) == (TrailStatus.CLOSED, [])


def test_a_name_that_is_not_utf8_is_recorded(world: World) -> None:
    """With surrogate escapes, as the trail writes such names."""
    os.close(os.open(bytes(world.source) + b"/\xff\xfe", os.O_CREAT | os.O_WRONLY))
    assert set(_settled(world)) == {"\udcff\udcfe"}


def test_a_change_that_is_read_before_its_event_is_recorded(world: World) -> None:
    """The kernel had not cached the file, and a reader opens it before the watcher's event."""
    with stopped(companion_of(world.pid)):
        (world.source / "docs/plan.md").write_text("by somebody")
        (world.source / "locked.md").write_text("forged")
        assert (world.path / "docs/plan.md").read_text() == "by somebody"
        assert (world.path / "locked.md").read_text() == "forged"
        (world.path / "own").write_text("own")
    assert set(_settled(world)) == {"docs/plan.md", "locked.md"}
    assert {entry.path for entry in recorded(world, "out_of_band", "alert")} == {"locked.md"}
