"""Guarded workspaces for tests. After every test its record must verify."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.verify import TrailStatus, verify_trail
from bonobofs.guards import FileGuard
from bonobofs.session import OpenSession, open_session
from tests.support.world import ROOT

Opened = Callable[..., "Guarded"]
"""opened(policy=…, agent=…, role=…, workspace=…) opens a session; at the end of the test it is closed and verified.

`policy` is the text of a policy; None is the packaged default.
"""
Program = Callable[..., str]


class Guarded:
    """A file guard and what it stands on."""

    def __init__(self, session: OpenSession) -> None:
        self.session = session
        self.files = FileGuard(session)
        self.root = Path(session.session.source)

    @property
    def trail(self) -> Path:
        return self.session.guard.trail.path

    def entries(self) -> list[AuditEntry]:
        """All that the record holds of this session, as another process would read it."""
        return [AuditEntry.from_line(line) for line in self.trail.read_bytes().splitlines()]

    def of(self, path: str) -> list[AuditEntry]:
        return [entry for entry in self.entries() if entry.path == path]

    def alerts(self) -> list[AuditEntry]:
        return [entry for entry in self.entries() if entry.kind == "alert"]

    def names(self) -> list[str]:
        """Everything in the workspace, however hidden."""
        return sorted(str(path.relative_to(self.root)) for path in self.root.rglob("*"))


@pytest.fixture
def opened(home: Path, kept_database: None, source: Path, tmp_path: Path) -> Iterator[Opened]:
    made: list[Guarded] = []
    with ExitStack() as stack:

        def open_one(
            *, policy: str | None = None, agent: str = "alice", role: str | None = None, workspace: Path = source
        ) -> Guarded:
            file = None
            if policy is not None:
                file = tmp_path / f"policy-{len(made)}.toml"
                file.write_text(policy, encoding="utf-8")
            session = stack.enter_context(open_session(workspace, agent=agent, role=role, policy=file))
            made.append(Guarded(session))
            return made[-1]

        yield open_one
    for each in made:
        report = verify_trail(each.trail, each.trail.with_suffix(".head"), session=each.session.session.session)
        assert (report.findings, report.unfinished, report.status) == ([], [], TrailStatus.CLOSED)


@pytest.fixture
def alice(opened: Opened) -> Guarded:
    """A guard under the default policy."""
    return opened()


@pytest.fixture
def program(home: Path) -> Program:
    """Run a Python program in a process of its own, where it may take room, rights or life from itself."""

    def run(text: str, *arguments: object, before: tuple[str, ...] = ()) -> str:
        head = "import os, sys\nfrom pathlib import Path\nfrom bonobofs.guards import FileGuard\n"
        head += "from bonobofs.session import open_session\n"
        done = subprocess.run(
            [*before, sys.executable, "-c", head + text, *map(str, arguments)],
            cwd="/",
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run
