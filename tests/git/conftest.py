"""Repositories from which an agent publishes: through the publisher alone, or through a real mount."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from bonobofs.audit.entry import AuditEntry
from bonobofs.git.branch_rules import identity, rules_of
from bonobofs.git.journal import Journal
from bonobofs.git.publication import Published, Publisher, RefUpdate
from bonobofs.git.repository import GitRepository
from bonobofs.git.source_refs import PublishedBranches
from bonobofs.policy.decision import Denied, Refused
from bonobofs.policy.request import Principal
from bonobofs.session import OpenSession, open_session
from bonobofs.state.home import inside_directory, trail_path
from tests.support.repositories import Repo
from tests.support.world import Mounted, World

FREE = 'default = "allow"\nhidden = ["**"]\n'
"""A policy that admits every file."""
GUARDED = (
    FREE
    + '[role.agent]\nwrite = ["**"]\ndeny = ["Cargo.toml", "ci/"]\ngit = ["add", "commit", "branch", "merge", "tag"]\n'
)
FILES: dict[str, str | bytes | None] = {"a.md": "a\n", "docs/b.md": "b\n", "Cargo.toml": "version = 1\n"}


class Direct:
    """A source, an agent's clone of it, and the publisher between them, without a mount."""

    def __init__(self, session: OpenSession, source: Repo, root: Path) -> None:
        self.session = session
        self.source = source
        self.agent = session.guard.agent
        self.repo = agents_clone(source, root, self.agent)
        self.repo.git("switch", "-qc", "aidlc/x")
        self.branches = PublishedBranches(session.home, source.root / ".git", self.agent.id)

    def publish(self, ref: str = "aidlc/x", *, issue: str | None = None, new: str | None = None) -> list[Published]:
        """Publish a branch of the clone as the source has it now, or another object under that name."""
        name = ref if ref.startswith("refs/") else f"refs/heads/{ref}"
        value = self.repo.id(name) if new is None else new
        return self.update([RefUpdate(name, self.source.id(name), value)], issue)

    def update(self, updates: Sequence[RefUpdate], issue: str | None = None) -> list[Published]:
        with tempfile.TemporaryDirectory(dir=self.session.home) as room:
            objects = Path(room, "objects")
            shutil.copytree(self.repo.root / ".git/objects", objects)
            repository = GitRepository(self.source.root / ".git", [objects])
            with closing(Journal(Path(room, "journal.json"))) as journal:
                publisher = Publisher(self.session.guard, repository, self.branches, objects=objects, journal=journal)
                return publisher.publish(updates, issue=issue)

    def refused(self, ref: str = "aidlc/x", *, issue: str | None = None, new: str | None = None) -> Denied:
        """Publish what must be refused: nothing of the source changes, and the record has the refusal."""
        before = self.source.refs()
        with pytest.raises(Refused) as refused:
            self.publish(ref, issue=issue, new=new)
        assert self.source.refs() == before
        shown = self.session.guard.denial_recorder.last[-1][1]
        assert (shown["rule"], shown["code"]) == (refused.value.decision.rule, refused.value.decision.code)
        return refused.value.decision

    @property
    def trail(self) -> Path:
        return trail_path(self.session.home, self.session.session.session)

    def rule(self, ref: str = "aidlc/x", **arguments: Any) -> str:
        return self.refused(ref, **arguments).rule


def agents_clone(source: Repo, root: Path, agent: Principal) -> Repo:
    name, email = identity(agent, rules_of({}))
    repo = Repo(root, name, email)
    root.mkdir()
    repo.git("clone", "-q", str(source.root), str(root))
    return repo


DirectMaker = Callable[..., Direct]


@pytest.fixture
def direct(tmp_path: Path, kept_database: None) -> Iterator[DirectMaker]:
    """direct(policy=…): a source with one commit on main and the agent's clone on aidlc/x; fsck when the test ends."""
    made: list[Direct] = []
    with ExitStack() as stack:

        def make(policy: str = GUARDED, agent: str = "alice", source: Repo | None = None) -> Direct:
            number = len(made)
            if source is None:
                source = Repo(tmp_path / f"source-{number}").init()
                source.commit("[gt-0] The beginning", FILES)
            file = tmp_path / f"policy-{number}.toml"
            file.write_text(policy)
            session = stack.enter_context(open_session(source.root, agent=agent, policy=file))
            made.append(Direct(session, source, tmp_path / f"agent-{number}"))
            return made[-1]

        yield make
    for one in made:
        one.source.check()


class Publishing:
    """A mounted source with the session's own repository."""

    def __init__(self, world: World, source: Repo) -> None:
        self.world = world
        self.source = source
        self.agent = Principal(world.session.agent, world.session.agent_id, world.session.role)
        self.repo = Repo(world.path)
        for key in [key for key in self.repo.env if key.startswith(("GIT_AUTHOR", "GIT_COMMITTER"))]:
            del self.repo.env[key]
        self.git_dir = self.source.root / ".git"
        self.socket = inside_directory(world.home, world.session.session) / "guard.sock"

    def push(self, *refs: str, code: int = 0) -> str:
        """Push to the source, and return what git says on standard error."""
        done = self.repo.run("push", "source", *refs)
        assert done.returncode == code, done.stderr
        return done.stderr.decode()

    def entries(self) -> list[AuditEntry]:
        return [entry for entry in self.world.entries() if entry.guard == "git"]

    def denials(self) -> list[dict[str, Any]]:
        lines = (self.world.path / ".bonobofs/denials.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]


PublishingMaker = Callable[..., Publishing]


@pytest.fixture
def publishing(mounted: Mounted, tmp_path: Path) -> Iterator[PublishingMaker]:
    """publishing(policy=…): a repository with one commit on main, mounted; fsck when the test ends."""
    made: list[Publishing] = []

    def make(policy: str = FREE, source: Repo | None = None, **order: Any) -> Publishing:
        if source is None:
            source = Repo(tmp_path / f"source-{len(made)}").init()
            source.commit("[gt-0] The beginning", FILES)
        made.append(Publishing(mounted(policy=policy, source=source.root, **order), source))
        return made[-1]

    yield make
    for one in made:
        one.source.check()
