"""Which transport serves a mount: the kernel's own protocol where the system speaks it, else libfuse's."""

from __future__ import annotations

import importlib.util
import platform
import re
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.errors import MountError, UsageError
from bonobofs.system import syscalls

TRANSPORTS: Final = ("auto", "kernel", "portable")
OLDEST_KERNEL: Final = (5, 12)
"""The first Linux whose FUSE, 7.33, has all that the kernel transport needs."""


class Chosen(NamedTuple):
    """A transport; `packages` is where its server finds mfusepy, and `notes` what the operator should know."""

    name: str
    packages: str | None = None
    notes: tuple[str, ...] = ()


def choose(asked: str) -> Chosen:
    """The transport that was asked for, or for `auto` the kernel's where it can be. UsageError, MountError."""
    if asked not in TRANSPORTS:
        raise UsageError(f"there is no transport {asked!r}; use one of {', '.join(TRANSPORTS)}")
    missing = lacks_kernel(platform.system(), platform.release())
    if asked == "kernel" or (asked == "auto" and not missing):
        return Chosen("kernel")
    absent = lacks_portable()
    if absent:
        raise MountError(f"the portable transport {absent}")
    notes = (f"Served by the portable transport, as {missing}.",) if asked == "auto" else ()
    return Chosen("portable", str(_packages()), notes)


def lacks_kernel(name: str, release: str) -> str:
    """Why the kernel transport cannot run on this system; empty where it can."""
    number = re.match(r"(\d+)\.(\d+)", release)
    if name != "Linux" or number is None:
        return f"this is {name} {release} and not Linux"
    if (int(number[1]), int(number[2])) < OLDEST_KERNEL:
        return f"Linux {release} is older than {'.'.join(map(str, OLDEST_KERNEL))}"
    return ""


def lacks_portable() -> str:
    """What the portable transport needs and does not find; empty where it can run."""
    if _packages() is None:
        return "needs the Python package mfusepy; install it: pip install mfusepy"
    if syscalls.libfuse() is None:
        return "needs libfuse 3; install the package fuse3"
    return ""


def _packages() -> Path | None:
    """The directory from which mfusepy can be imported. Nothing is imported here: the server does so, by itself."""
    found = importlib.util.find_spec("mfusepy")
    return None if found is None or found.origin is None else Path(found.origin).resolve().parent
