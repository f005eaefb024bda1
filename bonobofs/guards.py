"""Guards for Python callers: every one asks the same door as the mount, and writes the same record."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from bonobofs.files.file_guard import FileGuard
from bonobofs.files.file_tools import FileTools
from bonobofs.files.results import ValidationResult

if TYPE_CHECKING:
    from bonobofs.beads.beads_guard import BeadsGuard
    from bonobofs.git.git_guard import GitGuard, GitStatus, MergeResult

__all__ = ["BeadsGuard", "FileGuard", "FileTools", "GitGuard", "GitStatus", "MergeResult", "ValidationResult"]

_LATER: Final = {
    "BeadsGuard": "bonobofs.beads.beads_guard",
    "GitGuard": "bonobofs.git.git_guard",
    "GitStatus": "bonobofs.git.git_guard",
    "MergeResult": "bonobofs.git.git_guard",
}


def __getattr__(name: str) -> object:
    """What needs libgit2, or the database, is loaded when it is asked for."""
    if name in _LATER:
        return getattr(import_module(_LATER[name]), name)
    raise AttributeError(name)
