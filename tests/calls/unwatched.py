"""A companion to which the kernel gives no watches."""

from __future__ import annotations

from typing import NoReturn

from bonobofs.companion import process
from bonobofs.integrity.watch import UnwatchableError


def _refuse(_: object) -> NoReturn:
    raise UnwatchableError("the limit of watched directories is reached")


process.Watching = _refuse  # type: ignore[assignment, attr-defined]
main = process.main
