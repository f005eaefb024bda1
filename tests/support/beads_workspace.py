"""Which bd the tests have, and workspaces made by it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.support.world import ROOT

WORLD = ROOT / "tests" / "fakes" / "bd"
"""The program of ours that keeps bd's contract."""
PATIENCE = 300
"""Seconds for one call; the real bd takes half a minute to import a thousand issues, where nothing else runs."""


def find_bd() -> Path:
    """The real bd, where BONOBOFS_BD names one or one is on PATH; else ours."""
    named = os.environ.get("BONOBOFS_BD")
    found = shutil.which(named or "bd")
    assert found is not None or not named, f"BONOBOFS_BD names {named}, which is no program"
    return WORLD if found is None else Path(found).absolute()


class Workspace:
    """A directory with a `.beads` that a person has made there, and bd as that person uses it."""

    def __init__(self, bd: Path, directory: Path, person: Path) -> None:
        self.bd = bd
        self.directory = directory
        self.beads = directory / ".beads"
        self.person = person
        """The person's HOME; bd runs there too, outside of any workspace."""
        person.mkdir(exist_ok=True)
        (person / ".gitconfig").write_text("[user]\n\tname = operator\n[beads]\n\trole = maintainer\n")

    @property
    def environment(self) -> dict[str, str]:
        return {"PATH": os.environ["PATH"], "HOME": str(self.person), "BEADS_DIR": str(self.beads), "LC_ALL": "C.UTF-8"}

    def init(self, prefix: str = "gt") -> Workspace:
        self.directory.mkdir(exist_ok=True)
        done = self.run("init", "--stealth", "--non-interactive", "--quiet", "--prefix", prefix)
        assert done.returncode == 0, done.stderr
        return self

    def run(
        self, *arguments: str | Path, env: dict[str, str | None] | None = None, cwd: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """One call, as it was made; `env` sets variables, and takes away those that are None."""
        started = self.start(*arguments, env=env, cwd=cwd)
        try:
            stdout, stderr = started.communicate(timeout=PATIENCE)
        finally:
            started.kill()
            started.wait()
        return subprocess.CompletedProcess(started.args, started.returncode, stdout, stderr)

    def start(
        self, *arguments: str | Path, env: dict[str, str | None] | None = None, cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a call without waiting for its end, which is the caller's to do."""
        chosen = {key: value for key, value in {**self.environment, **(env or {})}.items() if value is not None}
        return subprocess.Popen(
            [self.bd, *arguments],
            cwd=cwd or self.person,
            env=chosen,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="surrogateescape",
        )

    @property
    def lock(self) -> Path:
        """The file by whose lock bd has its database to itself."""
        (lock,) = (self.beads / "embeddeddolt").glob("*/.dolt/noms/LOCK")
        return lock

    @staticmethod
    def has_open(process: subprocess.Popen[str], path: Path) -> bool:
        """Whether the process has that file open at this moment."""
        for handle in Path(f"/proc/{process.pid}/fd").iterdir():
            try:
                if handle.readlink() == path:
                    return True
            except OSError:
                continue
        return False

    def json(self, *arguments: str | Path) -> Any:
        """What a call that succeeds answers with --json."""
        done = self.run(*arguments, "--json")
        assert done.returncode == 0, (arguments, done.stdout, done.stderr)
        return json.loads(done.stdout)

    def create(self, title: str, *flags: str) -> str:
        """Create an issue and give its id."""
        return str(self.json("create", f"--title={title}", *flags)["id"])

    def issue(self, id_: str) -> dict[str, Any]:
        """The one issue that `show` shows."""
        found: list[dict[str, Any]] = self.json("show", id_)
        return found[0]

    def all_issues(self) -> dict[str, dict[str, Any]]:
        told = self.json("list", "--all", "--include-infra", "--include-gates", "--limit=0")
        return {issue["id"]: issue for issue in told}
