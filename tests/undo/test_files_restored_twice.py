"""An undo gives a restored file a new inode. A later undo recognizes it in the changes before and after."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.commands import bonobofs
from tests.support.mount_fixtures import MakePlace
from tests.support.source_state import state_of, undo


def _replace(path: Path) -> None:
    (path.parent / "new").write_text("new\n")
    (path.parent / "new").rename(path)


def _make_file(path: Path) -> None:
    path.write_text("first\n")


def _make_symlink(path: Path) -> None:
    path.symlink_to("target")


@pytest.mark.parametrize(
    ("make", "remove"),
    [(_make_file, os.unlink), (_make_file, _replace), (_make_symlink, os.unlink), (os.mkdir, os.rmdir)],
)
def test_a_file_that_is_removed_again_returns_as_it_was_first(
    own_place: MakePlace, tmp_path: Path, make: Callable[[Path], None], remove: Callable[[Path], None]
) -> None:
    (source := tmp_path / "source").mkdir()
    make(source / "a")
    before = state_of(source)
    place = own_place()
    if make is _make_file:
        (place.path / "a").write_text("second\n")
    (place.path / "a").rename(place.path / "b")
    for turn in ("one", "two", "three"):
        bonobofs("mark", turn, cwd=place.path)
        remove(place.path / "b")
        if turn != "three":
            assert bonobofs("undo", "--turn", turn, "--path", source).returncode == 0
    result = bonobofs("undo", "--agent", "alice", "--path", source)
    assert (result.returncode, state_of(source)) == (0, before), result.stdout


def test_a_change_that_a_later_content_replaced_stands_again_after_each_redo(
    own_place: MakePlace, tmp_path: Path
) -> None:
    """The second undo restores the first content only, so that no step has the id of the second change."""
    (source := tmp_path / "source").mkdir()
    (source / "a").write_text("first\n")
    (source / "b").write_text("other\n")
    before = state_of(source)
    place = own_place()
    os.unlink(place.path / "a")
    (place.path / "a").write_text("second\n")
    for number in range(2):
        session = undo(place, agent="alice")["session"]
        assert state_of(source) == before
        assert undo(place, of_session=session)["conflicts"] == []
        if not number:
            (place.path / "b").rename(place.path / "a")
    result = undo(place, agent="alice")
    assert (result["conflicts"], state_of(source)) == ([], before)
