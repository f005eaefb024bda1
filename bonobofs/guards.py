"""The Python API: FileGuard, FileTools, GitGuard and BeadsGuard apply the policy and the audit log of the mount.

IntegrityCheck and validate_result_json judge afterwards what an agent did and hands over.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from bonobofs.files.file_guard import FileGuard
from bonobofs.files.file_tools import FileTools
from bonobofs.files.results import ValidationResult

if TYPE_CHECKING:
    from bonobofs.beads.beads_guard import BeadsGuard
    from bonobofs.git.git_guard import GitGuard, GitStatus, MergeResult
    from bonobofs.integrity.integrity_check import IntegrityCheck
    from bonobofs.integrity.result_document import validate_result_json

__all__ = [
    "BeadsGuard",
    "FileGuard",
    "FileTools",
    "GitGuard",
    "GitStatus",
    "IntegrityCheck",
    "MergeResult",
    "ValidationResult",
    "validate_result_json",
]

_LAZY: Final = {
    "BeadsGuard": "bonobofs.beads.beads_guard",
    "GitGuard": "bonobofs.git.git_guard",
    "GitStatus": "bonobofs.git.git_guard",
    "IntegrityCheck": "bonobofs.integrity.integrity_check",
    "MergeResult": "bonobofs.git.git_guard",
    "validate_result_json": "bonobofs.integrity.result_document",
}


def __getattr__(name: str) -> object:
    """Import a guard that needs libgit2 or the database when it is first used."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(name)
