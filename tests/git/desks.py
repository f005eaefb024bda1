"""A mounted repository of which the agent may write the notes alone, and the git of its session."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from bonobofs.ipc.client import call
from tests.support.repositories import ENVIRONMENT, Repo
from tests.support.world import World

NOTES = """
default = "deny"
[[rule]]
name = "notes"
paths = ["docs/**", "README.md"]
suffixes = [".md"]
[[keep]]
paths = ["README.md"]
[git]
branch_prefix = "aidlc/"
message_pattern = ""
[role.worker]
write = ["**"]
git = ["add", "commit", "rm", "mv", "restore"]
"""
LARGE = b"".join(b"%07d\n" % number for number in range(400_000))


def make_source(root: Path) -> Repo:
    """A repository whose `main` has changed files that the agent may not write since `aidlc/x` was made.

    The branch `aidlc/x` is checked out.
    """
    repo = Repo(root).init()
    first: dict[str, str | bytes | None] = {"docs/a.md": "one\n", "README.md": "r1\n", "Cargo.toml": "v1\n"}
    repo.write("ci/old.yml", "c1\n")
    (root / "link").symlink_to("Cargo.toml")
    repo.commit("[gt-1] First", first)
    repo.git("branch", "aidlc/x")
    (root / "link").unlink()
    (root / "link").symlink_to("docs")
    repo.write("run.sh", "#!/bin/sh\n", 0o755)
    repo.write("large.bin", LARGE)
    second: dict[str, str | bytes | None] = {
        "Cargo.toml": "v2\n",
        "README.md": "r2\n",
        "ci/old.yml": None,
        "ci/new.yml": "c2\n",
        "docs/b.md": "b\n",
    }
    repo.commit("[gt-1] Second", second)
    repo.git("switch", "-q", "aidlc/x")
    return repo


class Desk:
    """A mount, and the git of its session."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.inside = world.home / "sessions" / world.session.session / "inside"
        self.env = {**ENVIRONMENT, "PATH": f"{self.inside / 'bin'}:{os.environ['PATH']}", "HOME": str(world.home)}

    def run(self, *words: str, at: str | Path = ".", given: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """Run the session's git, however it ends."""
        return subprocess.run(
            ["git", *words],
            cwd=self.world.path / at,
            env={**self.env, **env},
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )

    def git(self, *words: str, code: int = 0, given: str = "", **env: str) -> str:
        """Run the session's git and return its standard output."""
        done = self.run(*words, given=given, **env)
        assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def refused(self, *words: str, **env: str) -> dict[str, Any]:
        """The refusal of a command that ends with 77: the first line that it prints on standard error as JSON."""
        done = self.run(*words, **env)
        assert done.returncode == 77, (words, done.returncode, done.stdout, done.stderr)
        document: dict[str, Any] = json.loads(next(line for line in done.stderr.splitlines() if line[:1] == "{"))
        assert document["cleo_error"] is True
        assert document["allowed"] is False
        return document

    def call(self, name: str, **arguments: Any) -> Any:
        return call(self.inside, name, **arguments)

    def blob(self, content: bytes) -> str:
        """Store content in the repository of the session."""
        done = subprocess.run(
            ["git", "hash-object", "-w", "--stdin"],
            cwd=self.world.path,
            env=self.env,
            input=content,
            capture_output=True,
            check=True,
        )
        return done.stdout.decode().strip()
