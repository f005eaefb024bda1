r"""The issues of one workspace, read and changed through the installed bd.

    beads = Beads(find_beads(source), home, agent)
    with beads.turn() as turn:
        before = turn.everything()
        ...
        changed = turn.close_issue("gt-a1f", leave)

Nothing is believed because bd says so: its exit status 0 has come with nothing stored, and others with everything. So
each change is followed by reading back, and what is stored decides. What is there in full counts as done, whatever bd
said; what is not is a BeadsError that tells whether nothing, a part, or an unknown part of it is stored.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bonobofs.beads import bd_lock
from bonobofs.beads.bd_binary import find_program
from bonobofs.beads.bd_client import Turn
from bonobofs.beads.bd_commands import command
from bonobofs.beads.bd_environment import surroundings
from bonobofs.beads.bd_output import complaint, payload
from bonobofs.beads.bd_runner import Program
from bonobofs.errors import BeadsError, UsageError
from bonobofs.policy.request import Principal
from bonobofs.state.worktree_registry import repository_of

LIMIT: Final = 30.0
"""Seconds for one call of bd; with a thousand issues its slowest takes about one."""
WAIT: Final = 120.0
"""Seconds to wait until others are done with the same `.beads`."""
_STEERING: Final = (".env", "config.yaml", "metadata.json")
"""Files by which bd could be led to another database."""


def find_beads(source: Path, home: Path | None = None) -> Path:
    """As `seek_beads`; BeadsError if there is none."""
    found = seek_beads(source, home)
    if found is None:
        raise BeadsError(f"{source} has no .beads; run `bd init` there")
    return found


def seek_beads(source: Path, home: Path | None = None) -> Path | None:
    """The `.beads` of this directory, without symlinks; BeadsError if agents could write what steers bd.

    A worktree of git has that of its repository's main worktree, as bd has it, though a copy may have been checked out.
    With the state directory, worktrees that were made there are known too.
    """
    source = Path(os.path.realpath(source))
    made = None if home is None else repository_of(home, source)
    main = _main_worktree(source) or made
    for directory in (source,) if main is None else (main, source):
        beads = Path(os.path.realpath(directory / ".beads"))
        if beads.is_dir():
            if beads.is_relative_to(directory) and ".beads" not in beads.relative_to(directory).parts:
                raise BeadsError(f"{directory / '.beads'} leads to {beads}, where agents can write what steers bd")
            return beads
    return None


def _main_worktree(source: Path) -> Path | None:
    """Where the repository of this worktree is at home; None where this is no worktree that the repository knows."""
    link = source / ".git"
    try:
        own = source / link.read_text(encoding="utf-8").strip().removeprefix("gitdir: ")
        known_as = (own / "gitdir").read_text(encoding="utf-8").strip()
        common = Path(os.path.realpath(own / (own / "commondir").read_text(encoding="utf-8").strip()))
        is_known = os.path.samefile(own / known_as, link)
    except (OSError, ValueError):
        return None
    return common.parent if is_known and common.name == ".git" else None


class Beads:
    """bd on one `.beads`, for one agent. May be used by several threads; nothing runs before the first turn."""

    def __init__(
        self,
        beads: Path,
        home: Path,
        agent: Principal,
        *,
        program: Path | None = None,
        limit: float = LIMIT,
        wait: float = WAIT,
    ) -> None:
        """`beads`: from `find_beads`. `program`: None for the one that is found (`find_program`).

        `limit`, `wait`: seconds for one call, and for others to be done. UsageError: the agent has no name.
        """
        if not agent.label.strip():
            raise UsageError("an agent without a name cannot act on issues: bd would take it for somebody else")
        self._beads: Final = beads
        self._home: Final = home
        self._agent: Final = agent
        self._named: Final = program
        self._limit: Final = limit
        self._wait: Final = wait
        self._checked: tuple[int, ...] | None = None
        """Of which `.beads` and program it is known that they are what they should be."""

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Have the issues to oneself, as far as all go through here, across processes.

        BeadsError: bd is missing or not supported, would work elsewhere, or others have been busy for too long.
        """
        path = self._named if self._named is not None else find_program(self._home, self._beads)
        with bd_lock.held(self._home, self._beads, self._wait) as held, surroundings(self._home, self._beads) as around:
            program = Program(path, self._beads, around, self._agent, self._limit)
            identity = self._identity(path)
            if self._checked != identity:
                program.check_version(held)
                self._check_place(program, held)
                self._checked = identity
            turn = Turn(program, held, self._agent.label)
            try:
                yield turn
            finally:
                turn.end()

    def _identity(self, program: Path) -> tuple[int, ...]:
        """Changes when there is another `.beads`, another program, or something else that steers it."""
        if os.path.lexists(self._beads / "redirect"):
            raise BeadsError(f"{self._beads / 'redirect'} leads to other issues; open the session where those are")
        steering = (self._beads / name for name in _STEERING)
        try:
            found = [os.stat(path) for path in (self._beads, program)]
            found += [os.stat(path) for path in steering if os.path.lexists(path)]
        except OSError as error:
            raise BeadsError(f"{error.filename} cannot be used: {error.strerror}") from error
        beads, *others = found
        files = (number for each in others for number in (each.st_dev, each.st_ino, each.st_mtime_ns))
        return beads.st_dev, beads.st_ino, *files

    def _check_place(self, program: Program, held: bd_lock.Lock) -> None:
        """Whether bd works where it is told to: a directory that it does not take it passes over without a word."""
        output = program.run(command("where", self._agent.label), held)
        told = payload(output)
        path = told.get("path") if isinstance(told, dict) else None
        if not isinstance(path, str):
            what = complaint(output) or "it does not say why"
            raise BeadsError(f"bd does not find its issues in {self._beads}: {what}")
        for place in (path, told.get("database_path") or path):
            if not Path(os.path.realpath(place)).is_relative_to(self._beads):
                raise BeadsError(f"bd works in {place} and not in {self._beads}; nothing is asked of it")
