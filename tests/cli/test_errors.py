"""The edge of the command line: every failure is one line and an exit code."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.world import Mounted, bonobofs, environment


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["mount"], "Missing argument"),
        (["mount", "/", "/", "--colour"], "No such option: --colour"),
        (["mount", "/usr", "/mnt", "--transport", "carrier-pigeon"], "there is no transport 'carrier-pigeon'"),
        (["why", "x", "--op", "ponder"], "'ponder' is not one of"),
        (["audit", "tail", "-n", "-1"], "-n"),
        (["audit", "export"], "--format"),
        (["policy"], "Missing command"),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_one_line_and_2(arguments: list[str], said: str) -> None:
    """It says what is wrong and where the help is."""
    wrong = bonobofs(*arguments)
    assert wrong.returncode == 2
    assert wrong.stdout == ""
    assert wrong.stderr.count("\n") == 1
    assert said in wrong.stderr


def test_nothing_to_unmount_is_one_line_and_1(tmp_path: Path) -> None:
    """It says where to look."""
    wrong = bonobofs("umount", tmp_path)
    assert wrong.returncode == 1
    assert wrong.stderr == (
        f"bonobofs: nothing of bonobofs is mounted on {tmp_path}; bonobofs status lists the mounts\n"
    )


def test_what_was_not_foreseen_is_one_line_and_a_diagnostic(home: Path) -> None:
    """No traceback reaches the terminal; it is kept where the line says."""
    (home / "home.id").mkdir()
    wrong = bonobofs("audit", "query", "--agent", "alice")
    assert wrong.returncode == 1
    assert wrong.stderr.count("\n") == 1
    assert f"the diagnostic is at the end of {home}/bonobofs.log" in wrong.stderr
    assert "Traceback" in (home / "bonobofs.log").read_text()


COMMANDS = ["mount", "umount", "status", "why", "policy", "audit", "audit tail"]
COMMANDS += ["agent", "team", "lease", "serve", "db", "doctor"]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_explains_itself(command: str) -> None:
    """Help is plain text that begins with the form of the command."""
    helped = bonobofs(*command.split(), "--help")
    assert helped.returncode == 0
    assert helped.stdout.startswith(f"Usage: bonobofs {command}".rstrip())
    assert "\x1b" not in helped.stdout


def test_no_arguments_show_the_help_and_version_the_version() -> None:
    assert "Commands:" in bonobofs().stdout
    assert bonobofs("--version").stdout.startswith("bonobofs 0.")


def test_colour_is_for_terminals_and_never_with_no_color(mounted: Mounted) -> None:
    """A pipe gets plain text; a terminal colour, unless NO_COLOR says otherwise."""
    mounted()
    assert "\x1b" not in bonobofs("status").stdout
    assert b"\x1b[3" in _on_a_terminal({})
    assert b"\x1b[3" not in _on_a_terminal({"NO_COLOR": "1"})


def _on_a_terminal(env: dict[str, str]) -> bytes:
    mine, theirs = pty.openpty()
    with os.fdopen(mine, "rb", buffering=0) as terminal:
        subprocess.run(
            [sys.executable, "-m", "bonobofs", "status"],
            env=environment(TERM="xterm", **env),
            stdout=theirs,
            check=True,
        )
        os.close(theirs)
        shown = b""
        try:
            while piece := terminal.read(4096):
                shown += piece
        except OSError:
            pass  # A terminal whose other side is closed ends with EIO.
    return shown
