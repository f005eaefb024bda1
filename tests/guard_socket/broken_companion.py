"""A companion whose installation lacks the module of the calls."""

from __future__ import annotations

import sys

from bonobofs.companion.main import main

__all__ = ["main"]

sys.modules["bonobofs.companion.calls"] = None  # type: ignore[assignment]
