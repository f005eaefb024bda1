"""A program at a terminal, and the person before it."""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import termios
import time
from pathlib import Path
from typing import Final

PATIENCE: Final = 30.0
"""Seconds after which what was waited for counts as not coming."""


class Terminal:
    """A pseudo terminal with a program at its other end, which it controls."""

    def __init__(self, command: list[str], cwd: Path, env: dict[str, str]) -> None:
        self._fd, other = os.openpty()
        try:
            termios.tcsetwinsize(other, (24, 80))
            fcntl.fcntl(self._fd, fcntl.F_SETFL, os.O_NONBLOCK)
            # setsid gives it the terminal as its own: emacs opens /dev/tty.
            self._process = subprocess.Popen(
                ["setsid", "--ctty", *command], cwd=cwd, env=env, stdin=other, stdout=other, stderr=other
            )
        finally:
            os.close(other)
        self._screen = b""

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait(self, text: str) -> None:
        """Until the program has written `text` since the last wait; AssertionError when it does not."""
        wanted, deadline = text.encode(), time.monotonic() + PATIENCE
        while wanted not in self._screen:
            assert self._read(deadline), f"{text!r} did not come, but {self._screen[-500:]!r}"
        self._screen = self._screen.partition(wanted)[2]

    def end(self) -> int:
        """Wait for the program to end by itself: its exit code."""
        deadline = time.monotonic() + PATIENCE
        while self._read(deadline):
            pass
        return self._process.wait(PATIENCE)

    def kill(self) -> None:
        """End the program, however far it came."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.kill()
        os.close(self._fd)

    def _read(self, deadline: float) -> bool:
        """Whether there was more on the screen before the deadline and the program's end."""
        ready, _, _ = select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))
        try:
            more = os.read(self._fd, 65536) if ready else b""
        except OSError:  # no process is left at the other end
            return False
        self._screen += more
        return bool(more)
