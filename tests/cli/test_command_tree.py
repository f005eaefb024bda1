"""The tree of commands: each reading command prints JSON, no summary is cut, and shells complete all names."""

from __future__ import annotations

import enum
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Final

import pytest

from bonobofs.cli.app import invoke, members
from bonobofs.cli.options import Argument, Command, Group, Option
from bonobofs.errors import UsageError
from tests.support.world import ROOT, bonobofs, environment

ACTING: Final = {
    "mount",
    "umount",
    "shell",
    "mcp",
    "hook",
    "install",
    "uninstall",
    "audit index",
    "agent add",
    "agent change",
    "agent remove",
    "team add",
    "team remove",
    "lease acquire",
    "lease extend",
    "lease release",
    "lease import",
    "git branch",
    "git checkout",
    "git commit",
    "git merge",
    "worktree add",
    "worktree remove",
    "network allow",
    "network disallow",
    "network reset",
    "run",
    "ask allow",
    "ask deny",
    "ask revoke",
    "ask watch",
    "ask forward",
    "db upgrade",
    "db backup",
}
"""Commands that change something. A new command belongs here, or takes --json."""
OTHER_FORMS: Final = {"audit export": "--format", "policy import": ""}
"""Commands whose output is a file of a form of its own, and the option that selects the form."""


def _walk(members: Mapping[str, Command | Group], above: str = "") -> Iterator[tuple[str, Command | Group]]:
    for name, member in members.items():
        yield above + name, member
        if isinstance(member, Group):
            yield from _walk(member.members, f"{above}{name} ")


TREE: Final = dict(_walk(members()))
GROUPS: Final = {path: member for path, member in TREE.items() if isinstance(member, Group)}
COMMANDS: Final = {path: member for path, member in TREE.items() if isinstance(member, Command)}


@pytest.mark.parametrize("path", COMMANDS)
def test_every_reading_command_has_json(path: str) -> None:
    options = {name for parameter in COMMANDS[path].parameters for name in parameter.names}
    if path in OTHER_FORMS:
        assert OTHER_FORMS[path] in {*options, ""}
    else:
        assert path in ACTING or "--json" in options
    assert ACTING | set(OTHER_FORMS) <= set(COMMANDS)


