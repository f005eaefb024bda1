"""The modes that a tree may name."""

from __future__ import annotations

from typing import Final

TREE: Final = 0o040000
FILE: Final = 0o100644
EXECUTABLE: Final = 0o100755
SYMLINK: Final = 0o120000
SUBMODULE: Final = 0o160000

FILES: Final = (FILE, EXECUTABLE)
