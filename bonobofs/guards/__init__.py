"""Guards for Python callers: every one asks the same door as the mount, and writes the same record."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bonobofs.guards.answers import ValidationResult
from bonobofs.guards.beads_guard import BeadsGuard
from bonobofs.guards.file_guard import FileGuard
from bonobofs.guards.tools import FileTools

if TYPE_CHECKING:
    from bonobofs.guards.git_guard import GitGuard, GitStatus, MergeResult

__all__ = ["BeadsGuard", "FileGuard", "FileTools", "GitGuard", "GitStatus", "MergeResult", "ValidationResult"]


def __getattr__(name: str) -> object:
    """What needs libgit2 is loaded when it is asked for."""
    if name in ("GitGuard", "GitStatus", "MergeResult"):
        from bonobofs.guards import git_guard  # noqa: PLC0415 - see above

        return getattr(git_guard, name)
    raise AttributeError(name)