@pytest.mark.parametrize("path", ["", *GROUPS])
def test_help_shows_each_summary_completely(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 80 columns the list of commands has the first sentence of each docstring with its period."""
    monkeypatch.setenv("COLUMNS", "80")
    invoke([*path.split(), "--help"])
    out = capsys.readouterr().out
    assert max(len(line) for line in out.partition("Options:")[2].splitlines()) <= 78
    shown = " ".join(out.split())
    below = GROUPS[path].members if path else {name: TREE[name] for name in TREE if " " not in name}
    assert below
    for name, member in below.items():
        summary = re.match(r".*?\.(?= |$)", " ".join(member.help.split()))
        assert summary is not None
        assert f" {name} {summary[0]}" in shown


@pytest.mark.parametrize("path", COMMANDS)
def test_the_help_of_a_command_has_all_parameters(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each option and argument is listed with its explanation, and each is annotated with a type that can be parsed."""
    invoke([*path.split(), "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for parameter in COMMANDS[path].parameters:
        assert parameter.kind in (str, int, bool, Path) or issubclass(parameter.kind, enum.StrEnum)
        given = parameter.annotation
        name = ", ".join(parameter.names) or given.metavar
        value = f" {given.metavar}" if parameter.names and given.metavar else ""
        assert f"{name}{value} {' '.join(given.help.split())}".rstrip() in shown


class _Level(enum.StrEnum):
    LOW = "low"
    HIGH = "high"


def _sample(
    first: Annotated[str, Argument(metavar="FIRST")],
    rest: Annotated[list[Path] | None, Argument(metavar="[REST...]")] = None,
    count: Annotated[int, Option("-n", "--count", metavar="N", minimum=0)] = 1,
    level: Annotated[_Level | None, Option(metavar="L")] = None,
    label: Annotated[list[str] | None, Option("-l", "--label", metavar="L")] = None,
    all_of_it: Annotated[bool, Option("-a", "--all")] = False,
    force: Annotated[bool, Option("-f", "--force")] = False,
) -> str:
    return repr((first, rest, count, level, label, all_of_it, force))


def _verbatim(
    words: Annotated[list[str], Argument(metavar="WORDS", verbatim=True)],
    env: Annotated[str, Option(metavar="E")] = "",
) -> str:
    return repr((words, env))


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ("a", ("a", None, 1, None, None, False, False)),
        ("a -n 5 b c", ("a", [Path("b"), Path("c")], 5, None, None, False, False)),
        ("-n5 --level=high -- -a", ("-a", None, 5, _Level.HIGH, None, False, False)),
        ("-af -l x --label=y=z a", ("a", None, 1, None, ["x", "y=z"], True, True)),
        ("-fan 3 - --count 4", ("-", None, 4, None, None, True, True)),
        ("a --label=-x", ("a", None, 1, None, ["-x"], False, False)),
    ],
)
def test_words_become_the_arguments_of_the_function(words: str, values: tuple[object, ...]) -> None:
    """Options may follow arguments, flags share a word, and -- ends the options."""
    assert Command(_sample).invoke("sample", words.split()) == repr(values)


def test_verbatim_words_are_passed_as_they_are() -> None:
    """From the first word that is no option, nothing is parsed: it belongs to another program."""
    assert Command(_verbatim).invoke("x", ["--env", "e", "a", "--", "b", "--env", "-h"]) == repr(
        (["a", "--", "b", "--env", "-h"], "e")
    )
    assert Command(_verbatim).invoke("x", ["--", "-h"]) == repr((["--", "-h"], ""))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "required: FIRST"),
        ("a --cuont 3", "unrecognized arguments: --cuont"),
        ("a -n", "argument -n/--count: expected one argument"),
        ("a -n x", "'x' is not a number"),
        ("a -n -1", "-1 is less than 0"),
        ("a --all=yes", "argument -a/--all: ignored explicit argument"),
        ("a --level middle", "'middle' is not one of 'low', 'high'"),
        ("a -ax", "ignored explicit argument"),
    ],
)
def test_a_mistake_is_named(words: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as raised:
        Command(_sample).invoke("sample", words.split())
    assert str(raised.value).endswith("; see sample --help")


def test_a_word_too_many_is_named() -> None:
    with pytest.raises(UsageError, match=re.escape("unrecognized arguments: c d")):
        TREE["umount"].invoke("bonobofs umount", ["a", "c", "d"])


@pytest.mark.parametrize(
    ("words", "some"),
    [
        (["au"], {"audit"}),
        (["why", "--w"], {"--workspace"}),
        (["why", "--op", "ren"], {"rename"}),
        (["audit", ""], {"tail", "query", "report", "verify"}),
        (["beads", "dep", ""], {"add", "remove"}),
    ],
)
def test_shells_complete_every_command(words: list[str], some: set[str]) -> None:
    """Each line has a word that can stand for the last one."""
    completed = bonobofs(*words, env={"_BONOBOFS_COMPLETE": "1"})
    assert completed.stderr == ""
    assert some <= set(completed.stdout.split())


def test_the_completion_of_bash_shows_the_candidates(tmp_path: Path) -> None:
    """The installed script runs in bash and fills COMPREPLY."""
    program = tmp_path / "bonobofs"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m bonobofs "$@"\n')
    program.chmod(0o755)
    script = tmp_path / "script"
    script.write_text(bonobofs("--show-completion", "bash").stdout)
    lines = (
        f"source {script}; COMP_WORDS=(bonobofs audit ''); COMP_CWORD=2; _bonobofs {program}; echo ${{COMPREPLY[@]}}"
    )
    env = environment(PYTHONPATH=str(ROOT))
    shown = subprocess.run(
        ["bash", "-c", lines], env=env, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert {"tail", "query", "verify"} <= set(shown.split())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_of_each_shell_is_printed(shell: str) -> None:
    """The shell is named, else it is the one in SHELL."""
    script = bonobofs("--show-completion", shell)
    assert (script.returncode, script.stderr) == (0, "")
    assert "_BONOBOFS_COMPLETE=1" in script.stdout
    assert bonobofs("--show-completion", env={"SHELL": f"/bin/{shell}"}).stdout == script.stdout


def test_a_bare_checkout_says_how_to_install(home: Path, tmp_path: Path) -> None:
    """Without the packages, mount.py prints one line with the commands that install them, and no traceback."""
    source, mountpoint = tmp_path / "source", tmp_path / "mountpoint"
    source.mkdir()
    mountpoint.mkdir()
    command = [sys.executable, "-s", "-S", str(ROOT / "mount.py"), str(source), str(mountpoint)]
    env = {name: value for name, value in environment(BONOBOFS_HOME=str(home)).items() if name != "PYTHONPATH"}
    ran = subprocess.run(command, env=env, cwd=os.sep, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert f"pip install {ROOT}" in ran.stderr
