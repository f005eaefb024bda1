"""What every subcommand works with, and how git's own failures are said."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.sandbox.boundary import is_cwd_inside_worktree
from bonobofs.sandbox.git.gate import Failure, Gate
from bonobofs.sandbox.git.options import Options, Spec, parse
from bonobofs.sandbox.git.real import RealGit
from bonobofs.sandbox.git.telling import complain

FATAL: Final = 128


class Work(NamedTuple):
    """One subcommand under way."""

    git: RealGit
    gate: Gate
    name: str
    arguments: tuple[str, ...]
    root: str
    """The top of the session's work tree, without symlinks."""

    def options(self, table: Spec) -> Options:
        """What it was given. Unsupported."""
        return parse(table, self.arguments)

    def call(self, name: str, /, **arguments: object) -> dict[str, object]:
        """Ask the gate; {} where it has nothing to tell."""
        answer = self.gate.call(name, **arguments)
        return answer if isinstance(answer, dict) else {"result": answer}


def fatal(message: str, status: int = FATAL) -> int:
    """Say why nothing was done, as git does."""
    complain(f"{'fatal' if status == FATAL else 'error'}: {message}\n")
    return status


def error(message: str) -> int:
    return fatal(message, 1)


def told(failure: Failure, doing: str) -> int:
    """Say a failure of the gate in git's words, where git has some."""
    listed = "".join(f"\t{path}\n" for path in failure.paths)
    if failure.kind == "dirty" and failure.paths:
        advice = "Please commit your changes or stash them before you " + (
            "switch branches." if doing == "checkout" else "merge."
        )
        complain(
            f"error: Your local changes to the following files would be overwritten by {doing}:\n{listed}{advice}\n"
        )
        complain("Aborting\n")
        return 1
    if failure.kind == "untracked" and failure.paths:
        complain(
            f"error: The following untracked working tree files would be overwritten by {doing}:\n{listed}"
            f"Please move or remove them before you {'switch branches' if doing == 'checkout' else doing}.\nAborting\n"
        )
        return 1
    status = 1 if failure.kind in _ERRORS else FATAL
    fatal(str(failure), status)
    complain(listed)
    return status


_ERRORS: Final = frozenset({"dirty", "untracked", "pathspec", "not-merged", "checked-out", "conflict", "nothing"})


def inside(work: Work, words: tuple[str, ...]) -> bool:
    """Whether every path that is named lies in the work tree, once the symlinks on the way to it are followed.

    A pathspec with magic is git's to look at, and one with a wildcard as far as it names a directory.
    """
    return all(
        word.startswith(":") or is_cwd_inside_worktree(_resolved(work.git.base, word), work.root) for word in words
    )


def _resolved(base: Path, word: str) -> str:
    path = os.path.join(base, word).rstrip("/") or "/"
    plain = re.split(r"[*?[\\]", path, maxsplit=1)[0]
    parent, name = os.path.split(plain)
    if plain != path:
        return os.path.realpath(parent)
    # The name itself may be a symlink, which is what is meant, wherever it leads.
    return os.path.realpath(path) if name in (".", "..") else os.path.join(os.path.realpath(parent), name)
