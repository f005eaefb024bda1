"""The session's git beside the real one: the same command lines, in the mount and in a bare directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sandbox.lines import STORIES, make_repository, run_sh, state, told
from tests.worlds import Mounted

POLICY = 'default = "allow"\nhidden = ["**"]\n[[protect]]\npaths = [".git/"]\n'


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", STORIES)
def test_git_is_what_it_is_elsewhere(name: str, mounted: Mounted, source: Path, tmp_path: Path) -> None:
    """Each line says the same on standard output, ends with the same status, and leaves the same repository."""
    make_repository(source)
    bare = tmp_path / "bare"
    make_repository(bare)
    world = mounted(policy=POLICY)
    programs = world.home / "sessions" / world.session.session / "inside" / "bin"
    for step in STORIES[name]:
        run_sh(step.before, bare)
        run_sh(step.before, world.path, programs)
        assert state(world.source) == state(bare), f"before {step.line}"
        real = run_sh(step.line, bare / step.at)
        ours = run_sh(step.line, world.path / step.at, programs)
        said = f"{step.line}\n{ours.stderr}\n{real.stderr}"
        assert (told(ours.stdout), ours.returncode) == (told(real.stdout), real.returncode), said
        assert state(world.source) == state(bare), said
    assert run_sh("git fsck --strict", source).returncode == 0
