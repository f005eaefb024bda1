"""The tree of commands: each reading command prints JSON, no summary is cut, and shells complete all names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from typer.main import get_command

from bonobofs.cli.app import invoke, tree
from tests.support.world import ROOT, bonobofs, environment

ACTING: Final = {
    "mount",
    "umount",
    "shell",
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
    "db upgrade",
    "db backup",
}
"""Commands that change something. A new command belongs here, or takes --json."""
OTHER_FORMS: Final = {"audit export": "--format", "policy import": ""}
"""Commands whose output is a file of a form of its own, and the option that selects the form."""


def _walk(command: Any, *names: str) -> Iterator[tuple[str, Any]]:
    yield " ".join(names), command
    for name, below in getattr(command, "commands", {}).items():
        yield from _walk(below, *names, name)


TREE: Final = dict(_walk(get_command(tree())))
GROUPS: Final = [path for path, command in TREE.items() if hasattr(command, "commands")]
COMMANDS: Final = sorted(set(TREE) - set(GROUPS))


@pytest.mark.parametrize("path", COMMANDS)
def test_every_reading_command_has_json(path: str) -> None:
    options = {option for parameter in TREE[path].params for option in parameter.opts}
    if path in OTHER_FORMS:
        assert OTHER_FORMS[path] in options | {""}
    else:
        assert path in ACTING or "--json" in options
    assert ACTING | set(OTHER_FORMS) <= set(COMMANDS)


@pytest.mark.parametrize("path", GROUPS)
def test_help_shows_each_summary_completely(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At 80 columns the list of commands has the first sentence of each docstring with its period."""
    monkeypatch.setenv("COLUMNS", "80")
    invoke([*path.split(), "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert TREE[path].commands
    for name, command in TREE[path].commands.items():
        summary = re.match(r".*?\.(?= |$)", " ".join(command.help.split()))
        assert summary is not None
        assert f" {name} {summary[0]}" in shown


@pytest.mark.parametrize(
    ("shell", "words", "some"),
    [
        ("bash", ["bonobofs", "au"], {"audit"}),
        ("bash", ["bonobofs", "why", "--w"], {"--workspace"}),
        ("zsh", ["bonobofs", "audit", ""], {"tail", "query", "report", "verify"}),
        ("fish", ["bonobofs", "beads", "dep", ""], {"add", "remove"}),
    ],
)
def test_shells_complete_every_command(shell: str, words: list[str], some: set[str]) -> None:
    line = " ".join(words)
    env = {"_BONOBOFS_COMPLETE": f"complete_{shell}", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    env |= {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    completed = bonobofs(env=env)
    assert completed.stderr == ""
    assert some <= set(completed.stdout.replace('"', " ").replace(":", " ").split())


@pytest.mark.parametrize(
    ("shell", "file"),
    [
        ("bash", ".bash_completions/bonobofs.sh"),
        ("zsh", ".zfunc/_bonobofs"),
        ("fish", ".config/fish/completions/bonobofs.fish"),
    ],
)
def test_completion_is_installed(shell: str, file: str, tmp_path: Path) -> None:
    """--install-completion writes the file of the shell; --show-completion prints the same script."""
    env = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    installed = bonobofs("--install-completion", shell, env=env)
    assert (installed.returncode, installed.stderr) == (0, "")
    script = (tmp_path / file).read_text()
    assert script.strip() == bonobofs("--show-completion", shell, env=env).stdout.strip()


def test_a_bare_checkout_says_how_to_install() -> None:
    """Without the packages, mount.py prints one line with the commands that install them, and no traceback."""
    command = [sys.executable, "-s", "-S", str(ROOT / "mount.py"), "source", "mountpoint"]
    env = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    ran = subprocess.run(command, env=env, cwd=os.sep, capture_output=True, text=True, check=False, timeout=60)
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1
    assert f"pip install {ROOT}" in ran.stderr
