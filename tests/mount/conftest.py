"""Fixtures: mounts of root and of an ordinary user, and mounts whose kernel requests are recorded."""

from __future__ import annotations

from tests.support.mount_fixtures import commons, ordinary_place, own_place, place, python_for_everyone, traffic

__all__ = ["commons", "ordinary_place", "own_place", "place", "python_for_everyone", "traffic"]
