"""What goes wrong in the serving process, for the people who maintain it: lines on standard error.

Nothing here may fail, fill a disk or touch a file by its path: the code itself may lie in the mount.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from types import TracebackType


class Diagnostics:
    """A log in which what repeats is counted: each line at once the first time, its repetitions at the next `count`."""

    def __init__(self) -> None:
        self._repeated: dict[str, int] = {}

    def say(self, text: str) -> None:
        """Write one line, unless it was written since the last `count`."""
        if text in self._repeated:
            self._repeated[text] += 1
        else:
            self._repeated[text] = 0
            _write(text)

    def failed(self, what: str, error: Exception) -> None:
        """Write what failed, and where."""
        self.say(f"{what} failed: {error!r} at {_places(error.__traceback__)}")

    def count(self) -> None:
        """Write how often lines were left out, and begin anew. Called about once a second."""
        repeated, self._repeated = self._repeated, {}
        for text, times in repeated.items():
            if times:
                _write(f"{times} times more: {text}")


def _write(text: str) -> None:
    line = f"{time.strftime('%Y-%m-%dT%H:%M:%S')} {text}\n"
    # A log that cannot be written is no reason to end the mount. What sys.stderr could not write it would keep, and try
    # again when the process ends, which would then have failed.
    with contextlib.suppress(OSError):
        os.write(2, line.encode("utf-8", "backslashreplace"))


def _places(at: TracebackType | None) -> str:
    # By hand: the traceback module looks at the source files.
    places = []
    while at is not None:
        code = at.tb_frame.f_code
        places.append(f"{Path(code.co_filename).name}:{at.tb_lineno} {code.co_name}")
        at = at.tb_next
    return " > ".join(places)
