"""The role lists `tools`, `git` and `beads`, the word that each operation needs, and the issue conventions of [beads].

An operation of a gate is not a change of one path. The role alone decides it, and the engine judges each file that it
changes as a part of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from bonobofs.policy.request import Operation

TOOLS: Final = ("read_file", "write_file", "list_files", "search_files", "undo")
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
"""Every subcommand of git except those of REMOTE."""
REMOTE: Final = ("push", "fetch", "pull", "ls-remote", "clone", "archive", "remote")
"""Subcommands that can contact a remote. A role may run one only if its list names it."""
OTHERS: Final = ("am", "apply", "bisect", "cherry-pick", "clean", "config", "gc", "init", "notes", "rebase", "revert")
BEADS: Final = ("create", "update", "close", "reopen", "epic", "dep", "label", "comment")

FAMILIES: Final = {"tools": TOOLS, "git": (EVERY, *GIT, *OTHERS, *REMOTE), "beads": BEADS}
"""The lists of a role, and the words that each can have."""


class Call(NamedTuple):
    """The list that an operation needs, and the words of which it needs one. Without words no role may call it."""

    family: str
    words: tuple[str, ...]


WRITING: Final = Operation.WRITE_FILE
"""The only tool that is also a change of a path. `Context.tool` marks the call of the tool."""

OF_A_GATE: Final[dict[Operation, Call]] = {
    Operation.READ_FILE: Call("tools", ("read_file",)),
    Operation.LIST_FILES: Call("tools", ("list_files",)),
    Operation.SEARCH_FILES: Call("tools", ("search_files",)),
    Operation.UNDO: Call("tools", ("undo",)),
    Operation.ADD: Call("git", ("add",)),
    Operation.COMMIT: Call("git", ("commit",)),
    Operation.RM: Call("git", ("rm",)),
    Operation.MV: Call("git", ("mv",)),
    Operation.RESTORE: Call("git", ("restore",)),
    Operation.CREATE_BRANCH: Call("git", ("branch",)),
    Operation.DELETE_BRANCH: Call("git", ("branch",)),
    Operation.CHECKOUT_BRANCH: Call("git", ("checkout", "switch")),
    Operation.MERGE: Call("git", ("merge",)),
    Operation.STASH: Call("git", ("stash",)),
    Operation.RESET: Call("git", ("reset",)),
    Operation.TAG: Call("git", ("tag",)),
    Operation.CREATE_WORKTREE: Call("git", ()),
    Operation.REMOVE_WORKTREE: Call("git", ()),
    Operation.PUBLISH: Call("git", ("commit", "branch", "merge", "reset", "tag")),
    Operation.CREATE_ISSUE: Call("beads", ("create",)),
    Operation.CREATE_EPIC: Call("beads", ("epic",)),
    Operation.UPDATE_ISSUE: Call("beads", ("update",)),
    Operation.CLOSE_ISSUE: Call("beads", ("close",)),
    Operation.REOPEN_ISSUE: Call("beads", ("reopen",)),
    Operation.ADD_DEPENDENCY: Call("beads", ("dep",)),
    Operation.REMOVE_DEPENDENCY: Call("beads", ("dep",)),
    Operation.LABEL_ISSUE: Call("beads", ("label",)),
    Operation.COMMENT_ISSUE: Call("beads", ("comment",)),
    Operation.CALL: Call("socket", ()),
}
"""Operations that the role's lists alone decide."""

CALLS: Final[dict[Operation, Call]] = {**OF_A_GATE, WRITING: Call("tools", ("write_file",))}

BUILT_IN: Final = {
    "tools": TOOLS,
    "git": (EVERY,),
    "beads": ("create", "update", "close", "dep", "label", "comment"),
}
"""The lists of the built-in role."""


TYPES: Final = ("task", "epic", "bug", "feature", "chore", "decision", "message")
LABEL_PREFIXES: Final = ("phase", "unit", "stage", "type")
HUMAN: Final = "human"


class Conventions(NamedTuple):
    """The issue conventions of a policy."""

    types: tuple[str, ...] = TYPES
    label_prefixes: tuple[str, ...] = LABEL_PREFIXES
    human: str = HUMAN
    """The assignee of messages."""


def conventions(document: Mapping[str, Any]) -> Conventions:
    """Return the conventions of a policy document. A missing key has the default value."""
    table = document.get("beads", {})
    return Conventions(
        tuple(table.get("types", TYPES)),
        tuple(table.get("label_prefixes", LABEL_PREFIXES)),
        table.get("human", HUMAN),
    )
