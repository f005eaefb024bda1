"""What a role's lists `tools`, `git` and `beads` may name."""

from __future__ import annotations

from typing import Final

TOOLS: Final = ("read_file", "write_file", "list_files", "search_files")
GIT: Final = (
    "add",
    "commit",
    "rm",
    "mv",
    "restore",
    "branch",
    "checkout",
    "switch",
    "merge",
    "stash",
    "reset",
    "tag",
)
BEADS: Final = ("create", "update", "close", "reopen", "epic", "dep", "label", "comment")

FAMILIES: Final = {"tools": TOOLS, "git": GIT, "beads": BEADS}
"""The lists of a role, and the words that each may have."""
