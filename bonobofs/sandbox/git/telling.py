"""What is said, to the byte: names need not be UTF-8."""

from __future__ import annotations

import os
import sys


def say(text: str) -> None:
    """Say something as it is."""
    sys.stdout.buffer.write(os.fsencode(text))
    sys.stdout.flush()


def complain(text: str) -> None:
    """Say something on standard error."""
    sys.stderr.buffer.write(os.fsencode(text))
    sys.stderr.flush()
