"""A companion that may watch 30 directories."""

from __future__ import annotations

from functools import partial

from bonobofs.companion import main as process
from bonobofs.companion.change_forwarder import ChangeForwarder

BUDGET = 30
process.ChangeForwarder = partial(ChangeForwarder, budget=BUDGET)  # type: ignore[attr-defined,assignment]
main = process.main
