"""Every failure of the command line is one line and an exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.terminal import on_terminal
from tests.support.world import ROOT, Mounted, bonobofs, environment


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bogus"], "no such command 'bogus'"),
        (["mount"], "arguments are required"),
        (["mount", "/", "/", "--colour"], "unrecognized arguments: --colour"),
        (["mount", "/usr", "/mnt", "--transport", "carrier-pigeon"], "there is no transport 'carrier-pigeon'"),
        (["why", "x", "--op", "ponder"], "'ponder' is not one of"),
        (["audit", "tail", "-n", "-1"], "-n"),
        (["audit", "tail", "-n", "9" * 20], "is more than 2147483647"),
        (["why", "x", "--size", "9" * 5000], "--size is more than a file can have"),
        (["ask", "forward", "http://[::1"], "is no service"),
        (["lease", "acquire", "x", "--for", "-1h"], "'-1h' is no positive duration"),
        (["lease", "release", "\udcff"], "\\xff is not UTF-8"),
        (["audit", "query", "--agent", "\udcff"], "\\xff is not UTF-8"),
        (["policy", "diff", "project", "docs", "--since", "1d"], "add --replay"),
        (["audit", "export"], "--format"),
        (["policy"], "missing command"),
        (["run"], "name at most one source and then a command"),
        (["mcp", "/", "--http", "65536", "--token-file", "/nonexistent/token"], "a port is a number up to 65535"),
    ],
)
def test_a_usage_error_is_one_line_with_exit_2(arguments: list[str], said: str) -> None:
    """The line names the error and the help."""
    wrong = bonobofs(*arguments)
    assert wrong.returncode == 2
    assert wrong.stdout == ""
    assert wrong.stderr.count("\n") == 1
    assert said in wrong.stderr


def test_output_that_cannot_be_written_is_named(home: Path) -> None:
    """A full disk is one line; a reader that has ended is none. The exit prints nothing more."""
    env = {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}
    for arguments in (["--help"], ["status"]):
        command = [sys.executable, "-m", "bonobofs", *arguments]
        with open("/dev/full", "w") as full:
            wrong = subprocess.run(command, env=env, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
        assert wrong.stderr.startswith("bonobofs: standard output cannot be written: No space left on device; ")
        reader, writer = os.pipe()
        os.close(reader)
        ended = subprocess.run(command, env=env, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
        os.close(writer)
        assert (ended.returncode, ended.stderr) == (1, "")


def test_a_removed_working_directory_is_named(home: Path, tmp_path: Path) -> None:
    """It is no unforeseen error."""
    script = 'cd "$1" && rmdir "$1" && shift && exec "$@"'
    for number, arguments in enumerate((["why", "x"], ["history", "x"], ["policy", "show"], ["lease", "acquire", "x"])):
        (gone := tmp_path / f"gone-{number}").mkdir()
        command = ["sh", "-c", script, "sh", str(gone), sys.executable, "-P", "-m", "bonobofs", *arguments]
        env = environment(PYTHONPATH=str(ROOT))
        wrong = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        said = "bonobofs: the working directory was removed; change to another one\n"
        assert (wrong.returncode, wrong.stderr) == (1, said)


def test_a_dead_mount_is_named_by_commands_of_the_working_directory(mounted: Mounted) -> None:
    world = mounted()
    world.kill()
    wrong = bonobofs("git", "diff", cwd=world.path)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
    assert f"the server of the mount on {world.path} is gone" in wrong.stderr


def test_the_state_directory_must_be_absolute(tmp_path: Path) -> None:
    """A shell leaves a quoted `~` as it is, and a directory of that name would appear here."""
    for name in ("~/state", "state"):
        wrong = bonobofs("status", cwd=tmp_path, env={"BONOBOFS_HOME": name})
        assert (wrong.returncode, "is no absolute path" in wrong.stderr) == (1, True)
        assert not (tmp_path / name.partition("/")[0]).exists()


def test_an_absent_policy_is_named_by_propose(tmp_path: Path) -> None:
    wrong = bonobofs("policy", "propose", "--policy", "nope.toml", cwd=tmp_path)
    assert (wrong.returncode, f"there is no policy file {tmp_path}/nope.toml" in wrong.stderr) == (1, True)


def test_unmounting_a_bare_directory_is_one_line_with_exit_1(tmp_path: Path) -> None:
    """The line says how to find mounts."""
    wrong = bonobofs("umount", tmp_path)
    assert wrong.returncode == 1
    assert wrong.stderr == (
        f"bonobofs: nothing of bonobofs is mounted on {tmp_path}; bonobofs status lists the mounts\n"
    )


def test_an_unexpected_error_is_one_line_and_a_diagnostic(home: Path) -> None:
    """The traceback is in the file that the line names, and not on the terminal."""
    (home / "home.id").mkdir()
    wrong = bonobofs("audit", "query", "--agent", "alice")
    assert wrong.returncode == 1
    assert wrong.stderr.count("\n") == 1
    assert f"the diagnostic is at the end of {home}/bonobofs.log" in wrong.stderr
    assert "Traceback" in (home / "bonobofs.log").read_text()


COMMANDS = ["mount", "umount", "status", "why", "policy", "audit", "audit tail"]
COMMANDS += ["agent", "team", "lease", "serve", "db", "doctor"]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_every_command_has_help(command: str) -> None:
    """It is plain text that begins with the usage."""
    helped = bonobofs(*command.split(), "--help")
    assert helped.returncode == 0
    assert helped.stdout.startswith(f"Usage: bonobofs {command}".rstrip())
    assert "\x1b" not in helped.stdout


def test_no_arguments_show_the_help_and_the_version_option_the_version() -> None:
    assert "Commands:" in bonobofs().stdout
    assert bonobofs("--version").stdout.startswith("bonobofs 0.")


def test_output_has_colour_only_on_a_terminal_without_no_color(mounted: Mounted) -> None:
    """A pipe gets plain text."""
    mounted()
    assert "\x1b" not in bonobofs("status").stdout
    assert "\x1b[3" in on_terminal("status")
    assert "\x1b[3" not in on_terminal("status", NO_COLOR="1")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_is_no_error(home: Path, closed: str) -> None:
    script = f'"$0" -m bonobofs agent list {closed}'
    ran = subprocess.run(
        ["sh", "-c", script, sys.executable], env=environment(BONOBOFS_HOME=str(home)), capture_output=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
