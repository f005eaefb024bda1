"""Read the pages of the documentation, and run the examples of one page in order.

A comment before a code block says what the test does with it:

    <!-- setup: COMMAND -->      run COMMAND, which the reader does not see (several lines: one command each)
    <!-- file: NAME -->          save the next block as NAME, then treat it as any other block
    <!-- not run: REASON -->     the next block only illustrates

Each other block is run: `console` and `python` in the directory of the page, `toml` as a policy; `json` is parsed. In
the expected output, `…` stands for any text, and a line `…` for any lines.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.world import ROOT, environment

PAGES: Final = sorted(
    [ROOT / "README.md", ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
)
_ANY_LINES: Final = "…"
_COPY_LEFT: Final = "bonobofs: a copy of the mount remains"
"""`umount` says so if a test that runs at the same time has a mount namespace of its own."""
_FENCE: Final = re.compile(
    r"^<!-- (?P<word>setup|file|not run)(?::|\n)(?P<value>.*?)-->"
    r"|^(?P<indent> *)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```$",
    re.DOTALL | re.MULTILINE,
)
_GIT_CONFIG: Final = """\
[user]
    name = operator
    email = operator@example.invalid
[init]
    defaultBranch = main
"""
_STEP: Final = """\
[ -e "$STATE/environment" ] && . "$STATE/environment"
cd "$(cat "$STATE/directory")"
eval "$COMMAND"
status=$?
pwd > "$STATE/directory"
export -p | grep -v ' COMMAND=' > "$STATE/environment"
exit $status
"""


class Block(NamedTuple):
    """One code block of a page, or the commands of one `setup` comment."""

    language: str
    text: str
    file: str | None = None
    is_run: bool = True


def blocks(page: str) -> list[Block]:
    """The blocks of a page in order; `setup` comments have the language `setup`."""
    found: list[Block] = []
    file: str | None = None
    is_run = True
    for match in _FENCE.finditer(page):
        if match["word"] == "file":
            file = match["value"].strip()
        elif match["word"] == "not run":
            is_run = False
        elif match["word"] == "setup":
            found.append(Block("setup", match["value"].strip()))
        else:
            text = re.sub(f"^{match['indent']}", "", match["text"], flags=re.MULTILINE)
            found.append(Block(match["language"], text, file, is_run))
            file, is_run = None, True
    return found


def commands(console: str) -> list[tuple[str, list[str]]]:
    """The commands of a console block, each with its expected lines. A line `> …` continues a command."""
    found: list[tuple[str, list[str]]] = []
    for line in console.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line.startswith("> ") and not found[-1][1]:
            found[-1] = (f"{found[-1][0]}\n{line[2:]}", [])
        else:
            found[-1][1].append(line)
    return found


class PageRun:
    """Runs the blocks of one page. `place` is the home directory and the first working directory."""

    def __init__(self, place: Path, bd: Path) -> None:
        self.place = place
        self._state = place.parent / "page-state"
        self._state.mkdir()
        (self._state / "directory").write_text(str(place))
        programs = self._state / "bin"
        programs.mkdir()
        python = f'exec "{sys.executable}" "$@"\n'
        for name, line in {
            "bonobofs": f'exec "{sys.executable}" -m bonobofs "$@"\n',
            "python": python,
            "python3": python,
        }.items():
            (programs / name).write_text(f"#!/bin/sh\n{line}")
            (programs / name).chmod(0o755)
        (programs / "bd").symlink_to(bd)
        (place / ".gitconfig").write_text(_GIT_CONFIG)
        self._environment = environment(
            HOME=str(place), PATH=f"{programs}:{os.environ['PATH']}", STATE=str(self._state), BONOBOFS_BD=str(bd)
        )
        for name in ("BONOBOFS_HOME", "XDG_STATE_HOME"):
            self._environment.pop(name, None)

    def run(self, block: Block) -> str:
        """Run one block.

        Returns: what differs from the page, or "".
        """
        if block.file is not None:
            (self.place / block.file).write_text(block.text)
        if not block.is_run:
            return ""
        if block.language == "setup":
            for command in block.text.splitlines():
                status, output = self.step(command)
                if status != 0:
                    return f"setup: {command}\n{output}"
            return ""
        if block.language == "console":
            return "".join(self._compare(command, lines) for command, lines in commands(block.text))
        if block.language == "python":
            return self._succeeds([sys.executable, "-c", block.text])
        if block.language == "toml":
            file = self._state / "policy.toml"
            file.write_text(block.text)
            check = [sys.executable, "-m", "bonobofs", "policy"]
            return self._succeeds([*check, "check", str(file)]) or self._succeeds([*check, "test", str(file)])
        if block.language == "json":
            for line in block.text.splitlines():
                json.loads(line)
            return ""
        return f"a block of the language {block.language!r} needs the comment `not run`:\n{block.text}"

    def step(self, command: str) -> tuple[int, str]:
        """Run one command line in bash, where the last one ended, with what that one exported."""
        result = subprocess.run(
            ["bash", "-c", _STEP],
            env={**self._environment, "COMMAND": command},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
            timeout=60,
        )
        return result.returncode, result.stdout

    def _succeeds(self, command: list[str]) -> str:
        directory = (self._state / "directory").read_text().strip()
        result = subprocess.run(
            command, cwd=directory, env=self._environment, capture_output=True, text=True, check=False, timeout=60
        )
        return "" if result.returncode == 0 else f"exit {result.returncode}: {result.stdout}{result.stderr}"

    def _compare(self, command: str, expected: list[str]) -> str:
        _, output = self.step(command)
        lines = [self._plain(line) for line in output.splitlines() if not line.startswith(_COPY_LEFT)]
        wanted = [self._plain(line) for line in expected]
        if _matches(wanted, lines):
            return ""
        return f"$ {command}\n" + "".join(f"- {line}\n" for line in wanted) + "".join(f"+ {line}\n" for line in lines)

    def _plain(self, line: str) -> str:
        """The line without what differs from run to run: place, time, session, how bash names its line."""
        line = line.replace(str(self.place), "/home/alice").rstrip()
        line = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UUID", line)
        line = re.sub(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)?", "TIME", line)
        return re.sub(r"bash: line \d+: ", "bash: ", line)


def _matches(wanted: list[str], lines: list[str]) -> bool:
    if not wanted:
        return not lines
    if wanted[0] == _ANY_LINES:
        return any(_matches(wanted[1:], lines[start:]) for start in range(len(lines) + 1))
    pattern = ".*".join(re.escape(part) for part in wanted[0].split(_ANY_LINES))
    return bool(lines) and re.fullmatch(pattern, lines[0]) is not None and _matches(wanted[1:], lines[1:])
