"""Paths of a source that git tracks below [[scratch]]: the rules decide there, so that no edit ends with the session.

They are found when a session begins and when its policy is loaded anew, and reach the server as plain data.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.errors import GitError
from bonobofs.policy.compiled import Policy, Tracked
from bonobofs.state.home import read_document, session_directory, write_document

MOST: Final = 10_000
"""Paths that a session keeps one by one. Of a repository with more, whole directories count as tracked."""
_FILE: Final = "tracked.json"


class Found(NamedTuple):
    """What git tracks below [[scratch]]."""

    paths: list[str]
    """From the root of the source; one that ends in a slash stands for all that lies below it, too."""
    notes: tuple[str, ...] = ()
    """What the operator should know, a sentence each."""


def find_tracked(home: Path, source: Path, policy: Policy) -> Found:
    """The tracked paths of a source. Where its repository cannot be read, all that the source has there counts."""
    if not policy.scratch:
        return Found([])
    root = next((place for place in (source, *source.parents) if os.path.lexists(place / ".git")), None)
    if root is None:
        return Found([])
    prefix = "" if root == source else f"{source.relative_to(root)}/"

    def wanted(path: str) -> bool:
        return path.startswith(prefix) and policy.is_scratch(path[len(prefix) :].split("/"))

    try:
        found = import_module("bonobofs.git.checkout").tracked_paths(root, home, wanted)
    except GitError as error:
        note = (
            f"Git could not be asked which files it tracks ({error}); so the rules decide, in this session, about all "
            "that the source has at scratch paths now."
        )
        return Found(compact(_standing(source, policy)), (note,))
    return Found(compact(path[len(prefix) :] for path in found))


def _standing(source: Path, policy: Policy) -> list[str]:
    """What the source has at scratch paths: of a directory the path, with a slash, and nothing below it."""
    found: list[str] = []
    waiting = [""]
    while waiting:
        above = waiting.pop()
        try:
            entries = list(os.scandir(source / above))
        except OSError:
            continue  # who may not list it now is shown nothing of it in the session
        for entry in entries:
            path = above + entry.name
            directory = entry.is_dir(follow_symlinks=False)
            if policy.is_scratch(path.split("/")):
                found.append(f"{path}/" if directory else path)
            elif directory and entry.name != ".git":
                waiting.append(f"{path}/")
    return found


def compact(paths: Iterable[str], most: int = MOST) -> list[str]:
    """At most so many paths that cover these: of too many, those that lie deepest give way to the directory above."""
    kept = set(paths)
    depth = max((path.rstrip("/").count("/") for path in kept), default=0)
    while len(kept) > most and depth:
        kept = {
            path if path.rstrip("/").count("/") < depth else f"{path.rstrip('/').rpartition('/')[0]}/" for path in kept
        }
        depth -= 1
    return sorted(kept)


def keep(home: Path, session: str, paths: list[str]) -> None:
    """Keep them in the session's directory, for `why` and `policy show`."""
    write_document(session_directory(home, session) / _FILE, {"paths": paths})


def of_session(home: Path, session: str) -> Tracked | None:
    """Those that were kept; None where there are none. StateError."""
    path = session_directory(home, session) / _FILE
    paths = read_document(path)["paths"] if path.exists() else []
    return Tracked(paths) if paths else None
