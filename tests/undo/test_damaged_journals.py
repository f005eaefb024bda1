"""A damaged journal of a killed undo is an error that names the file. A cut last note is not damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bonobofs.undo.execution import UndoJournal
from bonobofs.undo.steps import UndoStep, read_journal
from tests.support.commands import bonobofs
from tests.support.mount_fixtures import MakePlace, Place
from tests.support.source_state import state_of, undo

_DAMAGED_NOTES = [
    "!zz.",
    "!4e6.",
    "!ff.",
    "9" * 5000 + " .",
    "@1:" + "9" * 5000 + " .",
    "." * 100,
    "!4e6!6e.",
    "x",
    "@ .",
]


@pytest.fixture
def killed(own_place: MakePlace) -> Place:
    """A source with the journal of an undo that was killed before its first step."""
    place = own_place()
    for name in "ab":
        (place.source / name).write_text("old\n")
        (place.path / name).unlink()
    place.umount()
    planned = undo(place, agent="alice", dry_run=True)
    about = {
        "source": str(place.source),
        "agent": "",
        "selection": "",
        "changes": [[each["change"], each["path"]] for each in planned["taken_back"]],
    }
    UndoJournal.begin(place.home / "undo", "killed", [UndoStep(**step) for step in planned["steps"]], about)
    return place


def _assert_damaged(place: Place, file: str) -> None:
    before = state_of(place.source)
    result = bonobofs("undo", "--path", place.source)
    assert (result.returncode, result.stdout) == (1, "")
    assert str(place.home / "undo" / file) in result.stderr
    assert "move it away" in result.stderr
    assert "unforeseen" not in result.stderr
    assert state_of(place.source) == before


def test_damaged_notes_are_an_error(killed: Place) -> None:
    done = killed.home / "undo/killed.done"
    for notes in _DAMAGED_NOTES:
        done.write_text(notes)
        _assert_damaged(killed, "killed.done")
        assert done.read_text() == notes
    for file in (done, done.with_suffix(".plan")):
        file.rename(killed.home / file.name)
    undo(killed, agent="alice")
    assert [path.read_text() for path in sorted(killed.source.iterdir())] == ["old\n", "old\n"]


def _without_arguments(document: dict[str, Any]) -> object:
    del document["steps"][0]["arguments"]
    return document


def _with_step(**parts: object) -> Callable[[dict[str, Any]], object]:
    return lambda document: {**document, "steps": [{**document["steps"][0], **parts}]}


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: 3,
        lambda _: None,
        lambda document: {**document, "changes": None},
        lambda document: {**document, "changes": [3]},
        lambda document: {**document, "changes": [[]]},
        lambda document: {**document, "steps": [3]},
        _without_arguments,
        _with_step(do="destroy"),
        _with_step(do=[]),
        _with_step(path=3),
        _with_step(arguments={}),
        _with_step(do="xattr", arguments={"name": "user.x", "value": 3}),
    ],
)
def test_a_damaged_plan_is_an_error(killed: Place, damage: Callable[[dict[str, Any]], object]) -> None:
    plan = killed.home / "undo/killed.plan"
    plan.write_text(json.dumps(damage(json.loads(plan.read_bytes()))))
    _assert_damaged(killed, "killed.plan")


@pytest.mark.parametrize("notes", ["", "12 @3:4 .", "@3:-1 !6e6f.5 ", "12 .!6e6f."])
@pytest.mark.parametrize("cut", ["", "12", "@", "@12", "@12:", "@12:-", "@12:3", "!", "!4e", "!4e6", "\0\0", "1\0"])
def test_a_cut_last_note_is_removed(tmp_path: Path, notes: str, cut: str) -> None:
    """The next undo writes its notes after the complete ones. Else it would extend the cut one."""
    UndoJournal.begin(
        tmp_path, "killed", [UndoStep("remove", "a", "change")] * 2, {"source": "s", "selection": "", "changes": []}
    )
    done = tmp_path / "killed.done"
    done.write_text(notes + cut)
    assert read_journal(tmp_path / "killed.plan", "other") is None
    assert done.read_text() == notes + cut
    journal = read_journal(tmp_path / "killed.plan", "s")
    assert journal is not None
    assert journal[2].decode() == done.read_text() == notes


def test_notes_that_cannot_be_read_are_an_error(killed: Place) -> None:
    (killed.home / "undo/killed.done").unlink(missing_ok=True)
    (killed.home / "undo/killed.done").mkdir()
    _assert_damaged(killed, "killed.done")


def test_a_journal_without_notes_is_complete(tmp_path: Path) -> None:
    UndoJournal.begin(
        tmp_path, "killed", [UndoStep("remove", "a", "change")], {"source": "s", "selection": "", "changes": []}
    )
    assert read_journal(tmp_path / "killed.plan", "s")
