"""The Python API: FileGuard, FileTools, GitGuard and BeadsGuard apply the policy and the audit log of the mount."""

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

_LAZY: Final = {
    "BeadsGuard": "bonobofs.beads.beads_guard",
    "GitGuard": "bonobofs.git.git_guard",
    "GitStatus": "bonobofs.git.git_guard",
    "MergeResult": "bonobofs.git.git_guard",
}


def __getattr__(name: str) -> object:
    """Import a guard that needs libgit2 or the database when it is first used."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(name)
