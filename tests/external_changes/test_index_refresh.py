"""Commands of git that only read cause neither refusals nor alerts, in the mount and in the source."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.observe import out_of_band
from tests.support.wait import until
from tests.support.world import Mounted, World, bonobofs

PROTECTED = 'default = "allow"\n[[protect]]\npaths = [".git/"]\n'


def _git(at: Path, *arguments: str) -> None:
    who = ("-c", "user.name=o", "-c", "user.email=o@example.com", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", "-C", at, *who, *arguments], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def _false_lines(world: World) -> list[str]:
    return [
        f"{entry.operation} {entry.path}"
        for entry in world.entries()
        if entry.kind == "alert" or entry.result == "denied" or entry.operation == "out_of_band"
    ]


def test_git_status_causes_no_refusal_and_no_alert(mounted: Mounted, source: Path) -> None:
    """In the mount, where git cannot write the index, and in the source, where it refreshes it.

    `git add` in the source changes the index, and is an alert as before.
    """
    _git(source, "init", "-q")
    (source / "a.md").write_text("a")
    _git(source, "add", "a.md")
    _git(source, "commit", "-qm", "a")
    world = mounted(policy=PROTECTED)
    before = (source / ".git" / "index").read_bytes()
    for number in range(1, 4):
        os.utime(source / "a.md", (number, number))
        _git(world.path, "status")
        _git(world.path, "diff")
        _git(source, "status")
    assert (source / ".git" / "index").read_bytes() != before
    (source / "b.md").write_text("b")
    _git(source, "add", "b.md")
    until(lambda: any(line.startswith("out_of_band .git") for line in _false_lines(world)), "the added file")
    assert "denied" not in [entry.result for entry in world.entries() if entry.kind == "intent"]
    told = [entry for entry in world.entries() if entry.kind == "event" and entry.operation == "out_of_band"]
    assert not [entry for entry in told if entry.path == ".git/index" and entry.timestamp < told[0].timestamp]
    assert len([entry for entry in world.entries() if entry.kind == "alert"]) == 1


def test_git_status_after_a_publication_causes_no_alert(mounted: Mounted, source: Path) -> None:
    """The operator's refresh is compared with the index that the publication wrote."""
    _git(source, "init", "-q", "-b", "aidlc/work")
    (source / "a.md").write_text("a")
    _git(source, "add", "a.md")
    _git(source, "commit", "-qm", "a")
    world = mounted(policy=PROTECTED)
    for number in range(1, 4):
        (world.path / f"b{number}.md").write_text("b")
        done = bonobofs("git", "commit", "-m", "[gt-1] Add b", f"b{number}.md", cwd=world.path)
        assert done.returncode == 0, done.stderr
        (source / f"after{number}").touch()
        until(lambda number=number: f"after{number}" in out_of_band(world), "the burst of the commit is judged")  # type: ignore[misc]
        before = (source / ".git" / "index").read_bytes()
        os.utime(source / "a.md", (number, number))
        _git(source, "status")
        assert (source / ".git" / "index").read_bytes() != before
        (source / f"c{number}").touch()
        until(lambda number=number: f"c{number}" in out_of_band(world), "the touched file is entered")  # type: ignore[misc]
    assert [line for line in _false_lines(world) if ".git" in line] == []


def test_a_lock_of_the_index_causes_no_alert(mounted: Mounted, source: Path) -> None:
    """Neither if it exists at the end of the burst, nor if it is gone by the next one."""
    _git(source, "init", "-q")
    world = mounted(policy=PROTECTED)
    lock = source / ".git" / "index.lock"
    for name, change in (("a", lock.touch), ("b", lock.unlink)):
        change()
        (source / name).touch()
        until(lambda name=name: name in out_of_band(world), "the file beside it is entered")  # type: ignore[misc]
    assert [line for line in _false_lines(world) if ".git" in line] == []
