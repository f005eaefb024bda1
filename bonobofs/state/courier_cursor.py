"""How far a courier has carried a trail: a plain value, for those who need no database to name it."""

from __future__ import annotations

from typing import NamedTuple


class Carried(NamedTuple):
    """How far one trail has been carried."""

    place: int = 0
    """Bytes of the trail."""
    seq: int = 0
    """Number of the last entry; 0: none."""
    hash: str = ""
    """Its hash."""
    noted: str = ""
    """The server's moment of the letter with that entry, in its spelling."""
