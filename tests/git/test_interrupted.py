"""An operation that was killed is not forgotten when it cannot be ended at once."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bonobofs.errors import GitError
from tests.git.conftest import FREE, Gate, Repo
from tests.worlds import ROOT

_KILLED = """
import os, signal, sys
from pathlib import Path
from bonobofs.guards.git.gate import GitGate
from bonobofs.session import open_session

def kill(event, arguments):
    if event == "os.rename" and os.fsdecode(arguments[1]).endswith("/.git/index"):
        os.kill(os.getpid(), signal.SIGKILL)

with open_session(Path(sys.argv[1]), agent="bob", policy=Path(sys.argv[2])) as session:
    gate = GitGate(session)
    sys.addaudithook(kill)
    gate.switch("aidlc/other")
"""


def test_a_full_disk_does_not_end_the_mending(repo: Repo, gated: Gate, tmp_path: Path) -> None:
    """Killed between the files and the index, and with no room to go on, a switch is carried on once there is room."""
    repo.git("checkout", "-q", "-b", "aidlc/other")
    repo.commit("Other", docs__plan_md="other\n", more_md="more\n")
    repo.git("checkout", "-q", "-b", "aidlc/work", "main")
    policy = tmp_path / "policy.toml"
    policy.write_text(FREE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", _KILLED, repo.root, policy], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    alice = gated(repo)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(GitError, match="cut short"):
            alice.gate.tag("v1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    alice.gate.tag("v1")
    assert (repo.git("symbolic-ref", "HEAD"), repo.status()) == ("refs/heads/aidlc/other\n", "")
    assert (repo.root / "more.md").read_text() == "more\n"
    alice.check()
