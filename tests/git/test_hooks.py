"""Hooks of the repository run in a session, from every hooks path, and publication runs after them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.git.test_session_git_dir import git
from tests.support.repositories import Repo
from tests.support.world import Mounted

POLICY = 'default = "allow"\nhidden = ["**"]\n[git]\nmessage_pattern = "."\n'
NOTE = '#!/bin/sh\necho "{}" "$@" >> hooks.log\n'


def _write(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for name in ("pre-commit", "commit-msg", "post-commit", "post-checkout"):
        (directory / name).write_text(NOTE.format(name) + ("exit 3\n" if name == "post-commit" else ""))
        (directory / name).chmod(0o755)


def copied(repo: Repo) -> None:
    _write(repo.root / ".git/hooks")


def linked(repo: Repo) -> None:
    _write(repo.root / "scripts")
    for path in (repo.root / "scripts").iterdir():
        (repo.root / ".git/hooks" / path.name).symlink_to(f"../../scripts/{path.name}")


def relative(repo: Repo) -> None:
    """As husky sets it."""
    _write(repo.root / ".husky/_")
    repo.git("config", "core.hooksPath", ".husky/_")


def absolute(repo: Repo) -> None:
    """As `bd init` sets it."""
    _write(repo.root / "tools/hooks")
    repo.git("config", "core.hooksPath", str(repo.root / "tools/hooks"))


def outside(repo: Repo) -> None:
    _write(repo.root.parent / "all-hooks")
    repo.git("config", "core.hooksPath", str(repo.root.parent / "all-hooks"))


@pytest.mark.parametrize("place", [copied, linked, relative, absolute, outside])
def test_own_hooks_run_and_the_branch_is_published(
    mounted: Mounted, source: Path, place: Callable[[Repo], None]
) -> None:
    """A hook of the repository that fails after a commit does not stop the publication of that commit."""
    repo = Repo(source).init()
    repo.commit("first", {"README.md": "one\n", ".gitignore": "hooks.log\n"})
    place(repo)
    world = mounted(policy=POLICY, source=source)
    git(world.path, "switch", "-q", "-c", "aidlc/hooks")
    said = git(world.path, "commit", "-q", "--allow-empty", "-m", "two")
    names = [line.split()[0] for line in (world.path / "hooks.log").read_text().splitlines()]
    assert names == ["post-checkout", "pre-commit", "commit-msg", "post-commit"]
    assert "published aidlc/hooks (1 commit)" in said
    assert repo.git("log", "-1", "--format=%s", "aidlc/hooks").strip() == "two"


def test_a_failing_hook_stops_the_commit(mounted: Mounted, source: Path) -> None:
    repo = Repo(source).init()
    repo.commit("first", {"README.md": "one\n"})
    hook = source / ".git/hooks/pre-commit"
    hook.write_text("#!/bin/sh\necho no; exit 1\n")
    hook.chmod(0o755)
    world = mounted(policy=POLICY, source=source)
    git(world.path, "switch", "-q", "-c", "aidlc/hooks")
    assert git(world.path, "commit", "--allow-empty", "-m", "two", code=1) == "no\n"
