"""Fixtures of the neighbours: a mount with its traffic."""

from __future__ import annotations

from tests.support.mount_fixtures import traffic

__all__ = ["traffic"]
