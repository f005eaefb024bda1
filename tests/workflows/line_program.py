"""A program that runs in parallel with the test, and exchanges lines with it."""

from __future__ import annotations

import os
import re
import select
import subprocess
import time
from pathlib import Path
from typing import Final

PATIENCE: Final = 30.0
"""Seconds after which what was waited for counts as not coming."""


class Beside:
    """A running program; what it says is read line by line."""

    def __init__(self, command: list[str], cwd: Path, env: dict[str, str]) -> None:
        self._process = subprocess.Popen(command, cwd=cwd, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._read = b""

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())
        self._process.stdin.flush()

    def ask(self, line: str) -> str:
        """Tell it a line, and give the line that it answers."""
        self.tell(line)
        return self.until(".*")[0]

    def line(self, seconds: float = PATIENCE) -> str | None:
        """The next line that it says; None when it says none in time, AssertionError when it has ended."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        while b"\n" not in self._read:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._process.stdout], [], [], left)[0]:
                return None
            more = os.read(self._process.stdout.fileno(), 65536)
            assert more, f"{self._process.args!r} ended, and had said {self._read!r}"
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return line.decode()

    def until(self, pattern: str, seconds: float = PATIENCE) -> list[str]:
        """The lines up to the first that matches a regular expression; AssertionError when it does not come in time."""
        said: list[str] = []
        deadline = time.monotonic() + seconds
        while not said or not re.fullmatch(pattern, said[-1]):
            more = self.line(deadline - time.monotonic())
            assert more is not None, f"{pattern!r} did not come, but {said}"
            said.append(more)
        return said

    def close_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def permit(self) -> None:
        """Tell it by the end of its input to end, and wait until it has."""
        self.close_input()
        assert self._process.wait(PATIENCE) == 0

    def end(self) -> None:
        """End it, however far it came."""
        with self._process:
            self._process.kill()
