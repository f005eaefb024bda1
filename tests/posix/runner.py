"""The process that runs the cases of one world: it reads requests from standard input and forks for each.

Started as `python -m tests.posix.runner UID`: it imports all cases, becomes that user, and serves until the input ends.
"""

from __future__ import annotations

import importlib
import os
import pickle
import select
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tests.posix.harness import Case, See, Seen, in_child, refusals, unlike

PATIENCE: Final = 110.0
"""Seconds after which a case counts as hung."""

_HERE: Final = Path(__file__).resolve().parent


class Runner:
    """A process that runs cases below `at`, which is `below` in the source (None: `at` is the source)."""

    def __init__(self, top: Path, at: Path, below: Path | None, uid: int) -> None:
        self._top, self._at, self._below = top, at, below
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "tests.posix.runner", str(uid)],
            cwd=_HERE.parent.parent,
            env={**os.environ, "PYTHONPATH": str(_HERE.parent.parent)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, case: Case) -> Seen:
        """Run one case in its directory; a case that hangs ends the process, and is a failure like any other."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        below = None if self._below is None else self._below / case.name
        request = case.look.__module__, case.look.__name__, self._at / case.name, self._top, below
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
            self._process.kill()
            return Seen([], f"no answer within {PATIENCE:.0f} seconds", [], [])
        seen = pickle.load(self._process.stdout)
        assert isinstance(seen, Seen)
        return seen

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def look(function: Callable[[See], None], at: Path, top: Path, below: Path | None) -> Seen:
    """Run a case in a new directory and tell what it saw."""
    see, failure = See(at, top), ""
    try:
        os.umask(0o022)
        at.mkdir(0o755)
        os.chdir(at)
        function(see)
    except Exception:  # noqa: BLE001 - whatever breaks a case is its failure
        failure = traceback.format_exc()
    os.chdir("/")
    if below is None:
        return Seen(see.sights, failure, [], [])
    return Seen(see.sights, failure, [] if failure else unlike(at, below), refusals(at, top))


def main(uid: int) -> None:
    """Serve requests, one fork each."""
    names = sorted(path.stem for path in _HERE.glob("test_*.py"))
    modules = {module.__name__: module for module in (importlib.import_module(f"tests.posix.{name}") for name in names)}
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if uid != os.geteuid():
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    while True:
        try:
            module, name, at, top, below = pickle.load(requests)
        except EOFError:
            break
        case = getattr(modules[module], name).case
        seen = in_child(look, case.look, at, top, below)
        answers.write(pickle.dumps(seen if isinstance(seen, Seen) else Seen([], f"ended: {seen}", [], [])))
        answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
