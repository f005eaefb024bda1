"""Fixtures: mounts of root and of an ordinary user."""

from __future__ import annotations

from tests.support.mount_fixtures import ordinary_place, own_place, place, python_for_everyone

__all__ = ["ordinary_place", "own_place", "place", "python_for_everyone"]
