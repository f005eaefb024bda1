"""The programs that attack: `python -m tests.attacks.attacker MOUNTPOINT SOURCE` forks one for each name that it reads.

For each it says one line: the process that attacked, and the error with which the attempt failed, or `nothing` where
it went through.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import sys
import traceback

from tests.attacks.attack import ATTACKS, Place

TOOL = "attacker"
FAMILIES = ("attributes", "content", "names", "paths", "staged")
_PR_SET_NAME = 15


def load() -> None:
    """Register every attack."""
    for family in FAMILIES:
        importlib.import_module(f"tests.attacks.programs.{family}")


def _attack(name: str, mountpoint: str, source: str) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_NAME, TOOL.encode(), 0, 0, 0)
    os.chdir(mountpoint)
    try:
        ATTACKS[name].act(Place.of(name, source))
    except OSError as error:
        said = errno.errorcode[error.errno or 0]
    else:
        said = "nothing"
    os.write(1, f"{os.getpid()} {said}\n".encode())


def main() -> None:
    load()
    mountpoint, source = sys.argv[1:]
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                _attack(line.strip(), mountpoint, source)
            except BaseException:  # noqa: BLE001 - whatever it is, the test shows it
                traceback.print_exc()
                os.write(1, b"0 broken\n")
            finally:
                os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
