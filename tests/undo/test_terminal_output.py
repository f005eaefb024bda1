"""The commands that show changes, on a terminal: colour, and the pager of the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.mount_fixtures import MakePlace
from tests.support.terminal import on_terminal
from tests.support.world import World


@pytest.fixture
def changed(own_place: MakePlace) -> World:
    """A mount in which `notes` has another line now."""
    place = own_place()
    (place.source / "notes").write_text("old\n")
    (place.path / "notes").write_text("new\n")
    return place


def shown(place: World, arguments: str, **variables: str) -> str:
    return on_terminal(*arguments.split(), cwd=place.source, BONOBOFS_HOME=str(place.home), **variables)


def test_a_difference_has_colours(changed: World) -> None:
    text = shown(changed, "diff --path notes", PAGER="cat")
    assert "\x1b[31m-old\x1b[0m\n" in text
    assert "\x1b[32m+new\x1b[0m\n" in text


def test_no_color_turns_colours_off(changed: World) -> None:
    text = shown(changed, "diff --path notes", PAGER="cat", NO_COLOR="1")
    assert "\n-old\n+new\n" in text
    assert "\x1b[" not in text


@pytest.mark.parametrize(("arguments", "part"), [("diff --path notes", "+new\n"), ("history notes", " truncate ")])
def test_the_pager_of_the_user_shows_the_output(changed: World, tmp_path: Path, arguments: str, part: str) -> None:
    pager = tmp_path / "pager"
    pager.write_text("#!/bin/sh\necho the pager\ncat\n")
    pager.chmod(0o755)
    text = shown(changed, arguments, PAGER=str(pager), NO_COLOR="1")
    assert text.startswith("the pager\n")
    assert part in text
