"""Repositories with an open session and its GitGuard. `fsck` must be content with each after every test."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from bonobofs.audit.entry import AuditEntry
from bonobofs.audit.verify import TrailStatus, verify_trail
from bonobofs.guards import GitGuard
from bonobofs.session import OpenSession, open_session

FREE = 'default = "allow"\nhidden = ["**"]\n[[protect]]\npaths = ["**/.git/"]\n'
"""A policy that admits every file."""

ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    # In the background it would pack and prune while something else of the test looks on.
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "gc.auto",
    "GIT_CONFIG_VALUE_0": "0",
    "GIT_AUTHOR_NAME": "Olga",
    "GIT_AUTHOR_EMAIL": "olga@example.org",
    "GIT_COMMITTER_NAME": "Olga",
    "GIT_COMMITTER_EMAIL": "olga@example.org",
    "GIT_AUTHOR_DATE": "1700000000 +0100",
    "GIT_COMMITTER_DATE": "1700000000 +0100",
}


class Repo:
    """A repository with a working tree, as an operator has it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def git(self, *arguments: str, code: int = 0, given: str | None = None, **env: str) -> str:
        """Run git here, and give what it printed; the test fails when it ends with another code."""
        done = self.run(*arguments, given=given, **env)
        assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def run(self, *arguments: str, given: str | None = None, **env: str) -> subprocess.CompletedProcess[str]:
        """Run git here, however it ends."""
        return subprocess.run(
            ["git", *arguments],
            cwd=self.root,
            env={**ENVIRONMENT, **env},
            input=given,
            stdin=subprocess.DEVNULL if given is None else None,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
            timeout=60,
        )

    def write(self, path: str, content: str | bytes, *, mode: int | None = None) -> Path:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        if mode is not None:
            file.chmod(mode)
        return file

    def commit(self, message: str = "A commit", **files: str | None) -> str:
        """Commit everything; keys name files by __ for a slash and _ for a dot."""
        for key, content in files.items():
            path = key.replace("__", "/").replace("_", ".")
            if content is None:
                (self.root / path).unlink()
            else:
                self.write(path, content)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message)
        return self.head()

    def head(self, name: str = "HEAD") -> str:
        return self.git("rev-parse", name).strip()

    def tree(self, name: str = "HEAD") -> str:
        return self.git("rev-parse", f"{name}^{{tree}}").strip()

    def status(self) -> str:
        return self.git("status", "--porcelain=v1", "--untracked-files=all")

    def staged(self) -> str:
        return self.git("ls-files", "--stage")

    def files(self) -> dict[str, tuple[int, bytes]]:
        """Everything in the working tree, with mode and content."""
        found = {}
        for path in sorted(self.root.rglob("*")):
            name = str(path.relative_to(self.root))
            if name.split("/", maxsplit=1)[0] == ".git" or (path.is_dir() and not path.is_symlink()):
                continue
            if path.is_symlink():
                found[name] = (0o120000, os.fsencode(os.readlink(path)))
            else:
                found[name] = (path.stat().st_mode & 0o111, path.read_bytes())
        return found

    def check(self) -> None:
        """The repository is whole, and nothing of ours is left in it."""
        self.git("fsck", "--strict", "--no-dangling")
        left = [path for path in (self.root / ".git").rglob("*") if "bonobofs" in path.name]
        locks = list((self.root / ".git").rglob("*.lock"))
        assert (left, locks) == ([], [])

    def copy(self, root: Path) -> Repo:
        shutil.copytree(self.root, root, symlinks=True)
        return Repo(root)


class Gated(Repo):
    """A repository with a session on it."""

    def __init__(self, root: Path, session: OpenSession) -> None:
        super().__init__(root)
        self.session = session
        self.guard = GitGuard(session)

    def entries(self) -> list[AuditEntry]:
        trail = self.session.guard.trail.path
        return [AuditEntry.from_line(line) for line in trail.read_bytes().splitlines()]

    def of(self, operation: str) -> list[AuditEntry]:
        return [entry for entry in self.entries() if entry.operation == operation and entry.kind != "alert"]


Gate = Callable[..., Gated]
"""gated(repo, policy=…, agent=…, role=…) opens a session on a repository; at the test's end its record must hold."""


@pytest.fixture
def repo(tmp_path: Path) -> Repo:
    """A repository on main with one commit, of docs/plan.md."""
    root = tmp_path / "source"
    root.mkdir()
    made = Repo(root)
    made.git("init", "-q", "-b", "main")
    made.commit("The first", docs__plan_md="The plan\n")
    return made


@pytest.fixture
def gated(home: Path, kept_database: None, tmp_path: Path) -> Iterator[Gate]:
    made: list[Gated] = []
    with ExitStack() as stack:

        def open_one(repo: Repo, *, policy: str = FREE, agent: str = "alice", role: str | None = None) -> Gated:
            file = tmp_path / f"policy-{len(made)}.toml"
            file.write_text(policy, encoding="utf-8")
            session = stack.enter_context(open_session(repo.root, agent=agent, role=role, policy=file))
            made.append(Gated(repo.root, session))
            return made[-1]

        yield open_one
    for each in made:
        trail = each.session.guard.trail.path
        report = verify_trail(trail, trail.with_suffix(".head"), session=each.session.session.session)
        assert (report.findings, report.unfinished, report.status) == ([], [], TrailStatus.CLOSED)
    assert not list((home / "git").glob("guard-*")), "a private directory was left"


@pytest.fixture
def alice(repo: Repo, gated: Gate) -> Gated:
    """A session on `repo`, on the branch aidlc/work."""
    repo.git("checkout", "-q", "-b", "aidlc/work")
    return gated(repo)
