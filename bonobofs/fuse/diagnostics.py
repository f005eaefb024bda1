"""The log of the server: lines on standard error, in which repetitions are counted.

Logging never fails, fills the disk or opens a file by its path: the path may lead into the mount.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from types import TracebackType


class Diagnostics:
    """Writes each line once, and the number of its repetitions at the next `count`."""

    def __init__(self) -> None:
        self._repeated: dict[str, int] = {}

    def log(self, text: str) -> None:
        """Write a line, unless it was written since the last `count`."""
        if text in self._repeated:
            self._repeated[text] += 1
        else:
            self._repeated[text] = 0
            _write(text)

    def failed(self, action: str, error: Exception) -> None:
        """Write the action that failed, the error, and its traceback in one line."""
        self.log(f"{action} failed: {error!r} at {_places(error.__traceback__)}")

    def count(self) -> None:
        """Write and reset the numbers of repetitions. Called about once a second."""
        repeated, self._repeated = self._repeated, {}
        for text, times in repeated.items():
            if times:
                _write(f"{times} times more: {text}")


def _write(text: str) -> None:
    line = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n"
    # A full disk must not end the mount. sys.stderr would keep the line and fail again when the process ends.
    with contextlib.suppress(OSError):
        os.write(2, line.encode("utf-8", "backslashreplace"))


def _places(traceback: TracebackType | None) -> str:
    # The traceback module would open the source files.
    frames = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append(f"{Path(code.co_filename).name}:{traceback.tb_lineno} {code.co_name}")
        traceback = traceback.tb_next
    return " > ".join(frames)
