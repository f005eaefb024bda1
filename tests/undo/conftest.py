"""Fixtures: mounts of root and of an ordinary user, and of repositories."""

from __future__ import annotations

from tests.git.conftest import publishing
from tests.support.mount_fixtures import ordinary_place, own_place, place, python_for_everyone

__all__ = ["ordinary_place", "own_place", "place", "publishing", "python_for_everyone"]
