"""Guards for Python callers: every one asks the same door as the mount, and writes the same record."""

from __future__ import annotations

from bonobofs.guards.answers import ValidationResult
from bonobofs.guards.beads_guard import BeadsGuard
from bonobofs.guards.file_guard import FileGuard
from bonobofs.guards.tools import FileTools

__all__ = ["BeadsGuard", "FileGuard", "FileTools", "ValidationResult"]
