"""Fixtures for bd and what stands on it: a real bd where there is one, else the program of ours that is like it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.verify import TrailStatus, verify_trail
from bonobofs.beads import IssueStore, find_beads
from bonobofs.guards import BeadsGuard
from bonobofs.policy.decision import Permit
from bonobofs.policy.request import Principal
from bonobofs.session import OpenSession, open_session
from tests.fakes.faulty_bd import Faulty
from tests.support.beads_workspace import WORLD, Workspace, find_bd

ALICE = Principal("alice", "0b5c1f2a-7f53-4f37-8e1e-1a2b3c4d5e6f", "agent")


@pytest.fixture(scope="session")
def bd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program. Ours is started by the interpreter of the tests, as another one may be slow to find."""
    found = find_bd()
    if found != WORLD:
        return found
    launcher = tmp_path_factory.mktemp("bin") / "bd"
    launcher.write_text(f"#!{sys.executable} -S\nimport runpy\nrunpy.run_path({str(WORLD)!r}, run_name='__main__')\n")
    launcher.chmod(0o755)
    return launcher


@pytest.fixture
def beads_workspace(bd: Path, source: Path, tmp_path: Path) -> Workspace:
    """`source`, with a `.beads` whose ids begin with gt."""
    return Workspace(bd, source, tmp_path / "person").init()


@pytest.fixture
def permit() -> Permit:
    """Leave to make a change; what it rests on is not the client's concern."""
    return Permit("test")


@pytest.fixture
def beads(beads_workspace: Workspace, home: Path) -> IssueStore:
    """The client, as alice's."""
    return IssueStore(find_beads(beads_workspace.directory), home, ALICE, program=beads_workspace.bd)


class Guarded:
    """The gate of one agent, and what it stands on."""

    def __init__(self, session: OpenSession, bd: IssueStore | None) -> None:
        self.session = session
        self.issues = BeadsGuard(session, bd)

    @property
    def trail(self) -> Path:
        return self.session.guard.trail.path

    def entries(self) -> list[AuditEntry]:
        """All that the record holds of this session, as another process would read it."""
        return [AuditEntry.from_line(line) for line in self.trail.read_bytes().splitlines()]

    def calls(self) -> list[AuditEntry]:
        """One entry for each call: not the alerts, and how a change ended stands with its intent."""
        return [entry for entry in self.entries() if entry.kind in ("intent", "event") and entry.guard == "beads"]


Opened = Callable[..., Guarded]
"""opened(agent, role=…, policy=…) opens a session of that agent; at the end of the test it is closed and verified."""


@pytest.fixture
def opened(beads_workspace: Workspace, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    monkeypatch.setenv("BONOBOFS_BD", str(beads_workspace.bd))
    made: list[Guarded] = []
    with ExitStack() as stack:

        def open_one(
            agent: str = "alice", *, role: str | None = None, policy: str | None = None, beads: IssueStore | None = None
        ) -> Guarded:
            file = None
            if policy is not None:
                file = tmp_path / f"policy-{len(made)}.toml"
                file.write_text(policy, encoding="utf-8")
            session = open_session(beads_workspace.directory, agent=agent, role=role, policy=file)
            made.append(Guarded(stack.enter_context(session), beads))
            return made[-1]

        yield open_one
    for each in made:
        report = verify_trail(each.trail, each.trail.with_suffix(".head"), session=each.session.session.session)
        assert (report.findings, report.unfinished, report.status) == ([], [], TrailStatus.CLOSED)


@pytest.fixture
def faulty(bd: Path, tmp_path: Path) -> Faulty:
    """A bd that fails as the test requests."""
    return Faulty(bd, tmp_path / "faulty")
