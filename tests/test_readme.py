"""What the README shows is what happens."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bonobofs.cli.app import tree
from tests.worlds import ROOT, bonobofs, environment

IDENTITY = ["-c", "user.name=alice", "-c", "user.email=alice@example.invalid"]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _plain(text: str, place: Path) -> str:
    """Text without what differs from run to run: place, time, session, and how a shell names its line."""
    text = text.replace(str(place), "/home/alice")
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID", text)
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", "TIME", text)
    return re.sub(r"bash: line \d+: ", "bash: ", text)


def test_the_transcript_happens(tmp_path: Path) -> None:
    """Each command of the first example, run in order, says what stands under it."""
    found = re.search(r"<!-- transcript -->\n```console\n(.*?)```", README, re.DOTALL)
    assert found is not None
    (tmp_path / "project" / "aidlc-docs").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "bonobofs"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m bonobofs "$@"\n')
    program.chmod(0o755)
    env = environment(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    happened = ""
    try:
        for command in re.findall(r"^\$ (.*)$", found[1], re.MULTILINE):
            ran = subprocess.run(
                ["bash", "-c", command],
                cwd=tmp_path,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            happened += f"$ {command}\n{ran.stdout}"
    finally:
        bonobofs("umount", tmp_path / "work")
    assert _plain(happened, tmp_path) == _plain(found[1], tmp_path)


def test_every_command_is_listed() -> None:
    """The table of commands names each that there is."""
    app = tree()
    names = {command.name for command in app.registered_commands}
    names |= {
        f"{group.name} {command.name}"
        for group in app.registered_groups
        for command in (group.typer_instance.registered_commands if group.typer_instance is not None else [])
    }
    assert names
    assert {name for name in names if f"`{name}" not in README} == set()


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lines for Python callers write the file they say."""
    found = re.search(r"```python\n(.*?)```", README, re.DOTALL)
    assert found is not None
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path)
    exec(compile(found[1], "README.md", "exec"), {})
    assert (tmp_path / "project" / "aidlc-docs" / "plan.md").read_text() == "# The plan\n"


def test_the_file_and_git_examples_run_alone_and_show_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example imports what it uses. What the policy refuses raises PermissionError."""
    found = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path)
    for command in ("init -q -b main", "commit -q --allow-empty -m Begin"):
        subprocess.run(["git", *IDENTITY, "-C", "project", *command.split()], check=True)
    for example in found[:3]:
        exec(compile(example, "README.md", "exec"), {})
    log = ["git", "-C", "project", "log", "-1", "--format=%s", "aidlc/gt-17"]
    assert subprocess.run(log, capture_output=True, text=True, check=True).stdout == "[gt-17] Add the plan\n"
    with pytest.raises(PermissionError, match=r"Only \.md files"):
        exec(compile(found[0].replace("plan.md", "plan.sh"), "README.md", "exec"), {})


def test_every_refusal_code_is_in_the_security_document() -> None:
    """SECURITY.md has each code with its errno."""
    import errno

    from bonobofs.policy.decision import ERRNO

    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for code, number in ERRNO.items():
        assert f"| `{code}` | {errno.errorcode[number]} |" in text
