"""How one piece of work is done on a bare directory and in a mount, and what it left is compared.

A workflow is a function of a `Place`, which it changes by real programs. It runs twice, on two copies of one project: a
bare one, and one that is mounted under `POLICY`. What it returns must be equal, and so must be what it leaves: names,
content, modes, owners, links and times that programs set. Scratch is left out, and must not have reached the source.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from tests.support import trees
from tests.support.trees import Entry
from tests.support.world import ROOT, Mounted
from tests.workflows.line_program import Beside
from tests.workflows.project import LONG_AGO, lay
from tests.workflows.terminal import Terminal

TEAM: Final = Path(__file__).with_name("team.toml").read_text(encoding="utf-8")
"""What a team that uses Python, Node, Rust and C adds to the default policy."""

DEFAULT: Final = (ROOT / "policy.toml").read_text(encoding="utf-8")
POLICY: Final = DEFAULT + TEAM

SCRATCH: Final = re.compile(
    r"(build|dist|target\w*|\.venv|\.tox|\.nox|\.pnpm-store|node_modules|\.pytest_cache|pytest-cache-files-\w+"
    r"|\.yarn/(cache|install-state\.gz)|(.*/)?__pycache__|(.*/)?[^/]+\.egg-info)(/.*)?"
)
"""Paths of the workflows that are scratch under the default policy, said once more in other words."""

PACKAGES: Final = os.pathsep.join(filter(os.path.isdir, sys.path))
"""PYTHONPATH for a program of the tests' own interpreter."""

PATIENCE: Final = 60.0
"""Seconds that one program may take, unless a test gives another limit."""


class Place:
    """A directory to work in: a bare one, or a mount. Programs start here, with a home elsewhere and little else."""

    def __init__(self, path: Path, home: Path) -> None:
        self.path = path
        self.home = home
        self._started: list[Beside] = []
        self._terminals: list[Terminal] = []

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    @property
    def env(self) -> dict[str, str]:
        """A person's environment, without what the tests' own would lead to."""
        kept = {name: os.environ[name] for name in ("PATH", "CARGO_HOME", "RUSTUP_HOME") if name in os.environ}
        rustup = Path.home() / ".rustup"
        return {
            "CARGO_HOME": str(self.home / ".cargo"),
            **({"RUSTUP_HOME": str(rustup)} if rustup.is_dir() else {}),
            **kept,
            "HOME": str(self.home),
            "LC_ALL": "C.UTF-8",
            "TERM": "vt100",
            "USER": "alice",
        }

    def run(
        self,
        *command: str | Path,
        cwd: str = ".",
        text: str = "",
        code: int = 0,
        env: Mapping[str, str] | None = None,
        seconds: float = PATIENCE,
    ) -> str:
        """What a program said on standard output; AssertionError when it ended otherwise than with `code`."""
        ran = subprocess.run(
            command,
            cwd=self.path / cwd,
            env={**self.env, **(env or {})},
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
        if ran.returncode != code:
            raise AssertionError(f"{command} ended with {ran.returncode}:\n{ran.stdout}{ran.stderr}")
        return self.plain(ran.stdout)

    def start(self, *command: str | Path, env: Mapping[str, str] | None = None) -> Beside:
        """A program that runs in parallel with the test."""
        started = Beside([str(word) for word in command], self.path, {**self.env, **(env or {})})
        self._started.append(started)
        return started

    def terminal(self, *command: str | Path) -> Terminal:
        """A program at a terminal of its own."""
        terminal = Terminal([str(word) for word in command], self.path, self.env)
        self._terminals.append(terminal)
        return terminal

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text, encoding="utf-8")

    def text(self, name: str) -> str:
        return (self.path / name).read_text(encoding="utf-8")

    def names(self, directory: str) -> list[str]:
        return sorted(os.listdir(self.path / directory))

    def plain(self, text: str) -> str:
        """What does not differ by where it was said."""
        return text.replace(str(self.path), "/place")

    def end(self) -> None:
        """End what still runs."""
        for terminal in self._terminals:
            terminal.close()
        for started in self._started:
            started.end()


class Left(NamedTuple):
    """What a workflow left under one name."""

    entry: Entry
    """The time of what was written during the work is 0."""
    same: tuple[str, ...]
    """All names of this file, where it has several."""


