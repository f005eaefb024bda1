"""A mount over a repository, and a clone that publishes through it, as a session repository does."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bonobofs.audit.record import AuditEntry
from bonobofs.git.branch_rules import identity, rules_of
from bonobofs.request import Agent
from bonobofs.state.home import inside_directory
from tests.git_session.repositories import Repo
from tests.worlds import ROOT, Mounted, World

FREE = 'default = "allow"\nhidden = ["**"]\n'
CLIENT = ROOT / "bonobofs" / "git" / "client.py"


class Publishing:
    """A mounted source, and the agent's repository beside it."""

    def __init__(self, world: World, source: Repo, root: Path) -> None:
        self.world = world
        self.source = source
        session = world.session
        agent = Agent(session.agent, session.agent_id, session.role)
        self.agent = agent
        name, email = identity(agent, rules_of({}))
        self.socket = inside_directory(world.home, session.session) / "guard.sock"
        self.repo = Repo(root, name, email)
        root.mkdir()
        self.repo.git("clone", "-q", str(source.root), str(root))
        client = [sys.executable, "-I", "-S", "-E", str(CLIENT), str(self.socket)]
        command = " ".join(client)
        self.client = client
        self.repo.git("remote", "add", "source", "bonobofs:source")
        self.repo.git("config", "remote.source.receivepack", f"{command} receive-pack")
        self.repo.git("config", "remote.source.uploadpack", f"{command} upload-pack")
        ssh = root / ".git" / "local-shell"
        ssh.write_text('#!/bin/sh\nshift\nexec sh -c "$*"\n')
        ssh.chmod(0o755)

    def publish(self) -> tuple[int, str]:
        """Publish what HEAD names, as the hooks do: the status, and the line."""
        done = self.repo.run_program(*self.client, "publish")
        return done.returncode, done.stderr.decode()

    def push(self, *refs: str, code: int | None = None) -> str:
        """Push to the source, and return what git says."""
        done = self.repo.run("push", "source", *refs)
        assert code is None or done.returncode == code, done.stderr
        return done.stderr.decode()

    def entries(self) -> list[AuditEntry]:
        return [entry for entry in self.world.entries() if entry.guard == "git"]

    def denials(self) -> list[dict[str, object]]:
        lines = (self.world.path / ".bonobofs" / "denials.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]


Published = Callable[..., Publishing]


@pytest.fixture
def publishing(mounted: Mounted, tmp_path: Path) -> Iterator[Published]:
    """publishing(policy=…, role=…): a repository with one commit on main, mounted; checked when the test ends."""
    made: list[Publishing] = []

    def make(policy: str = FREE, files: dict[str, str | bytes | None] | None = None, **order: object) -> Publishing:
        source = Repo(tmp_path / f"source-{len(made)}").init()
        source.commit("[gt-0] The beginning", {"a.md": "a\n", "docs/b.md": "b\n", **(files or {})})
        world = mounted(policy=policy, source=source.root, **order)
        made.append(Publishing(world, source, tmp_path / f"agent-{len(made)}"))
        return made[-1]

    yield make
    for one in made:
        one.source.check()
