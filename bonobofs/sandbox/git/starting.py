"""The real git as it is started: what it is told in the environment, and before its own arguments."""

from __future__ import annotations

import os
from typing import Final

from bonobofs.sandbox.git.telling import complain

QUIET: Final = ("-c", "core.fsmonitor=false")
"""No monitor is asked or started: it would write in `.git`, and the mount is no place that it can watch."""
_REPOSITORY: Final = (
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_COMMON_DIR",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_NAMESPACE",
    "GIT_REPLACE_REF_BASE",
    "GIT_SHALLOW_FILE",
    "GIT_GRAFT_FILE",
    "GIT_EXEC_PATH",
    "GIT_ATTR_SOURCE",
)


LOCKING: Final = ("describe", "diff", "difftool")
"""Subcommands that lock the index to bring it up to date, whatever is said of optional locks."""


def names_repository() -> bool:
    """Whether the environment leads git to a repository, an index or programs of its own."""
    return any(os.environ.get(name) for name in _REPOSITORY)


def reading_environment() -> dict[str, str]:
    """Ours, and nothing is locked that need not be."""
    return {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}


def become(program: str, words: tuple[str, ...]) -> int:
    """Turn this process into git. Returns, with an exit status, only where that cannot be."""
    try:
        os.execve(program, [program, *QUIET, *words], reading_environment())
    except OSError as error:
        complain(f"git: {program}: {error.strerror}\n")
        return 1
