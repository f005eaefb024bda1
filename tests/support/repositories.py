"""Real repositories, made with the git command line."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ENVIRONMENT = {
    "PATH": os.environ["PATH"],
    "LC_ALL": "C",
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    # In the background it would pack and prune while something else of the test looks on.
    "GIT_CONFIG_COUNT": "1",
    "GIT_CONFIG_KEY_0": "gc.auto",
    "GIT_CONFIG_VALUE_0": "0",
}


class Repo:
    """A repository with a work tree."""

    def __init__(self, root: Path, name: str = "Olga", email: str = "olga@example.org", **env: str) -> None:
        people = {
            f"GIT_{who}_{key}": value
            for who in ("AUTHOR", "COMMITTER")
            for key, value in (("NAME", name), ("EMAIL", email))
        }
        self.root = root
        self.env = {**ENVIRONMENT, **people, **env}

    def init(self) -> Repo:
        self.root.mkdir(exist_ok=True)
        self.git("init", "-q", "-b", "main")
        return self

    def git(self, *arguments: str, code: int | None = 0, given: str | bytes = b"", **env: str) -> str:
        """Run git, and return its standard output; the test fails if it ends with another status. None: any."""
        done = self.run(*arguments, given=given, **env)
        assert code is None or done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
        return done.stdout.decode(errors="surrogateescape")

    def run_program(self, *command: str, **env: str) -> subprocess.CompletedProcess[bytes]:
        """Run a program here, however it ends."""
        return subprocess.run(
            command, cwd=self.root, env={**self.env, **env}, capture_output=True, check=False, timeout=100
        )

    def run(self, *arguments: str, given: str | bytes = b"", **env: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            ["git", *arguments],
            cwd=self.root,
            env={**self.env, **env},
            input=given.encode() if isinstance(given, str) else given,
            capture_output=True,
            check=False,
            timeout=100,
        )

    def write(self, path: str, content: str | bytes, mode: int = 0o644) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        file.chmod(mode)

    def commit(
        self, message: str = "[gt-1] A change", files: dict[str, str | bytes | None] | None = None, **env: str
    ) -> str:
        """Write or (None) remove files, commit everything, and return the commit."""
        for path, content in (files or {}).items():
            if content is None:
                (self.root / path).unlink()
            else:
                self.write(path, content)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", message, code=0, given=b"", **env)
        return self.id()

    def id(self, name: str = "HEAD") -> str:
        """The object id of a name; "" if there is none."""
        return self.git("rev-parse", "-q", "--verify", name, code=None).strip()

    def object(self, kind: str, content: bytes) -> str:
        """Store an object, however malformed."""
        return self.git("hash-object", "-t", kind, "-w", "--stdin", "--literally", given=content).strip()

    def refs(self) -> dict[str, str]:
        lines = self.git("for-each-ref", "--format=%(refname) %(objectname)").splitlines()
        return dict(line.split(" ") for line in lines)

    def check(self) -> None:
        """The repository is whole, and has no lock or temporary file."""
        self.git("fsck", "--strict", "--no-dangling", "--connectivity-only")
        git = self.root / self.git("rev-parse", "--git-common-dir").strip()
        left = [path.name for path in git.rglob("*") if path.suffix == ".lock" or "bonobofs" in path.name]
        left += [path.name for path in git.rglob("tmp_*")]
        assert left == []
