"""The commands that look at changes, on a terminal: colour, and the pager of the user."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import environment
from tests.support.mount_fixtures import MakePlace
from tests.support.world import World


@pytest.fixture
def changed(own_place: MakePlace) -> World:
    """A mount in which `notes` has another line now."""
    place = own_place()
    (place.source / "notes").write_text("old\n")
    (place.path / "notes").write_text("new\n")
    return place


def on_terminal(place: World, *arguments: str, **variables: str) -> str:
    """Run a command whose standard output is a terminal; return what the terminal gets."""
    mine, theirs = pty.openpty()
    with os.fdopen(mine, "rb", buffering=0) as terminal:
        command = subprocess.Popen(
            [sys.executable, "-m", "bonobofs", *arguments],
            cwd=place.source,
            env=environment(BONOBOFS_HOME=str(place.home), TERM="xterm", **variables),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        shown = b""
        try:
            while block := terminal.read(65536):
                shown += block
        except OSError:  # EIO: the last program has closed the terminal
            pass
        assert command.wait(60) == 0, shown
    return shown.decode().replace("\r\n", "\n")


def test_a_difference_has_colours(changed: World) -> None:
    shown = on_terminal(changed, "diff", "--path", "notes", PAGER="cat")
    assert "\x1b[31m-old\x1b[0m\n" in shown
    assert "\x1b[32m+new\x1b[0m\n" in shown


def test_no_color_turns_colours_off(changed: World) -> None:
    shown = on_terminal(changed, "diff", "--path", "notes", PAGER="cat", NO_COLOR="1")
    assert "\n-old\n+new\n" in shown
    assert "\x1b[" not in shown


@pytest.mark.parametrize(("arguments", "part"), [("diff --path notes", "+new\n"), ("history notes", " truncate ")])
def test_the_pager_of_the_user_shows_the_output(changed: World, tmp_path: Path, arguments: str, part: str) -> None:
    pager = tmp_path / "pager"
    pager.write_text("#!/bin/sh\necho the pager\ncat\n")
    pager.chmod(0o755)
    shown = on_terminal(changed, *arguments.split(), PAGER=str(pager), NO_COLOR="1")
    assert shown.startswith("the pager\n")
    assert part in shown
