"""What an attack is: a program that tries to get past the policy, what must answer it, and what the record must say.

Every attack has files of its own, so that no refusal is counted as the repetition of another one.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from bonobofs.policy.decision import ERRNO, Code
from tests.support.syscalls import make, opened

IS_ROOT: Final = os.geteuid() == 0
CONTENT: Final = b"what is here must stay here\n" * 4
"""What a closed file holds."""
_LONGEST: Final = 40
"""Characters of a name in the name of its test."""


class Place(NamedTuple):
    """The files of one attack, as paths from the mount's root. All of them are there before it."""

    docs: str
    """A directory in which .md files are admitted that are small and not executable."""
    code: str
    """A directory in which .py files are admitted that are small."""
    closed: str
    """A file that no rule admits, in a directory that no rule admits."""
    hook: str
    """A file below .git, which is protected."""
    source: str = ""
    """The source by its own path: what a program of the same user can reach past the mount."""

    @classmethod
    def of(cls, name: str, source: str = "") -> Place:
        return cls(f"aidlc-docs/{name}", f"tests/{name}", f"src/{name}", f".git/hooks/{name}", source)


Act = Callable[[Place], object]
Below = Callable[[Path, Place], object]


class Attack(NamedTuple):
    """One attack."""

    name: str
    act: Act
    """Raises the OSError with which the attempt failed; whatever else it does is admitted."""
    error: str
    code: Code
    path: str
    """The path that the record must name, with {docs}, {code}, {closed}, {hook} and {name} in it."""
    instead: tuple[Code, str] | None = None
    """What the record may say as well: of a file with several names any one is refused."""
    below: Below | None = None
    """Makes what must be in the source before."""
    spends: tuple[str, ...] = ()
    """Files in its documents that were there before and which the program itself rightly removes."""
    by_kernel: bool = False
    """The kernel sends it later, for no process: the record has none."""

    def target(self, place: Place) -> str:
        """The path that the record must name."""
        return _filled(self.path.replace("{name}", self.name), place)

    def answers(self, place: Place) -> set[tuple[str, Code, str]]:
        """The errors that may come, each with the code and the path on record."""
        found = {(self.error, self.code, self.target(place))}
        if self.instead is not None:
            code, path = self.instead
            found.add((errno.errorcode[ERRNO[code]], code, _filled(path, place)))
        return found


def _filled(path: str, place: Place) -> str:
    for field in Place._fields:
        path = path.replace(f"{{{field}}}", getattr(place, field))
    return path


def on(path: str, act: Callable[[str], object]) -> Act:
    """An attack that does this to one path."""
    return lambda place: act(_filled(path, place))


ATTACKS: Final[dict[str, Attack]] = {}
DRAFT: Final = "{docs}/draft.md"


def attack(code: Code, path: str, *, error: int = 0, root: bool = False, **more: Any) -> Callable[[Act], Act]:
    """Register an attack under the name of its function. `root`: others are stopped by the kernel before."""

    def register(act: Act) -> Act:
        add(act.__name__, act, code, path, error=error, root=root, **more)
        return act

    return register


def add(name: str, act: Act, code: Code, path: str, *, error: int = 0, root: bool = False, **more: Any) -> None:
    """Register an attack."""
    assert name not in ATTACKS, name
    if not root or IS_ROOT:
        ATTACKS[name] = Attack(name, act, errno.errorcode[error or ERRNO[code]], code, path, **more)


def adding(prefix: str, act: Callable[[str, Place], object], code: Code, names: tuple[str, ...], where: str) -> None:
    """Register the same attack for several names; `where` ends in a slash, or is the root."""
    for number, name in enumerate(names):
        add(f"{prefix}_{number}_{_slug(name)}", partial(act, name), code, where + name)


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", ascii(text).lower()).strip("_")[:_LONGEST]


def notes(source: Path, place: Place) -> None:
    """A file that the suffix closes, in a directory that is open."""
    (source / place.docs / "notes.txt").write_bytes(CONTENT)


def linked(source: Path, place: Place) -> None:
    """One inode that is a document under one name and a hook under another."""
    os.link(source / place.hook, source / place.docs / "linked.md")


def draft(place: Place, content: bytes = b"a draft\n", mode: int = 0o644) -> str:
    """A file that the agent may make, made by it."""
    make(draft_path(place), content, mode)
    return draft_path(place)


def draft_path(place: Place) -> str:
    return f"{place.docs}/draft.md"


def module(place: Place, content: bytes = b"pass\n", mode: int = 0o644) -> str:
    """A file that the agent may make where programs are admitted, made by it."""
    path = f"{place.code}/module.py"
    make(path, content, mode)
    return path


def write(path: str | bytes, content: bytes = b"EVIL", flags: int = os.O_WRONLY) -> None:
    with opened(path, flags) as fd:
        os.write(fd, content)
