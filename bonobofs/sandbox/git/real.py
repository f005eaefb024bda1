"""The real git, which reads: it expands what is named, and says things as git says them.

What would write in `.git` is tried in a room of its own (`Room`): a copy of the index, and objects that go beside.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from bonobofs.sandbox.git.starting import QUIET, reading_environment
from bonobofs.sandbox.git.telling import complain, say

_WHOLE: Final = ("-c", "core.splitIndex=false", "-c", "core.untrackedCache=false")
"""An index that is one file."""


class Ran(NamedTuple):
    """How a program ended and what it said, decoded as file names are."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()

    @property
    def names(self) -> list[str]:
        """What was said with a NUL after each."""
        return self.out.split("\0")[:-1]

    def say(self) -> int:
        """Say it on, and give the exit status."""
        say(self.out)
        complain(self.err)
        return self.status


class Room(NamedTuple):
    """Where git may write an index and objects without writing in the repository."""

    environment: Mapping[str, str]


class RealGit:
    """The git binary, as it was called: with the options before the subcommand, in the working directory."""

    def __init__(self, program: str, options: tuple[str, ...]) -> None:
        self._program: Final = program
        self._options: Final = options
        self._top: str | None = None

    def run(self, *arguments: str, room: Room | None = None, given: str | None = None) -> Ran:
        """Run it where it was called, with its options."""
        return self._run((*QUIET, *self._options, *arguments), room, given)

    def at_top(self, *arguments: str, room: Room | None = None, given: str | None = None) -> Ran:
        """Run it at the top of the work tree with no options but our own."""
        return self._run(("-C", self.top, *QUIET, *arguments), room, given)

    def read(self, *arguments: str) -> int:
        """Run it in a room, in our place, and give its exit status."""
        with self.room() as room:
            environment = {**reading_environment(), **room.environment}
            command = [self._program, *QUIET, *self._options, *arguments]
            status = subprocess.run(command, env=environment, check=False).returncode
        return status if status >= 0 else 128 - status

    def show(self, *arguments: str, room: Room | None = None) -> None:
        """Run it at the top, and let it say what it has to say where we do."""
        sys.stdout.flush()
        command = [self._program, "--no-pager", "-C", self.top, *QUIET, *arguments]
        environment = {**reading_environment(), **({} if room is None else room.environment)}
        subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, check=False)

    def differing(self, *arguments: str, what: str = "--name-only", at_top: bool = False) -> list[str]:
        """The paths that differ, or with each what it is that differs. In a room: git would lock the index for it."""
        command = ("diff", what, "-z", "--no-relative", "--no-renames", "--no-ext-diff", *arguments)
        with self.room() as room:
            return (self.at_top(*command, room=room) if at_top else self.run(*command, room=room)).names

    @property
    def top(self) -> str:
        """The top of the work tree; "" where there is none."""
        if self._top is None:
            ran = self.run("rev-parse", "--show-toplevel")
            self._top = ran.out.removesuffix("\n") if ran.status == 0 else ""
        return self._top

    @property
    def prefix(self) -> str:
        """Where git stands below the top: "" or a path that ends in a slash."""
        return self.run("rev-parse", "--show-prefix").out.removesuffix("\n")

    def commit(self, name: str) -> str:
        """The id of the commit that a name stands for; "" where it stands for none."""
        return self._id(f"{name}^{{commit}}")

    def object(self, name: str) -> str:
        """The id of the object that a name stands for; "" where it stands for none."""
        return self._id(name)

    def _id(self, name: str) -> str:
        ran = self.run("rev-parse", "--verify", "--quiet", "--end-of-options", name)
        return ran.out.strip() if ran.status == 0 else ""

    def branch(self) -> str:
        """The branch that is checked out, also one without a commit; "" where none is."""
        ran = self.run("symbolic-ref", "--quiet", "HEAD")
        return ran.out.removesuffix("\n").removeprefix("refs/heads/") if ran.status == 0 else ""

    def said(self, form: str, commit: str = "HEAD") -> str:
        """One commit in a format of git's, in one line."""
        plain = ("--no-patch", "--no-show-signature", "--date=default")
        return self.at_top("show", *plain, f"--format={form}", commit).out.removesuffix("\n")

    def short(self, name: str) -> str:
        """An id as git abbreviates it."""
        return self.at_top("rev-parse", "--short", name).out.strip()

    def full_name(self, name: str) -> str:
        """The full name of the reference that a name stands for; "" where it stands for none."""
        ran = self.run("rev-parse", "--symbolic-full-name", "--verify", "--quiet", "--end-of-options", name)
        return ran.out.removesuffix("\n") if ran.status == 0 else ""

    def staged(self, room: Room | None = None) -> dict[str, str]:
        """What the index holds: mode, id and stage of each path."""
        entries: dict[str, str] = {}
        for line in self.at_top("ls-files", "--stage", "-z", room=room).names:
            what, _, path = line.partition("\t")
            entries[path] = entries.get(path, "") + what
        return entries

    def path(self, name: str) -> Path:
        """Where something of the repository lies."""
        return self.base / self.run("rev-parse", "--git-path", name).out.removesuffix("\n")

    @contextmanager
    def room(self) -> Iterator[Room]:
        """A room for one trial; it is gone afterwards."""
        index, objects = self.path("index"), self.path("objects")
        directory = Path(tempfile.mkdtemp(prefix="bonobofs-git-"))
        try:
            if index.exists():
                # Its time too: by that git tells which files may have changed since without showing it.
                shutil.copy2(index, directory / "index")
            (directory / "objects").mkdir()
            others = [str(objects.resolve()), os.environ.get("GIT_ALTERNATE_OBJECT_DIRECTORIES", "")]
            yield Room(
                {
                    "GIT_INDEX_FILE": str(directory / "index"),
                    "GIT_OBJECT_DIRECTORY": str(directory / "objects"),
                    "GIT_ALTERNATE_OBJECT_DIRECTORIES": ":".join(_quoted(one) for one in others if one),
                }
            )
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    @property
    def base(self) -> Path:
        """Where git stands, once its options have led it there."""
        at = Path.cwd()
        options = iter(self._options)
        for option in options:
            if option == "-C":
                at /= next(options, "")
            elif option == "-c":
                next(options, None)
        return at

    def _run(self, arguments: tuple[str, ...], room: Room | None, given: str | None) -> Ran:
        ran = subprocess.run(
            [self._program, *(() if room is None else _WHOLE), *arguments],
            env={**reading_environment(), **({} if room is None else room.environment)},
            input=None if given is None else os.fsencode(given),
            stdin=subprocess.DEVNULL if given is None else None,
            capture_output=True,
            check=False,
        )
        return Ran(ran.returncode, os.fsdecode(ran.stdout), os.fsdecode(ran.stderr))


def _quoted(path: str) -> str:
    """A path in a list that is separated by colons, as git reads it."""
    if ":" not in path and not path.startswith('"'):
        return path
    return '"' + path.replace("\\", "\\\\").replace('"', '\\"') + '"'
