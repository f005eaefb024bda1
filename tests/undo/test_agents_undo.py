"""An agent takes back its own changes: the policy judges each step, and the mount shows what it did."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from bonobofs.undo.execution import UndoJournal
from tests.support.commands import bonobofs
from tests.support.mount_fixtures import MakePlace, Place
from tests.support.observe import companion_of, out_of_band, stopped
from tests.support.source_state import AGENT_ALL, AGENT_RULES, state_of, undo
from tests.support.users import run_in_child
from tests.support.wait import until


def _times(root: Path) -> dict[str, int]:
    return {path: os.lstat(root / path).st_mtime_ns for path in ("", "d", "d/e", "d/f")}


def _agents(place: Place) -> None:
    done = bonobofs("undo", "--turn", "last", "--json", cwd=place.path)
    assert done.returncode == 0, done.stdout + done.stderr


def _operators(place: Place) -> None:
    result = undo(place, turn="last")
    assert (result["conflicts"], result["failures"]) == ([], [])


@pytest.mark.parametrize("take_back", [_agents, _operators])
def test_a_mount_shows_what_an_undo_did_and_reports_nothing(
    own_place: MakePlace, tmp_path: Path, take_back: Callable[[Place], None]
) -> None:
    """The times of directories are as before in the mount too, and no change counts as made out of band."""
    source = tmp_path / "source"
    (source / "d/e").mkdir(parents=True)
    (source / "d/f").write_text("one\n")
    (source / "d/e/g").write_text("g\n")
    os.utime(source / "d", ns=(10**18, 10**18 + 5))
    before = state_of(source)
    place = own_place(policy=AGENT_ALL)
    assert _times(place.path) == _times(source)
    (place.path / "d/f").unlink()
    (place.path / "d/new").write_text("x")
    (place.path / "d/e").rename(place.path / "moved")
    (place.path / "moved/h").mkdir()
    (place.path / "moved").chmod(0o700)
    take_back(place)
    assert state_of(source) == before
    until(lambda: _times(place.path) == _times(source), "the mount shows the times")
    place.umount()
    assert [entry.path for entry in place.entries() if entry.operation == "out_of_band"] == []


def test_an_undo_that_the_watcher_sees_late_is_not_out_of_band(own_place: MakePlace, tmp_path: Path) -> None:
    """The agent made a directory in one that it had moved, and the watcher reads of it when both were taken back."""
    (tmp_path / "source/d/e").mkdir(parents=True)
    (tmp_path / "source/d/e/g").write_text("g\n")
    place = own_place(policy=AGENT_ALL)
    with stopped(companion_of(place.pid)):
        (place.path / "d/e").rename(place.path / "moved")
        (place.path / "moved/h").mkdir()
        _operators(place)
    place.umount()
    assert out_of_band(place) == {}


def _large(path: Path) -> None:
    path.write_bytes(b"x" * 2000)


def _executable(path: Path) -> None:
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)


@pytest.mark.parametrize("edit", [_large, _executable])
@pytest.mark.parametrize("moved", ["file", "directory", "link"])
def test_an_undo_brings_no_content_where_the_policy_refuses_it(
    own_place: MakePlace, tmp_path: Path, edit: Callable[[Path], None], moved: str
) -> None:
    """A file is moved, changed under other rules, and only the move is taken back: it stays where it is."""
    source = tmp_path / "source"
    (source / "docs/sub").mkdir(parents=True)
    (source / "bin").mkdir()
    (source / "docs/sub/a").write_text("text\n")
    place = own_place(policy=AGENT_RULES)
    if moved == "link":
        os.link(place.path / "docs/sub/a", place.path / "bin/a")
        assert bonobofs("mark", "move", cwd=place.path).returncode == 0
        (place.path / "docs/sub/a").unlink()
    else:
        assert bonobofs("mark", "move", cwd=place.path).returncode == 0
        name = "sub" if moved == "directory" else "sub/a"
        (place.path / "docs" / name).rename(place.path / "bin" / Path(name).name)
    assert bonobofs("mark", "edit", cwd=place.path).returncode == 0
    edit(place.path / ("bin/sub/a" if moved == "directory" else "bin/a"))
    changed = state_of(source)
    done = bonobofs("undo", "--turn", "move", "--json", cwd=place.path)
    assert done.returncode == 1
    assert json.loads(done.stdout)["taken_back"] == []
    assert state_of(source) == changed


@pytest.mark.parametrize("take_back", [_agents, _operators])
def test_a_deep_directory_that_an_agent_moved_is_taken_back(
    own_place: MakePlace, take_back: Callable[[Place], None]
) -> None:
    """A move of a thousand levels is taken back, and later undos of the source are made."""
    place = own_place(policy=AGENT_ALL)

    def move() -> None:
        os.chdir(place.path)
        os.mkdir("top")
        os.chdir("top")
        for _ in range(1200):
            os.mkdir("d")
            os.chdir("d")
        os.chdir(place.path)

    run_in_child(move)
    assert bonobofs("mark", "move", cwd=place.path).returncode == 0
    (place.path / "top").rename(place.path / "moved")
    take_back(place)
    assert sorted(os.listdir(place.source)) == ["top"]
    subprocess.run(["rm", "-rf", place.source / "top"], check=True)  # the clean-up of pytest recurses


@pytest.mark.parametrize("end", [b"", b"@", b"@12", b"@12:", b"@12:3", b"45", b"@12:3 @", b"@12:3 45"])
def test_the_cut_note_of_a_killed_undo_is_ignored(tmp_path: Path, end: bytes) -> None:
    """A full disk or a power loss cuts the journal at any byte. The notes before the cut hold."""
    journal = UndoJournal(tmp_path, "session", [], b"@7:8 9 ." + b"@1:2 6 " + end)
    assert journal.done == 1
    assert journal.begun == 6
    assert journal.begun_dir_times == {1: 2, **({12: 3} if b"3 " in end else {})}
    assert journal.dir_times == {7: 8, **journal.begun_dir_times}


def test_an_agent_takes_back_only_what_stands(own_place: MakePlace) -> None:
    """Its own undo is a part of its session. It is not taken back with the changes that it took back."""
    place = own_place(policy=AGENT_ALL)
    (place.source / "file").write_text("one\n")
    for text in ("two\n", "three\n"):
        (place.path / "file").write_text(text)
        (place.path / "link").symlink_to(text)
        for expected in (2, 0):
            done = bonobofs("undo", "--session", place.session.session, "--json", cwd=place.path)
            result = json.loads(done.stdout)
            assert (done.returncode, result["failures"]) == (0, [])
            assert len({each["path"] for each in result["taken_back"]}) == expected
            assert (place.source / "file").read_text() == "one\n"
            assert os.listdir(place.source) == ["file"]
    assert "changes were taken back before" in bonobofs("undo", "--turn", "last", cwd=place.path).stdout


def test_each_option_that_a_mount_refuses_is_named(own_place: MakePlace) -> None:
    place = own_place()
    for option, said in (("--session", "--session can name only its own session"), ("--agent", "leave --agent out")):
        wrong = bonobofs("undo", option, "zz", cwd=place.path)
        assert (wrong.returncode, said in wrong.stderr) == (2, True)
