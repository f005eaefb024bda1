"""The record of what changed behind the mount: what nobody admitted, each once, and no more than that."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bonobofs.audit.verify import Status, verify_trail
from bonobofs.guards import FileGuard
from bonobofs.session import open_session
from tests.watch.looking import companion_of, out_of_band, recorded, stopped, text, until
from tests.worlds import ALLOW_ALL, Mounted, World

POLICY = ALLOW_ALL + '[[protect]]\npaths = ["**/.git/", "locked.md", "sealed/"]\n'


@pytest.fixture
def world(mounted: Mounted, source: Path) -> World:
    for name in ("file", "locked.md", "docs/plan.md", "sealed/a"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("as it was")
    return mounted(policy=POLICY)


def _settled(world: World) -> dict[str, str]:
    """What was entered, once a last change that marks the end of the others is."""
    sign = world.source / "the end"
    sign.touch()
    until(lambda: "the end" in out_of_band(world), "the sign is entered")
    return {path: details["what"] for path, details in out_of_band(world).items() if path != "the end"}


def test_each_kind_of_change_says_what_is_there_now(world: World) -> None:
    """Made, changed, removed, replaced: with the path, and with the size where a file is there."""
    (world.source / "new").write_text("four")
    (world.source / "file").write_text("four and more")
    (world.source / "docs/plan.md").unlink()
    assert _settled(world) == {
        "new": "was made behind the mount, and holds 4 bytes",
        "file": "was changed behind the mount, and holds 13 bytes",
        "docs/plan.md": "was removed behind the mount",
    }
    assert recorded(world, "out_of_band", "alert") == []


def test_what_is_protected_is_an_alert(world: World) -> None:
    """A path under protection is entered, and there is an alert that a person should look at."""
    (world.source / "locked.md").write_text("forged")
    (world.source / "sealed/a").unlink()
    until(lambda: len(recorded(world, "out_of_band", "alert")) == 2, "both are alerts")
    alerts = {entry.path: entry.reason for entry in recorded(world, "out_of_band", "alert")}
    assert alerts == dict.fromkeys(("locked.md", "sealed/a"), "A protected path was changed behind the mount.")
    assert set(_settled(world)) == {"locked.md", "sealed/a"}


def test_what_the_mount_never_showed_is_entered_too(world: World) -> None:
    """Nobody had looked at the file or its directory through the mount."""
    (world.source / "docs/plan.md").write_text("changed")
    assert _settled(world) == {"docs/plan.md": "was changed behind the mount, and holds 7 bytes"}


def test_a_change_that_the_mount_noticed_first_is_entered_too(world: World) -> None:
    """A reader that finds it before the watcher tells of it hides nothing."""
    for turn in range(20):
        (world.source / f"new-{turn}").write_text("new")
        assert (world.path / f"new-{turn}").read_text() == "new"
        (world.path / "file").stat()
    (world.source / "file").write_text("changed")
    (world.path / "file").stat()
    assert set(_settled(world)) == {"file", *(f"new-{turn}" for turn in range(20))}


def test_a_change_of_what_the_agent_has_just_written_is_entered(world: World) -> None:
    """The agent's own intent for the path accounts for the agent's own change only."""
    (world.path / "file").write_text("by the agent")
    (world.source / "file").write_text("by somebody")
    assert _settled(world) == {"file": "was changed behind the mount, and holds 11 bytes"}


def test_what_came_and_went_has_changed_nothing(world: World) -> None:
    """A temporary file of an editor leaves only what it was renamed to."""
    with stopped(companion_of(world.pid)):  # a burst, though this machine may be slow
        for _ in range(3):
            (world.source / "file~").write_text("saved")
            (world.source / "file~").rename(world.source / "file")
            (world.source / "lock").touch()
            (world.source / "lock").unlink()
    assert set(_settled(world)) == {"file"}


def test_a_git_command_is_one_entry(world: World) -> None:
    """What the operator's own git does in the repository is entered once a burst, with its places and some names."""
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
    assert details["what"] == f"was changed behind the mount in {details['places']} places"
    assert len(recorded(world, "out_of_band", "alert")) == len(entries)


def test_a_flood_does_not_fill_the_record(world: World) -> None:
    """Of thousands of changes at once the first have entries of their own, the others are counted by directory."""
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


def test_what_another_session_admitted_is_shown_and_not_entered(world: World, mounted: Mounted) -> None:
    """The other session's record has it: a mount of the same source, and a guard without a mount."""
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
    assert [path for path in out_of_band(other) if path != "the end"] == []


def test_the_last_change_before_the_end_is_entered(world: World) -> None:
    """What happens right before the mount ends is in the record that it closes, and that record is whole."""
    (world.source / "locked.md").write_text("at the last moment")
    world.umount()
    assert "locked.md" in out_of_band(world)
    assert recorded(world, "close")
    report = verify_trail(world.trail, world.head, session=world.session.session)
    assert (report.status, report.findings) == (Status.CLOSED, [])


def test_bytes_that_are_no_text_are_names_too(world: World) -> None:
    """A name that is not UTF-8 is entered as the record writes such names."""
    os.close(os.open(bytes(world.source) + b"/\xff\xfe", os.O_CREAT | os.O_WRONLY))
    assert set(_settled(world)) == {"\udcff\udcfe"}


def test_what_is_looked_up_before_the_watcher_speaks_is_entered_too(world: World) -> None:
    """A file that the kernel did not know, changed behind the mount and read through it at once."""
    with stopped(companion_of(world.pid)):
        (world.source / "docs/plan.md").write_text("by somebody")
        (world.source / "locked.md").write_text("forged")
        assert (world.path / "docs/plan.md").read_text() == "by somebody"
        assert (world.path / "locked.md").read_text() == "forged"
        (world.path / "own").write_text("own")
    assert set(_settled(world)) == {"docs/plan.md", "locked.md"}
    assert {entry.path for entry in recorded(world, "out_of_band", "alert")} == {"locked.md"}
