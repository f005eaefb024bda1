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
EVERY: Final = "*"
"""Every subcommand of git but those of REMOTE."""
REMOTE: Final = ("push", "fetch", "pull", "ls-remote", "clone", "archive", "remote")
"""Subcommands that contact a remote in some form. A role has that form only if its list names the subcommand."""
OTHERS: Final = ("am", "apply", "bisect", "cherry-pick", "clean", "config", "gc", "init", "notes", "rebase", "revert")
BEADS: Final = ("create", "update", "close", "reopen", "epic", "dep", "label", "comment")

FAMILIES: Final = {"tools": TOOLS, "git": (EVERY, *GIT, *OTHERS, *REMOTE), "beads": BEADS}
"""The lists of a role, and the words that each may have."""
