"""Names of turns that `--turn` can select, and ids that name no change."""

from __future__ import annotations

import pytest

from bonobofs.errors import UsageError
from bonobofs.undo.changes import parse_id
from tests.support.commands import bonobofs
from tests.support.mount_fixtures import MakePlace, Place
from tests.support.source_state import AGENT_ALL


@pytest.fixture
def changed(own_place: MakePlace) -> Place:
    """A mount in which the agent may take back its changes, with one change."""
    place = own_place(policy=AGENT_ALL)
    (place.path / "a").write_text("first\n")
    return place


def test_every_name_that_a_mark_accepts_can_be_selected(changed: Place) -> None:
    for name in ("fix: parser", "a:b", "two\nlines", " ", "\x1b[31mred", "é" * 200):
        assert bonobofs("mark", name, cwd=changed.path).returncode == 0
        (changed.path / "a").write_text(f"{name}\n")  # a truncation and a write
        for options in (("--path", changed.source), ()):
            result = bonobofs("undo", "--turn", name, "--dry-run", *options, cwd=changed.path)
            assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "2 changes would be taken back, 0 not")
        assert bonobofs("audit", "query", "--turn", name).returncode == 0


@pytest.mark.parametrize("name", ["", "last", "é" * 201, "3d1fbd0c:17"])
def test_a_name_that_cannot_be_selected_begins_no_turn(changed: Place, name: str) -> None:
    turns = [entry.operation for entry in changed.entries()].count("turn")
    result = bonobofs("mark", "--", name, cwd=changed.path)
    assert result.returncode == 2
    assert "1 to 200 characters" in result.stderr
    assert [entry.operation for entry in changed.entries()].count("turn") == turns


@pytest.mark.parametrize("command", ["audit query --turn nope", "undo --dry-run --turn nope", "show \x1b[31mred:1"])
def test_an_error_shows_no_control_character(changed: Place, command: str) -> None:
    assert bonobofs("mark", "\x1b[31mred", cwd=changed.path).returncode == 0
    (changed.path / "a").write_text("second\n")
    result = bonobofs(*command.split(), cwd=changed.source)
    assert result.returncode == 2
    assert "\x1b" not in result.stderr
    assert command.startswith("undo") or "\\x1b[31mred" in result.stderr


@pytest.mark.parametrize("number", ["999999", "0", "9" * 30, "9" * 5000, "-1", "1e3", "\u0661", ""])
def test_an_id_that_names_no_change_is_an_error(changed: Place, number: str) -> None:
    name = f"{changed.session.session[:8]}:{number}"
    number_of_turn = name if number != "0" else f"{changed.session.session[:8]}:1"
    for command in (
        ("undo", "--change", name),
        ("undo", "--change", name, "--path", changed.source),
        ("undo", "--turn", number_of_turn, "--path", changed.source),
        ("diff", "--turn", number_of_turn, "--path", changed.source),
        ("show", name),
    ):
        result = bonobofs(*command)
        assert (result.returncode, result.stdout) == (2, ""), command
        assert "history PATH" in result.stderr
    for command in (("undo", "--change", name), ("undo", "--turn", number_of_turn)):
        assert bonobofs(*command, cwd=changed.path).returncode == 2
    assert (changed.source / "a").read_text() == "first\n"


@pytest.mark.parametrize("name", ["", "1:", ":", "last"])
def test_a_text_that_is_no_id_shows_the_form_of_ids(changed: Place, name: str) -> None:
    assert "ids such as 3d1fbd0c:17" in bonobofs("show", name).stderr


@pytest.mark.parametrize("name", ["alic", "", "\udcff"])
def test_an_agent_without_a_session_is_an_error(changed: Place, name: str) -> None:
    result = bonobofs("undo", "--agent", name, "--path", changed.source)
    assert (result.returncode, result.stdout) == (2, "")
    assert "known are alice" in result.stderr
    assert (changed.source / "a").exists()


def test_an_undo_that_selects_no_change_says_so(changed: Place) -> None:
    result = bonobofs("undo", "--path", changed.source / "b")
    assert (result.returncode, result.stdout.count("\n")) == (0, 1)
    assert result.stdout.startswith("no recorded change matches these options")


def test_an_empty_name_selects_no_turn(changed: Place) -> None:
    assert bonobofs("undo", "--turn", "", "--path", changed.source).returncode == 2
    assert (changed.source / "a").exists()


def test_an_id_of_a_turn_selects_its_changes(changed: Place) -> None:
    turn = bonobofs("mark", "task", cwd=changed.path).stdout.strip()
    for name in (turn, "task"):
        result = bonobofs("undo", "--turn", name, "--path", changed.source)
        assert (result.returncode, result.stdout[:18]) == (0, "no recorded change"), "it has no change yet"
    (changed.path / "b").write_text("b\n")
    assert bonobofs("undo", "--turn", turn).returncode == 0
    assert not (changed.source / "b").exists()


def test_an_id_that_is_too_long_is_cut_in_the_error() -> None:
    with pytest.raises(UsageError) as error:
        parse_id("3d1f:" + "9" * 5000, ["3d1fbd0c"])
    assert len(str(error.value)) < 200
