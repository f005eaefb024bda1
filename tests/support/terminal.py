"""Run a command of bonobofs on a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

from tests.support.commands import environment


def on_terminal(*arguments: str, cwd: Path = Path("/"), **variables: str) -> str:
    """Run a command whose standard streams are a terminal; return what the terminal gets."""
    mine, theirs = pty.openpty()
    with os.fdopen(mine, "rb", buffering=0) as terminal:
        command = subprocess.Popen(
            [sys.executable, "-m", "bonobofs", *arguments],
            cwd=cwd,
            env=environment(TERM="xterm", **variables),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
        )
        os.close(theirs)
        shown = b""
        try:
            while piece := terminal.read(65536):
                shown += piece
        except OSError:
            pass  # EIO: the last program has closed the terminal
        assert command.wait(60) == 0, shown
    return shown.decode().replace("\r\n", "\n")
