"""Read from a mount, as a program that loads little: each mount waits for it."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

SECONDS_TO_ANSWER = 20


def read_mount(mountpoint: bytes) -> str:
    """Open one file of the mount and list its root. Return "" if both work, else the error.

    The kernel learns from the first open and the first listing that it need not send OPEN. Without them, a file that is
    created first would be followed by a RELEASE that the server does not expect.
    """
    try:
        os.close(os.open(os.path.join(mountpoint, b".bonobofs", b"policy.md"), os.O_RDONLY | os.O_CLOEXEC))
        with os.scandir(mountpoint) as entries:
            next(entries, None)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def main() -> NoReturn:
    """Wait until standard input ends, then read the mount MOUNTPOINT; print the error and exit with 1 if it fails."""
    os.read(0, 1)
    signal.alarm(SECONDS_TO_ANSWER)
    failure = read_mount(os.fsencode(sys.argv[1]))
    os.write(2, os.fsencode(failure))
    os._exit(1 if failure else 0)  # the end of the interpreter takes longer than the reads
