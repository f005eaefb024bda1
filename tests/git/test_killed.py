"""A kill between any two steps leaves what was before or what is after, once the next operation has run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.git.conftest import FREE, Repo
from tests.worlds import ROOT


@pytest.mark.parametrize(
    "operation", ["commit", "merge", "switch", "reset", "stash", "unstash", "move", "rename", "delete"]
)
@pytest.mark.timeout(300)
def test_a_kill_between_any_two_steps_is_mended(tmp_path: Path, operation: str) -> None:
    """Killed before each of its steps in turn, an operation is carried on or undone by the next, and fsck is clean."""
    directory = tmp_path / "world"
    root = directory / "repo"
    root.mkdir(parents=True)
    (directory / "policy.toml").write_text(FREE)
    repo = Repo(root)
    repo.git("init", "-q", "-b", "main")
    repo.commit("Base", a_txt="a\n" * 5, gone_txt="gone\n", dir__deep_txt="deep\n")
    repo.git("checkout", "-q", "-b", "aidlc/other")
    repo.commit("Other", dir__deep_txt=None, other__one_txt="1\n", gone_txt="still\n")
    repo.git("pack-refs", "--all")
    repo.git("checkout", "-q", "-b", "aidlc/work", "main")
    repo.commit("Work", work_txt="work\n")
    if operation in ("commit", "stash", "unstash"):
        repo.write("a.txt", "changed\n")
        repo.write("new/file.txt", "new\n")
        (root / "gone.txt").unlink()
        repo.write("work.txt", "staged\n")
        repo.git("add", "work.txt")
    if operation == "unstash":
        (root / "new/file.txt").unlink()
        repo.git("stash", "push", "-q")
        repo.write("work.txt", "more\n")
        repo.git("stash", "push", "-q")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("killed.py"), directory, operation],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 8
