"""Sandboxes for tests: `bonobofs run` as an ordinary user and as root for a user, without a way to a real network."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.support.world import NOBODY, OrdinaryUser

HERE = Path(__file__).parent
POLICY = """\
default = "allow"
hidden = ["**"]
[[rule]]
name = "no text"
paths = ["*.txt"]
refuse = "Text files are not for the agent."
[run]
processes = 300
memory = "400MB"
tmp = "20MB"
"""


class Box:
    """A source and the way to run commands in a sandbox on it. `as_root`: root runs it for the user `nobody`."""

    def __init__(self, user: OrdinaryUser, *, as_root: bool = False) -> None:
        self.user = user
        self.as_root = as_root
        self.network = ["unshare", "--net", "--"]
        """The command that enters the network of the test."""
        self.top = user.directory
        self.source = self.top / "source"
        self.state = self.top / "home"
        self.policy = self.top / "policy.toml"
        self.source.mkdir()
        (self.source / "a.md").write_text("a\n")
        for name in ("attack_programs.py",):
            (self.source / name).write_bytes((HERE / name).read_bytes())
        self.write_policy(POLICY)
        for path in (self.source, *self.source.iterdir()):
            os.chown(path, NOBODY, NOBODY)
        if as_root:
            os.chown(self.top, 0, 0)
            self.top.chmod(0o755)

    def write_policy(self, text: str) -> None:
        self.policy.write_text(text)
        self.policy.chmod(0o644)

    def words(self, *arguments: str | Path) -> list[str]:
        """Return the command line of bonobofs in the network of the test, as the right user."""
        who = [] if self.as_root else ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--"]
        return [*self.network, *who, self.user.python, "-m", "bonobofs", *map(str, arguments)]

    def run_words(self, *command: str | Path, options: tuple[str, ...] = ()) -> list[str]:
        who = ("--user", str(NOBODY)) if self.as_root else ()
        return self.words("run", "--policy", self.policy, *who, *options, self.source, "--", *command)

    @property
    def environment(self) -> dict[str, str]:
        return {
            "BONOBOFS_HOME": str(self.state),
            "HOME": str(self.top),
            "LC_ALL": "C.UTF-8",
            "PATH": os.environ["PATH"],
            "PYTHONPATH": self.user.packages,
        }

    def run(
        self, *command: str | Path, options: tuple[str, ...] = (), env: dict[str, str] | None = None, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the sandbox."""
        settings = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 110, **more}
        return subprocess.run(
            self.run_words(*command, options=options),
            env={**self.environment, **(env or {})},
            cwd=self.source,
            check=False,
            **settings,
        )

    def bonobofs(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command of bonobofs outside of the sandbox."""
        return subprocess.run(
            self.words(*arguments),
            env=self.environment,
            cwd="/",
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def entries(self) -> list[dict[str, Any]]:
        """Return the record of all sessions."""
        told = self.bonobofs("audit", "export", "--format", "jsonl")
        return [json.loads(line) for line in told.stdout.splitlines()]