def look(root: Path, *, layer: Collection[str] = ()) -> dict[str, Left]:
    """All that lies in `root` outside scratch and `layer`, which are paths."""
    numbers: dict[int, list[str]] = {}
    found = {
        path: entry
        for path, entry in trees.snapshot(root, without=layer).items()
        if path and not SCRATCH.fullmatch(path)
    }
    for path in found:
        numbers.setdefault(os.lstat(root / path).st_ino, []).append(path)
    names = {path: tuple(sorted(paths)) for paths in numbers.values() if len(paths) > 1 for path in paths}
    return {
        path: Left(entry._replace(modified=entry.modified if entry.modified < LONG_AGO else 0), names.get(path, ()))
        for path, entry in found.items()
    }


def _untouchable(source: Path) -> Mapping[str, Entry]:
    """What no work through a mount changes in the source: scratch, and git's own directory."""
    return {
        path: entry
        for path, entry in trees.snapshot(source).items()
        if SCRATCH.fullmatch(path) or ".git" in path.split("/")
    }


def _same(what: str, one: Mapping[str, object], other: Mapping[str, object]) -> None:
    unlike = [path for path in sorted(one.keys() | other.keys()) if one.get(path) != other.get(path)]
    assert not unlike, "\n".join([f"{what}:", *(f"{path}: {one.get(path)} and {other.get(path)}" for path in unlike)])


Work = Callable[[Place], object]


class Workshop:
    """Two copies of a project, one of them to be mounted."""

    def __init__(self, ground: Path, mounted: Mounted) -> None:
        self._ground = ground
        self._mounted = mounted

    def compare(
        self,
        work: Work,
        prepare: Work | None = None,
        *,
        policy: str | Path = POLICY,
        refused: Collection[str] = (),
        layer: Collection[str] = (),
    ) -> None:
        """Do the work twice and compare all but the paths `layer`; `prepare` is done to each copy before.

        `policy` is the text of a policy, or the path or the name of one.

        In the mount nothing may be refused but changes of `refused`, regular expressions of paths.
        """
        bare, source, mountpoint = (self._directory(name) for name in ("bare", "source", "work"))
        for directory in (bare, source):
            lay(directory)
            if prepare is not None:
                self._do(prepare, directory)
        before = _untouchable(source)
        expected = self._do(work, bare)
        world = self._mounted(policy=policy, source=source, mountpoint=mountpoint)
        returned = self._do(work, mountpoint)
        shown = look(mountpoint, layer=layer)
        denied = {entry.path or "" for entry in world.entries() if entry.result == "denied"}
        world.umount()
        left = look(source, layer=layer)
        assert returned == expected, f"on the bare directory {expected}, in the mount {returned}"
        _same("left on the bare directory and in the mount", look(bare, layer=layer), left)
        _same("shown by the mount and left below it", shown, left)
        _same("before and after, where no work may reach", before, _untouchable(source))
        denied = {path for path in denied if not any(re.fullmatch(pattern, path) for pattern in refused)}
        assert not denied, f"refused, but not listed as such: {sorted(denied)}"

    def _directory(self, name: str) -> Path:
        directory = self._ground / name
        directory.mkdir()
        return directory

    def _do(self, work: Work, path: Path) -> object:
        home = self._ground / f"home-{path.name}"
        home.mkdir(exist_ok=True)
        place = Place(path, home)
        try:
            return work(place)
        finally:
            place.end()


def workflow(
    prepare: Work | None = None, *, policy: str = POLICY, refused: Collection[str] = (), layer: Collection[str] = ()
) -> Callable[[Work], Callable[[Workshop], None]]:
    """A test that does the decorated work on a bare directory and in a mount, and compares, as `Workshop.compare`."""

    def decorate(work: Work) -> Callable[[Workshop], None]:
        def test(workshop: Workshop) -> None:
            workshop.compare(work, prepare, policy=policy, refused=refused, layer=layer)

        # Not functools.wraps: pytest would look through it and ask for a fixture `at`.
        test.__name__, test.__doc__, test.__module__ = work.__name__, work.__doc__, work.__module__
        return test

    return decorate
