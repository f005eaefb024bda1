"""`bonobofs run --protect`: changes of a protected directory are reverted and recorded, and the run fails."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.sandbox.boxes import Box
from tests.support.world import NOBODY, OrdinaryUser


@pytest.fixture
def box() -> Iterator[Box]:
    with tempfile.TemporaryDirectory(prefix="bonobofs-") as name:
        box = Box(OrdinaryUser(Path(name)))
        okrs = box.source / "okrs"
        okrs.mkdir()
        (okrs / "company.yml").write_text("objective: grow\n")
        for path in (okrs, okrs / "company.yml"):
            os.chown(path, NOBODY, NOBODY)
        yield box


def options(box: Box) -> tuple[str, ...]:
    return ("--protect", "okrs", "--item", "ITEM-1", "--artifacts", str(box.top / "artifacts"))


def alerts(box: Box) -> list[dict[str, Any]]:
    ran = box.bonobofs("audit", "tail", "--alerts", "--json")
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_a_run_that_leaves_the_directory_alone_ends_as_its_command(box: Box) -> None:
    ran = box.run("sh", "-c", "echo b > b.md; exit 3", options=options(box))
    assert ran.returncode == 3, ran.stderr
    assert not (box.top / "artifacts/violation.json").exists()
    assert list((box.state / "integrity").iterdir()) == []


def test_a_direct_edit_is_reverted_recorded_and_fails_the_item(box: Box) -> None:
    ran = box.run("sh", "-c", "echo rest > okrs/company.yml; echo n > okrs/new.yml", options=options(box))
    assert ran.returncode == 77, ran.stderr
    assert "okrs/" in ran.stderr
    assert (box.source / "okrs/company.yml").read_text() == "objective: grow\n"
    assert not (box.source / "okrs/new.yml").exists()
    violation = json.loads((box.top / "artifacts/violation.json").read_text())
    assert violation["violation_type"] == "okrs_direct_edit"
    details = violation["details"]
    assert (details["item_id"], details["reverted"], details["revert_error"]) == ("ITEM-1", True, "")
    assert details["changed_files"] == ["okrs/company.yml", "okrs/new.yml"]
    (kept,) = (box.top / "artifacts").glob("reverted-*")
    assert (kept / "okrs/new.yml").read_text() == "n\n"
    (entry,) = [entry for entry in alerts(box) if entry["operation"] == "guardrail_violation"]
    assert (entry["agent"], entry["details"]["item_id"]) == ("daemon", "ITEM-1")
    assert list((box.state / "integrity").iterdir()) == []


def test_a_change_behind_the_mount_is_found_too(box: Box) -> None:
    """The command waits until another program, outside the sandbox, has changed the source."""
    script = "touch ready.md; until test -e go.md; do :; done"
    words = box.run_words("sh", "-c", script, options=options(box))
    with subprocess.Popen(words, env=box.environment, cwd=box.source, stdin=subprocess.DEVNULL) as running:
        while not (box.source / "ready.md").exists():
            assert running.poll() is None
        (box.source / "okrs/company.yml").write_text("objective: rest\n")
        (box.source / "go.md").touch()
    assert running.returncode == 77
    assert (box.source / "okrs/company.yml").read_text() == "objective: grow\n"


def test_a_directory_that_cannot_be_protected_stops_the_run(box: Box) -> None:
    with open(box.source / "okrs/huge", "wb") as file:
        file.truncate(1 << 41)
    ran = box.run("touch", "ran.md", options=options(box))
    assert ran.returncode == 1
    assert "okrs/huge cannot be protected" in ran.stderr
    assert not (box.source / "ran.md").exists()


def test_protect_needs_a_place_for_the_violation(box: Box) -> None:
    ran = box.run("true", options=("--protect", "okrs"))
    assert ran.returncode == 2
    assert "--artifacts" in ran.stderr


@pytest.mark.parametrize("name", ["art", "okrs/art", "link"])
def test_artifacts_that_the_command_can_remove_stop_the_run(box: Box, tmp_path: Path, name: str) -> None:
    """They are in the source, in a protected directory, or a symlink of the source leads to them."""
    (box.source / "link").symlink_to(tmp_path)
    ran = box.run("touch", "ran.md", options=("--protect", "okrs", "--artifacts", str(box.source / name)))
    assert ran.returncode == 2
    assert "name a directory outside of it" in ran.stderr
    assert not (box.source / "ran.md").exists()
    assert not (box.source / name).is_dir() or name == "link"


@pytest.mark.parametrize("name", ["file", "file/below", "/proc/x"])
def test_artifacts_that_are_no_directory_stop_the_run(box: Box, name: str) -> None:
    (box.top / "file").touch()
    ran = box.run("touch", "ran.md", options=("--protect", "okrs", "--artifacts", str(box.top / name)))
    assert (ran.returncode, ran.stderr.count("\n")) == (2, 1)
    assert "cannot be used: " in ran.stderr
    assert not (box.source / "ran.md").exists()


def test_unusable_artifacts_keep_the_snapshot_for_another_revert(box: Box) -> None:
    """A directory has the name of violation.json, so the file cannot be written."""
    (box.top / "artifacts/violation.json").mkdir(parents=True)
    ran = box.run("sh", "-c", "echo rest > okrs/company.yml", options=options(box))
    assert ran.returncode == 77
    assert "violation.json cannot be written" in ran.stderr
    assert "bonobofs integrity revert" in ran.stderr
    assert (box.source / "okrs/company.yml").read_text() == "rest\n"
    assert [entry["details"]["reverted"] for entry in alerts(box)] == [False]
    assert box.bonobofs("integrity", "revert", str(box.source)).returncode == 0
    assert (box.source / "okrs/company.yml").read_text() == "objective: grow\n"
